"""A story of rooms in words: a sentence for each event, a question for each query, the answers to accept."""

import json
import random

from eelib.common.files import data_folder
from recipes.rooms_world import FORMS, NUMBERS, SLOTS, WORDS, Event, Query

TEMPLATES = json.loads(data_folder("rooms", "templates.json").read_text())
_ACTS = ("go", "take", "drop", "carry", "stow", "give")
PRONOUNS = {
    "she": {"he": "she", "his": "her", "him": "her", "himself": "herself"},
    "he": {"he": "he", "his": "his", "him": "him", "himself": "himself"},
}


def _a(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


def gender(split: str, name: str) -> str:
    """The pronoun of a name."""
    return "she" if name in WORDS["names"][split]["she"] else "he"


def in_sentences(rng: random.Random, split: str, events: list[Event], needed: list[int]) -> list[str]:
    """One sentence for each event.

    A sentence may open with a pronoun when the one before names that person and no other; a needed sentence
    only when the one before is needed too, so that the pronoun costs no further sentence.
    """
    told: list[str] = []
    spare: dict[str, list[str]] = {}
    known: set[str] = set()
    before: list[str] = []

    def draw(kind: str) -> str:
        # Each template of a kind is used once before any is used again.
        templates = TEMPLATES["sentences"][kind][split]
        spare[kind] = spare.get(kind) or rng.sample(templates, len(templates))
        return spare[kind].pop()

    for index, (kind, *values) in enumerate(events):
        slot = dict(zip(SLOTS[kind], values, strict=True))
        template, people = draw(kind), [slot[letter] for letter in "ab" if letter in slot]
        words = slot | {letter.upper(): slot[letter] for letter in "av" if letter in slot}
        begun = any(past[0] in _ACTS for past in events[:index])
        if kind in _ACTS and begun and template.startswith("{a}") and rng.random() < 0.3:
            template = f"{draw('links')} {template}"
        if people:
            words |= PRONOUNS[gender(split, people[0])]
            if before == people[:1] and (index not in needed or index - 1 in needed) and rng.random() < 0.6:
                words["a"] = words["he"] if "{A}" not in template else slot["a"]
        if kind in ("job", "pet"):
            words["v"] = _a(slot["v"])
        if kind == "timed":
            words["w"] = WORDS["times"][slot["w"]]
        for letter in set(slot) & set("tc"):
            words[letter] = f"the {slot[letter]}" if slot[letter] in known else _a(slot[letter])
            words[letter.upper()] = f"the {slot[letter]}"
        known |= set(slot.values())
        sentence = template.format(**words)
        told.append(sentence[0].upper() + sentence[1:] + ".")
        before = people
    return told


def in_question(rng: random.Random, split: str, query: Query) -> str:
    """A question in the words of one of its templates."""
    form, name, extra = query
    words = PRONOUNS[gender(split, name)] | {"x": name, "y": WORDS["times"].get(extra, extra)}
    question = rng.choice(TEMPLATES["questions"][form][split]).format(**words)
    return question[0].upper() + question[1:]


def accepted_answers(form: str, answer: str) -> list[str]:
    """The short answer and the longer ones that mean the same."""
    last = FORMS[form][-1]
    if last in ("place", "before", "at_time"):
        return [answer, f"the {answer}", f"in the {answer}"]
    if last in ("carrying", "container", "job", "pet"):
        return [answer, f"the {answer}", _a(answer)]
    if last == "when":
        return [answer, WORDS["times"][answer], f"the {answer}"]
    return [answer, str(NUMBERS.index(answer))] if answer in NUMBERS else [answer]
