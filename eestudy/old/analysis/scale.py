"""Exit layers as models grow deeper: pocket-llama's recipe at several depths, on the same batches of translations.

Their recipes were never part of a release; each file in data/scale names the last commit that holds its recipe. It has
of each shipped translation the output, and how many of its tokens have each layer as their exit layer.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from eelib.tasks.metrics import bleu_of_totals
from eelib.tasks.task import load_task
from eelib.tracing.trace import DEFINITIONS
from eestudy.claims import as_depth, published
from eestudy.exits.task_quality import grouped
from eestudy.old.analysis import trainings
from eestudy.old.analysis.trainings import Totals, change, over_tasks
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.statistics.resampling import bootstrap_each_over_tasks


@dataclass(frozen=True)
class Kept:
    """One depth: BLEU of captions, and by task the sums of each group.

    exits: {"first", "stable", "swapped": {task: tokens by exit layer [groups, L]}}; bleu: {task: [groups, 10]}.
    """

    name: str
    blocks: int
    tokens: int
    captions: float
    machine: str
    exits: dict[str, dict[str, np.ndarray]]
    bleu: dict[str, np.ndarray]


def read(name: str) -> Kept:
    """The figures of one of the models."""
    kept = trainings.read("scale", name)
    groups = {task: load_task(task).groups for task in kept["texts"]}
    exits = {
        count: {task: grouped(np.array(found[count]), groups[task]) for task, found in kept["texts"].items()}
        for count in (*DEFINITIONS, "swapped")
    }
    bleu = trainings.bleu_of_outputs(kept["texts"])
    captions = trainings.captions(kept["quality"])
    return Kept(name, kept["blocks"], kept["tokens"], captions, kept["machine"], exits, bleu)


def models() -> list[Kept]:
    """All that are kept, the shallowest first."""
    return sorted(map(read, trainings.names("scale")), key=lambda kept: kept.blocks)


# ---- statistics of totals: tokens by exit layer [draws, L]


def mean_layer(totals: np.ndarray) -> np.ndarray:
    """Mean exit layer, 1 to L [draws]."""
    return totals @ np.arange(1, totals.shape[1] + 1) / totals.sum(axis=1)


def depth(totals: np.ndarray) -> np.ndarray:
    """Mean exit layer in percent of L [draws]."""
    return 100 * mean_layer(totals) / totals.shape[1]


def layers_left(totals: np.ndarray) -> np.ndarray:
    """Layers behind the mean exit layer [draws]."""
    return totals.shape[1] - mean_layer(totals)


def before_last(totals: np.ndarray) -> np.ndarray:
    """Percent of tokens with an exit layer below L [draws]."""
    return 100 * (1 - totals[:, -1] / totals.sum(axis=1))


def settled(totals: np.ndarray) -> np.ndarray:
    """Share of tokens with exit layer L - m or below, for m = 0..L-1 [draws, L]."""
    return (totals.cumsum(axis=1) / totals.sum(axis=1, keepdims=True))[:, ::-1]


def third_early(totals: np.ndarray) -> np.ndarray:
    """Percent of tokens settled a third of the depth before the end [draws], read off between whole layers."""
    shares, early = settled(totals), totals.shape[1] / 3
    below = int(early)
    return 100 * (shares[:, below] + (early - below) * (shares[:, below + (early > below)] - shares[:, below]))


# ---- what the page shows


def rows(kept: list[Kept], seed: int = 0) -> pd.DataFrame:
    """One row per depth: for each definition the mean exit layer, of L, and who leaves before L; and quality."""
    found = []
    for one in kept:
        row: dict[str, Any] = {"blocks": one.blocks, "tokens": one.tokens, "captions": one.captions}
        row["bleu"] = over_tasks(bleu_of_totals, one.bleu, seed)
        for definition in DEFINITIONS:
            sums = one.exits[definition]
            row[f"avg {definition}"] = over_tasks(mean_layer, sums, seed)
            row[f"depth {definition}"] = over_tasks(depth, sums, seed)
            row[f"perc {definition}"] = over_tasks(before_last, sums, seed)
        row["third"] = over_tasks(third_early, one.exits["stable"], seed)
        row["chance"] = over_tasks(before_last, one.exits["swapped"], seed).estimate
        row["settled"] = bootstrap_each_over_tasks(
            {name: (settled, sums) for name, sums in one.exits["stable"].items()}, seed=seed
        )
        found.append(row)
    return pd.DataFrame(found)


def statements(table: pd.DataFrame) -> dict[str, Interval | float]:
    """Figures of the shallowest and of the deepest model, of `rows`, for a page's answer."""
    found: dict[str, Interval | float] = {}
    for name, row in (("shallow", table.iloc[0]), ("deep", table.iloc[-1])):
        found |= {f"scale_{name}_blocks": float(row["blocks"]), f"scale_{name}_depth": row["depth stable"]}
    return found | {"scale_tokens": table["tokens"].iloc[0] / 1e6}


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """The table that readers get: a row per depth and definition."""
    return pd.DataFrame(
        {
            "L": row["blocks"],
            "exit layer": definition,
            "avg": row[f"avg {definition}"],
            "avg / L (%)": row[f"depth {definition}"],
            "perc (%)": row[f"perc {definition}"],
            "by chance (%)": f"{row['chance']:.1f}" if definition == "first" else "–",
            "a third of L early (%)": row["third"] if definition == "stable" else NOTHING,
            "BLEU": row["bleu"],
            "BLEU of captions": row["captions"],
        }
        for row in table.to_dict("records")
        for definition in DEFINITIONS
    )


def published_depths() -> pd.DataFrame:
    """P's Table 2: model, task, layers, and avg in percent of L as counted from 1 (low) and from 0 (high)."""
    table = published("P-table-2")
    readings = [
        [100 * layer / row["layers"] for layer in as_depth(row["avg"], "unknown")] for _, row in table.iterrows()
    ]
    return table[["model", "task", "layers"]].assign(low=[r[0] for r in readings], high=[r[1] for r in readings])


def published_in_words(printed: pd.DataFrame) -> str:
    """P's two sizes: on how many tasks the deeper one has its mean exit layer at a smaller share of its depth."""
    shallow, deep = (rows.set_index("task")["low"] for _, rows in printed.groupby("layers"))
    falls = shallow - deep
    less = falls[falls > 0]
    return (
        f"In P's Table 2 the model of {printed['layers'].max()} layers has its mean exit layer at a smaller share of "
        f"the depth than that of {printed['layers'].min()} on {len(less)} of {len(falls)} tasks, by {less.min():.1f} "
        f"to {less.max():.1f} points, if layers count from 1."
    )


def in_words(kept: list[Kept], seed: int = 0) -> str:
    """How exit layers of the deepest model differ from the shallowest's."""
    first, last = kept[0], kept[-1]
    sums = {one.name: one.exits["stable"] for one in (first, last)}

    def both(statistic: Totals, unit: str) -> str:
        before, after = (over_tasks(statistic, sums[one.name], seed) for one in (first, last))
        return f"from {before.estimate:.1f}{unit} to {after.estimate:.1f}{unit}"

    def side(statistic: Totals, of: str = "stable") -> str:
        pair = (last.bleu, first.bleu) if of == "bleu" else (sums[last.name], sums[first.name])
        found = change(statistic, *pair, seed)
        said = found.side("up", "down", "neither clearly up nor down")
        return f"{said} ({found.estimate:+.1f} [{found.low:+.1f}, {found.high:+.1f}])"

    return (
        f'From {first.blocks} blocks to {last.blocks}, by the "stable" count, the mean exit layer goes '
        f"{both(mean_layer, '')}. As a share of the depth that is {both(depth, '%')}: {side(depth)}. The layers that "
        f"are left over go {both(layers_left, '')}: {side(layers_left)}. Of the tokens, those that are settled before "
        f"the last layer go {both(before_last, '%')}: {side(before_last)}; those that are settled a third of the depth "
        f"before the end {both(third_early, '%')}: {side(third_early)}. BLEU on the shipped texts goes "
        f"{side(bleu_of_totals, 'bleu')}."
    )
