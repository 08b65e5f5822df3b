"""Notes that describe an order in plain English, each with the JSON object that says the same.

The words are in data/orders/words.json. Train and test share no names, things, cities, first letters of identifiers or
templates. Words that JSON has a quotation mark before are such as pocket-llama's tokenizer splits alike after a space.
"""

import json
import random
from collections.abc import Iterator

from eelib.common.files import data_folder

WORDS = json.loads(data_folder("orders", "words.json").read_text())
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")  # from 2 on
ENDS = "abcdefgh"  # the last letter of an identifier
_ITEMS = (1, 1, 2, 2, 3)  # how many items an order has
_IN_WORDS = 0.3  # share of the counts


def orders(split: str, count: int, seed: int = 0) -> Iterator[dict]:
    """Yield `count` rows of a split, `note` and `record`; the same for the same seed.

    A record has, in this order, `id` such as KX-4817-b, `name`, `items` of 1 to 3 things as the note writes them, each
    with its count of 2 to 12, `city`, and whether it is `urgent`. data/texts/structured/orders.jsonl has the rows of
    orders("test", 150).
    """
    rng, templates = random.Random(f"orders {split} {seed}"), list[str]()
    for _ in range(count):
        # Each template is used once before any is used again.
        templates = templates or rng.sample(WORDS["templates"][split], len(WORDS["templates"][split]))
        record = _record(rng, split)
        hurry = rng.choice(WORDS["urgent" if record["urgent"] else "calm"][split])
        slots = record | {"items": _listed(rng, record["items"]), "hurry": hurry}
        yield {"note": templates.pop().format(**slots), "record": record}


def _record(rng: random.Random, split: str) -> dict:
    words = {kind: lists[split] for kind, lists in WORDS.items()}
    things = rng.sample(words["things"], rng.choice(_ITEMS))
    return {
        "id": f"{rng.choice(words['letters'])}-{rng.randint(1000, 9999)}-{rng.choice(ENDS)}",
        "name": f"{rng.choice(words['first'])} {rng.choice(words['last'])}",
        "items": [{"what": thing, "count": rng.randint(2, len(NUMBERS) + 1)} for thing in things],
        "city": rng.choice(words["cities"]),
        "urgent": rng.random() < 0.5,
    }


def _listed(rng: random.Random, items: list[dict]) -> str:
    """The items in words: a count in figures or letters, commas, and an "and"."""
    words = [
        f"{NUMBERS[item['count'] - 2] if rng.random() < _IN_WORDS else item['count']} {item['what']}" for item in items
    ]
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[:-1] else words)
