"""Length: exit layers that are a known function of a token's position and its output's length.

With one late token at the start, the mean of n tokens is 1 + 2 / n: it falls with n, ever less, and inside an output it
falls at once. Any slope is a weighted mean of the slopes between neighbouring lengths, so no draw can turn these signs.
"""

import json

import numpy as np
import pytest
from planted import NOUNS, STEPS, exits, plant, verdicts

import eelib

MIDDLE = 18  # tokens: no output of the shorter half is longer
CLAIMS = ("P-L1", "P-L2", "P-L3")

# Exit layer by position p and length n, of three; and the verdicts, in the order of CLAIMS.
PLANTS = {
    "the first token late": (lambda p, n: np.where(p == 0, 3, 1), ("holds", "holds", "holds")),
    "the first token early": (lambda p, n: np.where(p == 0, 1, 3), ("does not hold",) * 3),
    # The shorter half stays at 3, the longer falls as 1 + 2 * MIDDLE / n, and inside those the end is late.
    "the last tokens late": (
        lambda p, n: np.where(p >= n - MIDDLE, 3, 1),
        ("holds", "does not hold", "does not hold"),
    ),
}


@pytest.fixture
def task_file(tmp_path):
    """A task into English whose references have one to eight words; each half has groups enough for a verdict."""
    rows = [
        {"source": f"Satz {i}.", "references": [" ".join(NOUNS[(i + j) % 10] for j in range(1 + i % 8))]}
        for i in range(80)
    ]
    path = tmp_path / "tiny.de-en.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_length(name, planted_model, task_file, tmp_path):
    layer, wanted = PLANTS[name]

    def agrees(tokens):
        length = tokens.groupby("sequence")["position"].transform("max")  # the end token's place
        return exits(layer(tokens["position"].to_numpy(), length.to_numpy()), 3)

    made = plant(planted_model, eelib.load_task(task_file), tmp_path / "runs", agrees, STEPS)
    assert 40 <= (made.sequences["length"] <= MIDDLE).sum() <= 50
    assert verdicts("length", tmp_path, planted_model, [task_file]) == dict(zip(CLAIMS, wanted))
