"""pocket-t5: the loss by hand, what the optimizer treats as a matrix, resuming, batches, and the saved folder."""

import random
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoTokenizer

import eelib
from eelib.common.data import data_folder
from eelib.recipes import pocket_t5
from eelib.recipes import shared as recipes
from eelib.recipes.__main__ import RECIPES
from eelib.recipes.loop import Cycles, MasterOptimizer, Schedule, train
from eelib.recipes.pocket_t5 import build, epoch_batches, label_loss
from eelib.tracing.decode import greedy_texts

SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 3}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(data_folder("models") / "pocket-llama")


@pytest.fixture
def tiny(tokenizer):
    """Makes the recipe's network at a tiny size."""
    return partial(build, tokenizer, **SIZES)


def batch_at(step):
    rng = random.Random(step)
    return [tuple([rng.randrange(300) for _ in range(rng.randint(1, 6))] for _ in range(2)) for _ in range(4)]


def test_loss_by_hand(tiny):
    """Cross-entropy of the target tokens only, one row at a time: neither side's padding reaches it."""
    model, batch = tiny().float(), batch_at(3)
    assert len({len(p) for p, _ in batch}) > 1 and len({len(t) for _, t in batch}) > 1
    losses = []
    for prompt, target in batch:
        begun = torch.tensor([[model.config.pad_token_id, *target[:-1]]])
        logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=begun).logits[0].double()
        losses += list(F.cross_entropy(logits, torch.tensor(target), reduction="none"))
    loss, size = label_loss(model, batch)
    assert loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert size == 4 * (max(len(p) for p, _ in batch) + max(len(t) for _, t in batch))


def test_untrained_model_knows_nothing_and_guesses_evenly(tiny):
    """The first loss is near that of a uniform guess: neither embeddings nor norm begin at a scale that shouts."""
    loss, _ = label_loss(tiny(), batch_at(1))
    assert loss.item() == pytest.approx(torch.tensor(8192.0).log().item(), abs=1.0)


def test_tables_are_no_matrices(tiny):
    """The shared embedding and the position bias are left to AdamW; every other matrix is Muon's."""
    model = tiny()
    optimizer = MasterOptimizer(model)
    place = {id(master): name for master, (name, _) in zip(optimizer.master, model.named_parameters())}
    muon, rest = ({place[id(p)] for group in part.param_groups for p in group["params"]} for part in optimizer.parts)
    tables = {"shared.weight"} | {
        f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" for side in ("encoder", "decoder")
    }
    assert tables == {name for name in rest if "norm" not in name}
    assert len(muon) == 1 * (4 + 3) + 3 * (4 + 4 + 3)


def test_training_learns(tiny, tmp_path):
    curve = train(
        tiny(),
        lambda start: iter(lambda: batch_at(0), None),
        label_loss,
        Schedule(steps=40, peak=2e-2, warmup=4, decay=10),
        tmp_path,
        save_every=10,
    )
    assert curve[-1]["loss"] < curve[0]["loss"] / 2


def test_resumed_run_equals_uninterrupted(tiny, tmp_path):
    """A run cut after its first checkpoint goes on as if it had not been."""

    class Killed(BaseException):
        pass

    def dies(model, batch):
        if batch == batch_at(3):
            raise Killed
        return label_loss(model, batch)

    stream, schedule = (lambda start: map(batch_at, range(start, 9))), Schedule(steps=6, peak=1e-2, warmup=2, decay=3)
    whole, cut = tiny(), tiny()
    train(whole, stream, label_loss, schedule, tmp_path / "whole", save_every=2)
    with pytest.raises(Killed):
        train(cut, stream, dies, schedule, tmp_path / "cut", save_every=2)
    resumed = tiny()
    train(resumed, stream, label_loss, schedule, tmp_path / "cut", save_every=2)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))
    assert not all(torch.equal(a, b) for a, b in zip(tiny().parameters(), resumed.parameters()))


def test_epochs(folder, tokenizer):
    """Batches stay inside the limit, hold whole texts of `examples`, and are the same when asked again."""
    plan = epoch_batches(folder, tokenizer, 2)
    assert plan == epoch_batches(folder, tokenizer, 2) != epoch_batches(folder, tokenizer, 1)
    texts = {(e.prompt, e.target) for e in recipes.examples(folder, 2)}
    for batch in plan:
        assert len(batch) * (max(len(p) for p, _ in batch) + max(len(t) for _, t in batch)) <= recipes.TOKENS_PER_BATCH
        for prompt, target in batch:
            assert target[-1] == tokenizer.eos_token_id
            assert (tokenizer.decode(prompt), tokenizer.decode(target[:-1])) in texts
    assert sum(map(len, plan)) > 0.9 * len(recipes.examples(folder, 2))


def test_cycles_see_each_batch_of_epoch_0_once(folder, tokenizer, monkeypatch):
    """The second cycle begins with what the first left of epoch 0; later epochs follow, each once."""
    monkeypatch.setattr(pocket_t5, "BROAD_STEPS", 2)
    monkeypatch.setattr(pocket_t5, "SCHEDULE", Cycles(Schedule(3, 1e-3), Schedule(9, 1e-3)))
    epochs = [epoch_batches(folder, tokenizer, epoch) for epoch in range(4)]
    parts = [pocket_t5.cycle_batches(folder, tokenizer, part) for part in range(5)]
    assert len(parts[0]) + len(parts[1]) == pocket_t5.SCHEDULE.first.steps and len(epochs[0]) > 2
    assert parts[0] + parts[2] == epochs[0] and parts[1] == epochs[1][:1]
    assert parts[3:] == epochs[2:]


def test_recipe_ends_in_a_folder_that_loads(folder, tmp_path, monkeypatch, tiny):
    """The whole recipe at a tiny size: the saved model is an encoder-decoder that starts from padding and can end."""
    one = Schedule(steps=1, peak=1e-3, warmup=1, decay=1)
    monkeypatch.setattr(pocket_t5, "SCHEDULE", Cycles(one, one))
    trained = tiny()
    monkeypatch.setattr(pocket_t5, "build", lambda tokenizer, device: trained)
    monkeypatch.setattr(pocket_t5, "write_card", lambda corpora, out, *_: {"card": out})
    out = tmp_path / "out"
    assert pocket_t5.run(folder, out, tmp_path / "work", "cpu") == {"card": out}
    model = eelib.load_model(str(out), device="cpu")
    config, end = model.network.config, model.tokenizer.eos_token_id
    assert (model.kind, model.layers, model.hidden_size, model.context_length) == ("seq2seq", 3, 32, 512)
    assert config.decoder_start_token_id == config.pad_token_id == model.tokenizer.pad_token_id
    assert model.eos_ids == {end} and [part.cross_attention for part in model.components]
    assert all(isinstance(text, str) for text in greedy_texts(model, [recipes.examples(folder, 0)[0].prompt], 4))
    assert all(torch.equal(a.float(), b) for a, b in zip(trained.parameters(), model.network.parameters()))


def test_recipe_is_known():
    assert RECIPES[pocket_t5.NAME] == "pocket_t5"
