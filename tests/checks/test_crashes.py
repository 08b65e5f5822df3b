"""The check that kills: what it counts is what happens."""

import importlib

import pytest

from checks.crashes import Traced, content, only, two_round
from checks.tiny_texts import PROMPTS
from eelib import Task, trace


def test_of_two_processes_one_waits_and_says_so(model_of, tmp_path):
    work = Traced.__new__(Traced)  # with a tiny model, not the shipped one
    work.model, work.task, work.trace = model_of("llama"), Task.from_prompts(PROMPTS), trace
    assert work.finish(tmp_path / "quiet") == 0
    found = two_round(work, tmp_path, content(only(tmp_path / "quiet")), 1)
    assert found == {"rounds": 1, "one_waited": 1, "first_killed_second_finished": 0, "identical": 1}


@pytest.mark.parametrize("name", ["bad_input", "coverage", "crashes", "families", "joint_memory", "reproducible"])
def test_results_go_where_the_data_are(name, monkeypatch, tmp_path):
    check = importlib.import_module(f"checks.{name}")
    monkeypatch.setenv("EELIB_DATA", str(tmp_path))
    try:
        assert importlib.reload(check).RESULT == tmp_path / "checks" / f"{name}.json"
    finally:
        monkeypatch.undo()
        importlib.reload(check)
