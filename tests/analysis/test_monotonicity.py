"""Monotonicity: every statistic against a plain loop in float64, its properties, and whom a verdict is about."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import traces
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from eestudy import claims as papers
from eestudy.old.analysis import monotonicity as mono
from eestudy.old.analysis import monotonicity_tables as tables
from eestudy.old.statistics.interval import Interval
from eestudy.old.study.study import Study
from eestudy.parameters import Parameters

LAYERS = 6
LOW, HIGH = 0.91, 0.95  # both above M's 0.9
scores_of = arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(2, 9)), elements=st.floats(0, 1, width=32))


class Random(traces.Made):
    """A trace of random readouts: sequences of four tokens, the last of each the end token; three ids, many ties."""

    layers, task_name = LAYERS, "translation/de-en"

    def __init__(self, seed=0, sequences=150):
        rng = np.random.default_rng(seed)
        count = 4 * sequences
        sequence = np.repeat(np.arange(sequences), 4)
        self.tokens = pd.DataFrame(
            {
                "sequence": sequence,
                "group": [f"g{i}" for i in sequence],
                "position": np.arange(count) % 4,
                "token_id": rng.integers(3, size=count),
                "is_eos": np.arange(count) % 4 == 3,
            }
        )
        self.sequences = pd.DataFrame({"sequence": range(sequences), "length": 3, "truncated": False})
        shape = (count, LAYERS + 1)
        top1 = rng.integers(3, size=shape)
        top1[:, -1] = self.tokens["token_id"]
        ids = (top1[..., None] + np.arange(4)) % 4
        self.readouts = {
            "top1": top1,
            "probability": rng.choice([0.2, 0.5, LOW, HIGH], size=shape).astype(np.float32),
            "final_probability": rng.choice([0.1, 0.4, 0.6], size=shape).astype(np.float32),
            "topk_ids": ids,
            "topk_probability": np.broadcast_to([0.5, 0.3, 0.1, 0.1], ids.shape),
        }


def rows(trace):
    """Each token that counts: its readouts as plain lists of floats, and its group."""
    for row in np.flatnonzero(trace.statistic_rows()):
        yield (
            trace["top1"][row].tolist(),
            {name: [float(value) for value in trace[name][row]] for name in mono.SCORES},
            trace.tokens["group"][row],
        )


def same(found, wanted):
    values, groups = found
    assert values.dtype == np.float64 and values == pytest.approx(wanted, abs=1e-12)
    assert len(groups) == len(values)


def stays(top1, layer):
    return all(one == top1[-1] for one in top1[layer:])


@pytest.mark.parametrize("share, lower, weight", [(2 / 6, 2, 0.0), (1.0, 6, 0.0), (0.25, 1, 0.5), (1 / 12, 0, 0.5)])
def test_settled_is_interpolated_between_layers(share, lower, weight):
    trace = Random()
    wanted = []
    for top1, _, _ in rows(trace):
        after = [0.0 if layer == 0 else float(stays(top1, layer)) for layer in range(LAYERS + 1)]
        wanted.append((1 - weight) * after[lower] + weight * after[min(lower + 1, LAYERS)])
    same(mono.settled(trace, share), wanted)


@pytest.mark.parametrize("name", mono.SCORES)
def test_rising_and_falling_count_steps_between_blocks(name):
    trace, rising, never, at_three = Random(), [], [], []
    for _, scores, _ in rows(trace):
        pairs = [(scores[name][layer], scores[name][layer + 1]) for layer in range(1, LAYERS)]
        rising.append(sum(after > before for before, after in pairs) / len(pairs))
        never.append(float(not any(after < before for before, after in pairs)))
        at_three.append(float(scores[name][3] > scores[name][2]))
    same(mono.rising(trace, name), rising)
    same(mono.never_falling(trace, name), never)
    same(mono.rising_to(trace, name, 3), at_three)


def rule_loop(scores, in_a_row):
    for layer in range(in_a_row, LAYERS):
        last = scores[layer - in_a_row + 1 : layer + 1]
        if last[-1] > 0.9 and all(a < b for a, b in pairwise(last)):
            return layer
    return 0


@pytest.mark.parametrize("in_a_row", [1, 3])
def test_the_rule_and_what_comes_after_it(in_a_row):
    trace, met, later, at_the_end, groups = Random(), [], [], [], []
    for top1, scores, group in rows(trace):
        layer = rule_loop(scores["probability"], in_a_row)
        met.append(layer)
        if layer:
            later.append(float(any(one != top1[layer] for one in top1[layer + 1 :])))
            at_the_end.append(float(top1[-1] != top1[layer]))
            groups.append(group)
    assert 5 < len(later) < len(met) and 0 < np.mean(at_the_end) < np.mean(later) < 1
    found = mono.changed_later(trace, in_a_row=in_a_row)
    same(found, later)
    assert list(found[1]) == groups
    same(mono.changed_later(trace, at_the_end=True, in_a_row=in_a_row), at_the_end)
    if in_a_row == mono.IN_A_ROW:
        same(mono.ruled(trace), [float(layer > 0) for layer in met])


@pytest.mark.parametrize("layer", [1, 3, LAYERS - 1])
def test_drops_after_an_exit(layer):
    trace = Random()
    scores = [found["final_probability"] for _, found, _ in rows(trace)]
    same(mono.drop_after(trace, layer), [one[layer] - min(one[layer + 1 :]) for one in scores])
    same(mono.next_step(trace, layer), [one[layer] - one[layer + 1] for one in scores])
    same(mono.falls_at(trace, layer), [float(one[layer + 1] < one[layer]) for one in scores])


@settings(max_examples=60, deadline=None)
@given(scores_of)
def test_the_rule_never_stops_at_the_last_layer_nor_below_its_threshold(scores):
    depth = scores.shape[1] - 1
    found = mono.rule_layer(scores)
    assert ((found == 0) | ((found >= 3) & (found < depth))).all()
    for one, layer in zip(scores, found):
        if layer:
            assert one[layer] > 0.9 and one[layer - 2] < one[layer - 1] < one[layer]
    assert (mono.rule_layer(np.minimum(scores, 0.9)) == 0).all()
    one_score = mono.rule_layer(scores, 1)
    assert (one_score[found > 0] > 0).all() and (one_score <= np.where(found > 0, found, depth)).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1))
def test_more_layers_settle_more_tokens(seed, one, other):
    trace = Random(seed, sequences=3)
    less, more = (mono.settled(trace, share)[0] for share in sorted((one, other)))
    assert (less <= more + 1e-12).all() and (0 <= less).all()
    assert (mono.settled(trace, 1.0)[0] == 1).all()


def test_a_model_of_one_layer_has_no_steps():
    trace = Random(sequences=2)
    trace.layers = 1
    trace.readouts = {name: values[:, :2] for name, values in trace.readouts.items()}
    assert not len(mono.rising(trace, "probability")[0]) and (mono.never_falling(trace, "probability")[0] == 1).all()
    assert not mono.ruled(trace)[0].any()


# ---- pages


def study(name, seed=0, learnt=True, **about):
    """A study of one made trace."""
    made = Study.__new__(Study)
    asked = {"seed": 0, "tasks": "translation/de-en", "model": name, "weighted": "named-weighted", "distilled": ""}
    made.parameters = Parameters(asked)
    made.model = SimpleNamespace(**{"name": name, "hash": name, "layers": LAYERS} | about)
    made.traces = {"translation/de-en": Random(seed)}
    made.learnt = {"translation/de-en": learnt}
    return made


def page(*families, first_exit=0, **roles):
    return mono.Page(families, roles, first_exit)


def test_claims_are_judged_on_the_models_of_their_objective():
    own, plain, weighted, free = (study(name, seed) for seed, name in enumerate(("own", "plain", "weighted", "free")))
    found = {
        v.claim.id: v
        for v in mono.verdicts(page((own,), (plain, weighted, free), weighted=weighted, distilled=free, first_exit=3))
    }
    assert list(found) == [f"M-M{number}" for number in range(1, 6)]
    assert [v.models for v in found.values()] == ["weighted"] * 3 + ["free", "weighted"]
    trace = weighted.traces["translation/de-en"]
    plains = plain.traces["translation/de-en"]
    means = [mono.settled(trace, 1 / 6)[0].mean(), mono.settled(trace, 1 / 3)[0].mean()]
    means += [means[0] - mono.settled(plains, 1 / 6)[0].mean()]
    means += [mono.drop_after(free.traces["translation/de-en"], 3)[0].mean(), mono.changed_later(trace)[0].mean()]
    assert [v.interval.estimate for v in found.values()] == pytest.approx(means)
    assert found["M-M1"].verdict == papers.FAILS and found["M-M5"].verdict == papers.FAILS


def test_a_model_alone_says_what_it_lacks_and_is_judged_on_its_own_answers():
    found = mono.verdicts(page((study("own"),)))
    assert [v.verdict for v in found[:4]] == [papers.UNTESTABLE] * 4
    assert "weighted names named-weighted, which is not on this page" in found[0].reason
    assert "parameter distilled names none" in found[3].reason and "layerwise distillation" in found[3].reason
    assert found[4].models == "" and found[4].verdict == papers.FAILS


def test_a_weighted_model_without_its_plain_one_or_with_itself():
    weighted = study("weighted")
    alone = mono.verdicts(page((weighted,), weighted=weighted))
    assert alone[0].verdict == papers.FAILS and alone[2].verdict == papers.UNTESTABLE
    assert "trained plainly" in alone[2].reason
    twin = study("weighted", seed=1)
    assert mono.verdicts(page((twin, weighted), weighted=weighted))[2].verdict == papers.UNTESTABLE


def test_nothing_learnt_is_judged_nowhere_and_shown_over_all_tasks():
    own = study("own", learnt=False)
    made = page((own,), weighted=own)
    assert all(v.verdict == papers.UNTESTABLE for v in mono.verdicts(made))
    assert mono.mean(own, mono.ruled).known and made.label(own) == "own (not learnt)"
    assert "own: no task is learnt" in tables.learnt_note(made)


def test_objectives_and_names():
    own, after, free = study("own"), study("after"), study("free")
    again = study("own")
    made = page((own, after), (again, free), distilled=free, first_exit=2)
    assert [made.objective(one) for one in made.studies] == ["plain", "", "plain", "distilled"]
    assert made.plain(after) is own and made.plain(own) is None and made.plain(free) is again
    assert made.label(own) == "own on translation/de-en" and made.label(free) == "free"
    assert set(tables.drops(made)) == {"own on translation/de-en", "free"} and tables.drops(page((own,))) == {}
    assert tables.exits(made) == {"free": 2 / LAYERS}


def test_curves_are_means_over_tasks_by_layer():
    own = study("own")
    trace = own.traces["translation/de-en"]
    settled_by_layer = mono.settled_curve(own)
    assert list(settled_by_layer["layer"]) == list(range(1, LAYERS + 1)) and settled_by_layer["estimate"].iloc[-1] == 1
    wanted = [np.mean([stays(top1, layer) for top1, _, _ in rows(trace)]) for layer in range(1, LAYERS + 1)]
    assert settled_by_layer["estimate"].tolist() == pytest.approx(wanted)
    confidence = mono.confidence_curve(own)
    values = np.array([scores["final_probability"] for _, scores, _ in rows(trace)])[:, 1:]
    assert confidence["estimate"].to_numpy() == pytest.approx(values.mean(axis=0))
    assert confidence["deviation"].to_numpy() == pytest.approx(values.std(axis=0))
    assert list(mono.rising_curve(own, "probability")["layer"]) == list(range(2, LAYERS + 1))


def test_three_tokens_are_shown_the_first_the_middle_and_the_last_to_settle():
    trace = Random(sequences=2)
    trace.readouts["top1"][:3] = trace.tokens["token_id"][:3].to_numpy()[:, None]
    trace.readouts["top1"][0, 4] = 9  # settles at 5
    trace.readouts["top1"][1, 2] = 9  # at 3, the token after it at 1
    shown = mono.example_tokens(trace, 0)
    assert list(shown.groupby("position")["stable"].first()) == [5, 3, 1]
    assert all(len(ids) == mono.TOP for ids in shown["topk_ids"]) and len(shown) == 3 * LAYERS
    assert mono.example_tokens(trace, 99).empty


def test_published_curves_have_both_readings():
    curve = mono.published_curve("distilled")
    assert len(curve) == 11 and curve["high"].to_numpy() == pytest.approx((np.arange(11) + 1) / 12)
    assert (curve["high"] - curve["low"]).to_numpy() == pytest.approx(1 / 12)
    assert tables.in_m(curve, 6) == "0.48 or 0.61" and tables.in_m(mono.published_curve("plain"), 6) == "0.27 or 0.55"
    assert mono.published_curve("").empty
    stars = mono.published_settled()
    assert stars["depth"].tolist() == pytest.approx([1 / 6, 1 / 3]) and stars["unchanged"].tolist() == [0.75, 0.9]


def test_a_share_is_told_with_its_interval():
    assert tables.told(Interval(0.5, 0.25, 0.75, 9)) == "50.0% (95% interval 25.0 to 75.0)"
