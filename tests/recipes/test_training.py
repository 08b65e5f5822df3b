"""The training loop: schedule, resuming bit for bit, legs, what is Muon's; losses and gradients in float64."""

import json
import math
import random
from itertools import count

import families
import pytest
import torch
from torch.nn import functional as F

from recipes import losses, pocket_bert, pocket_t5
from recipes.losses import (
    calm_weights,
    distillation_loss,
    divergence,
    imitation_loss,
    layers_loss,
    turning_weights,
)
from recipes.training import Loss, Optimizer, Schedule, by_step, train


def test_schedule():
    """Up in a line, flat, down in a line to almost nothing; without a decay flat; up again after a new beginning."""
    schedule = Schedule(steps=100, peak=2.0, warmup=10, decay=20)
    rates = [schedule.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert set(rates[9:81]) == {2.0}
    assert rates[80:] == pytest.approx([0.1 * (20 - i) for i in range(20)])
    flat = Schedule(steps=100, peak=2.0, warmup=10, decay=1)
    assert {flat.rate(step) for step in range(9, 100)} == {2.0} and flat.rate(50, 50) == pytest.approx(0.2)


def tiny(dtype=torch.float32):
    """A network to be trained, the same every time."""
    return families.build("llama").requires_grad_(True).to(dtype)


def batch_at(step):
    rng = random.Random(step)
    return torch.tensor([[rng.randrange(300) for _ in range(6)] for _ in range(3)])


def batches(start):
    return (batch_at(step) for step in count(start))


def loss_for(network):
    """The loss of every token but the first, doubled in the curve; a batch is of one of two parts."""

    def loss_of(batch, step):
        logits = network(batch).logits[:, :-1].flatten(0, 1).float()
        loss = F.cross_entropy(logits, batch[:, 1:].flatten())
        return Loss(loss, batch.numel(), ("even", "odd")[step % 2], 2 * loss)

    return loss_of


class Killed(BaseException):
    """What a kill looks like from inside."""


def killed_in(loss_of, at):
    """The loss until step `at`; None: for ever."""

    def dies(batch, step):
        if step == at:
            raise Killed
        return loss_of(batch, step)

    return dies


HOW = {
    "Muon, bfloat16": {"dtype": torch.bfloat16},
    "Muon, float32": {"dtype": torch.float32},
    "averaged AdamW": {"muon": False, "averaged": True, "watch_every": 3},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("stops", [[1], [3], [4, 5]])
def test_a_resumed_run_equals_an_uninterrupted_one(how, stops, tmp_path):
    """Bit for bit, wherever it is killed; the rows of the curve, too; nothing half-written stays."""
    how = dict(HOW[how])
    dtype, muon = how.pop("dtype", torch.float32), how.pop("muon", True)
    schedule, results = Schedule(steps=7, peak=1e-2, warmup=2, decay=3), []
    for name, ends in (("whole", [None]), ("parts", [*stops, None])):
        for end in ends:
            network = tiny(dtype)
            optimizer, loss_of = Optimizer(network, muon), killed_in(loss_for(network), end)
            more = dict(
                how,
                optimizer=optimizer,
                save_every=2,
                watch=lambda o=optimizer: {"norm": float(o.live[3].detach().sum())},
            )
            try:
                leg = train(network, by_step(batches), loss_of, schedule, tmp_path / name, **more)
            except Killed:
                continue
        results.append((network, [{k: v for k, v in row.items() if k != "seconds"} for row in leg["curve"]]))
    (whole, curve), (resumed, again) = results
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))
    assert curve == again and [row["step"] for row in curve if "loss" in row] == [2, 4, 6, 7]
    kept = json.loads((tmp_path / "parts/curve.json").read_text())
    assert [row["step"] for row in kept] == [2, 4, 6, 7] and not list(tmp_path.rglob("*.partial"))
    assert any(not torch.equal(a, b) for a, b in zip(tiny(dtype).parameters(), whole.parameters()))


def test_legs_are_one_training(tmp_path):
    """A leg that ended between two checkpoints is continued; without its checkpoint, from the weights, warming up."""
    ends = []
    for folder, steps in (("whole", [7]), ("legs", [3, 7])):
        for last in steps:
            network = tiny()
            leg = train(network, by_step(batches), loss_for(network), Schedule(last, 1e-2, 2, 1), tmp_path / folder)
        ends.append((network, leg["step"], leg["place"], leg["tokens"]))
    assert ends[0][1:] == ends[1][1:] == (7, 7, 7 * 18)
    assert all(torch.equal(a, b) for a, b in zip(ends[0][0].parameters(), ends[1][0].parameters()))
    steps = []
    loss_of = loss_for(network)
    later = train(
        network, by_step(batches), lambda batch, step: steps.append(step) or loss_of(batch, step),
        Schedule(9, 1e-2, 2, 1), tmp_path / "later", begun=leg,
    )  # fmt: skip
    assert steps == [7, 8] and later["warm"] == 7 and later["tokens"] == 9 * 18
    stopped = train(tiny(), by_step(batches), None, Schedule(9, 1e-2), tmp_path / "no time", until=-math.inf)
    assert stopped["step"] == 0


def test_averaged_weights_are_the_mean_of_the_last_steps(tmp_path):
    """By hand, on one weight whose gradient is always 1; the first steps count as much as each other."""
    network = torch.nn.Linear(1, 1, bias=False)
    values, mean = [], network.weight.item()

    def loss_of(_batch, _step):
        values.append(network.weight.item())
        return Loss(network.weight.sum(), 1)

    train(
        network, by_step(count), loss_of, Schedule(6, 0.1, 1, 1), tmp_path,
        optimizer=Optimizer(network, muon=False), averaged=True,
    )  # fmt: skip
    for step, value in enumerate([*values[1:], values[-1] - 0.1], 1):
        mean += (value - mean) * 4 / (step + 4)
    assert network.weight.item() == pytest.approx(mean, abs=1e-5)


def test_a_loss_that_is_not_finite_keeps_the_last_checkpoint(tmp_path):
    network = tiny()

    def bad(batch, step):
        return Loss(loss_for(network)(batch, step).value * (math.nan if step == 2 else 1.0), 1)

    with pytest.raises(FloatingPointError, match="step 3; the last good checkpoint"):
        train(network, by_step(batches), bad, Schedule(4, 1e-2, 1, 1), tmp_path, save_every=1)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["leg"]["step"] == 2


def test_training_learns_and_the_curve_has_the_loss_of_each_part(tmp_path):
    """One batch over and over; the curve has what is shown, the mean over the steps of each part."""
    network, seen = tiny(), []
    loss_of, stream = loss_for(network), lambda _start: iter(lambda: batch_at(0), None)

    def loss(batch, step):
        seen.append(loss_of(batch, step))
        return seen[-1]

    curve = train(network, by_step(stream), loss, Schedule(30, 1e-2, 3, 10), tmp_path, save_every=5)["curve"]
    assert curve[-1]["loss"] < curve[0]["loss"] / 4
    shown = [step.shown.item() for step in seen[:5]]
    assert curve[0]["loss"] == pytest.approx(sum(shown) / 5, abs=1e-3)
    assert curve[0]["parts"]["odd"] == pytest.approx((shown[1] + shown[3]) / 2, abs=1e-3)


def matrices(network):
    """(names of Muon's weights, names of AdamW's)."""
    optimizer = Optimizer(network)
    names = {id(master): name for master, (name, _) in zip(optimizer.masters, network.named_parameters())}
    groups = (optimizer.parts[part].param_groups for part in ("muon", "optimizer"))
    return tuple({names[id(p)] for group in part for p in group["params"]} for part in groups)


def test_tables_and_heads_are_no_matrices(tokenizer):
    """Embeddings, position biases, norms and heads are AdamW's; every matrix between states is Muon's."""
    muon, rest = matrices(pocket_t5.build(tokenizer, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_decoder_layers=3))
    tables = {f"{s}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" for s in ("encoder", "decoder")}
    assert {name for name in rest if "norm" not in name} == tables | {"shared.weight"} and len(muon) == 7 + 3 * 11
    config = pocket_bert.build(hidden_size=32, num_hidden_layers=3, intermediate_size=48).config
    muon, rest = matrices(pocket_bert.BertForSequenceClassification(config))
    assert {name for name in rest if name.endswith("weight") and "LayerNorm" not in name} == {"classifier.weight"} | {
        f"bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")
    }
    assert len(muon) == 3 * 6 + 1 and "bert.pooler.dense.weight" in muon


def test_some_layers_have_a_weight_at_some_steps():
    assert turning_weights(4, 6, 1) == [0.25] * 4
    assert turning_weights(4, 6, 2) == [0.0, 0.5, 0.0, 0.5]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "t5_tied", "bert_labels"])
@pytest.mark.parametrize("at_once", [1, 10**6])
def test_the_layers_loss_and_its_gradients_are_those_of_float64(name, at_once, model_of, monkeypatch):
    """Whole, and one row at a time, through the unembeddings of several families."""
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", (at_once, at_once))
    model = model_of(name)
    torch.manual_seed(3)
    states = [torch.randn(7, model.hidden_size, requires_grad=True) for _ in range(model.layers)]
    labels, weights = torch.randint(model.vocab_size, (7,)), calm_weights(model.layers)
    loss = layers_loss(model.unembed, states, labels, weights)
    got = torch.autograd.grad(loss, states)
    logs = [model.unembed(state).double().log_softmax(-1)[torch.arange(7), labels].mean() for state in states]
    plain = -sum(w * x for w, x in zip(weights, logs))
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    for mine, wanted in zip(got, torch.autograd.grad(plain, states)):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-7)


def test_imitation_by_hand(monkeypatch):
    """KL of each layer's readout from the last one's, in float64, whatever the number of rows at once."""
    head = torch.nn.Linear(5, 11).double().requires_grad_(False)
    head.vocab_size = 11
    states = [torch.randn(7, 5, dtype=torch.double, requires_grad=True) for _ in range(3)]
    last, weights = torch.randn(7, 5, dtype=torch.double, requires_grad=True), [0.2, 0.0, 0.8]
    goal = torch.softmax(head(last), -1)
    kl = [(goal * (goal.log() - torch.log_softmax(head(s), -1))).sum(-1).mean() for s in states]
    wanted = sum(w * one for w, one in zip(weights, kl)).item()
    for at_once in (11, 33, 10**6):
        monkeypatch.setattr(losses, "LOGITS_AT_ONCE", (at_once, at_once))
        loss = imitation_loss(head, states, last, weights)
        assert loss.item() == pytest.approx(wanted)
    loss.backward()
    assert last.grad is None and states[1].grad is None and states[0].grad.abs().sum() > 0


def test_divergence_is_that_of_the_known_tokens_and_the_rest():
    logits, other = torch.randn(5, 30), torch.randn(5, 30)
    best = other.log_softmax(-1).topk(4)
    got = divergence(logits, best.indices, best.values)
    p, q = other.double().softmax(-1), logits.double().softmax(-1)
    for row in range(5):
        at = best.indices[row]
        shares = [torch.cat([one[row, at], (1 - one[row, at].sum())[None]]) for one in (p, q)]
        wanted = (shares[0] * (shares[0] / shares[1]).log()).sum()
        assert got[row].item() == pytest.approx(wanted.item(), abs=1e-4)
    assert divergence(other, best.indices, best.values).abs().max() < 1e-5


def test_distillation_draws_shallow_layers_to_their_closest_deep_one():
    """By hand; deep layers are the teachers, whom no gradient reaches."""
    rows = ([[0.0, 0.0]], [[1.0, 1.0]], [[4.0, 4.0]], [[1.0, 0.0]], [[9.0, 9.0]])
    states = [torch.tensor(row, requires_grad=True) for row in rows]
    loss = distillation_loss(states, 2)
    assert loss.item() == pytest.approx((0.5 + 0.5) / 2)  # both to layer 4
    loss.backward()
    assert all(s.grad.abs().sum() > 0 for s in states[:2]) and all(s.grad is None for s in states[2:])
