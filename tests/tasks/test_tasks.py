"""Tasks: names, limits, hashes, prompts and wordings; rows of files, folders and copies; a bad row is named."""

import os
import sys
from dataclasses import replace

import pandas as pd
import pytest
from task_rows import PAIR, QUESTION, write

from eelib.tasks.classification import LABELS
from eelib.tasks.task import Task, load_task, shipped_tasks, task_names
from eelib.tasks.text_kinds import question_prompt, summarization_prompt, translation_prompt
from eestudy.exits.task_quality import quality_interval

SQUAD = [
    {
        "context": f"Passage {i // 2} tells.",
        "question": f"Who {i}?",
        "answers": {"text": ["Ann", "Ann Lee"], "answer_start": [0, 0]},
    }
    for i in range(4)
]
NARRATIVE = [
    {
        "document": {"id": f"d{i // 2}", "kind": "book", "summary": {"text": f"Story {i // 2}.", "title": "t"}},
        "question": {"text": f"Why {i}?", "tokens": ["Why"]},
        "answers": [{"text": "because", "tokens": ["because"]}, {"text": "so", "tokens": ["so"]}],
    }
    for i in range(4)
]
NEWS = [{"article": f"Long story {i}.", "highlights": f"Short {i}.", "id": str(i)} for i in range(4)]
XML = """<?xml version='1.0' encoding='utf-8'?>
<dataset id="wmttest2022.de-en"><collection id="general">
<doc origlang="de" id="one"><src lang="de"><p><seg id="1">Guten  Morgen.</seg><seg id="2">Wie geht es?</seg></p></src>
<ref lang="en" translator="A"><p><seg id="1">Good morning.</seg><seg id="2">How are you?</seg></p></ref>
<ref lang="en" translator="B"><p><seg id="1">Morning!</seg><seg id="2">How is it going?</seg></p></ref>
<hyp system="refine" language="en"><p><seg id="1">GOOD</seg><seg id="2">HOW</seg></p></hyp></doc>
<doc origlang="de" id="two" testsuite="x"><src lang="de"><p><seg id="1">Nicht lesen.</seg></p></src>
<ref lang="en" translator="A"><p><seg id="1">Do not read.</seg></p></ref></doc>
</collection></dataset>
"""
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


def labelled(name, count=4):
    """Rows of a set in GLUE's own fields, with the numbers of their labels."""
    return [
        {field: f"{field} {i}." for field in OWN[name]} | {"label": i % len(LABELS[name]), "idx": i}
        for i in range(count)
    ]


REVIEW, MRPC = labelled("sst2")[0], labelled("mrpc")[0]


def loaded(path, rows, **options):
    return load_task(str(write(path, rows)), **options)


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


def test_a_limit_takes_one_item_of_each_group_before_any_second():
    whole = load_task("question_answering/visits")
    few, most = whole.take(7), whole.take(61)
    assert few.groups == list(dict.fromkeys(whole.groups))[:7] and few.prompts == whole.prompts[:14:2]
    assert len(set(most.groups[:60])) == 60 and most.prompts[60] == whole.prompts[1] and most.groups[60] == "v01"


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
        (
            "a.de-en",
            PAIR | {"source": BRACES},
            {"source": BRACES, "source_language": "German", "target_language": "English"},
        ),
        ("a", {"id": "1", "instruction": "Name {two} birds."}, {"instruction": "Name {two} birds."}),
        ("a", {"id": "1", "opening": "One day,"}, {"opening": "One day,"}),
    ],
)
def test_wordings(name, row, fields, tmp_path, one_line):
    """Every field in its place, once; picked items have theirs; braces around anything else are text."""
    task = loaded(tmp_path / f"{name}.jsonl", [row, row | {"id": "2"}])
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
    reviews = load_task("classification/sst2", 1)
    one_line(ValueError, "as they are", lambda: reviews.worded("{sentence}"))


def test_further_columns_travel_with_their_rows(tmp_path):
    """They are not part of the hash: no prompt depends on them."""
    rows = [QUESTION | {"question": f"Who {i}?", "facts": i, "kind": "rooms"} for i in range(4)]
    del rows[2]["facts"]
    with_columns = loaded(tmp_path / "q.jsonl", rows)
    assert with_columns.columns == {"facts": [0, 1, None, 3], "kind": ["rooms"] * 4}
    assert with_columns.pick([3, 1]).columns["facts"] == [3, 1] and with_columns.take(1).columns["facts"] == [0]
    bare = [{key: row[key] for key in row if key in QUESTION} for row in rows]
    assert loaded(tmp_path / "q.jsonl", bare).hash == with_columns.hash


# Rows


@pytest.mark.parametrize("name", OWN)
def test_rows_of_each_task(name, tmp_path):
    """GLUE's fields and numbers, the shipped files' fields and names, and a mixture: the same texts and labels."""
    rows = labelled(name)
    task = loaded(tmp_path / f"my.{name}.jsonl", rows)
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
    again = loaded(tmp_path / f"my-{name}.jsonl", named_rows)
    assert (again.prompts, again.seconds, again.references) == (task.prompts, task.seconds, task.references)


def test_the_order_of_labels():
    """As GLUE numbers them, which decides what a model's LABEL_0 means; questions have TREC's six coarse classes."""
    assert {name: labels[1] for name, labels in LABELS.items()} == {
        "cola": "acceptable",
        "mrpc": "equivalent",
        "qnli": "not_entailment",
        "qqp": "duplicate",
        "rte": "not_entailment",
        "mnli": "neutral",
        "sst2": "positive",
        "questions": "description",
    }
    assert {name: len(labels) for name, labels in LABELS.items()} == dict.fromkeys(OWN, 2) | {"mnli": 3, "questions": 6}
    assert LABELS["questions"] == ("abbreviation", "description", "entity", "person", "place", "number")


def test_pairs_travel_with_their_rows(tmp_path):
    rows = labelled("rte", 6)
    rows[3]["sentence1"] = rows[0]["sentence1"]
    task = loaded(tmp_path / "rte.jsonl", rows)
    assert task.take(2).seconds == task.seconds[:2] and task.pick([4, 1]).seconds == [task.seconds[4], task.seconds[1]]
    assert task.groups[0] == task.groups[3] and len(set(task.groups)) == 5  # one premise is one group
    other = replace(task, seconds=[*task.seconds[:5], "another"])
    assert other.hash != task.hash == load_task(str(tmp_path / "rte.jsonl")).hash
    single = Task.from_prompts(["a"])
    assert single.hash == replace(single, seconds=[]).hash == replace(single, labels=("x",)).hash


def test_local_folders_and_files(tmp_path, one_line):
    """Hidden copies are not read, and pipes are not waited for; a file that is there plain and packed is refused."""
    folder = tmp_path / "my.de-en"
    write(folder / "a.jsonl", [PAIR])
    write(folder / "deeper/b.jsonl.gz", [PAIR | {"source": "Nein."}])
    write(folder / ".ipynb_checkpoints/a-checkpoint.jsonl", [PAIR])
    os.mkfifo(folder / "c.jsonl")
    task = load_task(str(folder))
    assert task.sources == ["Der Hund schläft.", "Nein."] and task.target_language == "en"
    write(folder / "deeper/b.jsonl", [PAIR])
    one_line(ValueError, "both b.jsonl and b.jsonl.gz", lambda: load_task(str(folder)))
    packed = loaded(tmp_path / "news.fr-de.jsonl.gz", [PAIR] * 3, limit=2)
    assert (packed.name, len(packed), packed.source_language) == ("news.fr-de", 2, "fr")
    (tmp_path / "empty").mkdir()
    one_line(ValueError, "no .jsonl", lambda: load_task(str(tmp_path / "empty")))


BAD = {  # name of the file: rows, and what is said of them
    "bad.de-en": [
        ([PAIR, "{broken"], "line 2: not a JSON object"),
        ([PAIR, "[1]"], "line 2: not a JSON object"),
        ([PAIR, ""], "line 2: not a JSON object"),
        ([PAIR, "[" * 100_000], "line 2: not a JSON object"),
        ([PAIR, {"source": "Hm."}], "line 2: field references is missing"),
        ([PAIR, PAIR | {"source": " "}], "line 2: field source is empty"),
        ([PAIR, PAIR | {"source": "a\0b"}], "line 2: field source holds a NUL"),
        ([PAIR, PAIR | {"source": "a\ud83d"}], "field source holds half a character (the surrogate U+D83D alone)"),
        ([PAIR, PAIR | {"source": 7}], "line 2: field source is not a string"),
        ([PAIR, PAIR | {"references": ["ok", ""]}], "line 2: a text in field references is empty"),
        ([PAIR, PAIR | {"references": "The dog."}], "line 2: field references is not a list"),
        ([{"translation": {"de": "Ja.", "en": "Yes."}}, {"translation": {"de": "Ja."}}], "translation.en is missing"),
        ([{"verse": "no task has this"}], "fields verse fit no task"),
        ([{"text": "ok"}, {"text": " "}], "line 2: field text is empty"),
        ([QUESTION, QUESTION | {"answers": "a kite"}], "line 2: field answers is not a list"),
        ([QUESTION, QUESTION | {"question": None}], "line 2: field question is not a string"),
        ([NARRATIVE[0], NARRATIVE[1] | {"document": "x"}], "line 2: field document.summary is missing"),
        ([NARRATIVE[0], NARRATIVE[1] | {"answers": ["so"]}], "line 2: field answers.text is missing"),
        ([NEWS[0], {"article": "A story."}], "line 2: field highlights is missing"),
        ([], "no rows"),
    ],
    "bad": [([PAIR], ("direction", "de"))],
    "sst2": [
        *(
            ([REVIEW, REVIEW | {"label": label}], f"line 2: field label is {said}")
            for label, said in (
                (-1, "-1 (GLUE's way to hide it); allowed: negative, positive, or 0 to 1"),
                ("good", "'good'; allowed: negative, positive"),
                *((other, repr(other)) for other in (2, True, 1.0)),
            )
        ),
        ([REVIEW, MRPC], "line 2: field sentence is missing"),
        ([{"x": 1}], ("fit no task", "sentence + label")),
    ],
    "mrpc": [
        ([MRPC, MRPC | {"label": "entailment"}], "not_equivalent, equivalent"),
        *(
            ([MRPC, {key: MRPC[key] for key in MRPC if key != field}], f"line 2: field {field} is missing")
            for field in ("sentence1", "sentence2", "label")
        ),
    ],
    # carte ends in rte, but is no word of its own
    **{name: [([MRPC], (repr(name), "must end in cola, mrpc"))] for name in ("mine", "carte", "sst2-more")},
}


@pytest.mark.parametrize("name, rows, part", [(name, *case) for name, cases in BAD.items() for case in cases])
def test_bad_rows_are_named(name, rows, part, tmp_path, one_line):
    parts = (part,) if isinstance(part, str) else part
    one_line(ValueError, (name, *parts), lambda: loaded(tmp_path / f"{name}.jsonl", rows))


def test_bytes_that_are_no_text(tmp_path, one_line):
    """The line itself is named; a byte order mark at the start is none of the text; a cut archive is one line."""
    path = write(tmp_path / "bad.de-en.jsonl", [PAIR] * 5)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\xef\xbb\xbf" + lines[0] + b"\n")
    assert load_task(str(path)).sources == [PAIR["source"]]
    lines[2] = lines[2].replace(b"dog", b"d\xffg")
    path.write_bytes(b"\n".join(lines))
    one_line(ValueError, "bad.de-en.jsonl, line 3: not UTF-8", lambda: load_task(str(path)))
    packed = write(tmp_path / "bad.de-en.jsonl.gz", [PAIR] * 50)
    packed.write_bytes(packed.read_bytes()[:-20])
    one_line(ValueError, "bad.de-en.jsonl.gz", lambda: load_task(str(packed)))


def test_plain_texts(tmp_path, one_line):
    """A text for each paragraph, its lines as they are, whatever ends a line and however many empty ones follow."""
    path = tmp_path / "my tales.txt"
    path.write_bytes(b"\xef\xbb\xbf\r\n  One day,\r\nit rained.\r\n \t\r\n\r\nThe end. \n\nNo: \xc3\xa9t\xc3\xa9")
    task = load_task(str(path))
    assert task.prompts == task.sources == ["  One day,\nit rained.", "The end. ", "No: \u00e9t\u00e9"]
    assert (task.name, task.kind, task.references) == ("my tales", "texts", [[], [], []])
    assert task.quality(["x"] * 3) == quality_interval(task, ["x"] * 3) == {} and task_names(str(path)) == [str(path)]
    for content, part in (
        (b"One.\n\nTwo \xff.", "my tales.txt, line 3: not UTF-8"),
        (b"One.\n\nTwo\nand\0.", "my tales.txt, line 3: field text holds a NUL"),
        (b"\n \n", "no rows"),
    ):
        path.write_bytes(content)
        one_line(ValueError, part, lambda: load_task(str(path)))


@pytest.mark.parametrize(
    "name, rows, config, file",
    [
        ("squad", SQUAD, "", "plain_text/validation-00000-of-00001.parquet"),
        ("narrativeqa", NARRATIVE, "", "test.jsonl"),
        ("cnn_dailymail", NEWS, "3.0.0", "3.0.0/validation-00000-of-00001.parquet"),
        ("glue/sst2", labelled("sst2"), "sst2", "sst2/validation-00000-of-00001.parquet"),
        ("glue/mnli", labelled("mnli"), "", "validation_matched.jsonl"),
    ],
)
def test_local_copies_of_hub_data(name, rows, config, file, tmp_path, monkeypatch, one_line):
    """As on the hub (several configurations, named in the card), or one task's files alone."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    source, split = tmp_path / "copy", file.split("/")[-1].split("-")[0].removesuffix(".jsonl")
    for folder in (config, "ax") if config else ("",):
        path = source / folder / file.removeprefix(f"{config}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pd.DataFrame(rows if folder == config else rows[:1]).to_parquet(path)
        else:
            write(path, rows)
    files = [(one, f"{one}/{split}-*") for one in (config, "ax")] if config else [("default", path.name)]
    if config or path.suffix == ".jsonl":
        card = "".join(f'- config_name: {one}\n  data_files: [{{split: {split}, path: "{at}"}}]\n' for one, at in files)
        (source / "README.md").write_text(f"---\nconfigs:\n{card}---\n")
    task = load_task(name, limit=9, source=str(source))
    assert len(task) == len(rows) and task.name == name
    prompts, references = {
        "squad": (question_prompt("Passage 1 tells.", "Who 2?"), ["Ann", "Ann Lee"]),
        "narrativeqa": (question_prompt("Story 1.", "Why 2?"), ["because", "so"]),
        "cnn_dailymail": (summarization_prompt("Long story 2."), ["Short 2."]),
        "glue/sst2": ("sentence 2.", [LABELS["sst2"][0]]),
        "glue/mnli": ("premise 2.", [LABELS["mnli"][2]]),
    }[name]
    assert (task.prompts[2], task.references[2]) == (prompts, references)
    shared = task.groups[0] == task.groups[1] != task.groups[2]  # questions about one passage
    assert shared == (name in ("squad", "narrativeqa"))
    missing = str(tmp_path / "no")
    one_line(ValueError, (name, "could not be loaded", missing), lambda: load_task(name, source=missing))


@pytest.mark.parametrize("imported", [False, True])
def test_wmt22_from_a_sacrebleu_folder(imported, tmp_path, monkeypatch, one_line):
    """sacreBLEU's own cache layout, whether or not sacreBLEU was imported with another cache before."""
    if imported:
        __import__("sacrebleu")
    else:
        for module in [m for m in sys.modules if m.split(".")[0] == "sacrebleu"]:
            monkeypatch.delitem(sys.modules, module)
    file = tmp_path / "wmt22/raw/wmt22-news-systems-1.1/xml/wmttest2022.de-en.all.xml"
    file.parent.mkdir(parents=True)
    file.write_text(XML, encoding="utf-8")
    for _ in range(2):  # unpacked by the first call, read back by the second
        task = load_task("wmt22/de-en", source=str(tmp_path))
        assert task.sources == ["Guten Morgen.", "Wie geht es?"]
        assert task.references == [["Good morning."], ["How are you?"]]  # the reference that sacreBLEU scores WMT22 on
        assert (task.name, task.source_language, task.target_language) == ("wmt22/de-en", "de", "en")
    one_line(ValueError, ("wmt22/zh-en", str(tmp_path)), lambda: load_task("wmt22/zh-en", source=str(tmp_path)))
