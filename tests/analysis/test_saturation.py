"""Exit layers and their summaries against plain loops."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from study_made import Kept, made_study

from eelib.tracing.trace import DEFINITIONS, exit_layer
from eestudy.old.analysis import saturation as s

LAYERS = st.integers(1, 7)


@st.composite
def top1s(draw):
    """Top-1 ids [tokens, L+1] from a small vocabulary; the last column is what was emitted."""
    depth, rows = draw(LAYERS), draw(st.integers(1, 20))
    return np.array(
        draw(
            st.lists(st.lists(st.integers(0, 3), min_size=depth + 1, max_size=depth + 1), min_size=rows, max_size=rows)
        )
    )


def first_loop(row):
    return next(layer for layer in range(1, len(row)) if row[layer] == row[-1])


def stable_loop(row):
    layer = len(row) - 1
    while layer > 1 and row[layer - 1] == row[-1]:
        layer -= 1
    return layer


@settings(max_examples=200, deadline=None)
@given(top1s())
def test_exit_layers_are_the_loops(top1):
    first, stable = (exit_layer(top1, top1[:, -1], d) for d in DEFINITIONS)
    assert first.tolist() == [first_loop(row) for row in top1]
    assert stable.tolist() == [stable_loop(row) for row in top1]
    assert (1 <= first).all() and (first <= stable).all() and (stable <= top1.shape[1] - 1).all()


def test_layer_0_never_counts():
    """The embeddings may agree with the answer: the exit is at layer 1 at the earliest."""
    assert exit_layer(np.array([[7, 3, 7], [7, 7, 7]]), np.array([7, 7]), "first").tolist() == [2, 1]
    assert exit_layer(np.array([[7, 7, 3, 7]]), np.array([7]), "first").tolist() == [1]
    assert exit_layer(np.array([[7, 7, 3, 7]]), np.array([7]), "stable").tolist() == [3]


def test_unknown_definition(one_line):
    one_line(ValueError, ("'last'", "first, stable"), lambda: exit_layer(np.zeros((1, 2)), np.zeros(1), "last"))


def fake(top1, ends=(), groups=None):
    """What the analyses read of a trace: one sequence of tokens per group."""
    top1 = np.asarray(top1)
    groups = np.arange(len(top1)) if groups is None else np.asarray(groups)
    tokens = pd.DataFrame(
        {"sequence": groups, "group": groups, "token_id": top1[:, -1], "is_eos": np.isin(np.arange(len(top1)), ends)}
    )
    tokens["position"] = tokens.groupby("sequence").cumcount()
    values = {
        "top1": top1,
        "final_rank": (top1 != top1[:, -1:]) * 4 + 1,
        "topk_ids": np.repeat(top1[..., None], 10, -1),
        "topk_probability": np.full((*top1.shape, 10), 0.1),
    }

    class Fake(SimpleNamespace):
        def __getitem__(self, name):
            return values[name]

        def statistic_rows(self):
            return ~self.tokens["is_eos"].to_numpy()

        def exit_layer(self, definition):
            return exit_layer(top1, top1[:, -1], definition)

    return Fake(tokens=tokens, layers=top1.shape[1] - 1)


@settings(max_examples=25, deadline=None)
@given(top1s())
def test_early_shares_fall_with_m(top1):
    """Asking for more layers early never finds more tokens; m = 1 is perc."""
    trace = fake(top1)
    shares = s.early_intervals(trace, "first")["estimate"].tolist()
    assert len(shares) == trace.layers - 1 and shares == sorted(shares, reverse=True)
    layers = trace.exit_layer("first")
    assert shares == pytest.approx([np.mean(layers <= trace.layers - m) for m in range(1, trace.layers)])
    if shares:
        assert shares[0] == pytest.approx(s.summary(trace, "first")["perc"].estimate)


def test_summary_leaves_end_tokens_out():
    trace = fake([[0, 5, 5, 5], [0, 1, 6, 6], [0, 1, 2, 1]], ends=[2])
    inside, with_eos = s.summary(trace, "stable"), s.summary(trace, "stable", with_eos=True)
    assert (inside["avg"].estimate, inside["perc"].estimate, inside["avg"].sequences) == (1.5, 1.0, 2)
    assert with_eos["avg"].estimate == pytest.approx(2.0) and with_eos["perc"].estimate == pytest.approx(2 / 3)
    nothing = s.summary(fake([[0, 1, 1]], ends=[0]), "first")
    assert np.isnan(nothing["avg"].estimate) and nothing["perc"].sequences == 0
    assert s.early_intervals(fake([[0, 1, 1]], ends=[0]), "first").empty


def share(top1, final, seed=0):
    return s.chance_matches(top1, final, seed).mean()


def test_chance_share():
    """Constant targets always match; targets that no inner layer names never do; else what shuffling gives."""
    same = np.full((9, 4), 3)
    assert share(same, same[:, -1]) == 1.0
    never = np.c_[np.zeros((9, 3)), np.arange(1, 10)]
    assert share(never, never[:, -1]) == 0.0
    rng = np.random.default_rng(1)
    top1 = rng.integers(0, 4, (4000, 3))
    assert share(top1, top1[:, -1]) == pytest.approx(0.25, abs=0.02)
    assert share(top1, top1[:, -1], seed=3) == share(top1, top1[:, -1], seed=3)


def test_embeddings_do_not_count_as_chance():
    top1 = np.c_[np.full(9, 3), np.zeros(9), np.full(9, 3)]
    assert share(top1, top1[:, -1]) == 0.0


def test_lens_grid():
    trace = fake([[0, 5, 4, 5], [0, 1, 6, 6], [9, 9, 9, 9]], groups=[0, 0, 1])
    grid = s.lens_grid(trace, 0, k=2)
    assert grid["position"].tolist() == [0, 0, 0, 1, 1, 1] and grid["layer"].tolist() == [1, 2, 3] * 2
    assert [ids[0] for ids in grid["topk_ids"]] == [5, 4, 5, 1, 6, 6] and {len(i) for i in grid["topk_ids"]} == {2}
    assert grid["first"].tolist() == [1] * 3 + [2] * 3 and grid["stable"].tolist() == [3] * 3 + [2] * 3


def test_rank_by_layer():
    trace = fake([[0, 5, 5], [0, 1, 6], [0, 7, 8]], ends=[2])
    expected = np.quantile([[5, 1, 1], [5, 5, 1]], [0.25, 0.5, 0.75], axis=0)
    np.testing.assert_array_equal(s.rank_by_layer(trace), expected)


def test_example_sequence(one_line):
    table = pd.DataFrame({"sequence": [0, 1, 2, 4], "truncated": [True, False, False, False], "length": [10, 3, 9, 12]})
    trace = SimpleNamespace(sequences=table)
    assert s.example_sequence(trace) == 2 and s.example_sequence(trace, 4) == 4
    assert s.example_sequence(SimpleNamespace(sequences=table[:2])) == 1
    one_line(ValueError, ("example_sequence 3", "0 to 4"), lambda: s.example_sequence(trace, 3))


def test_above_chance_is_the_exit_minus_its_own_chance():
    rng = np.random.default_rng(1)
    top1 = rng.integers(0, 5, (60, 7))
    final = top1[:, -1].copy()
    tokens = pd.DataFrame({"token_id": final, "group": np.repeat(range(20), 3)})

    class Made(dict):
        layers, statistic_rows = 6, staticmethod(lambda: np.ones(60, bool))
        exit_layer = staticmethod(lambda definition: exit_layer(top1, final, definition))

    trace = Made(top1=top1)
    trace.tokens = tokens
    values, groups = s.above_chance(trace)
    early = [any(row[1:-1] == row[-1]) for row in top1]
    np.testing.assert_allclose(values, early - s.chance_matches(top1, final))
    assert groups.tolist() == tokens["group"].tolist()


def test_shares_by_layer_average_tasks_without_weights():
    tasks = {
        "long": (np.array([1.0] * 30 + [2.0] * 10), np.arange(40)),
        "short": (np.array([2.0, 2.0]), np.array([0, 1])),
    }
    table = s.distribution(tasks, 2)
    assert table["estimate"].tolist() == pytest.approx([0.375, 0.625])
    assert s.settle_share(tasks, 1, 2).estimate == 1.0


# ---- a page


def planted(layer, sequences=40, tokens=5, depth=16):
    """A trace whose tokens all leave at `layer`, "first" and "stable" alike."""
    emitted = np.arange(sequences * tokens)
    top1 = np.where(np.arange(depth + 1) >= layer, emitted[:, None], -1)
    trace = fake(top1, groups=np.repeat(np.arange(sequences), tokens))
    trace.manifest = {"mismatches": 0, "rows": len(emitted), "skipped": 1}
    trace.sequences = pd.DataFrame({"truncated": np.zeros(sequences, bool)})
    return trace


def page(into, out_of, learnt=True):
    return made_study({"translation/de-en": planted(into), "translation/en-de": planted(out_of)}, learnt, layers=16)


def test_ps_table_is_read_at_the_same_share_of_the_depth():
    """Ten of 32 layers are five of 16; five are two and a half, and a half is one."""
    table = s.early_table(page(12, 11))
    found = {m: part["layers"].tolist() for m, part in table.groupby("layers_early")}
    assert found == {1: [1], 5: [2, 2.5, 3], 10: [5], 15: [7, 7.5, 8], 20: [10]}
    assert [share.estimate for share in table["first"]] == [1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    figures = s.early_figures(table)
    assert len(figures) == 10 and figures["early_10_of_32_stable"].estimate == 0.5
    shown = s.shown_early_table(table, 16)
    assert shown['here, "first" (%)'][4].estimate == 50
    layers = ["1 (rounded up)", "2 (rounded down)", "2.5 (interpolated)", "3 (rounded up)", "5"]
    assert shown["here: layers early of 16"].tolist()[:5] == layers


def test_the_interpolated_share_of_the_table_is_the_one_that_is_judged():
    made = {f"translation/{pair}": planted(last, depth=12) for pair, last in (("de-en", 9), ("en-de", 8))}
    study = made_study(made, True, layers=12)
    table = s.early_table(study).query("layers_early == 10").set_index("how")["first"]
    below, between, above = (table[how].estimate for how in (s.DOWN, s.BETWEEN, s.UP))
    assert above < between < below and between == pytest.approx(0.25 * below + 0.75 * above)
    assert s.a_third_early(study).interval == table[s.BETWEEN]


def test_roundings_that_would_be_a_whole_number_are_one_row():
    assert s.around(0.25, 12) == [(3, "")] and s.around(0.3, 10) == [(3, "")]
    assert s.around(10 / 32, 12) == [(3, s.DOWN), (3.75, s.BETWEEN), (4, s.UP)] and s.around(0.01, 12) == [(1, s.UP)]
    assert not any(share.known for share in s.early_table(page(12, 11, learnt=False))["first"])


def test_averages_and_checks_for_the_prose():
    study = page(12, 16)
    found = s.overall(study)
    assert found["perc_first"].estimate == 50 and found["avg_stable"].estimate == 14
    assert 0 < found["chance"] < 1  # percent: now and then a shuffled target is the token's own
    told = s.about_the_run(study)
    assert (told["learnt_tasks"], told["all_tasks"], told["rows"], told["skipped"]) == (2, 2, 400, 2)
    assert s.last_two_layers(study).estimate == 0.5
    nothing = page(12, 16, learnt=False)
    assert not s.overall(nothing)["avg_first"].known and np.isnan(s.overall(nothing)["chance"])
    assert not s.last_two_layers(nothing).known and s.about_the_run(nothing)["learnt_tasks"] == 0


def test_distributions_are_of_all_tasks_where_none_is_learnt():
    """A task without a token has no part in them, and a page without a token has none."""
    study = page(12, 16, learnt=False)
    assert s.distributions(study)["first"].set_index("layer")["estimate"][[11, 12, 16]].tolist() == [0, 0.5, 0.5]
    ended = fake([[0, 1, 1]], ends=[0])
    study.traces["translation/en-de"] = ended
    assert s.distributions(study)["stable"].set_index("layer")["estimate"][12] == 1
    study.traces["translation/de-en"] = ended
    assert s.distributions(study) == {} and s.ranks(study) == {}


def test_top_from():
    study = page(12, 16)
    rank = np.full((3, 17), 1.0)
    late = rank.copy()
    late[1, :7] = 11
    assert s.top_from(study, {"translation/de-en": rank, "translation/en-de": late}) == 7
    assert s.top_from(study, dict.fromkeys(study.traces, rank)) == 0
    assert np.isnan(s.top_from(page(12, 16, learnt=False), {}))


def test_tables_by_task():
    study = page(12, 16)
    results, table = Kept(study), s.task_table(study)
    s.keep(results, table)
    assert results.tasks["translation/de-en", "avg_first_with_EOS"].estimate == 12
    assert results.tasks["translation/en-de", "perc_stable"].estimate == 0
    shown = s.shown_task_table(table, study)
    assert shown["perc first (%)"][0].estimate == 100 and shown["quality"].tolist() == ["BLEU 20.0"] * 2
    assert shown["judged"].tolist() == ["yes"] * 2


@pytest.mark.parametrize(
    "into, out_of, claims_that_hold, undecided",
    [(8, 8, ["P-S1", "P-S2", "P-S3", "P-S5"], ["P-S4"]), (16, 12, ["P-S5"], []), (12, 16, ["P-S4", "P-S5"], [])],
)
def test_verdicts(into, out_of, claims_that_hold, undecided):
    """Two directions with all shares alike may still differ a little: no finite number of texts rules it out."""
    study = made_study(
        {
            "translation/de-en": planted(into),
            "translation/en-de": planted(out_of),
            "question_answering/passages": planted(max(into, out_of)),
        },
        layers=16,
    )
    found = {verdict.claim.id: verdict.verdict for verdict in s.verdicts(study)}
    assert [claim for claim, verdict in found.items() if verdict == "holds"] == claims_that_hold
    assert [claim for claim, verdict in found.items() if verdict == "undecided"] == undecided
    assert set(found.values()) <= {"holds", "does not hold", "undecided"} and len(found) == 5


def test_one_task_is_no_spread_and_no_contrast():
    study = made_study({"translation/de-en": planted(3)}, layers=16)
    by_claim = {verdict.claim.id: verdict for verdict in s.verdicts(study)}
    assert by_claim["P-S1"].verdict == "holds"
    assert by_claim["P-S3"].reason == "needs judged tasks of at least two kinds"
    assert by_claim["P-S4"].reason == "needs at least one judged task into English and one out of it"


def test_directions_of_translation_are_one_kind():
    by_claim = {verdict.claim.id: verdict for verdict in s.verdicts(page(8, 12))}
    assert by_claim["P-S3"].reason == "needs judged tasks of at least two kinds"


def test_a_third_between_two_layers_is_interpolated():
    """10/32 of 12 is 3.75: all exit 3 layers early, none 4; a quarter counts, and the roundings disagree."""
    study = made_study({"translation/de-en": planted(9, depth=12)}, layers=12)
    found = s.a_third_early(study)
    assert found.interval.estimate == pytest.approx(0.25) and found.verdict == "undecided"
    assert found.reason == "the two roundings of the depth disagree"
