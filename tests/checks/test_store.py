"""The check of killed, shared and repeated traces sees a changed byte."""

from check_runs import missed, run

import eelib
from checks import dtypes, store
from checks.tiny_texts import PROMPTS
from eelib.tasks.task import Task


def test_killed_workers_end_with_the_same_bytes_and_a_changed_byte_is_seen(model_of, tmp_path):
    maker = store.Maker(model_of("llama"), Task.from_prompts(PROMPTS * 4), **store.OPTIONS)
    assert store.status_of(maker.start(tmp_path / "quiet")) == 0
    quiet = store.content(store.only(tmp_path / "quiet"))
    for workers in (1, 2):
        found = store.kill_round(maker, tmp_path, quiet, 0.4, workers, 2, 0)
        assert sum(found["moments"].values()) == found["kills"] >= 2 and found["identical"] == found["runs"] >= 1
    altered = quiet | {"manifest.json": quiet["manifest.json"] + b" "}
    assert store.kill_round(maker, tmp_path, altered, 0.4, 1, 1, 0)["identical"] == 0


def test_very_many_prompts_are_shared_out_and_go_on_after_a_kill(tmp_path):
    _, found = run("store", "many_prompts", "--prompts", "640", "--workers", "2", "--output", str(tmp_path / "a.json"))
    assert found["shards_made"] == found["shards"] == 10 and found["goals"] == store.prompt_goals(found)
    assert not missed(found["goals"]) and found["command"].startswith("python -m checks store many_prompts")
    for wrong in ({"shards_made": 9}, {"shards_made_twice": 3}, {"failed_workers": 1}):
        assert len(missed(store.prompt_goals(found | wrong))) == 1, wrong


def test_a_part_that_went_wrong_is_missed():
    good = {
        "killed": {"kills": 150, "runs": 3, "identical": 3},
        "workers_killed": {"kills": 150, "workers": 3, "runs": 2, "identical": 2},
    }
    assert not missed(store.crash_goals(good))
    for part, wrong in (("killed", {"kills": 149}), ("killed", {"identical": 2}), ("workers_killed", {"identical": 1})):
        assert len(missed(store.crash_goals(good | {part: good[part] | wrong}))) == 1, (part, wrong)


def test_traces_that_differ_are_found_and_only_float32_has_to_be_exact(model_of, tmp_path):
    made = [eelib.trace(model_of("llama"), Task.from_prompts(PROMPTS), n, tmp_path, progress=False) for n in (6, 6, 5)]
    assert dtypes.between(made[0], made[1])["other_outputs"] == 0
    other = dtypes.between(made[0], made[2])
    assert other["other_outputs"] > 0 == other["other_top1s"] == other["first"] < other["top1s"]
    row = {"dtype": "float32", "other_outputs": 0, "other_top1s": 0, "top1s": 9}
    low = row | {"dtype": "bfloat16", "other_top1s": 7}
    equal = [{"same_bytes": True}]
    assert not missed(store.same_goals({"equal_runs": equal, "batch_sizes": [row, low]}))
    assert missed(store.same_goals({"equal_runs": equal, "batch_sizes": [row | {"other_top1s": 1}, low]}))
    assert missed(store.same_goals({"equal_runs": [{"same_bytes": False}], "batch_sizes": [row]}))
