"""A task's score as a function of a rule's threshold: the texts or labels that its exits emit, teacher-forced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from eelib.common.errors import InputError
from eelib.common.interval import Interval
from eelib.common.stats import bootstrap_totals
from eelib.exits.curve import curve, rule_at
from eelib.exits.offline import Scores, emitted, leave
from eelib.exits.rule import Rule
from eelib.models.model import Model
from eelib.tasks.quality import item_sums
from eelib.tasks.sums import Score, grouped
from eelib.tasks.task import Task
from eelib.tracing.trace import Trace

POINTS = 12  # thresholds whose texts are scored
Text = Callable[[list[int]], str]


@dataclass(frozen=True)
class Quality:
    """A score (0-100) of n items at K rising `values` of a rule's threshold, beside full depth.

    `sums` [K, n, columns] and `full` [n, columns] are what `score` needs of each item; `groups` [n].
    """

    name: str
    values: np.ndarray
    mean_layers: np.ndarray
    groups: list[str]
    sums: np.ndarray
    full: np.ndarray
    score: Score

    @property
    def scores(self) -> np.ndarray:
        """The score at each threshold [K]."""
        return self.score(self.sums.sum(axis=1))

    @property
    def full_score(self) -> float:
        """The score at full depth."""
        return float(self.score(self.full.sum(axis=0)[None])[0])

    def interval(self, at: int | None) -> Interval:
        """The score at the threshold with this index; None for full depth."""
        return bootstrap_totals(self.score, grouped(self.full if at is None else self.sums[at], self.groups))

    def gain(self, at: int) -> Interval:
        """The score there minus that of full depth, paired by group."""
        return self.paired(at, lambda early, full: early - full)

    def kept(self, at: int) -> Interval:
        """The score there as a share of that of full depth, paired by group. NotEstimable where full depth has 0."""
        return self.paired(at, lambda early, full: early / full)

    def paired(self, at: int, combine: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Interval:
        """The interval of a function of both scores [draws]."""

        def of(totals: np.ndarray) -> np.ndarray:
            early, full = np.hsplit(totals, 2)
            return combine(self.score(early), self.score(full))

        return bootstrap_totals(of, grouped(np.hstack([self.sums[at], self.full]), self.groups))

    def losses(self) -> np.ndarray:
        """What each group's items lose against full depth on average, as a share of the scale, 0 to 1: [G, K]."""
        early = np.stack([self.score(sums) for sums in self.sums], axis=1)
        lost = ((self.score(self.full)[:, None] - early) / 100).clip(0.0, 1.0)
        return pd.DataFrame(lost).groupby(np.asarray(self.groups)).mean().to_numpy()


def text_of(model: Model) -> Text:
    """What a model's token ids stand for, up to the first end token: a text, or a classifier's label."""
    labels, ends = model.labels, model.eos_ids if model.adapter.writes else set()

    def text(ids: list[int]) -> str:
        if labels:
            return labels[ids[0]]
        stop = next((row for row, token in enumerate(ids) if token in ends), len(ids))
        return str(model.tokenizer.decode(ids[:stop], clean_up_tokenization_spaces=False)) if stop else ""

    return text


def quality(
    rule: Rule,
    found: Scores,
    trace: Trace,
    task: Task,
    text: Text,
    values: Sequence[float] | None = None,
    sequences: np.ndarray | None = None,
) -> Quality:
    """The task's first score at each of `values`, by default POINTS of the curve's by even mean layers.

    `sequences`: the sequences of the trace that count, all by default; `text`: see `text_of`. Each different text of an
    item is scored once. InputError for a task without references.
    """
    items = trace.sequences["sequence"].to_numpy()
    items = items if sequences is None else items[np.isin(items, sequences)]
    owners = trace.tokens["sequence"].to_numpy()
    rows = np.isin(owners, items)
    along = curve(rule, found, trace, rows, values, POINTS)
    positions = torch.tensor(trace.tokens["position"].to_numpy())
    bounds = np.flatnonzero(np.diff(owners[rows])) + 1
    told = [trace.tokens["token_id"].to_numpy()]  # full depth's first
    for value in along.values:
        told.append(emitted(found, leave(rule_at(rule, value), found, positions)).numpy())
    known: dict[tuple[int, bytes], str] = {}
    pairs: dict[tuple[int, str], int] = {}
    cells = np.empty((len(told), len(items)), dtype=int)  # which of the pairs each item's text is
    for point, tokens in enumerate(told):
        for row, ids in enumerate(np.split(tokens[rows], bounds)):
            key = (row, ids.tobytes())
            if key not in known:
                known[key] = text(ids.tolist())
            cells[point, row] = pairs.setdefault((row, known[key]), len(pairs))
    asked = task.pick([int(items[row]) for row, _ in pairs])
    scored = item_sums(asked, [output for _, output in pairs])
    if not scored:
        raise InputError(f"{task.name} has no references that outputs could be scored against")
    name, (sums, score) = next(iter(scored.items()))
    groups = [task.groups[item] for item in items]
    return Quality(name, along.values, along.mean_layers, groups, sums[cells[1:]], sums[cells[0]], score)
