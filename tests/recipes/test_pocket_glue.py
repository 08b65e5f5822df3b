"""Classifiers of pocket-bert: equal beginnings, losses by hand, dropout, resuming, and whole runs at a tiny size."""

import gzip
import json
import random
from dataclasses import replace
from itertools import islice

import pytest
import torch
from bert_made import SHORT, TINY, resumed
from transformers import AutoTokenizer

import eelib
from eelib.tasks.classification import LABELS
from recipes import pocket_glue
from recipes.__main__ import RECIPES
from recipes.corpora import SEED
from recipes.loop import MasterOptimizer
from recipes.losses import uniform_weights
from recipes.pocket_bert import SEPARATOR, build
from recipes.pocket_glue import MRPC, SST2, SST2_JOINT, Batch, Row, label_loss, last_alone


def some_rows(seed=0, pair=False):
    rng = random.Random(seed)
    rows = []
    for i in range(5):
        size = rng.randint(3, 9)
        types = [0] * 2 + [1] * (size - 2) if pair else [0] * size
        rows.append(Row([2, *(rng.randrange(5, 60) for _ in range(size - 1))], types, i % 2))
    return rows


def test_begins_are_equal(start):
    """Plain and joint start from the same weights: those of pocket-bert, a pooler and a classifier."""
    models = [pocket_glue.begin(str(start), "sst2") for _ in range(2)]
    one, other = (model.network.state_dict() for model in models)
    assert all(torch.equal(one[name], other[name]) for name in one)
    kept = eelib.load_model(str(start), dtype="bfloat16", device="cpu").network.bert.state_dict()
    assert set(one) - {f"bert.{name}" for name in kept} == {
        f"{name}.{part}" for name in ("bert.pooler.dense", "classifier") for part in ("weight", "bias")
    }
    assert all(torch.equal(one[f"bert.{name}"], value) for name, value in kept.items())
    assert models[0].labels == ["negative", "positive"] and models[0].unembed.reads == "first"


def test_heads_are_no_matrices(start):
    """AdamW has embeddings, norms, biases and the classifier; Muon has the pooler and six matrices of each layer."""
    network = pocket_glue.begin(str(start), "sst2").network
    optimizer = MasterOptimizer(network)
    name_of = {id(moved): name for moved, (name, _) in zip(optimizer.moved, network.named_parameters())}
    parts = (optimizer.inner.muon, optimizer.outer)
    muon, rest = ({name_of[id(p)] for group in part.param_groups for p in group["params"]} for part in parts)
    assert {name for name in rest if name.endswith("weight") and "LayerNorm" not in name} == {"classifier.weight"} | {
        f"bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")
    }
    assert len(muon) == 3 * 6 + 1 and "bert.pooler.dense.weight" in muon


@pytest.mark.parametrize("pair", [False, True])
def test_losses_by_hand(start, pair):
    """Each layer's state at position 0 through pooler and classifier, in float64, one text at a time, no padding."""
    model = pocket_glue.begin(str(start), "sst2")
    model.network.double()
    rows = some_rows(1, pair)
    assert len({len(row.ids) for row in rows}) > 1
    losses = [[] for _ in range(3)]
    for row in rows:
        states = model.network.bert(
            input_ids=torch.tensor([row.ids]), token_type_ids=torch.tensor([row.types]), output_hidden_states=True
        ).hidden_states
        for layer in range(3):
            pooled = torch.tanh(model.network.bert.pooler.dense(states[layer + 1][0, 0]))
            losses[layer].append(-torch.log_softmax(model.network.classifier(pooled), -1)[row.label].item())
    means = [sum(one) / len(one) for one in losses]
    joint, size, *_ = label_loss(model, Batch(0, rows), uniform_weights(3))
    plain, *_ = label_loss(model, Batch(0, rows), last_alone(3))
    assert size == 5 * max(len(row.ids) for row in rows)
    assert joint.item() == pytest.approx(sum(means) / 3, rel=1e-5)
    assert plain.item() == pytest.approx(means[-1], rel=1e-5)


def test_plain_loss_is_the_networks_own(start):
    """In training mode, too: the same dropout, which depends on the batch's number alone."""
    model, rows = pocket_glue.begin(str(start), "sst2"), some_rows(2)
    model.network.float().train()
    loss, other = (label_loss(model, Batch(number, rows), last_alone(3))[0] for number in (4, 5))
    torch.manual_seed(SEED * 10**6 + 4)
    own = model.network(**pocket_glue.inputs_of(model, rows), labels=torch.tensor([row.label for row in rows])).loss
    assert loss.item() == pytest.approx(own.item(), rel=1e-6) != other.item()


def test_joint_of_one_layer_equals_plain(corpora, start, tmp_path, monkeypatch):
    """With a single layer both recipes of a task end in the same weights; with three they do not."""

    def files(base):
        for recipe in (SST2, SST2_JOINT):
            short = replace(recipe, start=str(base), schedule=SHORT)
            short.run(corpora, tmp_path / base.name / recipe.name, tmp_path / f"{base.name} {recipe.name}", "cpu")
            yield (tmp_path / base.name / recipe.name / "model.safetensors").read_bytes()

    shallow = build(**TINY | {"num_hidden_layers": 1})
    shallow.save_pretrained(tmp_path / "shallow")
    AutoTokenizer.from_pretrained(start).save_pretrained(tmp_path / "shallow")
    plain, joint = files(tmp_path / "shallow")
    assert plain == joint
    plain, joint = files(start)
    assert plain != joint


def test_resumed_fine_tuning_equals_uninterrupted(start, tmp_path):
    """Bit for bit, dropout included."""
    models = []

    def make():
        models.append(pocket_glue.begin(str(start), "sst2"))
        return models[-1].network

    def loss(_network, batch):
        return label_loss(models[-1], batch, uniform_weights(3))

    whole, again = resumed(make, lambda at: (Batch(i, some_rows(i)) for i in range(at, 9)), loss, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(whole, again))


def test_batches_of_rows(corpora, start):
    """Each row once an epoch, within the limit, like lengths together; texts beyond the window are left out."""
    model = pocket_glue.begin(str(start), "mrpc")
    rows, beyond = pocket_glue.rows_of(model, corpora, "mrpc", "train")
    assert (len(rows), beyond) == (39, 1) and {row.label for row in rows} == {0, 1}
    assert all(len(row.types) == len(row.ids) and row.types[-1] == 1 and row.ids.count(SEPARATOR) == 2 for row in rows)
    many = rows * 8
    plan = pocket_glue.epoch_batches(many, 0)
    assert plan == pocket_glue.epoch_batches(many, 0) != pocket_glue.epoch_batches(many, 1)
    assert sorted(row for batch in plan for row in batch) == sorted(many)
    for batch in plan:
        assert len(batch) * max(len(row.ids) for row in batch) <= pocket_glue.TOKENS_PER_BATCH
    whole = list(islice(pocket_glue.batches(0, many), 2 * len(plan)))
    assert [batch.number for batch in whole] == list(range(2 * len(plan)))
    assert list(islice(pocket_glue.batches(len(plan) - 1, many), 3)) == whole[len(plan) - 1 : len(plan) + 2]


@pytest.mark.parametrize("recipe, splits", [(SST2_JOINT, ["validation"]), (MRPC, ["validation", "test"])])
def test_recipe_ends_in_a_folder_that_loads(recipe, splits, corpora, start, tmp_path):
    """A classifier with the task's labels in GLUE's order; the card's scores are recomputed from the folder."""
    short = replace(recipe, start=str(start), schedule=SHORT)
    card = short.run(corpora, tmp_path / "out", tmp_path / "work", "cpu")
    assert card == json.loads((tmp_path / "out/card.json").read_text())
    assert card["name"] == recipe.name and card["quality"] == recipe.measure(corpora, tmp_path / "out", "cpu")
    model = eelib.load_model(str(tmp_path / "out"), device="cpu")
    assert (model.kind, model.layers, tuple(model.labels)) == ("classifier", 3, LABELS[recipe.task])
    assert model.network.config.label2id == {label: i for i, label in enumerate(LABELS[recipe.task])}
    assert list(card["quality"]) == [f"GLUE {recipe.task} {split}" for split in splits]
    for quality in card["quality"].values():
        scores = {name: quality[name] for name in quality["majority class"]}
        assert quality["learned"] is all(scores[name] > quality["majority class"][name] for name in scores)
        assert set(scores) == ({"accuracy"} if recipe.task == "sst2" else {"F1", "accuracy"})
        assert quality["items"] == 39 and quality["beyond the window"] == 1


def test_scores_by_hand(start, corpora):
    """The label of each row, asked one at a time."""
    model = pocket_glue.begin(str(start), "sst2")
    rows, _ = pocket_glue.rows_of(model, corpora, "sst2", "validation")
    with torch.no_grad():
        model.network.float().classifier.weight.mul_(100)  # labels that differ
        said = [model.network(input_ids=torch.tensor([row.ids])).logits[0].argmax().item() for row in rows]
    assert pocket_glue.classified(model, rows, batch_size=7) == said
    found = pocket_glue.scored(model, corpora, "sst2", "validation")
    right = sum(label == row.label for label, row in zip(said, rows))
    assert found["accuracy"] == pytest.approx(100 * right / len(rows))
    ones = sum(row.label for row in rows)
    assert found["majority class"] == {"accuracy": pytest.approx(100 * max(ones, len(rows) - ones) / len(rows))}


def test_recipes_are_known():
    """Every task has both, alike but for the weights."""
    for task in ("sst2", "mrpc", "cola", "rte"):
        pair = []
        for name in (f"pocket-bert-{task}", f"pocket-bert-{task}-joint"):
            module, _, at = RECIPES[name].partition(":")
            pair.append(getattr(pocket_glue, at))
            assert module == "pocket_glue" and (pair[-1].name, pair[-1].task) == (name, task)
        plain, joint = pair
        assert plain == replace(joint, name=plain.name, objective=plain.objective, weights=plain.weights)
        assert plain.start == "pocket-bert" and plain.weights(4) == [0, 0, 0, 1] and joint.weights(4) == [0.25] * 4


def test_questions_are_read_from_trec(tmp_path, monkeypatch):
    """Text and the name of the kind, as the project's labelled set `questions` has them."""
    (tmp_path / "classification").mkdir()
    rows = [{"text": f"What is {n} ?", "label": n, "label_text": kind} for n, kind in enumerate(pocket_glue.TREC)]
    (tmp_path / "classification/trec.test.jsonl.gz").write_bytes(
        gzip.compress("\n".join(map(json.dumps, rows)).encode())
    )
    found = pocket_glue.labelled(tmp_path, "questions", "test")
    assert [row["sentence"] for row in found] == [f"What is {n} ?" for n in range(6)]
    assert [row["label"] for row in found] == ["abbreviation", "description", "entity", "person", "place", "number"]
    assert pocket_glue.source("questions") == "TREC" and pocket_glue.source("rte") == "GLUE rte"
