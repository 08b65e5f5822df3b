"""Quality of outputs against references, through the field's own packages."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer


def bleu_chrf(outputs: list[str], references: list[list[str]], language: str = "") -> dict[str, float]:
    """Corpus BLEU and chrF by sacreBLEU, 0-100; its own tokenizers for Japanese and Chinese."""
    import sacrebleu

    most = max(len(r) for r in references)
    streams = [[r[min(i, len(r) - 1)] for r in references] for i in range(most)]
    tokenize = {"ja": "char", "zh": "zh"}.get(language, "13a")
    return {
        "BLEU": sacrebleu.corpus_bleu(outputs, streams, tokenize=tokenize).score,
        "chrF": sacrebleu.corpus_chrf(outputs, streams).score,
    }


def comet(outputs: list[str], sources: list[str], references: list[list[str]]) -> float | None:
    """COMET-22 (0-100) as P reports it, or None where unbabel-comet is not installed."""
    try:
        from comet import download_model, load_from_checkpoint
    except ImportError:
        return None
    scorer = load_from_checkpoint(download_model("Unbabel/wmt22-comet-da"))
    rows = [{"src": s, "mt": o, "ref": r[0]} for s, o, r in zip(sources, outputs, references)]
    return 100.0 * float(scorer.predict(rows, progress_bar=False).system_score)


def squad_f1(outputs: list[str], references: list[list[str]]) -> dict[str, float]:
    """Mean over items of the best token F1 against any reference, 0-100, with SQuAD's normalisation."""
    best = [max(token_f1(o, r) for r in refs) for o, refs in zip(outputs, references)]
    return {"F1": 100.0 * sum(best) / len(best)}


def token_f1(output: str, reference: str) -> float:
    """F1 of the bags of normalised words; 1 where both are empty."""
    a, b = normalised(output), normalised(reference)
    if not a or not b:
        return float(a == b)
    common = sum((Counter(a) & Counter(b)).values())
    return 2.0 * common / (len(a) + len(b))


def containment(outputs: list[str], references: list[list[str]]) -> dict[str, float]:
    """Share of outputs, 0-100, that contain one of their references."""
    found = [any(contains(o, r) for r in refs) for o, refs in zip(outputs, references)]
    return {"containment": 100.0 * sum(found) / len(found)}


def contains(output: str, reference: str) -> bool:
    """Whether the reference's normalised words stand in the output's, side by side; not where it has none."""
    words, known = normalised(output), normalised(reference)
    return bool(known) and any(words[i : i + len(known)] == known for i in range(len(words)))


def normalised(text: str) -> list[str]:
    """Lower case, no punctuation, no English articles, split on white space (SQuAD's evaluation)."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def repeated(ids: Sequence[int], length: int = 8) -> np.ndarray:
    """Which tokens of an output stand in a sequence of `length` tokens that occurs there at least twice.

    Args:
        ids: the token ids of one output, [tokens], in order. The occurrences may overlap.
        length: of the sequences, in tokens.

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


@lru_cache(maxsize=1)
def rouge_scorer() -> "RougeScorer":
    """ROUGE-1, ROUGE-2 and sentence-level ROUGE-L, with NLTK's Porter stemmer."""
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)


def rouge(outputs: list[str], references: list[list[str]]) -> dict[str, float]:
    """Mean F-measures of ROUGE-1, ROUGE-2 and ROUGE-L, 0-100, the best reference of each item."""
    rows = [rouge_scorer().score_multi(refs, output) for output, refs in zip(outputs, references)]
    return {
        label: 100.0 * sum(row[key].fmeasure for row in rows) / len(rows)
        for label, key in (("ROUGE-1", "rouge1"), ("ROUGE-2", "rouge2"), ("ROUGE-L", "rougeL"))
    }
