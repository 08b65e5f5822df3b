"""What each part of training a model to leave early is worth: pocket-llama trained on in four ways at equal tokens.

Their recipes were never part of a release; each file in data/ablation names the last commit that holds its recipe. It
has of each shipped translation the output, its tokens and how many of them each layer agrees with.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from eelib.tasks.metrics import bleu_of_totals
from eelib.tasks.task import load_task
from eestudy.exits.task_quality import grouped
from eestudy.old.analysis import trainings
from eestudy.old.analysis.trainings import change
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.statistics.resampling import bootstrap_each_over_tasks

START = "pocket-llama"
TRAINED = {
    f"{START}-uniform": "texts, equal weights (P)",
    f"{START}-dropout": "texts, LayerSkip's dropout and weights",
    f"{START}-own": "its own outputs, equal weights",
    f"{START}-all": "half LayerSkip's, half its own outputs",
}
LABELS = {START: "as it was"} | TRAINED


@dataclass(frozen=True)
class Kept:
    """One model: by task the sums of each group, agreement [groups, L + 1], BLEU [groups, 10]; BLEU of captions."""

    name: str
    tokens: int
    steps: int
    captions: float
    agreed: dict[str, np.ndarray]
    bleu: dict[str, np.ndarray]

    @property
    def layers(self) -> int:
        """L."""
        return next(iter(self.agreed.values())).shape[1] - 1


def read(name: str) -> Kept:
    """The figures of one of the models."""
    kept = trainings.read("ablation", name)
    agreed = {
        task: grouped(np.column_stack([found["agreed"], found["tokens"]]), load_task(task).groups)
        for task, found in kept["texts"].items()
    }
    bleu = trainings.bleu_of_outputs(kept["texts"])
    return Kept(name, kept["tokens"], kept["steps"], trainings.captions(kept["quality"]), agreed, bleu)


def models(before: str) -> list[Kept]:
    """The model that they start from and the four; none where the page's model is another one."""
    return [read(name) for name in LABELS] if before == START else []


# ---- statistics of totals


def shares(totals: np.ndarray) -> np.ndarray:
    """Share of tokens that each layer 1..L agrees with [draws, L], of totals [draws, L + 1]."""
    return totals[:, :-1] / totals[:, -1:]


def below_last(totals: np.ndarray) -> np.ndarray:
    """Mean share over the layers below L, in percent [draws]."""
    return 100 * shares(totals)[:, :-1].mean(axis=1)


# ---- what the page shows


def curve(kept: Kept, seed: int = 0) -> list[Interval]:
    """Share of its own output tokens that each layer 1..L agrees with, unweighted mean over the four directions."""
    return bootstrap_each_over_tasks({name: (shares, sums) for name, sums in kept.agreed.items()}, seed=seed)


def agreement_gain(after: Kept, before: Kept, seed: int = 0) -> Interval:
    """Mean agreement below L, in points, `after` less `before`, paired by text."""
    return change(below_last, after.agreed, before.agreed, seed)


def bleu_gain(after: Kept, before: Kept, seed: int = 0) -> Interval:
    """BLEU on the shipped translations, mean of the directions, `after` less `before`, paired by text."""
    return change(bleu_of_totals, after.bleu, before.bleu, seed)


def rows(kept: list[Kept], seed: int = 0) -> pd.DataFrame:
    """One row per model: agreement by layer, and what was gained and paid beside the model that all start from."""
    found = []
    for one in kept:
        found.append(
            {
                "name": one.name,
                "tokens": one.tokens,
                "captions": one.captions,
                "curve": curve(one, seed),
                "agreement": agreement_gain(one, kept[0], seed),
                "bleu": bleu_gain(one, kept[0], seed),
            }
        )
    return pd.DataFrame(found)


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """The table that readers get."""
    layers = len(table["curve"].iloc[0])
    lines = []
    for row in table.to_dict("records"):
        changed = row["name"] != START
        line = {"trained on": LABELS[row["name"]], "tokens (M)": row["tokens"] / 1e6}
        for layer in (layers // 3, layers // 2, 2 * layers // 3):
            line[f"agreement at layer {layer} (%)"] = row["curve"][layer - 1].percent
        line["agreement below L, change"] = row["agreement"] if changed else NOTHING
        line["BLEU, change"] = row["bleu"] if changed else NOTHING
        lines.append(line | {"BLEU of captions": row["captions"]})
    return pd.DataFrame(lines)


def in_words(kept: list[Kept], seed: int = 0) -> str:
    """What each part gains and costs beside what it replaces; a line where the page's model is another."""
    if not kept:
        return f"These trainings are of {START}; of this page's model there are none."
    by_name = {one.name.removeprefix(f"{START}-"): one for one in kept}
    pairs = {
        "Its own outputs in place of the texts": ("own", "uniform"),
        "LayerSkip's dropout and weights in place of equal weights, on the texts": ("dropout", "uniform"),
        "LayerSkip for half of the steps, then its own outputs, in place of its own outputs alone": ("all", "own"),
        "Both in place of equal weights on the texts": ("all", "uniform"),
    }
    found = []
    for what, (after, before) in pairs.items():
        agreement, bleu = (measure(by_name[after], by_name[before], seed) for measure in (agreement_gain, bleu_gain))
        found.append(f"{what}: agreement below the last layer is {side(agreement)}, BLEU is {side(bleu)}.")
    return " ".join(found)


def side(difference: Interval) -> str:
    """A difference in words, with its interval in points."""
    said = difference.side("higher", "lower", "neither clearly higher nor lower")
    return f"{said} ({difference.estimate:+.1f} points [{difference.low:+.1f}, {difference.high:+.1f}])"
