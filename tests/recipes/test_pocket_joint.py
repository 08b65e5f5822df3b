"""Recipes of the jointly optimized models: their losses by hand in float64, and a whole run at a tiny size."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import eelib
from eelib.common.files import data_folder
from recipes import card as cards
from recipes import pocket_joint
from recipes.batches import Text
from recipes.loop import Schedule
from recipes.pocket_joint import DISTILLED, FREE_EXIT, LLAMA_JOINT, T5_FREE, T5_WEIGHTED
from recipes.texts import SEEN


def texts():
    """(prompt, target) ids of four texts."""
    rng = random.Random(1)
    return [tuple([rng.randrange(5, 300) for _ in range(rng.randint(1, 6))] for _ in range(2)) for _ in range(4)]


def batch():
    return [Text(np.array(p + t, dtype=np.uint16), np.arange(len(p + t)) >= len(p)) for p, t in texts()]


def layer_losses(model, recipe):
    """(mean cross-entropy of each layer over all targets, states [targets, width] of each layer), text by text."""
    logs, states = [[] for _ in range(model.layers)], [[] for _ in range(model.layers)]
    for prompt, target in texts():
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
    states, labels, size = recipe.family.states(model, batch())
    assert len(labels) == sum(len(target) for _, target in texts()) and size >= len(labels)
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
def test_recipe_ends_in_a_folder_that_loads(recipe, made, folder, tmp_path, monkeypatch, few_stories):
    """The whole recipe on a tiny model: every block learns, and the card says where it came from."""
    started = made(recipe)
    begun = {name: p.clone() for name, p in started.network.named_parameters()}
    monkeypatch.setattr(pocket_joint, "load_model", lambda name, **_: started if name == recipe.start else None)
    monkeypatch.setattr(cards, "measure", lambda *_: {"made up": {"BLEU": 1.0}})
    monkeypatch.setattr(pocket_joint, "TASKS", {"captions": 2, "rooms": 1})
    short = replace(recipe, schedule=Schedule(steps=3, peak=1e-2, warmup=1, decay=1))
    card = short.run(folder, tmp_path / "out", tmp_path / "work", "cpu")
    assert card == json.loads((tmp_path / "out/card.json").read_text())
    assert (card["start"], card["objective"], card["steps"]) == (recipe.start, recipe.objective, 3)
    model = eelib.load_model(str(tmp_path / "out"), device="cpu")
    assert (model.kind, model.layers) == (started.kind, started.layers)
    changed = {name for name, p in started.network.named_parameters() if not torch.equal(p, begun[name])}
    assert all(
        any(f".{stack}.{i}." in name for name in changed)
        for i in range(started.layers)
        for stack in (["layers"] if recipe is LLAMA_JOINT else ["block"])
    )


@pytest.mark.parametrize("recipe", [LLAMA_JOINT, T5_WEIGHTED], ids=lambda r: r.name)
def test_texts_are_of_an_epoch_that_the_start_has_not_seen(recipe, made, tmp_path, monkeypatch):
    """Of every part, in batches of the recipe's size; that the plain recipes end before is tested with theirs."""
    asked = []

    def plans(_corpora, _work, _tokenizer, part, epoch, most):
        asked.append((part, epoch, most))
        return [batch()] * 10**4

    monkeypatch.setattr(pocket_joint, "load_model", lambda *_, **__: made(recipe))
    monkeypatch.setattr(pocket_joint, "train", lambda network, batches, *_, **__: list(batches(0)))
    monkeypatch.setattr(pocket_joint, "write_card", lambda *_, **__: {})
    family = replace(recipe.family, part_batches=plans)
    replace(recipe, family=family).run(tmp_path, tmp_path / "out", tmp_path / "work", "cpu")
    assert sorted(asked) == sorted((part, SEEN, recipe.tokens) for part in pocket_joint.TASKS)


@pytest.mark.parametrize("recipe", [LLAMA_JOINT, T5_WEIGHTED, T5_FREE], ids=lambda r: r.name)
def test_shipped_cards_say_what_their_recipes_say(recipe):
    card = json.loads(data_folder("models", recipe.name, "card.json").read_text())
    assert (card["start"], card["objective"], card["steps"]) == (recipe.start, recipe.objective, recipe.schedule.steps)
    assert card["tokens"] <= recipe.schedule.steps * recipe.tokens
