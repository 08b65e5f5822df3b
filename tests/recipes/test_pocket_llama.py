"""pocket-llama: the losses by hand, its attention, the epochs of its parts, and a whole run at a tiny size."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoTokenizer, GenerationConfig

import eelib
from recipes import pocket_llama
from recipes.batches import TOKENS_PER_BATCH, Phase, Text, order_of
from recipes.loop import Schedule
from recipes.pocket_llama import CONTEXT, PHASES, SCHEDULE, build, in_batches, part_batches, target_loss
from recipes.quality import greedy_texts
from recipes.texts import PARTS, SEEN, WHOLE

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def texts_at(seed):
    """Texts of several lengths with some targets, never the first token."""
    rng = random.Random(seed)
    found = []
    for _ in range(4):
        size = rng.randint(3, 9)
        wanted = np.array([False] + [rng.random() < 0.5 for _ in range(size - 2)] + [True])
        found.append(Text(np.array([rng.randrange(300) for _ in range(size)], dtype=np.uint16), wanted))
    return found


@pytest.mark.parametrize("part", ["translation", "rooms"])
def test_loss_by_hand(part):
    """Cross-entropy of the targets, and its share of the other tokens but the first, a text at a time, no padding."""
    model, texts = build(**TINY).float(), texts_at(1)
    losses = {True: [], False: []}
    for text in texts:
        ids = torch.tensor(text.ids.astype(int))
        logits = model(ids[None]).logits[0].double()
        for index in range(1, len(ids)):
            losses[bool(text.wanted[index])].append(F.cross_entropy(logits[index - 1], ids[index]).item())
    mean = {kind: sum(values) / len(values) for kind, values in losses.items()}
    loss = target_loss(model, (part, texts))
    assert loss.shown.item() == pytest.approx(mean[True], rel=1e-5)
    assert loss.value.item() == pytest.approx(mean[True] + CONTEXT.get(part, 0.0) * mean[False], rel=1e-5)
    assert (loss.part, loss.tokens) == (part, 4 * max(len(text.ids) for text in texts))


def test_attention_is_the_librarys():
    """States and gradients of plain products are those of the fused kernel; padding on the right changes neither."""
    batch, found = ("rooms", texts_at(2)), []
    for implementation in ("plain_causal", "sdpa"):
        model = build(**TINY).float()
        model.set_attn_implementation(implementation)
        loss = target_loss(model, batch).value
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(*found))


def test_phases_fill_the_schedule_and_no_part_reaches_epoch_2():
    """The rate falls in the second phase; about so many batches has each part's epoch with the real corpora."""
    assert sum(phase.steps for phase in PHASES) == SCHEDULE.steps and PHASES[1].steps == SCHEDULE.decay
    assert {name for phase in PHASES for name in phase.shares} == set(WHOLE)
    batches = {"translation": 775, "captions": 435, "rooms": 520, "reading": 130, "headlines": 135, "text": 365}
    order = order_of(PHASES)
    assert all(order.count(name) < SEEN * batches[name] for name in WHOLE)


def test_batches(folder, tmp_path, few_stories):
    """Of every part: inside the limits, of whole texts, the same when asked again, another epoch in another order."""
    tokenizer = pocket_llama.tokenizer_for(folder, tmp_path)
    for part in PARTS:
        first, again = (part_batches(folder, tmp_path, tokenizer, part, epoch=1) for _ in range(2))
        flat, same = ([text.ids.tolist() for batch in plan for text in batch] for plan in (first, again))
        assert flat == same and [len(batch) for batch in first] == [len(batch) for batch in again]
        assert all(len(batch) * max(len(text.ids) for text in batch) <= TOKENS_PER_BATCH for batch in first)
        assert len(flat) > 0.9 * len(PARTS[part](folder, tmp_path, 1))
        starts = {
            tokenizer.encode(e.prompt + e.target, add_special_tokens=False)[0] for e in PARTS[part](folder, tmp_path, 1)
        }
        assert {ids[0] for ids in flat} <= starts
    one, other = (in_batches(texts_at(0) + texts_at(1) + texts_at(2), epoch) for epoch in (1, 2))
    assert [len(t.ids) for b in one for t in b] != [len(t.ids) for b in other for t in b]


def test_recipe_ends_in_a_folder_that_loads(folder, tmp_path, monkeypatch, few_stories):
    """The whole recipe at a tiny size; continued, it goes on in the same batches; the end token is saved."""
    monkeypatch.setattr(pocket_llama, "build", partial(build, **TINY))
    monkeypatch.setattr(pocket_llama, "SCHEDULE", Schedule(steps=6, peak=1e-2, warmup=1, decay=3))
    monkeypatch.setattr(pocket_llama, "PHASES", [Phase(6, dict.fromkeys(WHOLE, 1.0))])
    monkeypatch.setattr(pocket_llama, "write_card", lambda *args: {"card": args[1]})
    trained = []

    def losses(model, batch):
        loss = target_loss(model, batch)
        trained.append((batch[0], loss.value.item()))
        return loss

    monkeypatch.setattr(pocket_llama, "target_loss", losses)
    out, work = tmp_path / "out", tmp_path / "work"
    assert pocket_llama.run(folder, out, work, "cpu") == {"card": out}
    assert sorted(part for part, _ in trained) == sorted(WHOLE)
    model = eelib.load_model(str(out), device="cpu")
    tokenizer, generation = AutoTokenizer.from_pretrained(out), GenerationConfig.from_pretrained(out)
    assert (model.kind, model.layers, model.context_length) == ("causal", 2, 512)
    assert generation.eos_token_id == tokenizer.eos_token_id and model.eos_ids == {tokenizer.eos_token_id}
    assert "plain_causal" not in (out / "config.json").read_text()
    assert isinstance(greedy_texts(model, ["Hello"], 3)[0], str)
    pocket_llama.run(folder, out, work, "cpu")  # finished: nothing is trained again
    assert len(trained) == 6
