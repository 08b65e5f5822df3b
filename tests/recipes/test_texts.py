"""The training texts: nothing held out or shipped in any; their parts, their tokens, their batches."""

import random
import re
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from eelib.tasks.task import load_task
from eelib.tasks.text_kinds import question_prompt, summarization_prompt, translation_prompt
from recipes import pocket_llama, pocket_t5, texts
from recipes.batches import (
    END,
    FIXED_PARTS,
    PAD,
    TOKENS_PER_BATCH,
    Phase,
    by_phases,
    encoded,
    from_step,
    order_of,
    packed,
    train_tokenizer,
)
from recipes.rooms import stories
from recipes.texts import (
    PARTS,
    Example,
    alone,
    asked_apart_or_together,
    headlines,
    is_held_out,
    is_held_out_passage,
    novels,
    questions,
    read_jsonl,
    sentence_case,
    shifts,
    shipped_texts,
    spelled_out,
    tatoeba,
    usual_case,
)


def sentences_of(examples):
    """Each sentence of prompts and targets."""
    return {line for e in examples for line in f"{e.prompt}\n{e.target}".replace(". ", ".\n").split("\n")}


def test_no_held_out_sentence_is_trained_on(corpora, tmp_path):
    """Of either language and direction, alone or joined, over all epochs of a cycle; nor shares a pair a sentence."""
    everything = set()
    for language in ("de", "fr"):
        training, held = tatoeba(corpora, language)
        assert len(held) > 10 and len(training) > 500 and all(is_held_out(english) for _, english in held)
        for side in (0, 1):
            assert not {pair[side] for pair in training} & {pair[side] for pair in held}
        everything |= {text for pair in held for text in pair}
    for part in ("translation", "captions"):
        found = sentences_of(e for epoch in range(3) for e in PARTS[part](corpora, tmp_path, epoch))
        assert len(found) > 100 and not everything & found


def test_no_held_out_passage_or_paragraph_is_trained_on(corpora, tmp_path):
    """A passage is on one side with all its questions; the novels held out are one stretch."""
    training, held = shifts(corpora)
    assert held and training and not set(training) & set(held)
    assert all(len(rows) == 2 for rows in [*training.values(), *held.values()])
    prompts = [e.prompt for e in questions(corpora, 10**6, random.Random(0))]
    assert not any(context in prompt for context in held for prompt in prompts)
    lines, last = novels(corpora)
    assert len(last) == 24 and not set(lines) & set(last)
    target = "\n".join(e.target for epoch in range(3) for e in PARTS["text"](corpora, tmp_path, epoch))
    assert lines[7] in target and not any(line in target for line in last)


def test_no_shipped_text_is_trained_on(corpora, tmp_path, monkeypatch):
    """Whatever its case, on either side of a pair."""
    task = load_task("translation/de-en")
    assert {text.strip().lower() for text in (task.sources[5], task.references[5][0])} <= shipped_texts()
    german, english = tatoeba(corpora, "de")[0][0]

    def found():
        return sentences_of(e for epoch in range(3) for e in PARTS["translation"](corpora, tmp_path, epoch))

    assert {german, english} <= found()
    for one in (german, english):
        monkeypatch.setattr(texts, "shipped_texts", lambda one=one: {one.lower()})
        assert one not in found()


def test_what_is_held_out_is_a_fixed_share():
    for drawn, share in ((is_held_out, texts.HELD_OUT_SHARE), (is_held_out_passage, texts.HELD_OUT_PASSAGES)):
        assert sum(drawn(f"Number {i}.") for i in range(20000)) / 20000 == pytest.approx(1 / share, rel=0.15)
    assert is_held_out("Sentence  x.") == is_held_out(" SENTENCE  X. \n")


def test_questions_of_a_passage_stand_in_one_text(corpora):
    """The first in P's format, others after its answer; of SQuADShifts the shortest answer; no long passages."""
    found = questions(corpora, 130, random.Random(0))
    assert len(found) < len(questions(corpora, 999, random.Random(0)))
    assert max(e.prompt.count("word") for e in found) == 120
    tale = next(e for e in found if "Passage 3 of fairytaleqa.train" in e.prompt)
    (more,) = tale.more
    first, second = (
        asks.split("### Question:\n")[1].removesuffix("\n### Answer:\n") for asks in (tale.prompt, more[0])
    )
    assert {first, second} == {"Who?", "Who else?"} and more[0] == f"\n### Question:\n{second}\n### Answer:\n"
    assert tale.prompt == question_prompt("Passage 3 of fairytaleqa.train " + "word " * 60, first)
    assert tale.target == more[1] == " Ann 3"
    assert {e.target for e in found if "squadshifts" in e.prompt} == {" x"}


def test_headlines_become_sentences(corpora):
    """A word is written as inside sentences, the article's own way first; half are spelled out, article and all."""
    usual = usual_case(["He works at IBM in New York. Shares rose. She sold shares to IBM."])
    assert usual["ibm"] == "IBM" and usual["shares"] == "shares" and "he" not in usual
    assert sentence_case("IBM <IBM> SHARES RISE IN NEW YORK", usual) == "IBM shares rise in New York"
    assert sentence_case("<FOUR SEASONS> SHARES", usual) == "Four seasons shares"
    assert spelled_out("4 mln dlrs, a dlr, 5 pct, mlns") == "4 million dollars, a dollar, 5 percent, mlns"
    found = headlines(corpora, 9, random.Random(0))
    plain = [e for e in found if "mln" in e.prompt]
    assert len(found) == 59 and 15 < len(plain) < 44
    for example in found:
        number = int("".join(c for c in example.target.split()[0] if c.isdigit()))
        words = "mln dlrs" if example in plain else "million dollars"
        assert example.target == f"Ann{number} lost {number} {words} in qtr"
        assert f"Today Ann{number} Corp said it lost {number} {words}.\n### Response" in example.prompt


def test_stories_are_made_once(corpora, tmp_path, few_stories, monkeypatch):
    """Train stories with several questions each, of no test item; a second call reads the file."""
    found = PARTS["rooms"](corpora, tmp_path, 0)
    monkeypatch.delattr(texts, "interviews")
    assert PARTS["rooms"](corpora, tmp_path, 5) == found and len(found) == 24
    rows = read_jsonl(tmp_path / "rooms.jsonl")
    assert [row["context"] for row in rows] == [item["context"] for item in stories("train", 24, texts.SEED)]
    assert all(e.prompt == question_prompt(row["context"], row["pairs"][0][0]) for e, row in zip(found, rows))
    assert all(len(e.more) < texts.QUESTIONS for e in found) and any(e.more for e in found)
    assert not {row["context"].lower() for row in rows} & shipped_texts()


def test_questions_apart_or_together():
    """Each question with its passage, or all in one text; plain text in two halves that make the whole."""
    text = Example(
        "### Context:\nA cat.\n### Question:\nWho?\n### Answer:\n", " cat", (("\n### Question:\nB?\n", " b"),)
    )
    prose, plain = Example("", "one two three four five"), Example("Translate:", "un")
    *apart, halved = alone([text, prose], 2, random.Random(0))
    assert sorted(apart) == sorted(
        [Example(text.prompt, " cat"), Example("### Context:\nA cat.\n### Question:\nB?\n", " b")]
    )
    assert halved.prompt + halved.target == prose.target and halved.prompt and halved.target.startswith(" ")
    assert len(alone([text], 1, random.Random(0))) == 1
    many = [text._replace(prompt=f"P{i} {text.prompt}") for i in range(300)]
    *found, kept, halved = asked_apart_or_together([*many, plain, prose], random.Random(0))
    together = [text for text in found if text.more]
    assert len(found) == 300 and 170 < len(together) < 230 and all(text in many for text in together)
    assert kept == plain and halved.prompt + halved.target == prose.target


def read(tokenizer, text, wanted):
    """The tokens that are targets, or the others, as text."""
    return tokenizer.decode(text.ids[text.wanted == wanted].tolist())


def test_targets_are_marked_and_end_and_what_is_too_long_is_left_out(tokenizer):
    """Further questions first; a text without room for one target goes; plain text is cut and has no end token."""
    asks = Example("A:\n", " one", (("\nWhat is said about all this in so many words?\n", " two"), ("\nB?\n", " b")))
    (whole,), end = encoded([asks], tokenizer, 100), tokenizer.eos_token
    assert read(tokenizer, whole, True) == f" one{end} two{end} b{end}"
    assert tokenizer.decode(whole.ids.tolist()) == f"A:\n one{end}{asks.more[0][0]} two{end}\nB?\n b{end}"
    (shorter,), (shortest,) = (encoded([asks], tokenizer, len(whole.ids) - less) for less in (1, 10))
    assert read(tokenizer, shorter, True) == f" one{end} two{end}"
    assert read(tokenizer, shortest, True) == f" one{end} b{end}"
    assert encoded([asks], tokenizer, 3) == []
    (plain,) = encoded([Example("", "word " * 50)], tokenizer, 20)
    assert len(plain.ids) == 20 and plain.wanted.all() and tokenizer.eos_token_id not in plain.ids
    some = encoded([Example("P:\n", " a", (("\nlong " * 30, " b"),)), Example("Q:\n", " c")], tokenizer, 20)
    assert [read(tokenizer, text, True) for text in some] == [f" a{end}", f" c{end}"]


def test_packed_holds_every_text_once_within_the_limit():
    rng = random.Random(3)
    some = [np.zeros(rng.randint(1, 40)) for _ in range(200)]
    batches = packed(list(some), bucket=lambda t: len(t) // 8, widths=lambda t: (len(t),), rng=rng, most=100)
    assert sorted(map(id, some)) == sorted(id(t) for batch in batches for t in batch)
    assert all(len(batch) * max(map(len, batch)) <= 100 for batch in batches)
    assert [len(t) for b in batches for t in b] != sorted(len(t) for t in some)


def test_any_step_is_found_again_in_the_shares_of_its_phase():
    """The stream from a step on is the rest of the stream from 0, whatever parts and epochs lie before."""
    order = order_of([Phase(100, {"a": 0.7, "b": 0.3}), Phase(50, {"b": 1, "c": 1})])
    assert Counter(order[:100]) == {"a": 70, "b": 30} and Counter(order[100:]) == {"b": 25, "c": 25}
    assert order[:70] != ["a"] * 70 and len(order_of([Phase(7, {"a": 1, "b": 1, "c": 1})])) == 7
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


@pytest.mark.parametrize("recipe", [pocket_llama, pocket_t5])
def test_batches_of_every_part(recipe, corpora, tokenizer, tmp_path, few_stories):
    """Inside the limits, of whole texts; the same when made again, others in another epoch; every target ends."""
    most = {}
    for part in PARTS:
        first, again, later = (recipe.part_batches(corpora, tmp_path, tokenizer, part, e, most=2048) for e in (1, 1, 2))
        plain = [[[text.ids.tolist() for text in batch] for batch in plan] for plan in (first, again, later)]
        assert plain[0] == plain[1] != plain[2]
        assert sum(map(len, first)) > 0.9 * len(PARTS[part](corpora, tmp_path, 1))
        for batch in first:
            sides = [[(t.wanted == kind).sum() for t in batch] for kind in (False, True)]
            widest = sum(map(max, sides)) if recipe is pocket_t5 else max(len(t.ids) for t in batch)
            assert len(batch) * widest <= 2048 or len(batch) == 1
            for text in (t for t in batch if not t.wanted.all()):
                ends = np.flatnonzero(np.diff(text.wanted.astype(int), append=0) < 0)
                assert (text.ids[ends] == tokenizer.eos_token_id).all() and ends[-1] == len(text.ids) - 1
                most[part] = max(most.get(part, 1), len(ends))
    assert {part for part in most if most[part] > 1} == {"rooms", "reading"} and TOKENS_PER_BATCH > 2048


LINES = [
    "Der Hund, der bellt, beisst nicht!",
    "The dog (that barks) doesn't bite.",
    "Wo? Dort: 12,345 Bücher – «ja».",
    "l'été à la plage; c'est-à-dire demain",
    "e-mail: a.b@c.de",
] * 4
TOKENIZER = train_tokenizer(LINES, 420, 512)
ANY = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="aé ,.'-–1\t\n😀", max_size=40),
    st.lists(st.sampled_from([*FIXED_PARTS, "<0x41>", "a", " ", "<|"]), max_size=6).map("".join),
)
AWKWARD = [
    "",
    "  two  spaces ",
    "\r\n",
    "</s> <|end",
    "😀👩‍👩‍👧🏽",
    "\0\x01\x7f",
    "e\u0301 é ﷽",
    "日本語",
    "\ufffd",
    "##x ▁y Ġz",
]


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=200, deadline=None)
@given(ANY)
def test_every_text_comes_back(text):
    assert TOKENIZER.decode(ids_of(text)) == text


def test_awkward_texts_come_back(tokenizer):
    """Through the shipped tokenizer, too."""
    for text in AWKWARD:
        assert TOKENIZER.decode(ids_of(text)) == tokenizer.decode(tokenizer.encode(text)) == text
    assert TOKENIZER.unk_token_id is None


def mixes(text):
    """Whether letters or digits stand beside anything else but white space."""
    return bool(re.search(r"[^\W\d_]", text) and re.search(r"[^\w\s\ufffd]", text)) or (
        bool(re.search(r"\d", text)) and bool(re.search(r"[^\d\s]", text))
    )


def test_no_piece_mixes_letters_digits_and_punctuation():
    for token, i in TOKENIZER.get_vocab().items():
        assert token in (PAD, END, *FIXED_PARTS) or not mixes(TOKENIZER.decode([i])), token
    assert not any(mixes(TOKENIZER.decode([i])) for i in ids_of("ab-c 1,5a? (x)\nö..."))


def test_fixed_parts_are_one_entry_each_and_the_tokenizer_is_saved(tmp_path):
    assert all(len(ids_of(part)) == 1 for part in FIXED_PARTS)
    for prompt in (translation_prompt("Hund", "de", "en"), summarization_prompt("dog"), question_prompt("a", "b?")):
        assert TOKENIZER.decode(ids_of(prompt), skip_special_tokens=True) == prompt
    assert len(TOKENIZER) <= 420 and TOKENIZER.model_max_length == 512
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token) == (END, PAD)
    assert TOKENIZER("a")["input_ids"] == ids_of("a")  # adds nothing around a prompt
    TOKENIZER.save_pretrained(tmp_path)
    text = "Der Hund – 😀 «12»"
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == ids_of(text)
