"""Scores are those of the packages, of scikit-learn or by hand; a baseline is what no constant answer passes."""

import json
from dataclasses import replace

import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from eelib.tasks.classification import LABELS
from eelib.tasks.metrics import answer_stats, bleu, chrf, repeated, rouge, scores_of
from eelib.tasks.task import KINDS, Task, task_of_rows

TEXT = st.text(alphabet="ab the.,! ", max_size=20)


def bleu_of(outputs, references, language=""):
    return scores_of({"BLEU": bleu(outputs, references, language)})["BLEU"]


@settings(max_examples=50)
@given(st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=5))
def test_bleu_and_chrf_are_the_packages(items):
    """Of two references; Chinese has no spaces."""
    outputs, *streams = map(list, zip(*items))
    references = list(zip(*streams))
    assert bleu_of(outputs, references) == pytest.approx(sacrebleu.corpus_bleu(outputs, streams).score, abs=1e-6)
    assert chrf(outputs, references)["chrF"] == pytest.approx(sacrebleu.corpus_chrf(outputs, streams).score)
    assert bleu_of(["我喜欢读书"], [["我喜欢读报"]], "zh") > bleu_of(["我喜欢读书"], [["我喜欢读报"]], "en")


@pytest.mark.parametrize(
    "output, references, f1, containment",
    [
        ("the cat sat", ["a dog", "a cat"], 200 / 3, 100),  # the best reference counts
        ("the", ["a"], 100, 0),  # nothing is left: the same, and nothing to be found
        ("It was a reddish kite.", ["red"], 0, 0),  # words, not letters
        ("red and kite", ["red kite"], 80, 0),  # side by side
    ],
)
def test_answers_by_hand(output, references, f1, containment):
    """SQuAD's words and token F1; each score is the mean over items."""
    both = scores_of(answer_stats([output, "red kite"], [references, ["kite red"]]))
    assert both == pytest.approx({"F1": (f1 + 100) / 2, "containment": containment / 2})


def test_rouge():
    """Hand-counted F-measures; the better of two references counts."""
    got = scores_of(rouge(["the small dog runs"], [["the small cat runs"]]))
    assert got == pytest.approx({"ROUGE-1": 75.0, "ROUGE-2": 100 / 3, "ROUGE-L": 75.0})
    assert scores_of(rouge(["a dog"], [["nothing else", "a dogs"]]))["ROUGE-1"] == pytest.approx(100.0)


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 8))
def test_repeated_tokens_against_a_plain_loop(ids, length):
    """A token is repeated where some window around it equals one at another place."""
    starts = range(len(ids) - length + 1)
    twice = [a for a in starts if any(a != b and ids[a : a + length] == ids[b : b + length] for b in starts)]
    assert repeated(ids, length).tolist() == [any(a <= i < a + length for a in twice) for i in range(len(ids))]


@pytest.mark.parametrize("kind", ["translation", "question_answering"])
def test_quality_and_baseline(kind, one_line):
    """A perfect output is above the baseline; an empty one and the baseline itself are not."""
    task = Task("t", kind, ["p"], [["the small dog sleeps here"]], ["s"], ["0"], baseline=KINDS[kind].baseline)
    perfect, nothing = task.quality(["the small dog sleeps here"]), task.quality([""])
    assert perfect == pytest.approx(dict.fromkeys(perfect, 100.0)) and task.above_baseline(perfect)
    assert not any(task.above_baseline(quality) for quality in (nothing, task.baseline, {}))
    one_line(ValueError, "2 outputs for 1", lambda: task.quality(["a", "b"]))
    one_line(ValueError, ("'poetry'", "translation"), lambda: replace(task, kind="poetry").quality(["x"]))


# Labels


def labelled(name, truth):
    """A task of items with these labels, by number."""
    fields = ("sentence", "sentence1", "sentence2")
    rows = [{"label": label} | dict.fromkeys(fields, f"{number}") for number, label in enumerate(truth)]
    return task_of_rows(f"glue/{name}", [("", row) for row in rows])


@settings(max_examples=50)
@given(
    st.sampled_from(sorted(LABELS)), st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=20)
)
def test_scores_are_scikit_learns(name, pairs):
    """However a model calls its labels. The baseline is what the best constant answer reaches, and none passes."""
    labels, (truth, given_labels) = LABELS[name], zip(*pairs)
    wanted = {
        "accuracy": accuracy_score(truth, given_labels),
        "F1": f1_score(truth, given_labels, zero_division=0.0),
        "Matthews": matthews_corrcoef(truth, given_labels) if len({*truth, *given_labels}) > 1 else 0.0,
    }
    task = labelled(name, truth)
    for call in (lambda i: f"LABEL_{i}", str, lambda i: f" {labels[i].title()} "):
        found = task.quality([call(i) for i in given_labels])
        assert found == pytest.approx({score: 100 * wanted[score] for score in found}, abs=1e-9)
    constant = [task.quality([label] * len(truth)) for label in labels]
    assert task.baseline == pytest.approx({score: max(scores[score] for scores in constant) for score in found})
    assert not any(task.above_baseline(scores) for scores in constant)
    if set(truth) == {0, 1}:
        assert task.above_baseline(task.quality([labels[i] for i in truth]))


def test_picking_rows_counts_the_majority_anew_and_what_is_no_label_has_no_score(one_line):
    task = labelled("mrpc", [1] * 5 + [0] * 3)
    assert task.pick([4, 5, 6, 7]).baseline == {"F1": pytest.approx(40.0), "accuracy": pytest.approx(75.0)}
    outputs = ["equivalent"] * 7 + ["LABEL_2"]
    one_line(ValueError, ("glue/mrpc", "'LABEL_2'", "not_equivalent, equivalent"), lambda: task.quality(outputs))


ORDER = {
    "id": "KX-4817-b",
    "name": "Marta Berg",
    "items": [{"what": "lamps", "count": 3}, {"what": "mugs", "count": 2}],
    "city": "Bonn",
    "urgent": False,
}
KNOWN = json.dumps(ORDER)


def changed(**changes):
    return json.dumps({key: value for key, value in (ORDER | changes).items() if value is not None})


@pytest.mark.parametrize(
    "output, valid, exact, f1",  # the last: of six fields against six
    [
        (json.dumps(dict(reversed(ORDER.items())), indent=2), True, True, 1.0),
        ("[" * 10**6, False, False, 0.0),
        (changed(id="KX-4817-c"), True, False, 10 / 12),
        (changed(id=None), False, False, 10 / 11),
        (changed(more=1), False, False, 12 / 13),
        (changed(urgent=0), False, False, 10 / 12),
        (changed(items=ORDER["items"][::-1]), True, False, 1.0),
    ],
)
def test_structured_output_by_hand(output, valid, exact, f1):
    task = task_of_rows("structured/made", [(f"row {i}", {"note": f"Note {i}.", "record": ORDER}) for i in range(2)])
    scores = {"exact": exact, "valid": valid, "field F1": f1}
    assert task.quality([KNOWN, output]) == pytest.approx({name: 50 + 50 * value for name, value in scores.items()})
