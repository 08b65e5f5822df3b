"""The check that kills: what it counts is what happens."""

import importlib
import multiprocessing
import os
import signal
import threading
import time

import pytest
from tqdm import tqdm

from checks.crashes import Traced, all_well, content, many_round, only, two_round
from checks.tiny_texts import PROMPTS
from eelib import Task, trace
from eelib.tracing import make as making


@pytest.fixture
def work(model_of):
    """The check's own, with a tiny model in place of the shipped one."""
    work = Traced.__new__(Traced)
    work.model, work.task, work.trace, work.making = model_of("llama"), Task.from_prompts(PROMPTS * 4), trace, making
    return work


def test_two_processes_share_a_trace(work, tmp_path, monkeypatch):
    """Neither begins its first shard before the other has one in hand."""
    assert work.finish(tmp_path / "quiet") == 0
    together, begun, plain = multiprocessing.get_context("fork").Barrier(2), [], making.make_shard

    def make_shard(*args):
        if not begun:
            together.wait(120)
        begun.append(1)
        plain(*args)

    monkeypatch.setattr(making, "make_shard", make_shard)
    found = two_round(work, tmp_path, content(only(tmp_path / "quiet")), 1)
    assert found == {"rounds": 1, "shared": 1, "first_killed_second_finished": 0, "identical": 1}


def test_workers_are_killed_and_the_others_finish(work, tmp_path):
    assert work.finish(tmp_path / "quiet") == 0
    found = many_round(work, tmp_path, content(only(tmp_path / "quiet")), 0.4, 2, 3, 0)
    assert found["kills"] >= 3 and found["identical"] == found["runs"] >= 1
    assert sum(found["moments_of_the_trace"].values()) == found["kills"]


def test_a_lock_of_progress_bars_that_nobody_gives_back_stops_no_child(work, tmp_path):
    held, done = threading.Event(), threading.Event()

    def hold():
        with tqdm.get_lock():
            held.set()
            done.wait()

    threading.Thread(target=hold, daemon=True).start()
    assert held.wait(10)
    child, until, ended = work.start(tmp_path / "runs"), time.monotonic() + 120, 0
    while not ended and time.monotonic() < until:
        time.sleep(0.1)
        ended, status = os.waitpid(child, os.WNOHANG)
    done.set()
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended and status == 0


def test_a_part_that_was_not_run_has_not_passed():
    good = {
        "killed": {"runs": 3, "identical": 3},
        "workers_killed": {"runs": 2, "identical": 2},
        "damaged": [{"identical": True}],
        "two_processes": {"rounds": 6, "shared": 6, "identical": 6},
        "full_disk": {"tested": True, "identical": True},
    }
    assert all_well(good)
    for part, value in (
        ("full_disk", {"tested": False, "why": "no right to mount"}),
        ("killed", {"runs": 0, "identical": 0}),
        ("workers_killed", {"runs": 2, "identical": 1}),
        ("damaged", [{"identical": True}, {"identical": False}]),
        ("two_processes", {"rounds": 6, "shared": 5, "identical": 6}),
    ):
        assert not all_well(good | {part: value}), part


@pytest.mark.parametrize(
    "name",
    ["bad_input", "cluster", "coverage", "crashes", "families", "joint_memory", "lens", "many_prompts", "reproducible"],
)
def test_results_go_where_the_data_are(name, monkeypatch, tmp_path):
    check = importlib.import_module(f"checks.{name}")
    monkeypatch.setenv("EELIB_DATA", str(tmp_path))
    try:
        assert importlib.reload(check).RESULT == tmp_path / "checks" / f"{name}.json"
    finally:
        monkeypatch.undo()
        importlib.reload(check)
