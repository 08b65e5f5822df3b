"""The page on what the papers print says all that is on record, and nothing else."""

import json
import re

from eelib.common.files import data_folder
from eestudy.book.papers import papers
from eestudy.claims import tables
from eestudy.markup.markdown import text


def test_every_note_of_every_table_is_there_once():
    page = papers()
    for name in tables():
        record = json.loads((data_folder("papers") / f"{name}.json").read_text(encoding="utf-8"))
        assert text(record["title"]) in page
        for note in record["notes"]:
            assert page.count(f"- {text(note)}\n") == 1, note


def test_versions_bases_and_damage_are_said():
    page = papers()
    assert "Anonymous submission" in page and "results section is empty" in page
    parts = {part.partition("\n")[0]: part for part in page.split("### ")}
    assert "Layers count from 1." in parts["P: Table 3"]
    assert "From where layers count is not said." in parts["P: Table 2"]
    assert "rows on record can't be read to their end" in parts["P: Table 11"]
    assert "can't be read" not in parts["P: Table 2"]


def test_every_part_has_a_heading_of_its_own():
    headings = re.findall("^### (.+)$", papers(), re.MULTILINE)
    assert len(set(headings)) == len(headings) == len(tables()) and {"P: Text", "M: Text"} <= set(headings)
