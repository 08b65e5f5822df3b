"""Models side by side: their figures against plain counts, verdicts, words, tables, curves."""

import json
from types import SimpleNamespace

import matplotlib
import numpy as np
import pandas as pd
import pytest
from studies_made import LABELLED

from eelib.analysis import architectures as side_by_side
from eelib.analysis.architectures import BOTH, DECODER, ENCODER
from eelib.common.interval import Interval
from eelib.figures import architectures as plots
from eelib.study import claims as papers
from eelib.study.results import Results

matplotlib.use("Agg")


@pytest.mark.parametrize(
    "name, kind",
    [("llama", DECODER), ("t5", BOTH), ("bert", ENCODER), ("bert_labels", ENCODER), ("gpt2_labels", DECODER)],
)
def test_architecture(name, kind, model_of):
    assert side_by_side.architecture(model_of(name)) == kind


# Figures


def counted(study, definition):
    """Exit layers of a study's one task, end tokens left out."""
    (trace,) = study.traces.values()
    return trace.exit_layer(definition)[trace.statistic_rows()]


def test_rows_curves_and_means_are_plain_counts(found):
    table = side_by_side.task_rows(found).set_index("model")
    curves = side_by_side.depth_curves(found)
    for study in found:
        name, depth = study.model.name, study.model.layers
        kind = side_by_side.architecture(study.model)
        shares = side_by_side.overall(found, kind)
        for definition in ("first", "stable"):
            layers = counted(study, definition)
            assert table.loc[name, f"avg {definition}"].estimate == pytest.approx(layers.mean())
            assert table.loc[name, f"perc {definition}"].estimate == pytest.approx((layers < depth).mean())
            assert shares[f"perc_{definition}"].estimate == pytest.approx((layers < depth).mean())
            assert shares[f"depth_{definition}"].estimate == pytest.approx(layers.mean() / depth)
            curve = curves[(curves["model"] == name) & (curves["definition"] == definition)]
            assert curve["depth"].tolist() == [layer / depth for layer in range(depth + 1)]
            assert curve["estimate"].tolist() == pytest.approx([(layers <= at).mean() for at in range(depth + 1)])
        above = table.loc[name, "perc first"].estimate - table.loc[name, "perc chance"]
        assert table.loc[name, "above chance"].estimate == pytest.approx(above)
        assert shares["above_chance"].estimate == pytest.approx(above)
    assert table.loc["bert_labels", "labels"] == 3 and table.loc["bert_labels", "tokens"] == len(LABELLED)
    assert table.loc["bert_labels", "baseline"] == {"accuracy": pytest.approx(100 * 14 / 40)}


def test_every_figure_is_kept_with_its_model_and_task(found):
    results = Results("architectures", found[0], beside=found[1:])
    side_by_side.keep(results, side_by_side.task_rows(found))
    saved = json.loads(results.save().read_text())
    assert set(saved["beside"]) == {"t5", "bert_labels"}
    assert saved["beside"]["t5"]["traces"] and saved["beside"]["t5"]["quality"]
    (key,) = (key for key in saved["tasks"] if key.startswith("bert_labels "))
    assert {
        "avg_first",
        "perc_stable",
        "perc_chance",
        "above_chance",
        "accuracy",
        "baseline_accuracy",
        "layers",
    } <= set(saved["tasks"][key])


def fake(name, kind, tasks):
    """A study of one architecture with known (values, groups) of its learnt tasks."""
    model = SimpleNamespace(
        name=name,
        kind=kind,
        layers=12,
        unembed=SimpleNamespace(reads="first"),
        network=SimpleNamespace(config=SimpleNamespace()),
    )
    return SimpleNamespace(model=model, learnt_tokens=lambda _: tasks, traces=dict(tasks), learnt=dict.fromkeys(tasks))


def groups(share, count=60):
    """Values that are 1 for `share` of `count` groups."""
    return (np.arange(count) < share * count).astype(float), np.arange(count)


def test_each_claim_is_judged_on_its_statistic():
    """40 tokens in 40 groups: by "first" half leave at layer 3 of 12 and half at 12, by "stable" all but ten at 12."""
    layers = {"first": np.repeat([3, 12], 20), "stable": np.repeat([3, 12], [10, 30])}
    trace = SimpleNamespace(
        layers=12,
        exit_layer=layers.get,
        statistic_rows=lambda: np.ones(40, dtype=bool),
        tokens=pd.DataFrame({"group": np.arange(40)}),
    )
    one = {"task": None}
    studies = [fake("main", "causal", {}), fake("a", "seq2seq", one), fake("b", "classifier", one)]
    for study in studies[1:]:
        study.learnt_tokens = lambda values: {"task": values(trace)}
    made = dict(zip(side_by_side.CLAIMS, side_by_side.verdicts(studies)))
    assert {name: verdict.interval.estimate for name, verdict in made.items()} == pytest.approx(
        {"P-A1": 0.25, "P-A2": 0.25, "P-A3": 7.5 / 12}
    )
    assert [verdict.models for verdict in made.values()] == ["a", "b", "b"]
    assert papers.verdict_table(made.values())["Verdict"].tolist() == [
        "does not hold on a",
        "does not hold on b",
        "does not hold on b",
    ]


def test_the_pages_own_model_comes_before_those_beside_it():
    own = fake("own", "classifier", {"sst2": groups(0.0)})
    other = fake("other", "classifier", {"sst2": groups(1.0)})
    made = side_by_side.verdict("P-A2", [own, other], ENCODER, None)
    assert made.interval.estimate == 0.0 and made.models == ""


def test_verdicts():
    """The unweighted mean over tasks of all models beside, or the reason why there is none."""

    def verdict(studies, claim="P-A2", kind=ENCODER):
        return side_by_side.verdict(claim, [fake("main", "causal", {}), *studies], kind, None)

    pair = [
        fake("a", "classifier", {"sst2": groups(1.0)}),
        fake("b", "classifier", {"rte": groups(0.75, 400)}),
        fake("c", "seq2seq", {"de-en": groups(0.0)}),
    ]
    held = verdict(pair)
    assert held.verdict == papers.HOLDS and held.interval.estimate == pytest.approx(0.875) and held.models == "a, b"
    assert verdict(pair, "P-A1", BOTH).verdict == papers.FAILS
    assert verdict(pair, "P-A3").verdict == papers.FAILS  # its threshold lies below
    assert verdict(pair[:1], "P-A1", BOTH).reason == "needs an encoder-decoder model; this run has none"
    none = verdict([fake("a", "classifier", {})])
    assert (none.verdict, none.reason, none.models) == (papers.UNTESTABLE, "no task is learnt", "a")
    few = verdict([fake("a", "classifier", {"sst2": groups(1.0, 29)})])
    assert few.verdict == papers.UNTESTABLE and "29 sequences" in few.reason
    mixed = verdict([fake("a", "classifier", {"sst2": groups(1.0, 29), "cola": groups(0.0, 60)})])
    assert mixed.verdict == papers.FAILS  # a small task is left out, not the claim


# Words, tables, plots


def test_words(found):
    for kind, name in ((BOTH, "t5"), (ENCODER, "bert_labels")):
        text = side_by_side.in_words(found, kind, side_by_side.overall(found, kind))
        assert name in text and "nan" not in text and ("texts" in text) == (kind == ENCODER)
    nothing = side_by_side.overall(found[:1], BOTH)
    assert side_by_side.in_words(found[:1], BOTH, nothing) == "No encoder-decoder model is part of this run."
    assert "nothing" in side_by_side.chance_in_words(nothing)
    shares = {kind: side_by_side.overall(found, kind) for kind in side_by_side.ARCHITECTURES}
    said = side_by_side.depth_in_words(found, shares)
    assert f"{100 * shares[BOTH]['depth_first'].estimate:.0f}% of the depth in the {BOTH} model" in said
    assert "from 11 to 67%" in said and "nan" not in said
    assert "on 1 of 1 tasks" in side_by_side.weakness_in_words(found)
    assert "No claim" in side_by_side.weakness_in_words(found[:1])
    assert "is above chance" in side_by_side.chance_in_words({"above_chance": Interval(0.2, 0.1, 0.3, 40)})
    assert "not clearly" in side_by_side.chance_in_words({"above_chance": Interval(0.2, -0.1, 0.3, 40)})
    assert side_by_side.where(found[:2]).startswith("gpt2, t5; float32 on cpu, 20")


def test_p_s_rows_of_exit_layers():
    rows = plots.printed_exits(papers.published("P-table-3"))
    assert [row["avg / L"] for row in rows] == ["0.82", "0.70"]  # base 1 is known
    first = plots.printed_exits(papers.published("P-table-4"))[0]
    assert first["avg / L"] == "0.26 or 0.35" and first["quality"] == "Matthews correlation 56.24"


def test_tables_and_curves(found, capsys):
    assert [found[2].token_text(i) for i in range(3)] == found[2].model.labels
    table = side_by_side.task_rows(found)
    exits = plots.exit_table(
        plots.printed_exits(papers.published("P-table-4")), table[table["architecture"] == ENCODER]
    )
    assert len(exits) == 14 + 2 and exits["exit layer"].tolist()[-2:] == ["first", "stable"]
    figure = plots.depth_figure(side_by_side.depth_curves(found))
    assert [text.get_text() for text in figure.legends[0].texts] == [
        "gpt2 (decoder-only)",
        "t5 (encoder-decoder)",
        "bert_labels (encoder-only)",
    ]


def test_a_table_without_rows_is_not_shown(found, monkeypatch):
    shown = []
    monkeypatch.setattr(plots, "table", lambda *args: shown.append(args))
    table = side_by_side.task_rows(found)
    plots.show_exits(found, table[table["architecture"] != DECODER], DECODER, "Nothing.")
    assert not shown
    plots.show_exits(found, table, BOTH, "Both.", of_p="P-table-3")
    ((frame, caption),) = shown
    assert len(frame) == 2 + 2 and caption.startswith("Both. t5; float32 on cpu, ")
