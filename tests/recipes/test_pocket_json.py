"""The recipe of pocket-llama-json: what it trains on, and a whole run at a tiny size."""

import json
from dataclasses import replace

import eelib
from eelib.tasks.structured import structured_prompt
from eelib.tasks.task import load_task
from recipes import card as cards
from recipes import pocket_skip, quality
from recipes.batches import read_batches
from recipes.loop import Schedule
from recipes.orders import orders
from recipes.pocket_json import LLAMA_JSON, STAGE
from recipes.quality import ORDERS, shipped
from recipes.texts import PARTS


def test_recipe_ends_in_a_folder_that_loads(made, folder, tmp_path, monkeypatch, few_stories):
    """Small batches of train notes and captions; every block learns; the card says both corpora, and what was kept."""
    monkeypatch.setattr(pocket_skip, "load_model", lambda name, **_: made(LLAMA_JSON))
    measured = []
    monkeypatch.setattr(cards, "measure", lambda *given: measured.append(given[3]) or {"made up": {"exact": 1.0}})
    short = replace(LLAMA_JSON, stages=(replace(STAGE, schedule=Schedule(steps=6, peak=1e-2, warmup=1, decay=1)),))
    out, work = tmp_path / "out", tmp_path / "work"
    card = short.run(folder, out, work, "cpu")
    assert card == json.loads((out / "card.json").read_text()) and measured == [("orders", "captions")]
    assert (card["start"], card["steps"], set(card["loss_by_part"])) == (
        "pocket-llama-joint",
        6,
        {"orders", "captions"},
    )
    assert card["aim"] == LLAMA_JSON.remarks["aim"] and card["aim"].startswith("structured/orders at full depth")
    assert card["objective"].endswith("on one inner layer in 3, other ones at each step")
    assert "recipes.orders" in card["corpus"] and "Multi30k" in card["corpus"] and "Reuters" not in card["corpus"]
    assert "identifiers" in card["held_out"] and "Tatoeba" in card["held_out"] and "our own" in card["prompts"]
    batches = list(read_batches(work / "batches.npz", 0))
    assert sorted(part for part, _ in batches) == ["captions"] * 2 + ["orders"] * 4
    assert all(len(texts) * max(len(text.ids) for text in texts) <= STAGE.tokens for _, texts in batches)
    model, begun = eelib.load_model(str(out), device="cpu"), dict(made(LLAMA_JSON).network.named_parameters())
    changed = {name for name, p in model.network.named_parameters() if not p.equal(begun[name].to(p.dtype))}
    assert all(any(f".layers.{i}." in name for name in changed) for i in range(model.layers))


def test_trained_notes_are_none_of_the_shipped_ones(folder, tmp_path, few_stories):
    """Each ends in the record of its own note, as JSON."""
    found = [e for epoch in range(3) for e in PARTS["orders"](folder, tmp_path, epoch)]
    assert found and not {e.prompt for e in found} & set(load_task(ORDERS).prompts)
    assert all(e.prompt.split("### Input:")[1].count(json.loads(e.target)["id"]) == 1 for e in found)


def test_orders_are_measured_as_their_kind_has_it(monkeypatch):
    """On the shipped notes, with outputs as long as their records."""
    rows = list(orders("test", 150))
    known = {structured_prompt(row["note"]): json.dumps(row["record"]) for row in rows}
    asked = []

    def said(_model, prompts, longest):
        asked.append(longest)
        return [known[prompt] for prompt in prompts]

    monkeypatch.setattr(quality, "said", said)
    assert shipped(None, ["orders", "captions"]) == {
        ORDERS: {"exact": 100.0, "valid": 100.0, "field F1": 100.0, "items": 150}
    }
    assert asked == [128]
