"""MiniLM's classifiers: a tiny encoder learns a task by low-rank updates, and loads as the trained classifier."""

import gzip
import json
from dataclasses import replace

import torch
import transformers as hf

import eelib
from checks.tiny_texts import tokenizer_for
from recipes import minilm
from recipes.training import Schedule


def test_a_tiny_encoder_learns_and_its_adapters_load(tmp_path, monkeypatch):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(1)
    base = tmp_path / "base"
    hf.BertModel(hf.BertConfig(vocab_size=300, **sizes)).save_pretrained(base)
    tokenizer_for("masked").save_pretrained(base)
    (tmp_path / "glue").mkdir()
    rows = [{"sentence": f"a dog {i}" if i % 2 else f"the tree {i}", "label": i % 2} for i in range(64)]
    for split in ("train", "validation"):
        with gzip.open(tmp_path / f"glue/sst2.{split}.jsonl.gz", "wt") as file:
            file.write("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(minilm, "packaged_folder", lambda name: base)
    recipe = replace(minilm.SST2_JOINT, start=str(base), schedule=Schedule(60, 2e-2, 5, 20), rank=4)
    card = recipe.run(tmp_path, tmp_path / "tuned", tmp_path / "work", "cpu")
    assert card["quality"]["GLUE sst2 validation"]["accuracy"] == 100
    found = eelib.load_model(str(tmp_path / "tuned"), device="cpu")
    assert found.kind == "classifier" and found.layers == 2 and found.title.startswith("tuned, LoRA adapters of")
    made = eelib.trace(found, eelib.Task.from_prompts(["a dog 3", "the tree 4"]), folder=tmp_path / "runs")
    assert list(made.sequences["output"]) == ["positive", "negative"]
