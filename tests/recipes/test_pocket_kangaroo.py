"""The recipe of an adapter block: its texts, batches that go on where a run stopped, a training that helps."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

import eelib
from eelib.models.lens_adapters import AdapterBlock, save_lens_adapter
from eelib.tracing.decode import states_of
from recipes import pocket_kangaroo, quality
from recipes.batches import Text
from recipes.loop import Schedule, train
from recipes.pocket_kangaroo import HELD_OUT, Kangaroo, seen_texts, split, through

LAYER = 1
RECIPE = Kangaroo(layer=LAYER, heads=2, tokens=64, schedule=Schedule(40, peak=1e-2, warmup=2, decay=20))


def texts(count=30):
    """Prompts of three tokens and outputs of four to nine."""
    random = np.random.default_rng(0)
    lengths = [4 + number % 6 for number in range(count)]
    ids = [random.integers(10, 60, 3 + length).astype(np.uint16) for length in lengths]
    return [Text(own, np.arange(len(own)) >= 3) for own in ids]


@pytest.fixture
def seen(model_of, tmp_path):
    """(the model, the texts, what is seen of them)."""
    model, some = model_of("llama"), texts()
    return model, some, seen_texts(model, LAYER, some, tmp_path / "states.pt")


def test_what_is_seen_of_a_text_are_its_states(seen, tmp_path):
    model, some, found = seen
    for text, (states, last, at) in zip(some, found):
        prompt, output = text.ids[:3].tolist(), text.ids[3:].tolist()
        wanted, _ = states_of(model, [prompt], [output])
        torch.testing.assert_close(states[2:-1].float(), wanted[:, LAYER], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(last.float(), wanted[:, -1], atol=2e-2, rtol=2e-2)
        assert states.shape[0] == len(text.ids) and at.tolist() == list(range(2, len(text.ids) - 1))
    again = seen_texts(None, LAYER, [], tmp_path / "states.pt")  # kept: nothing runs
    assert all(torch.equal(a, b) for one, two in zip(found, again) for a, b in zip(one, two))


def test_outputs_are_held_out_and_batches_go_on_where_they_stopped(seen):
    _, _, found = seen
    training, held = split(found)
    assert len(held) == -(-len(found) // HELD_OUT) and len(training) + len(held) == len(found)
    whole = [[id(text) for text in batch] for batch in islice(RECIPE.batches(training, 0), 12)]
    later = [[id(text) for text in batch] for batch in islice(RECIPE.batches(training, 5), 7)]
    assert whole[5:] == later and len({text for batch in whole for text in batch}) == len(training)


def test_padding_changes_nothing(seen):
    model, _, found = seen
    torch.manual_seed(0)
    block = AdapterBlock(model.layers, LAYER, model.hidden_size, 2).requires_grad_(False)
    block.out.weight.normal_()
    together, last = through(block, found[:6], model.device)
    alone = [through(block, [text], model.device) for text in found[:6]]
    torch.testing.assert_close(together, torch.cat([said for said, _ in alone]))
    assert torch.equal(last, torch.cat([last for _, last in alone]))


def test_training_brings_the_layer_nearer_to_the_last(seen, tmp_path, folder_of, monkeypatch):
    model, _, found = seen
    torch.manual_seed(0)
    block = AdapterBlock(model.layers, LAYER, model.hidden_size, 2)
    before = RECIPE.held_out(model, block, found)
    curve = train(
        block, lambda start: RECIPE.batches(found, start), lambda b, batch: RECIPE.loss_of(model, b, batch),
        RECIPE.schedule, tmp_path / "work", save_every=10,
    )  # fmt: skip
    assert RECIPE.held_out(model, block, found) < before and curve[-1]["loss"] < curve[0]["loss"]
    save_lens_adapter(block.requires_grad_(False), tmp_path / "block", str(folder_of("llama")), model.hash)
    with_block = eelib.load_model(tmp_path / "block", device="cpu")
    nearer = RECIPE.held_out(model, with_block.adapter_block, found)
    assert nearer == pytest.approx(RECIPE.held_out(model, block, found), abs=2e-2)


def test_the_block_is_measured_beside_other_readings_of_its_model(model_of, tmp_path, folder_of, monkeypatch):
    """Before it is trained the block changes nothing, so it agrees, and its drafts are accepted, as without it."""
    model = model_of("llama")
    block = AdapterBlock(model.layers, LAYER, model.hidden_size, 2).requires_grad_(False)
    save_lens_adapter(block, tmp_path / "block", str(folder_of("llama")), model.hash)
    task = eelib.Task.from_prompts(["the cat sat on", "a dog", "the mat"])
    for room in (pocket_kangaroo, quality):
        monkeypatch.setattr(room, "load_task", lambda *_, **__: task)
    monkeypatch.setattr(quality, "LONGEST_TRANSLATION", 6)
    recipe = replace(RECIPE, start=str(folder_of("llama")), beside=str(folder_of("llama")))
    agreed, drafted = recipe.measure(None, tmp_path / "block", "cpu").values()
    ways = {"through the block", f"through {recipe.beside}", "untranslated"}
    assert set(agreed) == ways | {"items"} and set(drafted) == ways
    assert len({agreed[way] for way in ways}) == 1 and 0 <= agreed["untranslated"] < 100 and agreed["items"] > 0
    assert all(drafted[way] == drafted["untranslated"] and drafted[way]["drafted"] > 0 for way in ways)
