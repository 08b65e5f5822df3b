"""What a shortlist loses: how often the final token is not among the tokens that an early layer lists.

Such a token can't be emitted early; all that a gate could still do right is to run all layers.
"""

from collections.abc import Mapping

import pandas as pd

from eelib.exits.gates.gate import gate_named
from eelib.exits.gates.readout import Shortlist
from eelib.tracing.trace import Trace
from eestudy.old.analysis.earliness import Values
from eestudy.old.analysis.gate_rules import FREE_EXITS, Asked
from eestudy.old.statistics.interval import told
from eestudy.old.statistics.stats import bootstrap_mean, bootstrap_unweighted_mean_over_tasks
from eestudy.old.study.results import Results
from eestudy.old.study.study import large_enough

TEN_TIMES = 10  # the longer list that is shown beside the gate's own
MEAN = "mean over tasks"


def lists(depth: int) -> list[tuple[int, int]]:
    """(layer, k) of the lists that are looked at: the gate's own, a longer one, and the gate's from deeper layers."""
    gate = gate_named("shortlist")
    assert isinstance(gate, Shortlist)
    deeper = [max(1, round(share * depth)) for share in FREE_EXITS[:2]]
    every = [(gate.layer, gate.k), (gate.layer, TEN_TIMES * gate.k), *((layer, gate.k) for layer in deeper)]
    return list(dict.fromkeys(every))


def missed(trace: Trace, layer: int, k: int) -> Values:
    """(1.0 where the final token is outside, groups) of the statistic rows."""
    rows = trace.statistic_rows()
    return (trace["final_rank"][rows, layer] > k).astype(float), trace.tokens["group"].to_numpy()[rows]


def table(asked: Mapping[str, Asked], depth: int) -> pd.DataFrame:
    """A row per task and state, and of the unweighted mean over tasks: percent that is outside of each of the lists."""
    rows = []
    for state, of in asked.items():
        found = {at: {task: missed(of.study.traces[task], *at) for task in of.tasks} for at in lists(depth)}
        seed = of.study.parameters.seed
        for task in of.tasks:
            shares = {named(*at): bootstrap_mean(*values[task], seed=seed).percent for at, values in found.items()}
            rows.append({"task": task, "state": state} | shares)
        if len(of.tasks) > 1:
            means = {
                named(*at): bootstrap_unweighted_mean_over_tasks(large_enough(values), seed=seed).percent
                for at, values in found.items()
            }
            rows.append({"task": MEAN, "state": state} | means)
    return pd.DataFrame(rows)


def named(layer: int, k: int) -> str:
    """A list as a column's name."""
    return f"best {k} of layer {layer} (%)"


def in_words(found: pd.DataFrame) -> str:
    """How often the final token is outside the gate's own list, and by which list least."""
    if found.empty:
        return "Nothing is learnt, so nothing is listed."
    own, *others = [column for column in found if column not in ("task", "state")]
    said = []
    for state, rows in found.groupby("state", sort=False):
        row = rows.iloc[-1]  # the mean, or the only task
        least = min(others, key=lambda column: row[column].estimate) if others else own
        said.append(
            f"{str(state).capitalize()} joint optimization the final token is not among the {short(own)} for "
            f"{told(row[own], '%')} of the tokens, so early exits with this list can be right for at most "
            f"{100 - row[own].estimate:.1f}%; of the lists shown the {short(least)} miss fewest, "
            f"{told(row[least], '%')}."
        )
    return " ".join(said)


def short(column: str) -> str:
    """A list's name in a sentence."""
    return column.removesuffix(" (%)")


def keep(results: Results, found: pd.DataFrame) -> None:
    """Put the shares into a notebook's results, and what the prose says of them."""
    for row in found.to_dict("records"):
        for column in row.keys() - {"task", "state"}:
            key, share = f"outside the {short(column)} {row['state']}", row[column].scaled(0.01)
            results.keep(key, share) if row["task"] == MEAN else results.put(row["task"], key, share)
    results.tell("shortlist_words", in_words(found))
