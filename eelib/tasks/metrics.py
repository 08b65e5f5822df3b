"""Scores of outputs against references. Each is a function of summed statistics, so that items can be resampled."""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

FromTotals = Callable[[np.ndarray], np.ndarray]  # totals [draws, k] -> scores [draws], 0-100
ORDERS = 4  # of BLEU's n-grams
ROUGE = {"ROUGE-1": "rouge1", "ROUGE-2": "rouge2", "ROUGE-L": "rougeL"}


class ItemStats(NamedTuple):
    """A score as a function of summed statistics.

    Attributes:
        values: statistics of the items, [items, k].
        from_totals: the score [draws], 0-100, of their sums [draws, k] over any selections of items.
    """

    values: np.ndarray
    from_totals: FromTotals


def scores_of(stats: dict[str, ItemStats]) -> dict[str, float]:
    """The score of all items together, 0-100, by name."""
    return {name: found.from_totals(found.values.sum(axis=0)[None])[0].item() for name, found in stats.items()}


def mean_of(values: Sequence[float]) -> ItemStats:
    """A score that is 100 times the mean of the items' values."""
    return ItemStats(np.column_stack([values, np.ones(len(values))]), lambda totals: 100 * totals[:, 0] / totals[:, 1])


def bleu(outputs: list[str], references: list[list[str]], language: str = "") -> ItemStats:
    """Corpus BLEU, counted by sacreBLEU.

    Args:
        outputs: one text an item.
        references: at least one text an item.
        language: code of the references' language; Japanese and Chinese have their own tokenizers.

    Returns:
        Statistics [items, 10]: matches and n-grams of order 1 to 4, length of the output and of its reference.
    """
    from sacrebleu.metrics import BLEU

    scorer = BLEU(tokenize={"ja": "char", "zh": "zh"}.get(language, "13a"), effective_order=True)
    scores = [scorer.sentence_score(output, known) for output, known in zip(outputs, references)]
    return ItemStats(
        np.array([[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in scores], dtype=float), bleu_of_totals
    )


def bleu_of_totals(totals: np.ndarray) -> np.ndarray:
    """Corpus BLEU (0-100) of summed statistics [draws, 10], smoothed as sacreBLEU does by default.

    The k-th order without a match counts as 1 / 2^k matches; without any match, or any 4-gram, the score is 0.
    """
    matches, ngrams = totals[:, :ORDERS], totals[:, ORDERS : 2 * ORDERS]
    system, reference = totals[:, -2], totals[:, -1]
    matched = np.where(matches > 0, matches, 0.5 ** np.cumsum(matches == 0, axis=1))
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.exp(np.log(matched / ngrams).mean(axis=1))
        score = 100 * precision * np.exp(np.minimum(0.0, 1.0 - reference / system))
    return np.where((matches > 0).any(axis=1) & (ngrams > 0).all(axis=1), score, 0.0)


def chrf(outputs: list[str], references: list[list[str]]) -> dict[str, float]:
    """Corpus chrF by sacreBLEU, 0-100."""
    import sacrebleu

    most = max(len(known) for known in references)
    streams = [[known[min(i, len(known) - 1)] for known in references] for i in range(most)]
    return {"chrF": sacrebleu.corpus_chrf(outputs, streams).score}


def answer_stats(outputs: list[str], references: list[list[str]]) -> dict[str, ItemStats]:
    """Scores of answers, each the mean over items.

    F1 is the best token F1 of an output against any of its references, with SQuAD's normalisation; containment is
    whether an output contains one of them.
    """
    pairs = list(zip(outputs, references))
    return {
        "F1": mean_of([max(token_f1(output, one) for one in known) for output, known in pairs]),
        "containment": mean_of([any(contains(output, one) for one in known) for output, known in pairs]),
    }


def token_f1(output: str, reference: str) -> float:
    """F1 of the bags of normalised words; 1 where both are empty."""
    a, b = normalised(output), normalised(reference)
    if not a or not b:
        return float(a == b)
    common = sum((Counter(a) & Counter(b)).values())
    return 2.0 * common / (len(a) + len(b))


def contains(output: str, reference: str) -> bool:
    """Whether the output's normalised words contain the reference's in one piece; False if the reference has none."""
    words, known = normalised(output), normalised(reference)
    return bool(known) and any(words[i : i + len(known)] == known for i in range(len(words)))


def normalised(text: str) -> list[str]:
    """Lower case, no punctuation, no English articles, split on white space (SQuAD's evaluation)."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def rouge(outputs: list[str], references: list[list[str]]) -> dict[str, ItemStats]:
    """Mean F-measures of ROUGE-1, ROUGE-2 and sentence-level ROUGE-L over items, with NLTK's Porter stemmer.

    Each item counts with its best reference.
    """
    scorer = rouge_scorer()
    rows = [scorer.score_multi(known, output) for output, known in zip(outputs, references)]
    return {label: mean_of([row[key].fmeasure for row in rows]) for label, key in ROUGE.items()}


@cache
def rouge_scorer() -> Any:
    """The scorer of `rouge`, which finds the stem of each word once: that takes most of its time."""
    from nltk.stem.porter import PorterStemmer
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenize import tokenize

    stemmer = SimpleNamespace(stem=cache(PorterStemmer().stem))
    words = SimpleNamespace(tokenize=lambda text: tokenize(text, stemmer))
    return RougeScorer(list(ROUGE.values()), tokenizer=words)


def repeated(ids: Sequence[int], length: int = 8) -> np.ndarray:
    """Which tokens of an output are part of an n-gram that occurs in it at least twice.

    Args:
        ids: the token ids of one output, [tokens], in order. The occurrences may overlap.
        length: n, in tokens.

    Returns:
        bool [tokens].
    """
    found = np.zeros(len(ids), dtype=bool)
    starts: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(ids) - length + 1):
        starts.setdefault(tuple(ids[start : start + length]), []).append(start)
    for start in (start for places in starts.values() if len(places) > 1 for start in places):
        found[start : start + length] = True
    return found
