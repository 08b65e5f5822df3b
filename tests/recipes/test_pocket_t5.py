"""pocket-t5: the loss by hand, what the optimizer treats as a matrix, resuming, batches, and the saved folder."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import eelib
from eelib.common.errors import InputError
from recipes import pocket_t5
from recipes.batches import TOKENS_PER_BATCH, Phase, Text, order_of
from recipes.loop import MasterOptimizer, Schedule, train
from recipes.pocket_t5 import PHASES, SCHEDULE, build, grow, label_loss, part_batches
from recipes.quality import greedy_texts
from recipes.texts import PARTS, SEEN, WHOLE

SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 3}


@pytest.fixture
def tiny(tokenizer):
    """Makes the recipe's network at a tiny size."""
    return partial(build, tokenizer, **SIZES)


def texts_at(step):
    """(prompt, target) ids of four texts."""
    rng = random.Random(step)
    return [tuple([rng.randrange(300) for _ in range(rng.randint(1, 6))] for _ in range(2)) for _ in range(4)]


def batch_at(step):
    return "part", [Text(np.array(p + t, dtype=np.uint16), np.arange(len(p + t)) >= len(p)) for p, t in texts_at(step)]


def test_loss_by_hand(tiny):
    """Cross-entropy of the target tokens only, one row at a time: neither side's padding reaches it."""
    model, batch = tiny().float(), texts_at(3)
    assert len({len(p) for p, _ in batch}) > 1 and len({len(t) for _, t in batch}) > 1
    losses = []
    for prompt, target in batch:
        begun = torch.tensor([[model.config.pad_token_id, *target[:-1]]])
        logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=begun).logits[0].double()
        losses += list(F.cross_entropy(logits, torch.tensor(target), reduction="none"))
    loss, size, *_ = label_loss(model, batch_at(3))
    assert loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert size == 4 * (max(len(p) for p, _ in batch) + max(len(t) for _, t in batch))


def test_untrained_model_knows_nothing_and_guesses_evenly(tiny):
    """The first loss is near that of a uniform guess: neither embeddings nor norm begin at a scale that shouts."""
    loss, *_ = label_loss(tiny(), batch_at(1))
    assert loss.item() == pytest.approx(torch.tensor(8192.0).log().item(), abs=1.0)


def test_tables_are_no_matrices(tiny):
    """The shared embedding and the position bias are left to AdamW; every other matrix is Muon's."""
    model = tiny()
    optimizer = MasterOptimizer(model)
    name_of = {id(moved): name for moved, (name, _) in zip(optimizer.moved, model.named_parameters())}
    parts = (optimizer.inner.muon, optimizer.outer)
    muon, rest = ({name_of[id(p)] for group in part.param_groups for p in group["params"]} for part in parts)
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
        if [t.ids.tolist() for t in batch[1]] == [t.ids.tolist() for t in batch_at(3)[1]]:
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


def test_phases_fill_the_schedule_and_no_part_reaches_the_epochs_of_further_trainings():
    """The rate falls in the last phase; about so many batches has each part's epoch with the real corpora."""
    assert sum(phase.steps for phase in PHASES) == SCHEDULE.steps and PHASES[-1].steps == SCHEDULE.decay
    assert {name for phase in PHASES for name in phase.shares} == set(WHOLE)
    batches = {"translation": 1523, "captions": 856, "rooms": 971, "reading": 269, "headlines": 347, "text": 571}
    order = order_of(PHASES)
    assert all(order.count(name) < SEEN * batches[name] for name in WHOLE)


def test_batches(folder, tokenizer, tmp_path, few_stories):
    """Inside the limit on either side together, whole texts, the same when asked again; some questions stand together.

    Every target ends in the end token, the last of them with the text.
    """
    most = {}
    for part in PARTS:
        plan, again = (part_batches(folder, tmp_path, tokenizer, part, 1) for _ in range(2))
        assert [[t.ids.tolist() for t in b] for b in plan] == [[t.ids.tolist() for t in b] for b in again]
        for batch in plan:
            prompts, targets = ([(t.wanted == kind).sum() for t in batch] for kind in (False, True))
            assert len(batch) * (max(prompts) + max(targets)) <= TOKENS_PER_BATCH and min(prompts) and min(targets)
            for text in batch:
                ends = np.flatnonzero(np.diff(text.wanted.astype(int), append=0) < 0)
                assert (text.ids[ends] == tokenizer.eos_token_id).all() and ends[-1] == len(text.ids) - 1
                most[part] = max(most.get(part, 1), len(ends))
    assert {part for part in PARTS if most[part] > 1} == {"rooms", "reading"}


def test_a_grown_encoder_is_the_same_function(tiny):
    """With three blocks for each one; the last matrices of the copies are not 0 for ever; other numbers are refused."""
    torch.manual_seed(3)
    shallow, deep = tiny(num_layers=2).float(), tiny(num_layers=6).float()
    nn.init.normal_(shallow.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight)
    grow(deep, shallow)
    ids, begun = torch.randint(9, 300, (2, 7)), torch.randint(9, 300, (2, 4))
    wanted = shallow(input_ids=ids, decoder_input_ids=begun).logits
    said = deep(input_ids=ids, decoder_input_ids=begun).logits
    assert torch.allclose(said, wanted, atol=1e-5)
    said.square().mean().backward()
    assert all(block.layer[0].SelfAttention.o.weight.grad.any() for block in deep.encoder.block)
    with pytest.raises(InputError, match="an encoder of 2 blocks cannot grow to 3; allowed: multiples"):
        grow(tiny(num_layers=3), shallow)


def test_recipe_ends_in_a_folder_that_loads(folder, tmp_path, monkeypatch, tiny, tokenizer, few_stories):
    """The whole recipe at a tiny size: the saved model is an encoder-decoder that starts from padding and can end.

    Without the first edition it says in one line where that is.
    """
    with pytest.raises(InputError, match="git archive 574ee76 data/models/pocket-t5 "):
        pocket_t5.run(folder, tmp_path / "out", tmp_path / "work", "cpu")
    tiny().save_pretrained(tmp_path / "work/first_edition")
    tokenizer.save_pretrained(tmp_path / "work/first_edition")
    monkeypatch.setattr(pocket_t5, "SCHEDULE", Schedule(steps=6, peak=1e-3, warmup=1, decay=1))
    monkeypatch.setattr(pocket_t5, "PHASES", [Phase(6, dict.fromkeys(WHOLE, 1.0))])
    trained = tiny()
    monkeypatch.setattr(pocket_t5, "build", lambda tokenizer, device: trained)
    monkeypatch.setattr(pocket_t5, "write_card", lambda corpora, out, *_, **_more: {"card": out})
    out = tmp_path / "out"
    assert pocket_t5.run(folder, out, tmp_path / "work", "cpu") == {"card": out}
    model = eelib.load_model(str(out), device="cpu")
    config, end = model.network.config, model.tokenizer.eos_token_id
    assert (model.kind, model.layers, model.hidden_size, model.context_length) == ("seq2seq", 3, 32, 512)
    assert config.decoder_start_token_id == config.pad_token_id == model.tokenizer.pad_token_id
    assert model.eos_ids == {end} and all("cross_attention" in part.sums for part in model.components)
    prompt = PARTS["captions"](folder, tmp_path, 0)[0].prompt
    assert all(isinstance(text, str) for text in greedy_texts(model, [prompt], 4))
    assert all(torch.equal(a.float(), b) for a, b in zip(trained.parameters(), model.network.parameters()))


def test_size(tokenizer):
    """About 9 million weights, in as many encoder as decoder blocks."""
    with torch.device("meta"):
        model = build(tokenizer, "meta")
    assert 9.0e6 < sum(p.numel() for p in model.parameters()) < 9.5e6
    assert len(model.encoder.block) == len(model.decoder.block) == 8
