"""Made texts: stories of rooms against a plain oracle that reads the events backwards, and notes of orders."""

import json
import re
from collections import Counter

import pytest

from eelib.common.files import data_folder
from eelib.tasks.structured import validator
from recipes import orders, rooms
from recipes.rooms_world import FORMS, WORDS

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight"]
SPLITS = ("train", "validation", "test")
NEEDED = {"one": 1, "two": 2, "three": 3, "unknown": 0}


@pytest.fixture(scope="module")
def told():
    return {split: list(rooms._told(split, 200, 0)) for split in SPLITS}


def holder(events, thing):
    """Who or what holds a thing now, by the last event that moved it."""
    for kind, *words in reversed(events):
        if (kind in ("lie", "stand") and words[0] == thing) or (kind in ("drop", "carry") and words[1] == thing):
            return None
        if kind == "take" and words[1] == thing:
            return words[0]
        if kind in ("give", "stow") and words[1] == thing:
            return words[2]
        if kind == "inside" and words[0] == thing:
            return words[1]
    return None


def place(events, name):
    """Where someone or something is now, by the last event that says so."""
    for index in range(len(events) - 1, -1, -1):
        kind, *words = events[index]
        if kind in ("go", "timed") and words[0] == name:
            return words[1]
        if kind == "carry" and name in words[:2]:
            return words[2]
        if kind in ("give", "meet") and name in (words[0], words[-1]):
            return place(events[:index], words[0]) or place(events[:index], words[-1])
        if kind in ("take", "stow") and words[0] == name and place(events[:index], words[-1]):
            return place(events[:index], words[-1])
        if kind in ("lie", "stand") and words[0] == name:
            return words[1]
        if kind == "drop" and words[1] == name:
            return place(events[:index], words[0])
        if kind in ("take", "give", "stow", "inside") and words[kind != "inside"] == name:
            return place(events, holder(events, name))
    return None


def people(events):
    actors = ("go", "timed", "take", "drop", "carry", "stow", "give", "meet", "job", "pet", "likes", "hum")
    found = {event[1] for event in events if event[0] in actors}
    found |= {event[2] for event in events if event[0] in ("meet", "owner")}
    return found | {event[3] for event in events if event[0] == "give"}


def carrier(events, thing):
    held = holder(events, thing)
    while held and held not in people(events):
        held = holder(events, held)
    return held


def load(events, person):
    words = {word for event in events for word in event[1:]}
    return sorted(word for word in words - people(events) if carrier(events, word) == person)


def path(events, name):
    places = [place(events[:end], name) for end in range(1, len(events) + 1)]
    return [now for before, now in zip([None, *places], places) if now and now != before]


def follow(events, step, name, extra):
    timed = [event for event in events if event[0] == "timed" and event[1] == name]
    inside = holder(events, name)
    if step == "place":
        return {place(events, name)}
    if step == "carrier":
        return {carrier(events, name)}
    if step == "carrying":
        return set(load(events, name))
    if step == "container":
        return {inside} - people(events)
    if step == "at_time":
        return {event[2] for event in timed if event[3] == extra}
    if step == "when":
        return {event[3] for event in timed if event[2] == extra}
    if step == "before":
        places = path(events, name)
        return {places[places.index(extra) - 1]} if places.count(extra) == 1 and places[0] != extra else set()
    if step == "count_carrying":
        return {NUMBERS[len(load(events, name))]}
    if step == "count_people":
        return {NUMBERS[sum(place(events, person) == name for person in people(events))]}
    if step == "count_places":
        return {NUMBERS[len(set(path(events, name)))]}
    if step[0] == "~":
        return {event[1] for event in events if event[0] == step[1:] and event[2] == name}
    return {event[2] for event in events if event[:2] == (step, name)}


def oracle(events, query):
    form, name, extra = query
    for step in FORMS[form][1:]:
        found = follow(events, step, name, extra) - {None}
        if len(found) != 1:
            return None
        name = found.pop()
    return name


def test_the_oracle_finds_every_answer(told):
    for items in told.values():
        for item, events, query, _ in items:
            assert (oracle(events, query) or "nobody knows") == item["answers"][0]


def test_each_needed_sentence_is_needed_and_together_they_are_enough(told):
    for items in told.values():
        for item, events, query, needed in items:
            if item["kind"] in NEEDED:
                assert item["facts"] == len(needed) == NEEDED[item["kind"]]
                answer = oracle(events, query)
                assert oracle([events[index] for index in needed], query) == answer
                assert all(oracle(events[:i] + events[i + 1 :], query) != answer for i in needed)


@pytest.mark.parametrize("split", SPLITS)
def test_guessing_by_position_fails(told, split):
    words = {kind: WORDS[kind][split] for kind in ("places", "small", "big", "box", "names")}
    things = words["small"] + words["big"] + words["box"]
    for group in (words["places"], things, words["names"]["she"] + words["names"]["he"]):
        for kind in ("one", "two", "three"):
            hits, asked = Counter(), 0
            for item, *_ in told[split]:
                if item["kind"] == kind and item["answers"][0] in group:
                    named = [word for word in re.findall(r"\w+", item["context"]) if word in group]
                    asked += 1
                    guesses = {"first": named[0], "last": named[-1], "most": Counter(named).most_common(1)[0][0]}
                    hits.update(guess for guess, word in guesses.items() if word == item["answers"][0])
            # Few answers say little: the bound is 40 percent and two standard errors.
            assert all(count <= 0.4 * asked + (asked * 0.24) ** 0.5 * 2 for count in hits.values()), (kind, hits, asked)


def test_interviews_ask_more_about_the_same_stories():
    """Each story's own question comes first; the others are of other forms, and the oracle gives the same answers."""
    found = list(rooms.interviews("train", 60, 8, 1))
    assert [row["context"] for row in found] == [item["context"] for item in rooms.stories("train", 60, 1)]
    assert found[:10] == list(rooms.interviews("train", 10, 8, 1))
    for row, (item, events, asked) in zip(found, rooms._interviewed("train", 60, 8, 1)):
        first = (item["question"], item["answers"][0])
        assert row["pairs"] == [first, *((question, answer) for _, question, answer in asked)] and len(asked) < 8
        assert len({query[0] for query, _, _ in asked}) == len(asked)
        for query, _, answer in asked:
            assert (oracle(events, query) or "nobody knows") == answer != "zero"
            assert query[1] in {word for event in events for word in event}
    assert sum(len(row["pairs"]) for row in found) > 60 * 5


def test_write_gives_the_test_items(tmp_path):
    rooms.write(tmp_path)
    items = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    shipped = data_folder("texts", "question_answering", "rooms.jsonl")
    assert (tmp_path / "test.jsonl").read_bytes() == shipped.read_bytes()
    assert Counter(item["kind"] for item in items) == {"one": 75, "two": 75, "three": 75, "count": 45, "unknown": 30}
    assert len({item["passage"] for item in items}) == len({item["context"] for item in items}) == 300
    assert items[0]["passage"] == "rooms-test-0001"


@pytest.fixture(scope="module")
def rows():
    """Notes of orders by split."""
    return {split: list(orders.orders(split, 400, 3)) for split in ("train", "test")}


@pytest.mark.parametrize("split", ("train", "test"))
def test_a_note_says_what_its_record_does(split, rows):
    """Read again from the note alone: the words of each list that stand in it, its counts, and its hurry."""
    for row in rows[split]:
        note, record = row["note"], row["record"]
        assert json.loads(json.dumps(record)) == record == validator()(record)
        assert "{" not in note and re.findall(r"[A-Z]{2}-\d{4}-[a-h]", note) == [record["id"]]
        assert record["name"] in note and record["city"] in note
        counts = dict(zip(orders.NUMBERS, range(2, 13))) | {str(n): n for n in range(2, 13)}
        said = re.findall(rf"\b({'|'.join(counts)}) ({'|'.join(orders.WORDS['things'][split])})\b", note)
        assert [{"what": thing, "count": counts[count]} for count, thing in said] == record["items"]
        assert any(hurry in note for hurry in orders.WORDS["urgent" if record["urgent"] else "calm"][split])


def test_splits_of_notes_share_nothing(rows):
    """Neither words nor templates nor sentences of hurry, in the lists and in what is made of them."""
    for kind, lists in orders.WORDS.items():
        assert not set(lists["train"]) & set(lists["test"]), kind
        assert all(len(set(words)) == len(words) for words in lists.values())
    for field in ("id", "name", "city"):
        assert not {row["record"][field] for row in rows["train"]} & {row["record"][field] for row in rows["test"]}
    assert all(len({row["record"]["urgent"] for row in rows[split]}) == 2 for split in ("train", "test"))


def test_shipped_notes_are_written_by_the_command(tmp_path):
    orders.write(tmp_path)
    shipped = data_folder("texts", "structured", "orders.jsonl").read_text()
    assert (tmp_path / "orders.jsonl").read_text() == shipped and len(shipped.splitlines()) == orders.TESTED
