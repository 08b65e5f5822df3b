"""What exits are held against: scores of whole runs, rules, a policy, a random trace with scores."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import traces
from safetensors import safe_open

from eelib.exits.decoding.gate_runner import read_logits
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import NO_EXIT, LayerOutput, gate_named
from eelib.exits.gates.state import TRAINED
from eelib.exits.policy import Policy, head_hash
from eelib.exits.trace_scores import Scores, score_layers
from eelib.models.checkpoint import path_of
from eelib.models.folder import weights_hash
from eelib.models.lora import hash_with_lora, lora_base
from eelib.tasks.task import Task
from eelib.tracing.decode import states_of

LAYERS = 6


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


def middle_rule(model, prompts, gate="confidence"):
    """A rule whose gate some tokens pass and some do not: among its scores on states after the prompts."""
    if gate in TRAINED:  # with random weights
        torch.manual_seed(0)
        network = TRAINED[gate].build(model.hidden_size)
        for parameter in network.parameters():
            parameter.data *= 4  # so that scores lie far from the threshold
        return ExitRule(TRAINED[gate].of(network, model.name), 0.5)
    rule, encoded = ExitRule(gate_named(gate)), model.tokenizer(prompts)["input_ids"]
    outputs = [[5, 9, 77]] * len(encoded)
    found = whole_scores(model, rule, encoded, outputs, torch.zeros(3 * len(encoded), dtype=torch.long))
    return ExitRule(rule.gate, between(found.score, 0.6))


def policy_of(model, thresholds, **other):
    """A policy as calibration makes it, for a model as it is in memory."""
    own = {"model": model.name, "model_hash": model.hash, "head_hash": head_hash(model), "thresholds": thresholds}
    gate = {"gate": "softmax_difference", "gate_parameters": {}, "gate_hash": ""}
    shape = {"exit_layers": None, "minimum_layer": 1, "full_depth_tokens": 0, "kv_policy": "deferred"}
    found = {"calibrated_on": {}, "certified": {}, "risks": {}, "epsilon": 0.1, "delta": 0.1, "date": "2026-01-01"}
    found["max_new_tokens"] = dict.fromkeys(thresholds, 64)
    return Policy(**own | gate | shape | found | other)


class Made(traces.Random):
    """A random trace of 12 outputs, each a group of its own, with scores for any rule."""

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)
        groups = [f"g{number:02d}" for number in range(12)]
        super().__init__(replace(Task.from_prompts(groups), groups=groups), seed, LAYERS, end=1)

    def scores(self, rule):
        shape = (len(self.tokens), LAYERS)
        if rule.gate.name == "patience":
            values = torch.tensor(self.random.integers(4, size=shape)).float()
        else:
            values = torch.tensor(self.random.random(shape).round(2)).float()  # rounded: there are ties
        values[self.random.random(shape) < 0.1] = NO_EXIT
        return Scores(values, torch.tensor(self["top1"][:, 1:]))


def hash_of(name):
    """Today's hash of a shipped or packaged model by its name; it is not loaded."""
    folder, base = Path(path_of(name)), lora_base(path_of(name))
    return hash_with_lora(folder, hash_of(base)) if base else weights_hash(folder)


def card_of(file):
    """What a gate's file says of itself."""
    with safe_open(file, "pt") as content:
        return json.loads(content.metadata()["card"])
