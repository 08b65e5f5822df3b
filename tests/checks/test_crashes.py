"""The check that kills: what it counts is what happens."""

from checks.crashes import Traced, content, only, two_round
from checks.tiny_texts import PROMPTS
from eelib import Task, trace


def test_of_two_processes_one_waits_and_says_so(model_of, tmp_path):
    work = Traced.__new__(Traced)  # with a tiny model, not the shipped one
    work.model, work.task, work.trace = model_of("llama"), Task.from_prompts(PROMPTS), trace
    assert work.finish(tmp_path / "quiet") == 0
    found = two_round(work, tmp_path, content(only(tmp_path / "quiet")), 1)
    assert found == {"rounds": 1, "one_waited": 1, "first_killed_second_finished": 0, "identical": 1}
