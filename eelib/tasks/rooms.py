"""Short stories about people, things and places, with questions whose number of facts is known."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from eelib.common.data import data_folder

_WORDS = json.loads(data_folder("rooms", "words.json").read_text())
_TEMPLATES = json.loads(data_folder("rooms", "templates.json").read_text())

SPLITS = ("train", "validation", "test")
# Twenty items in the shares of the test set: 300 items are fifteen such rounds.
_ROUND = ["one"] * 5 + ["two"] * 5 + ["three"] * 5 + ["count"] * 3 + ["unknown"] * 2
# The shares of the kinds among the further questions of an interview.
_FURTHER = {"one": 12, "two": 12, "three": 12, "count": 3, "unknown": 1}
# The share of items whose answer may be the first, last or most frequent word of its kind.
_PLAIN = 0.6
_FACTS = {"one": 1, "two": 2, "three": 3}
_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight"]
_PRONOUNS = {
    "she": {"he": "she", "his": "her", "him": "her", "himself": "herself"},
    "he": {"he": "he", "his": "his", "him": "him", "himself": "himself"},
}

_Event = tuple[str, ...]
_Query = tuple[str, str, str]  # (form, the word it starts from, a place or a time of day or nothing)
# An event is (kind, word, ...); here are the slots of its words, for the rules and the templates alike:
# a and b people, t a thing, c a thing that holds others, p a place, v a value, w a time of day.
_SLOTS = {
    "go": "ap",
    "timed": "apw",
    "take": "at",
    "drop": "at",
    "carry": "atp",
    "stow": "atc",
    "give": "atb",
    "lie": "tp",
    "stand": "tp",
    "inside": "tc",
    "meet": "ab",
    "colour": "tv",
    "size": "tv",
    "owner": "ta",
    "job": "av",
    "pet": "av",
    "likes": "av",
    "hum": "a",
    "noise": "",
    "opening": "",
}
_ACTS = ("go", "take", "drop", "carry", "stow", "give")
_SAID = ("colour", "size", "owner", "job", "pet", "likes")

# A question starts from a word of one kind and follows steps through the world; ~ follows a step backwards.
_FORMS, _KINDS = json.loads(data_folder("rooms", "forms.json").read_text()).values()
_WEIGHTS = {
    "go": 10,
    "timed": 10,
    "take": 7,
    "drop": 3,
    "carry": 3,
    "stow": 3,
    "give": 5,
    "lie": 3,
    "stand": 3,
    "inside": 3,
    "meet": 3,
    "colour": 1,
    "size": 1,
    "owner": 1,
    "job": 1,
    "pet": 1,
    "likes": 1,
    "hum": 2,
    "noise": 3,
}


class _World:
    """What a list of events tells: who and what is where, who holds what, and what was said of whom."""

    def __init__(self, events: Iterable[_Event] = ()):
        self.people: dict[str, bool] = {}
        self.place: dict[str, str | None] = {}
        self.held: dict[str, str] = {}
        self.said: dict[tuple[str, ...], str] = {}
        self.path: dict[str, list[str]] = {}
        self.hour = 0
        for event in events:
            self.tell(event)

    def tell(self, event: _Event) -> None:
        kind, slot = event[0], dict(zip(_SLOTS[event[0]], event[1:], strict=True))
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
            self.hour = list(_WORDS["times"]).index(slot["w"])
        elif kind in _SAID:
            self.said[event] = event[2]
        for name in [*self.place, *self.held]:
            where, path = self.where(name), self.path.setdefault(name, [])
            if where and path[-1:] != [where]:
                path.append(where)

    def where(self, name: str) -> str | None:
        while name in self.held:
            name = self.held[name]
        return self.place.get(name)

    def carrier(self, thing: str) -> str | None:
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
        elif step in _SAID:
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
                "count_carrying": [_NUMBERS[len(load)]],
                "count_people": [_NUMBERS[sum(self.place.get(person) == name for person in self.people)]],
                "count_places": [_NUMBERS[len(set(path))]],
            }
            found = ways[step]
        return found[0] if len(found) == 1 else None


def _follow(world: _World, query: _Query) -> str | None:
    form, start, extra = query
    found: str | None = start
    for step in _FORMS[form][1:]:
        found = found and world.step(step, found, extra)
    return found


def _answer(events: list[_Event], query: _Query) -> str | None:
    return _follow(_World(events), query)


def _support(events: list[_Event], query: _Query) -> list[int] | None:
    """The sentences that a question needs: each changes the answer when left out, and alone they give it.

    Counting needs the sentences at which the count changes. None where no such set of sentences exists.
    """
    if query[0].startswith("count"):
        counts = [_answer(events[:end], query) for end in range(len(events) + 1)]
        return [index for index in range(len(events)) if counts[index] != counts[index + 1]]
    answer = _answer(events, query)
    needed = [index for index in range(len(events)) if _answer(events[:index] + events[index + 1 :], query) != answer]
    return needed if _answer([events[index] for index in needed], query) == answer else None


def _cast(rng: random.Random, split: str, form: str) -> dict[str, list[str]]:
    """The words one story may use, by kind; a counting story has nothing to put things in."""
    words = _WORDS | {kind: _WORDS[kind][split] for kind in ("small", "big", "box", "places", "job", "pet", "likes")}
    boxes = 0 if form.startswith("count") else rng.randint(0, 2)
    sizes = {
        "small": rng.randint(2, 4),
        "big": rng.randint(0, 2),
        "box": boxes,
        "places": rng.randint(3, 5),
        "job": 4,
        "pet": 4,
        "likes": 4,
        "colour": 4,
        "size": 3,
    }
    cast = {kind: rng.sample(words[kind], size) for kind, size in sizes.items()}
    names = [name for gender in _PRONOUNS for name in _WORDS["names"][split][gender]]
    cast["people"] = rng.sample(names, rng.randint(3, 6) if form == "count_people" else rng.randint(2, 4))
    cast["things"] = cast["small"] + cast["big"] + cast["box"]
    return cast


def _options(kind: str, world: _World, cast: dict[str, list[str]]) -> list[_Event]:
    """Every event of one kind that can happen next, so that nobody takes or gives what is out of reach."""
    people, things, at, held = cast["people"], cast["things"], world.place, world.held
    new = [thing for thing in things if thing not in at and thing not in held]
    near = {(a, thing) for a in people for thing in at if at[thing] and at.get(a) == at[thing]}
    free = [a for a in people if list(held.values()).count(a) < 5]
    match kind:
        case "go":
            return [(kind, a, p) for a in people for p in cast["places"] if at.get(a) != p]
        case "timed":
            return [
                (kind, a, p, w)
                for a in people
                for p in cast["places"]
                if at.get(a) != p
                for w in list(_WORDS["times"])[world.hour : world.hour + 2]
                if ("at_time", w, a) not in world.said
            ]
        case "take":
            return [(kind, a, t) for a in free for t in things if t in new or (a, t) in near]
        case "drop":
            return [(kind, held[t], t) for t in held if at.get(held[t]) and held[t] in people]
        case "carry":
            return [
                (kind, a, t, p)
                for a in people
                for t in things
                if t in new or held.get(t) == a
                for p in cast["places"]
                if at.get(a) != p
            ]
        case "stow":
            return [
                (kind, a, t, c)
                for t in cast["small"]
                if (a := held.get(t)) in people
                for c in cast["box"]
                if held.get(c) == a or (a, c) in near
            ]
        case "give":
            return [
                (kind, held[t], t, b)
                for t in held
                if held[t] in people
                for b in free
                if (held[t], b) in near and b != held[t]
            ]
        case "lie" | "stand":
            return [(kind, t, p) for t in new if (t in cast["box"]) == (kind == "stand") for p in cast["places"]]
        case "inside":
            return [(kind, t, c) for t in new if t in cast["small"] for c in cast["box"]]
        case "meet":
            return [(kind, a, b) for a in people for b in people if at.get(a) and b not in at and a != b]
        case "hum" | "noise":
            return [(kind, a) for a in people] if kind == "hum" else [(kind,)]
    subjects = things if _SLOTS[kind][0] == "t" else people
    return [
        (kind, name, value)
        for name in subjects
        for value in cast["people" if kind == "owner" else kind]
        if not any(said[0] == kind and (said[1] == name or said[2] == value) for said in world.said)
    ]


def _happenings(rng: random.Random, cast: dict[str, list[str]], form: str) -> list[_Event]:
    """A story's events, one for each sentence: 5 to 14."""
    timed = form in ("at_time", "when", "job_time") or rng.random() < 0.1
    asked = [step.lstrip("~") for step in _FORMS[form][1:]]
    weights = {kind: weight * (5 if kind in asked else 1) for kind, weight in _WEIGHTS.items()}
    for kind in ("go", "carry") if timed else ("timed",):
        del weights[kind]
    events: list[_Event] = [("opening",)] * (rng.random() < 0.4)
    world = _World()
    length = rng.randint(5, 14)
    while len(events) < length:
        options = _options(rng.choices(list(weights), list(weights.values()))[0], world, cast)
        event = rng.choice(options) if options else None
        # Nobody takes back a thing just put down or puts down a thing just taken, and nothing happens twice running.
        undone = event and event[0] in ("take", "drop") and any(set(event[1:]) <= set(past) for past in events[-2:])
        if event and event not in events[-1:] and not undone:
            events.append(event)
            world.tell(event)
    return events


def _a(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


def _gender(split: str, name: str) -> str:
    return "she" if name in _WORDS["names"][split]["she"] else "he"


def _sentences(rng: random.Random, split: str, events: list[_Event], needed: list[int]) -> list[str]:
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
        templates = _TEMPLATES["sentences"][kind][split]
        spare[kind] = spare.get(kind) or rng.sample(templates, len(templates))
        return spare[kind].pop()

    for index, (kind, *values) in enumerate(events):
        slot = dict(zip(_SLOTS[kind], values, strict=True))
        template, people = draw(kind), [slot[letter] for letter in "ab" if letter in slot]
        words = slot | {letter.upper(): slot[letter] for letter in "av" if letter in slot}
        begun = any(past[0] in _ACTS for past in events[:index])
        if kind in _ACTS and begun and template.startswith("{a}") and rng.random() < 0.3:
            template = f"{draw('links')} {template}"
        if people:
            words |= _PRONOUNS[_gender(split, people[0])]
            if before == people[:1] and (index not in needed or index - 1 in needed) and rng.random() < 0.6:
                words["a"] = words["he"] if "{A}" not in template else slot["a"]
        if kind in ("job", "pet"):
            words["v"] = _a(slot["v"])
        if kind == "timed":
            words["w"] = _WORDS["times"][slot["w"]]
        for letter in set(slot) & set("tc"):
            words[letter] = f"the {slot[letter]}" if slot[letter] in known else _a(slot[letter])
            words[letter.upper()] = f"the {slot[letter]}"
        known |= set(slot.values())
        sentence = template.format(**words)
        told.append(sentence[0].upper() + sentence[1:] + ".")
        before = people
    return told


def _question(rng: random.Random, split: str, query: _Query) -> str:
    form, name, extra = query
    words = _PRONOUNS[_gender(split, name)] | {"x": name, "y": _WORDS["times"].get(extra, extra)}
    question = rng.choice(_TEMPLATES["questions"][form][split]).format(**words)
    return question[0].upper() + question[1:]


def _answers(form: str, answer: str) -> list[str]:
    """The short answer and the longer ones that mean the same."""
    last = _FORMS[form][-1]
    if last in ("place", "before", "at_time"):
        return [answer, f"the {answer}", f"in the {answer}"]
    if last in ("carrying", "container", "job", "pet"):
        return [answer, f"the {answer}", _a(answer)]
    if last == "when":
        return [answer, _WORDS["times"][answer], f"the {answer}"]
    return [answer, str(_NUMBERS.index(answer))] if answer in _NUMBERS else [answer]


def _guessed(context: str, cast: dict[str, list[str]], answer: str) -> bool:
    """Whether the first, the last or the most frequent word of the answer's kind is the answer."""
    for kind in ("places", "people", "things"):
        if answer in cast[kind]:
            named = [word for word in re.findall(r"\w+", context) if word in cast[kind]]
            return answer in (named[0], named[-1], Counter(named).most_common(1)[0][0])
    return False


def _try(rng: random.Random, split: str, kind: str, form: str, goal: str, plain: bool) -> tuple | None:
    """The item, events, query and needed sentences of one random story, if it has a question of ``form``.

    ``goal`` is the answer of a counting question. ``plain`` admits answers that a guess by position finds, and
    asks the unknown of someone or something that the story names.
    """
    cast = _cast(rng, split, form)
    events = _happenings(rng, cast, form)
    world = _World(events)
    last = _FORMS[form][-1]
    extras = _WORDS["times"] if last == "at_time" else cast["places"] if last in ("when", "before") else [""]
    queries = [(form, name, extra) for name in cast[_FORMS[form][0]] for extra in extras]
    for query in rng.sample(queries, len(queries)):
        answer, name = _follow(world, query), query[1]
        needed: list[int] = []
        if kind == "unknown":
            placed = form == "where_thing" and (name in world.held or name in world.place)
            if answer or placed or plain != any(name in event for event in events):
                continue
            answers = ["nobody knows", "no one knows", "unknown"]
        else:
            needed = (_support(events, query) if answer and (kind != "count" or answer == goal) else None) or []
            if not (answer and needed) or len(needed) != _FACTS.get(kind, len(needed)):
                continue
            answers = _answers(form, answer)
        sentences = _sentences(rng, split, events, needed)
        context = " ".join(sentences)
        if 45 <= len(context.split()) <= 130 and (plain or not _guessed(context, cast, answers[0])):
            item = {
                "context": context,
                "question": _question(rng, split, query),
                "answers": answers,
                "kind": kind,
                "facts": len(needed),
                "distance": len(events) - needed[0] if needed else 0,
            }
            return item, events, query, needed
    return None


def _told(split: str, count: int, seed: int) -> Iterator[tuple[dict, list[_Event], _Query, list[int]]]:
    """The items of ``stories``, each with the events, the query and the needed sentences it was made from."""
    rng = random.Random(f"{split} {seed}")
    kinds: list[str] = []
    for number in range(count):
        kinds = kinds or rng.sample(_ROUND, len(_ROUND))
        kind = kinds.pop()
        form, goal, plain = rng.choice(_KINDS[kind]), _NUMBERS[rng.randint(1, 4)], rng.random() < _PLAIN
        while not (made := _try(rng, split, kind, form, goal, plain)):
            pass
        yield {"passage": f"rooms-{split}-{number + 1:04d}"} | made[0], *made[1:]


def stories(split: str, count: int, seed: int = 0) -> Iterator[dict]:
    """Yield ``count`` items of a split, the same for the same seed; the splits share no names, things or templates.

    An item has ``passage`` (the story's name), ``context`` (5 to 14 sentences, 45 to 130 words), ``question``,
    ``answers`` (the short answer first, then others to accept), ``kind`` (one, two, three, count or unknown),
    ``facts`` (how many sentences the question needs; 0 for unknown) and ``distance`` (sentences from the earliest
    needed one to the end, itself included; 0 for unknown). Raises ValueError for another split or a count below 0.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
    if count < 0:
        raise ValueError(f"count must be 0 or more, not {count}")
    return (item for item, *_ in _told(split, count, seed))


def interviews(split: str, count: int, most: int, seed: int = 0) -> Iterator[dict]:
    """Yield the ``context`` of each of the ``stories`` with up to ``most`` pairs of question and answer, for training.

    The first pair is the story's own. The others are drawn among all that the story tells, at most one of each form;
    their answers are what the story's world has, but their facts are not counted.
    """
    for item, _, asked in _interviewed(split, count, most, seed):
        further = [(question, answer) for _, question, answer in asked]
        yield {"context": item["context"], "pairs": [(item["question"], item["answers"][0]), *further]}


def _interviewed(split: str, count: int, most: int, seed: int) -> Iterator[tuple[dict, list[_Event], list[tuple]]]:
    """The items of ``stories``, each with its events and its further (query, question, answer)."""
    rng = random.Random(f"{split} {seed} interviews")
    for item, events, query, _ in _told(split, count, seed):
        world, forms = _World(events), {query[0]}
        asked: list[tuple] = []
        for kind in rng.choices([*_FURTHER], [*_FURTHER.values()], k=3 * most):
            form = rng.choice(_KINDS[kind])
            if len(asked) == most - 1 or form in forms:
                continue
            fits = _untold if kind == "unknown" else _tells
            if known := [query for query in _queries(world, form) if fits(world, query)]:
                query = rng.choice(known)
                asked.append((query, _question(rng, split, query), _follow(world, query) or "nobody knows"))
                forms.add(form)
        yield item, events, asked


def _queries(world: _World, form: str) -> list[_Query]:
    """Every question of ``form`` about a word that the story names."""
    first, last = _FORMS[form][0], _FORMS[form][-1]
    things = [*{name: True for name in [*world.place, *world.held] if name not in world.people}]
    told = {
        "people": [*world.people],
        "things": things,
        "places": [*{p: True for path in world.path.values() for p in path}],
    }
    names = told.get(first) or [key[2] for key in world.said if key[0] == first]
    extras = _WORDS["times"] if last == "at_time" else told["places"] if last in ("when", "before") else [""]
    return [(form, name, extra) for name in names for extra in extras]


def _tells(world: _World, query: _Query) -> bool:
    return _follow(world, query) not in (None, "zero")


def _untold(world: _World, query: _Query) -> bool:
    """Whether "nobody knows" is true: of a thing's place only where nobody and nothing holds it and none is told."""
    placed = query[0] == "where_thing" and (query[1] in world.held or query[1] in world.place)
    return not placed and _follow(world, query) is None


def write(folder: Path) -> None:
    """Write the 300 test items to ``folder/test.jsonl``: 75 of one, two and three facts, 45 counting, 30 unknown."""
    lines = [json.dumps(item) for item in stories("test", 300)]
    (folder / "test.jsonl").write_text("\n".join(lines) + "\n")
