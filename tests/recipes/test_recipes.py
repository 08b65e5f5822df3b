"""The recipes: their names and cards, a tiny end-to-end run of each kind, and how good a model is."""

import gzip
import json
import pkgutil
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers as hf
from planted import write
from safetensors.torch import load_file

import eelib
from eelib.common.files import data_folder
from eelib.models.lora import PREFIX, WEIGHTS
from eelib.tasks.classification import LABELS
from eelib.tasks.structured import structured_prompt
from eelib.tracing.decode import greedy_decode
from recipes import card as cards
from recipes import fine_tuning, minilm, pocket_llama, pocket_t5, quality, smollm2
from recipes.__main__ import RECIPES, main
from recipes.batches import Phase
from recipes.card import hashes
from recipes.fine_tuning import LLAMA_JSON
from recipes.orders import orders
from recipes.texts import SEED, SEEN, WHOLE
from recipes.training import Schedule

NOT_SHIPPED = {"smollm2-135m-instruct-outputs", "pocket-llama-joint"}  # from which others are trained
UNFINISHED = {f"smollm2-135m-instruct-{part}" for part in ("joint", "block", "features", "lens")}  # trained in legs
SHIPPED = sorted({*RECIPES} - NOT_SHIPPED)


def named(name):
    return pkgutil.resolve_name(f"recipes.{RECIPES[name]}")


# Names and cards


def test_every_recipe_has_its_name_and_its_model():
    for name in RECIPES:
        assert (
            callable(named(name).measure) and getattr(named(name), "name", getattr(named(name), "NAME", None)) == name
        )
    assert {folder.name for folder in data_folder("models").iterdir()} == {*SHIPPED}


def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch):
    """What a recipe lacks, in place of a traceback."""
    monkeypatch.setattr(smollm2, "JOINT", replace(smollm2.JOINT, start="no-such-model"))
    folders = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    for more, line in (
        (["pocket-t5"], "git archive 574ee76 data/models/pocket-t5 "),
        (["pocket-t5", "--minutes", "3"], "pocket-t5 is not trained in legs, so it takes no --minutes"),
        (["pocket-llama", "--measure"], "there is no model in"),
        (["smollm2-135m-instruct-joint", "--minutes", "3"], "model 'no-such-model': it could"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*more, "--corpora", str(tmp_path), *folders])
        assert "error: " in (said := capsys.readouterr().err.splitlines()[-1]) and line in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_are_those_of_the_card_and_the_card_says_what_its_recipe_says(name):
    """The weights are what the card measured; none is larger than what the repository may hold."""
    folder, recipe = data_folder("models", name), named(name)
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 1 and hashes(folder) == card["sha256"] and all(file.stat().st_size < 40e6 for file in files)
    assert card["seed"] == SEED and card["recipe"] == f"python -m recipes {name} --corpora DIR" and card["quality"]
    if name == "pocket-tagger":
        assert card["epochs"] == recipe.EPOCHS == len(card["dev_accuracy_by_epoch"])
    elif name not in UNFINISHED:
        assert card["steps"] == (getattr(recipe, "SCHEDULE", None) or recipe.schedule).steps
        origin = {key: getattr(recipe, key) for key in ("start", "objective") if hasattr(recipe, key)}
        origin |= getattr(recipe, "remarks", {}) | getattr(recipe, "REMARKS", {})
        assert {key: card.get(key) for key in origin} == origin
    if isinstance(recipe, fine_tuning.FineTuning):
        assert card["tokens"] <= recipe.schedule.steps * recipe.tokens


# Runs


@pytest.fixture
def short(monkeypatch, few_stories):
    """short(recipe): six steps on all parts of the texts; how good the model is, is not measured."""
    monkeypatch.setattr(cards, "measure", lambda *given: {"measured on": [*given[3]]})

    def of(recipe):
        monkeypatch.setattr(recipe, "SCHEDULE", Schedule(steps=6, peak=1e-3, warmup=1, decay=3))
        monkeypatch.setattr(recipe, "PHASES", [Phase(6, dict.fromkeys(WHOLE, 1.0))])

    return of


def test_pocket_llama(corpora, tiny, tmp_path, monkeypatch, short):
    """From nothing to a folder that loads; the end token is saved."""
    short(pocket_llama)
    monkeypatch.setattr(pocket_llama, "build", tiny["llama"])
    monkeypatch.setattr(pocket_llama, "VOCABULARY", 600)
    monkeypatch.setattr(pocket_llama, "part_batches", partial(pocket_llama.part_batches, most=2048))
    out = tmp_path / "out"
    card = pocket_llama.run(corpora, out, tmp_path / "work", "cpu")
    assert card["steps"] == 6 and set(card["loss_by_part"]) == set(WHOLE) and "Reuters" in card["corpus"]
    model, generation = eelib.load_model(str(out), device="cpu"), hf.GenerationConfig.from_pretrained(out)
    assert (model.kind, model.layers, model.context_length) == ("causal", 2, 512)
    assert model.eos_ids == {generation.eos_token_id} == {model.tokenizer.eos_token_id}
    assert "plain_causal" not in (out / "config.json").read_text()
    assert all(isinstance(text, str) for text in quality.greedy_texts(model, ["Hello"], 3))


def test_pocket_t5(corpora, tiny, tmp_path, monkeypatch, tokenizer, short):
    """An encoder-decoder that starts from padding and can end; grown from a first edition."""
    small, grown = tiny["t5"](), tiny["t5"](num_layers=2)
    pocket_t5.grow(grown, small)  # at first the same function
    ids = {"input_ids": torch.tensor([[5, 6, 7]]), "decoder_input_ids": torch.tensor([[0, 8]])}
    assert torch.equal(small(**ids).logits, grown(**ids).logits)
    for part in (small, tokenizer):
        part.save_pretrained(tmp_path / "work/first_edition")
    short(pocket_t5)
    monkeypatch.setattr(pocket_t5, "TOKENS", 1024)
    monkeypatch.setattr(pocket_t5, "build", lambda *_: grown)
    card = pocket_t5.run(corpora, tmp_path / "out", tmp_path / "work", "cpu")
    assert card["steps"] == 6 and "574ee76" in card["start"]
    model = eelib.load_model(str(tmp_path / "out"), device="cpu")
    config, end = model.network.config, model.tokenizer.eos_token_id
    assert (model.kind, model.layers, model.hidden_size, model.context_length) == ("seq2seq", 3, 32, 512)
    assert config.decoder_start_token_id == config.pad_token_id == model.tokenizer.pad_token_id
    assert model.eos_ids == {end}


def test_fine_tuning(made, corpora, tmp_path, monkeypatch, short):
    """On an epoch that the start has not seen: every block learns, and the card says what was done."""
    parts, epochs, plans = {"orders": 2, "captions": 1}, set(), pocket_llama.part_batches
    monkeypatch.setattr(fine_tuning, "load_model", lambda name, **_: made(name))

    def noted(*given, most):
        epochs.add((given[4], most))
        return plans(*given, most=most)

    monkeypatch.setattr(pocket_llama, "part_batches", noted)
    recipe, out = replace(LLAMA_JSON, schedule=Schedule(3, 1e-2, 1, 1)), tmp_path / "out"
    card = recipe.run(corpora, out, tmp_path / "work", "cpu")
    assert card == json.loads((out / "card.json").read_text()) and card["quality"] == {"measured on": [*parts]}
    assert (card["start"], card["steps"], card["objective"]) == (recipe.start, 3, recipe.objective)
    assert epochs == {(SEEN + 1, recipe.tokens)} and set(card["loss_by_part"]) == set(parts)
    assert "Tatoeba" in card["corpus"] and "recipes.orders" in card["corpus"]
    assert "Reuters" not in card["corpus"] and "headlines" not in card
    model, begun = eelib.load_model(str(out), device="cpu"), dict(made(recipe.start).network.named_parameters())
    changed = {name for name, p in model.network.named_parameters() if not p.equal(begun[name].to(p.dtype))}
    assert all(any(f".layers.{i}." in name for name in changed) for i in range(model.layers))


CONLLU = """1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tDo\tdo\tAUX\tVB\t_\t3\taux\t_\t_
2\tn't\tnot\tPART\tRB\t_\t3\tadvmod\t_\t_
3\tgo\tgo\tVERB\tVB\t_\t0\troot\t_\tSpaceAfter=No
3.1\tgone\tgo\tVERB\tVB\t_\t_\t_\t_\t_
4\t!\t!\tPUNCT\t.\t_\t3\tpunct\t_\t_

1-2\tcan't\t_\t_\t_\t_\t_\t_\t_\tSpaceAfter=No
1\tca\tcan\tAUX\tMD\t_\t0\troot\t_\t_
2\tn't\tnot\tPART\tRB\t_\t1\tadvmod\t_\t_
3\t.\t.\tPUNCT\t.\t_\t1\tpunct\t_\t_

"""


def test_pocket_tagger(tmp_path, monkeypatch):
    """Multi-word tokens are read with their spaces; a run ends in a pipeline that loads, with no corpus word."""
    tagger = pytest.importorskip("recipes.pocket_tagger")
    (tmp_path / "tagging").mkdir()
    for split, times in (("train", 40), ("dev", 1), ("test", 1)):
        file = tmp_path / f"tagging/ud_english_ewt.{split}.conllu.gz"
        file.write_bytes(gzip.compress((CONLLU * times).encode()))
    nlp, sentences = tagger.untrained(), tagger.read_conllu(file)
    whole = tagger.gold_doc(nlp, sentences)
    assert whole.text == "Don't go! can't." and tagger.gold_doc(nlp, sentences[1:]).text == "can't."
    assert " ".join(token.pos_ for token in whole) == "AUX PART VERB PUNCT AUX PART PUNCT"
    for name, value in (("EPOCHS", 3), ("WORDS_PER_BATCH", 20), ("WARMUP_STEPS", 5)):
        monkeypatch.setattr(tagger, name, value)
    card = tagger.run(tmp_path, tmp_path / "out", tmp_path / "work", "cpu")
    assert card["quality"] == tagger.measure(tmp_path, tmp_path / "out", "cpu")
    assert card["sha256"] == hashes(tmp_path / "out") and card["dev_accuracy_by_epoch"][-1][1] > 0.8
    for folder in (tmp_path / "out", data_folder("models", "pocket-tagger")):
        assert set(json.loads((folder / "vocab/strings.json").read_text(encoding="utf-8"))) <= set(nlp.vocab.strings)


def test_a_tiny_encoder_learns_and_its_adapters_load(corpora, tiny_bert, tmp_path, monkeypatch):
    """They bring the head that the base lacks, and its labels; the card's scores by hand, one row at a time."""
    rows = [{"sentence": f"a dog {i}" if i % 3 else f"the tree {i}", "label": int(i % 3 > 0)} for i in range(64)]
    for split in ("train", "validation"):
        write(tmp_path / f"glue/sst2.{split}.jsonl.gz", rows)
    monkeypatch.setattr(minilm, "packaged_folder", lambda name: tiny_bert)
    recipe = replace(minilm.SST2_JOINT, start=str(tiny_bert), schedule=Schedule(60, 2e-2, 5, 20), rank=4)
    card = recipe.run(tmp_path, tmp_path / "tuned", tmp_path / "work", "cpu")
    assert card["quality"]["GLUE sst2 validation"]["accuracy"] == 100
    found = eelib.load_model(str(tmp_path / "tuned"), device="cpu")
    assert found.kind == "classifier" and found.layers == 3
    for name, weight in load_file(tmp_path / "tuned" / WEIGHTS).items():
        if "classifier" in name or "pooler" in name:
            assert torch.equal(found.network.get_parameter(name.removeprefix(PREFIX)), weight.float())
    made = eelib.trace(found, eelib.Task.from_prompts(["a dog 3", "the tree 4"]), folder=tmp_path / "runs")
    assert list(made.sequences["output"]) == ["positive", "negative"]


def test_scores_of_a_classifier(corpora, tiny_bert):
    """The task's labels in GLUE's order; the network labels one row at a time; one row is longer than the window."""
    model = minilm.begin(tiny_bert, "sst2", "cpu")
    assert tuple(model.labels) == LABELS["sst2"] == tuple(model.network.config.label2id)
    rows, beyond = minilm.rows_of(model, corpora, "sst2", "validation")
    inputs = [{"input_ids": torch.tensor([r.ids]), "token_type_ids": torch.tensor([r.types])} for r in rows]
    with torch.no_grad():
        mean = torch.cat([model.network(**one).logits for one in inputs]).mean(0)
        model.network.classifier.bias -= mean  # so that labels differ
        labels = [model.network(**one).logits[0].argmax().item() for one in inputs]
    assert minilm.classified(model, rows, batch_size=7) == labels and len({*labels}) == 2
    found = minilm.scored(model, corpora, "sst2")
    right = sum(label == row.label for label, row in zip(labels, rows))
    assert found["accuracy"] == pytest.approx(100 * right / len(rows)) and (found["items"], beyond) == (39, 1)
    ones = sum(row.label for row in rows)
    base = found["majority class"]
    assert base["accuracy"] == pytest.approx(100 * max(ones, len(rows) - ones) / len(rows))
    assert found["better than the majority class"] is all(found[name] > base[name] for name in base)


# Quality


def test_agreement_with_the_last_layer_leaves_out_end_tokens(model_of, eos, monkeypatch):
    model, task = model_of("llama"), eelib.Task.from_prompts(["the cat sat on", "a dog", "the mat"])
    monkeypatch.setattr(quality, "load_task", lambda _name: task)
    monkeypatch.setattr(quality, "LONGEST_TRANSLATION", 6)
    eos(model, {greedy_decode(model, model.encode(task.prompts), 6)[0][2]})
    tokens = [token for prompt in model.encode(task.prompts) for token in greedy_decode(model, [prompt], 6)[0]]
    found = quality.agreement(model, ["the task"])
    assert found["by layer"][-1] == 100
    assert found["items"] == sum(token not in model.eos_ids for token in tokens) < len(tokens)


def test_a_model_is_measured_on_what_it_knows(corpora, made, monkeypatch):
    """Public test sets and the shipped texts, each with how many items it is of; the best reference counts."""
    model = made("pocket-llama")
    monkeypatch.setattr(quality, "load_model", lambda *_, **__: model)
    monkeypatch.setattr(quality, "agreement", lambda *_: {"items": 1})
    known = {structured_prompt(row["note"]): json.dumps(row["record"]) for row in orders("test", 150)}
    monkeypatch.setattr(quality, "greedy_texts", lambda _m, prompts, _most: [known.get(p, "The cat.") for p in prompts])
    found = quality.measure(corpora, corpora, "cpu")
    card = json.loads((data_folder("models", "pocket-llama") / "card.json").read_text())["quality"]
    rooms = ("rooms one", "rooms two", "rooms three", "rooms count", "rooms unknown")
    assert set(card) == set(found) and all(card[name]["items"] == found[name]["items"] for name in rooms)
    tales = {"F1": 100.0, "EM": 100.0, "items": 2, "beyond the window": 1}  # "a cat" is the answer to each
    assert found["FairytaleQA test"] == tales and all(scores["items"] for scores in found.values())
    few = LLAMA_JSON.measure(corpora, corpora, "cpu")
    assert few[quality.ORDERS] == {"exact": 100.0, "valid": 100.0, "field F1": 100.0, "items": 150}
    assert not {"Reuters test", "FairytaleQA test", "Tatoeba held out de-en"} & set(few)
