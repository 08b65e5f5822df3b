"""Tasks: names, limits, hashes, prompts and wordings; rows of files, folders and copies; a bad row is named."""

from dataclasses import replace

import datasets
import pandas as pd
import pytest
from planted import write

from eelib.tasks.task import Task, load_task, shipped_tasks, task_names
from eestudy.study import quality_interval

PAIR = {"source": "Der Hund schläft.", "references": ["The dog sleeps.", "The dog is asleep."]}
QUESTION = {"context": "Ann has a red kite.", "question": "What has Ann?", "answers": ["a kite", "kite"]}
SQUAD = [
    {"context": f"Passage {i // 2} tells.", "question": f"Who {i}?", "answers": {"text": ["Ann", "Ann Lee"]}}
    for i in range(4)
]
NARRATIVE = [
    {
        "document": {"id": f"d{i // 2}", "summary": {"text": f"Story {i // 2}."}},
        "question": {"text": f"Why {i}?"},
        "answers": [{"text": "because"}, {"text": "so"}],
    }
    for i in range(4)
]
NEWS = [{"article": f"Long story {i}.", "highlights": f"Short {i}.", "id": str(i)} for i in range(4)]
XML = """<?xml version='1.0' encoding='utf-8'?>
<dataset id="wmttest2022.de-en"><collection id="general"><doc origlang="de" id="one">
<src lang="de"><p><seg id="1">Guten  Morgen.</seg><seg id="2">Wie geht es?</seg></p></src>
<ref lang="en" translator="A"><p><seg id="1">Good morning.</seg><seg id="2">How are you?</seg></p></ref>
<ref lang="en" translator="B"><p><seg id="1">Morning!</seg><seg id="2">How is it going?</seg></p></ref>
</doc></collection></dataset>
"""
OWN = {  # fields and labels, in the order in which GLUE numbers them, of sets of one and of two texts
    "sst2": (("sentence",), ("negative", "positive")),
    "rte": (("sentence1", "sentence2"), ("entailment", "not_entailment")),
    "mnli": (("premise", "hypothesis"), ("entailment", "neutral", "contradiction")),
}


def labelled(name, count=4):
    """Rows of a set in GLUE's own fields, with the numbers of their labels."""
    fields, labels = OWN[name]
    return [{field: f"{field} {i}." for field in fields} | {"label": i % len(labels), "idx": i} for i in range(count)]


REVIEW, RTE = labelled("sst2")[0], labelled("rte")[0]


def loaded(path, rows, **options):
    return load_task(str(write(path, rows)), **options)


def test_names(one_line):
    own = [f"translation/{pair}" for pair in ("de-en", "en-de", "en-fr", "fr-en")]
    for pattern, names in (
        (" translation/en-de , translation/* ", [own[1], own[0], *own[2:]]),
        ("squad,wmt22/zh-en", ["squad", "wmt22/zh-en"]),
        ("*", shipped_tasks()),
    ):
        assert task_names(pattern) == names
    for pattern in ("", "translations/*", "translation/de-en,"):
        part = repr(pattern.split(",")[-1])
        one_line(ValueError, (part, "translation/de-en", "squad", "pattern"), lambda: task_names(pattern))
    for name in ("translation/xx", 5, "x" * 5000):
        one_line(ValueError, "is not known", lambda: load_task(name))


def test_shipped_texts_load():
    """All of data/texts is readable, not empty, and of the kind that its folder says; "prose" is of texts to read."""
    for name in shipped_tasks():
        task, folder = load_task(name), name.split("/")[0]
        assert task.name == name and len(set(zip(task.prompts, task.sources))) == len(task) > 0
        assert task.kind == {"prose": "texts"}.get(folder, folder)
        assert all(task.references) != (task.kind in ("instructions", "continuation", "texts"))


def test_a_limit_takes_one_item_of_each_group_before_any_second(one_line):
    whole = load_task("question_answering/visits")
    few, most = whole.take(7), load_task("question_answering/visits", 61)
    assert few.groups == list(dict.fromkeys(whole.groups))[:7] and few.prompts == whole.prompts[:14:2]
    assert len(set(most.groups[:60])) == 60 and most.prompts[60] == whole.prompts[1] and most.groups[60] == "v01"
    assert whole.take(0) == whole.take(10_000) == whole and whole.units == whole.groups
    assert len({task.hash for task in (whole, few, most)}) == 3
    one_line(ValueError, ("limit -1", "0 (all)"), lambda: load_task("question_answering/visits", -1))


def test_prompts_of_shipped_tasks_are_those_of_the_traces_that_are_there():
    """A trace is found by its task's hash; the prompts are P's (Table 8), word for word."""
    known = {
        "classification/mrpc": "e87741b153ed44d3",
        "question_answering/passages": "afddf3d76b81b6a9",
        "structured/orders": "3720d5f7b6e53a1b",
        "summarization/news": "35fee29798446fb4",
        "translation/de-en": "0f44ecc19c75d566",
    }
    for name, start in known.items():
        task = load_task(name)
        assert task.hash.startswith(start)
        assert task.kind == "classification" or task.worded("paper") == task


def test_free_prompts(one_line):
    task = Task.from_prompts(["one", "two"])
    assert (task.kind, task.references, task.groups) == ("prompts", [[], []], ["0", "1"])
    assert task.quality(["x", "y"]) == {} and task.above_baseline({})
    assert task.worded("Say {text}.").prompts == ["Say one.", "Say two."]
    one_line(ValueError, ("'short'", "{text}"), lambda: task.worded("short"))
    assert Task.from_prompts(["one"], references=[["a b c d"]]).quality(["a b c d"])["chrF"] == pytest.approx(100)
    for prompts, more, part in (
        (["ok", " "], {}, "prompt 1"),
        ("text", {}, "list"),
        (["a"], {"references": [["x", 3]]}, "prompt 0 is not a string"),
        (["a", "b"], {"references": [["x"]]}, "references"),
    ):
        one_line(ValueError, part, lambda: Task.from_prompts(prompts, **more))


BRACES = "{note} {text} {"  # in a text they are no fields


@pytest.mark.parametrize(
    "row, fields",
    [
        (QUESTION | {"context": BRACES}, {"context": BRACES, "question": "What has Ann?"}),
        (PAIR | {"source": BRACES}, {"source": BRACES, "source_language": "German", "target_language": "English"}),
        ({"instruction": "Name {two} birds."}, {"instruction": "Name {two} birds."}),
    ],
)
def test_wordings(row, fields, tmp_path, one_line):
    """Every field in its place, once; picked items have theirs; braces around anything else are text."""
    task = loaded(tmp_path / "a.de-en.jsonl", [row, row | {"id": "2"}])
    assert task.worded("paper") == task
    template = '{"as": [{}]} ' + " | ".join(f"{{{name}}}" for name in fields)
    worded = task.pick([1]).worded(template)
    assert worded.prompts == ['{"as": [{}]} ' + " | ".join(fields.values())]
    assert worded.hash != task.pick([1]).hash and worded.references == task.references[1:]
    allowed = ("paper", *(f"{{{name}}}" for name in fields))
    for bad in ("shorter", f"{{nothing}} {allowed[1]}", None):
        one_line(ValueError, (repr(bad), *allowed), lambda: task.worded(bad))


@pytest.mark.parametrize("name, fields, labels", [(name, *known) for name, known in OWN.items()])
def test_rows_of_each_set(name, fields, labels, tmp_path):
    """GLUE's fields, and its numbers of labels."""
    rows = labelled(name)
    task = loaded(tmp_path / f"my.{name}.jsonl", rows)
    assert (task.kind, task.labels, task.name) == ("classification", labels, f"my.{name}")
    assert task.prompts == [row[fields[0]] for row in rows]
    assert task.seconds == [row[fields[1]] for row in rows if fields[1:]]
    assert task.references == [[labels[row["label"]]] for row in rows]
    assert task.sources == [" ||| ".join(row[field] for field in fields) for row in rows]


def test_what_a_row_has_travels_with_it(tmp_path):
    """A second text is part of the hash; a further column is not, since no prompt depends on it."""
    rows = labelled("rte", 6)
    rows[3]["sentence1"] = rows[0]["sentence1"]
    del rows[2]["idx"]
    task = loaded(tmp_path / "rte.jsonl", rows)
    assert task.columns == {"idx": [0, 1, None, 3, 4, 5]}
    part = task.pick([4, 1])
    assert part.seconds == [task.seconds[4], task.seconds[1]] and part.columns == {"idx": [4, 1]}
    assert task.groups[0] == task.groups[3] and len(set(task.groups)) == 5  # one premise is one group
    assert replace(task, seconds=[*task.seconds[:5], "another"]).hash != task.hash == replace(task, columns={}).hash


def test_local_folders_and_files(tmp_path, one_line):
    """Hidden copies are not read; a file that is there plain and packed is refused."""
    folder = tmp_path / "my.de-en"
    write(folder / "a.jsonl", [PAIR])
    packed = write(folder / "deeper/b.jsonl.gz", [PAIR | {"source": "Nein."}])
    write(folder / ".ipynb_checkpoints/a-checkpoint.jsonl", [PAIR])
    task = load_task(str(folder))
    assert task.sources == ["Der Hund schläft.", "Nein."] and (task.name, task.target_language) == ("my.de-en", "en")
    write(folder / "deeper/b.jsonl", [PAIR])
    one_line(ValueError, "both b.jsonl and b.jsonl.gz", lambda: load_task(str(folder)))
    cut = tmp_path / "cut.fr-de.jsonl.gz"
    cut.write_bytes(packed.read_bytes()[:-20])
    one_line(ValueError, "cut.fr-de.jsonl.gz", lambda: load_task(str(cut)))
    (tmp_path / "empty").mkdir()
    one_line(ValueError, "no .jsonl", lambda: load_task(str(tmp_path / "empty")))


BAD = {  # name of the file: rows, and what is said of them
    "bad.de-en": [
        ([PAIR, "{broken"], "line 2: not a JSON object"),
        ([PAIR, {"source": "Hm."}], "line 2: field references is missing"),
        ([PAIR, PAIR | {"source": " "}], "line 2: field source is empty"),
        ([PAIR, PAIR | {"source": "a\0b"}], "line 2: field source holds a NUL"),
        ([PAIR, PAIR | {"source": "a\ud83d"}], "field source holds half a character (the surrogate U+D83D alone)"),
        ([PAIR, PAIR | {"references": "The dog."}], "line 2: field references is not a list"),
        ([{"verse": "no task has this"}], ("fields verse fit no task", "sentence + label")),
        ([{"note": "A note.", "record": {"id": "4817"}}], "line 1: field record"),
        ([], "no rows"),
    ],
    "bad": [([PAIR], ("direction", "de"))],
    "sst2": [
        ([REVIEW | {"label": -1}], "label is -1 (GLUE's way to hide it); allowed: negative, positive, or 0 to 1"),
        ([REVIEW, REVIEW | {"label": "good"}], "line 2: field label is 'good'"),
    ],
    "carte": [([RTE], ("'carte'", "must end in cola, mrpc"))],  # it ends in rte, which is no word of its own
}


@pytest.mark.parametrize("name, rows, part", [(name, *case) for name, cases in BAD.items() for case in cases])
def test_bad_rows_are_named(name, rows, part, tmp_path, one_line):
    parts = (part,) if isinstance(part, str) else part
    one_line(ValueError, (name, *parts), lambda: loaded(tmp_path / f"{name}.jsonl", rows))


def test_plain_texts(tmp_path, one_line):
    """A text for each paragraph, its lines as they are, whatever ends a line and however many empty ones follow."""
    path = tmp_path / "my tales.txt"
    path.write_bytes(b"\xef\xbb\xbf\r\n  One day,\r\nit rained.\r\n \t\r\n\r\nThe end. \n\nNo: \xc3\xa9t\xc3\xa9")
    task = load_task(str(path))
    assert task.prompts == task.sources == ["  One day,\nit rained.", "The end. ", "No: \u00e9t\u00e9"]
    assert (task.name, task.kind, task.references) == ("my tales", "texts", [[], [], []])
    assert task.quality(["x"] * 3) == quality_interval(task, ["x"] * 3) == {} and task_names(str(path)) == [str(path)]
    path.write_bytes(b"One.\n\nTwo \xff.")
    one_line(ValueError, "my tales.txt, line 3: not UTF-8", lambda: load_task(str(path)))


@pytest.mark.parametrize(
    "name, dataset, rows, parts, references",
    [
        ("squad", "rajpurkar/squad None validation", SQUAD, ("Passage 1 tells.", "Who 2?"), ["Ann", "Ann Lee"]),
        ("narrativeqa", "deepmind/narrativeqa None test", NARRATIVE, ("Story 1.", "Why 2?"), ["because", "so"]),
        ("cnn_dailymail", "abisee/cnn_dailymail 3.0.0 validation", NEWS, ("Long story 2.",), ["Short 2."]),
        ("glue/mnli", "nyu-mll/glue mnli validation_matched", labelled("mnli"), ("premise 2.",), ["contradiction"]),
    ],
)
def test_hub_data(name, dataset, rows, parts, references, monkeypatch):
    """The hub is asked for the set, and its rows are read; questions about one passage are a group."""
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, split: asked.append((*args, split)) or rows)
    task = load_task(name, limit=9)
    assert " ".join(map(str, *asked)) == dataset and len(task) == len(rows) and task.name == name
    assert all(part in task.prompts[2] for part in parts) and task.references[2] == references
    assert (task.groups[0] == task.groups[1] != task.groups[2]) == (name in ("squad", "narrativeqa"))


def test_local_copies_of_hub_data(tmp_path, monkeypatch, one_line):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "copy"
    source.mkdir()
    pd.DataFrame(NEWS).to_parquet(source / "validation-00000-of-00001.parquet")
    task = load_task("cnn_dailymail", source=str(source))
    assert task.sources == [row["article"] for row in NEWS]
    parts = ("cnn_dailymail", "could not be loaded", str(tmp_path / "no"))
    one_line(ValueError, parts, lambda: load_task("cnn_dailymail", source=parts[-1]))
    one_line(ValueError, "is not the hub's, so source=", lambda: load_task("translation/de-en", source=str(source)))


def test_wmt22_from_a_sacrebleu_folder(tmp_path, one_line):
    """sacreBLEU's own cache layout, in another folder than that which sacreBLEU settled on when it was imported."""
    file = tmp_path / "wmt22/raw/wmt22-news-systems-1.1/xml/wmttest2022.de-en.all.xml"
    file.parent.mkdir(parents=True)
    file.write_text(XML, encoding="utf-8")
    task = load_task("wmt22/de-en", source=str(tmp_path))
    assert task.sources == ["Guten Morgen.", "Wie geht es?"]
    assert task.references == [["Good morning."], ["How are you?"]]  # the reference that sacreBLEU scores WMT22 on
    assert (task.name, task.source_language, task.target_language) == ("wmt22/de-en", "de", "en")
    one_line(ValueError, ("wmt22/zh-en", str(tmp_path)), lambda: load_task("wmt22/zh-en", source=str(tmp_path)))


def test_rows_of_a_passage_are_one_unit_whatever_it_is_called(tmp_path):
    """Also where its name is the number of one of them; rows without a group are each of its own text's name."""
    for names in ("1122", [0, 0, 1, 1]):
        rows = [QUESTION | {"question": f"Who {i}?", "passage": passage} for i, passage in enumerate(names)]
        assert loaded(tmp_path / f"q{names[0]}.jsonl", rows).units == [str(name) for name in names]
    assert len(set(loaded(tmp_path / "n.jsonl", [*NEWS, NEWS[0]]).units)) == len(NEWS)
