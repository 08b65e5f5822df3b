"""Rows of tasks: local files and folders, and copies in the hub's and sacreBLEU's own formats; a bad row is named."""

import gzip
import json
import os
import sys

import pandas as pd
import pytest

from eelib.tasks.task import Task, load_task, task_names
from eelib.tasks.text_kinds import question_prompt, summarization_prompt
from eestudy.exits.task_quality import quality_interval

PAIR = {"source": "Der Hund schläft.", "references": ["The dog sleeps.", "The dog is asleep."]}
QUESTION = {"context": "Ann has a red kite.", "question": "What has Ann?", "answers": ["a kite", "kite"]}
SQUAD = [
    {
        "id": str(i),
        "title": "t",
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
README = """---
configs:
- config_name: 1.0.0
  data_files: [{split: validation, path: "1.0.0/validation-*"}]
- config_name: 3.0.0
  data_files: [{split: validation, path: "3.0.0/validation-*"}]
---
"""
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


def write(path, rows):
    """A JSON Lines file, gzipped by its name."""
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_local_folder_and_files(tmp_path, one_line):
    write(tmp_path / "my.de-en/a.jsonl", [PAIR])
    write(tmp_path / "my.de-en/deeper/b.jsonl.gz", [PAIR | {"source": "Nein."}])
    folder = load_task(str(tmp_path / "my.de-en"))
    assert folder.sources == ["Der Hund schläft.", "Nein."] and folder.target_language == "en"
    packed = load_task(str(write(tmp_path / "news.fr-de.jsonl.gz", [PAIR] * 3)), limit=2)
    assert (packed.name, len(packed), packed.source_language) == ("news.fr-de", 2, "fr")
    (tmp_path / "empty").mkdir()
    one_line(ValueError, "no .jsonl", lambda: load_task(str(tmp_path / "empty")))
    one_line(ValueError, "no rows", lambda: load_task(str(write(tmp_path / "x.de-en.jsonl", []))))
    one_line(ValueError, ("direction", "de"), lambda: load_task(str(write(tmp_path / "x.jsonl", [PAIR]))))


@pytest.mark.parametrize(
    "rows, part",
    [
        ([PAIR, "{broken"], "line 2"),
        ([PAIR, "[1]"], "line 2"),
        ([PAIR, ""], "line 2"),
        ([PAIR, "[" * 100_000], "line 2: not a JSON object"),
        ([PAIR, {"source": "Hm."}], "line 2: field references is missing"),
        ([PAIR, PAIR | {"source": " "}], "line 2: field source is empty"),
        ([PAIR, PAIR | {"source": "a\0b"}], "line 2: field source holds a NUL"),
        (
            [PAIR, PAIR | {"source": "a\ud83d"}],
            "line 2: field source holds half a character (the surrogate U+D83D alone)",
        ),
        ([PAIR, PAIR | {"source": 7}], "line 2: field source is not a string"),
        ([PAIR, PAIR | {"references": ["ok", ""]}], "line 2: a text in field references is empty"),
        ([PAIR, PAIR | {"references": None}], "line 2: field references is not a list"),
        ([PAIR, PAIR | {"references": "The dog."}], "line 2: field references is not a list"),
        (
            [{"translation": {"de": "Ja.", "en": "Yes."}}, {"translation": {"de": "Ja."}}],
            "line 2: field translation.en is missing",
        ),
        ([{"verse": "no task has this"}], "fields verse fit no task"),
        ([{"text": "ok"}, {"text": " "}], "line 2: field text is empty"),
        ([QUESTION, QUESTION | {"answers": [" "]}], "line 2: a text in field answers is empty"),
        ([QUESTION, QUESTION | {"answers": "a kite"}], "line 2: field answers is not a list"),
        ([QUESTION, QUESTION | {"context": 5}], "line 2: field context is not a string"),
        ([QUESTION, QUESTION | {"question": None}], "line 2: field question is not a string"),
        ([NARRATIVE[0], NARRATIVE[1] | {"document": "x"}], "line 2: field document.summary is missing"),
        ([NARRATIVE[0], NARRATIVE[1] | {"answers": ["so"]}], "line 2: field answers.text is missing"),
        ([NEWS[0], {"article": "A story."}], "line 2: field highlights is missing"),
    ],
)
def test_bad_rows_are_named(rows, part, tmp_path, one_line):
    path = write(tmp_path / "bad.de-en.jsonl", rows)
    one_line(ValueError, ("bad.de-en", part), lambda: load_task(str(path)))


def test_not_utf8_is_named_by_line(tmp_path, one_line):
    """The line itself, however far the file was read ahead; a byte order mark at the start is none of the text."""
    path = write(tmp_path / "bad.de-en.jsonl", [PAIR] * 5)
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b"dog", b"d\xffg")
    path.write_bytes(b"\n".join(lines))
    one_line(ValueError, "bad.de-en.jsonl, line 3: not UTF-8", lambda: load_task(str(path)))
    marked = tmp_path / "marked.de-en.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + lines[0] + b"\n")
    assert load_task(str(marked)).sources == [PAIR["source"]]


def test_weird_but_valid_texts(tmp_path):
    """Emoji, right to left, combining marks, markup, 100,000 characters: kept as they are."""
    texts = [
        "👩‍👩‍👧 🏳️‍🌈",
        "שלום \u202eabc",
        "Z\u0338\u0330a\u0335",
        "<script>alert(1)</script>",
        "\u2028 line",
        "x " * 50_000,
        "$a$ `b` | c",
    ]
    path = write(tmp_path / "odd.de-en.jsonl", [PAIR | {"source": text} for text in texts])
    assert load_task(str(path)).sources == texts and Task.from_prompts(texts).prompts == texts


def test_plain_texts(tmp_path, one_line):
    """A text for each paragraph, its lines as they are, whatever ends a line and however many empty ones follow."""
    path = tmp_path / "my tales.txt"
    path.write_bytes(b"\xef\xbb\xbf\r\n  One day,\r\nit rained.\r\n \t\r\n\r\nThe end. \n\nNo: \xc3\xa9t\xc3\xa9")
    task = load_task(str(path))
    assert task.prompts == task.sources == ["  One day,\nit rained.", "The end. ", "No: \u00e9t\u00e9"]
    assert (task.name, task.kind, task.references) == ("my tales", "texts", [[], [], []])
    assert task.quality(["x"] * 3) == quality_interval(task, ["x"] * 3) == {} and task_names(str(path)) == [str(path)]
    assert load_task(str(write(tmp_path / "same.jsonl", [{"text": text} for text in task.prompts]))).kind == "texts"
    path.write_bytes(b"One.\n\nTwo \xff.")
    one_line(ValueError, "my tales.txt, line 3: not UTF-8", lambda: load_task(str(path)))
    path.write_bytes(b"One.\n\nTwo\nand\0.")
    one_line(ValueError, "my tales.txt, line 3: field text holds a NUL", lambda: load_task(str(path)))
    path.write_bytes(b"\n \n")
    one_line(ValueError, "no rows", lambda: load_task(str(path)))


def test_damaged_gzip_is_one_line(tmp_path, one_line):
    path = write(tmp_path / "bad.de-en.jsonl.gz", [PAIR] * 50)
    path.write_bytes(path.read_bytes()[:-20])
    one_line(ValueError, "bad.de-en.jsonl.gz", lambda: load_task(str(path)))


@pytest.mark.parametrize(
    "name, rows, file",
    [
        ("squad", SQUAD, "plain_text/validation-00000-of-00001.parquet"),
        ("narrativeqa", NARRATIVE, "data/test-00000-of-00001.parquet"),
        ("cnn_dailymail", NEWS, "3.0.0/validation-00000-of-00001.parquet"),
        ("squad", SQUAD, "validation.jsonl"),
        ("narrativeqa", NARRATIVE, "test.jsonl"),
    ],
)
def test_local_copies_of_hub_data(name, rows, file, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    copy = tmp_path / "copy"
    (copy / file).parent.mkdir(parents=True, exist_ok=True)
    if file.endswith("parquet"):
        pd.DataFrame(rows).to_parquet(copy / file)
    else:
        write(copy / file, rows)
    if name == "cnn_dailymail":  # as on the hub: several configurations, named in the card
        (copy / "1.0.0").mkdir()
        pd.DataFrame(rows[:1]).to_parquet(copy / "1.0.0/validation-00000-of-00001.parquet")
        (copy / "README.md").write_text(README)
    task = load_task(name, limit=3, source=str(copy))
    assert len(task) == 3 and task.name == name
    if name == "squad":
        assert task.prompts[0] == question_prompt("Passage 0 tells.", "Who 0?")
        assert task.references == [["Ann", "Ann Lee"]] * 3
    elif name == "narrativeqa":
        assert task.prompts[2] == question_prompt("Story 1.", "Why 2?") and task.references[0] == ["because", "so"]
    else:
        assert task.prompts[1] == summarization_prompt("Long story 1.") and task.references[1] == ["Short 1."]
    if name != "cnn_dailymail":  # questions about one passage are resampled together
        assert task.groups[0] == task.groups[1] != task.groups[2]


def test_missing_local_copy(tmp_path, one_line):
    one_line(ValueError, ("squad", str(tmp_path)), lambda: load_task("squad", source=str(tmp_path)))


def test_a_folder_s_hidden_copies_are_not_read_and_pipes_are_not_waited_for(tmp_path):
    write(tmp_path / "my.de-en/a.jsonl", [PAIR])
    write(tmp_path / "my.de-en/.ipynb_checkpoints/a-checkpoint.jsonl", [PAIR])
    write(tmp_path / "my.de-en/.b.jsonl", [PAIR])
    os.mkfifo(tmp_path / "my.de-en/c.jsonl")
    assert len(load_task(str(tmp_path / "my.de-en"))) == 1


def test_a_file_that_is_there_plain_and_packed_is_refused(tmp_path, one_line):
    for name in ("a.jsonl", "a.jsonl.gz", "b.jsonl"):
        write(tmp_path / "my.de-en/sub" / name, [PAIR])
    one_line(ValueError, ("both a.jsonl and a.jsonl.gz",), lambda: load_task(str(tmp_path / "my.de-en")))


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
