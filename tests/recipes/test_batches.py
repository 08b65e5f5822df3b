"""Batches: texts in tokens, within the limits, in the shares of the phases, and any step found again."""

import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from eelib.common.errors import InputError
from recipes.batches import Phase, by_phases, encoded, from_step, kept, order_of, packed
from recipes.corpora import Example


def read(tokenizer, text, wanted):
    """The tokens that are targets, or the others, as text."""
    return tokenizer.decode(text.ids[text.wanted == wanted].tolist())


def test_targets_are_marked_and_end(tokenizer):
    """Each target with its end token, in its place; nothing else."""
    text = Example("A prompt:\n", " one", (("\nMore?\n", " two"), ("\nAgain?\n", " three")))
    (found,) = encoded([text], tokenizer, 100)
    end = tokenizer.eos_token
    assert read(tokenizer, found, True) == f" one{end} two{end} three{end}"
    assert tokenizer.decode(found.ids.tolist()) == f"A prompt:\n one{end}\nMore?\n two{end}\nAgain?\n three{end}"


def test_what_is_too_long_is_left_out(tokenizer):
    """Further questions first; a text without room for one target goes; plain text is cut and has no end token."""
    asks = Example("A:\n", " one", (("\nWhat is said about all this in so many words?\n", " two"), ("\nB?\n", " b")))
    whole, end = len(encoded([asks], tokenizer, 100)[0].ids), tokenizer.eos_token
    (shorter,) = encoded([asks], tokenizer, whole - 1)
    assert read(tokenizer, shorter, True) == f" one{end} two{end}" and len(shorter.ids) < whole
    (shortest,) = encoded([asks], tokenizer, whole - 10)
    assert read(tokenizer, shortest, True) == f" one{end} b{end}"
    assert encoded([asks], tokenizer, 3) == []
    (plain,) = encoded([Example("", "word " * 50)], tokenizer, 20)
    assert len(plain.ids) == 20 and plain.wanted.all() and tokenizer.eos_token_id not in plain.ids


def test_first_question_is_kept_though_later_ones_are_long(tokenizer):
    texts = encoded([Example("P:\n", " a", (("\nlong " * 30, " b"),)), Example("Q:\n", " c")], tokenizer, 20)
    assert [read(tokenizer, text, True) for text in texts] == [f" {w}{tokenizer.eos_token}" for w in "ac"]


def test_packed_holds_every_text_once_within_the_limit():
    rng = random.Random(3)
    texts = [np.zeros(rng.randint(1, 40)) for _ in range(200)]
    batches = packed(list(texts), bucket=lambda t: len(t) // 8, widths=lambda t: (len(t),), rng=rng, most=100)
    assert sorted(map(id, texts)) == sorted(id(t) for batch in batches for t in batch)
    assert all(len(batch) * max(map(len, batch)) <= 100 for batch in batches)
    assert [len(t) for b in batches for t in b] != sorted(len(t) for t in texts)


def test_order_has_the_shares_of_each_phase():
    order = order_of([Phase(100, {"a": 0.7, "b": 0.3}), Phase(50, {"b": 1, "c": 1})])
    assert Counter(order[:100]) == {"a": 70, "b": 30} and Counter(order[100:]) == {"b": 25, "c": 25}
    assert order[:70] != ["a"] * 70
    assert len(order_of([Phase(7, {"a": 1, "b": 1, "c": 1})])) == 7


def test_any_step_is_found_again():
    """The stream from a step on is the rest of the stream from 0, whatever parts and epochs lie before."""
    asked = []

    def plan_of(part, epoch):
        asked.append((part, epoch))
        return [f"{part} {epoch} {i}" for i in range({"a": 5, "b": 3}[part] + epoch)]

    batches = by_phases([Phase(30, {"a": 0.5, "b": 0.5}), Phase(10, {"b": 1})], plan_of, seen=2)
    whole = list(batches(0))
    assert len(whole) == 40 and min(epoch for _, epoch in asked) == 2
    for start in (1, 17, 31, 39):
        assert list(batches(start)) == whole[start:]
    assert [batch for part, batch in whole if part == "a"] == list(
        islice(from_step(0, lambda e: plan_of("a", e + 2)), 15)
    )


def test_kept_batches_are_the_same(tokenizer, tmp_path):
    """From any step on; made once; of another number of steps refused."""
    texts = encoded([Example("A:\n", f" word {n}") for n in range(40)] + [Example("", "some words")], tokenizer, 30)
    made = []

    def batches(start):
        made.append(start)
        return iter([("ab"[n % 2], texts[3 * n : 3 * n + 1 + n % 3]) for n in range(12)][start:])

    def plain(found):
        return [(part, [(t.ids.tolist(), t.wanted.tolist()) for t in batch]) for part, batch in found]

    for start in (0, 7):
        assert plain(kept(tmp_path / "b.npz", batches, 10)(start)) == plain(list(batches(start))[: 10 - start])
    assert made.count(0) == 2 and [file.name for file in tmp_path.iterdir()] == ["b.npz"]
    with pytest.raises(InputError, match="has 10 batches, not 9"):
        kept(tmp_path / "b.npz", batches, 9)
