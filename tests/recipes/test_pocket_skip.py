"""Recipes of models made to leave early: own outputs, what a step minimizes, and whole runs at a tiny size."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import eelib
from eelib.common.files import data_folder
from eelib.tracing.decode import greedy_decode
from recipes import card as cards
from recipes import own_outputs as own
from recipes import pocket_skip
from recipes.batches import Text
from recipes.loop import Schedule
from recipes.losses import dropout_rates, rotating_weights, turning_weights
from recipes.pocket_json import LLAMA_JSON
from recipes.pocket_skip import LLAMA_SKIP, T5_SKIP, Stage, labels_loss, one_after_another, plain_loss
from recipes.texts import WHOLE

SHORT = Schedule(steps=2, peak=1e-2, warmup=1, decay=1)
FEW = {"captions": 3, "rooms": 2}
PARTS = {"captions": 1, "rooms": 1}


def some_texts():
    rng = random.Random(1)
    sizes = [(rng.randint(2, 6), rng.randint(1, 4)) for _ in range(4)]
    return [
        Text(np.array([rng.randrange(5, 300) for _ in range(p + t)], dtype=np.uint16), np.arange(p + t) >= p)
        for p, t in sizes
    ]


def test_own_outputs_are_what_the_model_says(folder, made, tmp_path, few_stories, monkeypatch):
    """Prompt and greedy output, token by token; made once; a stopped run goes on; unended ones are left out."""
    model = made(T5_SKIP)
    monkeypatch.setattr(own, "LONGEST", 4)
    monkeypatch.setattr(own, "AT_ONCE", 2)
    prompts = own.prompts_of(model, folder, tmp_path, 2, FEW)
    assert len(prompts) == 5 and [len(p) for p in prompts] == sorted(len(p) for p in prompts)
    said = [greedy_decode(model, [prompt], 4)[0] for prompt in prompts]
    model.network.generation_config.eos_token_id = said[0][-1]
    said = [greedy_decode(model, [prompt], 4)[0] for prompt in prompts]
    ended = [(p, o) for p, o in zip(prompts, said) if o[-1] in model.eos_ids]
    assert ended
    found = own.own_outputs(model, folder, tmp_path, 2, FEW)
    assert [(t.ids[~t.wanted].tolist(), t.ids[t.wanted].tolist()) for t in found] == ended
    lines = (tmp_path / "own.jsonl").read_text().splitlines()
    assert [output for line in lines for output in json.loads(line)] == said and len(lines) == 3
    (tmp_path / "own.jsonl").write_text(f"{lines[0]}\n[[1, ")
    again = own.own_outputs(model, folder, tmp_path, 2, FEW)
    assert [t.ids.tolist() for t in again] == [t.ids.tolist() for t in found]
    monkeypatch.setattr(own, "greedy_decode", None)
    assert len(own.own_outputs(model, folder, tmp_path, 2, FEW)) == len(found)


@pytest.mark.parametrize("recipe", [LLAMA_SKIP, T5_SKIP], ids=lambda r: r.name)
def test_what_a_step_minimizes(recipe, made):
    """Weights and rates are those of the step; what is dropped is the same for the same step, other for another."""
    model, stage, seen = made(recipe), Stage(Schedule(100, 1e-3), skips=True), []

    def loss(_family, _model, states, labels, texts, weights):
        seen.append((weights, states[-1].detach()))
        return states[-1].sum()

    for step in (50, 50, 51, 98):
        recipe.loss_of(model, stage, loss, model.network, (step, "part", some_texts()))
    assert [w for w, _ in seen] == [rotating_weights(model.layers, s, 4, 0.2) for s in (50, 50, 51, 98)]
    assert torch.equal(seen[0][1], seen[1][1])
    plain = recipe.loss_of(model, Stage(SHORT), loss, model.network, (0, "part", some_texts()))
    assert plain.part == "part" and seen[-1][0] == [1 / model.layers] * model.layers
    recipe.loss_of(model, Stage(SHORT, every=2), loss, model.network, (7, "part", some_texts()))
    assert seen[-1][0] == turning_weights(model.layers, 7, 2) != turning_weights(model.layers, 7, 1)
    assert max(dropout_rates(model.layers, pocket_skip.DROPPED, 0.98)) > 0.09


@pytest.mark.parametrize("recipe", [LLAMA_SKIP, T5_SKIP], ids=lambda r: r.name)
def test_the_plain_model_is_imitated(recipe, made):
    """A model that is the plain one has nothing to learn at its last layer; its inner layers have."""
    model, plain, texts = made(recipe), made(recipe), some_texts()
    states, labels, _ = recipe.family.states(model, texts)
    last, inner = [0.0] * (model.layers - 1) + [1.0], [1.0] + [0.0] * (model.layers - 1)
    assert plain_loss(recipe.family, model, states, labels, texts, last, plain=plain).item() == pytest.approx(
        0, abs=1e-5
    )
    assert plain_loss(recipe.family, model, states, labels, texts, inner, plain=plain).item() > 0.01
    assert labels_loss(recipe.family, model, states, labels, texts, last).item() > 1


@pytest.mark.parametrize("recipe", [LLAMA_SKIP, T5_SKIP], ids=lambda r: r.name)
def test_recipe_ends_in_a_folder_that_loads(recipe, made, folder, tmp_path, monkeypatch, few_stories):
    """Both stages; the card has the steps of both, says what was done, and a finished run is not begun again."""
    monkeypatch.setattr(pocket_skip, "load_model", lambda name, **_: made(recipe))
    monkeypatch.setattr(pocket_skip, "own_outputs", lambda *_: some_texts())
    monkeypatch.setattr(cards, "measure", lambda *_: {"made up": {"BLEU": 1.0}})
    short = replace(recipe, stages=(Stage(SHORT, skips=True), Stage(SHORT, own=True)), tasks=PARTS, knows=PARTS)
    out, work = tmp_path / "out", tmp_path / "work"
    card = short.run(folder, out, work, "cpu")
    assert (card["steps"], card["start"]) == (4, recipe.start)
    assert card["corpus"].startswith("Multi30k") and "Reuters" not in card["corpus"] and "rooms" in card["corpus"]
    assert card["held_out"].endswith("with it; stories with other names, things and templates")
    assert "Tatoeba" in card["corpus"] and "headlines" not in card  # captions have some of it, too
    assert "2 steps on the texts with layer dropout" in card["objective"]
    assert f"then 2 steps on {recipe.start}'s distribution on its own outputs" in card["objective"]
    assert [row[0] for row in card["loss_by_step"]] == [2, 4] and "own" in card["loss_by_part"]
    model = eelib.load_model(str(out), device="cpu")
    begun = made(recipe).network.state_dict()
    assert any(not torch.equal(value, begun[name]) for name, value in model.network.state_dict().items())
    weights = (out / "model.safetensors").read_bytes()
    short.run(folder, out, work, "cpu")
    assert (out / "model.safetensors").read_bytes() == weights


def test_a_model_is_measured_on_what_it_knows(monkeypatch):
    """That of all tasks on all of them, the shipped translations included, though its own texts are only captions."""
    asked = []
    monkeypatch.setattr(pocket_skip, "measure", lambda *given: asked.append(set(given[3])) or {})
    for recipe in (LLAMA_SKIP, T5_SKIP, LLAMA_JSON):
        recipe.measure(None, None, "cpu")
    assert asked == [set(WHOLE), set(WHOLE), {"captions", "orders"}]


@pytest.mark.parametrize("recipe", [LLAMA_SKIP, T5_SKIP, LLAMA_JSON], ids=lambda r: r.name)
def test_shipped_cards_say_what_their_recipes_say(recipe):
    card = json.loads(data_folder("models", recipe.name, "card.json").read_text())
    said = {"start": recipe.start, "objective": recipe.objective, **recipe.remarks}
    assert {name: card.get(name) for name in said} == said
    assert card["steps"] == sum(stage.schedule.steps for stage in recipe.stages)


def test_curves_go_on():
    one = [{"step": 5, "tokens": 50, "seconds": 2, "loss": 1.0}]
    two = [{"step": 3, "tokens": 30, "seconds": 4, "loss": 0.5}, {"step": 6, "tokens": 60, "seconds": 8, "loss": 0.4}]
    whole = one_after_another([one, two])
    assert [(r["step"], r["tokens"], r["seconds"]) for r in whole] == [(5, 50, 2), (8, 80, 6), (11, 110, 10)]
