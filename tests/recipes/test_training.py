"""The training loop: resuming bit for bit, averaged weights; losses by hand in float64."""

import math
import random
from contextlib import suppress
from itertools import count

import families
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from eelib.models.probe import block_states
from recipes import losses, pocket_llama, pocket_t5
from recipes.batches import Text
from recipes.fine_tuning import DISTILLED, FREE_EXIT, LLAMA_JOINT, T5_FREE
from recipes.losses import divergence
from recipes.pocket_llama import CONTEXT
from recipes.training import Loss, Optimizer, Schedule, by_step, train


def fresh(dtype):
    """A network to be trained, the same every time."""
    return families.build("llama").requires_grad_(True).to(dtype)


def batches(start):
    for step in count(start):
        rng = random.Random(step)
        yield torch.tensor([[rng.randrange(300) for _ in range(6)] for _ in range(3)])


class Killed(BaseException):
    """What a kill looks like from inside."""


def loss_for(network, end):
    """The loss of every token but the first; `end`: how and at which step a run ends."""

    def loss_of(batch, step):
        if end == ("killed", step):
            raise Killed
        logits = network(batch).logits[:, :-1].flatten(0, 1).float()
        loss = F.cross_entropy(logits, batch[:, 1:].flatten())
        return Loss(loss * math.nan if end == ("not finite", step) else loss, batch.numel())

    return loss_of


@pytest.mark.parametrize("dtype, muon, averaged", [(torch.bfloat16, True, False), (torch.float32, False, True)])
def test_a_resumed_run_equals_an_uninterrupted_one(dtype, muon, averaged, tmp_path):
    """Bit for bit, wherever it is killed, a loss is not finite or a leg ends; nothing half-written stays."""
    schedule, short, results = Schedule(7, 1e-2, warmup=2, decay=3), Schedule(5, 1e-2, warmup=2, decay=1), []
    parts = [("killed", 1), ("killed", 4), ("at a leg's end", 5), ("not finite", 6), ("never", 7)]
    for name, ends in (("whole", [("never", 7)]), ("parts", parts)):
        for end in ends:
            network, until = fresh(dtype), short if end[1] == 5 else schedule
            how = {"optimizer": Optimizer(network, muon), "averaged": averaged, "save_every": 2}
            with suppress(Killed, FloatingPointError):
                leg = train(network, by_step(batches), loss_for(network, end), until, tmp_path / name, **how)
        results.append((network, leg["step"], leg["place"], leg["tokens"]))
    (whole, *last), (resumed, *other) = results
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))
    assert last == other == [7, 7, 7 * 18] and not list(tmp_path.rglob("*.partial"))
    assert any(not torch.equal(a, b) for a, b in zip(fresh(dtype).parameters(), whole.parameters()))


def test_averaged_weights_by_hand(tmp_path):
    """On one weight whose gradient is always 1."""
    network, values = torch.nn.Linear(1, 1, bias=False), []

    def loss_of(_batch, _step):
        values.append(network.weight.item())
        return Loss(network.weight.sum(), 1)

    how = {"optimizer": Optimizer(network, muon=False), "averaged": True}
    train(network, by_step(count), loss_of, Schedule(6, 0.1, 1, 1), tmp_path, **how)
    mean = values[0]
    for step, value in enumerate([*values[1:], values[-1] - 0.1], 1):
        mean += (value - mean) * 4 / (step + 4)
    assert network.weight.item() == pytest.approx(mean, abs=1e-5)


def test_divergence_is_that_of_the_known_tokens_and_the_rest():
    logits, other = torch.randn(5, 30), torch.randn(5, 30)
    best = other.log_softmax(-1).topk(4)
    got = divergence(logits, best.indices, best.values)
    known = [one.double().softmax(-1).gather(1, best.indices) for one in (other, logits)]
    p, q = (torch.cat([one, 1 - one.sum(1, keepdim=True)], dim=1) for one in known)
    torch.testing.assert_close(got.double(), (p * (p / q).log()).sum(1), atol=1e-4, rtol=0)


def id_pairs():
    """(prompt, target) ids of four texts of several lengths."""
    rng = random.Random(1)
    return [tuple([rng.randrange(5, 300) for _ in range(rng.randint(1, 6))] for _ in range(2)) for _ in range(4)]


def some_texts():
    return [Text(np.array(p + t, dtype=np.uint16), np.arange(len(p + t)) >= len(p)) for p, t in id_pairs()]


def layer_losses(model):
    """(mean cross-entropy of each layer over all targets, states [layers, targets, width]), text by text."""
    found, states = [], []
    for prompt, target in id_pairs():
        inputs, first = {"input_ids": torch.tensor([prompt + target])}, len(prompt) - 1
        if model.kind == "seq2seq":
            begun = [model.network.config.pad_token_id, *target[:-1]]
            inputs, first = {"input_ids": torch.tensor([prompt]), "decoder_input_ids": torch.tensor([begun])}, 0
        with block_states(model.blocks) as seen, torch.no_grad():
            model.network(**inputs)
        states.append(torch.stack(seen[1:])[:, 0, first : first + len(target)])
        scores = model.unembed(states[-1].flatten(0, 1)).double().log_softmax(-1).view(model.layers, len(target), -1)
        found.append(-scores[:, range(len(target)), target])
    return torch.cat(found, dim=1).mean(1).tolist(), torch.cat(states, dim=1).double()


def test_losses_of_llama(made):
    """Of the last layer and of all; of a story its other tokens count, too, but for the first."""
    model = made("llama")
    model.network.set_attn_implementation("sdpa")
    means, _ = layer_losses(model)
    model.network.set_attn_implementation("plain_causal")
    others = [text._replace(wanted=~text.wanted & (np.arange(len(text.ids)) > 0)) for text in some_texts()]
    given = (("text", some_texts()), ("text", others), ("rooms", some_texts()))
    plain, swapped, story = (pocket_llama.target_loss(model.network, batch).value for batch in given)
    assert plain.item() == pytest.approx(means[-1], rel=1e-4)
    assert story.item() == pytest.approx((plain + CONTEXT["rooms"] * swapped).item(), rel=1e-4)
    joint = LLAMA_JOINT.loss_of(model, ("text", some_texts()), 5).value
    assert joint.item() == pytest.approx(sum(means) / model.layers, rel=1e-4)


def test_losses_of_t5(made, monkeypatch):
    """Of the last layer, and with FREE's exits and distillation; the head runs on a few rows at a time."""
    model = made("t5")
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", (3 * model.vocab_size, 0))
    depth, (means, hidden) = model.layers, layer_losses(model)
    plain = pocket_t5.label_loss(model.network, ("text", some_texts())).value
    assert plain.item() == pytest.approx(means[-1], rel=1e-4)
    norm = model.network.decoder.final_layer_norm
    scale = norm.weight.double() / model.hidden_size**0.5
    hidden = hidden * (hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt() * scale
    apart = (hidden[:FREE_EXIT, None] - hidden[FREE_EXIT:]).square().mean((2, 3)).amin(1).mean().item()
    exits = (FREE_EXIT * means[FREE_EXIT - 1] + depth * means[-1]) / (FREE_EXIT + depth)
    free = T5_FREE.loss_of(model, ("text", some_texts()), 5).value
    assert free.item() == pytest.approx(exits + DISTILLED * apart, rel=1e-4)
