"""The difficulty notebook on planted curves: every claim holds, or none does."""

import json

import numpy as np
import pytest
import torch
import transformers as hf
from planted import STEPS, exits, pairs, plant, verdicts

import eelib
from checks.tiny_texts import WINDOW, tokenizer_for

LAYERS = 10  # M-D7 starts at layer 8, and the step into the last layer may not be the only one
CUT = 8  # prefixes of fewer tokens are of one kind, longer ones of the other: half of all, more of longer outputs


def deep_model(folder):
    """A checkpoint as tiny as may be, of LAYERS blocks."""
    tokenizer = tokenizer_for("causal")
    torch.manual_seed(0)
    size = {"n_embd": 16, "n_layer": LAYERS, "n_head": 2, "n_positions": WINDOW, "vocab_size": len(tokenizer)}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    hf.GPT2LMHeadModel(hf.GPT2Config(**size, **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return eelib.load_model(str(folder), device="cpu")


def curve(embeddings, level, shape):
    """Cosines of layers 0..L: those of layers 1..L-1 have the mean `level`, so that no shape is easier than another."""
    return np.array([embeddings, *(level + shape - np.mean(shape)), 1.0])


RISES = np.linspace(-0.08, 0.08, LAYERS - 1)
FALLS_LATE = RISES[[*range(LAYERS - 3), LAYERS - 2, LAYERS - 3]]  # from layer 8 to layer 9
SPIKE = np.array([1.0, *np.linspace(0.08, -0.08, LAYERS - 2)])  # similar at layer 1, and never again
# Curves of prefixes shorter than CUT and of longer ones, of even and of odd length; the kind at the higher level is
# easy. "holds": easy ones are similar from the middle on and rise from layer 0 on in half of the cases, the others
# only before the last layer and never from 0, but always from 1. "does not hold": easy ones are similar at the last
# layer alone and rise from 1, never from 0; of the others half are similar at layer 1, and half rise from 0.
CURVES = {
    "holds": ([curve(0.9, 0.3, RISES)] * 2, [curve(0.7, 0.89, RISES), curve(0.7, 0.89, FALLS_LATE)]),
    "does not hold": ([curve(0.9, 0.78, RISES)] * 2, [curve(-0.2, 0.1, RISES), curve(-0.2, 0.1, SPIKE)]),
}


def cosines(verdict, positions):
    """Cosines [tokens, L+1]; inside a kind, easier or harder by a little with every position, so that none are tied."""
    found = np.stack([CURVES[verdict][int(at >= CUT)][at % 2] for at in positions])
    found[:, 1:-1] += {"holds": 0.001, "does not hold": -0.001}[verdict] * positions[:, None]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("verdict", CURVES)
def test_difficulty(verdict, tmp_path):
    """Easy prefixes late, similar sooner, seldom steady from layer 4 on; or early, similar later, then steady."""
    rows = [row if i % 2 else row | {"references": [f"A dog ran {i}."]} for i, row in enumerate(pairs(820))]
    (tmp_path / "tiny.de-en.jsonl").write_text("\n".join(map(json.dumps, rows)))
    name = str(tmp_path / "tiny.de-en.jsonl")
    model, task = deep_model(tmp_path / "deep"), eelib.load_task(name)
    plant(
        model,
        task,
        tmp_path / "runs",
        lambda t: exits(np.full(len(t), LAYERS), LAYERS),
        STEPS,
        lambda t: {"cosine": cosines(verdict, t["position"].to_numpy())},
    )
    found = verdicts("difficulty", tmp_path, model, [name])
    assert found == {f"M-D{i}": verdict for i in (1, 3, 4, 5, 6, 7)}
