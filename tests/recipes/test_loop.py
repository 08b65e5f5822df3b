"""Training: the schedule, resuming bit for bit, the loss by hand, and nothing held out in the training texts."""

import hashlib
import json
import math
import random
from itertools import islice

import families
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoTokenizer, GenerationConfig

import eelib
from eelib.common.data import data_folder
from eelib.recipes import corpora, pocket_llama, shared
from eelib.recipes.corpora import is_held_out, joined, tatoeba
from eelib.recipes.loop import Cycles, Schedule, train
from eelib.recipes.pocket_llama import target_loss


def test_schedule():
    """Up in a line, flat, down in a line to almost nothing; never above the peak."""
    schedule = Schedule(steps=100, peak=2.0, warmup=10, decay=20)
    rates = [schedule.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert set(rates[9:81]) == {2.0}
    assert rates[80:] == pytest.approx([0.1 * (20 - i) for i in range(20)])


def test_cycles():
    """One schedule after the other: the rate falls, rises again and falls."""
    one, two = Schedule(steps=20, peak=2.0, warmup=2, decay=5), Schedule(steps=30, peak=1.0, warmup=3, decay=9)
    cycles = Cycles(one, two)
    assert cycles.steps == 50
    assert [cycles.rate(s) for s in range(50)] == [one.rate(s) for s in range(20)] + [two.rate(s) for s in range(30)]


def tiny(dtype):
    """A network to be trained, the same every time."""
    return families.build("llama").requires_grad_(True).to(dtype)


def batch_at(step):
    rng = random.Random(step)
    return [tuple([rng.randrange(300) for _ in range(rng.randint(1, 5))] for _ in range(2)) for _ in range(3)]


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
        seen.append(target_loss(model, batch))
        if len(seen) == stop:
            raise Killed
        return seen[-1]

    schedule, results = Schedule(steps=6, peak=1e-2, warmup=2, decay=3), []
    for folder, stops in ((tmp_path / "whole", [0]), (tmp_path / "parts", [killed_at + 1, 0])):
        for stop in stops:
            model, seen = tiny(dtype), []
            try:
                curve = train(model, batches, loss, schedule, folder, save_every=2)
            except Killed:
                assert len(seen) == killed_at + 1
        results.append((curve, model, seen))
    (curve, whole, all_seen), (again, resumed, seen) = results
    assert len(seen) == 6 - killed_at // 2 * 2
    assert [a.item() for a, _ in all_seen[-len(seen) :]] == [b.item() for b, _ in seen]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))
    assert [(r["step"], r["tokens"], r["loss"]) for r in curve] == [(r["step"], r["tokens"], r["loss"]) for r in again]
    assert [r["step"] for r in curve] == [2, 4, 6]
    assert not list(tmp_path.rglob("*.partial"))
    changed = [not torch.equal(a, b) for a, b in zip(tiny(dtype).parameters(), whole.parameters())]
    assert all(changed) if dtype is torch.float32 else any(changed)


def test_finished_run_is_not_begun_again(tmp_path):
    schedule = Schedule(steps=2, peak=1e-2, warmup=1, decay=1)
    curve = train(tiny(torch.float32), batches, target_loss, schedule, tmp_path, save_every=1)
    assert train(tiny(torch.float32), batches, None, schedule, tmp_path, save_every=1) == curve
    assert json.loads((tmp_path / "curve.json").read_text()) == curve


def test_loss_that_is_not_finite_keeps_the_last_checkpoint(tmp_path):
    def bad(model, batch):
        seen.append(batch)
        loss, size = target_loss(model, batch)
        return loss * (math.nan if len(seen) == 3 else 1.0), size

    seen: list = []
    with pytest.raises(FloatingPointError, match="step 3; the last good checkpoint"):
        train(tiny(torch.float32), batches, bad, Schedule(4, 1e-2, 1, 1), tmp_path, save_every=1)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 2


def test_training_learns(tmp_path):
    """One batch over and over: the loss falls to little."""
    curve = train(
        tiny(torch.float32),
        lambda start: iter(lambda: batch_at(0), None),
        target_loss,
        Schedule(steps=30, peak=1e-2, warmup=3, decay=10),
        tmp_path,
        save_every=5,
    )
    assert curve[-1]["loss"] < curve[0]["loss"] / 4


def test_target_loss_by_hand():
    """Cross-entropy of the target tokens only, one row at a time without padding."""
    model, batch = tiny(torch.float32), batch_at(7)
    losses = []
    for prompt, target in batch:
        logits = model(torch.tensor([prompt + target])).logits[0]
        losses += [F.cross_entropy(logits[len(prompt) + i - 1], torch.tensor(t)) for i, t in enumerate(target)]
    loss, size = target_loss(model, batch)
    assert loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert size == 3 * max(len(p) + len(t) for p, t in batch)


@pytest.mark.parametrize("language", ["de", "fr"])
def test_no_held_out_sentence_is_trained_on(language, folder):
    training, held = tatoeba(folder, language)
    assert len(held) > 10 and len(training) > 500 and all(is_held_out(e) for _, e in held)
    for side in (0, 1):
        assert not {pair[side] for pair in training} & {pair[side] for pair in held}


def test_no_held_out_sentence_in_any_example(folder):
    """Of either language and direction, alone or joined, over all epochs of a cycle."""
    held = {text for language in ("de", "fr") for pair in tatoeba(folder, language)[1] for text in pair}
    for epoch in range(6):
        for example in pocket_llama.examples(folder, epoch):
            sentences = f"{example.prompt}\n{example.target}".replace(". ", ".\n").split("\n")
            assert not held.intersection(sentences)


def test_held_out_is_a_fixed_share_and_ignores_case():
    drawn = [is_held_out(f"Sentence number {i}.") for i in range(20000)]
    assert sum(drawn) / 20000 == pytest.approx(1 / corpora.HELD_OUT_SHARE, rel=0.15)
    assert is_held_out("Sentence  x.") == is_held_out(" SENTENCE  X. \n")


def test_joined_keeps_every_pair_once_and_aligned():
    pairs = [(f"f{i}", f"e{i}") for i in range(50)]
    found = joined(pairs, 6, random.Random(1))
    assert sorted(f for text, _ in found for f in text.split()) == sorted(f for f, _ in pairs)
    assert all([w[1:] for w in f.split()] == [w[1:] for w in e.split()] for f, e in found)
    assert {len(f.split()) for f, _ in found} == {1, 2, 3, 4, 5, 6}


def test_long_passages_are_left_out(folder):
    texts = corpora.questions(folder, ("fairytaleqa.train",), 130)
    assert [e.target for e in texts] == [f"Ann {i}" for i in range(7)]


def test_epochs(folder, tmp_path):
    """Batches stay inside the limits, hold whole texts, end in the end token, and are the same when asked again."""
    tokenizer = pocket_llama.tokenizer_for(folder, tmp_path)
    plan = pocket_llama.epoch_batches(folder, tokenizer, 2)
    assert plan == pocket_llama.epoch_batches(folder, tokenizer, 2) != pocket_llama.epoch_batches(folder, tokenizer, 1)
    texts = {(e.prompt, e.target) for e in pocket_llama.examples(folder, 2)}
    for batch in plan:
        assert max(len(p) + len(t) for p, t in batch) * len(batch) <= shared.TOKENS_PER_BATCH
        for prompt, target in batch:
            assert target[-1] == tokenizer.eos_token_id and len(prompt) + len(target) <= shared.LONGEST
            assert (tokenizer.decode(prompt), tokenizer.decode(target[:-1])) in texts
    count = sum(len(batch) for batch in plan)
    assert count > 0.9 * len(pocket_llama.examples(folder, 2))


def test_recipe_resumes_in_the_right_epoch(folder, tmp_path, monkeypatch):
    """batches(start) continues the stream of batches(0), also past the first epoch; the end token is saved."""
    lengths = [len(pocket_llama.epoch_batches(folder, pocket_llama.tokenizer_for(folder, tmp_path), e)) for e in (0, 1)]
    start = lengths[0] + lengths[1] // 2

    def fake(model, stream, loss_of, schedule, work):
        whole = list(islice(stream(0), sum(lengths) + 2))
        for at in (1, lengths[0], start):
            assert list(islice(stream(at), len(whole) - at)) == whole[at:]

    monkeypatch.setattr(pocket_llama, "train", fake)
    monkeypatch.setattr(pocket_llama, "build", lambda device: tiny(torch.bfloat16))
    monkeypatch.setattr(pocket_llama, "write_card", lambda *args: {"card": args[1]})
    assert pocket_llama.run(folder, tmp_path / "out", tmp_path, "cpu") == {"card": tmp_path / "out"}
    tokenizer, generation = (kind.from_pretrained(tmp_path / "out") for kind in (AutoTokenizer, GenerationConfig))
    assert generation.eos_token_id == tokenizer.eos_token_id and (tmp_path / "out/model.safetensors").exists()


@pytest.mark.parametrize(
    "folder", sorted(p.parent for p in data_folder("models").glob("*/config.json")), ids=lambda p: p.name
)
def test_shipped_files_are_those_of_the_card(folder):
    """The weights are what the card measured; none is larger than what the repository may hold."""
    card = json.loads((folder / "card.json").read_text())
    files = {f.name: f for f in folder.iterdir() if f.name != "card.json"}
    assert {name: hashlib.sha256(f.read_bytes()).hexdigest() for name, f in files.items()} == card["sha256"]
    assert all(f.stat().st_size < 40e6 for f in files.values())
    assert card["seed"] and card["recipe"].startswith("python -m eelib.recipes") and card["quality"]


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
