"""Scores: the packages are called as meant, and the parts written here are SQuAD's."""

import sys
import types

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from eelib.tasks.metrics import answer_stats, bleu, chrf, normalised, repeated, rouge, scores_of, token_f1
from eelib.tasks.task import Task

TEXT = st.text(alphabet="ab the.,! ", max_size=20)


def bleu_chrf(outputs, references, language=""):
    return scores_of({"BLEU": bleu(outputs, references, language)}) | chrf(outputs, references)


def test_bleu_and_chrf():
    outputs = ["the dog runs over the hill now", "a house"]
    references = [["the dog runs over a hill now"], ["the house"]]
    got = bleu_chrf(outputs, references)
    streams = [[r[0] for r in references]]
    wanted = {"BLEU": sacrebleu.corpus_bleu(outputs, streams), "chrF": sacrebleu.corpus_chrf(outputs, streams)}
    assert got == pytest.approx({name: found.score for name, found in wanted.items()}, abs=1e-9)
    assert 0 < got["BLEU"] < 100
    assert bleu_chrf(["a b c d e"], [["a b c d e"]]) == pytest.approx({"BLEU": 100.0, "chrF": 100.0})


@given(st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=5))
def test_bleu_of_two_references_is_the_packages(items):
    outputs, *streams = map(list, zip(*items))
    got = bleu_chrf(outputs, list(zip(*streams)))["BLEU"]
    assert got == pytest.approx(sacrebleu.corpus_bleu(outputs, streams).score, abs=1e-6)


def test_uneven_numbers_of_references():
    """A second reference counts for its own line only."""
    outputs = ["one two three four five", "six seven eight nine ten"]
    more = bleu_chrf(outputs, [["one two three four 5", outputs[0]], ["six seven eight nine 10"]])
    alone = bleu_chrf(outputs, [[outputs[0]], ["six seven eight nine 10"]])
    assert more["BLEU"] == pytest.approx(alone["BLEU"])


def test_languages_without_spaces():
    assert bleu_chrf(["我喜欢读书"], [["我喜欢读书"]], "zh")["BLEU"] == pytest.approx(100.0)
    assert bleu_chrf(["私は本が好き"], [["私は本が嫌い"]], "ja")["BLEU"] > 20
    outputs, references = ["我喜欢读书"], [["我喜欢读报"]]
    assert bleu_chrf(outputs, references, "zh")["BLEU"] > bleu_chrf(outputs, references, "en")["BLEU"]


def test_squad_normalisation():
    assert normalised("The  cat's, an OLD  one!") == ["cats", "old", "one"]
    assert token_f1("the cat sat", "a cat") == pytest.approx(2 * 1 / (2 + 1))
    assert token_f1("cat cat", "cat dog") == pytest.approx(0.5)
    assert token_f1("the", "a") == 1.0 and token_f1("the", "cat") == 0.0
    assert scores_of(answer_stats(["cat", "dog"], [["a dog", "the cat"], ["bird"]]))["F1"] == 50.0


@pytest.mark.parametrize(
    "output, references, found",
    [
        ("It was, I think, the red kite of Ann.", ["blue kite", "a red kite"], 100.0),
        ("It was a reddish kite.", ["a red kite", "red"], 0.0),  # words, not letters
        ("red and kite", ["red kite"], 0.0),  # side by side
        ("the", ["a"], 0.0),  # nothing is left to be found
    ],
)
def test_containment(output, references, found):
    assert scores_of(answer_stats([output], [references]))["containment"] == found
    both = scores_of(answer_stats([output, "red kite"], [references, ["kite"]]))
    assert both["containment"] == (found + 100) / 2


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 8))
def test_repeated_tokens_against_a_plain_loop(ids, length):
    """A token is repeated where some window around it is equal to a window at another place."""
    starts = range(len(ids) - length + 1)
    twice = [a for a in starts if any(a != b and ids[a : a + length] == ids[b : b + length] for b in starts)]
    assert repeated(ids, length).tolist() == [any(a <= i < a + length for a in twice) for i in range(len(ids))]


def test_eight_tokens_in_a_row_are_a_repetition_and_seven_are_not():
    line = list(range(8))
    assert repeated([9, *line, 10, *line, 11]).tolist() == [False, *[True] * 8, False, *[True] * 8, False]
    assert not repeated([*line[:7], 10, *line[:7]]).any()


def test_rouge():
    """Hand-counted F-measures; the better of two references counts."""
    got = scores_of(rouge(["the small dog runs"], [["the small cat runs"]]))
    assert got["ROUGE-1"] == pytest.approx(75.0) and got["ROUGE-2"] == pytest.approx(100 / 3)
    assert got["ROUGE-L"] == pytest.approx(75.0)
    assert scores_of(rouge(["a dog"], [["nothing else"]])) == {"ROUGE-1": 0.0, "ROUGE-2": 0.0, "ROUGE-L": 0.0}
    assert scores_of(rouge(["a dog"], [["nothing else", "a dog"]]))["ROUGE-1"] == pytest.approx(100.0)


def test_comet_joins_the_scores_of_a_translation_where_it_is_installed(monkeypatch):
    class Scorer:
        def predict(self, rows, progress_bar):
            assert rows == [{"src": "Ein Hund.", "mt": "A dog.", "ref": "One dog."}]
            return types.SimpleNamespace(system_score=0.5)

    fake = types.SimpleNamespace(download_model=lambda name: name, load_from_checkpoint=lambda path: Scorer())
    task = Task("translation/de-en", "translation", ["p"], [["One dog."]], ["Ein Hund."], ["0"], "de", "en")
    assert "COMET-22" not in task.quality(["A dog."])
    monkeypatch.setitem(sys.modules, "comet", fake)
    assert task.quality(["A dog."])["COMET-22"] == 50.0
