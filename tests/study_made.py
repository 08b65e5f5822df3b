"""A study of traces that are given, with nothing decoded: what the tables and verdicts of a page read."""

from types import SimpleNamespace

from eelib.tasks.task import load_task
from eestudy.old.study.study import Study
from eestudy.parameters import Parameters


def made_study(traces: dict, learnt: bool = True, layers: int = 12, **parameters) -> Study:
    """Traces by task; all tasks are learnt, or none is. The tasks are shipped ones, by name."""
    study = Study.__new__(Study)
    study.parameters = Parameters({"seed": 0, "max_new_tokens": 64} | parameters)
    study.model = SimpleNamespace(name="made", layers=layers, dtype="float32", tokenizer=SimpleNamespace(vocab_size=9))
    study.traces = traces
    study.tasks = {name: load_task(name, limit=1) for name in traces}
    study.learnt = dict.fromkeys(traces, learnt)
    study.quality = {name: {"BLEU": 20.0} for name in traces}
    return study


class Kept:
    """What a page puts into its results."""

    def __init__(self, study: Study):
        self.study, self.tasks, self.overall = study, {}, {}

    def put(self, task, key, value):
        """One figure of a task."""
        self.tasks[task, key] = value

    def put_all(self, task, figures):
        """Several."""
        for key, value in figures.items():
            self.put(task, key, value)

    def say(self, key, value):
        """One figure over tasks."""
        self.overall[key] = value

    def say_all(self, figures):
        """Several."""
        self.overall |= figures
