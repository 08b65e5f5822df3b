"""The training texts: nothing held out or shipped in any; their parts, their tokens, their batches."""

import json
import random
import re
from collections import Counter
from itertools import islice

import numpy as np

from eelib.tasks.task import load_task
from recipes import texts
from recipes.batches import (
    END,
    FIXED_PARTS,
    PAD,
    Phase,
    by_phases,
    encoded,
    from_step,
    order_of,
    packed,
    train_tokenizer,
)
from recipes.own_outputs import FIRST, Prompts
from recipes.texts import (
    HELD_OUT_SHARE,
    PARTS,
    Example,
    is_held_out,
    novels,
    questions,
    shifts,
    shipped_texts,
    tatoeba,
)


def sentences_of(examples):
    """Each sentence of prompts and targets."""
    return {line for e in examples for line in f"{e.prompt}\n{e.target}".replace(". ", ".\n").split("\n")}


def test_no_held_out_sentence_is_trained_on(corpora, tmp_path):
    """Of either language and direction, alone or joined, over all epochs of a cycle; nor shares a pair a sentence."""
    everything = set()
    for language in ("de", "fr"):
        training, held = tatoeba(corpora, language)
        assert len(held) > 10 and len(training) > 500
        assert all(is_held_out(english.strip().lower(), HELD_OUT_SHARE) for _, english in held)
        for side in (0, 1):
            assert not {pair[side] for pair in training} & {pair[side] for pair in held}
        everything |= {text for pair in held for text in pair}
    for part in ("translation", "captions"):
        found = sentences_of(e for epoch in range(3) for e in PARTS[part](corpora, tmp_path, epoch))
        assert len(found) > 100 and not everything & found


def test_no_held_out_passage_or_paragraph_is_trained_on(corpora, tmp_path, monkeypatch):
    """A passage is on one side with all its questions; the novels held out are one stretch."""
    training, held = shifts(corpora)
    assert held and training and not set(training) & set(held)
    assert all(len(rows) == 2 for rows in [*training.values(), *held.values()])
    monkeypatch.setattr(texts, "PASSAGE_WORDS", 10**6)
    prompts = [e.prompt for e in questions(corpora, random.Random(0))]
    assert not any(context in prompt for context in held for prompt in prompts)
    lines, last = novels(corpora)
    assert len(last) == 24 and not set(lines) & set(last)
    target = "\n".join(e.target for epoch in range(3) for e in PARTS["text"](corpora, tmp_path, epoch))
    assert lines[7] in target and not any(line in target for line in last)


def test_no_shipped_text_is_trained_on(corpora, tmp_path, monkeypatch, few_stories):
    """Whatever its case, on either side of a pair, nor a note; each trained note ends in its own record, as JSON."""
    notes = [e for epoch in range(3) for e in PARTS["orders"](corpora, tmp_path, epoch)]
    assert notes and not {e.prompt for e in notes} & set(load_task("structured/orders").prompts)
    assert all(e.prompt.split("### Input:")[1].count(json.loads(e.target)["id"]) == 1 for e in notes)
    task = load_task("translation/de-en")
    assert {text.strip().lower() for text in (task.sources[5], task.references[5][0])} <= shipped_texts()
    german, english = tatoeba(corpora, "de")[0][0]

    def found():
        return sentences_of(e for epoch in range(3) for e in PARTS["translation"](corpora, tmp_path, epoch))

    assert {german, english} <= found()
    for one in (german, english):
        monkeypatch.setattr(texts, "shipped_texts", lambda one=one: {one.lower()})
        assert one not in found()


def test_targets_are_marked_and_end_and_what_is_too_long_is_left_out(tokenizer):
    """Further questions first; a text without room for one target goes; plain text is cut and has no end token."""
    asks = Example("A:\n", " one", (("\nWhat is said about all this in so many words?\n", " two"), ("\nB?\n", " b")))
    (whole,), end = encoded([asks], tokenizer, 100), tokenizer.eos_token

    def targets(longest, *texts):
        found = encoded([*texts], tokenizer, longest)
        return [tokenizer.decode(text.ids[text.wanted].tolist()).split(end)[:-1] for text in found]

    assert tokenizer.decode(whole.ids.tolist()) == f"A:\n one{end}{asks.more[0][0]} two{end}\nB?\n b{end}"
    assert targets(100, asks) == [[" one", " two", " b"]]
    assert targets(len(whole.ids) - 1, asks) == [[" one", " two"]]
    assert targets(len(whole.ids) - 10, asks, Example("Q:\n", " c")) == [[" one", " b"], [" c"]]
    assert targets(20, Example("long " * 30, " a", (("\nQ:\n", " b"),))) == []  # not its question alone
    (plain,) = encoded([Example("", "word " * 50)], tokenizer, 20)
    assert len(plain.ids) == 20 and plain.wanted.all() and tokenizer.eos_token_id not in plain.ids


def test_packed_holds_every_text_once_within_the_limit():
    rng = random.Random(3)
    some = [np.zeros(rng.randint(1, 40)) for _ in range(200)]
    batches = packed(list(some), bucket=lambda t: len(t) // 8, widths=lambda t: (len(t),), rng=rng, most=100)
    assert sorted(map(id, some)) == sorted(id(t) for batch in batches for t in batch)
    assert all(len(batch) * max(map(len, batch)) <= 100 for batch in batches)
    assert [len(t) for b in batches for t in b] != sorted(len(t) for t in some)


def test_any_step_is_found_again_in_the_shares_of_its_phase():
    """The stream from a step on is the rest of the stream from 0, whatever parts and epochs lie before."""
    order = order_of([Phase(100, {"a": 0.7, "b": 0.3}), Phase(7, {"a": 1, "b": 1, "c": 1})])
    assert Counter(order[:100]) == {"a": 70, "b": 30} and order[:70] != ["a"] * 70 and len(order) == 107
    epochs = []

    def plan_of(part, epoch):
        epochs.append(epoch)
        return [f"{part} {epoch} {i}" for i in range({"a": 5, "b": 3}[part] + epoch)]

    batches = by_phases([Phase(30, {"a": 0.5, "b": 0.5}), Phase(10, {"b": 1})], plan_of, seen=2)
    whole = list(batches(0))
    assert len(whole) == 40 and min(epochs) == 2
    for start in (1, 17, 31, 39):
        assert list(batches(start)) == whole[start:]
    firsts = list(islice(from_step(0, lambda epoch: plan_of("a", epoch + 2)), 15))
    assert [batch for part, batch in whole if part == "a"] == firsts


def test_prompts_are_numbered_and_sources_are_on_one_side(corpora):
    training, held, again = Prompts(corpora), Prompts(corpora, held_out=True), Prompts(corpora)
    texts = [training.text(number) for number in range(60)]
    assert texts == [again.text(number) for number in range(60)] and len(set(texts)) > 50
    assert not any("### Context:" in text for text in texts)
    assert any("### Context:" in training.text(FIRST + number) for number in range(60))  # the study's own wording
    for task, some in training.sources.items():
        other = {source[0] for source in held.sources[task]}
        assert other and not other & {source[0] for source in some}


def test_every_text_comes_back_and_no_piece_mixes_letters_digits_and_punctuation():
    """Of a tokenizer that was trained on other texts; the fixed parts of prompts are one piece each."""
    made = train_tokenizer(["The dog (that barks) doesn't bite. Dort: 12,345 Bücher – «ja»."] * 4, 420, 512)

    def ids_of(text):
        return made(text, add_special_tokens=False)["input_ids"]

    for text in ("", "l'été à la plage; c'est-à-dire", " a  b\t\n1-2 ", "😀<0x41><| \x00", "".join(FIXED_PARTS)):
        assert made.decode(ids_of(text)) == text
    for token, i in made.get_vocab().items():
        kinds = [re.search(kind, made.decode([i])) for kind in (r"[^\W\d_]", r"\d", r"[^\w\s\ufffd]")]
        assert token in (PAD, END, *FIXED_PARTS) or sum(map(bool, kinds)) <= 1, token
    assert len(made) <= 420 and all(len(ids_of(part)) == 1 for part in FIXED_PARTS)
