"""The results of a notebook: its sentences, the numbers in them, and its verdicts, stored in one JSON file."""

import html
import json
import math
import time
from collections.abc import Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from IPython.display import HTML, Markdown, display
from jinja2 import meta

from eelib.common.errors import InputError
from eelib.common.files import write_atomically
from eestudy.claims import Verdict, claims, verdict_table
from eestudy.figures import style
from eestudy.markup.markdown import Shown, text
from eestudy.parameters import in_project
from eestudy.resampling import MINIMUM_GROUPS, Interval
from eestudy.study import MOST_REPEATED, SHORTEST, Study

OF_A_TRACE = (  # what results keep of each trace that they rest on
    "weights",
    "task_hash",
    "settings",
    "version",
    "versions",
    "seconds",
    "rows",
    "mismatches",
    "skipped",
    "layers",
)
Value = Interval | float | int | str


class Results:
    """The sentences, numbers and verdicts of one notebook on one model.

    A sentence is a Jinja text whose numbers are variables of the notebook: `say("{{ early|pct }} of tokens ...")`.
    Filters: `pct` (a share as a percentage, `pct(1)` with one decimal), `num(2)`, `ci` and `pct_ci` (with the 95%
    interval), `side("later", "earlier", "neither")` (where the whole interval lies). Values without a filter are shown
    as plain text, without markup.

    Args:
        notebook: its name.
        study: of the page's model.
        beside: studies of the other models on the page; a cell may add further ones to the attribute of this name.
        names: the notebook's variables, its `globals()`. A sentence may also use `name`, the model's name, and `why`,
            the reason why nothing can be concluded, which is empty where something can.
    """

    def __init__(self, notebook: str, study: Study, beside: Sequence[Study], names: Mapping[str, Any]) -> None:
        self.notebook, self.study, self.beside, self.names = notebook, study, [*beside], names
        self.headline = ""
        self.numbers: dict[str, Any] = {}
        self.verdicts: list[Verdict] = []
        style.style()

    @property
    def folder(self) -> Path:
        """The folder of this page's results: results_folder/<model>."""
        return in_project(self.study.parameters.results_folder) / self.study.model.name

    @property
    def where(self) -> str:
        """Models and tasks, for captions of figures and tables that also show the studies beside the page's own."""
        return " ".join([self.study.where, *(f"Beside it: {one.where}" for one in self.beside)])

    def say(self, template: str, **values: Value) -> None:
        """Show a paragraph of Markdown and record its numbers; nothing is shown for an empty one.

        `values`: numbers in addition to the notebook's variables.
        """
        if words := self._fill(template, values):
            display(Markdown(words))

    def answer(self, template: str) -> None:
        """Show the page's answer, and record it for the first page. The book moves its cell under the page's title."""
        self.headline = self._fill(template, {})
        display(Markdown(self.headline))

    def judge(self, *verdicts: Verdict) -> None:
        """Record the verdicts on this notebook's claims, and show them in a table. InputError where one is missing."""
        wanted, found = [c.id for c in claims() if c.notebook == self.notebook], [v.claim.id for v in verdicts]
        if missing := sorted(set(wanted) - set(found)):
            raise InputError(
                f"no verdict on {', '.join(missing)}; data/papers/claims.json has {self.notebook}'s claims"
            )
        self.verdicts = list(verdicts)
        style.table(verdict_table(verdicts), f"The claims of this page. {self.study.where}")

    def describe(self) -> None:
        """Print when and how all traces were made, and show a table of their tasks."""
        every = [self.study, *self.beside]
        print(*(study.ran for study in every), sep="\n")
        about = pd.concat([study.about_tasks().assign(model=study.model.name) for study in every])
        style.table(
            about[["model", *about.columns[:-1]]],
            f"Tasks of the run. A task has sensible text if at most {MOST_REPEATED:.0%} of its tokens stand in an "
            f"8-gram that occurs twice in their output, and at least {MINIMUM_GROUPS} outputs have {SHORTEST} tokens "
            "or more; a classifier's task, if it is above its baseline.",
        )

    def save(self) -> None:
        """Write results/<model>/<notebook>.json, completely or not at all: the results and their traces."""
        study, path = self.study, self.folder / f"{self.notebook}.json"
        content = {
            "notebook": self.notebook,
            "model": study.model.name,
            "date": time.strftime("%Y-%m-%d"),
            "parameters": dict(study.parameters),
            "manifest": {
                "device": study.model.device.type,
                "dtype": study.model.dtype,
                "versions": next(iter(study.traces.values())).manifest["versions"],
            },
            **described(study),
            "answer": self.headline,
            "overall": self.numbers,
            "claims": [verdict.to_dict() for verdict in self.verdicts],
        }
        if self.beside:
            content["beside"] = beside = dict[str, Any]()
            for other in self.beside:  # a model may stand there with several tasks
                known, new = beside.get(other.model.name, {}), described(other)
                beside[other.model.name] = {key: known.get(key, {}) | of_tasks for key, of_tasks in new.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, as_json(content))
        display(HTML(f"<p class='ee-written'>{html.escape(path.name)} is written.</p>"))

    def _fill(self, template: str, values: Mapping[str, Value]) -> str:
        given = {**self.names, "why": self.study.why_not(), "name": self.study.name, **values}
        used = meta.find_undeclared_variables(TEMPLATES.parse(template))
        for name in sorted(used - {"p"}):  # parameters are stored apart
            for key, value in members(name, given.get(name)):
                one, label, times = as_dict(value), key, 1
                # another sentence may have the same name for another number; NaN is not equal to itself
                while as_json(self.numbers.get(label, one)) != as_json(one):
                    times += 1
                    label = f"{key} ({times})"
                self.numbers[label] = one
        return " ".join(TEMPLATES.from_string(template).render(given).split())


# ---- filters of sentences


def pct(value: Value, digits: int = 0) -> Shown:
    """A share as a percentage, without its interval."""
    rounded = round(100 * number(value), digits) + 0.0  # no minus zero
    return Shown("–" if math.isnan(rounded) else f"{rounded:.{digits}f}%")


def num(value: Value, digits: int = 1) -> Shown:
    """A number, without its interval."""
    rounded = round(number(value), digits) + 0.0  # no minus zero
    return Shown("–" if math.isnan(rounded) else f"{rounded:,.{digits}f}")


def ci(value: Interval) -> Shown:
    """An estimate with its interval."""
    return Shown(str(value).replace("[", "\\["))


def pct_ci(value: Interval) -> Shown:
    """A share with its interval, in percent."""
    written = str(value.scaled(100)).replace("[", "\\[")
    if value.known and not value.bounded:  # a note stands in place of the interval
        return Shown(written.replace(" (", "% (", 1))
    return Shown(f"{written}%" if value.known else written)


def side(value: Interval, above: str, below: str, neither: str, of: float = 0.0) -> Shown:
    """`above`, `below` or `neither`, by where the whole interval lies."""
    return Shown(value.side(above, below, neither, of))


def number(value: Value) -> float:
    """The number itself; for an interval, its estimate."""
    return float(value.estimate if isinstance(value, Interval) else value)


def shown(value: Any) -> str:
    """The Markdown of an expression's value: text that no filter made is escaped."""
    return text(str(value) if isinstance(value, Interval) else value)


TEMPLATES = jinja2.Environment(undefined=jinja2.StrictUndefined, finalize=shown)
TEMPLATES.filters |= {f.__name__: f for f in (pct, num, ci, pct_ci, side)}

# ---- JSON


def described(study: Study) -> dict[str, Any]:
    """Quality, the tasks that can be judged, and the traces of a study, for JSON."""
    traces = {name: {key: made.manifest.get(key) for key in OF_A_TRACE} for name, made in study.traces.items()}
    return {
        "quality": study.quality,
        "sensible": study.sensible,
        "above_baseline": study.above_baseline,
        "traces": traces,
    }


def members(name: str, value: Any) -> list[tuple[str, Value]]:
    """(name, value) of a number, an interval or a text, or of each number and interval in a dictionary or list.

    A series is a dictionary where its labels are names; numbered ones are rows of a table.
    """
    if isinstance(value, (Interval, str, Number)):
        return [(name, value)]  # type: ignore[list-item]
    named = isinstance(value, Mapping) or (isinstance(value, pd.Series) and value.index.inferred_type == "string")
    inside = value.items() if named else ()
    inside = enumerate(value) if isinstance(value, (list, tuple)) else inside
    return [(f"{name}.{key}", one) for key, one in inside if isinstance(one, (Interval, Number))]  # type: ignore[misc]


def as_dict(value: Any) -> dict[str, Any]:
    """An interval, or a bare number or text, as a JSON object."""
    if isinstance(value, Interval):
        return dict(zip(("estimate", "low", "high", "sequences"), value))
    return {"estimate": value if isinstance(value, str) else float(value)}


def as_json(content: dict[str, Any]) -> bytes:
    """Content as JSON, which has no NaN: such numbers become null."""
    written = json.dumps(content, default=lambda number: number.item())  # of numpy
    return json.dumps(json.loads(written, parse_constant=lambda _: None), indent=1, ensure_ascii=False).encode()
