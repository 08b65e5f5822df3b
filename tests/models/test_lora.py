"""LoRA adapters in PEFT's format: they load as the model that PEFT would run, or are refused in one line."""

import json

import pytest
import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import eelib
from checks.tiny_texts import tokenizer_for
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


def test_a_head_that_the_base_lacks(tmp_path, caplog, monkeypatch):
    """A headless encoder becomes a classifier: the adapters' folder has its configuration, and its head's weights.

    transformers does not report the head as missing, and its level of messages is as before.
    """
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.BertConfig(vocab_size=300, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1}, **sizes)
    torch.manual_seed(1)
    tokenizer = tokenizer_for("masked")
    hf.BertModel(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    options = LoraConfig(
        r=2, lora_alpha=2, target_modules=["query", "value"], modules_to_save=["classifier"], init_lora_weights=False
    )
    network = hf.BertForSequenceClassification.from_pretrained(tmp_path / "base", config=config)
    tuned = get_peft_model(network, options)
    tuned.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    tuned.save_pretrained(tmp_path / "tuned")
    network.config.architectures = ["BertForSequenceClassification"]
    network.config.save_pretrained(tmp_path / "tuned")
    level = hf.logging.get_verbosity()
    monkeypatch.setattr(hf.logging.get_logger("transformers"), "propagate", True)
    caplog.clear()
    found = eelib.load_model(str(tmp_path / "tuned"))
    assert "MISSING" not in caplog.text and hf.logging.get_verbosity() == level
    ids = torch.arange(5, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(found.network(ids).logits, tuned.eval()(ids).logits, atol=1e-5, rtol=1e-5)
    assert found.kind == "classifier" and list(found.labels) == ["no", "yes"]


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
