"""The training loop: schedule, resuming bit for bit, legs, what is Muon's; losses and gradients by hand in float64."""

import math
import random
from contextlib import suppress
from itertools import count

import families
import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

import eelib
from eelib.models.lens_adapters import DraftBlock, Translators, visible
from recipes import losses, minilm, pocket_llama, pocket_t5
from recipes.batches import Text
from recipes.fine_tuning import DISTILLED, FREE_EXIT, LLAMA_JOINT, T5_FREE, T5_WEIGHTED
from recipes.losses import distillation_loss, divergence, equal_weights, exit_weights
from recipes.minilm import Row, label_loss
from recipes.own_outputs import OwnText
from recipes.pocket_llama import CONTEXT
from recipes.smollm2 import FEATURES, places_of
from recipes.texts import SEED
from recipes.training import Loss, Optimizer, Schedule, by_step, train


def test_schedule():
    """Up in a line, flat, down in a line to almost nothing; without a decay flat; up again after a new beginning."""
    schedule, flat = Schedule(steps=100, peak=2.0, warmup=10, decay=20), Schedule(100, 2.0, warmup=10, decay=1)
    assert [schedule.rate(step) for step in range(10)] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert {schedule.rate(step) for step in range(9, 81)} == {flat.rate(step) for step in range(9, 100)} == {2.0}
    assert [schedule.rate(80 + i) for i in range(20)] == pytest.approx([0.1 * (20 - i) for i in range(20)])
    assert flat.rate(50, 50) == pytest.approx(0.2)


def fresh(dtype=torch.float32):
    """A network to be trained, the same every time."""
    return families.build("llama").requires_grad_(True).to(dtype)


def batches(start):
    for step in count(start):
        rng = random.Random(step)
        yield torch.tensor([[rng.randrange(300) for _ in range(6)] for _ in range(3)])


class Killed(BaseException):
    """What a kill looks like from inside."""


def loss_for(network, killed_at=None):
    """The loss of every token but the first, doubled in the curve; a batch is of one of two parts."""

    def loss_of(batch, step):
        if step == killed_at:
            raise Killed
        logits = network(batch).logits[:, :-1].flatten(0, 1).float()
        loss = F.cross_entropy(logits, batch[:, 1:].flatten())
        return Loss(loss, batch.numel(), ("even", "odd")[step % 2], 2 * loss)

    return loss_of


@pytest.mark.parametrize(
    "dtype, muon, how", [(torch.bfloat16, True, {}), (torch.float32, False, {"averaged": True, "watch_every": 3})]
)
def test_a_resumed_run_equals_an_uninterrupted_one(dtype, muon, how, tmp_path):
    """Bit for bit, wherever it is killed; the rows of the curve, too; nothing half-written stays."""
    schedule, results = Schedule(steps=7, peak=1e-2, warmup=2, decay=3), []
    for name, ends in (("whole", [None]), ("parts", [1, 4, 5, None])):
        for end in ends:
            network = fresh(dtype)
            optimizer = Optimizer(network, muon)
            how |= {"optimizer": optimizer, "watch": lambda o=optimizer: {"norm": float(o.live[3].detach().sum())}}
            with suppress(Killed):
                loss_of = loss_for(network, end)
                leg = train(network, by_step(batches), loss_of, schedule, tmp_path / name, save_every=2, **how)
        results.append((network, [{k: v for k, v in row.items() if k != "seconds"} for row in leg["curve"]]))
    (whole, curve), (resumed, again) = results
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))
    assert curve == again and [row["step"] for row in curve if "loss" in row] == [2, 4, 6, 7]
    assert not list(tmp_path.rglob("*.partial"))
    assert any(not torch.equal(a, b) for a, b in zip(fresh(dtype).parameters(), whole.parameters()))


def test_legs_are_one_training(tmp_path):
    """A leg that ended between two checkpoints is continued; without its checkpoint, from the weights, warming up."""
    ends = []
    for folder, steps in (("whole", [7]), ("legs", [3, 7])):
        for last in steps:
            network = fresh()
            leg = train(network, by_step(batches), loss_for(network), Schedule(last, 1e-2, 2, 1), tmp_path / folder)
        ends.append((network, leg["step"], leg["place"], leg["tokens"]))
    assert ends[0][1:] == ends[1][1:] == (7, 7, 7 * 18)
    assert all(torch.equal(a, b) for a, b in zip(ends[0][0].parameters(), ends[1][0].parameters()))
    more = {"begun": leg, "save_every": 1}
    later = train(network, by_step(batches), loss_for(network), Schedule(9, 1e-2, 2, 1), tmp_path / "later", **more)
    assert [row["step"] for row in later["curve"][-2:]] == [8, 9] and later["warm"] == 7 and later["tokens"] == 9 * 18


def test_averaged_weights_and_the_curve_by_hand(tmp_path):
    """On one weight whose gradient is always 1; the curve has the mean since the row before, and that of each part."""
    network = torch.nn.Linear(1, 1, bias=False)
    values, mean = [], network.weight.item()

    def loss_of(_batch, step):
        values.append(network.weight.item())
        return Loss(network.weight.sum(), 1, ("even", "odd")[step % 2], 2 * network.weight.sum())

    leg = train(
        network, by_step(count), loss_of, Schedule(6, 0.1, 1, 1), tmp_path,
        optimizer=Optimizer(network, muon=False), averaged=True, save_every=3,
    )  # fmt: skip
    parts = {"even": 2 * values[4], "odd": values[3] + values[5]}
    assert leg["curve"][1]["parts"] == pytest.approx(parts, abs=1e-3)
    assert leg["curve"][1]["loss"] == pytest.approx(2 * sum(values[3:]) / 3, abs=1e-3)
    for step, value in enumerate([*values[1:], values[-1] - 0.1], 1):
        mean += (value - mean) * 4 / (step + 4)
    assert network.weight.item() == pytest.approx(mean, abs=1e-5)


def test_a_loss_that_is_not_finite_keeps_the_last_checkpoint(tmp_path):
    network = fresh()

    def bad(batch, step):
        return Loss(loss_for(network)(batch, step).value * (math.nan if step == 2 else 1.0), 1)

    with pytest.raises(FloatingPointError, match="step 3; the last good checkpoint"):
        train(network, by_step(batches), bad, Schedule(4, 1e-2, 1, 1), tmp_path, save_every=1)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["leg"]["step"] == 2


def test_tables_are_no_matrices(tiny):
    """Embeddings, biases and norms are AdamW's; every matrix between states is Muon's."""
    network = tiny["t5"]()
    optimizer = Optimizer(network)
    names = {id(master): name for master, (name, _) in zip(optimizer.masters, network.named_parameters())}
    rest = {names[id(p)] for group in optimizer.parts["optimizer"].param_groups for p in group["params"]}
    tables = {f"{s}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" for s in ("encoder", "decoder")}
    assert {name for name in rest if "norm" not in name} == tables | {"shared.weight"}
    assert sum(len(group["params"]) for group in optimizer.parts["muon"].param_groups) == 7 + 3 * 11
    assert "muon" not in Optimizer(Translators(3, 8)).parts  # a table of layers' biases is no matrix either


def test_weights_of_layers():
    assert equal_weights(4) == [0.25] * 4 and equal_weights(4, 6, 2) == [0.0, 0.5, 0.0, 0.5]
    assert exit_weights(4, range(5)) == [0.1, 0.2, 0.3, 0.4] and exit_weights(4, []) == [0, 0, 0, 1]


def test_divergence_is_that_of_the_known_tokens_and_the_rest():
    logits, other = torch.randn(5, 30), torch.randn(5, 30)
    best = other.log_softmax(-1).topk(4)
    got = divergence(logits, best.indices, best.values)
    known = [one.double().softmax(-1).gather(1, best.indices) for one in (other, logits)]
    p, q = (torch.cat([one, 1 - one.sum(1, keepdim=True)], dim=1) for one in known)
    torch.testing.assert_close(got.double(), (p * (p / q).log()).sum(1), atol=1e-4, rtol=0)
    assert divergence(other, best.indices, best.values).abs().max() < 1e-5


def test_the_teachers_of_distillation_learn_nothing():
    states = [torch.randn(3, 2, requires_grad=True) for _ in range(5)]
    distillation_loss(states, 2).backward()
    assert all(s.grad.abs().sum() > 0 for s in states[:2]) and all(s.grad is None for s in states[2:])


def id_pairs(seed=1):
    """(prompt, target) ids of four texts of several lengths."""
    rng = random.Random(seed)
    return [tuple([rng.randrange(5, 300) for _ in range(rng.randint(1, 6))] for _ in range(2)) for _ in range(4)]


def some_texts(seed=1):
    return [Text(np.array(p + t, dtype=np.uint16), np.arange(len(p + t)) >= len(p)) for p, t in id_pairs(seed)]


@pytest.mark.parametrize("part", ["translation", "rooms"])
def test_pocket_llama(part, tiny):
    """Cross-entropy of the targets, and its share of the other tokens but the first, with two kinds of attention."""
    model, found, losses, wanted = tiny["llama"]().float(), [], [], []
    for text in some_texts():
        ids = torch.tensor(text.ids.astype(int))
        losses.append(F.cross_entropy(model(ids[None]).logits[0, :-1].double(), ids[1:], reduction="none"))
        wanted.append(torch.from_numpy(text.wanted[1:]))
    losses, wanted = torch.cat(losses), torch.cat(wanted)
    target, others = (losses[chosen].mean().item() for chosen in (wanted, ~wanted))
    for attention in ("plain_causal", "sdpa"):
        model.set_attn_implementation(attention)
        loss = pocket_llama.target_loss(model, (part, some_texts()))
        assert loss.shown.item() == pytest.approx(target, rel=1e-5)
        assert loss.value.item() == pytest.approx(target + CONTEXT.get(part, 0.0) * others, rel=1e-5)
        assert loss.tokens == 4 * max(len(text.ids) for text in some_texts())
        found.append(torch.autograd.grad(loss.value, list(model.parameters())))
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(*found))


def layer_losses(model, name):
    """(mean cross-entropy of each layer over all targets, states [targets, width] of each layer), text by text."""
    logs, states = [[] for _ in range(model.layers)], [[] for _ in range(model.layers)]
    for prompt, target in id_pairs():
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
def test_joint_optimization(recipe, made, monkeypatch):
    """Weights and distillation are those of the papers; the head runs on a few rows at a time."""
    model = made(recipe.start)
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", (3 * model.vocab_size, 0))
    depth, (means, hidden) = model.layers, layer_losses(model, recipe.start)
    got = recipe.loss_of(model, ("part", some_texts()), 5)
    if recipe is LLAMA_JOINT:
        wanted = sum(means) / depth
    elif recipe is T5_WEIGHTED:
        plain = pocket_t5.label_loss(model.network, ("part", some_texts()))  # of the last layer alone
        assert plain.value.item() == pytest.approx(means[-1], rel=1e-4)
        assert plain.tokens == got.tokens == 4 * sum(max(map(len, side)) for side in zip(*id_pairs()))
        wanted = sum(i * loss for i, loss in enumerate(means, 1)) / (depth * (depth + 1) / 2)
    else:
        norm = model.network.decoder.final_layer_norm
        scale = norm.weight.double() / model.hidden_size**0.5
        hidden = [h * (h.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt() * scale for h in hidden]
        errors = [[(hidden[i] - h).square().mean().item() for h in hidden[FREE_EXIT:]] for i in range(FREE_EXIT)]
        exits = (FREE_EXIT * means[FREE_EXIT - 1] + depth * means[-1]) / (FREE_EXIT + depth)
        wanted = exits + DISTILLED * sum(map(min, errors)) / FREE_EXIT
    assert got.value.item() == pytest.approx(wanted, rel=1e-4) and got.part == "part" and got.tokens > 0


def test_classifiers(tiny_bert):
    """Each layer's state at position 0; in training the network's own loss, with a dropout that depends on the step."""
    model, other = (minilm.begin(tiny_bert, "sst2", "cpu") for _ in range(2))
    state, begun = model.network.state_dict(), other.network.state_dict()
    assert all(torch.equal(state[name], begun[name]) for name in state) and model.unembed.reads == "first"
    model.network.double()
    rng, losses = random.Random(1), [[] for _ in range(3)]
    rows = [Row([2, *rng.choices(range(5, 60), k=2 + i)], [0] * 2 + [i % 2] * (1 + i), i % 2) for i in range(5)]
    for row in rows:
        inputs = {"input_ids": torch.tensor([row.ids]), "token_type_ids": torch.tensor([row.types])}
        states = model.network.bert(**inputs, output_hidden_states=True).hidden_states
        for layer in range(3):
            pooled = torch.tanh(model.network.bert.pooler.dense(states[layer + 1][0, 0]))
            losses[layer].append(-torch.log_softmax(model.network.classifier(pooled), -1)[row.label].item())
    means = [sum(one) / len(one) for one in losses]
    for weights, wanted in ((equal_weights(3), sum(means) / 3), (exit_weights(3, []), means[-1])):
        loss, size, *_ = label_loss(model, weights, rows, 0)
        assert loss.item() == pytest.approx(wanted, rel=1e-5)
    assert size == 5 * max(len(row.ids) for row in rows)
    model.network.float().train()
    here, there = (label_loss(model, exit_weights(3, []), rows, step).value.item() for step in (4, 5))
    torch.manual_seed(SEED * 10**6 + 4)
    own = model.network(**minilm.inputs_of(model, rows), labels=torch.tensor([row.label for row in rows])).loss
    assert here == pytest.approx(own.item(), rel=1e-6) != there


def test_drafts_in_a_row_at_once_are_those_one_after_the_other(model_of):
    """Step by step with a cache, as decoding will: true features, then those that the block itself made."""
    model = model_of("llama")
    found = DraftBlock(model, "features", model.layers, torch.arange(30)).requires_grad_(False)
    for weight in found.parameters():
        weight.add_(0.2 * torch.randn_like(weight))  # others than its network's
    ids, nothing = torch.arange(20, 30), torch.zeros(9, 1)
    text = OwnText(0, "story", ids, 4, nothing, nothing)
    at_once = FEATURES.drafted(model, found, [text], places_of([text], 0.0, model.device), 3)
    with torch.no_grad(), eelib.models.probe.block_states(model.blocks) as states:
        model.network(ids[None])
    features = found.features(states[-1])
    for first in range(4, 8):  # the first token of a row of three drafts, after which the true ones are fed
        cache = DynamicCache()
        given, fed = features[:, : first - 1], ids[None, 1:first]
        for step in range(3):
            places, seen = torch.arange(first - 1 + step)[None], torch.ones(1, first - 1 + step).long()
            new = found.joined(given, fed)
            made_now = found.features(found.at(new, places[:, -len(fed[0]) :], visible(seen, len(fed[0])), cache))
            given, fed = made_now[:, -1:], ids[None, first + step : first + step + 1]
            torch.testing.assert_close(found.logits(given)[0, 0], at_once[step][first + step - 4], atol=1e-4, rtol=1e-4)


def test_places_of_prompts_weigh_less_and_have_what_the_model_gave_there():
    top = torch.arange(9)[:, None]
    texts = [
        OwnText(0, "story", torch.arange(n), start, top[: n - 1], top[: n - 1] / 10) for n, start in ((6, 4), (10, 2))
    ]
    every, outputs = (places_of(texts, weight, torch.device("cpu")) for weight in (0.3, 0.0))
    assert outputs.at.tolist() == [3, 4, *range(1, 9)] == outputs.top[:, 0].tolist()
    assert outputs.weights.unique().numel() == 1
    assert every.at.tolist() == [1, 2, 3, 4, *range(1, 9)] == every.top[:, 0].tolist()
    assert every.rows.tolist() == [0] * 4 + [1] * 8
    torch.testing.assert_close(every.weights, torch.tensor([0.3, 0.3] + [1.0] * 10) / 10.6)
    torch.testing.assert_close(every.likely[:, 0], every.at / 10)
