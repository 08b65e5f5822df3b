"""Adapters, loaded for their model only: inner layers are read through translators, as by hand, and LoRA's load as
the model that PEFT would run.
"""

import json

import pytest
import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import eelib
from eelib.common.errors import CheckpointError
from eelib.models.lens_adapters import TRANSLATORS_FILE, DraftBlock, Translators, save_draft, save_translators
from eelib.models.lora import CONFIG, WEIGHTS
from eelib.tasks.task import Task
from eelib.tracing.decode import greedy_decode, states_of

PROMPTS = ["the cat sat on", "a dog", "the mat", "on a dog the cat"]
LAYER = 1  # at which tokens exit


def translators(model, seed=3):
    """Translators that move every inner layer, exact in half precision."""
    torch.manual_seed(seed)
    found = Translators(model.layers, model.hidden_size).requires_grad_(False)
    for part in found.parameters():
        part.copy_(torch.randn_like(part).mul(0.3).half())
    return found


def wanted_states(model, found, prompt, output):
    """A text's states as they are to be read: of all its tokens, of which the output's come last."""
    if model.kind != "causal":
        return found(states_of(model, [prompt], [output])[0])
    states, _ = states_of(model, [prompt[:1]], [[*prompt[1:], *output]])
    return found(states)[-len(output) :]


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_its_layers_say_the_same_in_a_trace_whole_and_in_steps(name, model_of, folder_of, tmp_path):
    model = model_of(name)
    found = translators(model)
    save_translators(found, tmp_path / "made", str(folder_of(name)), model.hash)
    read = eelib.load_model(tmp_path / "made", device="cpu")
    ids = model.encode(PROMPTS)
    plain = greedy_decode(model, ids, 8)
    assert (read.name, read.title) == ("made", f"made, a tuned lens of {model.title}")
    assert read.hash != model.hash and read.layers == model.layers
    how = dict(max_new_tokens=8, batch_size=4)
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
    assert eelib.generate(read, PROMPTS, draft=f"layer:{LAYER}", **how).tokens["token_id"].tolist() == sum(plain, [])


def test_inner_layers_are_moved_and_the_ends_stay():
    found = translators(type("Sizes", (), {"layers": 3, "hidden_size": 4}))
    states = torch.randn(5, 4, 4)
    wanted = states.double()
    for layer in (1, 2):
        weight, bias = found.weight[layer - 1].double(), found.bias[layer - 1].double()
        wanted[:, layer] = torch.stack([h + weight @ h + bias for h in wanted[:, layer]])
    one_by_one = torch.stack([found.at(layer, states[:, layer]) for layer in range(4)], dim=1)
    for made in (found(states), one_by_one):
        torch.testing.assert_close(made, wanted.float(), atol=1e-6, rtol=1e-5)
    assert found.at(1, states[:, 1].bfloat16()).dtype == torch.bfloat16


def test_what_is_of_another_model_or_damaged_is_refused_in_one_line(model_of, folder_of, tmp_path, one_line):
    model, base = model_of("llama"), str(folder_of("llama"))

    def refused(folder, *parts):
        one_line(CheckpointError, parts, lambda: eelib.load_model(tmp_path / folder, device="cpu"))

    save_translators(translators(model), tmp_path / "other", base, "0" * 64)
    refused("other", "other was trained for other weights of", "than these")
    broken = translators(model)
    broken.bias[0, 0] = float("nan")
    save_translators(broken, tmp_path / "nan", base, model.hash)
    refused("nan", "not finite")
    (tmp_path / "nan" / TRANSLATORS_FILE).write_bytes(b"nothing")
    refused("nan", "is damaged")
    save_draft(DraftBlock(model, "block", 1, torch.arange(9)), tmp_path / "block", base, {})
    refused("block", "is no model but a trained block", base, "draft='block'")
    wrong = "positions are not rotations"
    one_line(CheckpointError, wrong, lambda: DraftBlock(model_of("gpt2"), "block", 1, torch.arange(9)))


# LoRA


@pytest.fixture
def adapters(folder_of, tmp_path):
    """Random adapters of the tiny llama: (the folder of their model, their own)."""
    base, folder = folder_of("llama"), tmp_path / "tuned"
    options = LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, target_modules="all-linear")
    tuned = get_peft_model(hf.AutoModelForCausalLM.from_pretrained(base), options)
    tuned.peft_config["default"].base_model_name_or_path = str(base)
    tuned.save_pretrained(folder)
    return base, folder


@pytest.mark.parametrize("short", [False, True])
def test_they_load_as_the_model_that_peft_runs(short, adapters, tmp_path):
    """Sums are those that PEFT adds up; where the base holds bfloat16 numbers, rounded once to such."""
    base, folder = adapters
    network = hf.AutoModelForCausalLM.from_pretrained(base)
    network.to(torch.bfloat16 if short else torch.float32).float().save_pretrained(tmp_path / "base")
    for file in base.glob("*token*"):
        (tmp_path / "base" / file.name).write_bytes(file.read_bytes())
    settings(base_model_name_or_path=str(tmp_path / "base"))(folder)
    found, plain = (eelib.load_model(str(place), fast_products=False) for place in (folder, tmp_path / "base"))
    assert found.name == "tuned" and found.hash != plain.hash and found.title.startswith("tuned, LoRA adapters of ")
    merged, apart = PeftModel.from_pretrained(network, folder).merge_and_unload(), 0.0
    for name, weight in merged.named_parameters():
        own = found.network.get_parameter(name)
        wanted = weight.bfloat16().float() if short else weight
        torch.testing.assert_close(own, wanted, rtol=0, atol=0 if short else 1e-6)
        apart = max(apart, float((own - plain.network.get_parameter(name)).detach().abs().max()))
    assert apart > 0.01


def settings(**changed):
    return lambda folder: (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | changed))


def weights(change, **said):
    """The weights as `change` leaves them, and what their file says of itself."""

    def save(folder):
        tensors = change(load_file(folder / WEIGHTS))
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / WEIGHTS, said)

    return save


WRONG = [
    (weights(lambda held: {key: value for key, value in held.items() if "q_proj.lora_B" not in key}), "fits no weight"),
    (weights(lambda held: {key: value * torch.nan for key, value in held.items()}), f"{WEIGHTS} holds values that are"),
    (weights(dict, model_hash="0" * 64), "other weights"),
    (lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-50]), "damaged"),
    (settings(use_dora=True), "use_dora"),
    (settings(base_model_name_or_path="no-such-model"), "no-such-model"),
    (settings(r=8), "fits no weight"),
    (settings(init_lora_weights="olora"), ("'olora'", "changes the base")),
]


@pytest.mark.parametrize("spoil, message", WRONG)
def test_adapters_that_are_damaged_or_of_another_kind_are_refused_in_one_line(spoil, message, adapters, one_line):
    spoil(adapters[1])
    one_line(CheckpointError, message, lambda: eelib.load_model(str(adapters[1])))
