"""Translators: an affine map per inner layer, by hand; a folder of them loads as a model, and only for its own."""

import pytest
import torch

import eelib
from eelib.common.errors import CheckpointError
from eelib.models.block_runner import BlockRunner
from eelib.models.lens_adapters import TRANSLATORS_FILE, Translators, base_of, save_lens_adapter
from eelib.tasks.task import Task
from eelib.tracing.decode import greedy_decode, states_of

FAMILIES = ("llama", "t5")


def made(model, seed=3):
    """Translators that move every inner layer, exact in half precision."""
    torch.manual_seed(seed)
    found = Translators(model.layers, model.hidden_size).requires_grad_(False)
    for part in found.parameters():
        part.copy_(torch.randn_like(part).mul(0.3).half())
    return found


@pytest.fixture(params=FAMILIES)
def both(request, model_of, folder_of, tmp_path):
    """(a model, its translators, the same model read through them)."""
    model = model_of(request.param)
    found = made(model)
    save_lens_adapter(found, tmp_path / "a-lens", str(folder_of(request.param)), model.hash)
    return model, found, eelib.load_model(tmp_path / "a-lens", device="cpu")


def test_inner_layers_are_moved_and_the_ends_stay():
    found = made(type("Sizes", (), {"layers": 3, "hidden_size": 4}))
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


def test_the_model_says_the_same_and_its_layers_what_the_translators_make_of_them(both, tmp_path):
    model, found, lens = both
    prompts = ["the cat sat on", "a dog"]
    assert lens.name == lens.title == "a-lens" and lens.hash != model.hash and lens.layers == model.layers
    ids = model.encode(prompts)
    assert greedy_decode(lens, ids, 6) == greedy_decode(model, ids, 6)
    trace = eelib.trace(lens, Task.from_prompts(prompts), max_new_tokens=6, folder=tmp_path / "runs", progress=False)
    outputs = trace.tokens.groupby("sequence")["token_id"].agg(list)
    states, _ = states_of(model, ids, list(outputs))
    wanted = torch.stack([model.unembed(found.at(layer, states[:, layer])).argmax(-1) for layer in range(1, 4)], 1)
    assert torch.equal(torch.tensor(trace["top1"][:, 1:]).long(), wanted)
    plain = torch.stack([model.unembed(states[:, layer]).argmax(-1) for layer in range(1, 4)], 1)
    assert not torch.equal(plain[:, :2], wanted[:, :2]) and torch.equal(plain[:, 2], wanted[:, 2])


def test_a_token_that_leaves_is_the_translated_one(both):
    model, found, lens = both
    prompt = model.encode(["the cat sat on"])
    first = eelib.generate(lens, ["the cat sat on"], exit_layers=(1,), kv_policy="copy", max_new_tokens=2).tokens
    output = first["token_id"].tolist()
    states, _ = states_of(model, prompt, [output])
    assert output == model.unembed(found.at(1, states[:, 1])).argmax(-1).tolist()
    exact = eelib.generate(lens, ["the cat sat on"], draft="layer:1", max_new_tokens=6).tokens
    assert exact["token_id"].tolist() == greedy_decode(model, prompt, 6)[0]


def test_later_tokens_find_what_the_network_s_own_state_leaves(both, monkeypatch):
    model, _, lens = both
    found, write = [], BlockRunner.write_kv

    def recorded(self, call, layer, states):
        found.append(states[:, 0].clone())
        return write(self, call, layer, states)

    monkeypatch.setattr(BlockRunner, "write_kv", recorded)
    output = eelib.generate(lens, ["the cat sat on"], exit_layers=(1,), kv_policy="project", max_new_tokens=3).tokens[
        "token_id"
    ]
    states, _ = states_of(model, model.encode(["the cat sat on"]), [output.tolist()])
    torch.testing.assert_close(found[0], states[1:2, 1])  # the token after the prompt's


def test_other_weights_and_damaged_files_are_refused_in_one_line(model_of, folder_of, tmp_path):
    model, base = model_of("llama"), str(folder_of("llama"))
    save_lens_adapter(made(model), tmp_path / "other", base, "0" * 64)
    with pytest.raises(CheckpointError, match="other was trained for other weights of .* than these"):
        eelib.load_model(tmp_path / "other", device="cpu")
    save_lens_adapter(Translators(5, 8), tmp_path / "shape", base, model.hash)
    with pytest.raises(CheckpointError, match="is damaged"):
        eelib.load_model(tmp_path / "shape", device="cpu")
    broken = made(model)
    broken.bias[0, 0] = float("nan")
    save_lens_adapter(broken, tmp_path / "nan", base, model.hash)
    with pytest.raises(CheckpointError, match="not finite"):
        eelib.load_model(tmp_path / "nan", device="cpu")
    (tmp_path / "nan" / TRANSLATORS_FILE).write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="is damaged"):
        eelib.load_model(tmp_path / "nan", device="cpu")
    save_lens_adapter(made(model), tmp_path / "right", base, model.hash)
    assert base_of(tmp_path / "right") == base and not base_of(base) and not base_of("a/hub-id")
