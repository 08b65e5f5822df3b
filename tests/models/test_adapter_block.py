"""An adapter block: by hand, the same in steps as whole, loaded with its model only, and drafted through."""

import pytest
import torch

import eelib
from eelib.common.errors import CheckpointError, InputError
from eelib.exits.decoding import loop
from eelib.models.kv_cache import growing_cache
from eelib.models.lens_adapters import BLOCK_FILE, AdapterBlock, base_of, save_lens_adapter
from eelib.tasks.task import Task
from eelib.tracing.decode import greedy_decode, states_of

PROMPTS = ["the cat sat on", "a dog", "the mat", "on a dog the cat"]
LAYER = 1


def made(layers, hidden_size, layer=LAYER, heads=2, seed=3):
    """A block that does something, exact in half precision."""
    torch.manual_seed(seed)
    found = AdapterBlock(layers, layer, hidden_size, heads).requires_grad_(False)
    for part in found.parameters():
        part.copy_(torch.randn_like(part).mul(0.5).half())
    return found


@pytest.fixture
def both(model_of, folder_of, tmp_path):
    """(a model, its block, the same model with it)."""
    model = model_of("llama")
    block = made(model.layers, model.hidden_size)
    save_lens_adapter(block, tmp_path / "a-block", str(folder_of("llama")), model.hash)
    return model, block, eelib.load_model(tmp_path / "a-block", device="cpu")


def test_the_block_is_one_attention_between_two_norms():
    block, states = made(3, 8), torch.randn(1, 5, 8).double()

    def normed(values, norm):
        return values / (values.pow(2).mean() + 1e-5).sqrt() * norm.weight.double()

    def rotated(value, place):
        turns = [torch.polar(torch.tensor(1.0), torch.tensor(place * 1e4 ** -(i / 2))) for i in range(2)]
        pairs = torch.complex(value[:2], value[2:]) * torch.stack(turns).to(torch.complex128)
        return torch.cat([pairs.real, pairs.imag])

    query, key, value, out = (part.weight.double() for part in (block.query, block.key, block.value, block.out))
    for at in range(5):
        rows = [normed(states[0, i], block.norm_before) for i in range(at + 1)]
        heads = []
        for part in (slice(0, 4), slice(4, 8)):
            asked = rotated((query @ rows[at])[part], at)
            scores = torch.stack([asked @ rotated((key @ row)[part], i) / 2 for i, row in enumerate(rows)])
            heads.append(sum(s * (value @ row)[part] for s, row in zip(scores.softmax(0), rows)))
        wanted = normed(rows[at] + out @ torch.cat(heads), block.norm_after)
        torch.testing.assert_close(block(states.float())[0, at].double(), wanted, atol=1e-5, rtol=1e-5)


def test_steps_on_padded_rows_are_what_each_row_is_alone():
    block, states, cache = made(3, 8), torch.randn(2, 6, 8), growing_cache()
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    parts = [block(states[:, :3], mask[:, :3], cache)]
    parts += [block(states[:, at : at + 1], mask[:, : at + 1], cache) for at in range(3, 6)]
    steps = torch.cat(parts, dim=1)
    torch.testing.assert_close(steps[0], block(states[:1])[0])
    torch.testing.assert_close(steps[1, 2:], block(states[1:, 2:])[0])
    assert block(states.bfloat16()).dtype == torch.bfloat16


def test_a_block_that_has_learnt_nothing_leaves_what_the_layer_says(model_of):
    model = model_of("llama")
    states = torch.randn(1, 5, model.hidden_size)
    said = model.unembed(AdapterBlock(model.layers, 1, model.hidden_size, 2)(states)[0])
    torch.testing.assert_close(said, model.unembed(states[0]), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_its_layer_says_the_same_in_a_trace_whole_and_in_drafts(both, tmp_path, batch_size):
    model, block, found = both
    ids = model.encode(PROMPTS)
    plain = greedy_decode(model, ids, 8)
    trace = eelib.trace(
        found,
        Task.from_prompts(PROMPTS),
        max_new_tokens=8,
        batch_size=batch_size,
        folder=tmp_path / "runs",
        progress=False,
    )
    outputs = list(trace.tokens.groupby("sequence")["token_id"].agg(list))
    assert outputs == plain and found.hash != model.hash
    whole, _ = states_of(found, ids, outputs)
    bare, _ = states_of(model, ids, outputs)
    wanted = model.unembed(whole[:, LAYER]).argmax(-1)
    assert torch.equal(torch.tensor(trace["top1"][:, LAYER]).long(), wanted)
    assert not torch.equal(model.unembed(bare[:, LAYER]).argmax(-1), wanted)
    for layer in (0, 2, 3):
        assert torch.equal(whole[:, layer], bare[:, layer])
    # Drafts: with all of the network's keys there, what the block says of each token is what it says of the whole text.
    full = eelib.generate(
        found, PROMPTS, exit_layers=(LAYER,), kv_policy="full", batch_size=batch_size, max_new_tokens=8
    ).tokens
    left = full.groupby("sequence")["token_id"].agg(list)
    states, _ = states_of(found, ids, list(left))
    assert full["token_id"].tolist() == model.unembed(states[:, LAYER]).argmax(-1).tolist()


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("draft", [1, 3])
def test_drafts_are_what_the_block_says_and_outputs_are_plain_decoding_s(both, batch_size, draft, monkeypatch):
    model, _, found = both
    ids, seen, accept = model.encode(PROMPTS), [], loop.accept

    def recorded(sequence, *given):
        ids_so_far = [token.token_id for token in sequence.tokens]
        start = len(ids_so_far) - sequence.drafts
        seen.append((sequence.index, ids_so_far[:start], ids_so_far[start:]))
        accept(sequence, *given)

    monkeypatch.setattr(loop, "accept", recorded)
    made = eelib.generate(
        found,
        PROMPTS,
        draft="block",
        draft_length=draft,
        batch_size=batch_size,
        max_new_tokens=8,
    )
    assert list(made.tokens.groupby("sequence")["token_id"].agg(list)) == greedy_decode(model, ids, 8)
    drafted = [(number, before, own) for number, before, own in seen if own]
    assert sum(len(own) for _, _, own in drafted) == made.sequences["drafted"].sum() > 0
    if batch_size == 1:  # rows are numbered in their batch
        by_length = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        starts = iter(by_length)
        current = None
        for _, before, own in seen:
            if not before:
                current = ids[next(starts)]
            if own:
                states, _ = states_of(found, [current], [[*before, *own]])
                said = model.unembed(states[:, LAYER]).argmax(-1).tolist()
                assert said[len(before) :] == own


def test_the_block_runs_where_its_layer_is_asked_only(both, monkeypatch):
    _, _, found = both
    calls, forward = [], AdapterBlock.forward
    monkeypatch.setattr(AdapterBlock, "forward", lambda self, *given: calls.append(1) or forward(self, *given))
    for given in (dict(), dict(exit_layers=(2,), kv_policy="deferred")):
        eelib.generate(found, PROMPTS[:1], max_new_tokens=4, **given)
    assert not calls
    eelib.generate(found, PROMPTS[:1], exit_layers=(LAYER,), kv_policy="deferred", max_new_tokens=4)
    assert calls


def test_what_can_t_be_is_refused_in_one_line(both, model_of, folder_of, tmp_path):
    model, block, found = both
    base = str(folder_of("llama"))
    save_lens_adapter(block, tmp_path / "other", base, "0" * 64)
    with pytest.raises(CheckpointError, match="other was trained for other weights of .* than these"):
        eelib.load_model(tmp_path / "other", device="cpu")
    save_lens_adapter(made(model.layers, model.hidden_size, layer=model.layers), tmp_path / "last", base, model.hash)
    with pytest.raises(CheckpointError, match="adapter block after layer 3; .* has layers 1 to 3"):
        eelib.load_model(tmp_path / "last", device="cpu")
    save_lens_adapter(made(model.layers, 8), tmp_path / "shape", base, model.hash)
    with pytest.raises(CheckpointError, match="is damaged"):
        eelib.load_model(tmp_path / "shape", device="cpu")
    (tmp_path / "shape" / BLOCK_FILE).write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="is damaged"):
        eelib.load_model(tmp_path / "shape", device="cpu")
    for family in ("t5", "bert_labels"):
        whole = model_of(family)
        save_lens_adapter(made(whole.layers, whole.hidden_size), tmp_path / family, str(folder_of(family)), whole.hash)
        with pytest.raises(CheckpointError, match="only decoder-only models with an ordinary cache"):
            eelib.load_model(tmp_path / family, device="cpu")
    assert base_of(tmp_path / "a-block") == base


def test_keys_that_would_be_missing_are_refused(model_of, folder_of, tmp_path):
    model = model_of("llama")
    block = made(model.layers, model.hidden_size, layer=2)
    save_lens_adapter(block, tmp_path / "second", str(folder_of("llama")), model.hash)
    found = eelib.load_model(tmp_path / "second", device="cpu")
    for keys in ("copy", "project"):
        with pytest.raises(InputError, match="a token that exits before layer 2 .* has no keys"):
            eelib.generate(found, ["a dog"], gate="confidence", kv_policy=keys)
        some = eelib.generate(found, ["a dog"], exit_layers=(2,), kv_policy=keys, max_new_tokens=4).tokens
        assert len(some) and (some["exit_layer"] == 2)[1:].all()
