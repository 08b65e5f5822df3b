"""Time saved beside layers saved: ratios by hand, P's own figures, times of tiny models, words, table and plot."""

import json

import matplotlib
import pandas as pd
import pytest

from eestudy.old.analysis import speedup
from eestudy.old.figures import architectures as plots
from eestudy.old.study.comparison import timed_studies
from eestudy.old.study.results import Results
from eestudy.old.study.study import Study
from eestudy.parameters import Parameters

matplotlib.use("Agg")


def test_ratios_by_hand():
    """A token takes 1 ms and each of 10 blocks another; the oracle runs 3 and 5 blocks; the prompt takes 20 ms."""
    frame = pd.DataFrame(
        {
            "group": ["a", "b"],
            "tokens": [4, 2],
            "layers": [12, 10],
            "full": [44e-3, 22e-3],
            "oracle": [16e-3, 12e-3],
            "before": [20e-3, 20e-3],
        }
    )
    found = speedup.speed(frame, 10)
    assert found["time"].estimate == pytest.approx(66 / 28) and found["time"].sequences == 2
    assert found["time"].low < 22 / 12 and found["time"].high > 44 / 16  # two groups alone say little
    assert found["whole"].estimate == pytest.approx(106 / 68)
    assert found["layers"].estimate == pytest.approx(60 / 22)
    assert found["fixed"].estimate == pytest.approx(1 / 11) and found["fixed"].high == pytest.approx(1 / 11)
    assert not speedup.speed(frame.assign(layers=10 * frame["tokens"]), 10)["fixed"].known  # nothing saved


def test_what_p_printed():
    speeds = speedup.published_speeds().set_index("row")
    assert speeds.loc["RoBERTa, RTE", "highest"] == pytest.approx(12 / 8)
    assert speeds.loc["RoBERTa, RTE", "lowest"] == pytest.approx(12 / 9)
    text = speedup.beyond_layers(speeds.reset_index())
    assert "RoBERTa on RTE is 2.07 times as fast" in text and text.count("times") == 1


def test_times_table_and_plot(found):
    made = speedup.timings(found)
    assert {key[0]: len(frame) for key, frame in made.items()} == {"gpt2": 1, "t5": 1, "bert_labels": 8}
    rows = speedup.speed_rows(found, made)
    assert rows["ideal"].tolist() == [True, True, False] and rows["one_pass"].tolist() == [False, False, True]
    assert all(name in speedup.time_in_words(found, made) for name in ("gpt2", "t5", "bert_labels"))
    assert speedup.measured_on(rows).startswith("; timed on ") and f"threads: {rows['threads'][0]}" in (
        speedup.measured_on(rows)
    )
    printed = speedup.published_speeds()
    shown = plots.speed_table(printed, rows)
    assert len(shown) == 17 and not shown.isna().any(axis=None)
    assert shown["earlier tokens"].tolist()[-3:] == ["from the cache", "from the cache", "none"]
    for timed in (rows, speedup.speed_rows(found, {})):
        legend = [text.get_text() for text in plots.speed_figure(timed, printed).legends[0].texts]
        assert len(legend) == 3 + len(timed)


def test_every_time_is_kept_with_its_model_and_task(found):
    results, rows = Results("architectures", found[0]), speedup.speed_rows(found, speedup.timings(found))
    speedup.keep(results, rows)
    saved = json.loads(results.save().read_text())["tasks"]
    assert len(saved) == 3 and all(
        {"timed_time", "timed_machine", "timed_layers", "timed_tokens"} <= set(kept) for kept in saved.values()
    )


def test_nothing_timed(values, found):
    """Nothing asked for: what an earlier run kept is not shown."""
    untimed = timed_studies(Parameters(values | {"timed_sequences": 0}))
    assert speedup.timings(untimed) == {} != speedup.timings(found)
    assert speedup.time_in_words(untimed, {}) == "Nothing was timed in this run."
    assert speedup.measured_on(pd.DataFrame()) == ""


def test_a_masked_model_is_not_timed(folder_of, values):
    study = Study(Parameters(values | {"model": str(folder_of("bert"))}), timed=4, repeats=1)
    assert speedup.timings([study]) == {}
    assert "bert is not timed" in speedup.time_in_words([study], {})
