"""Samples of populations like the study's, in groups: what `checks.intervals` puts to the intervals."""

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from eelib.exits.trace_scores import Curve

LAYERS = 12
LONGEST = 128  # tokens of an output, as the notebooks have it
WORDS = ((4, 8), (9, 15), (16, 25), (26, 40), (41, 60), (61, 80))  # the lengths of the study's translations: data/texts
PIECES = 1.2  # tokens of output for a word of its source
Random = np.random.Generator
Sample = tuple[np.ndarray, np.ndarray]  # values [rows], groups [rows]


def sizes(random: Random, groups: int, mean: float = 12) -> np.ndarray:
    """Rows of each group, as uneven as outputs are: [groups]."""
    return np.minimum(random.geometric(1 / mean, groups), 6 * mean).astype(int) if mean > 1 else np.ones(groups, int)


def shares(random: Random, groups: int, share: float, alike: float = 0.0, mean: float = 1) -> Sample:
    """0 or 1 by row; `alike` is the correlation of the rows of a group (beta-binomial)."""
    n = sizes(random, groups, mean)
    own = np.full(groups, share)
    if alike:
        own = random.beta(share * (1 / alike - 1), (1 - share) * (1 / alike - 1), groups)
    of = np.repeat(np.arange(groups), n)
    return (random.random(len(of)) < own[of]).astype(float), of


def exits(random: Random, groups: int, level: float = 7.0, mean: float = 12) -> Sample:
    """Exit layers 1..L as a share of L; groups differ in level."""
    of = np.repeat(np.arange(groups), sizes(random, groups, mean))
    layers = np.round(level + random.normal(0, 0.8, groups)[of] + random.normal(0, 2.5, len(of)))
    return np.clip(layers, 1, LAYERS) / LAYERS, of


def drops(random: Random, groups: int) -> Sample:
    """Amounts from 0 up, most of them small."""
    of = np.repeat(np.arange(groups), sizes(random, groups))
    return random.beta(0.6, 2.5, len(of)) * random.uniform(0.5, 1.0, groups)[of], of


def times(random: Random, groups: int) -> np.ndarray:
    """Seconds of each output, plain and with a gate that takes twice as long: [groups, 2]."""
    n = sizes(random, groups)[:, None]
    return n * np.array([0.01, 0.02]) * np.exp(random.normal(0, 0.2, (groups, 2)))


def raced(random: Random, groups: int, asked: dict[str, float], around: float) -> dict[str, np.ndarray]:
    """{gate: seconds, tokens and layers of each output at two thresholds [groups, 2, 3]}, about `around` layers.

    asked: what a gate's questions about a token cost, in layers; a layer takes a millisecond. Outputs differ in how
    many layers they need, with every gate alike, and each run in its time.
    """
    n, hard = sizes(random, groups)[:, None], random.normal(0, 0.6, groups)[:, None]
    found = {}
    for gate, cost in asked.items():
        ran = np.maximum(around + np.array([-0.5, 0.5]) + hard + random.normal(0, 0.4, (groups, 2)), 1)
        seconds = n * 0.001 * (ran + cost) * np.exp(random.normal(0, 0.15, (groups, 2)))
        found[gate] = np.stack([seconds, np.broadcast_to(n, ran.shape), n * ran], axis=2)
    return found


def tokens(random: Random, groups: int) -> pd.DataFrame:
    """Tokens of outputs: sequence, position, length, exit layer, which falls along the output and with its length."""
    n = sizes(random, groups, 15) + 2
    of = np.repeat(np.arange(groups), n)
    position = np.arange(len(of)) - np.repeat(n.cumsum() - n, n)
    level = 8 - 0.02 * n + random.normal(0, 0.7, groups)
    layers = level[of] - 0.03 * position + random.normal(0, 2, len(of))
    return pd.DataFrame({"sequence": of, "group": of, "position": position, "length": n[of], "first": layers})


def sequences(table: pd.DataFrame) -> pd.DataFrame:
    """One row per output: mean exit layer."""
    n = np.bincount(table["sequence"])
    means = np.bincount(table["sequence"], table["first"]) / n
    return pd.DataFrame({"group": np.arange(len(n)), "length": n, "first": means})


def lengths(random: Random, groups: int, tailed: bool) -> np.ndarray:
    """Tokens of outputs [groups]: those of the study's translations, as many of each of six sizes, or a long tail.

    The first has mean 39, deviation 27 and skewness 0.5, about as pocket-llama's traces; the second 31, 20 and 1.2.
    """
    if tailed:
        return np.minimum(1 + random.poisson(random.gamma(2.5, 12, groups)), LONGEST)
    low, high = np.array(WORDS)[random.integers(len(WORDS), size=groups)].T
    return 1 + np.round(PIECES * random.uniform(low, high)).astype(int)


def prefixes(random: Random, groups: int, tailed: bool) -> pd.DataFrame:
    """Decoded prefixes whose similarity to the last state grows a little along the output."""
    n = lengths(random, groups, tailed)
    of = np.repeat(np.arange(groups), n)
    position = (np.arange(len(of)) - np.repeat(n.cumsum() - n, n)).astype(float)
    similarity = 0.62 + 0.0005 * position + random.normal(0, 0.017, groups)[of] + random.normal(0, 0.046, len(of))
    rises = random.random(len(of)) < 1 / (1 + np.exp(-3 + 25 * (similarity - 0.62)))
    first = np.clip(np.round(9 - 25 * (similarity - 0.62) + random.normal(0, 0.8, len(of))), 1, LAYERS)
    return pd.DataFrame(
        {
            "group": of,
            "length": position,
            "mean_similarity": similarity,
            "increasing_4": rises,
            "first_similar": first,
        }
    )


def outputs(random: Random, groups: int, tailed: bool) -> pd.DataFrame:
    """Whole outputs, as means over their prefixes."""
    n = lengths(random, groups, tailed)
    similarity = (
        0.62 + 0.0005 * (n - 1) / 2 + random.normal(0, 0.017, groups) + random.normal(0, 0.046, groups) / n**0.5
    )
    return pd.DataFrame({"group": np.arange(groups), "length": n.astype(float), "mean_similarity": similarity})


def tagged(random: Random, groups: int, apart: float) -> dict[str, tuple[pd.DataFrame, ArrayLike]]:
    """Words with one of eight tags, whose exit layers differ by `apart`."""
    of = np.repeat(np.arange(groups), sizes(random, groups, 35) + 5)
    tag = random.choice(8, len(of), p=np.array([24, 18, 15, 13, 10, 8, 7, 5]) / 100)
    layers = np.round(8 + apart * (tag - 3.5) + random.normal(0, 0.6, groups)[of] + random.normal(0, 2, len(of)))
    words = pd.DataFrame({"upos": tag, "group": of, "sequence": of})
    return {"one": (words, np.clip(layers, 1, LAYERS))}


def curve(random: Random, groups: int, better: float) -> list[Curve]:
    """Two gates' curves over the same tokens: mean layers against agreement."""
    n = sizes(random, groups)
    at = np.arange(1, LAYERS + 1)
    own = random.normal(0, 0.05, groups)
    made = []
    for gain in (0.0, better):
        share = np.clip(np.linspace(0.3, 1, LAYERS) + gain * np.sin(np.pi * at / LAYERS) + own[:, None], 0, 1)
        agreed = random.binomial(n[:, None], np.where(at == LAYERS, 1.0, share))
        left = np.zeros((groups, LAYERS, LAYERS), int)
        left[:, at - 1, at - 1] = n[:, None]
        made.append(Curve("", at.astype(float), [f"{k:05}" for k in range(groups)], n, left, agreed, at.astype(float)))
    return made
