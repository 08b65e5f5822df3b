"""Verdicts of pages that are not rewritten yet, from their intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import eestudy.claims as claims
from eelib.common.errors import InputError
from eestudy.claims import (
    FAILS,
    FEW_TASKS,
    FEWEST_TASKS,
    HOLDS,
    UNDECIDED,
    UNTESTABLE,
    Verdict,
    claim,
)
from eestudy.old.statistics.interval import Interval
from eestudy.resampling import NOTHING
from eestudy.statistics import Interval as NewInterval


def judge(claim_id: str, interval: Interval, requirement_met: bool = False) -> Verdict:
    """Verdict on a claim from the whole interval: on the claimed side, on the other, or across the threshold."""
    if not all(map(math.isfinite, interval[:3])) or interval[1] > interval[2]:
        raise InputError(f"not an interval for {claim_id}: {interval}")
    estimate, low, high = map(float, interval[:3])
    new = NewInterval(estimate, low, high, int(interval[3]), FEWEST_TASKS)
    return claims.judge(claim_id, new, requirement_met=requirement_met)


def judge_between(claim_id: str, interval: Interval, roundings: Sequence[Interval]) -> Verdict:
    """Verdict from an interpolated statistic; undecided where those of the two roundings around it disagree."""
    verdict = judge(claim_id, interval)
    around = {judge(claim_id, rounded).verdict for rounded in roundings}
    if verdict.verdict in (HOLDS, FAILS) and len(around) > 1:
        return replace(verdict, verdict=UNDECIDED, reason="the two roundings of the depth disagree")
    return verdict


def carried(verdict: Verdict, without: Mapping[str, Verdict]) -> Verdict:
    """The same, of few tasks where it is decided and one task's absence changes it; its note says what it is then.

    without: {task: the verdict that the other tasks give}.
    """
    other = {task: found for task, found in without.items() if found.verdict != verdict.verdict}
    if verdict.verdict not in (HOLDS, FAILS) or not other:
        return verdict
    told = (f"without {task} {found.verdict}, {found.interval}" for task, found in other.items())
    return replace(verdict.weighing(FEW_TASKS), note="; ".join(filter(None, (verdict.note, *told))))


def untestable(claim_id: str, reason: str) -> Verdict:
    """Verdict for a claim that a run cannot speak to, with the reason."""
    if not reason.strip():
        raise InputError(f"untestable({claim_id!r}) needs a reason")
    return Verdict(claim(claim_id), NOTHING, UNTESTABLE, reason)
