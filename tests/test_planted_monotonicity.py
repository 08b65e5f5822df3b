"""Monotonicity: when tokens settle, and how sure layers are of the top and the final token, in three planted models."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import families
import numpy as np
import pandas as pd
import pytest
from planted import STEPS, exits, plant, verdicts

import eelib

DEPTH, FIRST_EXIT = 6, 2  # with six layers, a sixth of the depth is a whole one
CLAIMS = ("M-M1", "M-M2", "M-M3", "M-M4", "M-M5")
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
RISING = (0.1, 0.3, 0.6, 0.92, 0.93, 0.93, 0.94)  # M's rule is met at layer 3
DROPPING, GROWING = (0.1, 0.5, 0.9, 0.2, 0.3, 0.4, 0.5), (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)


@dataclass(frozen=True)
class Plant:
    """Exit layers of all tokens, plain and weighted; the distilled model's probabilities of the final token."""

    plain: int
    weighted: int
    distilled: tuple[float, ...]
    wanted: tuple[str, ...]


# Undecided: where nothing differs in any of 64 texts, a small share or difference is not ruled out.
PLANTS = {
    "early, steady, and a drop": Plant(6, 1, DROPPING, (*(HOLDS,) * 4, UNDECIDED)),
    "late, and no drop": Plant(1, 6, GROWING, (FAILS,) * 5),
    "after a third": Plant(6, 2, DROPPING, (FAILS, HOLDS, UNDECIDED, HOLDS, UNDECIDED)),
    "the rule comes before the answer": Plant(6, 4, GROWING, (FAILS, FAILS, UNDECIDED, FAILS, FAILS)),
}


def saved(folder: Path, seed: int) -> Path:
    """A checkpoint of six layers."""
    small = families.build("gpt2", seed)
    config = small.config
    config.n_layer = DEPTH
    type(small)(config).save_pretrained(folder)
    families.tokenizer_for("causal").save_pretrained(folder)
    return folder


def readouts(tokens: pd.DataFrame, final: tuple[float, ...], k: int = 10) -> dict[str, np.ndarray]:
    """Top probabilities that rise, and the final token's as given, [tokens, L+1]; no matter which token is on top."""
    rest = np.full((DEPTH + 1, k - 1), 0.001)
    top = np.concatenate([np.array(RISING)[:, None], rest], axis=1)
    every = {"topk_probability": top.ravel(), "final_probability": np.array(final)}
    return {name: np.broadcast_to(values, (len(tokens), values.size)) for name, values in every.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_monotonicity(name, planted_tasks, tmp_path):
    asked = PLANTS[name]
    layers = {"plain": asked.plain, "weighted": asked.weighted, "distilled": 3}
    models = {}
    for seed, (role, layer) in enumerate(layers.items()):
        models[role] = eelib.load_model(str(saved(tmp_path / role, seed)), device="cpu")
        final = asked.distilled if role == "distilled" else GROWING
        agrees = partial(lambda layer, t: exits(np.full(len(t), layer), DEPTH), layer)
        task = eelib.load_task(planted_tasks[0])
        plant(models[role], task, tmp_path / "runs", agrees, STEPS, partial(readouts, final=final))
    found = verdicts(
        "monotonicity",
        tmp_path,
        models["plain"],
        planted_tasks[:1],
        after=tmp_path / "weighted",
        weighted=tmp_path / "weighted",
        others=f"{tmp_path / 'plain'} > {tmp_path / 'distilled'} on {planted_tasks[0]}",
        distilled=f"{tmp_path / 'distilled'} at {FIRST_EXIT}",
    )
    assert found == dict(zip(CLAIMS, asked.wanted))
