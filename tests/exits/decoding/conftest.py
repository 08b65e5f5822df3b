"""What decoding is held against: a rule asked by hand, and prompts of many lengths."""

import pytest
import torch
from exits_made import between, untrained, whole_scores

from checks.tiny_texts import PROMPTS
from eelib.exits.decoding import drafters
from eelib.exits.decoding.gate_runner import read_logits
from eelib.exits.decoding.pass_costs import ROWS, PassCosts
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import LayerOutput, gate_named
from eelib.exits.gates.state import TRAINED


@pytest.fixture(autouse=True)
def costs(monkeypatch):
    """costs(more): let each further token of a pass cost so much of a pass of one; a fifth unless a test says more.

    A pass with weights of 8 bits costs `of_8_bits` of a pass.
    """

    def set_costs(more, of_8_bits=1.0):
        def of(model, sequences=1):
            share = of_8_bits if model.hash.endswith("-int8") else 1.0
            passes = tuple(share * (1 + more * (rows - 1)) for rows in ROWS)
            return PassCosts(model.layers, ROWS, (0.0,) * len(ROWS), passes, (0.0,) * len(ROWS))

        monkeypatch.setattr(drafters, "pass_costs", of)

    set_costs(0.2)
    return set_costs


@pytest.fixture
def many():
    """16 prompts."""
    return [*PROMPTS, *(f"{prompt} {extra}" for prompt in PROMPTS for extra in ("dog", "ist das über?")), "over"]


class ByHand:
    """One sequence's gate, asked layer by layer about single states."""

    def __init__(self, model, rule):
        self.model, self.rule, self.exits, self.tokens = model, rule, [], []
        self.gate_state = rule.gate.start(1)

    def exits_at(self, layer, state):
        """Whether a state [1, hidden_size] after a block exits, and the top-1 there."""
        readout = read_logits(self.model.unembed(state))
        top1 = int(readout["top1"])
        if layer == self.model.layers:
            return True, top1
        if not self.rule.asks(layer, self.model.layers):
            return False, top1
        position = torch.tensor([len(self.tokens)])
        before = [torch.tensor([(start + values)[-1]]) for start, values in (([-1], self.tokens), ([0], self.exits))]
        output = LayerOutput(layer, self.model.layers, position, readout, state, self.model.unembed, *before)
        score = self.rule.gate.score(output, self.gate_state).float()
        return bool(self.rule.exits(layer, score, position)), top1

    def emit(self, layer, token):
        """The token exited here; the next one begins."""
        self.exits.append(layer)
        self.tokens.append(token)
        self.gate_state = self.rule.gate.start(1)


@pytest.fixture
def by_hand():
    """by_hand(model, rule)."""
    return ByHand


def middle(model, prompts, gate="confidence"):
    """A rule whose gate some tokens pass and some do not: among its scores on states after the prompts."""
    if gate in TRAINED:
        return untrained(gate, model)
    rule, encoded = ExitRule(gate_named(gate)), model.tokenizer(prompts)["input_ids"]
    outputs = [[5, 9, 77]] * len(encoded)
    found = whole_scores(model, rule, encoded, outputs, torch.zeros(3 * len(encoded), dtype=torch.long))
    return ExitRule(rule.gate, between(found.score, 0.6))


@pytest.fixture
def middle_rule():
    """middle_rule(model, prompts, gate)."""
    return middle
