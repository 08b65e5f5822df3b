"""Readers of the corpora: nothing held out is trained on, passages keep their questions, headlines become sentences."""

import random

import pytest

from eelib.tasks.task import load_task
from eelib.tasks.text_kinds import question_prompt
from recipes import corpora
from recipes.corpora import (
    Example,
    asked,
    headlines,
    is_held_out,
    is_held_out_passage,
    joined,
    plain_text,
    questions,
    sentence_case,
    shifts,
    shipped_texts,
    spelled_out,
    tatoeba,
    usual_case,
    written_plainly,
)


@pytest.mark.parametrize("language", ["de", "fr"])
def test_no_held_out_sentence_is_trained_on(language, folder):
    training, held = tatoeba(folder, language)
    assert len(held) > 10 and len(training) > 500 and all(is_held_out(e) for _, e in held)
    for side in (0, 1):
        assert not {pair[side] for pair in training} & {pair[side] for pair in held}


def test_held_out_is_a_fixed_share_and_ignores_case():
    drawn = [is_held_out(f"Sentence number {i}.") for i in range(20000)]
    assert sum(drawn) / 20000 == pytest.approx(1 / corpora.HELD_OUT_SHARE, rel=0.15)
    assert is_held_out("Sentence  x.") == is_held_out(" SENTENCE  X. \n")


def test_joined_keeps_every_pair_once_and_aligned():
    pairs = [(f"f{i}", f"e{i}") for i in range(50)]
    found = joined(pairs, 6, random.Random(1))
    assert sorted(f for text, _ in found for f in text.split()) == sorted(f for f, _ in pairs)
    assert all([w[1:] for w in f.split()] == [w[1:] for w in e.split()] for f, e in found)
    assert {len(f.split()) for f, _ in found} == {1, 2, 3, 4, 5, 6}


def test_held_out_passages_are_a_fixed_share():
    drawn = [is_held_out_passage(f"Passage {i}") for i in range(20000)]
    assert sum(drawn) / 20000 == pytest.approx(1 / corpora.HELD_OUT_PASSAGES, rel=0.1)


def test_no_held_out_passage_is_trained_on(folder):
    """A passage is on one side with all its questions."""
    training, held = shifts(folder)
    assert held and training and not set(training) & set(held)
    assert all(len(rows) == 2 for rows in [*training.values(), *held.values()])
    texts = [e.prompt for e in questions(folder, 10**6, random.Random(0))]
    assert not any(context in text for context in held for text in texts)


def test_long_passages_are_left_out(folder):
    short = questions(folder, 130, random.Random(0))
    assert len(short) < len(questions(folder, 999, random.Random(0)))
    assert max(e.prompt.count("word") for e in short) == 120


def test_questions_of_a_passage_stand_in_one_text(folder):
    """The first in P's format, the second after its answer; of SQuADShifts the shortest answer is the target."""
    texts = questions(folder, 130, random.Random(0))
    tale = next(e for e in texts if "Passage 3 of fairytaleqa.train" in e.prompt)
    (more,) = tale.more
    assert {tale.prompt.split("\n### Question:\n")[1], more[0].removeprefix("\n### Question:\n")} == {
        "Who?\n### Answer:\n",
        "Who else?\n### Answer:\n",
    }
    assert tale.target == more[1] == " Ann 3"
    assert {e.target for e in texts if "squadshifts" in e.prompt} == {" x"}


def test_first_question_is_the_papers_prompt():
    text = asked("A cat sat.", [("Who?", "a cat"), ("What?", "sat")])
    assert text == Example(
        question_prompt("A cat sat.", "Who?"), " a cat", (("\n### Question:\nWhat?\n### Answer:\n", " sat"),)
    )


def test_headlines_become_sentences():
    """A word is written as inside sentences, the article's own way first; exchange codes go."""
    usual = usual_case(["He works at IBM in New York. Shares rose. She sold shares to IBM."])
    assert usual["ibm"] == "IBM" and usual["shares"] == "shares" and "he" not in usual
    assert sentence_case("IBM <IBM> SHARES RISE IN NEW YORK", usual) == "IBM shares rise in New York"
    assert sentence_case("<FOUR SEASONS> SHARES", usual) == "Four seasons shares"


def test_wire_words_are_spelled_out():
    assert spelled_out("4 mln dlrs, a dlr, 5 pct, mlns") == "4 million dollars, a dollar, 5 percent, mlns"


def test_articles_have_their_headlines(folder):
    """About half are spelled out, article and headline alike; an article is cut after so many words."""
    texts = headlines(folder, 9, random.Random(0))
    assert len(texts) == 29
    plain = [e for e in texts if "mln" in e.prompt]
    assert 5 < len(plain) < 24
    for example in texts:
        number = int("".join(c for c in example.target.split()[0] if c.isdigit()))
        words = "mln dlrs" if example in plain else "million dollars"
        assert example.target == f"Ann{number} lost {number} {words} in qtr"
        assert f"Today Ann{number} Corp said it lost {number} {words}.\n### Response" in example.prompt


def test_articles_of_wikitext_read_like_text():
    line = 'He said " no " ( twice ) , and left . The [UNK] stayed . It \'s 5 % , or 1,000 .'
    assert written_plainly(line) == 'He said "no" (twice), and left. It\'s 5%, or 1,000.'


def test_plain_text_is_whole_paragraphs_and_none_held_out(folder):
    texts = plain_text(folder, 1000)
    held = corpora.novels(folder)[1]
    assert held and not any(f"{line}\n" in f"{e.target}\n" for e in texts[: len(texts) // 2] for line in held)
    assert all(not e.prompt and 1000 <= len(e.target) < 2000 for e in texts)
    assert all(line.startswith("Chapter") for e in texts for line in e.target.split("\n"))


def test_shipped_texts_are_known():
    """Sources and references of the project's own tasks, whatever their case."""
    task = load_task("translation/de-en")
    assert {text.strip().lower() for text in (task.sources[5], task.references[5][0])} <= shipped_texts()
