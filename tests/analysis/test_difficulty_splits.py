"""The page on difficulty: a study's units split, its verdicts, statements and tables."""

import pytest
from difficulty_made import planted

from eestudy import claims
from eestudy.old.analysis import difficulty_splits
from eestudy.old.analysis import difficulty_tables as tables
from eestudy.old.analysis.difficulty_splits import word
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.parameters import ParameterError


def test_words_follow_the_interval():
    value = Interval(2.0, 1.0, 4.0, 9)
    assert word(value, "longer", "shorter") == "longer"
    assert word(value.scaled(-1), "longer", "shorter") == "shorter"
    assert word(value._replace(low=-1.0), "longer", "shorter") == "not clearly longer or shorter"
    assert word(NOTHING, "longer", "shorter") == "not measured against"


@pytest.mark.parametrize("easy_are_longer", [True, False])
def test_planted_units_bring_each_verdict(easy_are_longer):
    splits = difficulty_splits.split_study(planted(easy_are_longer))
    got = {verdict.claim.id: verdict.verdict for verdict in difficulty_splits.verdicts(splits)}
    sides = (claims.HOLDS, claims.FAILS) if easy_are_longer else (claims.FAILS, claims.HOLDS)
    assert got["M-D1"] == claims.HOLDS
    assert (got["M-D3"], got["M-D4"]) == (sides[0], sides[0])
    assert (got["M-D5"], got["M-D6"]) == (sides[1], sides[0])  # what is long has a step that does not rise
    assert got["M-D7"] == claims.UNTESTABLE  # after layer 8 all prefixes rise
    splits.study.model.kind = "masked"
    reasons = {verdict.reason for verdict in difficulty_splits.verdicts(splits)}
    assert reasons == {"a masked model decodes no prefix"}


def test_a_claim_that_leaves_small_tasks_out_says_what_they_would_change():
    def judged(**sizes):
        splits = difficulty_splits.split_study(planted(True, **sizes))
        return {verdict.claim.id: verdict for verdict in difficulty_splits.verdicts(splits)}

    alone, beside, few = judged()["M-D3"], judged(small=60), judged(outputs=160)["M-D3"]
    assert alone.note == "" and beside["M-D3"].interval == alone.interval
    assert (
        beside["M-D3"].note.startswith("with the tasks of 30 to 99 sequences: ") and claims.HOLDS in beside["M-D3"].note
    )
    assert beside["M-D1"].note == "" and beside["M-D1"].interval.sequences == 60
    assert few.verdict == claims.UNTESTABLE and few.reason == "160 sequences in all tasks, fewer than 400"


def test_statements_and_tables_agree_with_the_comparisons():
    splits = difficulty_splits.split_study(planted(True))
    said = difficulty_splits.statements(splits)
    gap = splits.by_similarity.over("first_similar").difference
    assert said["later"].estimate == pytest.approx(-gap.estimate) and said["later_word"] == "later than"
    assert said["control_later"] == said["later"]  # entropy was planted to sort as similarity does
    assert said["increasing_0_easy"].estimate == pytest.approx(
        100 * splits.by_similarity.over("increasing_0").easy.estimate
    )
    beside = tables.beside_m(splits).set_index("property")
    assert beside.loc["Sequence length (tokens)", "M, easy"] == "58.16 (31.81)"
    assert beside.loc["Sequence length (tokens)", "here, easy − difficult"] == tables.gap(
        splits.by_similarity.over("length")
    )
    assert sum("Strictly increasing" in label for label in beside.index) == 8
    assert len(tables.task_table(splits)) == len(tables.control_table(splits)) == 6
    assert tables.output_table(splits)["on each side"].tolist() == [164]  # 40% of 410
    shares = difficulty_splits.other_shares(splits)
    assert tables.share_table(shares)["share of each end (%)"].tolist() == [1, 10, 25, 40]
    assert difficulty_splits.share_statements(shares)["length at share 0.4"] == said["length"]
    assert list(tables.length_differences(splits)) == ["task", "mean of learnt tasks"]
    rising = splits.rising()["easy"]
    assert rising["estimate"].iloc[0] < rising["estimate"].iloc[-1] == 1


def test_example_prefixes_show_what_was_decoded():
    study = planted(True)
    made = study.traces["task"]
    made.sequences["output"] = [f"{s}: " + "x" * 300 for s in range(410)]
    made.tokens["start"], made.tokens["token_id"] = made.tokens["position"] * 25, 7
    study.token_text = lambda token_id: f"<{token_id}>"
    found = tables.example_prefixes(difficulty_splits.split_study(study), 2)
    assert (found.task, found.names, found.kinds) == (
        "task",
        ["E1", "E2", "D1", "D2"],
        ["easy"] * 2 + ["difficult"] * 2,
    )
    assert found.curves.shape == (4, 13) and set(found.table["next token"]) == {"<7>"}
    for _, row in found.table.iterrows():
        decoded = row["decoded so far"]
        assert decoded == "(nothing yet)" if row["length"] == 0 else len(decoded) <= tables.ROOM + 1
    assert tables.ending("a\nb") == "a↵b" and tables.ending("y" * 200) == "…" + "y" * tables.ROOM


@pytest.mark.parametrize("name, value", [("share", 0.6), ("share", 0), ("threshold", 1.1)])
def test_parameters_that_make_no_sense_are_refused(name, value, one_line):
    given = {"share": 0.4, "threshold": 0.9} | {name: value}
    one_line(ParameterError, f"parameter {name} is {value}", lambda: difficulty_splits.check(given))
    difficulty_splits.check({"share": 0.5, "threshold": 1.0})
