"""Easy and difficult units against plain loops on small random arrays, with ties and edge cases; its plots."""

import math
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from eelib.analysis import difficulty, difficulty_splits
from eelib.analysis import difficulty_tables as tables
from eelib.analysis.difficulty_splits import word
from eelib.common.interval import NOTHING, Interval
from eelib.figures import difficulty as figures_difficulty
from eelib.study import claims
from eelib.study.parameters import ParameterError
from eelib.study.study import Study


class FakeTrace:
    """What the section reads of a trace: three sequences, the last one cut, each other with an end token."""

    def __init__(self, lengths=(4, 0, 6), cut=(False, False, True), layers=5, seed=3):
        generator, rows = np.random.default_rng(seed), []
        for sequence, (length, truncated) in enumerate(zip(lengths, cut)):
            for position in range(length + (not truncated)):
                rows.append(
                    {
                        "sequence": sequence,
                        "position": position,
                        "is_eos": position == length,
                        "truncated": truncated,
                        "group": f"g{sequence // 2}",
                    }
                )
        self.layers, self.tokens = layers, pd.DataFrame(rows)
        self.sequences = pd.DataFrame(
            {
                "sequence": range(len(lengths)),
                "length": lengths,
                "truncated": cut,
                "group": [f"g{s // 2}" for s in range(len(lengths))],
            }
        )
        cosine = generator.choice([0.1, 0.5, 0.9, 0.95], size=(len(rows), layers + 1))
        cosine[:, -1] = 1
        self.values = {"cosine": cosine.astype(np.float32), "entropy": generator.random((len(rows), layers + 1))}

    def __getitem__(self, name):
        return self.values[name]

    def statistic_rows(self):
        return ~self.tokens["is_eos"].to_numpy()


def curves(units=40, layers=6, seed=0, levels=None):
    generator = np.random.default_rng(seed)
    cosine = generator.choice(levels, (units, layers + 1)) if levels else generator.random((units, layers + 1))
    cosine[:, -1] = 1
    return cosine


def units_of(count=30, groups=7, seed=1):
    generator = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "row": range(count),
            "sequence": generator.integers(groups, size=count),
            "group": generator.integers(groups, size=count),
            "length": generator.integers(9, size=count),
            "mean_similarity": generator.random(count),
        }
    )


# ---- properties


@pytest.mark.parametrize("layers", [2, 3, 6])
@pytest.mark.parametrize("levels", [None, [0.2, 0.5, 0.9, 1.0]])
def test_properties_match_loops(layers, levels):
    cosine = curves(layers=layers, levels=levels)
    for i, row in enumerate(cosine.tolist()):
        between = row[1:layers]
        first = next(layer for layer in range(1, layers + 1) if row[layer] >= 0.9)
        assert difficulty.mean_similarity(cosine)[i] == pytest.approx(math.fsum(between) / len(between))
        assert difficulty.first_similar(cosine, 0.9)[i] == first
        assert difficulty.similar_states(cosine, 0.9)[i] == sum(value >= 0.9 for value in between)
        for start in range(layers):
            rises = all(row[layer] < row[layer + 1] for layer in range(start, layers))
            assert difficulty.increasing(cosine, start)[i] == rises


def test_last_layer_is_similar_whatever_the_rounding():
    assert difficulty.first_similar(np.array([[0.0, 0.3, 0.99999994]]), 1.0).tolist() == [2]


def test_similar_once_and_for_all_adds_up_as_in_the_paper():
    cosine = np.sort(curves(layers=24), axis=1)
    total = (difficulty.first_similar(cosine, 0.9) - 1) + difficulty.similar_states(cosine, 0.9)
    assert set(total) == {23}


def test_equal_neighbours_are_not_a_strict_increase():
    flat = np.ones((2, 4))
    assert not difficulty.increasing(flat, 2).any()
    assert difficulty.first_similar(flat, 0.9).tolist() == [1, 1]
    assert difficulty.similar_states(flat, 0.9).tolist() == [2, 2]


@pytest.mark.parametrize("depth, fourth, eighth", [(24, 4, 8), (12, 2, 4), (32, 5, 11), (9, 2, 3), (2, 0, 1)])
def test_same_share_of_depth(depth, fourth, eighth):
    assert (difficulty.same_share(4, depth), difficulty.same_share(8, depth), difficulty.same_share(0, depth)) == (
        fourth,
        eighth,
        0,
    )


@pytest.mark.parametrize("start", [-1, 6, 8])
def test_start_layer_beyond_the_model_is_refused(start):
    with pytest.raises(ValueError, match=f"start layer {start} .*0 to 5"):
        difficulty.increasing(curves(), start)


def test_one_layer_is_refused():
    with pytest.raises(ValueError, match="at least 2 layers"):
        difficulty.mean_similarity(np.ones((3, 2)))


# ---- split


@pytest.mark.parametrize("count, expected", [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (10, 4), (2500, 1000)])
def test_split_keeps_the_papers_share(count, expected):
    easy, difficult = difficulty.split(np.arange(count), 0.4)
    assert len(easy) == len(difficult) == expected
    assert easy.tolist() == list(range(count - 1, count - 1 - expected, -1))
    assert difficult.tolist() == list(range(expected))


def test_ties_fall_at_random_and_sides_never_meet():
    sides = [difficulty.split(np.ones(50), 0.5, seed) for seed in range(40)]
    assert all(not set(easy) & set(hard) for easy, hard in sides)
    assert np.mean([easy.mean() for easy, _ in sides]) == pytest.approx(24.5, abs=2)
    assert difficulty.split(np.ones(50), 0.5, 1)[0].tolist() == difficulty.split(np.ones(50), 0.5, 1)[0].tolist()


@pytest.mark.parametrize("share", [0, 0.51, -1, float("nan")])
def test_share_that_would_overlap_is_refused(share):
    with pytest.raises(ValueError, match="at most 0.5"):
        difficulty.split(np.arange(9), share)


def test_scores_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="1 scores are not finite"):
        difficulty.split([1, float("nan"), 3], 0.4)


# ---- comparison


def compare_loop(units, scores, share, seed, draws):
    """Every draw spelled out: repeat each row as often as its group was drawn, take both ends, average."""
    easy, hard = difficulty.split(scores, share, seed)
    labels, generator = sorted(set(units["group"])), np.random.default_rng(seed)
    order = np.lexsort((np.random.default_rng(seed).permutation(len(scores)), -np.asarray(scores)))
    names = [c for c in units.columns if c not in difficulty.LABELS]
    drawn = []
    for counts in generator.multinomial(len(labels), [1 / len(labels)] * len(labels), size=draws):
        rows = [i for i in order for _ in range(counts[labels.index(units["group"].iloc[i])])]
        end = int(share * len(rows) + 1e-9)
        drawn.append(
            [
                [np.mean([units[n].iloc[i] for i in side]) if side else math.nan for n in names]
                for side in (rows[:end], rows[len(rows) - end :])
            ]
        )
    means = [[np.mean([units[n].iloc[i] for i in side]) for n in names] for side in (easy, hard)]
    return np.array(means), np.array(drawn)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.5])
def test_compare_matches_loop(share, monkeypatch):
    units = units_of()
    monkeypatch.setattr(difficulty, "AT_ONCE", 7 * len(units))  # several chunks
    made = difficulty.compare(units, units["mean_similarity"], share, seed=5, draws=40)
    means, drawn = compare_loop(units, units["mean_similarity"].to_numpy(), share, 5, 40)
    assert made.names == ("length", "mean_similarity")
    np.testing.assert_allclose(made.means, means)
    np.testing.assert_allclose(made.drawn, drawn)
    easy, hard = difficulty.split(units["mean_similarity"], share, 5)
    assert made.units == len(easy)
    assert made.sequences == min(units["group"].iloc[easy].nunique(), units["group"].iloc[hard].nunique())
    np.testing.assert_allclose(made.deviations[0, 0], np.std([units["length"].iloc[i] for i in easy]))
    gap = difficulty.comparison([made], "length").difference
    assert gap.estimate == pytest.approx(means[0, 0] - means[1, 0])
    assert gap[1:3] == pytest.approx(np.nanquantile(drawn[:, 0, 0] - drawn[:, 1, 0], [0.025, 0.975]))


def test_tasks_count_alike_and_are_drawn_apart():
    first, second = units_of(40, 8, 1), units_of(12, 4, 2)
    made = [difficulty.compare(u, u["mean_similarity"], 0.4, [0, n], 50) for n, u in enumerate((first, second))]
    both = difficulty.comparison(made, "length")
    apart = [difficulty.comparison([m], "length") for m in made]
    assert both.difference.estimate == pytest.approx(np.mean([a.difference.estimate for a in apart]))
    gaps = np.mean([m.drawn[:, 0, 0] - m.drawn[:, 1, 0] for m in made], axis=0)
    assert both.difference[1:3] == pytest.approx(np.nanquantile(gaps, [0.025, 0.975]))
    assert both.difference.sequences == min(m.sequences for m in made)
    assert both.easy_deviation == pytest.approx(math.sqrt(np.mean([m.deviations[0, 0] ** 2 for m in made])))


def test_interval_covers_the_truth_when_the_cut_is_drawn_too():
    """Length is the score itself: the difference of two unembed means of a uniform is 0.6 for any number of groups."""
    hits = 0
    for seed in range(60):
        values = np.random.default_rng(seed).random(200)
        units = pd.DataFrame({"row": 0, "sequence": 0, "group": np.arange(200), "length": values})
        gap = difficulty.comparison([difficulty.compare(units, values, 0.4, seed, 300)], "length").difference
        hits += gap.low <= 0.6 <= gap.high
    assert hits >= 52


def test_nothing_to_compare_gives_nan_not_an_error():
    two = units_of(2)
    made = difficulty.compare(two, two["mean_similarity"], 0.4)
    assert made.units == made.sequences == 0
    for found in (
        difficulty.comparison([made], "length"),
        difficulty.comparison([], "length"),
        difficulty.comparison([difficulty.compare(units_of(), np.arange(30), 0.4)], "increasing_8"),
    ):
        assert math.isnan(found.difference.estimate) and found.difference.sequences == 0
    with_more = difficulty.comparison([made, difficulty.compare(units_of(), np.arange(30), 0.4)], "length")
    assert math.isfinite(with_more.difference.estimate)


def test_constant_cosine_shows_no_difference():
    units = units_of(60, 12).assign(length=3.0)
    gap = difficulty.comparison([difficulty.compare(units, np.full(60, 0.7), 0.4)], "length").difference
    assert gap[:3] == (0, 0, 0)


@pytest.mark.parametrize("value, expected", [(3.0, True), (0.0, True), (None, False)])
def test_one_value_everywhere_is_no_contrast(value, expected):
    units = units_of(60, 12)
    units["length"] = units["length"] if value is None else value
    made = [difficulty.compare(units, units["mean_similarity"], 0.4, n, 50) for n in range(2)]
    assert difficulty.without_contrast(difficulty.comparison(made, "length")) is expected
    assert not difficulty.without_contrast(difficulty.comparison([], "length"))


def test_words_follow_the_interval():
    value = Interval(2.0, 1.0, 4.0, 9)
    assert word(value, "longer", "shorter") == "longer"
    assert word(value.scaled(-1), "longer", "shorter") == "shorter"
    assert word(value._replace(low=-1.0), "longer", "shorter") == "not clearly longer or shorter"
    assert word(NOTHING, "longer", "shorter") == "not measured against"


# ---- tables of units


def test_prefixes_are_tokens_but_the_end_and_count_what_was_decoded():
    made = FakeTrace()
    units = difficulty.prefixes(made, 0.9)
    kept = [i for i, end in enumerate(made.tokens["is_eos"]) if not end]
    assert units["row"].tolist() == kept
    assert units["length"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert units["truncated"].tolist() == [False] * 4 + [True] * 6
    for _, unit in units.iterrows():
        row = made["cosine"][unit["row"]].astype(float)
        assert unit["mean_similarity"] == pytest.approx(row[1:5].mean())
        assert unit["entropy"] == made["entropy"][unit["row"], -1]
        first = int(unit["first_similar"])
        assert unit["stays"] == all(value >= 0.9 for value in row[first:])
        assert unit["increasing_2"] == (row[2] < row[3] < row[4] < row[5])
    assert "increasing_4" in units and "increasing_5" not in units


def test_outputs_are_whole_and_finished():
    made = FakeTrace()
    units, tokens = difficulty.outputs(made, 0.9), difficulty.prefixes(made, 0.9)
    assert units["sequence"].tolist() == [0]  # 1 is empty, 2 was cut
    assert units["length"].tolist() == [4] and units["group"].tolist() == ["g0"]
    own = tokens[tokens["sequence"] == 0]
    assert units["first_similar"].iloc[0] == pytest.approx(own["first_similar"].mean())
    assert len(difficulty.outputs(FakeTrace(cut=(True, True, True)), 0.9)) == 0


def test_trace_without_any_token_gives_empty_tables():
    made = FakeTrace(lengths=(0, 0), cut=(False, False))
    assert len(difficulty.prefixes(made, 0.9)) == len(difficulty.outputs(made, 0.9)) == 0
    units = difficulty.prefixes(made, 0.9)
    assert difficulty.compare(units, units["mean_similarity"], 0.4).units == 0


def test_examples_come_from_different_sequences_and_from_their_side():
    units = pd.DataFrame({"sequence": [0, 0, 0, 0, 1, 1, 2, 2]})
    side = np.array([0, 1, 2, 3, 4, 6])
    chosen = difficulty.examples(units, side, 3)
    assert len(set(chosen)) == 3 and set(chosen) <= set(side.tolist())
    assert units["sequence"].iloc[chosen].nunique() == 3
    assert difficulty.examples(units, side[:2], 5) in ([0, 1], [1, 0])
    assert difficulty.examples(units, side[:0], 3) == []


# ---- plots


def test_plots_draw_with_and_without_units():
    cosine, empty = curves(20), curves(0)
    drawn = [
        figures_difficulty.curves_figure({"a": {"easy": cosine, "difficult": empty}, "b": {}}, 0.9),
        figures_difficulty.examples_figure(cosine[:2], ["E1", "D1"], ["easy", "difficult"], 0.9),
        figures_difficulty.examples_figure(empty, [], [], 0.9),
        figures_difficulty.length_figure({"t": dict.fromkeys(figures_difficulty.UNITS, NOTHING)}),
        figures_difficulty.length_figure({"t": {unit: Interval(1, 2, 3, 4) for unit in figures_difficulty.UNITS}}),
    ]
    for fig in drawn:
        fig.canvas.draw()
        assert fig.get_figwidth() <= 7.2
        plt.close(fig)


def test_increasing_figure_sets_published_points_at_their_share_of_depth():
    frame = pd.DataFrame({"start": [0, 1, 2], "estimate": [0.1, 0.5, 1], "low": [0, 0.4, 1], "high": [0.2, 0.6, 1]})
    published = pd.DataFrame({"share": [0, 1 / 6, 1 / 3], "easy": [0.24, 0.78, 0.85], "difficult": [0.03, 0.97, 0.98]})
    fig = figures_difficulty.increasing_figure({"easy": frame, "difficult": frame}, 12, published)
    hollow = [line for line in fig.axes[0].lines if line.get_markerfacecolor() == "none"]
    assert [line.get_xdata().tolist() for line in hollow] == [[0, 2, 4]] * 2
    fig.canvas.draw()
    plt.close(fig)


# ---- a study's tasks


def planted(easy_are_longer):
    """A study of eighty outputs with ten tokens each: later tokens are similar sooner, or earlier ones are."""
    made = FakeTrace(lengths=(10,) * 80, cut=(False,) * 80, layers=12)
    made.tokens["group"] = [f"g{s}" for s in made.tokens["sequence"]]
    made.sequences["group"] = [f"g{s}" for s in range(80)]
    made.sequences["length"] = 10 + np.arange(80) % 5
    place = made.tokens["position"].to_numpy() + made.tokens["sequence"].to_numpy() % 5 / 10
    ease = (place if easy_are_longer else place.max() - place)[:, None]
    cosine = np.linspace(0, 1, 13) ** (1 / (0.2 + ease))  # rises at every layer
    cosine[place >= 5, 6] = cosine[place >= 5, 5]  # but for a step of half the prefixes
    made.values = {"cosine": cosine, "entropy": np.repeat(ease.max() - ease, 13, axis=1)}
    study = SimpleNamespace(
        traces={"task": made},
        learnt={"task": True},
        learnt_tasks=["task"],
        labels={"task": "task"},
        parameters=SimpleNamespace(share=0.4, threshold=0.9, seed=0),
        model=SimpleNamespace(layers=12, kind="causal", name="planted"),
    )
    study.judge = lambda claim_id, make: Study.judge(study, claim_id, make)
    return study


@pytest.mark.parametrize("easy_are_longer", [True, False])
def test_planted_units_bring_each_verdict(easy_are_longer):
    splits = difficulty_splits.split_study(planted(easy_are_longer))
    got = {verdict.claim.id: verdict.verdict for verdict in difficulty_splits.verdicts(splits)}
    sides = (claims.HOLDS, claims.FAILS) if easy_are_longer else (claims.FAILS, claims.HOLDS)
    assert (got["M-D1"], got["M-D2"]) == (claims.HOLDS, claims.HOLDS)
    assert (got["M-D3"], got["M-D4"]) == (sides[0], sides[0])
    assert (got["M-D5"], got["M-D6"]) == (sides[1], sides[0])  # what is long has a step that does not rise
    assert got["M-D7"] == claims.UNTESTABLE  # after layer 8 all prefixes rise
    splits.study.model.kind = "masked"
    reasons = {verdict.reason for verdict in difficulty_splits.verdicts(splits)}
    assert reasons == {"a masked model decodes no prefix"}


def test_statements_and_tables_agree_with_the_comparisons():
    splits = difficulty_splits.split_study(planted(True))
    said = difficulty_splits.statements(splits)
    gap = splits.by_similarity.over("first_similar").difference
    assert said["later"].estimate == pytest.approx(-gap.estimate) and said["later_word"] == "later than"
    assert said["kept"] == pytest.approx(100)  # entropy was planted to sort as similarity does
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
    assert tables.output_table(splits)["on each side"].tolist() == [32]
    shares = difficulty_splits.other_shares(splits)
    assert tables.share_table(shares)["share of each end (%)"].tolist() == [1, 10, 25, 40]
    assert difficulty_splits.share_statements(shares)["length at share 0.4"] == said["length"]
    assert list(tables.length_differences(splits)) == ["task", "mean of learnt tasks"]
    rising = splits.rising()["easy"]
    assert rising["estimate"].iloc[0] < rising["estimate"].iloc[-1] == 1


def test_example_prefixes_show_what_was_decoded():
    study = planted(True)
    made = study.traces["task"]
    made.sequences["output"] = [f"{s}: " + "x" * 300 for s in range(80)]
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
