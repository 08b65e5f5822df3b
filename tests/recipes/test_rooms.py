"""Made texts: stories of rooms against a plain oracle that reads the events backwards, and notes of orders."""

import json
import re
from collections import Counter
from itertools import product

import pytest

from eelib.common.files import data_folder
from eelib.tasks.structured import validator
from recipes import orders, rooms
from recipes.rooms_world import FORMS, NUMBERS, WORDS

NEEDED = {"one": 1, "two": 2, "three": 3, "unknown": 0}


@pytest.fixture(scope="module")
def told():
    """Those of the shipped task, each with its events, question and needed sentences."""
    return list(rooms.stories("test", 300))


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
    return {word for word in words - people(events) if carrier(events, word) == person}


def path(events, name):
    places = [place(events[:end], name) for end in range(1, len(events) + 1)]
    return [now for before, now in zip([None, *places], places) if now and now != before]


def follow(events, step, name, extra):
    """The words to which one step of a question leads."""
    timed = [event for event in events if event[0] == "timed" and event[1] == name]
    if step == "place":
        return {place(events, name)}
    if step == "carrier":
        return {carrier(events, name)}
    if step == "carrying":
        return load(events, name)
    if step == "container":
        return {holder(events, name)} - people(events)
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
    """The answer to a question; "nobody knows" where the events give none or several."""
    form, name, extra = query
    for step in FORMS[form][1:]:
        found = follow(events, step, name, extra) - {None}
        if len(found) != 1:
            return "nobody knows"
        name = found.pop()
    return name


def test_the_oracle_finds_every_answer_in_the_needed_sentences_alone(told):
    for item, events, query, needed in told:
        answer = oracle(events, query)
        assert answer == item["answers"][0]
        if item["kind"] in NEEDED:
            assert item["facts"] == len(needed) == NEEDED[item["kind"]]
            assert oracle([events[index] for index in needed], query) == answer
            assert all(oracle(events[:i] + events[i + 1 :], query) != answer for i in needed)


def test_guessing_by_position_fails(told):
    """The first, the last or the most frequent word of the answer's kind is seldom the answer."""
    words = {kind: WORDS[kind]["test"] for kind in ("places", "small", "big", "box", "names")}
    groups = (words["places"], words["small"] + words["big"] + words["box"], sum(words["names"].values(), []))
    for kind, group in product(("one", "two", "three"), groups):
        hits, asked = Counter(), 0
        for item, *_ in told:
            if item["kind"] == kind and item["answers"][0] in group:
                named = [word for word in re.findall(r"\w+", item["context"]) if word in group]
                guesses = {"first": named[0], "last": named[-1], "most": Counter(named).most_common(1)[0][0]}
                hits.update(guess for guess, word in guesses.items() if word == item["answers"][0])
                asked += 1
        # Few answers say little: the bound is 40 percent and two standard errors.
        assert all(count <= 0.4 * asked + (asked * 0.24) ** 0.5 * 2 for count in hits.values()), (kind, hits, asked)


def test_interviews_ask_more_about_the_same_stories():
    """Of other forms than the story's own question; the oracle gives the same answers."""
    found = list(rooms.interviews("train", 60, 8, 1))
    for (item, events, asked), (own, _, own_query, _) in zip(found, rooms.stories("train", 60, 1)):
        forms = {own_query[0], *(query[0] for query, _, _ in asked)}
        assert item == own and len(asked) < 8 and len(forms) == len(asked) + 1
        for query, _, answer in [(own_query, "", item["answers"][0]), *asked]:
            assert oracle(events, query) == answer != "zero"
    assert sum(len(asked) for _, _, asked in found) > 60 * 4


def test_shipped_texts_are_those_of_the_generators(told):
    shipped = data_folder("texts", "structured", "orders.jsonl").read_text()
    assert shipped.splitlines() == [json.dumps(row) for row in orders.orders("test", 150)]
    shipped = data_folder("texts", "question_answering", "rooms.jsonl").read_text()
    assert shipped.splitlines() == [json.dumps(item) for item, *_ in told]


def test_a_note_says_what_its_record_does_and_splits_share_nothing():
    """Read again from the note alone: the words of each list that stand in it, its counts, and its hurry."""
    rows = {split: list(orders.orders(split, 400, 3)) for split in ("train", "test")}
    for split, row in ((name, row) for name, some in rows.items() for row in some):
        note, record = row["note"], row["record"]
        assert json.loads(json.dumps(record)) == record == validator()(record)
        assert "{" not in note and re.findall(r"[A-Z]{2}-\d{4}-[a-h]", note) == [record["id"]]
        assert record["name"] in note and record["city"] in note
        counts = dict(zip(orders.NUMBERS, range(2, 13))) | {str(n): n for n in range(2, 13)}
        said = re.findall(rf"\b({'|'.join(counts)}) ({'|'.join(orders.WORDS['things'][split])})\b", note)
        assert [{"what": thing, "count": counts[count]} for count, thing in said] == record["items"]
        assert any(hurry in note for hurry in orders.WORDS["urgent" if record["urgent"] else "calm"][split])
    assert not any(set(lists["train"]) & set(lists["test"]) for lists in orders.WORDS.values())
    for field in ("id", "name", "city"):
        assert not {row["record"][field] for row in rows["train"]} & {row["record"][field] for row in rows["test"]}
