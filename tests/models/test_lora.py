"""LoRA adapters in PEFT's format: they load as the model that PEFT would run, or are refused in one line."""

import json

import pytest
import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import eelib
from eelib.common.errors import CheckpointError
from eelib.models.lora import CONFIG, WEIGHTS


@pytest.fixture
def adapters(folder_of, tmp_path):
    """Random adapters of a tiny decoder."""
    base, folder = folder_of("llama"), tmp_path / "tuned"
    torch.manual_seed(0)
    options = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", init_lora_weights=False)
    tuned = get_peft_model(hf.AutoModelForCausalLM.from_pretrained(base), options)
    tuned.peft_config["default"].base_model_name_or_path = str(base)
    tuned.save_pretrained(folder)
    return base, folder


def test_they_load_as_the_model_that_peft_runs(adapters):
    base, folder = adapters
    found, plain = eelib.load_model(str(folder)), eelib.load_model(str(base))
    ids = torch.arange(4, 16)[None]
    with torch.no_grad():
        wanted = PeftModel.from_pretrained(hf.AutoModelForCausalLM.from_pretrained(base), folder)(ids).logits
        torch.testing.assert_close(found.network(ids).logits, wanted, atol=1e-5, rtol=1e-5)
        assert (plain.network(ids).logits - wanted).abs().max() > 0.01
    assert found.name == "tuned" and found.hash != plain.hash and found.title.startswith("tuned, LoRA adapters of ")


def test_sums_are_bfloat16_numbers_where_the_base_is(adapters, tmp_path):
    """They are those that PEFT adds up, rounded once."""
    base, folder = adapters
    network = hf.AutoModelForCausalLM.from_pretrained(base)
    network.bfloat16().float().save_pretrained(tmp_path / "base")
    for file in base.glob("*token*"):
        (tmp_path / "base" / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / CONFIG).read_text()) | {"base_model_name_or_path": str(tmp_path / "base")}
    (folder / CONFIG).write_text(json.dumps(settings))
    found = eelib.load_model(str(folder), fast_products=False)
    merged = PeftModel.from_pretrained(network, folder).merge_and_unload()
    for name, weight in merged.named_parameters():
        assert torch.equal(found.network.get_parameter(name), weight.bfloat16().float()), name


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
    (settings(peft_type="IA3"), "peft_type"),
    (settings(base_model_name_or_path=None), "does not name"),
    (settings(base_model_name_or_path="no-such-model"), "no-such-model"),
    (settings(r=0), "r 0"),
]


@pytest.mark.parametrize("spoil, message", WRONG)
def test_adapters_that_are_damaged_or_of_another_kind_are_refused_in_one_line(spoil, message, adapters, one_line):
    spoil(adapters[1])
    one_line(CheckpointError, message, lambda: eelib.load_model(str(adapters[1])))
