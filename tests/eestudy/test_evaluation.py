"""What gates do on finished traces, and what outputs are worth, against plain loops and whole runs."""

from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import oracle
import pandas as pd
import pytest
import torch
import traces
from families import FAMILIES, oracle_of
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

import eelib
from eelib.exits.exit_rule import ExitRule
from eelib.exits.trace_scores import Tokens, decide, scores
from eelib.tasks.metrics import scores_of
from eelib.tasks.task import kind_named
from eestudy import evaluation
from eestudy.decoding import nats, without_references
from eestudy.exits.gates import FEATURES, columns, fit
from eestudy.exits.gates import halves as halves_of
from eestudy.exits.sweeps import sequential_sweep
from eestudy.gates import halves, pieces_of, sweep_of
from eestudy.parameters import Parameters
from eestudy.statistics import interval_of
from eestudy.study import quality_interval
from eestudy.words import CLASSES, PieceTable

LAYERS, OUTPUTS, END = 5, 24, 1
PLAIN = ("confidence", "patience", "fixed", "oracle")


class SimpleStudy:
    """As much of a study as gates need."""

    def __init__(self, model, tasks, made, parameters):
        self.model, self.tasks, self.traces, self.parameters = model, tasks, made, parameters


@pytest.fixture(scope="module")
def study(model_of):
    """Two tasks of the same texts, one scored by BLEU, one by F1."""
    real, texts = model_of("llama"), [f"text {number}" for number in range(OUTPUTS)]
    known = [["of the words"] if number % 2 else ["a test over"] for number in range(OUTPUTS)]
    plain = replace(eelib.Task.from_prompts(texts, references=known), groups=[f"g{n // 2}" for n in range(OUTPUTS)])
    tasks = {"one": plain, "two": replace(plain, kind="question_answering")}
    same = {n: getattr(real, n) for n in ("tokenizer", "vocab_size", "unembed", "adapter", "labels", "translators")}
    blocks = [real.blocks[0]] * LAYERS
    model = SimpleNamespace(**same, name="tiny", hash="w", dtype="float32", layers=LAYERS, blocks=blocks, eos_ids={END})
    made = {name: traces.Random(task, seed, LAYERS, END) for seed, (name, task) in enumerate(tasks.items())}
    return SimpleStudy(model, tasks, made, Parameters({"seed": 3, "max_new_tokens": 8}))


@pytest.fixture(scope="module")
def curves(study):
    return evaluation.curves(study, PLAIN, 12)


def plain_exit(trace, gate, row, threshold):
    """Where one token exits, by the gate's definition."""
    top1, probability = trace["top1"][row], trace["probability"][row]
    first = next((n for n in range(1, LAYERS) if top1[n] == trace.tokens["token_id"][row]), LAYERS)
    equal = 0
    if gate == "oracle":
        return first if first <= threshold else 1
    for layer in range(1, LAYERS):
        equal = equal + 1 if layer > 1 and top1[layer] == top1[layer - 1] else 0
        scores = {"confidence": probability[layer], "patience": equal, "fixed": layer}
        if scores[gate] > threshold or (gate != "confidence" and scores[gate] == threshold):
            return layer
    return LAYERS


def plain_cost(model, gate, layer):
    """Multiplications with blocks, and with the head wherever it is read."""
    block = sum(p.numel() for p in model.blocks[0].parameters() if p.dim() > 1)
    head = sum(p.numel() for p in model.unembed.parameters() if p.dim() > 1)
    reads = 1 if gate in ("fixed", "oracle") else layer
    return (layer * block + reads * head) / (LAYERS * block + head)


@pytest.mark.parametrize("gate", PLAIN)
def test_sums_and_tokens_are_those_of_plain_loops(study, curves, gate):
    names = ["sequence", "position", "token_id", "group", "source", "exit_layer", "agrees", "cost"]
    costs = [plain_cost(study.model, gate, layer) for layer in range(LAYERS + 1)]
    for task, trace in study.traces.items():
        part = curves[(curves["gate"] == gate) & (curves["task"] == task)]
        thresholds = sorted(part["threshold"].unique())
        for threshold in {thresholds[0], thresholds[len(thresholds) // 2], thresholds[-1]}:
            layers = [plain_exit(trace, gate, row, threshold) for row in trace.tokens.index]
            agrees = trace["top1"][trace.tokens.index, layers] == trace.tokens["token_id"]
            rows = trace.tokens.assign(exit_layer=layers, agrees=agrees, cost=np.take(costs, layers), source="two")
            counted = rows[~rows["is_eos"]]
            chosen = pd.DataFrame([{"task": task, "gate": gate, "threshold": threshold, "source": "two"}])
            tokens = evaluation.exits([study], chosen)
            expected = counted[names].reset_index(drop=True)
            pd.testing.assert_frame_equal(tokens[names], expected, check_dtype=False)
            sums = {"tokens": ("agrees", "size"), "layers": ("exit_layer", "sum"), "agreed": ("agrees", "sum")}
            sums = counted.groupby("group").agg(**sums)
            losses = (~agrees).groupby([rows["group"], rows["sequence"]]).mean().groupby("group")
            sums = sums.assign(sequences=losses.size(), loss=losses.sum())
            found = part[part["threshold"] == threshold].set_index("group")
            np.testing.assert_allclose(found.loc[sums.index, sums.columns].astype(float), sums.astype(float))
            assert (tokens["half"] == tokens["group"].map(found["half"])).all()


def test_a_masked_model_reads_the_head_at_every_position(study):
    """As a model that writes does; a classifier reads it once for a text."""
    model = SimpleNamespace(**vars(study.model) | {"adapter": SimpleNamespace(writes=False)})
    masked = SimpleStudy(model, study.tasks, study.traces, study.parameters)
    found = evaluation.exits(masked, pd.DataFrame([{"task": "one", "gate": "confidence", "threshold": 0.5}]))
    costs = [plain_cost(model, "confidence", layer) for layer in found["exit_layer"]]
    np.testing.assert_allclose(found["cost"].astype(float), costs)


def test_agreement_is_read_off_the_curve_of_each_task(curves):
    part = curves[curves["gate"] == "confidence"]
    sums = part.groupby(["task", "threshold"])[["layers", "agreed", "tokens"]].sum()
    lines = [sums.loc[task].assign(x=lambda t: t["layers"] / t["tokens"]) for task in ("one", "two")]
    expected = np.mean([np.interp(3.3, line["x"], line["agreed"] / line["tokens"]) for line in lines])
    (found,) = interval_of(evaluation.wide(part), lambda t: evaluation.agreement_at(t, [3.3]))
    assert found.estimate == pytest.approx(expected) and found.low < expected < found.high
    assert np.isnan(evaluation.agreement_at(evaluation.wide(part).sum().to_frame().T, [0.5])).all()


def test_scores_are_those_of_the_texts_that_exits_emit(study):
    found = evaluation.quality(study, ("confidence",), 4)
    for (task, threshold), rows in found.groupby(["task", "threshold"]):
        trace, metric = study.traces[task], {"one": "BLEU", "two": "F1"}[task]
        assert len(rows) == OUTPUTS
        layers = [plain_exit(trace, "confidence", row, threshold) for row in trace.tokens.index]
        for side, emitted in (("early", layers), ("full", LAYERS)):
            ids = pd.Series(trace["top1"][trace.tokens.index, emitted]).groupby(trace.tokens["sequence"]).agg(list)
            kept = [whole[: (whole + [END]).index(END)] for whole in ids]
            outputs = [study.model.tokenizer.decode(whole) if whole else "" for whole in kept]
            expected = scores_of(kind_named(study.tasks[task].kind).item_stats(study.tasks[task], outputs))[metric]
            assert evaluation.score(rows[evaluation.SUMS].sum().to_frame().T, side) == pytest.approx(expected)
            with_interval = quality_interval(study.tasks[task], outputs)[metric]
            assert with_interval.estimate == pytest.approx(expected) and with_interval.groups == OUTPUTS / 2
    kept = found[np.isinf(found["threshold"]) & (found["threshold"] > 0)]
    early, full = (kept[names].to_numpy() for names in evaluation.SIDES.values())
    assert len(kept) == 2 * OUTPUTS and (early == full).all()


def test_the_halves_do_not_depend_on_what_a_model_wrote(study):
    """Another version of the model whose outputs to one group end at once has the same halves, of the other groups."""
    kept = {name: copy(trace) for name, trace in study.traces.items()}
    for trace in kept.values():
        trace.tokens = trace.tokens[trace.tokens["group"] != "g3"].reset_index(drop=True)
    other = halves(SimpleStudy(study.model, study.tasks, kept, study.parameters))
    for task, side in halves(study).items():
        assert side[(study.traces[task].tokens["group"] != "g3").to_numpy()].tolist() == other[task].tolist()


def test_a_fitted_gate_is_fitted_to_the_half_to_calibrate_on(study):
    trace, first = study.traces["one"], halves(study)["one"]
    sweep = sweep_of(study, "one", "risk")
    assert torch.equal(sweep.found.score, scores(sweep.rule, trace).score)
    assert sweep.rule.gate == fit("risk", trace, first & trace.statistic_rows(), pieces_of(study))


def test_free_is_named_by_its_exit_and_loses_nothing_at_the_last(study):
    found = evaluation.curves(study, ["free"]).groupby("threshold")[["tokens", "layers", "agreed"]].sum()
    assert list(found.index) == [1, 2, 4, 5] and (found["agreed"].iloc[:3] < found["tokens"].iloc[:3]).all()
    assert tuple(found.loc[5]) == pytest.approx(found.loc[5, "tokens"] * np.array([1, 5, 1]))


# Fitted gates against scikit-learn; and how tokens exit by them, one decision at a time

TABLE = PieceTable(torch.arange(1000, dtype=torch.int64).remainder(5).add(1).to(torch.uint8))


@pytest.fixture
def trace(made):
    return made("llama")


@pytest.mark.parametrize("name", ["position_margin", "risk"])
def test_scores_are_scikit_learns_and_risk_is_calibrated_on_the_other_half(name, trace):
    rows = np.ones(len(trace), dtype=bool)
    gate, (first, second) = fit(name, trace, rows, TABLE), halves_of(trace, rows) if name == "risk" else (rows, rows)
    assert (gate.steps is None) == (first is second) and ((first ^ second).all() or first is second)
    tokens, before = Tokens(trace), torch.tensor(trace.exit_layer("first")).roll(1)
    before[tokens.positions == 0] = 0
    scores_of_layers, raw, agrees = [], [], []
    for layer in range(1, trace.layers):
        seen = tokens.output(layer, torch.arange(len(before)), before)
        signs, right = columns(FEATURES[name], seen, TABLE).numpy(), trace["top1"][:, layer] == tokens.final.numpy()
        assert signs.shape == (len(trace), 3 + len(CLASSES) if name == "position_margin" else 4)
        assert 0 < right[first].sum() < first.sum()
        theirs = LogisticRegression(tol=1e-10, max_iter=10_000).fit(signs[first].astype(float), right[first])
        raw.append(theirs.predict_proba(signs)[:, 1][second])
        scores_of_layers.append(gate.score(seen, {}).numpy()[second])
        agrees.append(right[second])
    found, raw, agrees = map(np.concatenate, (scores_of_layers, raw, agrees))
    if gate.steps:  # then their mean is the share that agrees, in the rows that the steps were fitted to
        raw = IsotonicRegression(y_min=0, y_max=1).fit(raw, agrees.astype(float)).predict(raw)
        assert found.mean() == pytest.approx(agrees.mean(), abs=1e-3)
    np.testing.assert_allclose(found, raw, atol=1e-3 if gate.steps else 1e-5)


@pytest.mark.parametrize("name", ["position_aware", "position_margin"])
def test_tokens_in_turn_exit_as_they_are_decided_one_by_one(name, trace):
    sweep = sequential_sweep(ExitRule(fit(name, trace, np.ones(len(trace), dtype=bool), TABLE)), trace)
    turns = np.array(sweep.values(None, 10**6)[1:-1])  # scores of tokens: take values between two that lie apart
    between = (turns[1:] + turns[:-1])[np.diff(turns) > 1e-4] / 2
    values = [-np.inf, *between[:: len(between) // 6].tolist(), np.inf]
    made = list(sweep.exits(values))
    for value, exits in zip(values, made):
        told, found = decide(sweep.rule_at(value), trace)
        assert torch.equal(exits, told) and torch.equal(sweep.tokens, found.tokens)
    assert len({tuple(exits.tolist()) for exits in made}) > 3


# Without references: the full model's own probability of a text


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_nats_are_those_of_a_float64_run(name, model_of):
    model, output = model_of(name), [7, 40, 9, 7]
    (prompt,) = model.encode(["The small dog"])
    states = oracle.oracle_run(oracle_of(name), FAMILIES[name], prompt, output)["states"][:, -1]
    logs = FAMILIES[name].unembed(oracle_of(name), states).log_softmax(-1)
    exact = -float(logs.gather(1, torch.tensor(output)[:, None]).sum())
    assert nats(model, prompt, output) == pytest.approx(exact, rel=1e-4) and nats(model, prompt, []) == 0


def test_full_depths_own_outputs_lose_nothing_and_others_do(trace, model_of):
    decoded = SimpleNamespace(model=model_of("llama"), tasks={"made": traces.TASK}, traces={"made": trace})
    ids = trace.tokens.groupby("sequence")["token_id"].agg(list)
    outputs = trace.sequences[["sequence", "group", "output"]].assign(same=True, full=lambda t: t["output"])
    outputs["token_ids"] = outputs["sequence"].map(ids)
    found = without_references(decoded, "made", outputs)
    assert found["nats"].estimate == pytest.approx(-np.log(trace["final_probability"][:, -1]).mean(), rel=1e-4)
    assert found["more"].estimate == 0 and found["perplexity"] == found["same"] == 1 and found["chrF"] == 100
    other = outputs.assign(same=False, token_ids=[[5, 9]] * len(outputs), output="x")
    found = without_references(decoded, "made", pd.concat([other[:1], outputs[1:]]))
    assert found["perplexity"] == pytest.approx(np.exp(found["more"].estimate)) and found["more"].estimate > 0
    assert found["same"] == pytest.approx(1 - 1 / len(outputs)) and found["chrF"] < 100
