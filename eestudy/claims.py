"""What the papers published, what they claim, and whether a run agrees.

data/papers holds one JSON file per published table (facts only, each with its source, units and layer base) and
claims.json, where every claim has its statistic, direction and threshold before anything is run. A verdict is computed
here, never typed.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from scipy.stats import t

from eelib.common.errors import InputError
from eelib.common.files import data_folder
from eestudy.markup.text import short_number
from eestudy.resampling import Interval

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
UNTESTABLE, NOT_APPLICABLE = "not testable here", "not applicable"
NOT_IN_PAPER = "none stated"
# How much a verdict says: as the record has it, and as the run finds.
INFORMATIVE, CONSTRUCTED, OURS = "informative", "close to true by construction", "ours"
FEW_TASKS, REVERSED, CHANCE = "few tasks", "reversed by the control", "chance passes too"
WEIGHTS = (INFORMATIVE, CONSTRUCTED, OURS, FEW_TASKS, REVERSED, CHANCE)
FEWEST_TASKS = 3  # a verdict over fewer rests on few
CHANGED = "changed, by less than the tolerance, which is ours"


@dataclass(frozen=True)
class Claim:
    """A claim as it was fixed before the run.

    direction: the statistic lies "above" or "below" threshold, or "within" tolerance of it.
    published: the paper's own value of the statistic, where it prints one.
    minimum_sequences: least number of sequences of the smallest task; minimum_in_all: least value of that number times
    the number of tasks; None: no such minimum.
    requires: a condition that most runs do not meet; the claim is judged only with `requirement_met`.
    ours: prompted by the paper, but not stated in it.
    weight: of WEIGHTS, how much a verdict on it is worth, set before any run; weight_why: the reason, where needed.
    fixed: {date, commit} from which on the claim stands in the repository. amended: what was changed after that, oldest
    first: {date, commit, why, was: {field: earlier value}}.
    """

    id: str
    paper: str
    section: str
    notebook: str
    claim: str
    statistic: str
    direction: str
    threshold: float
    minimum_sequences: int
    published: float | None
    reference: str
    tolerance: float | None = None
    minimum_in_all: int | None = None
    requires: str | None = None
    ours: bool = False
    note: str | None = None
    weight: str = INFORMATIVE
    weight_why: str = ""
    fixed: dict[str, str] | None = None
    amended: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What a run shows about a claim: HOLDS, FAILS, UNDECIDED, UNTESTABLE or NOT_APPLICABLE, and why.

    models: names of the models that the verdict is about, if not the run's own model. found: weights, of WEIGHTS, that
    the run adds to the claim's own. note: a remark that a reader of the verdict needs.
    """

    claim: Claim
    interval: Interval
    verdict: str
    reason: str
    models: str = ""
    found: tuple[str, ...] = ()
    note: str = ""

    @property
    def judged(self) -> bool:
        """Whether the run could judge the claim."""
        return self.verdict not in (UNTESTABLE, NOT_APPLICABLE)

    @property
    def weights(self) -> tuple[str, ...]:
        """The verdict's weights, in the order of WEIGHTS; informative only where no other weight applies."""
        every = {self.claim.weight, *self.found, OURS if self.claim.ours else INFORMATIVE} - {INFORMATIVE}
        return tuple(weight for weight in WEIGHTS if weight in every) or (INFORMATIVE,)

    @property
    def p(self) -> float | None:
        """`p_value` before any correction; None where the claim was not judged."""
        return p_value(self.claim, self.interval) if self.judged else None

    def weighing(self, weight: str, found: bool = True) -> "Verdict":
        """The verdict with this weight added, if `found` and if the claim was judged."""
        return replace(self, found=(*self.found, weight)) if found and self.judged else self

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the interval's fields are null where there is none."""
        interval = dict(zip(("estimate", "low", "high", "sequences"), self.interval))
        return {
            "id": self.claim.id,
            "verdict": self.verdict,
            "reason": self.reason,
            "models": self.models,
            "note": self.note,
            "weights": list(self.weights),
            "p": self.p,
            **(interval if self.interval.known else dict.fromkeys(interval)),
            "direction": self.claim.direction,
            "threshold": self.claim.threshold,
        }


def claims() -> list[Claim]:
    """All claims, in the order of the record."""
    return [Claim(**row | {"amended": tuple(row.get("amended", ()))}) for row in _read("claims")["claims"]]


def judging() -> list[dict[str, str]]:
    """Changes of the rules by which all claims are judged, oldest first: {date, commit, why, was}."""
    return list(_read("claims")["judging"])


def claim(claim_id: str) -> Claim:
    """The claim with this id; InputError where there is none."""
    found = {row.id: row for row in claims()}
    if claim_id not in found:
        raise InputError(f"no claim {claim_id!r}; there are: {', '.join(found)}")
    return found[claim_id]


def judge(
    claim_id: str,
    interval: Interval,
    premise: str = "",
    requirement_met: bool = False,
    models: str = "",
    without: dict[str, Interval] | None = None,
    roundings: Sequence[Interval] = (),
    earlier: Interval | None = None,
    cannot: str = "",
) -> Verdict:
    """Verdict on a claim from the whole interval: on the claimed side, on the other, or across the threshold.

    Args:
        claim_id: as in data/papers/claims.json.
        interval: of the claim's statistic.
        premise: why the claim does not apply to this run; empty where it does.
        requirement_met: whether the run meets `Claim.requires`, for claims that have one.
        models: names of the models that the interval is about, if not the run's own model.
        without: {task: the statistic without it}; where one changes the verdict, its weight is few tasks.
        roundings: for a statistic between two layers, its values at both; undecided where their verdicts differ.
        earlier: the statistic of an earlier wording of the claim; its verdict stands in the note.
        cannot: why this run can't test the claim, beyond what the interval shows; empty where it can.
    """
    row = claim(claim_id)
    if why := premise or cannot or untestable(row, interval, requirement_met):
        verdict = NOT_APPLICABLE if premise else UNTESTABLE
        return Verdict(row, interval, verdict, why, models, note=earlier_wording(row, earlier))
    verdict, reason, note = side_of(row, interval)
    if verdict != UNDECIDED and len({side_of(row, rounded)[0] for rounded in roundings}) > 1:
        verdict, reason = UNDECIDED, "the two layers around the share of the depth disagree"
    others = {task: side_of(row, other) for task, other in (without or {}).items() if other.bounded}
    changed = [f"without {task} {o[0]}" for task, o in others.items() if o[0] != verdict and verdict != UNDECIDED]
    few_tasks = changed or interval.tasks < FEWEST_TASKS
    notes = [note, "; ".join(changed), earlier_wording(row, earlier)]
    found = (FEW_TASKS,) if few_tasks else ()
    return Verdict(row, interval, verdict, reason, models, found, "; ".join(filter(None, notes)))


def untestable(row: Claim, interval: Interval, requirement_met: bool) -> str:
    """Why a run can't judge a claim; empty where it can."""
    if row.requires and not requirement_met:
        return f"needs {row.requires}"
    if not interval.known:
        return "no tokens of the tasks that it needs can be judged"
    if interval.groups < row.minimum_sequences:
        return f"{interval.groups} sequences, fewer than {row.minimum_sequences}"
    if not interval.bounded:
        return "not enough groups that differ"
    in_all = interval.groups * interval.tasks
    return f"{in_all} sequences, fewer than {row.minimum_in_all}" if in_all < (row.minimum_in_all or 0) else ""


def side_of(row: Claim, interval: Interval) -> tuple[str, str, str]:
    """(verdict, reason, note) of an interval with bounds."""
    (bottom, top), where = bounds(row), wanted(row)
    if bottom < interval.low and interval.high < top:
        note = CHANGED if row.direction == "within" and not interval.low <= row.threshold <= interval.high else ""
        return HOLDS, f"the whole interval is {where}", note
    if interval.high <= bottom or interval.low >= top:
        return FAILS, f"none of the interval is {where}", ""
    return UNDECIDED, f"only part of the interval is {where}", ""


def bounds(row: Claim) -> tuple[float, float]:
    """The two values, one of which may be infinite, between which a claim puts the whole interval."""
    reach = row.tolerance or 0.0
    bottom, top = row.threshold - reach, row.threshold + reach
    return -math.inf if row.direction == "below" else bottom, math.inf if row.direction == "above" else top


def earlier_wording(row: Claim, interval: Interval | None) -> str:
    """The verdict by the claim's earlier wording, for a note; empty where there is no earlier wording."""
    if interval is None:
        return ""
    if untestable(row, interval, requirement_met=True):
        return "earlier wording: no verdict"
    return f"earlier wording: {side_of(row, interval)[0]}, {interval}"


def p_value(row: Claim, interval: Interval) -> float:
    """The two-sided p-value of the claim's bound: below 0.05 where the 95% interval does not reach the bound.

    The distance from the estimate to the interval's end on the bound's side is taken as the 97.5% quantile of Student's
    t, in standard errors, with the interval's degrees of freedom, or the groups less one where it has none (after
    Altman and Bland 2011, who take the normal). Of the two bounds of "within", the one with the larger p-value counts
    for an estimate between them, and the nearer one for an estimate outside.
    """
    if not interval.bounded:
        return math.nan
    bottom, top = bounds(row)
    degrees = interval.freedom if math.isfinite(interval.freedom) else max(interval.groups - 1, 1)

    def of(bound: float) -> float:
        away = abs(interval.estimate - bound)
        side = interval.estimate - interval.low if interval.estimate > bound else interval.high - interval.estimate
        if side <= 0:
            return 0.0 if away else 1.0
        return float(2 * t.sf(t.ppf(0.975, degrees) * away / side, degrees))

    if bottom < interval.estimate < top:
        return max(of(bound) for bound in (bottom, top) if math.isfinite(bound))
    return of(bottom if interval.estimate <= bottom else top)


def wanted(row: Claim) -> str:
    """Where a claim's whole interval has to lie, in words."""
    around = f" ± {short_number(row.tolerance)}" if row.tolerance else ""
    return f"{row.direction} {short_number(row.threshold)}{around}"


def amended(claim: Claim) -> str:
    """The date of a claim's last amendment, in words; empty where there is none."""
    return f"amended {claim.amended[-1]['date']}" if claim.amended else ""


def source(claim: Claim) -> str:
    """The source of a claim, in words."""
    return f"this study, after {claim.reference}" if claim.ours else claim.reference


def verdict_table(verdicts: Iterable[Verdict]) -> pd.DataFrame:
    """One row per verdict, with the reason why a claim was not judged, and with the models if not the page's own."""
    rows = [
        {
            "Claim": f"{v.claim.id}: {v.claim.claim}" + (f" ({amended(v.claim)})" if v.claim.amended else ""),
            "Verdict": v.verdict
            + (f" on {v.models}" if v.models else "")
            + ("" if v.judged else f" ({v.reason})")
            + (f" ({v.note})" if v.note else ""),
            "Weight": ", ".join(v.weights) if v.judged else "–",
            "This run": str(v.interval),
            "Holds if": wanted(v.claim),
            "Paper": NOT_IN_PAPER if v.claim.published is None else short_number(v.claim.published),
            "Statistic": v.claim.statistic,
            "Sequences": str(v.interval.groups) if v.interval.known else "–",
            "Source": source(v.claim),
        }
        for v in verdicts
    ]
    return pd.DataFrame(rows)


def tables() -> list[str]:
    """Ids of the published tables: D-speed-ups, P-table-1, M-figure-1, ..., and P-text, M-text for running text."""
    parts = (path.stem.rpartition("-") for path in data_folder("papers").glob("[DPM]-*.json"))
    numbered = sorted((kind, int(end) if end.isdigit() else 0, end) for kind, _, end in parts)
    return [f"{kind}-{end}" for kind, _, end in numbered]


def published(table: str) -> pd.DataFrame:
    """A published table, its rows as printed. attrs: source, title, columns (units and layer base of each), notes."""
    if table not in tables():
        raise InputError(f"no published table {table!r}; there are: {', '.join(tables())}")
    record = _read(table)
    frame = pd.DataFrame(record["rows"], columns=["row", *record["columns"]])
    frame.attrs.update({key: record[key] for key in ("source", "title", "columns", "notes")})
    return frame


def as_depth(layer: float, base: int | str) -> tuple[float, ...]:
    """A published layer as a number of blocks run: one reading, or both where the paper's base is unknown."""
    return {0: (layer + 1,), 1: (layer,), "unknown": (layer, layer + 1)}[base]


def _read(name: str) -> dict[str, Any]:
    return json.loads((data_folder("papers") / f"{name}.json").read_text(encoding="utf-8"))
