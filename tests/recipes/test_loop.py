"""Training: the schedule, resuming bit for bit, losses by part, and the shipped files."""

import hashlib
import json
import math
import pkgutil
import random

import families
import pytest
import torch
from torch.nn import functional as F

import eelib
from eelib.common.files import data_folder
from recipes.__main__ import RECIPES
from recipes.loop import Captured, Loss, Schedule, train


def test_schedule():
    """Up in a line, flat, down in a line to almost nothing; never above the peak."""
    schedule = Schedule(steps=100, peak=2.0, warmup=10, decay=20)
    rates = [schedule.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert set(rates[9:81]) == {2.0}
    assert rates[80:] == pytest.approx([0.1 * (20 - i) for i in range(20)])


def tiny(dtype):
    """A network to be trained, the same every time."""
    return families.build("llama").requires_grad_(True).to(dtype)


def batch_at(step):
    rng = random.Random(step)
    return [[rng.randrange(300) for _ in range(6)] for _ in range(3)]


def next_token_loss(model, batch):
    """Of every token but the first; the batch is of one of two parts."""
    ids = torch.tensor(batch)
    logits = model(ids).logits[:, :-1].flatten(0, 1).float()
    loss = F.cross_entropy(logits, ids[:, 1:].flatten())
    return Loss(loss, ids.numel(), "odd" if batch[0][0] % 2 else "even", 2 * loss)


def batches(start):
    step = start
    while True:
        yield batch_at(step)
        step += 1


class Killed(BaseException):
    """What a kill looks like from inside."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("killed_at", [1, 3, 4])
def test_resumed_run_equals_uninterrupted(dtype, killed_at, tmp_path):
    def loss(model, batch):
        seen.append(next_token_loss(model, batch))
        if len(seen) == stop:
            raise Killed
        return seen[-1]

    schedule, results = Schedule(steps=6, peak=1e-2, warmup=2, decay=3), []
    for folder, stops in ((tmp_path / "whole", [0]), (tmp_path / "parts", [killed_at + 1, 0])):
        for stop in stops:  # noqa: B007  the loss above reads it
            model, seen = tiny(dtype), []
            try:
                curve = train(model, batches, loss, schedule, folder, save_every=2)
            except Killed:
                assert len(seen) == killed_at + 1
        results.append((curve, model, seen))
    (curve, whole, all_seen), (again, resumed, seen) = results
    assert len(seen) == 6 - killed_at // 2 * 2
    assert [a.value.item() for a in all_seen[-len(seen) :]] == [b.value.item() for b in seen]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))
    assert [(r["step"], r["tokens"], r["loss"]) for r in curve] == [(r["step"], r["tokens"], r["loss"]) for r in again]
    assert [r["step"] for r in curve] == [2, 4, 6]
    assert not list(tmp_path.rglob("*.partial"))
    changed = [not torch.equal(a, b) for a, b in zip(tiny(dtype).parameters(), whole.parameters())]
    assert all(changed) if dtype is torch.float32 else any(changed)


def test_finished_run_is_not_begun_again(tmp_path):
    schedule = Schedule(steps=2, peak=1e-2, warmup=1, decay=1)
    curve = train(tiny(torch.float32), batches, next_token_loss, schedule, tmp_path, save_every=1)
    assert train(tiny(torch.float32), batches, None, schedule, tmp_path, save_every=1) == curve
    assert json.loads((tmp_path / "curve.json").read_text()) == curve


def test_loss_that_is_not_finite_keeps_the_last_checkpoint(tmp_path):
    def bad(model, batch):
        seen.append(batch)
        loss = next_token_loss(model, batch)
        return Loss(loss.value * (math.nan if len(seen) == 3 else 1.0), loss.tokens)

    seen: list = []
    with pytest.raises(FloatingPointError, match="step 3; the last good checkpoint"):
        train(tiny(torch.float32), batches, bad, Schedule(4, 1e-2, 1, 1), tmp_path, save_every=1)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 2


def test_training_learns(tmp_path):
    """One batch over and over: the loss falls to little."""
    curve = train(
        tiny(torch.float32),
        lambda start: iter(lambda: batch_at(0), None),
        next_token_loss,
        Schedule(steps=30, peak=1e-2, warmup=3, decay=10),
        tmp_path,
        save_every=5,
    )
    assert curve[-1]["loss"] < curve[0]["loss"] / 4


def test_curve_has_the_loss_of_each_part(tmp_path):
    """What is shown, not what is minimized; the mean over a part's steps, parts without a step left out."""
    seen = []

    def loss(model, batch):
        seen.append(next_token_loss(model, batch))
        return seen[-1]

    curve = train(tiny(torch.float32), batches, loss, Schedule(8, 1e-3, 1, 1), tmp_path, save_every=4)
    for row, steps in zip(curve, (seen[:4], seen[4:])):
        parts = {}
        for step in steps:
            parts.setdefault(step.part, []).append(step.shown.item())
        assert row["parts"] == {name: pytest.approx(sum(v) / len(v), abs=1e-3) for name, v in parts.items()}
        assert row["loss"] == pytest.approx(sum(step.shown.item() for step in steps) / 4, abs=1e-3)
    assert set(curve[0]["parts"]) <= {"odd", "even"} and curve[0]["parts"]


# Outputs are never kept; the others are trained in legs and come into data/models with their last one.
NOT_YET = {f"smollm2-135m-instruct-{part}" for part in ("outputs", "block", "features", "joint")}
SHIPPED = sorted({*RECIPES} - NOT_YET)


def planned_steps(recipe, tokens):
    """Steps of a recipe: those of its schedule, of all its stages, or of epochs over so many tokens in all."""
    if hasattr(recipe, "stages"):
        return sum(stage.schedule.steps for stage in recipe.stages)
    if hasattr(recipe, "epochs"):
        return recipe.epochs * math.ceil(tokens / recipe.epochs / recipe.batch)
    return (getattr(recipe, "SCHEDULE", None) or recipe.schedule).steps


def test_every_recipe_has_its_model():
    assert {folder.name for folder in data_folder("models").iterdir()} == set(SHIPPED)
    assert set(RECIPES) >= NOT_YET


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_are_those_of_the_card(name):
    """The weights are what the card measured; none is larger than what the repository may hold."""
    folder = data_folder("models", name)
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    files = {f.relative_to(folder).as_posix(): f for f in folder.rglob("*") if f.is_file() and f.name != "card.json"}
    assert {name: hashlib.sha256(f.read_bytes()).hexdigest() for name, f in files.items()} == card["sha256"]
    assert files and all(f.stat().st_size < 40e6 for f in files.values())
    assert card["seed"] and card["recipe"].startswith("python -m recipes") and card["quality"]
    if name != "pocket-tagger":  # its epochs are held against its recipe's in test_pocket_tagger.py
        recipe = pkgutil.resolve_name(f"recipes.{RECIPES[name]}")
        assert card["steps"] == planned_steps(recipe, card["tokens"])


@pytest.mark.parametrize("name, layer", [("pocket-llama-kangaroo", 4), ("pocket-llama-lens", 4)])
def test_a_shipped_reading_reads_its_model(name, layer, tmp_path):
    """More of its tokens are final at the layer than the model's own head says there, as the card has it."""
    task = eelib.load_task("translation/de-en", limit=4)
    given = dict(max_new_tokens=24, folder=tmp_path, progress=False)
    read, plain = (eelib.trace(eelib.load_model(of, device="cpu"), task, **given) for of in (name, "pocket-llama"))
    assert read.tokens["token_id"].tolist() == plain.tokens["token_id"].tolist()
    early = [(trace["top1"][:, layer] == trace.tokens["token_id"]).mean() for trace in (read, plain)]
    assert early[0] > early[1] + 0.03, early


def test_shipped_tokenizer_gives_every_text_back():
    tokenizer = eelib.load_model("pocket-llama").tokenizer
    texts = (
        "  two  spaces ",
        "<0x41>",
        "emoji 😀👩‍👩‍👧",
        "don't – well-known…",
        "é e\u0301 ﷽",
        "\n\n\t a",
        "</s> <|end",
        "",
    )
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_step_towards_rate_1_is_the_librarys_step():
    """What Captured relies on: Muon's change is proportional to its rate, weight decay included."""
    torch.manual_seed(0)
    start = [torch.randn(6, 4), torch.randn(4, 9)]
    targets, plain = ([p.clone().requires_grad_(True) for p in start] for _ in range(2))
    captured = Captured(targets, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    library = torch.optim.Muon(plain, lr=1.0, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    for rate in (0.3, 0.01, 0.002):
        for copy, p in zip(captured.copies, plain):
            p.grad = torch.randn_like(p)
            copy.grad.copy_(p.grad)
        library.param_groups[0]["lr"] = rate
        library.step()
        captured.step(rate)
        for target, p in zip(targets, plain):
            torch.testing.assert_close(target, p, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_recorded_steps_are_the_plain_ones(tmp_path):
    """Six steps of a tiny model, most of them a replayed graph, against the same on the CPU."""
    schedule, results = Schedule(steps=6, peak=1e-2, warmup=2, decay=3), []
    for device in ("cpu", "cuda"):
        model = tiny(torch.float32).to(device)

        def loss(network, batch, device=device):
            ids = torch.tensor(batch, device=device)
            logits = network(ids).logits[:, :-1].flatten(0, 1)
            return Loss(F.cross_entropy(logits, ids[:, 1:].flatten()), ids.numel())

        results.append([row["loss"] for row in train(model, batches, loss, schedule, tmp_path / device, save_every=1)])
    assert results[0] == pytest.approx(results[1], abs=5e-3)
