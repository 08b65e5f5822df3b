"""Rows of tasks: local files and folders, and copies in the hub's and sacreBLEU's own formats; a bad row is named."""

import os
import sys

import pandas as pd
import pytest
from task_rows import PAIR, QUESTION, write

from eelib.tasks.classification import LABELS
from eelib.tasks.task import Task, load_task, task_names
from eelib.tasks.text_kinds import question_prompt, summarization_prompt
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
REVIEWS = [{"sentence": f"Film {i}.", "label": i % 2, "idx": i} for i in range(4)]
CLAIMS = [{"premise": f"It is {i}.", "hypothesis": "It is.", "label": i % 3, "idx": i} for i in range(4)]
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
    packed = load_task(str(write(tmp_path / "news.fr-de.jsonl.gz", [PAIR] * 3)), limit=2)
    assert (packed.name, len(packed), packed.source_language) == ("news.fr-de", 2, "fr")
    (tmp_path / "empty").mkdir()
    one_line(ValueError, "no .jsonl", lambda: load_task(str(tmp_path / "empty")))
    one_line(ValueError, "no rows", lambda: load_task(str(write(tmp_path / "x.de-en.jsonl", []))))
    one_line(ValueError, ("direction", "de"), lambda: load_task(str(write(tmp_path / "x.jsonl", [PAIR]))))


BAD = [
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
]


@pytest.mark.parametrize("rows, part", BAD, ids=[part for _, part in BAD])
def test_bad_rows_are_named(rows, part, tmp_path, one_line):
    path = write(tmp_path / "bad.de-en.jsonl", rows)
    one_line(ValueError, ("bad.de-en", part), lambda: load_task(str(path)))


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


def test_weird_but_valid_texts(tmp_path):
    """Emoji, right to left, combining marks, markup, 100,000 characters, braces: they stay as they are."""
    texts = ["👩‍👩‍👧 🏳️‍🌈", "שלום \u202eabc", "Z\u0338\u0330", "<script>alert(1)</script>", "\u2028 line", "x " * 50_000]
    texts += ["{text}", "a {src} b", "50 % {", "### Response:\n"]
    task = load_task(str(write(tmp_path / "odd.de-en.jsonl", [PAIR | {"source": text} for text in texts])))
    assert task.sources == texts and all(f"\n{text}\n" in prompt for text, prompt in zip(texts, task.prompts))
    assert Task.from_prompts(texts).prompts == texts


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
        ("glue/sst2", REVIEWS, "sst2", "sst2/validation-00000-of-00001.parquet"),
        ("glue/mnli", CLAIMS, "", "validation_matched.jsonl"),
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
    task = load_task(name, limit=3, source=str(source))
    assert len(task) == 3 and task.name == name
    prompts, references = {
        "squad": (question_prompt("Passage 1 tells.", "Who 2?"), ["Ann", "Ann Lee"]),
        "narrativeqa": (question_prompt("Story 1.", "Why 2?"), ["because", "so"]),
        "cnn_dailymail": (summarization_prompt("Long story 2."), ["Short 2."]),
        "glue/sst2": ("Film 2.", [LABELS["sst2"][0]]),
        "glue/mnli": ("It is 2.", [LABELS["mnli"][2]]),
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
