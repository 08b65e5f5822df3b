"""The recipes: their names and cards, and a tiny run of each kind, whose card says how good the model is."""

import gzip
import json
import pkgutil
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers as hf
from planted import write

import eelib
from checks.tiny_texts import tokenizer_for
from eelib.common.files import data_folder
from eelib.tasks.structured import structured_prompt
from recipes import fine_tuning, minilm, pocket_llama, pocket_t5, quality
from recipes.__main__ import RECIPES, main
from recipes.batches import Phase
from recipes.card import hashes
from recipes.fine_tuning import LLAMA_JSON
from recipes.orders import orders
from recipes.texts import WHOLE
from recipes.training import Schedule

NOT_SHIPPED = {"smollm2-135m-instruct-outputs", "pocket-llama-joint"}  # from which others are trained
SHIPPED = sorted({*RECIPES} - NOT_SHIPPED)


def test_every_recipe_has_its_name_and_its_model():
    for name, place in RECIPES.items():
        recipe = pkgutil.resolve_name(f"recipes.{place}")
        assert getattr(recipe, "name", None) == name or recipe.NAME == name
    assert {folder.name for folder in data_folder("models").iterdir()} == {*SHIPPED}


def test_bad_input_is_one_line(tmp_path, capsys):
    """What a recipe lacks, in place of a traceback."""
    folders = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    for more, line in (
        (["pocket-t5"], "git archive 574ee76 data/models/pocket-t5 "),
        (["pocket-t5", "--minutes", "3"], "pocket-t5 is not trained in legs, so it takes no --minutes"),
        (["pocket-llama", "--measure"], "there is no model in"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*more, "--corpora", str(tmp_path), *folders])
        assert "error: " in (said := capsys.readouterr().err.splitlines()[-1]) and line in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_are_those_of_the_card(name):
    """The weights are what the card measured; none is larger than what the repository may hold."""
    folder = data_folder("models", name)
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 1 and hashes(folder) == card["sha256"] and all(file.stat().st_size < 40e6 for file in files)
    assert card["recipe"] == f"python -m recipes {name} --corpora DIR" and card["quality"]


@pytest.fixture
def short(monkeypatch, few_stories):
    """short(recipe): six steps on all parts of the texts; then the model writes every record of orders, else a cat."""
    known = {structured_prompt(row["note"]): json.dumps(row["record"]) for row in orders("test", 150)}
    monkeypatch.setattr(quality, "greedy_texts", lambda _m, prompts, _most: [known.get(p, "The cat.") for p in prompts])
    monkeypatch.setattr(quality, "agreement", lambda *_: {"items": 1})

    def of(recipe):
        monkeypatch.setattr(recipe, "SCHEDULE", Schedule(steps=6, peak=1e-3, warmup=1, decay=3))
        monkeypatch.setattr(recipe, "PHASES", [Phase(6, dict.fromkeys(WHOLE, 1.0))])

    return of


def test_pocket_llama(corpora, tiny, tmp_path, monkeypatch, short):
    """From nothing to a folder that loads, measured on all that the card of the shipped model has."""
    short(pocket_llama)
    monkeypatch.setattr(pocket_llama, "build", tiny["llama"])
    monkeypatch.setattr(pocket_llama, "VOCABULARY", 600)
    monkeypatch.setattr(pocket_llama, "part_batches", partial(pocket_llama.part_batches, most=2048))
    out = tmp_path / "out"
    card = pocket_llama.run(corpora, out, tmp_path / "work", "cpu")
    assert card["steps"] == 6 and set(card["loss_by_part"]) == set(WHOLE) and "Reuters" in card["corpus"]
    shipped = json.loads((data_folder("models", "pocket-llama") / "card.json").read_text())
    assert set(card["quality"]) == set(shipped["quality"]) and card["sha256"] == hashes(out)
    tales = {"F1": 100.0, "EM": 100.0, "items": 2, "beyond the window": 1}  # "a cat" is the answer to each
    assert card["quality"]["FairytaleQA test"] == tales
    model, text = eelib.load_model(str(out), device="cpu"), "l'été  1-2\t😀 <0x41>\n### Answer:\n"
    assert (model.kind, model.layers, model.context_length) == ("causal", 2, 512)
    assert model.eos_ids == {model.tokenizer.eos_token_id}
    assert model.tokenizer.decode(model.tokenizer(text)["input_ids"]) == text


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
    assert (model.kind, model.layers, model.context_length) == ("seq2seq", 4, 512)
    assert model.network.config.decoder_start_token_id == model.tokenizer.pad_token_id
    assert model.eos_ids == {model.tokenizer.eos_token_id}


def test_fine_tuning(made, corpora, tmp_path, monkeypatch, short):
    """Every block learns, and the card says what was done and measured."""
    monkeypatch.setattr(fine_tuning, "load_model", lambda *_, **__: made("llama"))
    recipe, out = replace(LLAMA_JSON, schedule=Schedule(3, 1e-2, 1, 1)), tmp_path / "out"
    card = recipe.run(corpora, out, tmp_path / "work", "cpu")
    assert card == json.loads((out / "card.json").read_text()) and card["steps"] == 3
    assert set(card["loss_by_part"]) == {"orders", "captions"}
    assert "recipes.orders" in card["corpus"] and "Reuters" not in card["corpus"]
    assert card["quality"][quality.ORDERS] == {"exact": 100.0, "valid": 100.0, "field F1": 100.0, "items": 150}
    assert "FairytaleQA test" not in card["quality"]
    model, begun = eelib.load_model(str(out), device="cpu"), dict(made("llama").network.named_parameters())
    changed = {name for name, p in model.network.named_parameters() if not p.equal(begun[name].to(p.dtype))}
    assert all(any(f".layers.{i}." in name for name in changed) for i in range(model.layers))


CONLLU = """1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tDo\tdo\tAUX\tVB\t_\t3\taux\t_\t_
2\tn't\tnot\tPART\tRB\t_\t3\tadvmod\t_\t_
3\tgo\tgo\tVERB\tVB\t_\t0\troot\t_\tSpaceAfter=No
3.1\tgone\tgo\tVERB\tVB\t_\t_\t_\t_\t_
4\t!\t!\tPUNCT\t.\t_\t3\tpunct\t_\t_

"""


def test_pocket_tagger(tmp_path, monkeypatch):
    """Multi-word tokens are read with their spaces; a run ends in a pipeline that loads, with no corpus word."""
    tagger = pytest.importorskip("recipes.pocket_tagger")
    (tmp_path / "tagging").mkdir()
    for split, times in (("train", 80), ("dev", 2), ("test", 2)):
        file = tmp_path / f"tagging/ud_english_ewt.{split}.conllu.gz"
        file.write_bytes(gzip.compress((CONLLU * times).encode()))
    nlp, sentences = tagger.untrained(), tagger.read_conllu(file)
    whole = tagger.gold_doc(nlp, sentences)
    assert whole.text == "Don't go! Don't go!"
    assert " ".join(token.pos_ for token in whole) == "AUX PART VERB PUNCT AUX PART VERB PUNCT"
    for name, value in (("EPOCHS", 3), ("WORDS_PER_BATCH", 20), ("WARMUP_STEPS", 5)):
        monkeypatch.setattr(tagger, name, value)
    card = tagger.run(tmp_path, tmp_path / "out", tmp_path / "work", "cpu")
    assert card["quality"] == tagger.measure(tmp_path, tmp_path / "out", "cpu")
    assert card["dev_accuracy_by_epoch"][-1][1] > 0.8
    strings = (tmp_path / "out/vocab/strings.json").read_text(encoding="utf-8")
    assert set(json.loads(strings)) <= set(nlp.vocab.strings)


def test_a_tiny_encoder_learns_and_its_adapters_load(tmp_path, monkeypatch):
    """They bring the head that the base lacks, and its labels."""
    sizes, base = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}, tmp_path / "base"
    hf.BertModel(hf.BertConfig(vocab_size=300, num_attention_heads=2, **sizes)).save_pretrained(base)
    tokenizer_for("masked").save_pretrained(base)
    rows = [{"sentence": f"a dog {i}" if i % 3 else f"the tree {i}", "label": int(i % 3 > 0)} for i in range(64)]
    for split in ("train", "validation"):
        write(tmp_path / f"glue/sst2.{split}.jsonl.gz", rows)
    monkeypatch.setattr(minilm, "packaged_folder", lambda name: base)
    recipe = replace(minilm.SST2_JOINT, start=str(base), schedule=Schedule(40, 2e-2, 5, 20), rank=4)
    card = recipe.run(tmp_path, tmp_path / "tuned", tmp_path / "work", "cpu")
    assert card["quality"]["GLUE sst2 validation"]["accuracy"] == 100
    found = eelib.load_model(str(tmp_path / "tuned"), device="cpu")
    made = eelib.trace(found, eelib.Task.from_prompts(["a dog 3", "the tree 4"]), folder=tmp_path / "runs")
    assert list(made.sequences["output"]) == ["positive", "negative"]
