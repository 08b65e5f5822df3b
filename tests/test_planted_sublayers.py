"""Sub-layers: top-10 lists and confidences given to stream and modules, every token settled at layer 2 of 3.

A list is named by a number: 0 is the token's final top ten, any other shares nothing with it nor with the rest. So
every overlap is 0 or 1, and the final token is first in list 0 and far down elsewhere.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from planted import STEPS, exits, plant, rewrite, verdicts

import eelib

SITES = 32  # sequences, the notebook's default
SPAN = 20  # ids between two lists; a planted top ten lies within 11 of its first
CLAIMS = ("P-B1", "P-B2", "P-B3", "P-B4")
HOLDS, FAILS = "holds", "does not hold"


@dataclass(frozen=True)
class Site:
    """What a site shows: the number of its list at layers 1 to 3, and how sure it is of the first in it."""

    lists: tuple[int, int, int]
    confidence: float


# The stream, the two modules, and the verdicts in the order of CLAIMS; each claim has verdicts of its own.
PLANTS = {
    "the stream knows": (Site((0, 0, 0), 0.9), Site((1, 2, 3), 0.1), (HOLDS, HOLDS, HOLDS, HOLDS)),
    "the modules know": (Site((1, 2, 3), 0.1), Site((0, 0, 0), 0.9), (FAILS, FAILS, FAILS, FAILS)),
    "a stream of its own": (Site((1, 1, 1), 0.1), Site((0, 0, 2), 0.9), (FAILS, FAILS, HOLDS, HOLDS)),
    "a sure stream that wanders": (Site((1, 2, 1), 0.9), Site((0, 0, 2), 0.1), (FAILS, HOLDS, FAILS, HOLDS)),
}


def columns(site: str, shown: Site, final: np.ndarray, vocabulary: int) -> dict[str, np.ndarray]:
    """A site's columns in the table, from the final top ten [rows, 10]; no id of a list is 0."""
    numbers = np.array(shown.lists)
    ids = (final[:, None] - 1 + SPAN * numbers[:, None]) % (vocabulary - 1) + 1  # [rows, layers, 10]
    rest = np.full((*ids.shape[:2], ids.shape[2] - 1), (1 - shown.confidence) / 20)
    probability = np.concatenate([np.full((*ids.shape[:2], 1), shown.confidence), rest], axis=2)
    known = np.broadcast_to(numbers == 0, ids.shape[:2])
    values = {
        "topk_ids": ids.reshape(len(ids), -1),
        "topk_probability": probability.reshape(len(ids), -1),
        "final_rank": np.where(known, 1, 100),
        "final_probability": np.where(known, shown.confidence, 1e-4),
        "entropy": np.full(known.shape, 1.0),
    }
    return {f"{site}/{name}": value for name, value in values.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_sublayers(name, planted_model, planted_tasks, tmp_path):
    stream, module, wanted = PLANTS[name]
    task, vocabulary = eelib.load_task(planted_tasks[0]), planted_model.vocab_size
    made = plant(planted_model, task, tmp_path / "runs", lambda t: exits(np.full(len(t), 2), 3), STEPS, sites=SITES)
    final = made["topk_ids"][made.sites.rows, -1]

    def change(_found):
        kept = ("topk_ids", "topk_probability", "final_rank", "final_probability", "entropy")
        block = {f"block/{key}": made[key][made.sites.rows, 1:].reshape(len(final), -1) for key in kept}
        modules = columns("attention", module, final, vocabulary) | columns("feed_forward", module, final, vocabulary)
        return block | modules | columns("after_attention", stream, final, vocabulary)

    rewrite(planted_model, task, tmp_path / "runs", f"sites-{SITES}", change)
    found = verdicts("sublayers", tmp_path, planted_model, planted_tasks[:1])
    assert found == dict(zip(CLAIMS, wanted))
