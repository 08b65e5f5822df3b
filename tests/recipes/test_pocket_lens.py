"""The recipe of translators: held-out batches, a loss by hand, and training that brings layers nearer to the last."""

import json

import pytest
import torch

import eelib
from eelib.models.lens_adapters import save_lens_adapter
from eelib.tracing.decode import states_of
from recipes.pocket_lens import Lens, Taking, by_layer, divergence


def test_one_batch_in_five_is_held_out():
    taking = Taking()
    for _ in range(10):
        taking.add(torch.zeros(3, 4, 2), [0, 1, 2], [5, 6, 7])
        taking.batches += 1
    assert len(taking.held) == 2 and len(taking.training) == 8 and taking.held[0].shape == (3, 3, 2)


def test_the_loss_is_what_a_layer_is_from_the_last(model_of):
    model = model_of("llama")
    states = torch.randn(7, model.layers, model.hidden_size)
    found = divergence(model, states, states[:, -1])
    logs = torch.stack([model.unembed(states[:, layer]).double().log_softmax(-1) for layer in range(model.layers)])
    wanted = [(logs[-1].exp() * (logs[-1] - logs[layer])).sum(-1).mean() for layer in range(model.layers - 1)]
    assert found.tolist() == pytest.approx([float(value) for value in wanted], rel=1e-4)


def test_training_brings_layers_nearer_to_the_last(model_of, tmp_path):
    model = model_of("llama")
    torch.manual_seed(0)
    outputs = [torch.randint(10, 60, (30,)).tolist() for _ in range(10)]
    states, _ = states_of(model, [[5]] * 10, outputs)
    found, curve = Lens(epochs=20, batch=64, rate=1e-2).fit(model, states[:, 1:])
    assert curve[-1]["loss"] < curve[0]["loss"] and json.dumps(curve)
    before = by_layer(model, states[:, 1:])
    save_lens_adapter(found.requires_grad_(False), tmp_path / "lens", model.network.config._name_or_path, model.hash)
    after = by_layer(eelib.load_model(tmp_path / "lens", device="cpu"), states[:, 1:])
    assert all(a < b for a, b in zip(after, before))
