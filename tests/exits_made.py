"""A trace of random tokens and scores, as much of one as curves and what is calibrated on them read."""

import json

import numpy as np
import pandas as pd
import torch
import traces
from safetensors import safe_open

from eelib.exits.decoding.gate_runner import read_logits
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import NO_EXIT, LayerOutput
from eelib.exits.gates.state import TRAINED
from eelib.exits.policy import Policy, head_hash
from eelib.exits.trace_scores import Scores, score_layers
from eelib.tracing.decode import states_of

LAYERS, TOKENS = 6, 120


def between(scores, share=0.5):
    """A threshold above about `share` of the scores, in the widest gap there, so that no rounding decides a token."""
    ordered = scores[torch.isfinite(scores)].double().sort().values
    at = round(share * (len(ordered) - 1))
    near = ordered[max(at - 4, 0) : at + 5]
    widest = int(near.diff().argmax())
    assert near.diff()[widest] > 1e-3 * near.abs().max()
    return float(near[widest : widest + 2].mean())


def by_sequence(made, column="token_id"):
    """A column of the tokens that `generate` made, a list for each sequence."""
    return made.tokens.groupby("sequence")[column].agg(list).tolist()


def untrained(name, model):
    """A rule of a trained gate with random weights, at a threshold that some tokens pass."""
    torch.manual_seed(0)
    network = TRAINED[name].build(model.hidden_size)
    for parameter in network.parameters():
        parameter.data *= 4  # so that scores lie far from the threshold
    return ExitRule(TRAINED[name].of(network, model.name), 0.5)


def whole_scores(model, rule, prompts, outputs, exited):
    """Scores of a rule's gate by whole runs over known outputs; `exited` [tokens]: where each of them exited."""
    states = states_of(model, prompts, outputs)[0]
    positions = torch.cat([torch.arange(len(ids)) for ids in outputs])
    first, ids = positions == 0, torch.tensor(sum(outputs, []))
    before = (ids.roll(1).masked_fill(first, -1), exited.roll(1).masked_fill(first, 0))

    def output(layer):
        readout = read_logits(model.unembed(states[:, layer]))
        return LayerOutput(layer, model.layers, positions, readout, states[:, layer], model.unembed, *before)

    return score_layers(rule, model.layers, model.unembed(states[:, -1]).argmax(-1), output)


def policy_of(model, thresholds, **other):
    """A policy as calibration makes it, for a model as it is in memory."""
    own = {"model": model.name, "model_hash": model.hash, "head_hash": head_hash(model), "thresholds": thresholds}
    gate = {"gate": "softmax_difference", "gate_parameters": {}, "gate_hash": ""}
    shape = {"exit_layers": None, "minimum_layer": 1, "full_depth_tokens": 0, "kv_policy": "deferred"}
    found = {"calibrated_on": {}, "certified": {}, "risks": {}, "epsilon": 0.1, "delta": 0.1, "date": "2026-01-01"}
    return Policy(**own | gate | shape | found | other)


class Made(traces.Made):
    """As much of a trace as a curve reads: 12 sequences of 10 tokens, the last one their end token."""

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)
        self.layers, self.task_name = LAYERS, "made"
        position = np.tile(np.arange(10), TOKENS // 10)
        group = np.repeat([f"g{i:02d}" for i in range(TOKENS // 10)], 10)
        final = self.random.integers(3, size=TOKENS)
        sequence = np.repeat(np.arange(TOKENS // 10), 10)
        self.tokens = pd.DataFrame(
            {"sequence": sequence, "position": position, "group": group, "token_id": final, "is_eos": position == 9}
        )
        self.sequences = pd.DataFrame({"sequence": sequence[::10], "group": group[::10]})
        self.top1 = self.random.integers(3, size=(TOKENS, LAYERS + 1))
        self.top1[:, -1] = final
        self.readouts = {"top1": self.top1}

    def scores(self, rule):
        if rule.gate.name == "fixed":
            values = torch.arange(1.0, LAYERS + 1).repeat(TOKENS, 1)
        elif rule.gate.name == "patience":
            values = torch.tensor(self.random.integers(4, size=(TOKENS, LAYERS))).float()
        else:
            values = torch.tensor(self.random.random((TOKENS, LAYERS)).round(2)).float()  # rounded: there are ties
        values[self.random.random((TOKENS, LAYERS)) < 0.1] = NO_EXIT
        tokens = torch.tensor(self.top1[:, 1:])
        return Scores(values, tokens)


def card_of(file):
    """What a gate's file says of itself."""
    with safe_open(file, "pt") as content:
        return json.loads(content.metadata()["card"])
