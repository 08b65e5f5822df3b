"""The page on M's confidence measures: made-up curves and qualities whose shares are known by hand."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from exits_made import made_quality

from eelib.common.errors import NotEstimable
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.trace_scores import Curve, Scores
from eestudy.claims import published
from eestudy.old.analysis import mee, mee_tables
from eestudy.old.study.claims import untestable

GROUPS = [f"g{i:02d}" for i in range(40)]
TOKENS = 30


def line(mean_layers, agreement, name="made"):
    """A curve of 4 layers over 40 alike groups, each point with tokens that left at layer 1 or 4."""
    four = np.round((np.array(mean_layers) - 1) * TOKENS / 3).astype(int)
    left = np.zeros((len(GROUPS), len(four), 4))
    left[:, :, 3], left[:, :, 0] = four, TOKENS - four
    agreed = np.tile(np.array(agreement) * TOKENS, (len(GROUPS), 1))
    tokens = np.full(len(GROUPS), TOKENS)
    return Curve(name, np.arange(len(four), dtype=float), GROUPS, tokens, left, agreed, np.arange(1.0, 5))


def test_the_lead_is_over_the_layers_that_all_gates_go_through():
    along = {
        "monotone": {"task": line([2.5, 4], [1.0, 1.0])},
        "softmax_difference": {"task": line([1, 4], [0.4, 1.0])},
        "state_saturation": {"task": line([1, 4], [0.7, 1.0])},
    }
    assert mee.span(along, list(along)) == pytest.approx((2.5, 4))
    found = mee.lead(along, ["monotone"], ["softmax_difference", "state_saturation"])
    assert found.estimate == pytest.approx(1 - (0.85 + 0.925) / 2) and found.sequences == 40
    assert found.low == pytest.approx(found.estimate)  # the groups are alike
    swapped = mee.lead(along, ["softmax_difference", "state_saturation"], ["monotone"])
    assert swapped.estimate == pytest.approx(-found.estimate)


def test_nothing_is_compared_where_no_layers_are_shared():
    along = {"monotone": {"task": line([4], [1.0])}, "fixed": {"task": line([1, 4], [0.4, 1.0])}}
    with pytest.raises(NotEstimable, match="no mean exit layers that all"):
        mee.lead(along, ["monotone"], ["fixed"])
    with pytest.raises(NotEstimable, match="no task"):
        mee.span({"monotone": {}}, ["monotone"])


def test_all_six_are_compared_only_where_all_trained_gates_are_there():
    rules = {name: ExitRule(gate_named(name)) for name in mee.plain_gates()}
    assert mee.compared(rules) == (("monotone",), ("softmax_difference", "state_saturation"))
    trained = dict.fromkeys(("classifier", "three_states"), rules["fixed"])
    assert mee.compared(rules | trained) == mee.compared(rules)
    assert mee.compared(rules | trained | {"lstm": rules["fixed"]}) == (mee.OF_M, mee.OF_CALM)


def test_trained_gates_are_found_missing_or_refused_in_words(model_of, tmp_path):
    model = model_of("gpt2")
    place = tmp_path / model.name
    place.mkdir()
    (place / "lstm.safetensors").write_bytes(b"nothing")
    rules, missing = mee.learned_rules(model, str(tmp_path), 1)
    assert not rules and missing["classifier"] == missing["three_states"] == ""
    assert "lstm.safetensors is damaged" in missing["lstm"] and str(tmp_path) not in missing["lstm"]


def test_m_s_own_numbers_as_shares():
    table = mee_tables.published_shares().set_index(["task", "gate"])
    assert set(table.index.levels[1]) == {*mee.OF_M, *mee.OF_CALM}
    squad = table.loc[("SQuAD", "monotone")]
    assert squad["kept"] == pytest.approx(88.56 / 88.84) and squad["layers"] == pytest.approx(11.8 / 24)
    assert table["kept"].between(0, 1).all() and np.isnan(table.loc[("SQuAD", "lstm"), "layers"])
    assert set(published("M-blog")["task"]) == {task for task in mee.TASKS_OF_M.values() if task}


def test_both_columns_stand_side_by_side_and_unknown_ones_stay_empty():
    side = SimpleNamespace(kinds={"question_answering": ["q"]}, depth=4, seed=0)
    here = {gate: {"q": made_quality(layers=(2,), scores=(40,))} for gate in mee.OF_CALM}
    here |= {gate: {} for gate in mee.OF_M}
    side.kinds = {}
    assert not mee_tables.beside_m(side, here)["quality (%)"].map(lambda interval: interval.known).any()
    side.kinds = {"question_answering": ["q"]}
    here |= dict.fromkeys(mee.OF_M, here["classifier"])
    table = mee_tables.beside_m(side, here)
    answers = table[table["task"] == "question answering"]
    assert len(answers) == 6 and (answers["layers (%)"] == 50).all()
    assert [interval.estimate for interval in answers["quality (%)"]] == pytest.approx([50] * 6)
    assert "translation" not in set(table["task"])  # neither here nor there


def test_texts_cut_short_are_those_with_an_early_end_token():
    """Of two texts of three tokens, leaving at layer 1 ends the second at once; leaving at the last ends neither."""
    end, tokens = 9, np.array([[5, 5], [5, 5], [9, 9], [9, 5], [5, 5], [9, 9]])
    frame = pd.DataFrame(
        {
            "sequence": [0, 0, 0, 1, 1, 1],
            "group": ["a"] * 3 + ["b"] * 3,
            "position": [0, 1, 2] * 2,
            "is_eos": [False, False, True] * 2,
        }
    )
    found = Scores(torch.tensor([[1.0, 2.0]]).repeat(6, 1), torch.tensor(tokens))
    study = SimpleNamespace(
        traces={"task": SimpleNamespace(tokens=frame)},
        model=SimpleNamespace(eos_ids={end}),
        scores=lambda rule, task: found,
    )
    side = SimpleNamespace(study=study, rules={"fixed": ExitRule(gate_named("fixed"))}, tasks=["task"], seed=0)
    along = {"fixed": {"task": SimpleNamespace(values=np.array([1.0, 2.0]), mean_layers=np.array([1.0, 2.0]))}}
    assert mee.cut_short(side, along, "fixed", 1.1).estimate == 0.5
    assert mee.cut_short(side, along, "fixed", 1.9).estimate == 0


def test_time_is_judged_whatever_the_training():
    """The other two claims ask for M's objective, which this page's only model has not had."""
    asked = {}

    def judge(claim_id, make, requirement_met, tasks):
        asked[claim_id] = requirement_met, tasks
        return untestable(claim_id, "as the study says")

    study = SimpleNamespace(judge=judge, model=SimpleNamespace(name="m"))
    side = SimpleNamespace(study=study, missing={}, tasks=["a", "b"], seed=0)
    mee.verdicts(SimpleNamespace(judged=side, own=side, weighted=False), {}, None)
    assert asked == {"M-E1": (False, 2), "M-E2": (True, 1), "M-E3": (False, 2)}
