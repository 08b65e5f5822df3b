"""Tasks: names, limits, hashes, prompts and wordings, scores and baselines."""

import pytest
from task_rows import PAIR, QUESTION, write

from eelib.tasks.kind import Item, TaskKind
from eelib.tasks.metrics import mean_of
from eelib.tasks.task import KINDS, Task, load_task, shipped_tasks, task_names
from eelib.tasks.text_kinds import question_prompt, summarization_prompt, translation_prompt
from eestudy.exits.task_quality import quality_interval


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A made-up folder of shipped texts."""
    write(tmp_path / "texts/translation/de-en.jsonl", [PAIR, PAIR | {"source": "Ja."}])
    write(tmp_path / "texts/translation/en-de.jsonl", [PAIR])
    write(tmp_path / "texts/question_answering/short.jsonl", [QUESTION])
    monkeypatch.setenv("EELIB_DATA", str(tmp_path))


def test_names(texts):
    for pattern, names in (
        ("translation/de-en", ["translation/de-en"]),
        ("*", ["question_answering/short", "translation/de-en", "translation/en-de"]),
        (" translation/en-de , translation/* ", ["translation/en-de", "translation/de-en"]),
        ("squad,wmt22/zh-en", ["squad", "wmt22/zh-en"]),
    ):
        assert task_names(pattern) == names


def test_unknown_names(texts, one_line):
    for pattern in ("", "translation/xx", "translations/*", "translation/de-en,", "wmt22/de-pl"):
        part = repr(pattern.split(",")[-1])
        one_line(ValueError, (part, "translation/de-en", "squad", "pattern"), lambda: task_names(pattern))
    for name in ("translation/xx", "", 5, None, "x" * 5000, "a\0b"):  # some of them no file can have
        one_line(ValueError, "is not known", lambda: load_task(name))


def test_shipped_texts_load():
    """All of data/texts is readable, not empty, and of the kind that its folder says; "prose" is of texts to read."""
    names = shipped_tasks()
    assert "translation/de-en" in names
    for name in names:
        task, folder = load_task(name), name.split("/")[0]
        assert task.name == name and len(set(zip(task.prompts, task.sources))) == len(task)
        assert len(task.references) == len(task.groups) == len(task.sources) == len(task)
        without = task.kind in ("instructions", "continuation", "texts")
        assert all(bool(known) != without for known in task.references)
        assert task.kind == {"prose": "texts"}.get(folder, folder)
        if task.kind == "translation":
            assert f"{task.source_language}-{task.target_language}" == name.split("/")[1]
        elif name == "question_answering/passages":
            assert len(set(task.groups)) < len(task)


def test_limit(texts, one_line):
    whole, part = load_task("translation/de-en"), load_task("translation/de-en", 1)
    assert [len(load_task("translation/de-en", limit=n)) for n in (None, 0, 1, 2, 9)] == [2, 2, 1, 2, 2]
    assert part.prompts == whole.prompts[:1] and whole.hash == load_task("translation/de-en").hash != part.hash
    for bad in (-1, "5", 2.0, True):
        one_line(ValueError, (f"limit {bad!r}", "0 (all)"), lambda: load_task("translation/de-en", bad))
        one_line(ValueError, f"limit {bad!r}", lambda: whole.take(bad))


def test_prompts_of_shipped_tasks_are_those_of_the_traces_that_are_there():
    """A trace is found by its task's hash."""
    known = {
        "classification/mrpc": "e87741b153ed44d3",
        "question_answering/passages": "afddf3d76b81b6a9",
        "question_answering/rooms": "7115b98afbe68678",
        "structured/orders": "3720d5f7b6e53a1b",
        "summarization/news": "35fee29798446fb4",
        "translation/de-en": "0f44ecc19c75d566",
    }
    for name, start in known.items():
        task = load_task(name)
        assert task.hash.startswith(start)
        assert task.kind == "classification" or task.worded("paper") == task


def test_prompts_are_the_papers(texts):
    """P, Table 8."""
    assert translation_prompt("x y", "de", "fr") == (
        "### Instruction:\nTranslate German to French:\n### Input:\nx y\n### Response:\n"
    )
    assert summarization_prompt("x y") == (
        "### Instruction:\nSummarize the following article to a sentence:\n### Input:\nx y\n### Response:\n"
    )
    assert question_prompt("c d", "q?") == (
        "### Instruction:\nI will provide a context and a question to you. You need to answer me the question based on "
        "the context.\n### Context:\nc d\n### Question:\nq?\n### Answer:\n"
    )


def test_free_prompts(one_line):
    task = Task.from_prompts(["one", "two"])
    assert (task.kind, task.references, task.groups) == ("prompts", [[], []], ["0", "1"])
    assert task.quality(["x", "y"]) == {} and task.above_baseline({})
    assert Task.from_prompts(["one"], references=[["a b c d"]]).quality(["a b c d"])["chrF"] == pytest.approx(100)
    for prompts, more, part in (
        (["ok", " "], {}, "prompt 1"),
        (["a\0"], {}, "prompt 0"),
        (["a\ud800"], {}, "U+D800"),
        (["ok", 5], {}, "prompt 1"),
        ([], {}, "at least one"),
        ("text", {}, "list"),
        (None, {}, "list"),
        (["a"], {"name": ""}, "name is empty"),
        (["a"], {"references": ["x"]}, "must be a list"),
        (["a"], {"references": [["x", 3]]}, "prompt 0 is not a string"),
        (["a", "b"], {"references": [["x"]]}, "references"),
    ):
        one_line(ValueError, part, lambda: Task.from_prompts(prompts, **more))


BRACES = "{note} {text} {"  # in a text they are no fields


@pytest.mark.parametrize(
    "name, row, fields",
    [
        ("a", QUESTION | {"context": BRACES}, {"context": BRACES, "question": "What has Ann?"}),
        ("a", {"article": BRACES, "highlights": "x"}, {"text": BRACES}),
        ("a.de-en", PAIR, {"source": "Der Hund schläft.", "source_language": "German", "target_language": "English"}),
        ("a", {"id": "1", "instruction": "Name {two} birds."}, {"instruction": "Name {two} birds."}),
        ("a", {"id": "1", "opening": "One day,"}, {"opening": "One day,"}),
    ],
)
def test_wordings(name, row, fields, tmp_path, one_line):
    """Every field in its place, once; picked items have theirs; braces around anything else are text."""
    task = load_task(str(write(tmp_path / f"{name}.jsonl", [row, row | {"id": "2"}])))
    assert task.worded("paper") == task
    template = '{"as": [{}]} ' + " | ".join(f"{{{name}}}" for name in fields)
    worded = task.pick([1]).worded(template)
    assert worded.prompts == ['{"as": [{}]} ' + " | ".join(fields.values())]
    assert worded.hash != task.pick([1]).hash and worded.references == task.references[1:]
    allowed = ("paper", *(f"{{{name}}}" for name in fields))
    for bad in ("shorter", "", f"{{nothing}} {allowed[1]}"):
        one_line(ValueError, (repr(bad), *allowed), lambda: task.worded(bad))


def test_tasks_of_other_origin_are_worded_too(one_line):
    free = Task.from_prompts(["one", "two"])
    assert free.worded("Say {text}.").prompts == ["Say one.", "Say two."]
    one_line(ValueError, ("'short'", "{text}"), lambda: free.worded("short"))
    made = Task("t", "translation", ["p"], [["r"]], ["s"], ["0"])  # by hand, without fields
    one_line(ValueError, "allowed", lambda: made.worded("{source}"))
    labelled = load_task("classification/sst2", 1)
    one_line(ValueError, "as they are", lambda: labelled.worded("{sentence}"))


def test_further_columns_travel_with_their_rows(tmp_path):
    """They are not part of the hash: no prompt depends on them."""
    rows = [QUESTION | {"question": f"Who {i}?", "facts": i, "kind": "rooms"} for i in range(4)]
    del rows[2]["facts"]
    with_columns = load_task(str(write(tmp_path / "q.jsonl", rows)))
    assert with_columns.columns == {"facts": [0, 1, None, 3], "kind": ["rooms"] * 4}
    assert with_columns.pick([3, 1]).columns["facts"] == [3, 1] and with_columns.take(1).columns["facts"] == [0]
    bare = [{key: row[key] for key in row if key in QUESTION} for row in rows]
    assert load_task(str(write(tmp_path / "q.jsonl", bare))).hash == with_columns.hash


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
    task = load_task(str(write(tmp_path / "any.jsonl", [{"copy": word, "size": len(word)} for word in ("a", "bb")])))
    assert (task.kind, task.prompts, task.baseline) == ("copying", ["Copy: a", "Copy: bb"], {"same": 50.0})
    assert task.quality(["a", "b"]) == {"same": 50.0} and not task.above_baseline(task.quality(["a", "b"]))
    assert quality_interval(task, ["a", "bb"])["same"][:4] == (100.0, 100.0, 100.0, 2)
    assert task.columns == {"size": [1, 2]}
