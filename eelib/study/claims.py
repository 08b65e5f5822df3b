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

from eelib.common.data import data_folder
from eelib.common.errors import InputError
from eelib.common.interval import NOTHING, Interval, short_number

HOLDS, FAILS, UNDECIDED, UNTESTABLE = "holds", "does not hold", "undecided", "not testable here"
NOT_IN_PAPER = "none stated"


@dataclass(frozen=True)
class Claim:
    """A claim as it was fixed before the run.

    direction: the statistic lies "above" or "below" threshold, or "within" tolerance of it.
    published: the paper's own value of the statistic, where it prints one.
    requires: a condition that most runs do not meet; the claim is judged only for a caller who says that it is met.
    ours: prompted by the paper, but not stated in it.
    amended: what was changed after the claim was first fixed, oldest first: {date, why, was: {field: earlier value}}.
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
    requires: str | None = None
    ours: bool = False
    note: str | None = None
    amended: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What a run says about a claim: one of HOLDS, FAILS, UNDECIDED, UNTESTABLE, and why.

    models: names of the models that it is about, where they are not the one whose run this is.
    """

    claim: Claim
    interval: Interval | None
    verdict: str
    reason: str
    models: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the interval's fields are null where there is none."""
        interval = self.interval._asdict() if self.interval else dict.fromkeys(Interval._fields)
        return {
            "id": self.claim.id,
            "verdict": self.verdict,
            "reason": self.reason,
            "models": self.models,
            **interval,
            "direction": self.claim.direction,
            "threshold": self.claim.threshold,
        }


def claims(notebook: str | None = None) -> list[Claim]:
    """All claims, or those of one notebook, in the order of the record."""
    rows = [Claim(**row | {"amended": tuple(row.get("amended", ()))}) for row in _read("claims")["claims"]]
    chosen = [row for row in rows if notebook in (None, row.notebook)]
    if not chosen:
        names = ", ".join(dict.fromkeys(row.notebook for row in rows))
        raise InputError(f"no claims for notebook {notebook!r}; there are: {names}")
    return chosen


def claim(claim_id: str) -> Claim:
    """The claim with this id."""
    found = {row.id: row for row in claims()}
    if claim_id not in found:
        raise InputError(f"no claim {claim_id!r}; there are: {', '.join(found)}")
    return found[claim_id]


def judge(claim_id: str, interval: Interval, requirement_met: bool = False) -> Verdict:
    """Verdict on a claim from the whole interval: on the claimed side, on the other, or across the threshold.

    requirement_met: whether the run meets claim.requires.
    """
    row = claim(claim_id)
    interval = Interval(float(interval[0]), float(interval[1]), float(interval[2]), int(interval[3]))
    if not all(map(math.isfinite, interval)) or interval.low > interval.high:
        raise InputError(f"not an interval for {claim_id}: {interval}")
    if row.requires and not requirement_met:
        return Verdict(row, interval, UNTESTABLE, f"needs {row.requires}")
    if interval.sequences < row.minimum_sequences:
        reason = f"{interval.sequences} sequences, fewer than {row.minimum_sequences}"
        return Verdict(row, interval, UNTESTABLE, reason)
    inside, outside = _sides(row, interval)
    where = wanted(row)
    if inside:
        return Verdict(row, interval, HOLDS, f"the whole interval is {where}")
    if outside:
        return Verdict(row, interval, FAILS, f"none of the interval is {where}")
    return Verdict(row, interval, UNDECIDED, f"only part of the interval is {where}")


def wanted(row: Claim) -> str:
    """Where a claim's whole interval has to lie, in words."""
    around = f" ± {short_number(row.tolerance)}" if row.tolerance else ""
    return f"{row.direction} {short_number(row.threshold)}{around}"


def judge_between(claim_id: str, interval: Interval, roundings: Sequence[Interval]) -> Verdict:
    """Verdict from an interpolated statistic; undecided where those of the two roundings around it disagree."""
    verdict = judge(claim_id, interval)
    around = {judge(claim_id, rounded).verdict for rounded in roundings}
    if verdict.verdict in (HOLDS, FAILS) and len(around) > 1:
        return replace(verdict, verdict=UNDECIDED, reason="the two roundings of the depth disagree")
    return verdict


def untestable(claim_id: str, reason: str) -> Verdict:
    """Verdict for a claim that a run cannot speak to, with the reason."""
    if not reason.strip():
        raise InputError(f"untestable({claim_id!r}) needs a reason")
    return Verdict(claim(claim_id), None, UNTESTABLE, reason)


def verdict_table(verdicts: Iterable[Verdict]) -> pd.DataFrame:
    """One row per verdict; what is not testable has its reason beside it, other models than the page's their names."""
    rows = [
        {
            "Claim": f"{v.claim.id}: {v.claim.claim}",
            "Verdict": v.verdict
            + (f" on {v.models}" if v.models else "")
            + (f" ({v.reason})" if v.verdict == UNTESTABLE else ""),
            "This run": str(v.interval or NOTHING),
            "Holds if": wanted(v.claim),
            "Paper": NOT_IN_PAPER if v.claim.published is None else short_number(v.claim.published),
            "Statistic": v.claim.statistic,
            "Sequences": str(v.interval.sequences) if v.interval else "–",
            "Source": f"this study, after {v.claim.reference}" if v.claim.ours else v.claim.reference,
        }
        for v in verdicts
    ]
    columns = ["Claim", "Verdict", "This run", "Holds if", "Paper", "Statistic", "Sequences", "Source"]
    return pd.DataFrame(rows, columns=columns)


def tables() -> list[str]:
    """Ids of the published tables: P-table-1, M-figure-1, ..., and P-text, M-text for what stands in running text."""
    parts = (path.stem.rpartition("-") for path in data_folder("papers").glob("[PM]-*.json"))
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
    readings = {0: (layer + 1,), 1: (layer,), "unknown": (layer, layer + 1)}
    if base not in readings:
        raise InputError(f"a layer base is 0, 1 or 'unknown', not {base!r}")
    return readings[base]


def _sides(row: Claim, interval: Interval) -> tuple[bool, bool]:
    """Whether all of the interval is where the claim puts it, and whether none of it is."""
    _, low, high, _ = interval
    if row.direction == "above":
        return low > row.threshold, high <= row.threshold
    if row.direction == "below":
        return high < row.threshold, low >= row.threshold
    reach = row.tolerance or 0.0
    bottom, top = row.threshold - reach, row.threshold + reach
    return bottom < low and high < top, high <= bottom or low >= top


def _read(name: str) -> dict[str, Any]:
    return json.loads((data_folder("papers") / f"{name}.json").read_text(encoding="utf-8"))
