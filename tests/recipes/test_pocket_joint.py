"""Recipes of the jointly optimized models: their losses by hand in float64, and a whole run at a tiny size."""

import json
import random
from dataclasses import replace
from functools import partial
from itertools import islice

import families
import pytest
import torch
from transformers import AutoTokenizer

import eelib
from eelib.common.data import data_folder
from eelib.models.model import prepare
from eelib.recipes import pocket_joint, pocket_llama, pocket_t5
from eelib.recipes import shared as recipes
from eelib.recipes.__main__ import RECIPES
from eelib.recipes.loop import Schedule
from eelib.recipes.pocket_joint import DISTILLED, FREE_EXIT, LLAMA_JOINT, T5_FREE, T5_WEIGHTED

T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 4}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(data_folder("models") / "pocket-llama")


@pytest.fixture
def made(tokenizer):
    """made(recipe): a tiny network of the recipe's kind, as `load_model` would give it."""

    def build(recipe):
        if recipe is LLAMA_JOINT:
            network = families.build("llama").float().requires_grad_(True)
            network.resize_token_embeddings(len(tokenizer))
        else:
            network = pocket_t5.build(tokenizer, **T5).float()
        return prepare(network.eval(), tokenizer, "tiny", "causal" if recipe is LLAMA_JOINT else "seq2seq")

    return build


def batch():
    rng = random.Random(1)
    return [tuple([rng.randrange(5, 300) for _ in range(rng.randint(1, 6))] for _ in range(2)) for _ in range(4)]


def layer_losses(model, recipe):
    """(mean cross-entropy of each layer over all targets, states [targets, width] of each layer), text by text."""
    logs, states = [[] for _ in range(model.layers)], [[] for _ in range(model.layers)]
    for prompt, target in batch():
        if recipe is LLAMA_JOINT:
            inputs, first = {"input_ids": torch.tensor([prompt + target])}, len(prompt) - 1
        else:
            begun = [model.network.config.pad_token_id, *target[:-1]]
            inputs, first = {"input_ids": torch.tensor([prompt]), "decoder_input_ids": torch.tensor([begun])}, 0
        with eelib.models.probe.block_states(model.blocks) as found, torch.no_grad():
            model.network(**inputs)
        for layer, state in enumerate(found[1:]):
            rows = state[0, first : first + len(target)]
            states[layer].append(rows)
            scores = torch.log_softmax(model.unembed(rows).double(), -1)
            logs[layer] += [-scores[i, wanted].item() for i, wanted in enumerate(target)]
    return [sum(values) / len(values) for values in logs], [torch.cat(rows).double() for rows in states]


@pytest.mark.parametrize("recipe", [LLAMA_JOINT, T5_WEIGHTED, T5_FREE], ids=lambda r: r.name)
def test_losses_by_hand(recipe, made):
    """Padding of neither side reaches the loss; weights and distillation are those of the papers."""
    model = made(recipe)
    depth = model.layers
    losses, hidden = layer_losses(model, recipe)
    states, labels, size = recipe.states(model, batch())
    assert len(labels) == sum(len(target) for _, target in batch()) and size >= len(labels)
    got = recipe.loss(model, states, labels).item()
    if recipe is LLAMA_JOINT:
        wanted = sum(losses) / depth
    elif recipe is T5_WEIGHTED:
        wanted = sum(i * loss for i, loss in enumerate(losses, 1)) / (depth * (depth + 1) / 2)
    else:
        norm = model.network.decoder.final_layer_norm
        hidden = [
            h
            * (h.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
            * norm.weight.double()
            / model.hidden_size**0.5
            for h in hidden
        ]
        errors = [
            [(hidden[i] - hidden[j]).square().mean().item() for j in range(FREE_EXIT, depth)] for i in range(FREE_EXIT)
        ]
        wanted = (FREE_EXIT * losses[FREE_EXIT - 1] + depth * losses[-1]) / (FREE_EXIT + depth) + DISTILLED * sum(
            map(min, errors)
        ) / FREE_EXIT
    assert got == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("recipe", [LLAMA_JOINT, T5_FREE], ids=lambda r: r.name)
def test_recipe_ends_in_a_folder_that_loads(recipe, made, folder, tmp_path, monkeypatch):
    """The whole recipe on a tiny model: every block learns, and the card says where it came from."""
    started = made(recipe)
    begun = {name: p.clone() for name, p in started.network.named_parameters()}
    monkeypatch.setattr(pocket_joint, "load_model", lambda name, **_: started if name == recipe.start else None)
    monkeypatch.setattr(recipes, "measure", lambda *_: {"made up": {"BLEU": 1.0}})
    short = replace(recipe, schedule=Schedule(steps=3, peak=1e-2, warmup=1, decay=1))
    card = short.run(folder, tmp_path / "out", tmp_path / "work", "cpu")
    assert card == json.loads((tmp_path / "out/card.json").read_text())
    assert (card["start"], card["objective"], card["steps"]) == (recipe.start, recipe.objective, 3)
    model = eelib.load_model(str(tmp_path / "out"), device="cpu")
    assert (model.kind, model.layers) == (started.kind, started.layers)
    changed = {name for name, p in started.network.named_parameters() if not torch.equal(p, begun[name])}
    assert all(
        any(f".{place}.{i}." in name for name in changed)
        for i in range(started.layers)
        for place in (["layers"] if recipe is LLAMA_JOINT else ["block"])
    )


@pytest.mark.parametrize("recipe", [LLAMA_JOINT, T5_WEIGHTED, T5_FREE], ids=lambda r: r.name)
def test_texts_are_of_an_epoch_that_the_start_has_not_seen(recipe, made, folder, tmp_path, monkeypatch):
    asked, started = [], made(recipe)

    def texts(_corpora, _tokenizer, epoch):
        asked.append(epoch)
        return [batch()] * (2900 if epoch == 0 else 1700)  # about what the corpora give

    monkeypatch.setattr(pocket_llama, "epoch_batches", texts)
    monkeypatch.setattr(pocket_t5, "epoch_batches", texts)
    plan_of = partial(*{"pocket-llama": (texts,), "pocket-t5": (pocket_t5.cycle_batches,)}[recipe.start], folder, None)
    steps = (pocket_llama if recipe is LLAMA_JOINT else pocket_t5).SCHEDULE.steps
    next(islice(recipes.from_step(0, plan_of), steps - 1, None))
    seen, asked[:] = set(asked), []
    monkeypatch.setattr(pocket_joint, "load_model", lambda *_, **__: started)
    monkeypatch.setattr(pocket_joint, "train", lambda network, batches, *_, **__: next(batches(0)))
    monkeypatch.setattr(pocket_joint, "write_card", lambda *_, **__: {})
    replace(recipe, texts=texts).run(folder, tmp_path / "out", tmp_path / "work", "cpu")
    assert asked == [max(seen) + 1]


def test_recipes_are_known():
    for recipe in (LLAMA_JOINT, T5_WEIGHTED, T5_FREE):
        module, _, name = RECIPES[recipe.name].partition(":")
        assert module == "pocket_joint" and getattr(pocket_joint, name) is recipe
