"""Objectives of joint optimization: values by hand, plain float64 references, and what they hold in memory."""

import math

import families
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from eelib.models.probe import block_states
from recipes import losses as joint
from recipes.losses import (
    MAPPINGS,
    blocks_skipped,
    calm_weights,
    distillation_loss,
    dropout_rates,
    exit_weights,
    imitation_loss,
    last_share_weights,
    layers_loss,
    rotating_weights,
    states_at,
    turning_weights,
    uniform_weights,
)


def test_weights_by_hand():
    """Four layers: a quarter each; 1, 2, 3, 4 tenths; the last 70% are three layers; exits 1 and 4 as 1 to 4."""
    assert uniform_weights(4) == [0.25] * 4
    assert calm_weights(4) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert last_share_weights(4) == pytest.approx([0.0, 2 / 9, 3 / 9, 4 / 9])
    assert last_share_weights(10) == pytest.approx([0.0] * 3 + [i / 49 for i in range(4, 11)])
    assert exit_weights(4, [1]) == pytest.approx([0.2, 0.0, 0.0, 0.8])
    assert turning_weights(4, 6, 1) == [0.25] * 4
    assert turning_weights(4, 6, 2) == [0.0, 0.5, 0.0, 0.5]
    assert turning_weights(4, 7, 2) == pytest.approx([1 / 3, 0.0, 1 / 3, 1 / 3])


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
    with pytest.raises(ValueError, match="every must be at least 1, not 0"):
        turning_weights(12, 5, 0)
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
    chosen = [MAPPINGS["uniform"](None, deep, index, exit_layer) for index in range(exit_layer)]
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


def test_rotating_weights_by_hand():
    """Of four layers with two places: layers 1 and 3 at odd steps, layer 2 at even ones, the last always."""
    odd, even = (rotating_weights(4, step, every=2, scale=0.5) for step in (5, 6))
    last = 3 + 0.5 * 6
    assert odd == pytest.approx([w / (0.5 + 3 + last) for w in (0.5, 0, 3, last)])
    assert even == pytest.approx([w / (1.5 + last) for w in (0, 1.5, 0, last)])
    with pytest.raises(ValueError, match="every must be at least 1, not 0"):
        rotating_weights(4, 0, 0, 0.5)


@given(st.integers(1, 40), st.integers(1, 9), st.floats(0.01, 2.0))
def test_every_layer_has_its_turn(layers, every, scale):
    turns = [rotating_weights(layers, step, every, scale) for step in range(every)]
    assert all(math.isclose(sum(weights), 1.0) and weights[-1] > 0 for weights in turns)
    assert all(sum(weights[i] > 0 for weights in turns) == 1 for i in range(layers - 1))


def test_dropout_rates_by_hand():
    """None of the first layer, all of the last at the end, exponential in layer and progress."""
    assert dropout_rates(3, 0.2, 1.0) == pytest.approx([0.0, 0.2 * (2**0.5 - 1), 0.2])
    assert dropout_rates(3, 0.2, 0.5)[-1] == pytest.approx(0.2 * (2**0.5 - 1))
    assert dropout_rates(12, 0.1, 0.0) == [0.0] * 12 and dropout_rates(1, 0.1, 1.0) == [0.0]


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_skipped_blocks_give_back_what_they_took(family, request):
    """Rate 1: the state goes through unchanged; 0: nothing differs; between: each text for itself, by the generator."""
    network = families.build(family).float()
    blocks = list(network.decoder.block if family == "t5" else network.model.layers)
    ids = torch.arange(24).reshape(6, 4)
    inputs = {"input_ids": ids, "use_cache": False} | ({"decoder_input_ids": ids} if family == "t5" else {})

    def run(rates, seed=0):
        with blocks_skipped(blocks, rates, torch.Generator().manual_seed(seed)), block_states(blocks) as states:
            network(**inputs)
        return states

    with block_states(blocks) as plain:
        network(**inputs)
    none, whole = [0.0] * len(blocks), [0.0, 1.0, *[0.0] * (len(blocks) - 2)]
    assert all(torch.equal(a, b) for a, b in zip(run(none), plain))
    skipped = run(whole)
    assert torch.equal(skipped[2], skipped[1]) and not torch.equal(plain[2], plain[1])
    half = run([0.5, *none[1:]])
    same = [torch.equal(half[1][i], half[0][i]) for i in range(6)]
    assert 0 < sum(same) < 6 and torch.equal(run([0.5, *none[1:]])[1], half[1])
    with block_states(blocks) as after:
        network(**inputs)
    assert all(torch.equal(a, b) for a, b in zip(after, plain))


def test_imitation_by_hand(monkeypatch):
    """KL of what the teacher says and each layer's readout, in float64, whatever the number of rows at once."""
    heads = [torch.nn.Linear(5, 11).double() for _ in range(2)]
    for head in heads:
        head.vocab_size = 11
    torch.manual_seed(0)
    states = [torch.randn(7, 5, dtype=torch.double, requires_grad=True) for _ in range(3)]
    last, weights = torch.randn(7, 5, dtype=torch.double, requires_grad=True), [0.2, 0.0, 0.8]
    said = torch.softmax(heads[1](last), -1)
    wanted = sum(
        w * (said * (said.log() - torch.log_softmax(heads[0](s), -1))).sum(-1).mean() for s, w in zip(states, weights)
    )
    for at_once in (11, 33, 10**6):
        monkeypatch.setattr(joint, "LOGITS_AT_ONCE", (at_once, at_once))
        assert imitation_loss(heads[0], states, heads[1], last, weights).item() == pytest.approx(wanted.item())
    imitation_loss(heads[0], states, heads[1], last, weights).backward()
    assert last.grad is None and states[1].grad is None and states[0].grad.abs().sum() > 0
    assert all(p.grad is None for p in heads[1].parameters())
    same = imitation_loss(heads[0], [last], heads[0], last, [1.0])
    assert same.item() == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ValueError, match="2 weights for 3 layers"):
        imitation_loss(heads[0], states, heads[1], last, [0.5, 0.5])
