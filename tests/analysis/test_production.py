"""The page on production: budgets, streams and stalls by hand, verdicts on planted tokens, and real tiny models."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import studies_made
import torch
from exits_made import Made

from eelib.common.errors import NotEstimable
from eelib.exits.calibration import Choice
from eelib.exits.exit_rule import Constant, ExitRule
from eelib.exits.gates.gate import NO_EXIT
from eelib.exits.gates.readout import Margin
from eelib.exits.trace_scores import Scores
from eestudy.old.analysis import production as pr
from eestudy.old.analysis import production_budgets as budgeted
from eestudy.old.analysis import production_service as service
from eestudy.old.analysis import production_tables as tables
from eestudy.old.figures import production as figures
from eestudy.parameters import Parameters
from eestudy.words import PieceTable

KINDS = ("punctuation", "word start")


def tokens(depths, wrong=(0.0, 0.0), groups=40, size=10):
    """Tokens of each kind in each group, leaving at a depth, a share of them wrong."""
    rows = [
        {"sequence": group, "group": f"g{group}", "kind": kind, "said": kind, "exit_layer": depth, "early": depth < 10}
        | {"wrong": (group * size + number) % 100 < 100 * share}
        for group in range(groups)
        for kind, depth, share in zip(KINDS, depths, wrong)
        for number in range(size)
    ]
    frame = pd.DataFrame(rows)
    return frame.assign(changed=frame.groupby("sequence")["wrong"].transform("any"))


def test_lowest_threshold_is_that_of_a_search_by_hand():
    random = np.random.default_rng(3)
    scores = torch.tensor(random.random((300, 4))).float()
    scores[:40] = NO_EXIT
    wrong = torch.tensor(random.random((300, 4)) > scores.numpy() + 0.2)

    def share(value):
        first = [next((layer for layer in range(4) if row[layer] > value), None) for row in scores.tolist()]
        left = [bool(wrong[i, layer]) for i, layer in enumerate(first) if layer is not None]
        return sum(left) / len(left) if len(left) >= pr.LEAST else 0.0

    found = budgeted.lowest_threshold(scores, wrong, 0.1)
    values = np.unique(np.quantile(scores[scores > NO_EXIT].numpy(), np.linspace(0, 1, budgeted.GRID)))
    assert share(found) <= 0.1 and share(values[np.searchsorted(values, found) - 1]) > 0.1
    assert budgeted.lowest_threshold(scores, torch.ones_like(wrong), 0.1) == np.inf
    assert budgeted.lowest_threshold(scores[:40], wrong[:40], 0.1) == np.inf


def test_punctuation_against_the_rest():
    """4 of 10 layers against 9: half of the depth apart; the other way round the claim fails."""
    early = pr.punctuation_earlier({"t": tokens((4, 9)), "u": tokens((4, 9))}, 10)
    assert early[:3] == pytest.approx((-0.5, -0.5, -0.5)) and early.sequences == 40
    assert pr.punctuation_earlier({"t": tokens((9, 4))}, 10).estimate == pytest.approx(0.5)


def test_punctuation_is_judged_where_some_of_it_could_leave():
    """A task without a token that leaves, without punctuation, or of few texts beside a large one says nothing."""
    none = tokens((4, 9)).assign(kind="digits")
    left = {"t": tokens((4, 9)), "deep": tokens((10, 10)), "plain": none, "small": tokens((9, 4), groups=8)}
    assert list(pr.with_punctuation(left)) == ["t"]
    with pytest.raises(NotEstimable, match="in no task tokens leave of which 30 are punctuation"):
        pr.punctuation_earlier(pr.with_punctuation({"deep": left["deep"], "plain": none}), 10)


def made(kinds, closed=()):
    """Forty outputs of one-token groups for each pair of tasks, and who serves them; `closed` have no threshold."""
    study = SimpleNamespace(tasks={task: SimpleNamespace(kind=kind) for task, kind in kinds.items()})
    study.parameters = SimpleNamespace(seed=0)
    choices = {task: Choice(np.inf if task in closed else 0.5, "", 40, 1) for task in kinds}
    return pr.Served(study, ExitRule(Margin()), list(kinds), {}, choices, None)


def test_a_threshold_elsewhere_against_its_own():
    """Of ordered pairs of two kinds: 20% and 40% more on a, 10% on b, 0 on c; b and c are of one kind."""
    served = made({"a": "translation", "b": "news", "c": "news"})
    shares = {("a", "b"): 0.2, ("a", "c"): 0.4, ("b", "a"): 0.1, ("b", "c"): 0.9}
    found = {
        (task, of): tokens((4, 9), 2 * [shares.get((task, of), 0.0)], groups=100)
        for task in served.tasks
        for of in served.tasks
    }
    more = pr.more_elsewhere(served, found)
    assert pr.unsafe_elsewhere(more).estimate == pytest.approx((0.2 + 0.4 + 0.1 + 0.0) / 4)
    closed = made({"a": "translation", "b": "news", "c": "news"}, closed=("c",))
    assert closed.rule_of("c") is None and closed.rule_of("a").threshold == Constant(0.5)
    lent = pr.unsafe_elsewhere(pr.more_elsewhere(closed, found))
    assert lent.estimate == pytest.approx((0.2 + 0.1 + 0.0) / 3)
    with pytest.raises(NotEstimable, match="of another kind"):
        pr.unsafe_elsewhere(pr.more_elsewhere(made({"a": "news"}), found))


def test_kinds_are_told_apart():
    table = pr.kinds_table({"t": tokens((4, 9), (0.1, 0.02))}).set_index("kind")
    assert table.loc["punctuation", "exit_layer"].estimate == 4 and table.loc["all", "exit_layer"].estimate == 6.5
    assert table.loc["punctuation", "wrong"].estimate == pytest.approx(0.1)
    assert not table.loc["digits", "wrong"].known
    figures.kinds_figure({"one": table.reset_index(), "two": table.reset_index()}, 10)


def test_the_risk_of_a_class_is_that_of_what_leaves_as_it():
    """What full depth has as punctuation and leaves as digits counts for digits; a text of two tasks is one."""
    frame = tokens((4, 9), (0.1, 0.02))
    both = budgeted.wrong_of_early({"t": frame, "u": frame}, None)
    assert both.estimate == pytest.approx(0.06) and both.sequences == 40
    frame.loc[frame["wrong"] & (frame["kind"] == "punctuation"), "said"] = "digits"
    assert budgeted.wrong_of_early({"t": frame}, "digits").estimate == 1
    assert budgeted.wrong_of_early({"t": frame}, "punctuation").estimate == 0
    with pytest.raises(NotEstimable, match="fewer than 30"):
        budgeted.wrong_of_early({"t": tokens((10, 10))}, None)


def test_an_output_that_misses_its_end_is_changed():
    """The end token says something else at layer 1 in every second output; no token that is counted does."""
    trace = Made()
    final = trace.tokens["token_id"].to_numpy()
    trace.top1[:] = final[:, None]
    missed = (trace.tokens["is_eos"] & (trace.tokens["sequence"] % 2 == 1)).to_numpy()
    trace.top1[missed, 1] = final[missed] + 1
    found = Scores(torch.ones(len(final), trace.layers), torch.tensor(trace.top1[:, 1:]))
    study = SimpleNamespace(traces={"t": trace}, scores=lambda rule, task: found)
    sides = {"t": (np.zeros(len(final), bool), np.ones(len(final), bool))}
    served = pr.Served(study, ExitRule(Margin()), ["t"], sides, {}, PieceTable(torch.ones(9, dtype=torch.uint8)))
    frame = pr.leaving(served, "t", ExitRule(Margin(), 0.5))
    assert frame["early"].all() and not frame["wrong"].any()
    assert pr.outputs_of(frame)["changed"].tolist() == [False, True] * 6


def test_a_stall_is_the_difference_of_two_speeds():
    rows = [
        {"batch": number, "hard": hard, "early": early, "plain": 2.0}
        for number in range(30)
        for hard, early in ((0, 1.0), (1, 1.6), (4, 2.0))
    ]
    times = pd.DataFrame(rows)
    assert service.speed_with(times, 0).estimate == pytest.approx(2.0)
    assert service.stalled(times)[:3] == pytest.approx((-0.75, -0.75, -0.75))
    figures.batches_figure(
        pd.DataFrame({"hard": h, "speed": service.speed_with(times, h)} for h in (0, 1, 4)), service.ROWS
    )


def test_an_alarm_comes_sooner_the_more_is_checked(monkeypatch):
    monkeypatch.setattr(service, "STREAMS", 40)
    monkeypatch.setattr(service, "CALM", 300)
    calm, changed = np.array([1.0] + [0.0] * 19), np.array([1.0, 0.0])
    found = service.watched(service.Change("a", "b", 0.1, calm, changed), 0.01)
    assert (found["delay"].diff().iloc[1:] < 0).all() and (found["low"] <= found["delay"]).all()
    assert (found["false"] <= 0.05).all() and (found["missed"] == 0).all()
    assert (found["late"] > 2 * found["delay"]).all()  # calm outputs have cost its capital
    never = service.watched(service.Change("a", "a", 0.1, calm, calm), 0.01)
    assert np.isinf(never["delay"]).all() and (never["missed"] > 0.9).all()
    figures.delays_figure(found)


def test_a_service_is_changed_for_the_task_that_loses_most(monkeypatch):
    served = made({"a": "translation", "b": "news", "c": "news"}, closed=("c",))
    shares = {("b", "a"): 0.004, ("c", "a"): 0.02, ("a", "c"): 1.0}
    found = {
        (task, of): tokens((4, 9), 2 * [shares.get((task, of), 0.0)], groups=100)
        for task in served.tasks
        for of in served.tasks
    }
    monkeypatch.setattr(service, "promised", lambda served, of: 0.01)
    change = service.worst_change(served, found)
    assert (change.of, change.task, change.risk) == ("a", "c", 0.01)
    assert change.changed.mean() == pytest.approx(0.1) and change.calm.mean() == 0
    monkeypatch.setattr(service, "promised", lambda served, of: 0.5)
    with pytest.raises(NotEstimable, match="loses more than is promised"):
        service.worst_change(served, found)


def test_rejected_drafts():
    found = service.rejected(pd.DataFrame({"drafted": [10, 10, 1], "accepted": [8, 6, 1]}), ["a", "a", "b"])
    assert found.estimate == pytest.approx(6 / 21) and found.sequences == 2 and 0 <= found.low <= found.high <= 1
    with pytest.raises(NotEstimable, match="nothing was drafted"):
        service.rejected(pd.DataFrame({"drafted": [0, 0], "accepted": [0, 0]}), ["a", "b"])


def parameters(tmp_path, folder_of, **others):
    values = studies_made.values_in(tmp_path, folder_of)
    more = {"after": "", "gate": "confidence", "kept": 0.9, "budget": 0.1, "never": "digits", "epsilon": 0.3}
    last = {"delta": 0.2, "alpha": 0.05, "sequences": 3, "batches": 2, "few_exits": 1, "structured": ""}
    return Parameters(values | more | last | {"structured_task": "structured/orders"} | others)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_a_page_of_a_real_model(tmp_path, folder_of, family, monkeypatch):
    """Nothing is learnt, so nothing is judged; everything is still shown, and a token's layer is the rule's."""
    monkeypatch.setattr(service, "STREAMS", 4)
    page = tables.open_page(parameters(tmp_path, folder_of, model=str(folder_of(family))))
    assert [found.verdict for found in tables.verdicts(page)] == ["not testable here"] * 4
    assert "no model that writes structured output is named" in tables.structured_in_words(page)
    for make in (tables.task_table, tables.budget_table, tables.carried_table):
        assert len(make(page))
    served, task = page.served, page.served.tasks[0]
    rule = ExitRule(served.rule.gate, 0.0)
    assert len(tables.decoded_table(page)) == 2 * len(service.first_tasks(served))
    frame = pr.leaving(served, task, rule)
    trace = served.study.traces[task]
    counted = served.sides[task][1] & trace.statistic_rows()
    assert (frame["exit_layer"] == 1).all() and len(frame) == counted.sum()
    top = trace["top1"][:, 1] != trace.tokens["token_id"]
    assert frame["wrong"].tolist() == top[counted].tolist()
    assert not pr.leaving(served, task, None)["early"].any()


@pytest.mark.parametrize(
    "given, message",
    [
        ({"gate": "no_such"}, "gate 'no_such' is not known"),
        ({"gate": "state_saturation"}, "looks at states"),
        ({"gate": "patience"}, "has counts for scores"),
        ({"structured": "pocket-llama-json", "structured_task": "translation/de-en"}, "must be a structured task"),
        ({"never": "digits, names"}, "'names' is not known; allowed: word start, continuation, punctuation, digits"),
        ({"model": "bert_labels"}, "writes no text"),
    ],
)
def test_bad_input_is_one_line(tmp_path, folder_of, given, message):
    studies_made.check_refused(tables.open_page, partial(parameters, tmp_path, folder_of), folder_of, given, message)
