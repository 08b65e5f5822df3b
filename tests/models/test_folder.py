"""A checkpoint's folder as somebody else may have made it: refused in one line, quickly, or read and hashed whole."""

import json
import os
import shutil
import sys
import threading
import time

import families
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import eelib
from eelib.common.errors import CheckpointError
from eelib.models.folder import INDEX, weights_hash


@pytest.fixture
def copy_of(folder_of, tmp_path):
    """copy_of(family): a copy of its folder, to be changed."""
    return lambda name="llama": shutil.copytree(folder_of(name), tmp_path / "hostile")


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def sharded(folder, below=""):
    """The folder with its weights in shards, in a sub-folder where one is named."""
    (folder / "model.safetensors").unlink()
    families.build("llama").save_pretrained(folder, max_shard_size="20KB")
    if below:
        index = json.loads((folder / INDEX).read_text())
        (folder / below).mkdir()
        for shard in set(index["weight_map"].values()):
            (folder / shard).rename(folder / below / shard)
        change(folder / INDEX, weight_map={key: f"{below}/{shard}" for key, shard in index["weight_map"].items()})
    return folder


@pytest.mark.parametrize("outside", ["../{}", "{}/model.safetensors", "sub/../../x.safetensors"])
def test_shards_outside_the_folder_are_refused(outside, copy_of, tmp_path, one_line):
    folder = sharded(copy_of())
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    key, shard = next(iter(index.items()))
    named = outside.format(shard if outside.startswith("..") else tmp_path)
    shutil.copy(folder / shard, tmp_path / shard)
    change(folder / INDEX, weight_map=index | {key: named})
    one_line(CheckpointError, ("inside its folder", repr(named)), lambda: eelib.load_model(str(folder)))


def test_the_hash_covers_shards_in_sub_folders(copy_of):
    folder = sharded(copy_of(), "parts")
    before = eelib.load_model(str(folder)).hash
    shard = next((folder / "parts").iterdir())
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert weights_hash(folder) != before and weights_hash(folder) == eelib.load_model(str(folder)).hash


@pytest.mark.parametrize("index", [[], {"weight_map": {"a": 3}}, {"weight_map": ["a"]}, {"metadata": {}}, 7])
def test_an_index_that_is_none(index, copy_of, one_line):
    folder = sharded(copy_of())
    (folder / INDEX).write_text(json.dumps(index))
    one_line(CheckpointError, (INDEX, "could not be loaded"), lambda: eelib.load_model(str(folder)))


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", ["notes.json", "chat_template.jinja", "additional_chat_templates/a.jinja"])
def test_what_has_no_end_is_never_read(kind, name, copy_of, one_line):
    folder = copy_of()
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    os.mkfifo(file) if kind == "pipe" else file.symlink_to("/dev/zero")
    one_line(CheckpointError, file.name, lambda: eelib.load_model(str(folder)))


def test_weights_that_are_links_to_files_are_read_as_those_of_a_hub_snapshot_are(copy_of, tmp_path, model_of):
    folder = copy_of()
    shutil.move(folder / "model.safetensors", tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    assert eelib.load_model(str(folder)).hash == model_of("llama").hash


def test_an_adapter_is_not_left_out(copy_of, one_line):
    folder = copy_of()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    one_line(CheckpointError, "PEFT adapter", lambda: eelib.load_model(str(folder)))


@pytest.mark.parametrize("content", ["[]", "3", '"text"', "[" * 100_000])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_configurations_that_are_no_object(file, content, copy_of, one_line):
    folder = copy_of()
    (folder / file).write_text(content)
    one_line(CheckpointError, (file, "could not be loaded"), lambda: eelib.load_model(str(folder)))


def test_a_damaged_generation_config_would_lose_its_end_tokens(copy_of, one_line):
    folder = copy_of()
    text = json.dumps({"eos_token_id": [1, 2]})
    (folder / "generation_config.json").write_text(text[: len(text) // 2])
    one_line(CheckpointError, "generation_config.json", lambda: eelib.load_model(str(folder)))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("ends", ["</s>", ["</s>"], [1, None], True, {"id": 1}])
def test_end_tokens_that_are_no_ids_are_refused(file, ends, copy_of, one_line):
    folder = copy_of()
    change(folder / file, eos_token_id=ends)
    one_line(CheckpointError, (file, "eos_token_id is"), lambda: eelib.load_model(str(folder)))


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "merges.txt"])
def test_a_file_without_measure_is_refused_before_it_is_read(name, copy_of, one_line):
    folder = copy_of()
    with open(folder / name, "wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    one_line(CheckpointError, (name, "1,099,511,627,776 bytes"), lambda: eelib.load_model(str(folder)))


@pytest.mark.parametrize("ends", [None, 10_000, [10_000, -1]])
def test_a_model_whose_end_tokens_are_lost_says_so(ends, copy_of, capsys):
    folder = copy_of()
    eelib.load_model(str(folder))
    assert "end token" not in capsys.readouterr().out
    (folder / "generation_config.json").write_text(json.dumps({} if ends is None else {"eos_token_id": ends}))
    change(folder / "config.json", eos_token_id=None)
    if ends is None:
        change(folder / "tokenizer_config.json", eos_token=None)
    eelib.load_model(str(folder))
    assert "no end token" in capsys.readouterr().out


@pytest.mark.parametrize(
    "values, parts",
    [
        ({"max_position_embeddings": 0}, ("max_position_embeddings is 0",)),
        ({"max_position_embeddings": -5}, ("max_position_embeddings is -5",)),
        ({"max_position_embeddings": "long"}, ("max_position_embeddings is 'long'",)),
        ({"max_position_embeddings": 12.5}, ("max_position_embeddings is 12.5",)),
        ({"max_position_embeddings": float("inf")}, ("max_position_embeddings is inf",)),
        ({"num_hidden_layers": 0}, ("num_hidden_layers is 0",)),
        ({"num_hidden_layers": 2}, ("leaves out weights", "layers.2.")),
        ({"num_hidden_layers": 200_000}, ("200,000 layers",)),
        ({"hidden_size": 2**20}, ("numbers, its weights hold",)),
        ({"vocab_size": 2**33}, ("numbers, its weights hold",)),
    ],
)
def test_configurations_that_can_not_be_are_refused_before_they_take_memory(values, parts, copy_of, one_line):
    folder = copy_of()
    change(folder / "config.json", **values)
    began = time.process_time()
    one_line(CheckpointError, parts, lambda: eelib.load_model(str(folder), device="cpu"))
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    "key, value",
    [
        ("model_type", 7),
        ("model_type", "unheard-of"),
        ("architectures", ["NoSuchModel"]),
        ("architectures", {"a": 1}),
        ("num_hidden_layers", "many"),
        ("num_hidden_layers", 16),
        ("hidden_size", "wide"),
        ("hidden_size", 0),
        ("num_attention_heads", 7),
        ("num_attention_heads", 0),
        ("vocab_size", -1),
        ("hidden_act", "no_such_function"),
        ("rms_norm_eps", "small"),
        ("quantization_config", {"quant_method": "no-such-method"}),
        ("rope_parameters", {"rope_type": "no-such-type"}),
        ("rope_parameters", "linear"),
        ("transformers_weights", "a"),
    ],
)
def test_a_value_that_no_network_has_is_refused_in_one_line(key, value, copy_of, one_line):
    folder = copy_of()
    change(folder / "config.json", **{key: value})
    one_line(CheckpointError, folder.name, lambda: eelib.load_model(str(folder), device="cpu"))


@pytest.mark.parametrize(
    "name, content, part",
    [
        ("model.safetensors", (2**60).to_bytes(8, "little") + b"{}", "a header of"),
        ("model.safetensors", (3).to_bytes(8, "little") + b"{{{", "model.safetensors"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]", "model.safetensors"),
        ("model.safetensors", (8).to_bytes(8, "little") + b'{"a": 7}', "model.safetensors"),
        ("model.safetensors", b"", "model.safetensors"),
        ("model.safetensors", b"<html></html>", "model.safetensors"),
        ("tokenizer.json", b"[]", "has no tokenizer"),
        ("tokenizer.json", b"{}", "has no tokenizer"),
        ("tokenizer_config.json", b"[]", "has no tokenizer"),
        ("config.json", b'{"a": "\xff\xfe"}', "config.json"),
    ],
)
def test_a_file_that_is_not_what_its_name_says(name, content, part, copy_of, one_line):
    folder = copy_of()
    (folder / name).write_bytes(content)
    one_line(CheckpointError, part, lambda: eelib.load_model(str(folder), device="cpu"))


def test_a_folder_or_a_link_to_nowhere_in_place_of_weights(copy_of, one_line):
    file = copy_of() / "model.safetensors"
    for make in (file.mkdir, lambda: file.symlink_to("no")):
        file.unlink() if file.is_file() else file.rmdir() if file.is_dir() else None
        make()
        one_line(CheckpointError, file.parent.name, lambda: eelib.load_model(str(file.parent), device="cpu"))


def test_a_window_of_nothing_in_other_words(copy_of, one_line):
    folder = copy_of("gpt2")
    change(folder / "config.json", n_positions=0)
    one_line(CheckpointError, "n_positions is 0", lambda: eelib.load_model(str(folder)))


@pytest.mark.parametrize("kept", [(), ("tokenizer_config.json",)])
def test_no_tokenizer_is_invented(kept, copy_of, one_line):
    folder = copy_of("t5")
    for file in folder.glob("*token*"):
        if file.name not in kept:
            file.unlink()
    one_line(CheckpointError, "tokenizer", lambda: eelib.load_model(str(folder)))


def test_a_tokenizer_of_another_model(copy_of, one_line):
    folder = copy_of()
    network = families.build("llama")
    network.resize_token_embeddings(280)
    network.save_pretrained(folder)
    one_line(CheckpointError, ("280", "another model's"), lambda: eelib.load_model(str(folder)))


def test_an_added_token_that_the_model_does_not_know_is_refused_in_a_text_alone(copy_of, one_line):
    folder = copy_of()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<image{i}>" for i in range(100)], special_tokens=True)
    tokenizer.save_pretrained(folder)
    model = eelib.load_model(str(folder))
    assert model.encode(["The small dog"])
    one_line(CheckpointError, "prompt 1", lambda: model.encode(["The small dog", "a <image99> of it"]))


def test_a_length_of_the_tokenizer_that_is_a_word(copy_of, one_line):
    folder = copy_of()
    change(folder / "tokenizer_config.json", model_max_length="many")
    one_line(CheckpointError, ("model_max_length", "many"), lambda: eelib.load_model(str(folder)))


def test_what_is_said_of_a_folder_does_not_name_other_models(copy_of):
    folder = copy_of()
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError) as caught:
        eelib.load_model(str(folder))
    assert "shipped models" not in str(caught.value)


def test_networks_are_measured_without_their_weights(folder_of):
    """No family that loads asks for more than its weights hold."""
    for name in families.FAMILIES:
        assert eelib.load_model(str(folder_of(name)), device="cpu").network.device == torch.device("cpu")


def test_codes_without_their_scales_are_no_weights(copy_of, one_line):
    """int8 weights would be taken for the numbers that they are codes of."""
    folder = copy_of()
    weights = load_file(folder / "model.safetensors")
    coded = {key: (value * 50).round().to(torch.int8) if value.dim() > 1 else value for key, value in weights.items()}
    save_file(coded, folder / "model.safetensors", metadata={"format": "pt"})
    one_line(CheckpointError, ("quantized weights, I8", "does not say"), lambda: eelib.load_model(str(folder)))


@pytest.mark.parametrize("value", [0.0, 1e30])
def test_weights_that_know_nothing_are_told(value, copy_of, tmp_path, capsys):
    """A readout of them is a readout of nothing; the trace says so for ever."""
    folder = copy_of()
    weights = load_file(folder / "model.safetensors")
    same = {key: torch.full_like(weight, value) for key, weight in weights.items()}
    save_file(same, folder / "model.safetensors", metadata={"format": "pt"})
    model = eelib.load_model(str(folder))
    assert "all logits are the same" in capsys.readouterr().out
    made = eelib.trace(model, eelib.Task.from_prompts(["a"]), 1, tmp_path, progress=False)
    assert "know nothing" in made.manifest["remark"]


def test_other_weights_get_no_remark(model_of):
    assert model_of("llama").remark == ""


TEMPLATES = [
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "does not end"),
    ("{{ raise_exception('no') }}", "fails (TemplateError: no)"),
    ("{% for %}", "fails (TemplateSyntaxError"),
    ("{{ messages[9]['content'] }}", "fails (UndefinedError"),
    ("{{ 1 / 0 }}", "fails (ZeroDivisionError"),
    ("{{ cycler.__init__.__globals__ }}", "fails (SecurityError"),
    ("{{ 'word ' * 1000000 }}", "makes 5,000,000 characters of 1"),
]


@pytest.mark.parametrize("template, said", TEMPLATES)
def test_chat_templates_that_fail_or_do_not_end(template, said, folder_of, monkeypatch, one_line):
    model = eelib.load_model(str(folder_of("llama")))
    monkeypatch.setattr("eelib.models.model.TEMPLATE_SECONDS", 0.5)
    model.tokenizer.chat_template = template
    one_line(CheckpointError, said, lambda: model.encode(["a"], chat=True))


def test_a_chat_template_is_stopped_in_any_thread_and_the_thread_is_left_as_it_was(model_of, monkeypatch):
    model, caught = model_of("llama"), []
    monkeypatch.setattr("eelib.models.model.TEMPLATE_SECONDS", 0.2)
    monkeypatch.setattr(model.tokenizer, "chat_template", TEMPLATES[0][0])

    def encode():
        with pytest.raises(CheckpointError) as error:
            model.encode(["a"], chat=True)
        caught.append((str(error.value), sys.gettrace()))

    thread = threading.Thread(target=encode)
    thread.start()
    thread.join(20)
    ((message, trace),) = caught
    assert "does not end" in message and trace is None


@pytest.mark.parametrize("key", ["architectures", "quantization_config"])
@pytest.mark.parametrize("value", ["LlamaForCausalLM", [7], 7])
def test_what_names_the_class_or_the_format_is_of_another_type(key, value, copy_of, one_line):
    folder = copy_of()
    change(folder / "config.json", **{key: value})
    one_line(CheckpointError, (f"{key} is {value!r}", "it must be a"), lambda: eelib.load_model(str(folder)))
