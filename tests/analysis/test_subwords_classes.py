"""What a page says of classes of tokens and parts of speech, on traces where they leave at layers of their own."""

import numpy as np
import pytest
from study_made import Kept, made_study
from words_made import make_trace

from eestudy.old.analysis import subwords_classes as classes
from eestudy.old.analysis import words

TASK = "translation/de-en"
OUTPUT = [" The", " cat", " saw", " the", " old", " dog", " near", " a", " ri", "ver", "."]


def page(layers, sequences=40, learnt=True):
    """A study of one task whose token at position i leaves at layers[i]."""
    trace = make_trace(*[OUTPUT] * sequences)
    trace.tokens["group"] = trace.tokens["sequence"].astype(str)
    exits = np.resize([*layers, 1], len(trace.tokens))
    trace.exit_layer = lambda definition: exits
    trace.statistic_rows = lambda: ~trace.tokens["is_eos"].to_numpy(bool)
    study = made_study({TASK: trace}, learnt)
    return study, words.read_words(study, words.load_tagger())


APART = [1, 9, 5, 1, 5, 9, 5, 1, 9, 9, 2]  # determiners early, nouns late


def test_means_of_classes():
    study, pieces = page(APART)
    found, results = classes.by_role(study, pieces), Kept(study)
    classes.keep_means(results, found, "role")
    assert classes.roles_in(found) == ["prefix", "suffix", "single", "punctuation"]
    assert results.tasks[TASK, "punctuation, first"].estimate == 2
    assert results.tasks[TASK, "single, stable"].estimate == pytest.approx(np.mean(APART[:8]))
    table = classes.role_table(study, found).set_index("class")
    assert table.loc["prefix", "tokens"] == 40 and table.loc["prefix", "share (%)"] == pytest.approx(100 / 11)
    assert table.loc["suffix", 'mean, "stable"'].estimate == 9


def test_tags():
    """Rare tags are not shown; the latest stands on top."""
    study, pieces = page(APART)
    tags = classes.tags_in(classes.by_tag(study, pieces, 20))
    assert tags[0] == "NOUN" and "DET" in tags
    assert classes.tags_in(classes.by_tag(study, pieces, 10_000)) == []


def test_tests_of_tags():
    study, pieces = page(APART)
    tests, results = classes.tag_tests(study, pieces, 20), Kept(study)
    classes.keep_tests(results, tests)
    table = classes.kruskal_table(study, pieces, tests, 20)
    assert table["exit layer"].tolist() == ["first", "stable"] and (table["tags"] > 2).all()
    assert table["epsilon-squared"][0].low > 0.5 and table["above chance, first pieces"][0].low > 0.5
    assert results.tasks[TASK, "epsilon-squared, first"] == table["epsilon-squared"][0]
    together = classes.tests_together(study, pieces, 20)
    means = classes.by_tag(study, pieces, 20)
    told = classes.tag_figures(study, pieces, means, together, 20)
    assert told["latest_first"] == "NOUN" and told["earliest_stable"] == classes.tags_in(means, "stable")[-1]
    assert told["tags_apart_first"] >= 2 and told["tags_first"] == len(classes.tag_table(together))
    assert told["epsilon_first"].estimate == pytest.approx(table["above chance"][0].estimate)


def test_nothing_to_test():
    """All tokens at one layer, or nothing learnt."""
    study, pieces = page([3] * 11)
    assert classes.tag_tests(study, pieces, 20) == {} == classes.tests_together(study, pieces, 20)
    told = classes.tag_figures(study, pieces, classes.by_tag(study, pieces, 10_000), {}, 20)
    assert told["latest_first"] == "none" and told["tags_first"] == 0 == told["tags_apart_stable"]
    assert not told["epsilon_first"].known
    unlearnt, pieces = page(APART, learnt=False)
    assert classes.tests_together(unlearnt, pieces, 20) == {} and classes.tag_tests(unlearnt, pieces, 20)
