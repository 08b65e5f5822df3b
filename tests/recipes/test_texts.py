"""The parts of the training texts: nothing held out or shipped in any, the stories kept, one question at a time."""

import json
import random

import pytest

from eelib.tasks.text_kinds import question_prompt
from recipes import texts
from recipes.corpora import Example, read_jsonl, shifts, shipped_texts, tatoeba
from recipes.rooms import stories
from recipes.texts import PARTS, alone, asked_apart_or_together


def test_no_held_out_sentence_in_any_text(folder, tmp_path):
    """Of either language and direction, alone or joined, over all epochs of a cycle."""
    held = {text for language in ("de", "fr") for pair in tatoeba(folder, language)[1] for text in pair}
    for part in ("translation", "captions"):
        for epoch in range(6):
            for example in PARTS[part](folder, tmp_path, epoch):
                sentences = f"{example.prompt}\n{example.target}".replace(". ", ".\n").split("\n")
                assert not held.intersection(sentences)


def test_no_held_out_passage_in_any_text(folder, tmp_path):
    held = shifts(folder)[1]
    assert held and not any(c in e.prompt for e in PARTS["reading"](folder, tmp_path, 0) for c in held)


def test_no_shipped_text_is_trained_on(folder, tmp_path, monkeypatch):
    german, english = tatoeba(folder, "de")[0][0]

    def sentences():
        found = [e for epoch in range(3) for e in PARTS["translation"](folder, tmp_path, epoch)]
        return {line for e in found for line in f"{e.prompt}\n{e.target}".replace(". ", ".\n").split("\n")}

    assert {german, english} <= sentences()
    for one in (german, english):
        monkeypatch.setattr(texts, "shipped_texts", lambda one=one: {one.lower()})
        assert one not in sentences()


@pytest.mark.parametrize("part", [name for name in PARTS if name != "rooms"])
def test_epochs(part, folder, tmp_path):
    """The same when asked again; another epoch has other texts, or the same in another order or form."""
    assert PARTS[part](folder, tmp_path, 1) == PARTS[part](folder, tmp_path, 1) != PARTS[part](folder, tmp_path, 2)


def test_stories_are_made_once(folder, tmp_path, few_stories, monkeypatch):
    """Train stories with several questions each, of no test item; a second call reads the file."""
    found = PARTS["rooms"](folder, tmp_path, 0)
    monkeypatch.delattr(texts, "interviews")
    assert PARTS["rooms"](folder, tmp_path, 5) == found and len(found) == 24
    assert not list(tmp_path.glob("*.partial"))
    rows = read_jsonl(tmp_path / "rooms.jsonl")
    assert [row["context"] for row in rows] == [item["context"] for item in stories("train", 24, texts.SEED)]
    assert all(e.prompt == question_prompt(row["context"], row["pairs"][0][0]) for e, row in zip(found, rows))
    assert all(len(e.more) < texts.QUESTIONS for e in found) and any(e.more for e in found)
    assert not {row["context"].lower() for row in rows} & shipped_texts()
    assert json.loads(json.dumps(rows)) == rows


def test_alone_gives_each_question_its_passage():
    """At most so many of a passage; plain text in two halves that make the whole."""
    text = Example(
        "### Context:\nA cat.\n### Question:\nWho?\n### Answer:\n", " cat", (("\n### Question:\nB?\n", " b"),)
    )
    prose = Example("", "one two three four five")
    found = alone([text, prose], 2, random.Random(0))
    assert sorted(found[:2]) == sorted(
        [Example(text.prompt, " cat"), Example("### Context:\nA cat.\n### Question:\nB?\n", " b")]
    )
    assert found[2].prompt + found[2].target == prose.target and found[2].prompt and found[2].target.startswith(" ")
    assert len(alone([text], 1, random.Random(0))) == 1


def test_questions_apart_or_together():
    """Two passages in three have all of their questions, the others one of them; what has no more stays as it is."""
    many = [Example(f"P{i} Who?", " cat", (("\n### Question:\nB?\n", " b"),)) for i in range(300)]
    plain, prose = Example("Translate:", "un"), Example("", "one two three four five")
    *found, kept, halved = asked_apart_or_together([*many, plain, prose], random.Random(0))
    together = [text for text in found if text.more]
    assert len(found) == 300 and 170 < len(together) < 230 and all(text in many for text in together)
    assert kept == plain and halved.prompt + halved.target == prose.target
