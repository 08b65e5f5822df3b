"""Objectives of joint optimization: values by hand, plain float64 references, and what they hold in memory."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from eelib.recipes import losses as joint
from eelib.recipes.losses import (
    MAPPINGS,
    calm_weights,
    distillation_loss,
    exit_weights,
    last_share_weights,
    layers_loss,
    states_at,
    uniform_weights,
)


def test_weights_by_hand():
    """Four layers: a quarter each; 1, 2, 3, 4 tenths; the last 70% are three layers; exits 1 and 4 as 1 to 4."""
    assert uniform_weights(4) == [0.25] * 4
    assert calm_weights(4) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert last_share_weights(4) == pytest.approx([0.0, 2 / 9, 3 / 9, 4 / 9])
    assert last_share_weights(10) == pytest.approx([0.0] * 3 + [i / 49 for i in range(4, 11)])
    assert exit_weights(4, [1]) == pytest.approx([0.2, 0.0, 0.0, 0.8])


@given(st.integers(1, 80), st.floats(0.01, 1.0))
def test_weights_sum_to_one(layers, share):
    """No layer counts less than one below it that counts, and all weights add up to 1."""
    for weights in (
        uniform_weights(layers),
        calm_weights(layers),
        last_share_weights(layers, share),
        exit_weights(layers, [1 + layers // 3]),
    ):
        assert len(weights) == layers and math.isclose(sum(weights), 1.0)
        counted = [w for w in weights if w]
        assert counted == sorted(counted) and weights[-1] > 0
    assert sum(w > 0 for w in last_share_weights(layers, share)) == math.ceil(share * layers - 1e-9)
    assert last_share_weights(layers, 1.0) == pytest.approx(calm_weights(layers))


def test_weights_refuse_what_is_not_there():
    with pytest.raises(ValueError, match="share must be above 0 and at most 1, not 0"):
        last_share_weights(12, 0)
    with pytest.raises(ValueError, match=r"exits must lie in 1..8, not \[9\]"):
        exit_weights(8, [9])


def plain_losses(network_logits, states, labels):
    """Cross-entropy of each layer, by the definition, in float64."""
    return [-torch.log_softmax(network_logits(state), -1)[torch.arange(len(labels)), labels].mean() for state in states]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "t5_tied", "bert_labels"])
@pytest.mark.parametrize("at_once", [1, 10**6])
def test_layers_loss_and_gradients_equal_plain_ones(name, at_once, model_of, monkeypatch):
    """Whole, and one row at a time, through the unembeddings of several families."""
    monkeypatch.setattr(joint, "LOGITS_AT_ONCE", (at_once, at_once))
    model, (seed, rows) = model_of(name), (3, 7)
    torch.manual_seed(seed)
    states = [torch.randn(rows, model.hidden_size, requires_grad=True) for _ in range(model.layers)]
    labels = torch.randint(model.vocab_size, (rows,))
    weights = calm_weights(model.layers)
    loss = layers_loss(model.unembed, states, labels, weights)
    loss.backward()
    got = [state.grad.clone() for state in states]
    for state in states:
        state.grad = None
    plain = sum(w * x for w, x in zip(weights, plain_losses(lambda s: model.unembed(s).double(), states, labels)))
    plain.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    for mine, state in zip(got, states):
        torch.testing.assert_close(mine, state.grad, rtol=1e-4, atol=1e-7)
    model.network.zero_grad()


def test_only_the_last_layer_is_plain_training(model_of):
    """With all weight on layer L, the loss is the network's own."""
    model = model_of("llama")
    ids = torch.randint(5, model.vocab_size, (2, 9))
    rows = torch.tensor([2, 5, 12])
    labels = torch.tensor([7, 8, 9])
    states = states_at(model, {"input_ids": ids}, rows)
    loss = layers_loss(model.unembed, states, labels, [0.0] * (model.layers - 1) + [1.0])
    logits = model.network(input_ids=ids).logits.reshape(-1, model.vocab_size)[rows]
    assert loss.item() == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)


def test_layers_loss_refuses_other_weights(model_of):
    model = model_of("llama")
    with pytest.raises(ValueError, match="2 weights for 1 layers"):
        layers_loss(model.unembed, [torch.zeros(1, model.hidden_size)], torch.zeros(1, dtype=torch.long), [0.5, 0.5])


def test_logits_are_not_kept_for_the_backward_pass(model_of):
    """What autograd keeps between the passes does not grow with the vocabulary times the layers."""
    model = model_of("llama")
    rows = 50
    states = [torch.randn(rows, model.hidden_size, requires_grad=True) for _ in range(model.layers)]
    kept = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layers_loss(model.unembed, states, torch.zeros(rows, dtype=torch.long), uniform_weights(model.layers))
    assert kept and max(kept) < rows * model.vocab_size


STATES = [
    torch.tensor(rows, dtype=torch.float64)
    for rows in ([[0.0, 0.0]], [[1.0, 1.0]], [[4.0, 4.0]], [[1.0, 0.0]], [[9.0, 9.0]])
]


@pytest.mark.parametrize(
    "mapping, wanted",
    [
        ("last", (81.0 + 64.0) / 2),  # both to layer 5
        ("uniform", (0.5 + 64.0) / 2),  # of the deep layers 3, 4, 5: 1 to 4, 2 to 5
        ("closest", (0.5 + 0.5) / 2),
    ],
)  # both to layer 4
def test_distillation_by_hand(mapping, wanted):
    assert distillation_loss(STATES, 2, mapping).item() == pytest.approx(wanted)


@given(st.integers(2, 40), st.data())
def test_uniform_mapping_reaches_the_last_layer(layers, data):
    """Deep layers in order, never before the exit, the last one for the last shallow one."""
    exit_layer = data.draw(st.integers(1, layers - 1))
    deep = [None] * (layers - exit_layer)
    chosen = [MAPPINGS["uniform"](None, deep, place, exit_layer) for place in range(exit_layer)]
    assert chosen == sorted(chosen) and chosen[0] >= 0 and chosen[-1] == len(deep) - 1


def test_distillation_teaches_the_shallow_layers_only():
    states = [torch.randn(3, 4, requires_grad=True) for _ in range(4)]
    distillation_loss(states, 2, "closest").backward()
    assert all(s.grad is not None and s.grad.abs().sum() > 0 for s in states[:2])
    assert all(s.grad is None for s in states[2:])


def test_distillation_refuses_what_is_not_there():
    with pytest.raises(ValueError, match="mapping 'nearest' is not known; allowed: last, uniform, closest"):
        distillation_loss(STATES, 2, "nearest")
    with pytest.raises(ValueError, match="the exit layer must lie in 1..4, not 5"):
        distillation_loss(STATES, 5)
