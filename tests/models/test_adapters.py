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
from checks.tiny import build
from checks.tiny_texts import tokenizer_for
from eelib.common.errors import CheckpointError
from eelib.models.block_runner import BlockRunner
from eelib.models.lens_adapters import (
    DRAFT_FILE,
    TRANSLATORS_FILE,
    DraftBlock,
    Translators,
    base_of,
    save,
    save_draft,
    save_translators,
)
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


@pytest.fixture(params=["llama", "t5"])
def both(request, model_of, folder_of, tmp_path):
    """(a model; the states [n, L+1, hidden_size] of its one text as they are to be read; the model that reads so)."""
    model = model_of(request.param)
    found = translators(model)
    save_translators(found, tmp_path / "made", str(folder_of(request.param)), model.hash)
    return model, found, eelib.load_model(tmp_path / "made", device="cpu")


def wanted_states(model, found, prompt, output):
    """A text's states as they are to be read: of all its tokens, of which the output's come last."""
    if model.kind != "causal":
        return found(states_of(model, [prompt], [output])[0])
    states, _ = states_of(model, [prompt[:1]], [[*prompt[1:], *output]])
    return found(states)[-len(output) :]


def test_its_layers_say_the_same_in_a_trace_whole_and_in_steps(both, tmp_path):
    model, found, read = both
    ids = model.encode(PROMPTS)
    plain = greedy_decode(model, ids, 8)
    assert (read.name, read.title) == ("made", f"made, a tuned lens of {model.title}")
    assert read.hash != model.hash and read.layers == model.layers
    assert greedy_decode(read, ids, 8) == plain
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
    (tmp_path / "nan" / TRANSLATORS_FILE).write_bytes(b"nothing")
    refused("nan", "is damaged")
    save_draft(DraftBlock(model, "block", 1, torch.arange(9)), tmp_path / "block", base, {})
    refused("block", "is no model but a trained block", base, "draft='block'")
    save({}, tmp_path / "block", DRAFT_FILE, {"model": base, "model_hash": model.hash, "kind": "block"})
    refused("block", "is damaged", "layer")
    save_translators(translators(model), tmp_path / "loop", str(tmp_path / "loop"), model.hash)
    refused("loop", "has translators itself")
    wrong = "positions are not rotations"
    build("causal", "gemma3_text").save_pretrained(tmp_path / "gemma3")  # has rotations for each kind of layer
    tokenizer_for("causal").save_pretrained(tmp_path / "gemma3")
    for other in (model_of("gpt2"), eelib.load_model(str(tmp_path / "gemma3"), device="cpu")):
        one_line(CheckpointError, wrong, lambda: DraftBlock(other, "block", 1, torch.arange(9)))
    save_translators(translators(model), tmp_path / "right", base, model.hash)
    assert base_of(tmp_path / "right") == base and not base_of(base) and not base_of("a/hub-id")


@pytest.mark.slow
def test_the_shipped_translators_are_nearer_to_the_last_layer_than_the_bare_head(tmp_path):
    task, found = eelib.load_task("summarization/bulletins", limit=6), []
    for name in ("smollm2-135m-instruct", "smollm2-135m-instruct-lens"):
        made = eelib.trace(eelib.load_model(name), task, 24, folder=tmp_path, progress=False)
        found.append(made["kl_final"][made.statistic_rows(), 1:-1].mean(axis=0))
    assert (found[1] < 0.8 * found[0]).all()


# LoRA


def save_adapters(base, folder, **options):
    """Random adapters of a tiny decoder."""
    options = LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, **options)
    tuned = get_peft_model(hf.AutoModelForCausalLM.from_pretrained(base), options)
    tuned.peft_config["default"].base_model_name_or_path = str(base)
    tuned.save_pretrained(folder)


@pytest.fixture
def adapters(folder_of, tmp_path):
    save_adapters(folder_of("llama"), tmp_path / "tuned", target_modules="all-linear")
    return folder_of("llama"), tmp_path / "tuned"


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
    found.tokenizer.chat_template = "{{ messages[0]['content'] }}!"  # as a trainer saves it beside the adapters
    found.tokenizer.save_pretrained(folder)
    again = eelib.load_model(str(folder))
    assert again.tokenizer.chat_template == found.tokenizer.chat_template and again.hash != found.hash


def test_a_replaced_weight_that_the_head_shares_is_refused(folder_of, tmp_path, one_line):
    """PEFT replaces the embeddings alone, and its head has the base's."""
    save_adapters(folder_of("gemma2"), tmp_path, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    one_line(CheckpointError, ("embed_tokens", "shares"), lambda: eelib.load_model(str(tmp_path)))


def settings(**changed):
    return lambda folder: (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | changed))


def weights(change, **said):
    """The weights as `change` leaves them, and what their file says of itself."""

    def save(folder):
        tensors = change(load_file(folder / WEIGHTS))
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / WEIGHTS, said)

    return save


def without(part):
    return lambda tensors: {key: value for key, value in tensors.items() if part not in key}


WRONG = [
    (weights(lambda held: held | {"base_model.model.model.nothing.weight": torch.ones(2)}), "fits no weight"),
    (weights(without("q_proj.lora_B")), "fits no weight of"),
    (weights(without("q_proj.lora_A")), "lora_B.weight' fits no weight"),
    (weights(lambda held: {key: value * torch.nan for key, value in held.items()}), f"{WEIGHTS} holds values that are"),
    (weights(dict, model_hash="0" * 64), "other weights"),
    (lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-50]), "damaged"),
    (settings(use_dora=True), "use_dora"),
    (settings(base_model_name_or_path=None), "does not name"),
    (settings(base_model_name_or_path="no-such-model"), "no-such-model"),
    (settings(r=True), "r True"),
    (settings(r=8), "fits no weight"),
    (settings(layer_replication=[[0, 2], [0, 1]]), "layer_replication"),
    (settings(init_lora_weights="olora"), ("'olora'", "changes the base")),
]


@pytest.mark.parametrize("spoil, message", WRONG)
def test_adapters_that_are_damaged_or_of_another_kind_are_refused_in_one_line(spoil, message, adapters, one_line):
    spoil(adapters[1])
    one_line(CheckpointError, message, lambda: eelib.load_model(str(adapters[1])))
