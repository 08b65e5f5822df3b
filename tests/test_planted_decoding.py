"""The notebooks that decode themselves: what they must conclude of models that were made to force it.

Outputs depend on a model's weights, times on what it has to run: what is planted are the model, the gate's threshold,
and that the task is known, whose references are the model's own outputs.
"""

import json

import numpy as np
import pytest
import torch
import transformers as hf
from planted import STEPS, exits, pairs, plant, verdicts

import eelib
from checks.tiny_texts import tokenizer_for

WIDE = 512  # tokens: a window that holds every prompt


def save(folder, seed=0, layers=3, ends=None, flat=False, last_place=0.0):
    """A tiny checkpoint whose random layers say different things; of a `flat` one all blocks but the first do nothing.

    ends: the token that ends an output. last_place: added to the weights of a position that no text reaches.
    """
    tokenizer = tokenizer_for("causal")
    tokenizer.model_max_length = WIDE
    torch.manual_seed(seed)
    size = {"n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": WIDE, "vocab_size": len(tokenizer)}
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    network = hf.GPT2LMHeadModel(hf.GPT2Config(initializer_range=0.3, **size, **ids))
    for block in network.transformer.h[1:] if flat else []:
        for part in (block.attn.c_proj, block.mlp.c_proj):
            torch.nn.init.zeros_(part.weight)
    with torch.no_grad():
        network.transformer.wpe.weight[-1] += last_place
    if ends is not None:
        network.generation_config.eos_token_id = ends
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return eelib.load_model(str(folder), device="cpu")


def write_task(path, rows):
    """A task of these rows."""
    path.write_text("\n".join(map(json.dumps, rows)))
    return eelib.load_task(str(path))


def sentences(references):
    """Rows of a translation with these references."""
    return [{"source": f"Satz {i}.", "references": [text]} for i, text in enumerate(references)]


def own_outputs(path, folder, **model):
    """Two models with other weights that write the same, and their traces of a task with their outputs as references.

    The outputs end at a token that gives them many lengths.
    """
    asked = {"max_new_tokens": STEPS, "progress": False}
    task = write_task(path, sentences(["x"] * 40))
    made = eelib.trace(save(folder / "endless", **model), task, folder=folder / "first", **asked)
    outputs = made.tokens.groupby("sequence")["token_id"].agg(list)

    def lengths(token):
        found = [ids.index(token) for ids in outputs if token in ids]
        return len(set(found)) if len(found) > 30 else 0

    ends = max(made.tokens["token_id"].unique().tolist(), key=lengths)
    models = [save(folder / name, ends=ends, last_place=at, **model) for at, name in enumerate(("before", "after"))]
    made = eelib.trace(models[1], task, folder=folder / "first", **asked)
    assert lengths(ends) > 5 and models[0].hash != models[1].hash
    task = write_task(path, sentences(made.sequences["output"]))
    for one in models:
        found = eelib.trace(one, task, folder=folder / "runs", **asked)
        assert found.sequences["output"].tolist() == made.sequences["output"].tolist()
    return models


UNTIMED = {"sequences": 2, "timed_tokens": 2, "batch": 1, "timed_gates": ""}


@pytest.mark.slow
@pytest.mark.parametrize(
    "flat, wanted",
    [
        (False, {"P-K1": "holds", "P-K2": "holds"}),
        (True, {"P-K2": "undecided", "P-K3": "undecided"}),  # all outputs are those of all layers
    ],
)
def test_keys_values(flat, wanted, tmp_path):
    """Layers that say different things need their own keys and values; layers that do nothing need none."""
    path = tmp_path / "tiny.de-en.jsonl"
    before, _ = own_outputs(path, tmp_path, seed=1, flat=flat)
    found = verdicts("speed", tmp_path, before, [str(path)], after=tmp_path / "after", **UNTIMED)
    assert wanted.items() <= found.items()


@pytest.mark.slow
@pytest.mark.parametrize("threshold, wanted", [(0.0, ("holds", "holds")), (2.0, ("does not hold", "not applicable"))])
def test_speed(threshold, wanted, tmp_path):
    """Of 12 layers all tokens run four, which is faster; or all of them and a gate, which is slower."""
    path = tmp_path / "tiny.de-en.jsonl"
    task = write_task(path, pairs(32))
    models = [save(tmp_path / name, seed, layers=12) for seed, name in enumerate(("before", "after"))]
    for model in models:
        plant(model, task, tmp_path / "runs", lambda tokens: exits(np.ones(len(tokens)), 12), 20)
    more = {"after": tmp_path / "after", "threshold": threshold, "timed_gates": "", "max_new_tokens": 20}
    more |= {"timed_tokens": 20, "kv_sequences": 2, "draft_layer": 1, "draft_length": 1}
    found = verdicts("speed", tmp_path, models[0], [str(path)], **more)
    assert (found["P-T1"], found["P-T2"]) == wanted and found["M-E2"] == "not applicable"
