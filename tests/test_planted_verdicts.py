"""What a notebook must conclude where its data leave no doubt, one way and the other."""

import json

import families
import numpy as np
import pytest
from planted import exits, pairs, plant, rewrite
from test_notebooks import ROOT, papermill

import eelib

STEPS = 48


@pytest.fixture
def model(tmp_path):
    """A tiny model of three layers, in a folder that a notebook can be given."""
    return eelib.load_model(str(families.save("gpt2", tmp_path / "gpt2")), device="cpu")


@pytest.fixture
def tasks(tmp_path):
    """A task into English and one out of it, with groups enough for a verdict."""
    for name in ("tiny.de-en", "tiny.en-de"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, pairs(32))))
    return [str(tmp_path / f"{name}.jsonl") for name in ("tiny.de-en", "tiny.en-de")]


def verdicts(notebook, folder, model, tasks, **more):
    """{claim: verdict} of one notebook that finds its traces already made."""
    before = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("tokens-*.parquet")}
    values = {"model": folder / model.name, "tasks": ",".join(tasks), "limit": 0, "max_new_tokens": STEPS} | more
    done = papermill(ROOT / f"notebooks/{notebook}.ipynb", folder / "out.ipynb", folder, **values)
    assert done.returncode == 0, done.stderr[-3000:]
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("tokens-*.parquet")}
    written = json.loads((folder / f"results/{model.name}/{notebook}.json").read_text())
    assert all(written["learnt"].values())
    return {claim["id"]: claim["verdict"] for claim in written["claims"]}


def test_a_planted_trace_is_what_was_planted(model, tasks, tmp_path):
    """References as outputs, the exit layers that were asked for, and readouts that agree with them."""
    task = eelib.load_task(tasks[0], limit=4)
    made = plant(model, task, tmp_path / "runs", lambda t: exits(1 + t["position"] % 3, 3), STEPS, pairs=2)
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
    rewrite(model, task, tmp_path / "runs", "pairs-2", lambda found: {"js": 0 * found["js"]})
    again = eelib.trace(model, task, max_new_tokens=STEPS, folder=tmp_path / "runs", progress=False, pairs=2)
    assert (again.pairs["js"] == 0).all() and (again.pairs["cosine"] == before["cosine"]).all()


# The exit layer of a token by its position: of a task into English, and of one out of it. The model has three layers.
SATURATION = {
    "holds": (lambda position: 1 + 0 * position, lambda position: np.where(position == 0, 3, 1)),
    "does not hold": (lambda position: 3 + 0 * position, lambda position: np.where(position % 5 == 4, 1, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("verdict", SATURATION)
def test_saturation(verdict, model, tasks, tmp_path):
    """Nearly all tokens early, at nearly the same layer, most of all into English; or nearly none, and less into it."""
    for name, layer in zip(tasks, SATURATION[verdict]):
        task = eelib.load_task(name)
        plant(model, task, tmp_path / "runs", lambda t: exits(layer(t["position"].to_numpy()), model.layers), STEPS)
    found = verdicts("saturation", tmp_path, model, tasks)
    assert found == dict.fromkeys(("P-S1", "P-S2", "P-S3", "P-S4", "P-S5"), verdict)
