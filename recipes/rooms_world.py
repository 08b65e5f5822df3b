"""What a story tells: the world after its events, what a question finds there, and which events it needs."""

import json
from collections.abc import Iterable, Sequence

from eelib.common.files import data_folder

WORDS = json.loads(data_folder("rooms", "words.json").read_text())
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight"]

Event = tuple[str, ...]
Query = tuple[str, str, str]  # (form, the word it starts from, a place or a time of day or nothing)
SAID = ("colour", "size", "owner", "job", "pet", "likes")

# A question starts from a word of one kind and follows steps through the world (its form); ~ follows a step backwards.
# An event is (kind, word, ...). The slots of its words are for the rules and the templates alike: a and b people, t a
# thing, c a thing that holds others, p a place, v a value, w a time of day. Weights say how often events happen.
FORMS, KINDS, SLOTS, WEIGHTS = json.loads(data_folder("rooms", "forms.json").read_text()).values()


class World:
    """What a list of events tells: who and what is where, who holds what, and what was said of whom."""

    def __init__(self, events: Iterable[Event] = ()):
        self.people: dict[str, bool] = {}
        self.place: dict[str, str | None] = {}
        self.held: dict[str, str] = {}
        self.said: dict[tuple[str, ...], str] = {}
        self.path: dict[str, list[str]] = {}
        self.hour = 0
        for event in events:
            self.tell(event)

    def tell(self, event: Event) -> None:
        """One more event happens."""
        kind, slot = event[0], dict(zip(SLOTS[event[0]], event[1:], strict=True))
        self.people |= {slot[letter]: True for letter in "ab" if letter in slot}
        # Whoever takes, packs, gives or meets is in one place with what is taken or packed into, or with the other.
        pair = {"take": "ta", "stow": "ca", "give": "ab", "meet": "ab"}.get(kind, "")
        where = next(filter(None, (self.where(slot[letter]) for letter in pair)), None)
        self.place |= {slot[letter]: where for letter in pair if letter in "ab" and where}
        if kind in ("go", "timed", "carry"):
            self.place[slot["a"]] = slot["p"]
        if kind in ("lie", "stand", "carry", "drop"):
            self.held.pop(slot["t"], None)
            self.place[slot["t"]] = slot.get("p") or self.place.get(slot["a"])
        elif kind in ("take", "give", "stow", "inside"):
            self.place.pop(slot["t"], None)
            self.held[slot["t"]] = slot.get("c") or slot.get("b") or slot["a"]
        elif kind == "timed":
            self.said["at_time", slot["w"], slot["a"]] = slot["p"]
            self.hour = list(WORDS["times"]).index(slot["w"])
        elif kind in SAID:
            self.said[event] = event[2]
        for name in [*self.place, *self.held]:
            where, path = self.where(name), self.path.setdefault(name, [])
            if where and path[-1:] != [where]:
                path.append(where)

    def where(self, name: str) -> str | None:
        """The place of someone or something, or of whoever or whatever holds it."""
        while name in self.held:
            name = self.held[name]
        return self.place.get(name)

    def carrier(self, thing: str) -> str | None:
        """Who holds a thing, or holds what it is in."""
        holder = self.held.get(thing)
        while holder in self.held:
            holder = self.held[holder]
        return holder if holder in self.people else None

    def step(self, step: str, name: str, extra: str) -> str | None:
        """The one word that ``step`` leads to from ``name``, or None where the story tells none or several."""
        said, path, holder = self.said, self.path.get(name, []), self.held.get(name)
        load = [thing for thing in self.held if self.carrier(thing) == name]
        found: Sequence[str | None]
        if step[0] == "~":
            found = [key[1] for key in said if key[0] == step[1:] and key[2] == name]
        elif step in SAID:
            found = [key[2] for key in said if key[:2] == (step, name)]
        else:
            ways: dict[str, Sequence[str | None]] = {
                "place": [self.where(name)],
                "carrier": [self.carrier(name)],
                "carrying": load,
                "container": [holder] if holder not in self.people else [],
                "at_time": [said.get((step, extra, name))],
                "when": [key[1] for key in said if key[::2] == ("at_time", name) and said[key] == extra],
                "before": path[path.index(extra) - 1 :][:1] if extra in path[1:] and path.count(extra) == 1 else [],
                "count_carrying": [NUMBERS[len(load)]],
                "count_people": [NUMBERS[sum(self.place.get(person) == name for person in self.people)]],
                "count_places": [NUMBERS[len(set(path))]],
            }
            found = ways[step]
        return found[0] if len(found) == 1 else None


def follow(world: World, query: Query) -> str | None:
    """The answer to a question, or None where the story tells none or several."""
    form, start, extra = query
    found: str | None = start
    for step in FORMS[form][1:]:
        found = found and world.step(step, found, extra)
    return found


def _answer(events: list[Event], query: Query) -> str | None:
    return follow(World(events), query)


def support(events: list[Event], query: Query) -> list[int] | None:
    """The sentences that a question needs: each changes the answer when left out, and alone they give it.

    Counting needs the sentences at which the count changes. None where no such set of sentences exists.
    """
    if query[0].startswith("count"):
        counts = [_answer(events[:end], query) for end in range(len(events) + 1)]
        return [index for index in range(len(events)) if counts[index] != counts[index + 1]]
    answer = _answer(events, query)
    needed = [index for index in range(len(events)) if _answer(events[:index] + events[index + 1 :], query) != answer]
    return needed if _answer([events[index] for index in needed], query) == answer else None
