"""The check of killed, shared and repeated traces sees a changed byte, and what was not run."""

import multiprocessing

import pytest
from check_runs import missed

import eelib
from checks import dtypes, store
from checks.tiny_texts import PROMPTS
from eelib.tasks.task import Task


@pytest.fixture
def maker(model_of):
    return store.Maker(model_of("llama"), Task.from_prompts(PROMPTS * 4), **store.OPTIONS)


def test_killed_workers_end_with_the_same_bytes_and_a_changed_byte_is_seen(maker, tmp_path):
    assert maker.finish(tmp_path / "quiet") == 0
    quiet = store.content(store.only(tmp_path / "quiet"))
    assert not any(row["identical"] for row in store.damage_round(maker, tmp_path / "other", {"manifest.json": b""}))
    for workers in (1, 2):
        found = store.kill_round(maker, tmp_path, quiet, 0.4, workers, 2, 0)
        assert found["kills"] >= 2 and found["identical"] == found["runs"] >= 1
        assert sum(found["moments"].values()) == found["kills"]
    altered = quiet | {"manifest.json": quiet["manifest.json"] + b" "}
    assert store.kill_round(maker, tmp_path, altered, 0.4, 1, 1, 0)["identical"] == 0


def test_two_processes_share_a_trace(maker, tmp_path, monkeypatch):
    """Neither begins its first shard before the other has one in hand."""
    assert maker.finish(tmp_path / "quiet") == 0
    together, begun, plain = multiprocessing.get_context("fork").Barrier(2), [], store.making.make_shard

    def make_shard(*args):
        if not begun:
            together.wait(120)
        begun.append(1)
        plain(*args)

    monkeypatch.setattr(store.making, "make_shard", make_shard)
    quiet = store.content(store.only(tmp_path / "quiet"))
    assert store.two_round(maker, tmp_path, quiet, 1) == {"rounds": 1, "shared": 1, "identical": 1}


def test_a_part_that_was_not_run_or_went_wrong_is_missed():
    good = {
        "killed": {"kills": 150, "runs": 3, "identical": 3},
        "workers_killed": {"kills": 150, "workers": 3, "runs": 2, "identical": 2},
        "damaged": [{"identical": True}],
        "two_processes": {"rounds": 6, "shared": 6, "identical": 6},
        "full_disk": {"tested": True, "half_files": [], "identical": True, "message": "no room"},
    }
    assert not missed(store.crash_goals(good))
    for part, value in (
        ("killed", {"kills": 149, "runs": 3, "identical": 3}),
        ("killed", {"kills": 150, "runs": 0, "identical": 0}),
        ("workers_killed", {"kills": 150, "workers": 3, "runs": 2, "identical": 1}),
        ("damaged", [{"identical": True}, {"identical": False}]),
        ("two_processes", {"rounds": 6, "shared": 5, "identical": 6}),
        ("full_disk", {"tested": False, "why": "no right to mount"}),
        ("full_disk", {"tested": True, "half_files": ["a.partial"], "identical": True, "message": "no room"}),
    ):
        assert len(missed(store.crash_goals(good | {part: value}))) == 1, part
    many = {
        "shards_made": 99,
        "shards_made_twice": 9,
        "shards": 99,
        "prompts": 99,
        "workers": 8,
        "prompts_per_second": 1,
        "peak_memory_mb": 1,
    }
    assert missed(store.prompt_goals(many)) and not missed(store.prompt_goals(many | {"workers": 9}))
    assert missed(store.prompt_goals(many | {"workers": 9, "shards_made": 98}))


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
