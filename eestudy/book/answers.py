"""What each page found, in two or three sentences: words from here, every number from the run's results.

A sentence names figures of a result by key; one whose figures a run does not have is left out. Which way something
differs is said by the interval: all of it above zero, all of it below, or neither.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from eestudy.book.verdicts import JUDGED
from eestudy.old.statistics.interval import Interval

# By notebook. A claim's id stands for its estimate, "ID bound" for the claim's threshold, "ID on" for the model or
# models that it was judged on. KEY% is 100 times the figure, KEY± the ends of its interval, KEY?A|B|C the word A where
# that lies above 0, B where it lies below, C where neither.
ANSWERS: dict[str, tuple[str, ...]] = {}


class Ends(NamedTuple):
    """The ends of a 95% interval."""

    low: float
    high: float

    def __format__(self, pattern: str) -> str:
        return f"95% interval {self.low:{pattern}} to {self.high:{pattern}}"


class Figures(Mapping[str, Any]):
    """The figures of results by key, as sentences ask for them; KeyError where there is none."""

    def __init__(self, kept: Mapping[str, Any]) -> None:
        self.kept = kept

    def __getitem__(self, key: str) -> Any:
        key, _, words = key.partition("?")
        name = key.removesuffix("±")
        value, scale = self.kept.get(name), 1
        if value is None and name.endswith("%"):
            value, scale = self.kept.get(name[:-1]), 100
        if value is None or isinstance(value, str):
            if not value:
                raise KeyError(key)
            return value
        value = value.scaled(scale)
        if key == name and not words:
            return value.estimate
        if not math.isfinite(value.low):
            raise KeyError(key)
        return value.side(*words.split("|")) if words else Ends(value.low, value.high)

    def __iter__(self) -> Iterator[str]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)


def figures(result: Mapping[str, Any], before: str = "") -> Figures:
    """Texts, and numbers as `Interval`s: what a notebook kept over all tasks, and what its claims rest on."""
    kept: dict[str, Any] = {}
    for key, value in result.get("overall", {}).items():
        estimate = value.get("estimate")
        if estimate is not None:
            kept[before + key] = estimate if isinstance(estimate, str) else as_interval(value)
    for row in result.get("claims", []):
        if row.get("estimate") is not None and row["verdict"] in JUDGED:
            kept[before + row["id"]] = as_interval(row)
            kept[f"{before}{row['id']} bound"] = as_interval({"estimate": row["threshold"]})
            kept[f"{before}{row['id']} on"] = row.get("models") or result.get("model", "")
    return Figures(kept)


def as_interval(value: Mapping[str, Any]) -> Interval:
    """A figure of a results file; without an interval, its ends are NaN."""
    estimate, low, high = (math.nan if (end := value.get(key)) is None else end for key in ("estimate", "low", "high"))
    return Interval(estimate, low, high, int(value.get("sequences") or 0))


def sentences(patterns: Iterable[str], known: Figures) -> str:
    """The sentences whose figures are all known, as plain text."""
    said = []
    for pattern in patterns:
        try:
            said.append(pattern.format_map(known))
        except KeyError:
            continue
    return " ".join(said)


def answer(notebook: str, result: Mapping[str, Any]) -> str:
    """What a page found, as plain text; nothing for a notebook that is not known here."""
    return sentences(ANSWERS.get(notebook, ()), figures(result))
