"""Short stories about people, things and places, with questions whose number of facts is known."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from eelib.common.files import data_folder
from recipes.rooms_world import FORMS, KINDS, NUMBERS, SLOTS, WEIGHTS, WORDS, Event, Query, World, follow, support

TEMPLATES = json.loads(data_folder("rooms", "templates.json").read_text())
_ACTS = ("go", "take", "drop", "carry", "stow", "give")
PRONOUNS = {
    "she": {"he": "she", "his": "her", "him": "her", "himself": "herself"},
    "he": {"he": "he", "his": "his", "him": "him", "himself": "himself"},
}
# Twenty items in the shares of the test set: 300 items are fifteen such rounds.
_ROUND = ["one"] * 5 + ["two"] * 5 + ["three"] * 5 + ["count"] * 3 + ["unknown"] * 2
# The shares of the kinds among the further questions of an interview.
_FURTHER = {"one": 12, "two": 12, "three": 12, "count": 3, "unknown": 1}
# The share of items whose answer may be the first, last or most frequent word of its kind.
_PLAIN = 0.6
_FACTS = {"one": 1, "two": 2, "three": 3}


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


def _cast(rng: random.Random, split: str, form: str) -> dict[str, list[str]]:
    """The words one story may use, by kind; a counting story has nothing to put things in."""
    words = WORDS | {kind: WORDS[kind][split] for kind in ("small", "big", "box", "places", "job", "pet", "likes")}
    boxes = 0 if form.startswith("count") else rng.randint(0, 2)
    sizes = {"small": rng.randint(2, 4), "big": rng.randint(0, 2), "box": boxes, "places": rng.randint(3, 5)}
    sizes |= dict.fromkeys(("job", "pet", "likes", "colour"), 4) | {"size": 3}
    cast = {kind: rng.sample(words[kind], size) for kind, size in sizes.items()}
    names = [name for gender in PRONOUNS for name in WORDS["names"][split][gender]]
    cast["people"] = rng.sample(names, rng.randint(3, 6) if form == "count_people" else rng.randint(2, 4))
    cast["things"] = cast["small"] + cast["big"] + cast["box"]
    return cast


def _options(kind: str, world: World, cast: dict[str, list[str]]) -> list[Event]:
    """Every event of one kind that can happen next, so that nobody takes or gives what is out of reach."""
    people, things, at, held = cast["people"], cast["things"], world.place, world.held
    new = [thing for thing in things if thing not in at and thing not in held]
    near = {(a, thing) for a in people for thing in at if at[thing] and at.get(a) == at[thing]}
    free = [a for a in people if list(held.values()).count(a) < 5]
    moves = [(a, p) for a in people for p in cast["places"] if at.get(a) != p]
    match kind:
        case "go":
            return [(kind, a, p) for a, p in moves]
        case "timed":
            times = list(WORDS["times"])[world.hour : world.hour + 2]
            return [(kind, a, p, w) for a, p in moves for w in times if ("at_time", w, a) not in world.said]
        case "take":
            return [(kind, a, t) for a in free for t in things if t in new or (a, t) in near]
        case "drop":
            return [(kind, held[t], t) for t in held if at.get(held[t]) and held[t] in people]
        case "carry":
            brought = [(a, t) for a in people for t in things if t in new or held.get(t) == a]
            return [(kind, a, t, p) for a, t in brought for mover, p in moves if mover == a]
        case "stow":
            packed = [(held[t], t, c) for t in cast["small"] if held.get(t) in people for c in cast["box"]]
            return [(kind, a, t, c) for a, t, c in packed if held.get(c) == a or (a, c) in near]
        case "give":
            given = [(a, t, b) for t, a in held.items() if a in people for b in free]
            return [(kind, a, t, b) for a, t, b in given if (a, b) in near and a != b]
        case "lie" | "stand":
            return [(kind, t, p) for t in new if (t in cast["box"]) == (kind == "stand") for p in cast["places"]]
        case "inside":
            return [(kind, t, c) for t in new if t in cast["small"] for c in cast["box"]]
        case "meet":
            return [(kind, a, b) for a in people for b in people if at.get(a) and b not in at and a != b]
        case "hum" | "noise":
            return [(kind, a) for a in people] if kind == "hum" else [(kind,)]
    subjects = things if SLOTS[kind][0] == "t" else people
    return [
        (kind, name, value)
        for name in subjects
        for value in cast["people" if kind == "owner" else kind]
        if not any(said[0] == kind and (said[1] == name or said[2] == value) for said in world.said)
    ]


def _happenings(rng: random.Random, cast: dict[str, list[str]], form: str) -> list[Event]:
    """A story's events, one for each sentence: 5 to 14."""
    timed = form in ("at_time", "when", "job_time") or rng.random() < 0.1
    asked = [step.lstrip("~") for step in FORMS[form][1:]]
    weights = {kind: weight * (5 if kind in asked else 1) for kind, weight in WEIGHTS.items()}
    for kind in ("go", "carry") if timed else ("timed",):
        del weights[kind]
    events: list[Event] = [("opening",)] * (rng.random() < 0.4)
    world = World()
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
    world = World(events)
    queries = _queries(form, cast[FORMS[form][0]], cast["places"])
    for query in rng.sample(queries, len(queries)):
        answer = follow(world, query)
        needed: list[int] = []
        if kind == "unknown":
            if not _untold(world, query) or plain != any(query[1] in event for event in events):
                continue
            answers = ["nobody knows", "no one knows", "unknown"]
        else:
            needed = (support(events, query) if answer and (kind != "count" or answer == goal) else None) or []
            if not (answer and needed) or len(needed) != _FACTS.get(kind, len(needed)):
                continue
            answers = accepted_answers(form, answer)
        sentences = in_sentences(rng, split, events, needed)
        context = " ".join(sentences)
        if 45 <= len(context.split()) <= 130 and (plain or not _guessed(context, cast, answers[0])):
            item = {
                "context": context,
                "question": in_question(rng, split, query),
                "answers": answers,
                "kind": kind,
                "facts": len(needed),
                "distance": len(events) - needed[0] if needed else 0,
            }
            return item, events, query, needed
    return None


def stories(split: str, count: int, seed: int = 0) -> Iterator[tuple[dict, list[Event], Query, list[int]]]:
    """Yield `count` items of a split, each with the events, the query and the needed sentences that it was made from.

    They are the same for the same seed; the splits share no names, things or templates.

    An item has `passage` (the story's name), `context` (5 to 14 sentences, 45 to 130 words), `question`, `answers` (the
    short answer first, then others to accept), `kind` (one, two, three, count or unknown), `facts` (how many sentences
    the question needs; 0 for unknown) and `distance` (sentences from the earliest needed one to the end, itself
    included; 0 for unknown). data/texts/question_answering/rooms.jsonl has the items of stories("test", 300).
    """
    rng = random.Random(f"{split} {seed}")
    kinds: list[str] = []
    for number in range(count):
        kinds = kinds or rng.sample(_ROUND, len(_ROUND))
        kind = kinds.pop()
        form, goal, plain = rng.choice(KINDS[kind]), NUMBERS[rng.randint(1, 4)], rng.random() < _PLAIN
        while not (made := _try(rng, split, kind, form, goal, plain)):
            pass
        yield {"passage": f"rooms-{split}-{number + 1:04d}"} | made[0], *made[1:]


def interviews(split: str, count: int, most: int, seed: int = 0) -> Iterator[tuple[dict, list[Event], list[tuple]]]:
    """Yield the items of the `stories` with their events and up to `most` - 1 further (query, question, answer).

    These are for training. They are drawn among all that the story tells, at most one of each form; their answers are
    what the story's world has, but their facts are not counted.
    """
    rng = random.Random(f"{split} {seed} interviews")
    for item, events, query, _ in stories(split, count, seed):
        world, forms = World(events), {query[0]}
        asked: list[tuple] = []
        for kind in rng.choices([*_FURTHER], [*_FURTHER.values()], k=3 * most):
            form = rng.choice(KINDS[kind])
            if len(asked) == most - 1 or form in forms:
                continue
            fits = _untold if kind == "unknown" else _tells
            if known := [query for query in _queries_told(world, form) if fits(world, query)]:
                query = rng.choice(known)
                asked.append((query, in_question(rng, split, query), follow(world, query) or "nobody knows"))
                forms.add(form)
        yield item, events, asked


def _queries(form: str, names: Iterable[str], places: Iterable[str]) -> list[Query]:
    """Every question of ``form`` about one of ``names``."""
    last = FORMS[form][-1]
    extras = WORDS["times"] if last == "at_time" else places if last in ("when", "before") else [""]
    return [(form, name, extra) for name in names for extra in extras]


def _queries_told(world: World, form: str) -> list[Query]:
    """Every question of ``form`` about a word that the story names."""
    first = FORMS[form][0]
    things = [*{name: True for name in [*world.place, *world.held] if name not in world.people}]
    told = {
        "people": [*world.people],
        "things": things,
        "places": [*{p: True for path in world.path.values() for p in path}],
    }
    names = told.get(first) or [key[2] for key in world.said if key[0] == first]
    return _queries(form, names, told["places"])


def _tells(world: World, query: Query) -> bool:
    return follow(world, query) not in (None, "zero")


def _untold(world: World, query: Query) -> bool:
    """Whether "nobody knows" is true: of a thing's place only where nobody and nothing holds it and none is told."""
    placed = query[0] == "where_thing" and (query[1] in world.held or query[1] in world.place)
    return not placed and follow(world, query) is None
