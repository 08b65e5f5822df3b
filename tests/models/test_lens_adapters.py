"""Lens adapters: inner layers read through translators, by hand, or a draft block; loaded for their model only."""

import pytest
import torch

import eelib
from eelib.common.errors import CheckpointError, InputError
from eelib.models.block_runner import BlockRunner
from eelib.models.lens_adapters import (
    DRAFT_FILE,
    TRANSLATORS_FILE,
    DraftBlock,
    Translators,
    base_of,
    save_draft,
    save_translators,
)
from eelib.tasks.task import Task
from eelib.tracing.decode import greedy_decode, states_of

PROMPTS = ["the cat sat on", "a dog", "the mat", "on a dog the cat"]
LAYER = 1  # of the draft block


def translators(model, seed=3):
    """Translators that move every inner layer, exact in half precision."""
    torch.manual_seed(seed)
    found = Translators(model.layers, model.hidden_size).requires_grad_(False)
    for part in found.parameters():
        part.copy_(torch.randn_like(part).mul(0.3).half())
    return found


def draft_block(model, layer=LAYER, kind="block"):
    """A draft block whose weights are bfloat16 numbers, other than the network's."""
    torch.manual_seed(3)
    found = DraftBlock(model, kind, layer, torch.arange(0, model.vocab_size, 2)).requires_grad_(False)
    for part in found.parameters():
        part.copy_((part + 0.2 * torch.randn_like(part)).bfloat16())
    return found


@pytest.fixture(params=[("llama", "lens"), ("t5", "lens"), ("llama", "block")], ids="-".join)
def both(request, model_of, folder_of, tmp_path):
    """(a model; the states [n, L+1, hidden_size] of its one text as they are to be read; the model that reads so)."""
    family, form = request.param
    model, base = model_of(family), str(folder_of(family))
    if form == "lens":
        found = translators(model)
        save_translators(found, tmp_path / "made", base, model.hash)
    else:
        block = draft_block(model)
        save_draft(block, tmp_path / "made", base, {})

        def found(states):
            read = states.clone()
            read[:, LAYER] = block(states[None, :, LAYER])[0]
            return read

    return model, found, eelib.load_model(tmp_path / "made", device="cpu")


def wanted_states(model, found, prompt, output):
    """A text's states as they are to be read: of all its tokens, of which the output's come last."""
    if model.kind != "causal":
        return found(states_of(model, [prompt], [output])[0])
    states, _ = states_of(model, [prompt[:1]], [[*prompt[1:], *output]])
    return found(states)[-len(output) :]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_its_layers_say_the_same_in_a_trace_whole_and_in_steps(both, tmp_path, batch_size):
    model, found, read = both
    ids = model.encode(PROMPTS)
    plain = greedy_decode(model, ids, 8)
    assert read.name == read.title == "made" and read.hash != model.hash and read.layers == model.layers
    assert greedy_decode(read, ids, 8) == plain
    how = dict(max_new_tokens=8, batch_size=batch_size)
    trace = eelib.trace(read, Task.from_prompts(PROMPTS), folder=tmp_path / "runs", progress=False, **how)
    outputs = trace.tokens.groupby("sequence")["token_id"].agg(list).tolist()
    assert outputs == plain
    states = torch.cat([wanted_states(model, found, *given) for given in zip(ids, outputs)])
    wanted = model.unembed(states.flatten(0, 1)).argmax(-1).view(states.shape[:2])
    assert torch.equal(torch.tensor(trace["top1"]).long(), wanted)
    bare, _ = states_of(model, ids, outputs)
    assert not torch.equal(model.unembed(bare[:, LAYER]).argmax(-1), wanted[:, LAYER])
    # with all of the network's keys there, a token that exits is what its layer says of the whole text
    full = eelib.generate(read, PROMPTS, exit_layers=(LAYER,), kv_policy="full", **how).tokens
    for prompt, (_, own) in zip(ids, full.groupby("sequence")):
        states = wanted_states(model, found, prompt, own["token_id"].tolist())
        assert own["token_id"].tolist() == model.unembed(states[:, LAYER]).argmax(-1).tolist()
    draft = "block" if read.draft_block else f"layer:{LAYER}"
    assert eelib.generate(read, PROMPTS, draft=draft, **how).tokens["token_id"].tolist() == sum(plain, [])


def test_inner_layers_are_moved_and_the_ends_stay():
    found = translators(type("Sizes", (), {"layers": 3, "hidden_size": 4}))
    states = torch.randn(5, 4, 4)
    whole = found(states)
    for layer in range(4):
        torch.testing.assert_close(whole[:, layer], found.at(layer, states[:, layer]))
    double = states.double()
    for layer in (1, 2):
        weight, bias = found.weight[layer - 1].double(), found.bias[layer - 1].double()
        wanted = [h + weight @ h + bias for h in double[:, layer]]
        torch.testing.assert_close(whole[:, layer].double(), torch.stack(wanted), atol=1e-6, rtol=1e-5)
    assert torch.equal(whole[:, 0], states[:, 0]) and torch.equal(whole[:, 3], states[:, 3])
    assert found.at(1, states[:, 1].bfloat16()).dtype == torch.bfloat16


def test_later_tokens_find_what_the_network_s_own_state_leaves(both, monkeypatch):
    model, _, read = both
    found, write = [], BlockRunner.write_kv

    def recorded(self, call, layer, states):
        found.append(states[:, 0].clone())
        return write(self, call, layer, states)

    monkeypatch.setattr(BlockRunner, "write_kv", recorded)
    how = dict(exit_layers=(LAYER,), kv_policy="project", max_new_tokens=3)
    output = eelib.generate(read, PROMPTS[:1], **how).tokens["token_id"]
    states, _ = states_of(model, model.encode(PROMPTS[:1]), [output.tolist()])
    torch.testing.assert_close(found[0], states[1:2, LAYER])  # the token after the prompt's


def test_keys_of_a_draft_block_that_would_be_missing_are_refused(model_of, folder_of, tmp_path):
    save_draft(draft_block(model_of("llama"), layer=2), tmp_path / "second", str(folder_of("llama")), {})
    found = eelib.load_model(tmp_path / "second", device="cpu")
    for keys in ("copy", "project"):
        with pytest.raises(InputError, match="a token that exits before layer 2 .* has no keys"):
            eelib.generate(found, ["a dog"], gate="confidence", kv_policy=keys)
        some = eelib.generate(found, ["a dog"], exit_layers=(2,), kv_policy=keys, max_new_tokens=4).tokens
        assert len(some) and (some["exit_layer"] == 2)[1:].all()


def test_what_is_of_another_model_or_damaged_is_refused_in_one_line(model_of, folder_of, tmp_path, one_line):
    model, base = model_of("llama"), str(folder_of("llama"))

    def refused(folder, *parts):
        one_line(CheckpointError, parts, lambda: eelib.load_model(tmp_path / folder, device="cpu"))

    save_translators(translators(model), tmp_path / "other", base, "0" * 64)
    refused("other", "other was trained for other weights of", "than these")
    save_translators(Translators(5, 8), tmp_path / "shape", base, model.hash)
    refused("shape", "is damaged")
    broken = translators(model)
    broken.bias[0, 0] = float("nan")
    save_translators(broken, tmp_path / "nan", base, model.hash)
    refused("nan", "not finite")
    save_draft(draft_block(model, model.layers, "features"), tmp_path / "features", base, {})
    refused("features", "of the kind 'features'", "layers 1 to 2")
    for folder, file in (("nan", TRANSLATORS_FILE), ("features", DRAFT_FILE)):
        (tmp_path / folder / file).write_bytes(b"nothing")
        refused(folder, "is damaged")
    block = draft_block(model)
    for family in ("t5", "bert_labels"):
        block.whole = (model_of(family),)
        save_draft(block, tmp_path / family, str(folder_of(family)), {})
        refused(family, "only decoder-only models with an ordinary cache")
    one_line(
        CheckpointError, "positions are not rotations", lambda: DraftBlock(model_of("gpt2"), "block", 1, block.ids)
    )
    save_translators(translators(model), tmp_path / "right", base, model.hash)
    assert base_of(tmp_path / "right") == base and not base_of(base) and not base_of("a/hub-id")


@pytest.mark.slow
def test_the_shipped_translators_are_nearer_to_the_last_layer_than_the_bare_head(tmp_path):
    task, found = eelib.load_task("translation/de-en", limit=6), []
    for name in ("pocket-llama", "pocket-llama-lens"):
        made = eelib.trace(eelib.load_model(name), task, 24, folder=tmp_path, progress=False)
        found.append(made["kl_final"][made.statistic_rows(), 1:-1].mean(axis=0))
    assert (found[1] < 0.8 * found[0]).all()
