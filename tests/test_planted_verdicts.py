"""What a notebook must conclude where its data leave no doubt, one way and the other."""

import numpy as np
import pytest
from planted import STEPS, exits, plant, rewrite, verdicts

import eelib


def test_a_planted_trace_is_what_was_planted(planted_model, planted_tasks, tmp_path):
    """References as outputs, the exit layers that were asked for, and readouts that agree with them."""
    task = eelib.load_task(planted_tasks[0], limit=4)
    made = plant(planted_model, task, tmp_path / "runs", lambda t: exits(1 + t["position"] % 3, 3), STEPS, pairs=2)
    assert list(made.sequences["output"]) == [known for (known,) in task.references] and made.manifest["finished"]
    assert not made.sequences["truncated"].any() and made.tokens["is_eos"].sum() == 4
    for definition in ("first", "stable"):
        np.testing.assert_array_equal(made.exit_layer(definition), 1 + made.tokens["position"] % 3)
    agreement = made["final_rank"] == 1
    emitted = np.broadcast_to(made.tokens["token_id"].to_numpy()[:, None], agreement.shape)
    np.testing.assert_array_equal(made["top1"] == emitted, agreement)
    np.testing.assert_array_equal(made["topk_ids"][..., 0], made["top1"])
    assert all(len(set(ids)) == 10 for layers in made["topk_ids"] for ids in layers)
    spans = made.tokens[~made.tokens["is_eos"]]
    text = dict(zip(made.sequences["sequence"], made.sequences["output"]))
    assert all(text[row.sequence][row.start : row.end] == row.text for row in spans.itertuples())
    before = made.pairs
    rewrite(planted_model, task, tmp_path / "runs", "pairs-2", lambda found: {"js": 0 * found["js"]})
    again = eelib.trace(planted_model, task, max_new_tokens=STEPS, folder=tmp_path / "runs", progress=False, pairs=2)
    assert (again.pairs["js"] == 0).all() and (again.pairs["cosine"] == before["cosine"]).all()


# The exit layer of a token by its position: of a task into English, and of one out of it. The model has three layers.
SATURATION = {
    "holds": (lambda position: 1 + 0 * position, lambda position: np.where(position == 0, 3, 1)),
    "does not hold": (lambda position: 3 + 0 * position, lambda position: np.where(position % 5 == 4, 1, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("verdict", SATURATION)
def test_saturation(verdict, planted_model, planted_tasks, tmp_path):
    """Nearly all tokens early, at nearly the same layer, most of all into English; or nearly none, and less into it."""
    for name, layer in zip(planted_tasks, SATURATION[verdict]):
        task = eelib.load_task(name)
        plant(planted_model, task, tmp_path / "runs", lambda t: exits(layer(t["position"].to_numpy()), 3), STEPS)
    found = verdicts("saturation", tmp_path, planted_model, planted_tasks)
    assert found == dict.fromkeys(("P-S1", "P-S2", "P-S3", "P-S4", "P-S5"), verdict)
