"""Models side by side: their figures against plain counts, verdicts, words, tables, curves."""

import json
from types import SimpleNamespace

import matplotlib
import numpy as np
import pandas as pd
import pytest
import traces
from studies_made import LABELLED

from eestudy import claims as papers
from eestudy.old.analysis import architectures as side_by_side
from eestudy.old.analysis.architectures import BOTH, DECODER, ENCODER
from eestudy.old.figures import architectures as plots
from eestudy.old.statistics.interval import Interval
from eestudy.old.study.results import Results

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


class Texts(traces.Made):
    """A text in each group, and an end token that no statistic may count; the readouts of all are the same.

    Their exit layers are set apart from the readouts: so what swapped targets match is the same for every shuffle.
    inner: top-1 of layers 1..11.
    """

    layers = 12

    def __init__(self, first, stable, labels, inner):
        count = len(labels)
        ends = np.arange(count + 1) == count
        self.exits = {"first": np.append(first, 1), "stable": np.append(stable, 1)}
        self.tokens = pd.DataFrame({"group": np.arange(count + 1), "token_id": np.append(labels, 5), "is_eos": ends})
        self.readouts = {"top1": np.tile([5, *inner, 5], (count + 1, 1))}

    def exit_layer(self, definition):
        return self.exits[definition]


def texts(share, count=60, matched=0.0):
    """`share` of the texts exit at layer 3, the others at 12; layer 1 and on match `matched` of all swapped targets."""
    layers = np.where(np.arange(count) < share * count, 3, 12)
    return Texts(layers, layers, np.arange(count) >= matched * count, [0] * 11)


def fake(name, kind, tasks):
    """A study of one architecture with known traces of its learnt tasks."""
    model = SimpleNamespace(
        name=name,
        kind=kind,
        layers=12,
        unembed=SimpleNamespace(reads="first"),
        network=SimpleNamespace(config=SimpleNamespace()),
    )

    def learnt_tokens(values):
        return {task: values(trace) for task, trace in tasks.items()}

    return SimpleNamespace(model=model, learnt_tokens=learnt_tokens, traces=tasks, learnt=dict.fromkeys(tasks, True))


YES, NO = papers.HOLDS, papers.FAILS
JUDGED = {
    # Swapped: 30 of 40 at layer 9, 10 at 4: on average 310/480 of the depth, deeper than half; all fail.
    "late": (
        Texts(
            np.repeat([6, 12], [16, 24]),
            np.repeat([3, 12], [10, 30]),
            np.repeat([0, 1], [30, 10]),
            [2] * 3 + [1] * 5 + [0] * 3,
        ),
        {"P-A1": (10 / 40, NO), "P-A2": (10 / 40 - (1 + 30 / 40) / 2, NO), "P-A3": (384 / 480 - 1 / 2, NO)},
        30 / 40,
    ),
    # Swapped: 30 at layer 1, 10 at 5, and only these stay: 150/480 is less than half the depth, but more than 80/480.
    "early, and by chance earlier": (
        Texts(np.repeat([3, 6], [30, 10]), np.repeat([3, 12], [39, 1]), np.repeat([0, 1], [30, 10]), [0] * 4 + [1] * 7),
        {"P-A1": (39 / 40, YES), "P-A2": (39 / 40 - (1 + 10 / 40) / 2, YES), "P-A3": (150 / 480 - 80 / 480, NO)},
        10 / 40,
    ),
    # Swapped: 10 at layer 1, 30 at 5, and these stay: 28 of 40 are most, but fewer than by chance.
    "most, but by chance more": (
        Texts(np.repeat([2, 3], 20), np.repeat([3, 12], [28, 12]), np.repeat([0, 1], [30, 10]), [1] * 4 + [0] * 7),
        {"P-A1": (28 / 40, YES), "P-A2": (28 / 40 - (1 + 30 / 40) / 2, NO), "P-A3": (100 / 480 - 160 / 480, YES)},
        30 / 40,
    ),
}


@pytest.mark.parametrize("case", JUDGED)
def test_each_claim_is_judged_on_its_statistic(case):
    """P-A1 against half; P-A2 against the middle of 1 and chance; P-A3 against half the depth and chance's depth."""
    trace, expected, chance = JUDGED[case]
    one = {"task": trace}
    studies = [fake("main", "causal", {}), fake("a", "seq2seq", one), fake("b", "classifier", one)]
    made = dict(zip(side_by_side.CLAIMS, side_by_side.verdicts(studies)))
    for name, (estimate, word) in expected.items():
        assert made[name].interval.estimate == pytest.approx(estimate), name
        assert made[name].verdict == word and made[name].interval.groups == 40, name
    assert [verdict.models for verdict in made.values()] == ["a", "b", "b"]
    assert papers.verdict_table(made.values())["Verdict"].tolist() == [
        f"{expected['P-A1'][1]} on a",
        f"{expected['P-A2'][1]} on b",
        f"{expected['P-A3'][1]} on b",
    ]
    passes = (papers.CHANCE,) if chance >= 0.5 else ()
    assert [verdict.weights for verdict in made.values()] == [
        (papers.FEW_TASKS, *passes),
        (papers.OURS, papers.FEW_TASKS),
        (papers.OURS, papers.FEW_TASKS),
    ]


def test_the_pages_own_model_comes_before_those_beside_it():
    own = fake("own", "classifier", {"sst2": texts(0.0, matched=0.5)})
    other = fake("other", "classifier", {"sst2": texts(1.0)})
    made = side_by_side.verdict("P-A2", [own, other], ENCODER)
    assert made.interval.estimate == pytest.approx(0 - (1 + 0.5) / 2) and made.models == ""
    beside = side_by_side.verdict("P-A2", [fake("main", "causal", {}), own, other], ENCODER)
    assert beside.interval.estimate == pytest.approx((0 - 0.75 + 1 - 0.5) / 2) and beside.models == "own, other"


def test_verdicts():
    """The unweighted mean over tasks of all models beside, or the reason why there is none."""

    def verdict(studies, claim="P-A2", kind=ENCODER):
        return side_by_side.verdict(claim, [fake("main", "causal", {}), *studies], kind)

    pair = [
        fake("a", "classifier", {"sst2": texts(1.0)}),
        fake("b", "classifier", {"rte": texts(0.75, 400, matched=0.75)}),
        fake("c", "seq2seq", {"de-en": texts(0.0)}),
    ]
    held = verdict(pair)
    assert held.verdict == papers.HOLDS and held.models == "a, b"
    assert held.interval.estimate == pytest.approx(((1 - 1 / 2) + (0.75 - (1 + 0.75) / 2)) / 2)
    assert verdict(pair, "P-A1", BOTH).verdict == papers.FAILS
    shallow = verdict(pair, "P-A3")  # swapped: at 12 of 12 layers on sst2, 3.75 on rte, so half the depth is the less
    assert shallow.verdict == papers.HOLDS
    assert shallow.interval.estimate == pytest.approx((3 + (0.75 * 3 + 0.25 * 12)) / 2 / 12 - 1 / 2)
    assert papers.FEW_TASKS in held.weights
    three = verdict([*pair, fake("d", "classifier", {"cola": texts(1.0)})])
    assert three.weights == (papers.OURS,) and three.models == "a, b, d"
    assert verdict(pair[:1], "P-A1", BOTH).reason == "needs an encoder-decoder model; this run has none"
    none = verdict([fake("a", "classifier", {})])
    assert (none.verdict, none.reason, none.models) == (papers.UNTESTABLE, "no task is learnt", "a")
    few = verdict([fake("a", "classifier", {"sst2": texts(1.0, 29)})])
    assert few.verdict == papers.UNTESTABLE and "29 sequences" in few.reason
    mixed = verdict([fake("a", "classifier", {"sst2": texts(1.0, 29), "cola": texts(0.0, 60)})])
    assert mixed.verdict == papers.FAILS and mixed.interval.estimate == -0.5  # a small task is left out, not the claim


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
