"""Scores of emitted texts against the same texts scored one by one; full depth's are the trace's own outputs."""

import numpy as np
import pytest
import torch
import traces
from exits_made import Made

import eelib
from eelib.common.errors import InputError
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.trace_scores import exits_of, rule_at
from eelib.tasks.task import Task
from eestudy.exits.quality import Scorer, quality, text_of
from eestudy.exits.sweeps import ThresholdSweep
from eestudy.exits.task_quality import quality_difference, quality_interval

RULE = ExitRule(gate_named("confidence"))


def spoken(ids):
    return " ".join(f"w{token}" for token in ids)


@pytest.fixture
def answered():
    """(way, trace, task) of questions whose references are what full depth says, but for one word."""
    trace = Made()
    outputs = [spoken(part) for part in trace.tokens["token_id"].to_numpy().reshape(-1, 10)]
    groups = [f"g{item // 2}" for item in range(len(outputs))]
    task = Task("made", "question_answering", outputs, [[f"{text} more"] for text in outputs], outputs, groups)
    return ThresholdSweep(RULE, trace, trace.scores(RULE)), trace, task


def test_scores_are_those_of_the_texts_that_the_exits_emit(answered):
    way, trace, task = answered
    values = [0.2, 0.5, 0.9, np.inf]
    made = quality(way, trace, Scorer(task, spoken), values)
    full = task.prompts
    positions = torch.tensor(trace.tokens["position"].to_numpy())
    for at, value in enumerate(values):
        ids = way.found.emitted(exits_of(rule_at(RULE, value), way.found, positions)).numpy().reshape(-1, 10)
        outputs = [spoken(part) for part in ids]
        assert made.scores[at] == pytest.approx(task.quality(outputs)["F1"])
        assert made.interval(at) == pytest.approx(quality_interval(task, outputs)["F1"])
        assert made.gain(at) == pytest.approx(quality_difference(task, full, outputs)["F1"])
        alone = [task.pick([row]).quality([output])["F1"] for row, output in enumerate(outputs)]
        before = [task.pick([row]).quality([output])["F1"] for row, output in enumerate(full)]
        lost = ((np.array(before) - alone) / 100).clip(0).reshape(-1, 2).mean(axis=1)  # two items a group
        np.testing.assert_allclose(made.losses()[np.argsort([f"g{i}" for i in range(6)]), at], lost)
    assert made.name == "F1" and made.full_score == pytest.approx(task.quality(full)["F1"]) == made.scores[-1]
    assert made.kept(3)[:3] == (1, 1, 1) and made.kept(0).estimate == pytest.approx(made.scores[0] / made.full_score)
    assert made.mean_layers[-1] == trace.layers and (np.diff(made.mean_layers) > 0).all()


def test_only_the_sequences_asked_for_are_scored_and_each_text_once(answered):
    way, trace, task = answered
    said = []

    def text(ids):
        said.append(tuple(ids))
        return spoken(ids)

    made = quality(way, trace, Scorer(task, text), sequences=np.array([3, 4, 7]))
    assert made.groups == ["g1", "g2", "g3"] and made.sums.shape[1] == 3 and len(made.values) <= 12
    assert made.full_score == pytest.approx(task.pick([3, 4, 7]).quality([task.prompts[i] for i in (3, 4, 7)])["F1"])
    said.clear()
    quality(way, trace, Scorer(task, text), values=[0.5, 0.5, 0.5], sequences=np.array([3]))
    assert len(said) == len(set(said)) == 2  # full depth's and one more


def test_nothing_to_score_against_is_one_line(answered, one_line):
    way, trace, _ = answered
    task = eelib.Task.from_prompts([str(row) for row in range(12)])
    one_line(InputError, "no references", lambda: quality(way, trace, Scorer(task, spoken)))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_full_depths_texts_are_the_traces_outputs(name, made, model_of):
    trace, text = made(name), text_of(model_of(name))
    outputs = trace.tokens.groupby("sequence")["token_id"].agg(list)
    assert [text(ids) for ids in outputs] == trace.sequences["output"].tolist()
    first = outputs.iloc[0]
    assert text([*first[:2], *sorted(model_of(name).eos_ids)[:1], *first]) == text(first[:2])


def test_a_classifiers_text_is_its_label(model_of, tmp_path):
    model = model_of("bert_labels")
    trace, text = traces.make(model, tmp_path), text_of(model)
    assert [text([token]) for token in trace.tokens["token_id"]] == trace.sequences["output"].tolist()
