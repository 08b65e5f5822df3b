"""The training texts: nothing held out or shipped in any; the made ones are the same again; tokens and batches."""

import json
import random
import zlib
from collections import Counter

from eelib.common.files import data_folder
from eelib.tasks.task import load_task
from recipes import orders, rooms, texts
from recipes.batches import Phase, by_phases, encoded
from recipes.own_outputs import Prompts
from recipes.texts import HELD_OUT_SHARE, PARTS, Example, is_held_out, novels, questions, shifts, shipped_texts, tatoeba


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
    """Whatever its case, on either side of a pair, nor a story or a note."""
    for part, name in (("rooms", "question_answering/rooms"), ("orders", "structured/orders")):
        made = {e.prompt for epoch in range(3) for e in PARTS[part](corpora, tmp_path, epoch)}
        assert made and not made & set(load_task(name).prompts)
    task = load_task("translation/de-en")
    assert {text.strip().lower() for text in (task.sources[5], task.references[5][0])} <= shipped_texts()
    german, english = tatoeba(corpora, "de")[0][0]

    def found():
        return sentences_of(e for epoch in range(3) for e in PARTS["translation"](corpora, tmp_path, epoch))

    assert {german, english} <= found()
    for one in (german, english):
        monkeypatch.setattr(texts, "shipped_texts", lambda one=one: {one.lower()})
        assert one not in found()


def test_made_texts_are_the_same_again():
    """In any process: shipped notes and stories, and a digest of stories with further questions."""
    stories = [item for item, *_ in rooms.stories("test", 40)]  # the first of 300
    for name, rows in (("structured/orders", orders.orders("test", 150)), ("question_answering/rooms", stories)):
        made = [json.dumps(row) for row in rows]
        assert made == data_folder("texts", f"{name}.jsonl").read_text().splitlines()[: len(made)]
    asked = [[item, further] for item, _, further in rooms.interviews("train", 10, 8, 1)]
    assert zlib.crc32(json.dumps(asked).encode()) == 496971204
    assert not any(set(lists["train"]) & set(lists["test"]) for lists in orders.WORDS.values())


def test_targets_are_marked_and_end_and_what_is_too_long_is_left_out(tokenizer):
    """Further questions first; plain text is cut and has no end token."""
    asks, end = Example("A:\n", " one", (("\nB?\n", " two"), ("\nC?\n", " three"))), tokenizer.eos_token
    (whole,) = encoded([asks], tokenizer, 100)
    assert tokenizer.decode(whole.ids.tolist()) == f"A:\n one{end}\nB?\n two{end}\nC?\n three{end}"
    assert tokenizer.decode(whole.ids[whole.wanted].tolist()) == f" one{end} two{end} three{end}"
    (shorter,) = encoded([asks, Example("long " * 100, " a")], tokenizer, len(whole.ids) - 1)
    assert tokenizer.decode(shorter.ids[shorter.wanted].tolist()) == f" one{end} two{end}"
    (plain,) = encoded([Example("", "word " * 50)], tokenizer, 20)
    assert len(plain.ids) == 20 and plain.wanted.all() and tokenizer.eos_token_id not in plain.ids


def test_any_step_is_found_again_in_the_shares_of_its_phase():
    """The stream from a step on is the rest of the stream from 0, whatever parts and epochs lie before."""

    def plan_of(part, epoch):
        return [f"{part} {epoch} {i}" for i in range({"a": 5, "b": 3}[part] + epoch)]

    batches = by_phases([Phase(30, {"a": 0.5, "b": 0.5}), Phase(10, {"b": 1})], plan_of, seen=2)
    whole = list(batches(0))
    assert Counter(part for part, _ in whole) == {"a": 15, "b": 25}
    for start in (1, 17, 31, 39):
        assert list(batches(start)) == whole[start:]
    assert [batch for part, batch in whole if part == "a"] == [*plan_of("a", 2), *plan_of("a", 3)]


def test_prompts_are_numbered_and_sources_are_on_one_side(corpora):
    training, held, again = Prompts(corpora), Prompts(corpora, held_out=True), Prompts(corpora)
    texts = [training.text(number) for number in range(60)]
    assert texts == [again.text(number) for number in range(60)] and len(set(texts)) > 50
    for task, some in training.sources.items():
        other = {source[0] for source in held.sources[task]}
        assert other and not other & {source[0] for source in some}
