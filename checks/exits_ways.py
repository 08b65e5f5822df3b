"""Ways of decoding that `checks.exits` times, chosen by what the forecast puts first, and their rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eelib.exits.exit_rule import ExitRule, fixed_exit
from eelib.exits.forecast import Costs, Forecast
from eelib.exits.gates.gate import gate_named
from eelib.tasks.task import Task
from eelib.tracing.trace import Trace
from eestudy.old.analysis.speed import EXACT, Way, draft_table, plans_of

NEW_TOKENS = 64  # of each output, at most
DOUBTS, LONGEST = (0.1, 0.3, 0.5, 0.7), 8  # softmax differences below which drafting ends; its longest drafts
SUMS = ("seconds", "tokens", "agrees", "of", "drafted", "accepted", "deep")

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Known:
    """A way to be timed, and what is known of it beforehand; one of plain decoding has no forecast."""

    way: Way
    kind: str
    bound: float
    forecast: Forecast | None = None

    def told(self, size: int) -> dict[str, Any]:
        """For its row, in batches of `size`."""
        found: dict[str, Any] = {"kind": self.kind, "bound": self.bound}
        if self.forecast:
            now = replace(self.forecast, batch=size)
            found |= {"forecast": now.speed_up, "if_free": now.if_free, "mean_layers": now.mean_layers}
        return found


def fixed_drafts(costs: Costs, made: Trace, own: Sequence[int], layers: Sequence[int], top: int) -> list[Known]:
    """The drafts through one of the layers, and of a length, that the forecast puts first, `top` of them, with the
    ceiling of the formula.
    """
    options, found = draft_table(costs, made, own), []
    options = options[options["layer"].isin(layers)].sort_values("forecast", ascending=False)
    for row in options.head(top).to_dict("records"):
        layer, length = int(row["layer"]), int(row["draft"])
        way = Way(f"layer {layer}, drafts of {length}, verified", fixed_exit(layer), EXACT, length)
        plans = plans_of(fixed_exit(layer), made, own)
        expected = Forecast(costs, plans, fixed_exit(layer), EXACT, draft=length)
        found.append(Known(way, "lossless", row["ceiling"], expected))
    return found


def doubting_drafts(costs: Costs, made: Trace, own: Sequence[int], layers: Sequence[int]) -> Known:
    """Drafts through one of the layers that end where the gate doubts, those that the forecast puts first."""
    options = []
    for layer in layers:
        for doubt in DOUBTS:
            rule = ExitRule(gate_named("softmax_difference"), doubt, exit_layers=(layer,))
            expected = Forecast(costs, plans_of(rule, made, own), rule, EXACT, draft=LONGEST)
            way = Way(f"layer {layer} above {doubt:g}, drafts to {LONGEST}, verified", rule, EXACT, LONGEST)
            options.append(Known(way, "lossless", expected.bound, expected))
    return max(options, key=lambda one: one.forecast.speed_up if one.forecast else 0.0)


def totals(
    task: Task, known: Sequence[Known], size: int, times: Rows, texts: Mapping[tuple[str, int], list[str]]
) -> dict[str, dict[str, Any]]:
    """{way: its row} of what `eestudy.old.analysis.speed.timed` found in batches of `size`, summed over these."""
    found: dict[str, dict[str, Any]] = {}
    for row in times:
        total = found.setdefault(row["way"], dict.fromkeys(SUMS, 0.0))
        for key in SUMS:
            total[key] += float(row.get(key, 0))
    for (name, _), outputs in texts.items():
        found[name]["score"] = score(task, outputs)
    told = {one.way.name: one.told(size) for one in known}
    return {way: {"way": way, "kind": "library", "bound": None} | told.get(way, {}) | found[way] for way in found}


def score(task: Task, texts: list[str]) -> float:
    """The task's first score; 0 without one."""
    return next(iter(task.quality(texts).values()), 0.0)
