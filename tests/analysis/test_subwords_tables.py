"""What a page says of the pieces of words, on traces whose prefixes leave late, or early."""

import numpy as np
import pytest
from study_made import Kept, made_study
from words_made import make_trace

from eestudy.old.analysis import subwords, words
from eestudy.old.analysis import subwords_tables as tables
from eestudy.old.statistics.interval import NOTHING

ENGLISH, GERMAN = "translation/de-en", "translation/en-de"
OUTPUTS = [[" the", " un", "do", "ing", " cat", " sat", " re", "do", "."]] * 40


def words_trace(prefix, other, outputs=OUTPUTS):
    """A trace whose prefixes leave at layer `prefix` and all other tokens at `other`."""
    trace = make_trace(*outputs)
    is_prefix = (words.words_of(trace)["role"] == "prefix").to_numpy()
    trace.tokens["group"] = trace.tokens["sequence"].astype(str)
    trace.exit_layer = lambda definition: np.where(is_prefix, prefix, other)
    trace.statistic_rows = lambda: ~trace.tokens["is_eos"].to_numpy(bool)
    return trace


def page(*traces, learnt=True):
    study = made_study(dict(zip((ENGLISH, GERMAN), traces)), learnt)
    return study, words.read_words(study, words.load_tagger())


def test_shares():
    study, pieces = page(words_trace(5, 2))
    found, results = tables.readings(study, pieces), Kept(study)
    tables.keep_readings(results, found)
    first = "tokens that share their word with another token, of all tokens"
    assert results.tasks[ENGLISH, f"share: {first}"].estimate == pytest.approx(100 * 5 / 9)
    assert tables.share(study, pieces).estimate == pytest.approx(5 / 9)
    table = tables.reading_table(study, found)
    assert list(table.columns) == ["reading", ENGLISH] and table["reading"][0] == first
    assert tables.reading_table(study, {ENGLISH: {}}).empty and tables.printed_share() == 12


@pytest.mark.parametrize("prefix, verdict, side", [(5, "holds", "later"), (1, "does not hold", "earlier")])
def test_prefixes(prefix, verdict, side):
    """Two traces; the one out of English is shown, and not judged."""
    study, pieces = page(words_trace(prefix, 3), words_trace(3, 3))
    found, results = tables.comparisons(study, pieces), Kept(study)
    tables.keep_comparisons(results, found)
    assert results.tasks[ENGLISH, "prefix minus suffixes, first"].estimate == prefix - 3
    assert results.tasks[GERMAN, "prefix minus single, stable"].estimate == 0
    told = tables.comparison_figures(study, pieces, found)
    assert told["inside_first"].estimate == prefix - 3 and told["matched_tasks_first"] == 1
    assert told[f"matched_{side}_stable"] == 1 and told["matched_later_first"] + told["matched_earlier_first"] == 1
    assert told["step_first"] == 0 and told["distance"] == pytest.approx((3 + 2) / 2 / 2)
    within, matched = tables.within_table(study, found), tables.matched_table(study, found)
    assert within["task"].tolist() == [ENGLISH] * 2 + [GERMAN] * 2 == matched["task"].tolist()
    assert within["words"].tolist() == [80] * 4 and within[f"prefix {side} (%)"].tolist() == [100, 100, 0, 0]
    panels = tables.differences(study, found)
    assert [sorted(panel["first"]) for panel in panels.values()] == [[ENGLISH, GERMAN]] * 2
    by_claim = {made.claim.id: made for made in tables.verdicts(study, pieces, 20)}
    assert by_claim["P-W1"].verdict == verdict and by_claim["P-W2"].reason.startswith("needs the paper's tokenizer")


def test_words_with_an_apostrophe_can_be_left_out():
    study, pieces = page(words_trace(5, 2, [[" don", "'", "t", " cat"]] * 3))
    (found,) = tables.comparisons(study, pieces)["first"].values()
    assert found.within.difference.estimate == 3 and found.unjoined is NOTHING


def test_nothing_to_compare():
    study, pieces = page(words_trace(5, 2, [[" a", "."]] * 3))
    found = tables.comparisons(study, pieces)
    assert tables.differences(study, found) == {} and tables.within_table(study, found).empty
    told = tables.comparison_figures(study, pieces, found)
    assert not told["inside_first"].known and told["matched_tasks_first"] == 0 and np.isnan(told["step_first"])
    by_claim = {made.claim.id: made.reason for made in tables.verdicts(study, pieces, 20)}
    assert by_claim["P-W1"] == "no word of several pieces in the outputs"
    other = made_study({GERMAN: study.traces[ENGLISH]})
    reasons = [made.reason for made in tables.verdicts(other, words.read_words(other, words.load_tagger()), 20)]
    assert reasons == ["no learnt translation task into English in this run"] * 3


def test_p_asks_for_its_own_tokenizer():
    class LlamaTokenizer:
        vocab_size = 32_000
        pieces = ("<unk>", "<s>", "</s>", "<0x00>")

        def convert_ids_to_tokens(self, number):
            return self.pieces[number]

    class Other(LlamaTokenizer):
        pass

    assert tables.is_llama_2(LlamaTokenizer()) and not tables.is_llama_2(Other())
    LlamaTokenizer.pieces = ("<unk>",) * 4
    assert not tables.is_llama_2(LlamaTokenizer())


def test_the_means_of_pieces_are_those_of_the_statistics():
    """A page adds nothing of its own to what `subwords` computes."""
    study, pieces = page(words_trace(5, 2))
    alone = subwords.prefix_suffix_difference(pieces[ENGLISH], pieces[ENGLISH]["first"])
    assert tables.comparisons(study, pieces)["first"][ENGLISH].within == alone
