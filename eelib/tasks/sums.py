"""Scores as functions of sums over items, so that items can be resampled without scoring them anew."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

Score = Callable[[np.ndarray], np.ndarray]  # totals [draws, k] -> scores [draws]
Sums = tuple[np.ndarray, Score]  # statistics [items, k], and the score of their totals
ORDERS = 4  # of BLEU's n-grams


def grouped(sums: np.ndarray, groups: list[str]) -> np.ndarray:
    """Sums over the items of each group: [groups, columns]."""
    return pd.DataFrame(sums).groupby(np.asarray(groups)).sum().to_numpy()


def mean_of(values: Sequence[float]) -> Sums:
    """A score that is 100 times the mean of the items' values."""
    return np.column_stack([values, np.ones(len(values))]), lambda totals: 100 * totals[:, 0] / totals[:, 1]


def bleu(outputs: list[str], references: list[list[str]], language: str = "") -> Sums:
    """Corpus BLEU, from what sacreBLEU counts of each item: matches and n-grams of order 1-4, lengths: [items, 10]."""
    from sacrebleu.metrics import BLEU

    scorer = BLEU(tokenize={"ja": "char", "zh": "zh"}.get(language, "13a"), effective_order=True)
    scores = [scorer.sentence_score(output, known) for output, known in zip(outputs, references)]
    return np.array([[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in scores], dtype=float), bleu_of_totals


def bleu_of_totals(totals: np.ndarray) -> np.ndarray:
    """Corpus BLEU (0-100) of summed statistics [draws, 10], smoothed as sacreBLEU does by default.

    The k-th order without a match counts as 1 / 2^k matches; without any match, or any 4-gram, the score is 0.
    """
    matches, ngrams = totals[:, :ORDERS], totals[:, ORDERS : 2 * ORDERS]
    system, reference = totals[:, -2], totals[:, -1]
    matched = np.where(matches > 0, matches, 0.5 ** np.cumsum(matches == 0, axis=1))
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.exp(np.log(matched / ngrams).mean(axis=1))
        brevity = np.exp(np.minimum(0.0, 1.0 - reference / system))
    return np.where((matches > 0).any(axis=1) & (ngrams > 0).all(axis=1), 100 * brevity * precision, 0.0)
