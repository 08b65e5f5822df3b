"""The figures that a notebook states: in its results file, and in its prose."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from eestudy.claims import Verdict
from eestudy.markup.markdown import text
from eestudy.old.statistics.interval import Interval
from eestudy.old.study.study import QUALITY, Study
from eestudy.parameters import Parameters
from eestudy.results import write_results


def open_page(
    notebook: str,
    parameters: Parameters,
    sites: int = 0,
    pairs: int = 0,
    premise: str = QUALITY,
) -> tuple[Study, "Results"]:
    """What a page about one model starts from: its study, with all traces made, and an empty set of results."""
    study = Study(parameters, sites=sites, pairs=pairs, premise=premise)
    return study, Results(notebook, study)


class Results:
    """The figures that a notebook states: kept for the JSON file and glued for the prose.

    `beside` are studies of further models on the same page.
    """

    def __init__(self, notebook: str, study: Study, beside: Sequence[Study] = ()) -> None:
        self.notebook, self.study, self.beside = notebook, study, beside
        self.tasks: dict[str, dict] = {}
        self.overall: dict[str, dict] = {}
        self.claims: list[dict] = []

    @property
    def folder(self) -> Path:
        """Where this page's results lie: results_folder/<model>."""
        return Path(self.study.parameters.results_folder) / self.study.model.name

    @property
    def figure_folder(self) -> Path:
        """Where this page's figures are saved, for other pages: `figures.style(results.figure_folder)`."""
        return self.folder / "figures"

    def put(self, task: str, key: str, value: Interval | float) -> None:
        """Keep one figure of one task."""
        self.tasks.setdefault(task, {})[key] = as_dict(value)

    def put_all(self, task: str, figures: Mapping[str, Interval | float]) -> None:
        """Keep several figures of one task, each under its key."""
        for key, value in figures.items():
            self.put(task, key, value)

    def keep(self, key: str, value: Interval | float | str) -> None:
        """Keep one figure over all tasks, which no prose states."""
        self.overall[key] = as_dict(value)

    def say(self, key: str, value: Interval | float | str) -> None:
        """Keep one figure over all tasks and make it available to the prose as {glue:text}`key:format`.

        An interval is glued as `key`, `key_low` and `key_high`.
        """
        from myst_nb import glue

        self.keep(key, value)
        if isinstance(value, Interval):
            for name, part in ((key, value.estimate), (f"{key}_low", value.low), (f"{key}_high", value.high)):
                glue(name, float(part), display=False)
        else:
            glue(key, value if isinstance(value, str) else float(value), display=False)

    def say_all(self, figures: Mapping[str, Interval | float | str]) -> None:
        """Keep several figures over all tasks, each under its key, as `say` does."""
        for key, value in figures.items():
            self.say(key, value)

    def tell(self, key: str, sentences: str) -> None:
        """Keep whole sentences and make them available to the prose as {glue:md}`key`; nothing in them is markup."""
        from IPython.display import Markdown
        from myst_nb import glue

        self.keep(key, sentences)
        glue(key, Markdown(text(sentences)), display=False)

    def judge(self, verdicts: list[Verdict]) -> None:
        """Keep the verdicts on this notebook's claims."""
        self.claims = [v.to_dict() for v in verdicts]

    def save(self) -> Path:
        """Write results/<model>/<notebook>.json, whole or not at all."""
        path = self.folder / f"{self.notebook}.json"
        found = {"learnt": self.study.learnt, "tasks": self.tasks, "overall": self.overall, "claims": self.claims}
        return write_results(path, self.study, self.beside, **found)


def as_dict(value: Interval | float | str) -> dict:
    """An interval, or a bare figure, as JSON keeps it."""
    if isinstance(value, Interval):
        estimate, low, high = map(float, value[:3])
        return {"estimate": estimate, "low": low, "high": high, "sequences": int(value.sequences)}
    return {"estimate": value if isinstance(value, str) else float(value)}
