"""The tables, words and verdicts of the length page, on outputs with known effects."""

import numpy as np
import pytest
from length_made import make_trace
from study_made import Kept, made_study

from eestudy.old.analysis import length
from eestudy.old.analysis import length_tables as lt
from eestudy.old.analysis.slopes import NAMES
from eestudy.old.statistics.interval import NOTHING, Interval

TASKS = ("translation/de-en", "question_answering/passages")


def page(*effects, learnt=True, **options):
    """A study of a task per effect(position, length): 64 outputs of 1 to 16 tokens; and its tokens and slopes."""
    traces = {}
    for name, effect in zip(TASKS, effects):
        lengths = [*range(1, 17)] * 4
        traces[name] = make_trace(*([effect(p, n) for p in range(n)] for n in lengths), **options)
    study = made_study(traces, learnt)
    tokens = {name: length.token_table(trace) for name, trace in traces.items()}
    return study, tokens, length.by_definition(tokens, length.slopes_of)


def falling(position, _):
    return 9 - 0.3 * position


def rising(position, _):
    return 3 + 0.3 * position


def test_outputs():
    study, tokens, _ = page(falling, rising, cut={0, 1})
    results, table = Kept(study), lt.output_table(study, tokens)
    lt.keep_outputs(results, table)
    assert table[["outputs", "cut", "empty", "used"]].to_numpy().tolist() == [[64, 2, 0, 62]] * 2
    assert results.overall == {"outputs": 128, "cut": 4, "empty": 0, "used": 124}
    assert results.tasks[TASKS[0], "sequences"] == 64 and table["longest"].tolist() == [16, 16]
    assert results.tasks[TASKS[1], "median_length"] == np.median(([*range(1, 17)] * 4)[2:])
    nothing = lt.output_table(study, {name: own[:0] for name, own in tokens.items()})
    assert nothing["shortest"].isna().all() and (nothing["tokens"] == 0).all()


def test_slopes_over_learnt_tasks():
    """The two effects cancel over both tasks; on translation alone one is left."""
    study, _, slopes = page(falling, rising)
    means = lt.overall(study, slopes)
    assert means["first"]["position"].estimate == pytest.approx(0, abs=1e-9)
    told = lt.overall_figures(study, slopes, means)
    assert told["length_translation"].estimate == pytest.approx(-0.15)
    assert told["half_position_stable"] == pytest.approx(0, abs=1e-9)
    unknown = lt.overall_figures(*(unlearnt := page(falling, learnt=False))[::2], lt.overall(*unlearnt[::2]))
    assert not unknown["length_first"].known and unknown["position_word_first"] == "at a layer that was not measured"


def test_direction():
    assert lt.direction(Interval(-2, -3, -1, 9)) == "earlier" and lt.direction(Interval(2, 1, 3, 9)) == "later"
    assert lt.direction(Interval(0, -1, 1, 9)).startswith("neither")
    assert lt.direction(NOTHING) == "at a layer that was not measured"


def test_trends():
    study, tokens, _ = page(falling, rising)
    results, trends = Kept(study), length.trends(tokens)
    lt.keep_trends(results, trends)
    assert [results.overall[f"{way}_{d}"] for way in ("falling", "rising") for d in ("first", "stable")] == [1] * 4
    shown = lt.trend_table(study, trends)
    assert shown["task"].tolist() == list(TASKS) and len(shown.columns) == 7
    assert shown['tau with length, "first"'].tolist() == pytest.approx([-1, 1])
    tau, p = zip(*(length.length_trend(own, "first") for own in tokens.values()))
    assert shown['p, "first"'].tolist() == pytest.approx([2 * min(p), max(2 * min(p), max(p))])  # Holm, of two
    assert results.tasks[TASKS[0], "tau_position_stable"].estimate == pytest.approx(-15 / 15)


def test_slope_table():
    study, _, slopes = page(falling, rising, cut={63})
    results, found = Kept(study), lt.intervals(slopes)
    lt.keep_slopes(results, found)
    table = lt.slope_table(study, found, lt.overall(study, slopes)["first"], "first")
    assert table["task"].tolist() == [*TASKS, "learnt tasks, mean"]
    assert list(table.columns) == ["task", *NAMES.values(), "position, cut outputs too"]
    assert table["length, sequence means"][0].estimate == pytest.approx(-0.15)
    assert table["position, cut outputs too"][1].estimate == pytest.approx(0.3)
    assert results.tasks[TASKS[1], "position_stable"].estimate == pytest.approx(0.3)


def test_end_tokens():
    """A flat output whose end token leaves early: left in, it makes short outputs early."""
    study, tokens, slopes = page(lambda *_: 8, eos=2)
    with_eos = {name: length.token_table(trace, with_eos=True) for name, trace in study.traces.items()}
    there = length.by_definition(with_eos, length.slopes_of)
    change, results = lt.changes(there, slopes), Kept(study)
    table = lt.end_tokens(study, tokens, there, change)
    lt.keep_end_tokens(results, table, change, lt.overall(study, slopes))
    shown = lt.end_token_table(study, table, "stable")
    assert shown[["end token", "others"]].to_numpy().tolist() == [[2, 8]]
    with_it, changed = shown["length with EOS"].iloc[0], shown["change, length"].iloc[0]
    assert with_it == pytest.approx(changed.estimate) and changed.low > 0.05
    assert results.overall["length_with_eos_stable"] == pytest.approx(with_it)
    assert results.overall["length_eos_change_first"] == changed
    assert results.tasks[TASKS[0], "end_token_first"] == 1
    assert results.tasks[TASKS[0], "length_with_eos_stable"].estimate == pytest.approx(with_it)


@pytest.mark.parametrize("effect, sign, verdict", [(falling, "yes", "holds"), (rising, "no", "does not hold")])
def test_signs_and_verdicts(effect, sign, verdict):
    study, _, slopes = page(effect)
    table = lt.sign_table(lt.overall(study, slopes))
    stated = dict(zip(table["P, section 6.1 and Figure 5"], table['sign as stated, "first"']))
    assert stated["exit layer falls with output length"] == sign
    found = {made.claim.id: made.verdict for made in lt.verdicts(study, slopes, "first")}
    assert found["P-L1"] == found["P-L3"] == verdict


@pytest.mark.parametrize("early, late, verdict", [(9, 5, "holds"), (5, 9, "does not hold")])
def test_a_bend_is_steepest_among_short_outputs(early, late, verdict):
    study, _, slopes = page(lambda position, _: early if position < 2 else late)
    assert {made.claim.id: made.verdict for made in lt.verdicts(study, slopes, "stable")}["P-L2"] == verdict


def test_nothing_is_judged_where_nothing_is_learnt():
    study, _, slopes = page(falling, learnt=False)
    assert {made.verdict for made in lt.verdicts(study, slopes, "first")} == {"not testable here"}
    assert set(lt.sign_table(lt.overall(study, slopes))['sign as stated, "stable"']) == {"–"}
    assert "No task is learnt" in lt.about_the_run(study)["learnt_note"]
