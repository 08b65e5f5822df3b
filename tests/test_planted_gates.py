"""The notebook on gates on planted traces: every claim holds, or none does."""

import json

import families
import numpy as np
import pytest
from planted import STEPS, consistent, exits, pairs, plant, verdicts

import eelib

DEPTH = 3


def agreement(tokens):
    """Every second token could leave at layer 1, the others at the last only; no gate sees which but by its scores."""
    return exits(np.where(tokens["position"] % 2, 1, DEPTH), DEPTH)


def readouts(vocab_size, telling):
    """What the layers say: `telling`, sure just where they agree with the end; else equally sure everywhere.

    Where they disagree, they have one top token in common, so patience leaves too early or never.
    """

    def of(tokens):
        agrees = agreement(tokens)
        columns = consistent(tokens["token_id"].to_numpy(), agrees, vocab_size)
        width = columns["topk_ids"].shape[1] // agrees.shape[1]
        sure = np.where(agrees, 0.9, 0.2) if telling else np.full(agrees.shape, 0.5)
        shares = sure[..., None] * 0.1 ** np.arange(width)
        entropy = np.where(agrees, 0.1, 3.0) if telling else np.ones(agrees.shape)
        return {"topk_probability": shares.reshape(len(agrees), -1), "entropy": entropy}

    return of


@pytest.mark.slow
@pytest.mark.parametrize("verdict", ["holds", "does not hold"])
def test_gates(verdict, planted_model, tmp_path):
    """Joint optimization makes confidence telling, and saves layers; or it takes away what the plain model had."""
    name = str(tmp_path / "tiny.de-en.jsonl")
    (tmp_path / "tiny.de-en.jsonl").write_text("\n".join(map(json.dumps, pairs(160))))
    after = eelib.load_model(str(families.save("gpt2", tmp_path / "after", seed=1)), device="cpu")
    for model, telling in ((planted_model, verdict != "holds"), (after, verdict == "holds")):
        task = eelib.load_task(name)
        plant(model, task, tmp_path / "runs", agreement, STEPS, readouts(model.vocab_size, telling))
    found = verdicts("gates", tmp_path, planted_model, [name], after=tmp_path / "after", others="")
    assert found == dict.fromkeys(("P-G1", "P-G2", "P-G3"), verdict)
