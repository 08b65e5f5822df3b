"""Notes of orders: seeded, train and test apart, and each note says what its record does."""

import json
import re

import pytest
from transformers import AutoTokenizer

from eelib.common.files import data_folder
from eelib.tasks.structured import validator
from recipes.orders import NUMBERS, SPLITS, TESTED, WORDS, orders, write


@pytest.fixture(scope="module")
def rows():
    return {split: list(orders(split, 400, 3)) for split in SPLITS}


def test_the_seed_decides(rows):
    for split in SPLITS:
        assert rows[split] == list(orders(split, 400, 3)) and rows[split][:9] == list(orders(split, 9, 3))
        notes = [{row["note"] for row in orders(split, 400, seed)} for seed in (3, 4)]
        assert len(notes[0]) == 400 and not notes[0] & notes[1]


@pytest.mark.parametrize("split", SPLITS)
def test_a_note_says_what_its_record_does(split, rows):
    """Read again from the note alone: the words of each list that stand in it, its counts, and its hurry."""
    for row in rows[split]:
        note, record = row["note"], row["record"]
        assert json.loads(json.dumps(record)) == record == validator()(record)
        assert "{" not in note and re.findall(r"[A-Z]{2}-\d{4}-[a-h]", note) == [record["id"]]
        assert record["name"] in note and record["city"] in note
        counts = dict(zip(NUMBERS, range(2, 13))) | {str(n): n for n in range(2, 13)}
        said = re.findall(rf"\b({'|'.join(counts)}) ({'|'.join(WORDS['things'][split])})\b", note)
        assert [{"what": thing, "count": counts[count]} for count, thing in said] == record["items"]
        assert any(hurry in note for hurry in WORDS["urgent" if record["urgent"] else "calm"][split])


def test_splits_share_nothing(rows):
    """Neither words nor templates nor sentences of hurry, in the lists and in what is made of them."""
    for kind, lists in WORDS.items():
        assert not set(lists["train"]) & set(lists["test"]), kind
        assert all(len(set(words)) == len(words) for words in lists.values())
    for field in ("id", "name", "city"):
        assert not {row["record"][field] for row in rows["train"]} & {row["record"][field] for row in rows["test"]}
    assert all(len({row["record"]["urgent"] for row in rows[split]}) == 2 for split in SPLITS)


def test_every_template_is_used_as_often(rows):
    """Once before any is used again."""
    templates = WORDS["templates"]["test"]
    patterns = [re.sub(r"\\{\w+\\}", ".+", re.escape(template)) for template in templates]
    round_ = [row["note"] for row in rows["test"][: len(templates)]]
    assert all(any(re.fullmatch(pattern, note) for note in round_) for pattern in patterns)


def test_shipped_rows_are_written_by_the_command(tmp_path):
    write(tmp_path)
    shipped = data_folder("texts", "structured", "orders.jsonl").read_text()
    assert (tmp_path / "orders.jsonl").read_text() == shipped and len(shipped.splitlines()) == TESTED


def test_words_can_be_copied_piece_by_piece():
    """After a space as after a quotation mark, but for the space: the reason why these words were chosen."""
    tokenizer = AutoTokenizer.from_pretrained(data_folder("models", "pocket-llama"))
    for kind in ("first", "things", "cities", "letters"):
        for word in (word for words in WORDS[kind].values() for word in words):
            alone, spaced = (tokenizer.tokenize(text) for text in (word, f" {word}"))
            assert spaced == [f"Ġ{alone[0]}", *alone[1:]], word


def test_wrong_arguments(one_line):
    one_line(ValueError, "'validation'", lambda: orders("validation", 1))
    one_line(ValueError, "-1", lambda: orders("test", -1))
