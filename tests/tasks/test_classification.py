"""Classification: rows of GLUE's tasks, labels by any name, GLUE's scores and the majority class."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from task_rows import write

from eelib.tasks.classification import LABELS
from eelib.tasks.task import Task, load_task, task_of_rows
from eestudy.exits.task_quality import quality_interval

OWN = {
    "cola": ("sentence",),
    "sst2": ("sentence",),
    "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "rte": ("sentence1", "sentence2"),
    "mnli": ("premise", "hypothesis"),
    "questions": ("sentence",),
}
GLUE = tuple(name for name in OWN if name != "questions")


def rows_of(name, count=4):
    """Rows in GLUE's own fields, with the numbers of their labels."""
    return [
        {field: f"{field} {i}." for field in OWN[name]} | {"label": i % len(LABELS[name]), "idx": i}
        for i in range(count)
    ]


def file_of(path, rows):
    """The path of a file of rows, as a task's name."""
    return str(write(path, rows))


# Reading rows


@pytest.mark.parametrize("name", OWN)
def test_rows_of_each_task(name, tmp_path):
    """GLUE's fields and numbers, the shipped files' fields and names, and a mixture: the same texts and labels."""
    rows = rows_of(name)
    task = load_task(file_of(tmp_path / f"my.{name}.jsonl", rows))
    first, *second = OWN[name]
    assert (task.kind, task.labels, task.name) == ("classification", LABELS[name], f"my.{name}")
    assert task.prompts == [row[first] for row in rows]
    assert task.seconds == [row[field] for row in rows for field in second]
    assert task.references == [[LABELS[name][row["label"]]] for row in rows]
    assert all(task.prompts[i] in task.sources[i] for i in range(4))
    assert not second or all(task.seconds[i] in task.sources[i] for i in range(4))
    plain = ("sentence1", "sentence2") if second else ("sentence",)
    named_rows = [
        dict(zip(plain, (row[field] for field in OWN[name]))) | {"label": LABELS[name][row["label"]].upper()}
        for row in rows
    ]
    again = load_task(file_of(tmp_path / f"my-{name}.jsonl", named_rows))
    assert (again.prompts, again.seconds, again.references) == (task.prompts, task.seconds, task.references)


def test_the_order_of_labels():
    """As GLUE numbers them, which decides what a model's LABEL_0 means; questions have TREC's six coarse classes."""
    assert {name: LABELS[name][1] for name in GLUE} == {
        "cola": "acceptable",
        "mrpc": "equivalent",
        "qnli": "not_entailment",
        "qqp": "duplicate",
        "rte": "not_entailment",
        "mnli": "neutral",
        "sst2": "positive",
    }
    assert {name: len(LABELS[name]) for name in GLUE} == {n: 3 if n == "mnli" else 2 for n in GLUE}
    assert LABELS["questions"] == ("abbreviation", "description", "entity", "person", "place", "number")


def test_pairs_travel_with_their_rows(tmp_path):
    rows = rows_of("rte", 6)
    rows[3]["sentence1"] = rows[0]["sentence1"]
    task = load_task(file_of(tmp_path / "rte.jsonl", rows))
    assert task.take(2).seconds == task.seconds[:2] and task.pick([4, 1]).seconds == [task.seconds[4], task.seconds[1]]
    assert task.groups[0] == task.groups[3] and len(set(task.groups)) == 5  # one premise is one group
    other = replace(task, seconds=[*task.seconds[:5], "another"])
    assert other.hash != task.hash == load_task(str(tmp_path / "rte.jsonl")).hash
    single = Task.from_prompts(["a"])
    assert single.hash == replace(single, seconds=[]).hash == replace(single, labels=("x",)).hash


@pytest.mark.parametrize(
    "name, change, part",
    [
        ("sst2", {"label": -1}, "field label is -1 (GLUE's way to hide it); allowed: negative, positive, or 0 to 1"),
        ("sst2", {"label": 2}, "field label is 2"),
        ("sst2", {"label": True}, "field label is True"),
        ("sst2", {"label": "good"}, "field label is 'good'; allowed: negative, positive"),
        ("sst2", {"label": 1.0}, "field label is 1.0"),
        ("mrpc", {"label": "entailment"}, "not_equivalent, equivalent"),
        ("rte", {"sentence2": 5}, "field sentence2 is not a"),
        ("qnli", {"question": "a\0"}, "field question holds a NUL"),
    ],
)
def test_bad_rows_are_named(name, change, part, tmp_path, one_line):
    rows = rows_of(name)
    path = file_of(tmp_path / f"{name}.jsonl", [rows[0], rows[1] | change])
    one_line(ValueError, (f"{name}.jsonl, line 2: ", part), lambda: load_task(path))


def test_missing_fields_and_names(tmp_path, one_line):
    row = rows_of("mrpc")[0]
    for field in row.keys() - {"idx"}:
        path = file_of(tmp_path / "mrpc.jsonl", [row, {key: value for key, value in row.items() if key != field}])
        one_line(ValueError, f"line 2: field {field} is missing", lambda: load_task(path))
    one_line(ValueError, "field sentence is missing", lambda: load_task(file_of(tmp_path / "sst2.jsonl", [row])))
    for name in ("mine", "carte", "sst2-more"):  # carte ends in rte, but is no word of its own
        one_line(
            ValueError,
            (repr(name), "must end in cola, mrpc"),
            lambda: load_task(file_of(tmp_path / f"{name}.jsonl", [row])),
        )
    path = file_of(tmp_path / "sst2.jsonl", [{"x": 1}])
    one_line(ValueError, ("fit no task", "sentence + label"), lambda: load_task(path))


# Scores


def labelled(name, truth):
    """A task of items with these labels, by number."""
    rows = [{"label": label} | dict.fromkeys(OWN[name], f"{number}") for number, label in enumerate(truth)]
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


def test_majority_baselines_by_hand(tmp_path):
    """Of eight pairs five are equivalent; picking rows counts anew."""
    rows = [row | {"label": int(i < 5)} for i, row in enumerate(rows_of("mrpc", 8))]
    task = load_task(file_of(tmp_path / "mrpc.jsonl", rows))
    assert task.baseline == {"F1": pytest.approx(100 * 10 / 13), "accuracy": pytest.approx(62.5)}
    assert task.pick([4, 5, 6, 7]).baseline == {"F1": pytest.approx(40.0), "accuracy": pytest.approx(75.0)}
    assert task.pick([]).baseline == task.baseline
    questions = load_task(file_of(tmp_path / "questions.jsonl", rows_of("questions", 13)))
    assert questions.baseline == {"accuracy": pytest.approx(100 * 3 / 13)}
    right = [known for (known,) in questions.references]
    found = quality_interval(questions, right[:-1] + ["number"])["accuracy"]
    assert found.estimate == pytest.approx(100 * 12 / 13) and found.groups == 13
