"""The notebook on joint optimization on two planted traces: every claim holds, or none does."""

import families
import numpy as np
import pytest
from planted import STEPS, exits, plant, rewrite, verdicts

import eelib

LATE, MIDDLE = (exits([layer], 3)[0] for layer in (3, 2))
EARLY = np.array([False, True, False, True])  # "first" at layer 1, by which P-J3 goes; "stable" as late as LATE
# Before and after: JS divergence and cosine of every two layers, and where most tokens agree with the end.
STATES = {
    "holds": ((0.5, 0.6, LATE), (0.1, 0.61, EARLY)),
    "does not hold": ((0.1, 0.6, EARLY), (0.5, 0.8, LATE)),
}


def plant_pairs(model, task, folder, js, cosine, agrees):
    """A trace in which every fifth token leaves in the middle, and all layers are equally like each other."""
    plant(model, task, folder, lambda t: np.where(t[["position"]] % 5, agrees, MIDDLE), STEPS, pairs=32)
    alike = {"js": js, "cosine": cosine}
    rewrite(
        model, task, folder, "pairs-32", lambda found: {n: np.full_like(found[n], value) for n, value in alike.items()}
    )


@pytest.mark.slow
@pytest.mark.parametrize("verdict", STATES)
def test_joint_optimization(verdict, planted_model, planted_tasks, tmp_path):
    """After it, distributions nearer, states as they were, exits earlier; or further, more alike, and later."""
    after = eelib.load_model(str(families.save("gpt2", tmp_path / "after", seed=1)), device="cpu")
    for model, state in zip((planted_model, after), STATES[verdict]):
        for name in planted_tasks:
            plant_pairs(model, eelib.load_task(name), tmp_path / "runs", *state)
    more = {"after": tmp_path / "after", "others": ""}
    found = verdicts("joint_optimization", tmp_path, planted_model, planted_tasks, **more)
    assert found == dict.fromkeys(("P-J1", "P-J2", "P-J3"), verdict)
