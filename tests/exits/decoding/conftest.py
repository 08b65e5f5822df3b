"""What all policies are held against: a rule asked by hand, and prompts of many lengths."""

import pytest
import torch
from exits_made import between

from checks.tiny_texts import PROMPTS
from eelib.exits.decoding import drafters
from eelib.exits.decoding.gate_runner import read_logits
from eelib.exits.decoding.pass_costs import ROWS, PassCosts
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import LayerOutput, gate_named

MANY = [*PROMPTS, *(f"{prompt} {extra}" for prompt in PROMPTS for extra in ("dog", "ist das über?")), "over"]


@pytest.fixture(autouse=True)
def costs(monkeypatch):
    """costs(more): let each further token of a pass cost so much of a pass of one; a fifth as long as nobody says."""

    def set_costs(more):
        def of(model, sequences=1):
            passes = tuple(1 + more * (rows - 1) for rows in ROWS)
            return PassCosts(model.layers, ROWS, (0.0,) * len(ROWS), passes, (0.0,) * len(ROWS))

        monkeypatch.setattr(drafters, "pass_costs", of)

    set_costs(0.2)
    return set_costs


@pytest.fixture
def many():
    """16 prompts."""
    return MANY


class ByHand:
    """One row's gate, asked layer by layer about single states."""

    def __init__(self, model, rule):
        self.model, self.rule, self.exits, self.tokens = model, rule, [], []
        self.begin()

    def begin(self):
        """The next token."""
        self.memory = self.rule.gate.start(1)

    def exits_at(self, layer, state):
        """Whether a state [1, hidden_size] after a block leaves, and the top-1 there."""
        readout = read_logits(self.model.unembed(state))
        top1 = int(readout["top1"])
        if layer == self.model.layers:
            return True, top1
        if not self.rule.asks(layer, self.model.layers):
            return False, top1
        position = torch.tensor([len(self.tokens)])
        before = [
            torch.tensor([values[-1] if values else none]) for values, none in ((self.tokens, -1), (self.exits, 0))
        ]
        seen = LayerOutput(layer, self.model.layers, position, readout, state, self.model.unembed, *before)
        score = self.rule.gate.score(seen, self.memory).float()
        return bool(self.rule.exits(layer, score, position)), top1

    def emit(self, layer, token):
        """Where the token left."""
        self.exits.append(layer)
        self.tokens.append(token)
        self.begin()


@pytest.fixture
def by_hand():
    """by_hand(model, rule)."""
    return ByHand


def middle(model, prompts, gate="confidence", **parameters):
    """A rule whose gate some tokens pass and some do not: among its scores on states after the prompts."""
    from eelib.tracing.decode import states_of

    rule = ExitRule(gate_named(gate, **parameters))
    encoded = model.tokenizer(prompts)["input_ids"]
    states = states_of(model, encoded, [[5, 9, 77]] * len(encoded))[0]
    scores = []
    memory = rule.gate.start(len(states))
    for layer in range(1, model.layers):
        readout = read_logits(model.unembed(states[:, layer]))
        positions = torch.zeros(len(states), dtype=torch.long)
        seen = LayerOutput(
            layer, model.layers, positions, readout, states[:, layer], model.unembed, positions, positions
        )
        scores.append(rule.gate.score(seen, memory))
    return ExitRule(rule.gate, between(torch.stack(scores).detach(), 0.6))


@pytest.fixture
def middle_rule():
    """middle_rule(model, prompts, gate)."""
    return middle
