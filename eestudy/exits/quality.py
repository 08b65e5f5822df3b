"""A task's score at each number of a way, such as a threshold: of texts or labels that exits emit, teacher-forced."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from torch import Tensor

from eelib.common.errors import InputError
from eelib.exits.trace_scores import counted_rows
from eelib.models.model import Model
from eelib.tasks.metrics import FromTotals, mean_of
from eelib.tasks.task import Task
from eelib.tracing.trace import Trace
from eestudy.exits.sweeps import Sweep
from eestudy.exits.task_quality import grouped, item_stats
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.resampling import bootstrap_totals

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
    score: FromTotals

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


class Scorer:
    """Sums of a task's first score; each text is decoded once, and scored once an item, as long as this lives."""

    def __init__(self, task: Task, text: Text):
        self.task, self.text = task, text
        self.known: dict[bytes, str] = {}
        self.rows: dict[tuple[int, str], int] = {}
        self.sums = np.empty((0, 0))
        self.name, self.score = "", mean_of([])[1]  # until a text is scored

    def said(self, ids: np.ndarray) -> str:
        """What token ids stand for; decoding is slow."""
        if (key := ids.tobytes()) not in self.known:
            self.known[key] = self.text(ids.tolist())
        return self.known[key]

    def of(self, pairs: Sequence[tuple[int, str]]) -> np.ndarray:
        """[n, columns] of (item, text) each. InputError for a task without references."""
        if new := [pair for pair in dict.fromkeys(pairs) if pair not in self.rows]:
            found = item_stats(self.task.pick([item for item, _ in new]), [output for _, output in new])
            if not found:
                raise InputError(f"{self.task.name} has no references that outputs could be scored against")
            self.name, (sums, self.score) = next(iter(found.items()))
            self.sums = np.vstack([self.sums, sums]) if self.rows else sums
            self.rows |= {pair: row for row, pair in enumerate(new, len(self.rows))}
        return self.sums[[self.rows[pair] for pair in pairs]]


def quality(
    way: Sweep,
    trace: Trace,
    scorer: Scorer,
    values: Sequence[float] | None = None,
    sequences: np.ndarray | None = None,
) -> Quality:
    """The task's first score as tokens leave by a way at each of `values`, by default POINTS by even mean layers.

    `sequences`: the sequences of the trace that count, all by default. InputError for a task without references.
    """
    values = way.values(tokens_of(trace, sequences), POINTS) if values is None else values
    return scored(values, way.exits(values), way.tokens, trace, scorer, sequences)


def tokens_of(trace: Trace, sequences: np.ndarray | None) -> np.ndarray:
    """bool [tokens]: those of some sequences; of all where None."""
    owners = trace.tokens["sequence"].to_numpy()
    return np.isin(owners, owners if sequences is None else sequences)


def scored(
    values: Sequence[float],
    exits: Iterable[Tensor],
    tokens: Tensor,
    trace: Trace,
    scorer: Scorer,
    sequences: np.ndarray | None = None,
) -> Quality:
    """The task's first score at each of K `values`, at which the tokens of a trace leave by the K `exits` [n].

    `tokens` [n, L]: what leaving at layers 1..L emits; the rest as in `quality`.
    """
    rows = tokens_of(trace, sequences)
    items = trace.sequences["sequence"].to_numpy()
    items = items if sequences is None else items[np.isin(items, sequences)]
    owners = trace.tokens["sequence"].to_numpy()
    counted = counted_rows(trace, rows)
    bounds = np.flatnonzero(np.diff(owners[rows])) + 1
    told, layers = [trace.tokens["token_id"].to_numpy()], []  # full depth's first
    for left in exits:
        told.append(tokens.gather(1, left[:, None] - 1)[:, 0].numpy())
        layers.append(float(left[counted].double().mean()))
    pairs = [
        (item, scorer.said(part)) for ids in told for item, part in zip(items.tolist(), np.split(ids[rows], bounds))
    ]
    sums = scorer.of(pairs).reshape(len(told), len(items), -1)
    groups = [scorer.task.groups[item] for item in items]
    return Quality(scorer.name, np.array(values, float), np.array(layers), groups, sums[1:], sums[0], scorer.score)
