"""What each recipe minimizes, by hand in float64, one text at a time: no padding reaches a loss."""

import math
import random

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import eelib
from recipes import pocket_bert, pocket_llama, pocket_t5
from recipes.batches import Text
from recipes.fine_tuning import DISTILLED, FREE_EXIT, LLAMA_JOINT, T5_FREE, T5_WEIGHTED
from recipes.losses import uniform_weights
from recipes.pocket_bert import MASK, WORDS, Row, label_loss, masked
from recipes.pocket_llama import CONTEXT
from recipes.texts import SEED

LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 3}
BERT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}


def pairs(seed=1):
    """(prompt, target) ids of four texts of several lengths."""
    rng = random.Random(seed)
    return [tuple([rng.randrange(5, 300) for _ in range(rng.randint(1, 6))] for _ in range(2)) for _ in range(4)]


def some_texts(seed=1):
    return [Text(np.array(p + t, dtype=np.uint16), np.arange(len(p + t)) >= len(p)) for p, t in pairs(seed)]


@pytest.mark.parametrize("part", ["translation", "rooms"])
def test_pocket_llama(part):
    """Cross-entropy of the targets, and its share of the other tokens but the first, with two kinds of attention."""
    losses, found = {True: [], False: []}, []
    model = pocket_llama.build(**LLAMA).float()
    for text in some_texts():
        logits = model(torch.tensor(text.ids.astype(int))[None]).logits[0].double()
        for index in range(1, len(text.ids)):
            wanted = torch.tensor(int(text.ids[index]))
            losses[bool(text.wanted[index])].append(F.cross_entropy(logits[index - 1], wanted).item())
    target, others = (sum(values) / len(values) for values in (losses[True], losses[False]))
    for attention in ("plain_causal", "sdpa"):
        model.set_attn_implementation(attention)
        loss = pocket_llama.target_loss(model, (part, some_texts()))
        assert loss.shown.item() == pytest.approx(target, rel=1e-5)
        assert loss.value.item() == pytest.approx(target + CONTEXT.get(part, 0.0) * others, rel=1e-5)
        assert (loss.part, loss.tokens) == (part, 4 * max(len(text.ids) for text in some_texts()))
        found.append(torch.autograd.grad(loss.value, list(model.parameters())))
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(*found))


def test_pocket_t5(tokenizer):
    """Cross-entropy of the target tokens only; an untrained model guesses evenly."""
    model, losses = pocket_t5.build(tokenizer, **T5).float(), []
    for prompt, target in pairs():
        begun = torch.tensor([[model.config.pad_token_id, *target[:-1]]])
        logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=begun).logits[0].double()
        losses += list(F.cross_entropy(logits, torch.tensor(target), reduction="none"))
    loss, size, *_ = pocket_t5.label_loss(model, ("part", some_texts()))
    assert loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert loss.item() == pytest.approx(math.log(8192), abs=1.0)
    assert size == 4 * sum(max(map(len, side)) for side in zip(*pairs()))


def layer_losses(model, name):
    """(mean cross-entropy of each layer over all targets, states [targets, width] of each layer), text by text."""
    logs, states = [[] for _ in range(model.layers)], [[] for _ in range(model.layers)]
    for prompt, target in pairs():
        if name.startswith("pocket-llama"):
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
def test_joint_optimization(recipe, made):
    """Weights and distillation are those of the papers."""
    model = made(recipe.start)
    depth, (losses, hidden) = model.layers, layer_losses(model, recipe.start)
    got = recipe.loss_of(model, ("part", some_texts()), 5)
    if recipe is LLAMA_JOINT:
        wanted = sum(losses) / depth
    elif recipe is T5_WEIGHTED:
        wanted = sum(i * loss for i, loss in enumerate(losses, 1)) / (depth * (depth + 1) / 2)
    else:
        norm = model.network.decoder.final_layer_norm
        scale = norm.weight.double() / model.hidden_size**0.5
        hidden = [h * (h.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt() * scale for h in hidden]
        errors = [[(hidden[i] - h).square().mean().item() for h in hidden[FREE_EXIT:]] for i in range(FREE_EXIT)]
        exits = (FREE_EXIT * losses[FREE_EXIT - 1] + depth * losses[-1]) / (FREE_EXIT + depth)
        wanted = exits + DISTILLED * sum(map(min, errors)) / FREE_EXIT
    assert got.value.item() == pytest.approx(wanted, rel=1e-4) and got.part == "part" and got.tokens > 0


def restored(batch):
    """The pieces without holes."""
    ids = batch.ids.flatten().clone()
    ids[batch.rows] = batch.labels
    return ids.reshape(batch.ids.shape)


def test_shares_of_masks():
    """15% of the words; of these 80% hidden, 10% replaced, 10% left; nothing else is touched."""
    ids = torch.arange(2000).repeat(500, 1) % 1000 + 1  # one id in 250 is no word
    batch = masked(ids, torch.Generator().manual_seed(1))
    assert torch.equal(restored(batch), ids) and bool((batch.labels >= WORDS).all())
    shown = batch.ids.flatten()[batch.rows]
    hidden, left = (shown == MASK), (shown == batch.labels)
    assert len(batch.rows) / int((ids >= WORDS).sum()) == pytest.approx(0.15, abs=0.003)
    assert float(hidden.float().mean()) == pytest.approx(0.8, abs=0.005)
    assert float(left.float().mean()) == pytest.approx(0.1, abs=0.005)
    other = shown[~hidden & ~left]
    assert other.min() >= WORDS and other.max() > 4000 and len(other.unique()) > 3500


def test_pocket_bert():
    """Log-probabilities from the network's own logits of all positions, one piece at a time; even at first."""
    model = pocket_bert.build(**BERT).float()
    batch = masked(torch.randint(WORDS, 4096, (5, 12)), torch.Generator().manual_seed(3))
    scores = torch.cat([model(input_ids=row[None]).logits[0] for row in batch.ids]).double()
    wanted = -torch.log_softmax(scores, -1)[batch.rows, batch.labels].mean()
    loss, size, *_ = pocket_bert.masked_loss(model, batch)
    assert len(batch.rows) > 3 and loss.dtype == torch.float32 and size == 60
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5) == pytest.approx(math.log(4096), abs=0.5)


def some_rows(pair=False):
    rng, rows = random.Random(1), []
    for i in range(5):
        size = rng.randint(3, 9)
        types = [0] * 2 + [1] * (size - 2) if pair else [0] * size
        rows.append(Row([2, *(rng.randrange(5, 60) for _ in range(size - 1))], types, i % 2))
    return rows


@pytest.mark.parametrize("pair", [False, True])
def test_classifiers(tiny_bert, pair):
    """Each layer's state at position 0 through pooler and classifier; in training the network's own loss, with the same
    dropout, which depends on the step alone.
    """
    model, other = (pocket_bert.begin(str(tiny_bert), "sst2") for _ in range(2))
    state, begun = model.network.state_dict(), other.network.state_dict()
    assert all(torch.equal(state[name], begun[name]) for name in state) and model.unembed.reads == "first"
    model.network.double()
    rows, losses = some_rows(pair), [[] for _ in range(3)]
    for row in rows:
        inputs = {"input_ids": torch.tensor([row.ids]), "token_type_ids": torch.tensor([row.types])}
        states = model.network.bert(**inputs, output_hidden_states=True).hidden_states
        for layer in range(3):
            pooled = torch.tanh(model.network.bert.pooler.dense(states[layer + 1][0, 0]))
            losses[layer].append(-torch.log_softmax(model.network.classifier(pooled), -1)[row.label].item())
    means = [sum(one) / len(one) for one in losses]
    for weights, wanted in ((uniform_weights(3), sum(means) / 3), (pocket_bert.last_alone(3), means[-1])):
        loss, size, *_ = label_loss(model, weights, rows, 0)
        assert loss.item() == pytest.approx(wanted, rel=1e-5)
    assert size == 5 * max(len(row.ids) for row in rows)
    model.network.float().train()
    here, there = (label_loss(model, pocket_bert.last_alone(3), rows, step).value.item() for step in (4, 5))
    torch.manual_seed(SEED * 10**6 + 4)
    own = model.network(**pocket_bert.inputs_of(model, rows), labels=torch.tensor([row.label for row in rows])).loss
    assert here == pytest.approx(own.item(), rel=1e-6) != there
