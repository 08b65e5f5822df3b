"""Scores are those of the packages, of scikit-learn or by hand; a baseline is what no constant answer passes."""

import json
from dataclasses import replace

import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from eelib.tasks.classification import LABELS
from eelib.tasks.kind import Item, TaskKind
from eelib.tasks.metrics import answer_stats, bleu, chrf, mean_of, normalised, repeated, rouge, scores_of
from eelib.tasks.structured import is_valid
from eelib.tasks.task import KINDS, Task, load_task, task_of_rows
from eestudy.study import quality_interval

TEXT = st.text(alphabet="ab the.,! ", max_size=20)


def bleu_of(outputs, references, language=""):
    return scores_of({"BLEU": bleu(outputs, references, language)})["BLEU"]


@given(st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=5))
def test_bleu_and_chrf_of_two_references_are_the_packages(items):
    outputs, *streams = map(list, zip(*items))
    references = list(zip(*streams))
    assert bleu_of(outputs, references) == pytest.approx(sacrebleu.corpus_bleu(outputs, streams).score, abs=1e-6)
    assert chrf(outputs, references)["chrF"] == pytest.approx(sacrebleu.corpus_chrf(outputs, streams).score)


def test_bleu_of_uneven_references_and_of_languages_without_spaces():
    """A second reference counts for its own line only."""
    outputs = ["one two three four five", "six seven eight nine ten"]
    more = [["one two three four 5", outputs[0]], ["six seven eight nine 10"]]
    assert bleu_of(outputs, more) == pytest.approx(bleu_of(outputs, [[outputs[0]], more[1]]))
    assert bleu_of(["我喜欢读书"], [["我喜欢读报"]], "zh") > bleu_of(["我喜欢读书"], [["我喜欢读报"]], "en")
    assert bleu_of(["私は本が好き"], [["私は本が嫌い"]], "ja") > 20


@pytest.mark.parametrize(
    "output, references, f1, containment",
    [
        ("cat", ["a dog", "the cat"], 100, 100),  # the best reference counts
        ("the cat sat", ["a cat"], 200 / 3, 100),
        ("cat cat", ["cat dog"], 50, 0),
        ("the", ["a"], 100, 0),  # nothing is left: the same, and nothing to be found
        ("the", ["cat"], 0, 0),
        ("It was a reddish kite.", ["red"], 0, 0),  # words, not letters
        ("red and kite", ["red kite"], 80, 0),  # side by side
    ],
)
def test_answers_by_hand(output, references, f1, containment):
    """SQuAD's words and token F1; each score is the mean over items."""
    assert normalised("The  cat's, an OLD  one!") == ["cats", "old", "one"]
    both = scores_of(answer_stats([output, "red kite"], [references, ["kite red"]]))
    assert both == pytest.approx({"F1": (f1 + 100) / 2, "containment": containment / 2})


def test_rouge():
    """Hand-counted F-measures; the better of two references counts."""
    got = scores_of(rouge(["the small dog runs"], [["the small cat runs"]]))
    assert got == pytest.approx({"ROUGE-1": 75.0, "ROUGE-2": 100 / 3, "ROUGE-L": 75.0})
    assert scores_of(rouge(["a dog"], [["nothing else", "a dogs"]]))["ROUGE-1"] == pytest.approx(100.0)


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 8))
def test_repeated_tokens_against_a_plain_loop(ids, length):
    """A token is repeated where some window around it, of eight tokens by default, equals one at another place."""
    starts = range(len(ids) - length + 1)
    twice = [a for a in starts if any(a != b and ids[a : a + length] == ids[b : b + length] for b in starts)]
    assert repeated(ids, length).tolist() == [any(a <= i < a + length for a in twice) for i in range(len(ids))]
    assert repeated(ids).tolist() == repeated(ids, 8).tolist()


@pytest.mark.parametrize("kind", ["translation", "question_answering", "summarization"])
def test_quality_and_baseline(kind, one_line):
    """A perfect output is above the baseline; an empty one and the baseline itself are not."""
    task = Task("t", kind, ["p"], [["the small dog sleeps here"]], ["s"], ["0"], baseline=KINDS[kind].baseline)
    perfect, nothing = task.quality(["the small dog sleeps here"]), task.quality([""])
    assert perfect == pytest.approx(dict.fromkeys(perfect, 100.0)) and task.above_baseline(perfect)
    assert not any(task.above_baseline(quality) for quality in (nothing, task.baseline, {}))
    one_line(ValueError, "2 outputs for 1", lambda: task.quality(["a", "b"]))
    one_line(ValueError, ("'poetry'", "translation"), lambda: replace(task, kind="poetry").quality(["x"]))


def test_a_new_kind_of_task_is_one_record(tmp_path, monkeypatch):
    """Rows of its own, prompt, score, interval and baseline, through the calls that every other kind goes through."""
    same = TaskKind(
        name="copying",
        fields=("copy",),
        fits=lambda fields: "copy" in fields,
        reader=lambda name, first: lambda row, i: Item(f"Copy: {row['copy']}", row["copy"], [row["copy"]], str(i)),
        item_stats=lambda task, outputs: {"same": mean_of([o == s for o, s in zip(outputs, task.sources)])},
        baseline={"same": 50.0},
    )
    monkeypatch.setitem(KINDS, same.name, same)
    (tmp_path / "any.jsonl").write_text('{"copy": "a", "size": 1}\n{"copy": "bb", "size": 2}\n')
    task = load_task(str(tmp_path / "any.jsonl"))
    assert (task.kind, task.prompts, task.baseline) == ("copying", ["Copy: a", "Copy: bb"], {"same": 50.0})
    assert task.quality(["a", "b"]) == {"same": 50.0} and not task.above_baseline(task.quality(["a", "b"]))
    assert quality_interval(task, ["a", "bb"])["same"][:4] == (100.0, 100.0, 100.0, 2)
    some = replace(task, references=[["a"], []])  # an item without a reference is left out of both
    assert quality_interval(some, ["a", "x"])["same"].estimate == some.quality(["a", "x"])["same"] == 100.0


# Labels


def labelled(name, truth):
    """A task of items with these labels, by number."""
    fields = ("sentence", "sentence1", "sentence2")
    rows = [{"label": label} | dict.fromkeys(fields, f"{number}") for number, label in enumerate(truth)]
    return task_of_rows(f"glue/{name}", [("", row) for row in rows])


@settings(max_examples=100)
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
    for call in (lambda i: labels[i].upper(), lambda i: f"LABEL_{i}", str, lambda i: f" {labels[i].title()} "):
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
    assert task.pick([]).baseline == task.baseline
    for output in ("good", "LABEL_2", ""):
        outputs = ["equivalent"] * 7 + [output]
        one_line(ValueError, ("glue/mrpc", repr(output), "not_equivalent, equivalent"), lambda: task.quality(outputs))


# Structured output: what a validator finds, worked out by hand

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
        (KNOWN[:-1], False, False, 0.0),
        ("[" * 10**6, False, False, 0.0),
        ('"KX-4817-b"', False, False, 0.0),
        (changed(id="KX-4817-c"), True, False, 10 / 12),
        (changed(id="KX-4817-b\n"), False, False, 10 / 12),
        (changed(id=None), False, False, 10 / 11),
        (changed(more=1), False, False, 12 / 13),
        (changed(urgent=0), False, False, 10 / 12),
        (changed(items=[]), False, False, 8 / 10),
        (changed(items=ORDER["items"][::-1]), True, False, 1.0),
        (changed(items=[{"count": 3, "what": "lamps"}]), True, False, 10 / 11),
    ],
)
def test_an_output_by_hand(output, valid, exact, f1):
    assert is_valid(output) == valid
    task = task_of_rows("structured/made", [(f"row {i}", {"note": f"Note {i}.", "record": ORDER}) for i in range(2)])
    scores = {"exact": exact, "valid": valid, "field F1": f1}
    assert task.quality([KNOWN, output]) == pytest.approx({name: 50 + 50 * value for name, value in scores.items()})


def test_one_object_for_every_note_is_not_above_the_baseline():
    shipped = load_task("structured/orders")
    same = shipped.quality([shipped.references[0][0]] * len(shipped))
    assert same["valid"] == 100.0 and not shipped.above_baseline(same)
    assert shipped.above_baseline(shipped.quality([known for known, *_ in shipped.references]))
