"""Intervals of quality: a score is a function of sums over items, so items can be resampled without scoring anew."""

from collections.abc import Callable

import numpy as np
import pandas as pd

from eelib.common.errors import InputError
from eelib.common.interval import Interval
from eelib.common.stats import bootstrap_totals
from eelib.tasks.glue import SCORES, glue_name, named
from eelib.tasks.metrics import rouge, token_f1
from eelib.tasks.task import Task

Sums = tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]  # statistics [items, k]; totals [draws, k] -> scores
ORDERS = 4  # of BLEU's n-grams


def quality_interval(task: Task, outputs: list[str], seed: int = 0) -> dict[str, Interval]:
    """Each score of the outputs (0-100), items resampled by group.

    BLEU of translations, F1 of answers, ROUGE-1, 2 and L of summaries, GLUE's scores of labels; {} without references.
    """
    return {
        name: bootstrap_totals(score, grouped(sums, task.groups), seed=seed)
        for name, (sums, score) in item_sums(task, outputs).items()
    }


def quality_difference(task: Task, before: list[str], after: list[str], seed: int = 0) -> dict[str, Interval]:
    """Each score of `after` minus that of `before`, paired: a draw takes the same items of both."""
    old, new, found = item_sums(task, before), item_sums(task, after), {}
    for name, (sums, score) in new.items():
        half = sums.shape[1]
        both = grouped(np.hstack([sums, old[name][0]]), task.groups)
        found[name] = bootstrap_totals(lambda t, s=score, k=half: s(t[:, :k]) - s(t[:, k:]), both, seed=seed)
    return found


def item_sums(task: Task, outputs: list[str]) -> dict[str, Sums]:
    """The statistics that a task's scores need of each item, and the score of their totals."""
    if len(outputs) != len(task):
        raise InputError(f"{len(outputs)} outputs for {len(task)} prompts")
    if not all(task.references):
        return {}
    if task.kind == "classification":
        return label_sums(task, outputs)
    pairs = list(zip(outputs, task.references))
    if task.kind == "question_answering":
        return {"F1": means([max(token_f1(output, r) for r in known) for output, known in pairs])}
    if task.kind == "summarization":
        rows = [rouge([output], [known]) for output, known in pairs]
        return {name: means([row[name] / 100 for row in rows]) for name in rows[0]}
    return {"BLEU": (bleu_statistics(outputs, task.references, task.target_language), bleu_of_totals)}


def means(values: list[float]) -> Sums:
    """A score that is 100 times the mean of the items' values."""
    return np.column_stack([values, np.ones(len(values))]), lambda totals: 100 * totals[:, 0] / totals[:, 1]


def bleu_statistics(outputs: list[str], references: list[list[str]], language: str = "") -> np.ndarray:
    """What sacreBLEU counts of each item: matches of order 1-4, n-grams of order 1-4, lengths: [items, 10]."""
    from sacrebleu.metrics import BLEU

    scorer = BLEU(tokenize={"ja": "char", "zh": "zh"}.get(language, "13a"), effective_order=True)
    scores = [scorer.sentence_score(output, known) for output, known in zip(outputs, references)]
    return np.array([[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in scores], dtype=float)


def bleu_of_totals(totals: np.ndarray) -> np.ndarray:
    """Corpus BLEU (0-100) of summed statistics [draws, 10], smoothed as sacreBLEU does by default.

    The k-th order without a match counts as 1 / 2^k matches; without any match, or any 4-gram, the score is 0.
    """
    matches, ngrams, system, reference = (
        totals[:, :ORDERS],
        totals[:, ORDERS : 2 * ORDERS],
        totals[:, -2],
        totals[:, -1],
    )
    matched = np.where(matches > 0, matches, 0.5 ** np.cumsum(matches == 0, axis=1))
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.exp(np.log(matched / ngrams).mean(axis=1))
        brevity = np.exp(np.minimum(0.0, 1.0 - reference / system))
    return np.where((matches > 0).any(axis=1) & (ngrams > 0).all(axis=1), 100 * brevity * precision, 0.0)


def label_sums(task: Task, outputs: list[str]) -> dict[str, Sums]:
    """GLUE's scores of the task, from the table of true and given labels."""
    labels, count = task.labels, len(task.labels)
    said = [labels.index(named(output, labels)) for output in outputs]
    truth = [labels.index(known[0]) for known in task.references]
    cells = np.zeros((len(task), count * count))
    cells[np.arange(len(task)), np.array(truth) * count + said] = 1.0

    def table(totals: np.ndarray) -> np.ndarray:
        return totals.reshape(-1, count, count)  # [draws, true, given]

    def accuracy(totals: np.ndarray) -> np.ndarray:
        return 100 * table(totals).trace(axis1=1, axis2=2) / totals.sum(axis=1)

    def f1(totals: np.ndarray) -> np.ndarray:
        (_, false), (missed, hit) = table(totals).transpose(1, 2, 0)
        return 100 * 2 * hit / np.maximum(2 * hit + false + missed, 1)

    def matthews(totals: np.ndarray) -> np.ndarray:
        (rest, false), (missed, hit) = table(totals).transpose(1, 2, 0)
        below = np.sqrt((hit + false) * (hit + missed) * (rest + false) * (rest + missed))
        return 100 * np.where(below > 0, (hit * rest - false * missed) / np.maximum(below, 1e-300), 0.0)

    scores = {"accuracy": accuracy, "F1": f1, "Matthews": matthews}
    return {name: (cells, scores[name]) for name in SCORES.get(glue_name(task.name), ("accuracy",))}


def grouped(sums: np.ndarray, groups: list[str]) -> np.ndarray:
    """Sums over the items of each group: [groups, columns]."""
    return pd.DataFrame(sums).groupby(np.asarray(groups)).sum().to_numpy()
