"""A budget of risk for each class of token: how many of those that leave early may be wrong (A)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from eelib.common.errors import NotEstimable
from eelib.exits.exit_rule import Constant, ExitRule
from eelib.exits.gates.gate import NO_EXIT
from eelib.exits.trace_scores import rule_at
from eestudy.exits.gates import ByClass
from eestudy.old.analysis.production import CALIBRATION, KINDS, LEAST, Left, Served, leaving
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.stats import bootstrap_mean
from eestudy.words import CLASSES

GRID = 100  # thresholds that are tried for a class
ONE, EACH, CLOSED = "one threshold", "by class", "by class, some never"


def budgets(served: Served, budget: float, never: Sequence[str]) -> dict[str, Left]:
    """{ONE, EACH, and where some classes never leave CLOSED: report sides}, all within one budget on the calibration
    sides of all tasks together. Each class is calibrated by itself, as if no other left.
    """
    parts = [calibration_part(served, task) for task in served.tasks]
    scores, tokens, final = (torch.cat(values) for values in zip(*parts))
    wrong, classes = tokens != final[:, None], served.pieces.of(tokens)
    value = lowest_threshold(scores, wrong, budget)
    rules: dict[str, ExitRule | None] = {ONE: rule_at(served.rule, value) if value < np.inf else None}
    each = [
        lowest_threshold(scores.masked_fill(classes != number, NO_EXIT), wrong, budget) if name in KINDS else np.inf
        for number, name in enumerate(CLASSES)
    ]
    closed = [np.inf if name in never else value for name, value in zip(CLASSES, each)]
    for name, values in {EACH: each, CLOSED: closed}.items():
        if name == EACH or never:
            gate = ByClass(served.rule.gate, served.pieces, tuple(values))
            rules[name] = replace(served.rule, gate=gate, threshold=Constant(gate.default))
    return {name: {task: leaving(served, task, rule) for task in served.tasks} for name, rule in rules.items()}


def calibration_part(served: Served, task: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(scores [n, L-1], tokens [n, L-1], final tokens [n]) of the counted tokens of a calibration side."""
    trace = served.study.traces[task]
    rows = served.sides[task][CALIBRATION] & trace.statistic_rows()
    found = served.study.scores(served.rule, task)
    final = torch.tensor(trace.tokens["token_id"].to_numpy())
    return found.score[rows][:, :-1].nan_to_num(NO_EXIT), found.tokens[rows][:, :-1], final[rows]


def lowest_threshold(scores: torch.Tensor, wrong: torch.Tensor, budget: float) -> float:
    """The lowest of GRID thresholds from which on at most `budget` of the tokens whose score passes are wrong, where
    they first pass; scores and wrong are [n, L-1]. Infinite where the highest is not met, or fewer than LEAST pass.
    """
    values = scores[scores > NO_EXIT]
    if len(values) < LEAST:
        return np.inf
    best = np.inf
    for value in sorted(set(np.quantile(values.numpy(), np.linspace(0, 1, GRID)).tolist()), reverse=True):
        passed = scores > value
        early = passed.any(1)
        if int(early.sum()) < LEAST:
            continue
        first = passed.int().argmax(1)
        if float(wrong.gather(1, first[:, None])[early].double().mean()) > budget:
            break
        best = float(value)
    return best


def wrong_of_early(left: Left, kind: str | None, seed: int = 0) -> Interval:
    """Share of the tokens that leave early as a kind which are wrong, all tasks together: those of one group, of
    several tasks too, are one unit. NotEstimable for too few.
    """
    rows = pd.concat(left.values())
    rows = rows[rows["early"] & ((rows["said"] == kind) if kind else True)]
    if len(rows) < LEAST:
        raise NotEstimable(f"fewer than {LEAST} such tokens")
    return bootstrap_mean(rows["wrong"].to_numpy(float), rows["group"].to_numpy(), seed=seed)
