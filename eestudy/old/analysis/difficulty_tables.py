"""Tables and words of the section on difficulty: this run beside M's table, task by task, and examples."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from eestudy.claims import as_depth, published
from eestudy.old.analysis.difficulty import DEPTH_OF_M, KINDS, STARTS, Comparison, examples, same_share
from eestudy.old.analysis.difficulty_splits import Split, Splits, share_gaps
from eestudy.old.statistics.interval import Interval

ROOM = 160  # characters of an example's text that a cell shows
OUTPUT_COLUMNS = {"mean_similarity": "mean similarity", "first_similar": "first similar state", "length": "length"}


# ---- how figures are written


def mean_sd(mean: float, deviation: float | None = None) -> str:
    """8.65 (1.34)."""
    if not np.isfinite(mean):
        return "–"
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ({deviation:.2f})"


def side(mean: Interval, deviation: float, share: bool) -> str:
    """`mean_sd`, or 24.0% of a share."""
    return f"{mean.percent.estimate:.1f}%" if share and mean.known else mean_sd(mean.estimate, deviation)


def gap(found: Comparison) -> str:
    """The difference with its interval; in percentage points for a share."""
    return str(found.difference.percent if found.share else found.difference)


def cells(found: Comparison, shift: float = 0.0) -> dict[str, str]:
    """Easy, difficult, and their difference, as text; `shift` changes the base of layers."""
    easy, difficult = (mean._replace(estimate=mean.estimate + shift) for mean in (found.easy, found.difficult))
    return {
        "here, easy": side(easy, found.easy_deviation, found.share),
        "here, difficult": side(difficult, found.difficult_deviation, found.share),
        "here, easy − difficult": gap(found),
    }


def labelled(depth: int) -> dict[str, str]:
    """{property: label} of the rows that tables show."""
    rising = {f"increasing_{k}": f"Strictly increasing from layer {k}" for k in STARTS if k < depth}
    return {
        "first_similar": "First similar state (blocks run)",
        "similar_states": "Similar states",
        "length": "Sequence length (tokens)",
        **rising,
    }


# ---- M's table


def printed_table() -> pd.DataFrame:
    """M's Table 1 by property."""
    return published("M-table-1").set_index("property")


def of_m(name: str, shift: float = 0.0, factor: float = 1.0) -> dict[str, str]:
    """M's two columns; standard deviations only where the numbers are as printed."""
    row = printed_table().loc[name]
    if row["units"].startswith("percent"):
        return {f"M, {kind}": f"{row[kind]:.0f}%" for kind in KINDS}
    return {f"M, {kind}": mean_sd((row[kind] + shift) * factor, row[f"{kind}_sd"] * factor) for kind in KINDS}


def divided(found: Comparison, by: int) -> Comparison:
    """A comparison in shares of `by` layers."""
    easy, difficult, difference = (value.scaled(1 / by) for value in found[:3])
    return Comparison(easy, difficult, difference, found.easy_deviation / by, found.difficult_deviation / by)


def beside_m(splits: Splits) -> pd.DataFrame:
    """M's Table 1 beside the learnt tasks of this run, layers in every base and share that can be compared."""
    depth, others = splits.study.model.layers, DEPTH_OF_M - 1
    first, number = (splits.by_similarity.over(name) for name in ("first_similar", "similar_states"))
    stays, length = (splits.by_similarity.over(name) for name in ("stays", "length"))
    state, count = "first_similar_state", "similar_states"
    rows = [
        ("First similar state, counted from 0 as in M", of_m(state), cells(first, shift=-1.0)),
        ("First similar state, blocks run (from 1)", of_m(state, 1), cells(first)),
        ("… as a share of the depth", of_m(state, 1, 1 / DEPTH_OF_M), cells(divided(first, depth))),
        (f"Similar states (of {others} in M, of {depth - 1} here)", of_m(count), cells(number)),
        ("… as a share of these", of_m(count, 0, 1 / others), cells(divided(number, depth - 1))),
        ("First (from 0) and number added up", *added_up(first, number)),
        ("Similar once, similar from then on", {}, cells(stays)),
        ("Sequence length (tokens)", of_m("length"), cells(length)),
        ("… outputs that were cut left out", {}, cells(splits.of_finished.over("length"))),
        *rising_rows(splits),
    ]
    return pd.DataFrame([{"property": label} | theirs | ours for label, theirs, ours in rows])


def added_up(first: Comparison, number: Comparison) -> tuple[dict[str, str], dict[str, str]]:
    """M's first similar state and number of similar states added up, and ours, counted from 0."""
    printed = printed_table()
    both = {kind: printed.loc["first_similar_state", kind] + printed.loc["similar_states", kind] for kind in KINDS}
    here = {kind: getattr(first, kind).estimate - 1 + getattr(number, kind).estimate for kind in KINDS}
    return (
        {f"M, {kind}": mean_sd(value) for kind, value in both.items()},
        {f"here, {kind}": mean_sd(value) for kind, value in here.items()},
    )


def rising_rows(splits: Splits) -> list[tuple[str, dict, dict]]:
    """Rows of `beside_m`: M's start layers taken literally, at the same share of the depth, and in M's other base."""
    depth = splits.study.model.layers
    readings = [(k, k, "") for k in STARTS]
    readings += [(k, same_share(k, depth), ", the same share of the depth") for k in STARTS if k]  # 0 is as above
    readings += [(k, int(as_depth(k, 0)[0]), ", if M's index 0 is the state after block 1") for k in STARTS]
    return [
        (
            f"Strictly increasing from layer {here}{note}",
            of_m(f"monotonic_after_{printed}"),
            cells(splits.by_similarity.over(f"increasing_{here}")),
        )
        for printed, here, note in readings
    ]


def published_marks() -> pd.DataFrame:
    """M's shares of rising prefixes: columns share (of M's depth), easy, difficult."""
    printed = printed_table()
    return pd.DataFrame(
        [
            {"share": k / DEPTH_OF_M} | {kind: printed.loc[f"monotonic_after_{k}", kind] / 100 for kind in KINDS}
            for k in STARTS
        ]
    )


# ---- task by task


def task_table(splits: Splits) -> pd.DataFrame:
    """Easy and difficult prefixes of every task, and the difference under the control's split."""
    rows = [
        {"task": splits.study.labels[task], "property": label}
        | cells(splits.by_similarity.of(task, name))
        | {"split by entropy": gap(splits.by_entropy.of(task, name))}
        for task in splits.prefixes
        for name, label in labelled(splits.study.model.layers).items()
    ]
    return pd.DataFrame(rows).rename(columns=lambda column: column.removeprefix("here, "))


def control_table(splits: Splits) -> pd.DataFrame:
    """The contrasts of M's split beside those of the control's."""
    rows = []
    for name, label in labelled(splits.study.model.layers).items():
        one, two = (cells(chosen.over(name)) for chosen in (splits.by_similarity, splits.by_entropy))
        rows.append(
            {
                "property": label,
                "M's split: easy − difficult": one["here, easy − difficult"],
                "by entropy: easy": two["here, easy"],
                "by entropy: difficult": two["here, difficult"],
                "by entropy: easy − difficult": two["here, easy − difficult"],
            }
        )
    return pd.DataFrame(rows)


def output_table(splits: Splits) -> pd.DataFrame:
    """Easy and difficult whole outputs of every task."""
    rows = []
    for task, trace in splits.study.traces.items():
        c = {name: splits.of_outputs.of(task, name) for name in OUTPUT_COLUMNS}
        row = {
            "task": splits.study.labels[task],
            "outputs": len(splits.outputs[task]),
            "cut": int(trace.sequences["truncated"].sum()),
            "on each side": splits.of_outputs.sides[task].units,
        }
        for name, label in OUTPUT_COLUMNS.items():
            row[f"easy: {label}"] = mean_sd(c[name].easy.estimate, c[name].easy_deviation)
            row[f"difficult: {label}"] = mean_sd(c[name].difficult.estimate, c[name].difficult_deviation)
        rows.append(row | {"length, easy − difficult": gap(c["length"])})
    return pd.DataFrame(rows)


def length_differences(splits: Splits) -> dict[str, dict[str, Interval]]:
    """{task: {unit: length, easy minus difficult}}, with a row for the mean of the learnt tasks."""
    units = {"decoded prefix": splits.by_similarity, "whole output": splits.of_outputs}
    found = {
        label: {unit: chosen.of(task, "length").difference for unit, chosen in units.items()}
        for task, label in splits.study.labels.items()
    }
    if splits.study.learnt_tasks:
        found["mean of learnt tasks"] = {unit: chosen.over("length").difference for unit, chosen in units.items()}
    return found


# ---- other shares


def share_table(shares: dict[float, tuple[Split, Split]]) -> pd.DataFrame:
    """Easy minus difficult over the learnt tasks, a row for each share of `other_shares`."""
    labels = {
        "first_similar": "first similar state",
        "length": "length of prefix",
        "increasing_0": "increasing from layer 0 (points)",
        "output_length": "length of whole output",
    }
    rows = []
    for share, (prefixes, outputs) in shares.items():
        smallest = min((prefixes.sides[name].units for name in prefixes.learnt), default=0)
        gaps = share_gaps(prefixes, outputs)
        rows.append(
            {"share of each end (%)": 100 * share, "prefixes on the smallest side": smallest}
            | {label: gap(gaps[name]) for name, label in labels.items()}
        )
    return pd.DataFrame(rows)


# ---- examples


@dataclass(frozen=True)
class Examples:
    """Prefixes of one task: curves [m, L+1], with names (E1, D1, ...) that tie them to the rows of `table`."""

    task: str
    curves: np.ndarray
    names: list[str]
    kinds: list[str]
    table: pd.DataFrame


def example_prefixes(splits: Splits, count: int) -> Examples:
    """`count` easy and as many difficult prefixes of the first shown task."""
    study, task = splits.study, splits.shown[0]
    units, trace = splits.prefixes[task], study.traces[task]
    chosen = {
        (kind, f"{kind[0].upper()}{number}"): unit
        for kind, side in splits.ends(task).items()
        for number, unit in enumerate(examples(units, side, count), 1)
    }
    kinds, names = [kind for kind, _ in chosen], [name for _, name in chosen]
    picked = units.iloc[list(chosen.values())]
    tokens = trace.tokens.iloc[picked["row"]]
    outputs = trace.sequences.set_index("sequence")["output"]
    decoded = [ending(outputs[token["sequence"]][: token["start"]]) for token in tokens.to_dict("records")]
    table = pd.DataFrame(
        {
            "curve": names,
            "kind": kinds,
            "decoded so far": decoded,
            "next token": [study.token_text(token_id) for token_id in tokens["token_id"]],
            "length": picked["length"].to_numpy(),
            "mean similarity": picked["mean_similarity"].to_numpy(),
            "first similar state": picked["first_similar"].to_numpy(),
        }
    )
    return Examples(task, trace["cosine"][picked["row"].to_numpy()], names, kinds, table)


def ending(text: str) -> str:
    """A text on one line, only its end where it is long."""
    text = text.replace("\n", "↵")
    return ("…" + text[-ROOM:] if len(text) > ROOM else text) or "(nothing yet)"
