"""Scores are those of the packages, of scikit-learn or by hand; a baseline is what no constant answer passes."""

import json
import sys
import types

import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from eelib.tasks.classification import LABELS
from eelib.tasks.kind import Item, TaskKind
from eelib.tasks.metrics import answer_stats, bleu, chrf, mean_of, normalised, repeated, rouge, scores_of, token_f1
from eelib.tasks.structured import Failure, failures, field_f1
from eelib.tasks.task import KINDS, Task, load_task, task_of_rows
from eestudy.exits.task_quality import quality_interval

TEXT = st.text(alphabet="ab the.,! ", max_size=20)


def bleu_chrf(outputs, references, language=""):
    return scores_of({"BLEU": bleu(outputs, references, language)}) | chrf(outputs, references)


@given(st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=5))
def test_bleu_and_chrf_of_two_references_are_the_packages(items):
    outputs, *streams = map(list, zip(*items))
    wanted = {"BLEU": sacrebleu.corpus_bleu(outputs, streams), "chrF": sacrebleu.corpus_chrf(outputs, streams)}
    wanted = {name: found.score for name, found in wanted.items()}
    assert bleu_chrf(outputs, list(zip(*streams))) == pytest.approx(wanted, abs=1e-6)


def test_uneven_numbers_of_references():
    """A second reference counts for its own line only."""
    outputs = ["one two three four five", "six seven eight nine ten"]
    more = bleu_chrf(outputs, [["one two three four 5", outputs[0]], ["six seven eight nine 10"]])
    alone = bleu_chrf(outputs, [[outputs[0]], ["six seven eight nine 10"]])
    assert more["BLEU"] == pytest.approx(alone["BLEU"])


def test_languages_without_spaces():
    assert bleu_chrf(["我喜欢读书"], [["我喜欢读书"]], "zh")["BLEU"] == pytest.approx(100.0)
    assert bleu_chrf(["私は本が好き"], [["私は本が嫌い"]], "ja")["BLEU"] > 20
    outputs, references = ["我喜欢读书"], [["我喜欢读报"]]
    assert bleu_chrf(outputs, references, "zh")["BLEU"] > bleu_chrf(outputs, references, "en")["BLEU"]


def test_squad_normalisation():
    assert normalised("The  cat's, an OLD  one!") == ["cats", "old", "one"]
    assert token_f1("the cat sat", "a cat") == pytest.approx(2 * 1 / (2 + 1))
    assert token_f1("cat cat", "cat dog") == pytest.approx(0.5)
    assert token_f1("the", "a") == 1.0 and token_f1("the", "cat") == 0.0
    assert scores_of(answer_stats(["cat", "dog"], [["a dog", "the cat"], ["bird"]]))["F1"] == 50.0


@pytest.mark.parametrize(
    "output, references, found",
    [
        ("It was, I think, the red kite of Ann.", ["blue kite", "a red kite"], 100.0),
        ("It was a reddish kite.", ["a red kite", "red"], 0.0),  # words, not letters
        ("red and kite", ["red kite"], 0.0),  # side by side
        ("the", ["a"], 0.0),  # nothing is left to be found
    ],
)
def test_containment(output, references, found):
    assert scores_of(answer_stats([output], [references]))["containment"] == found
    both = scores_of(answer_stats([output, "red kite"], [references, ["kite"]]))
    assert both["containment"] == (found + 100) / 2


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 8))
def test_repeated_tokens_against_a_plain_loop(ids, length):
    """A token is repeated where some window around it is equal to a window at another place."""
    starts = range(len(ids) - length + 1)
    twice = [a for a in starts if any(a != b and ids[a : a + length] == ids[b : b + length] for b in starts)]
    assert repeated(ids, length).tolist() == [any(a <= i < a + length for a in twice) for i in range(len(ids))]


def test_eight_tokens_in_a_row_are_a_repetition_and_seven_are_not():
    line = list(range(8))
    assert repeated([9, *line, 10, *line, 11]).tolist() == [False, *[True] * 8, False, *[True] * 8, False]
    assert not repeated([*line[:7], 10, *line[:7]]).any()


def test_rouge():
    """Hand-counted F-measures; the better of two references counts."""
    got = scores_of(rouge(["the small dog runs"], [["the small cat runs"]]))
    assert got["ROUGE-1"] == pytest.approx(75.0) and got["ROUGE-2"] == pytest.approx(100 / 3)
    assert got["ROUGE-L"] == pytest.approx(75.0)
    assert scores_of(rouge(["a dog"], [["nothing else"]])) == {"ROUGE-1": 0.0, "ROUGE-2": 0.0, "ROUGE-L": 0.0}
    assert scores_of(rouge(["a dog"], [["nothing else", "a dog"]]))["ROUGE-1"] == pytest.approx(100.0)


def test_comet_joins_the_scores_of_a_translation_where_it_is_installed(monkeypatch):
    class Scorer:
        def predict(self, rows, progress_bar):
            assert rows == [{"src": "Ein Hund.", "mt": "A dog.", "ref": "One dog."}]
            return types.SimpleNamespace(system_score=0.5)

    fake = types.SimpleNamespace(download_model=lambda name: name, load_from_checkpoint=lambda path: Scorer())
    task = Task("translation/de-en", "translation", ["p"], [["One dog."]], ["Ein Hund."], ["0"], "de", "en")
    assert "COMET-22" not in task.quality(["A dog."])
    monkeypatch.setitem(sys.modules, "comet", fake)
    assert task.quality(["A dog."])["COMET-22"] == 50.0


@pytest.mark.parametrize(
    "kind, metrics",
    [
        ("translation", {"BLEU", "chrF"}),
        ("question_answering", {"F1", "containment"}),
        ("summarization", {"ROUGE-1", "ROUGE-2", "ROUGE-L"}),
    ],
)
def test_quality_and_baseline(kind, metrics, one_line):
    """A perfect output is above the baseline; an empty one and the baseline itself are not."""
    task = Task("t", kind, ["p"], [["the small dog sleeps here"]], ["s"], ["0"], baseline=KINDS[kind].baseline)
    perfect, nothing = task.quality(["the small dog sleeps here"]), task.quality([""])
    assert set(perfect) == metrics and all(v == pytest.approx(100) for v in perfect.values())
    assert task.above_baseline(perfect)
    assert not any(task.above_baseline(quality) for quality in (nothing, task.baseline, {}))
    one_line(ValueError, "2 outputs for 1", lambda: task.quality(["a", "b"]))
    poetry = Task("t", "poetry", ["p"], [["r"]], ["s"], ["0"])
    for call in (lambda: poetry.quality(["x"]), lambda: quality_interval(poetry, ["x"])):
        one_line(ValueError, ("'poetry'", "translation"), call)


def test_a_new_kind_of_task_is_one_record(tmp_path, monkeypatch):
    """Rows of its own, prompt, score, interval and baseline, through the calls that every other kind goes through."""
    same = TaskKind(
        name="copying",
        fields=("copy",),
        examples=("copy",),
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
    assert task.columns == {"size": [1, 2]}


# Labels


def labelled(name, truth):
    """A task of items with these labels, by number."""
    fields = ("sentence", "sentence1", "sentence2")
    rows = [{"label": label} | dict.fromkeys(fields, f"{number}") for number, label in enumerate(truth)]
    return task_of_rows(f"glue/{name}", [("", row) for row in rows])


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(LABELS)), st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=20)
)
def test_scores_are_scikit_learns(name, pairs):
    """However a model calls its labels."""
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


def test_outputs_that_are_no_labels(one_line):
    task = labelled("sst2", [1, 0])
    for outputs in (["positive", "good"], ["LABEL_2", "positive"], ["", "positive"], ["entailment"] * 2):
        one_line(ValueError, ("glue/sst2", repr(outputs[1]), "negative, positive"), lambda: task.quality(outputs))
    one_line(ValueError, "1 outputs for 2", lambda: task.quality(["positive"]))


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(LABELS)), st.lists(st.integers(0, 1), min_size=1, max_size=12))
def test_nobody_beats_the_majority_by_saying_one_thing(name, truth):
    """The baseline is reached by constant answers, metric by metric, and never passed by one."""
    labels, task = LABELS[name], labelled(name, truth)
    constant = [task.quality([label] * len(truth)) for label in labels]
    assert set(task.baseline) == set(constant[0])
    for metric, value in task.baseline.items():
        assert value == pytest.approx(max(scores[metric] for scores in constant))
    assert not any(task.above_baseline(scores) for scores in constant)
    if set(truth) == {0, 1}:
        assert task.above_baseline(task.quality([labels[i] for i in truth]))


def test_majority_baselines_by_hand():
    """Of eight pairs five are equivalent; picking rows counts anew."""
    task = labelled("mrpc", [1] * 5 + [0] * 3)
    assert task.baseline == {"F1": pytest.approx(100 * 10 / 13), "accuracy": pytest.approx(62.5)}
    assert task.pick([4, 5, 6, 7]).baseline == {"F1": pytest.approx(40.0), "accuracy": pytest.approx(75.0)}
    assert task.pick([]).baseline == task.baseline
    questions = labelled("questions", [i % 6 for i in range(13)])
    assert questions.baseline == {"accuracy": pytest.approx(100 * 3 / 13)}
    right = [known for (known,) in questions.references]
    found = quality_interval(questions, right[:-1] + ["number"])["accuracy"]
    assert found.estimate == pytest.approx(100 * 12 / 13) and found.groups == 13


# Structured output: what a validator finds, worked out by hand

ORDER = {
    "id": "KX-4817-b",
    "name": "Marta Berg",
    "items": [{"what": "lamps", "count": 3}, {"what": "mugs", "count": 2}],
    "city": "Bonn",
    "urgent": False,
}
KNOWN = json.dumps(ORDER)


def orders(count=1):
    return task_of_rows(
        "structured/made", [(f"row {i}", {"note": f"Note {i}.", "record": ORDER}) for i in range(count)]
    )


def said(**changes):
    return json.dumps({key: value for key, value in (ORDER | changes).items() if value is not None})


# (output, failure, exact, field F1 of its six fields against six)
CASES = [
    (KNOWN, Failure(False, False), True, 1.0),
    (json.dumps(ORDER, indent=2), Failure(False, False), True, 1.0),
    (json.dumps(dict(reversed(ORDER.items()))), Failure(False, False), True, 1.0),
    (KNOWN[:-1], Failure(True, True, "JSON"), False, 0.0),
    ("", Failure(True, True, "JSON"), False, 0.0),
    ("[" * 10**6, Failure(True, True, "JSON"), False, 0.0),
    ("null", Failure(True, True, "JSON"), False, 0.0),
    ('"KX-4817-b"', Failure(True, True), False, 0.0),
    (said(id="KX-4817-c"), Failure(False, True), False, 10 / 12),
    (said(id="KX-481-b"), Failure(True, True, "id"), False, 10 / 12),
    (said(id="KX-4817-b\n"), Failure(True, True, "id"), False, 10 / 12),
    (said(id=["KX-4817-b"]), Failure(True, True, "id"), False, 10 / 12),
    (said(id=None), Failure(True, True), False, 10 / 11),
    (said(name=""), Failure(True, False, "name"), False, 10 / 12),
    (said(more=1), Failure(True, False), False, 12 / 13),
    (said(urgent="false"), Failure(True, False, "urgent"), False, 10 / 12),
    (said(urgent=0), Failure(True, False, "urgent"), False, 10 / 12),
    (said(items=[]), Failure(True, False, "items"), False, 8 / 10),
    (said(items=ORDER["items"][::-1]), Failure(False, False), False, 1.0),
    (said(items=[{"what": "lamps", "count": "3"}]), Failure(True, False, "items[0].count"), False, 8 / 11),
    (said(items=[{"what": "lamps", "count": True}]), Failure(True, False, "items[0].count"), False, 8 / 11),
    (said(items=[{"count": 3, "what": "lamps"}]), Failure(False, False), False, 10 / 11),
]


@pytest.mark.parametrize("output, wanted, exact, f1", CASES)
def test_an_output_by_hand(output, wanted, exact, f1):
    assert failures([output], [[KNOWN]]) == [wanted]
    assert field_f1(output, KNOWN) == pytest.approx(f1)
    scores = orders().quality([output])
    assert scores == pytest.approx({"exact": 100 * exact, "valid": 100 * (not wanted.schema), "field F1": 100 * f1})


def test_scores_are_means_and_have_intervals():
    made, outputs = orders(40), [KNOWN, KNOWN[:-1], said(city="Kiel"), said(id="KX-1-b")] * 10
    scores = made.quality(outputs)
    assert scores == pytest.approx({"exact": 25.0, "valid": 50.0, "field F1": 100 * (1 + 0 + 10 / 12 + 10 / 12) / 4})
    found = quality_interval(made, outputs)
    assert {name: interval.estimate for name, interval in found.items()} == pytest.approx(scores)
    assert all(interval.low < interval.estimate < interval.high for interval in found.values())


def test_one_object_for_every_note_is_not_above_the_baseline():
    shipped = load_task("structured/orders")
    same = shipped.quality([shipped.references[0][0]] * len(shipped))
    assert same["valid"] == 100.0 and not shipped.above_baseline(same)
    assert shipped.above_baseline(shipped.quality([known for known, *_ in shipped.references]))


def test_rows_that_are_wrong_are_named(one_line):
    for row, part in (
        ({"note": "", "record": ORDER}, "field note is empty"),
        ({"note": "A note.", "record": KNOWN}, "field record"),
        ({"note": "A note.", "record": ORDER | {"id": "4817"}}, "field record"),
    ):
        one_line(ValueError, ("row 7", part), lambda row=row: task_of_rows("made", [("row 7", row)]))
