"""The recipes in legs: the model's own outputs, draft blocks, a joint version and a tuned lens, on a tiny model."""

import copy
import json
import shutil
from dataclasses import replace
from itertools import islice

import pytest
import torch
import transformers as hf
from peft import PeftModel

import eelib
from eelib.common.errors import InputError
from eelib.models.lens_adapters import DRAFT_FILE, load_draft
from eelib.tracing.decode import greedy_decode
from recipes import own_outputs, smollm2
from recipes.own_outputs import Prompts, batches, file_of, outputs_of, read_texts
from recipes.smollm2 import BLOCK, FEATURES, JOINT, OUTPUTS, accepted
from recipes.tuned_lens import SMOLLM2_LENS

TEMPLATE = "{% for m in messages %}user {{ m['content'] }} {% endfor %}assistant"


@pytest.fixture(scope="module")
def start(folder_of, tmp_path_factory):
    """A tiny llama with room for the prompts, whose tokenizer has a chat template."""
    folder = shutil.copytree(folder_of("llama"), tmp_path_factory.mktemp("start") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template, tokenizer.model_max_length = TEMPLATE, 2048
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def own(corpora, start, tmp_path_factory):
    """(the tiny model, the folder of works with its outputs)."""
    work = tmp_path_factory.mktemp("works")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_outputs, "CHUNK", 20)
        patch.setattr(own_outputs, "AT_ONCE", (8, 8))
        patch.setattr(own_outputs, "LONGEST", 12)
        replace(OUTPUTS, start=str(start), chunks=2, dtype="float32").run(corpora, work, work / OUTPUTS.name, "cpu")
    return eelib.load_model(str(start), device="cpu"), work


def test_outputs_are_greedy_and_say_what_else_was_likely(own, corpora, monkeypatch):
    model, work = own
    texts, prompts = read_texts(file_of(work / OUTPUTS.name, 1)), Prompts(corpora)
    assert [text.number for text in texts] == list(range(20, 40))
    exact = copy.deepcopy(model.network).double()
    for text in texts:
        assert text.ids[: text.start].tolist() == prompts.encoded(model, text.number)
        (plain,) = greedy_decode(model, [text.ids[: text.start].tolist()], 12)
        assert text.output.tolist() == plain == text.top[text.start - 1 :, 0].tolist()
        with torch.no_grad():
            likely = exact(text.ids[None]).logits[0, :-1].log_softmax(-1)
        torch.testing.assert_close(text.likely[:, 0].double(), likely.amax(1), atol=5e-3, rtol=2e-3)
        torch.testing.assert_close(text.likely.double(), likely.gather(1, text.top), atol=5e-3, rtol=2e-3)
    monkeypatch.setattr(own_outputs, "AT_ONCE", (3, 3))
    monkeypatch.setattr(own_outputs, "LONGEST", 12)
    for one, other in zip(outputs_of(model, prompts, range(20, 40)), texts):  # whatever they are decoded with
        assert torch.equal(one.ids, other.ids)


def test_own_texts_go_on_from_a_place_and_new_outputs_come_before_the_next_epoch(own, tmp_path):
    outputs = own[1] / OUTPUTS.name
    whole = list(islice(batches(outputs, 300, None), 100))
    seen = [text.number for _, batch in whole for text in batch]
    assert sorted(seen[:40]) == list(range(40)) == sorted(seen[40:80])  # each once an epoch
    for at in (3, 11):
        later = list(islice(batches(outputs, 300, whole[at][0]), 5))
        assert [[t.number for t in b] for _, b in later] == [[t.number for t in b] for _, b in whole[at + 1 : at + 6]]
    shutil.copy(file_of(outputs, 0), file_of(tmp_path, 0))
    ended = next(place for place, _ in batches(tmp_path, 300, None) if place[1] == 1)
    shutil.copy(file_of(outputs, 1), file_of(tmp_path, 1))
    assert {t.number for t in next(batches(tmp_path, 300, ended))[1]} <= set(range(20, 40))


@pytest.mark.parametrize("recipe", [BLOCK, FEATURES], ids=lambda recipe: recipe.kind)
def test_a_draft_block_learns_and_is_read(recipe, own, start, tmp_path, monkeypatch):
    model, work = own
    recipe = replace(recipe, start=str(start), layer=1, head=40, tokens=400, peak=3e-3, steps=12, watch_every=10)
    out = tmp_path / "drafts"
    with pytest.raises(InputError, match="were over before the first step"):
        replace(recipe, minutes=0).run(tmp_path, out, work / recipe.name, "cpu")
    first = recipe.run(tmp_path, out, work / recipe.name, "cpu")
    leg = replace(recipe, steps=60).run(tmp_path, out, work / recipe.name, "cpu")
    losses = [row["loss"] for row in leg["curve"] if "loss" in row]
    assert leg["step"] == 60 and first["step"] == 12 and losses[-1] < losses[0]
    card = json.loads((out / "card.json").read_text())
    assert card["steps"] == 60 and card["quality"]["accepted by position"][0] > 0
    assert card["settings of the last leg"]["peak"] == 3e-3
    monkeypatch.setattr(smollm2, "most_written", None)  # the head is the file's, whatever outputs there are now
    measured = recipe.measure(tmp_path, out, "cpu", work / recipe.name)
    assert card["quality"] == json.loads(json.dumps(measured))  # of what was written
    found = load_draft(model, out / DRAFT_FILE)
    assert found.kind == recipe.kind and len(found.ids) <= 40 and (out / DRAFT_FILE).stat().st_size < 200_000


def test_the_joint_version_is_an_adapter_of_peft(own, start, tmp_path):
    model, work = own
    recipe = replace(JOINT, start=str(start), rank=4, tokens=400, peak=3e-3, steps=4, shown=(1, 2), watch_every=3)
    out, before = tmp_path / "joint", {k: v.clone() for k, v in model.network.state_dict().items()}
    recipe.run(tmp_path, out, work / recipe.name, "cpu")
    leg = replace(recipe, steps=40).run(tmp_path, out, work / recipe.name, "cpu")
    losses = [row["loss"] for row in leg["curve"] if "loss" in row]
    assert leg["step"] == 40 and losses[-1] < losses[0]
    plain = eelib.load_model(str(start), device="cpu").network
    assert all(torch.equal(value, before[key]) for key, value in plain.state_dict().items())
    tuned = PeftModel.from_pretrained(plain, out).merge_and_unload()
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        changed = (tuned(ids).logits - model.network(ids).logits).abs().max()
    assert changed > 1e-3
    assert recipe.quality(model, None, recipe.held_out(work / recipe.name))["last layer keeps"] == 1.0


def test_a_tuned_lens_comes_nearer_to_the_last_layer_than_the_bare_head(own, start, tmp_path):
    """At every inner layer. The card says so of what loads, and of the bare head what float64 says."""
    model, work = own
    recipe = replace(SMOLLM2_LENS, start=str(start), tokens=400, peak=1e-2, steps=40, shown=(1, 2), watch_every=30)
    out = tmp_path / "lens"
    replace(recipe, steps=20).run(tmp_path, out, work / recipe.name, "cpu")
    shutil.rmtree(work / recipe.name)  # a leg goes on from the weights that the one before left
    assert recipe.run(tmp_path, out, work / recipe.name, "cpu")["step"] == 40
    card = json.loads((out / "card.json").read_text())
    found = card["quality"]
    assert [row[0] for row in card["loss_by_step"]] == [10, 20, 30, 40]
    assert found == json.loads(json.dumps(recipe.measure(tmp_path, out, "cpu", work / recipe.name)))
    exact, apart, same = copy.deepcopy(model.network).double(), [], []
    for text in (texts := recipe.held_out(work / recipe.name)):
        with torch.no_grad():
            states = torch.stack(exact(text.ids[None], output_hidden_states=True).hidden_states[1:])[
                :, 0, text.start - 1 : -1
            ]
            states[:-1] = exact.model.norm(states[:-1])
            logs = exact.lm_head(states).log_softmax(-1)
        apart.append((logs[-1].exp() * (logs[-1] - logs[:-1])).sum(-1))
        same.append(logs[:-1].argmax(-1) == logs[-1].argmax(-1))
    for name, values in (("KL from", apart), ("agrees with", same)):
        bare = found[f"{name} the last layer, bare head, by layer"]
        assert bare == pytest.approx(torch.cat(values, dim=1).double().mean(1).tolist(), abs=2e-3)
        closer = [after - before for after, before in zip(found[f"{name} the last layer, by layer"], bare)]
        assert len(closer) == model.layers - 1 and all(more < 0 if values is apart else more >= 0 for more in closer)
    assert found["tokens"] == sum(len(text.output) for text in texts)


def test_acceptance_by_position_counts_what_follows_right_drafts():
    """Of the first text the second draft of a row is tried after tokens 0 and 2, the third after token 0 and 1."""
    hits = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]).bool()
    # rows start at tokens 0, 2, 3 (their first drafts are right); the second drafts are of tokens 1 and 3
    assert accepted([(None, hits)]) == [0.75, 0.5, 1.0, 1.0]
