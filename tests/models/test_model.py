"""What a model says of itself, and that a bug of ours on the way to it is not lost."""

import json
import shutil

import families
import pytest
import torch
from families import FAMILIES

import eelib
from checks.tiny_texts import WINDOW
from eelib.common.errors import CheckpointError, InputError
from eelib.common.files import data_folder
from eelib.models.checkpoint import path_of


@pytest.mark.parametrize("name", FAMILIES)
def test_facts(name, model_of):
    model, network = model_of(name), families.build(name)
    assert (model.name, model.kind) == (name, FAMILIES[name].kind)
    assert (model.layers, model.hidden_size, model.context_length, model.dtype) == (3, 32, WINDOW, "float32")
    assert model.vocab_size == network.config.vocab_size == len(model.tokenizer) + 4
    assert model.eos_ids == {model.tokenizer.eos_token_id} and model.pad_id == model.tokenizer.pad_token_id
    assert model.pads and not model.components_error
    loaded = model.network.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in network.state_dict().items())


def test_lower_precision_loads(folder_of):
    assert eelib.load_model(str(folder_of("llama")), dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize("name", ["a b", "it's", 'a"b', "a;b", "$(touch x)", "a\nb", "é", "<b>", "{model}"])
def test_name_that_no_folder_may_have_is_refused_before_anything_is_read(name, tmp_path, one_line):
    (tmp_path / name).mkdir()
    given = str(tmp_path / name)
    one_line(InputError, (repr(given), repr(name), "letters, digits"), lambda: eelib.load_model(given))
    one_line(InputError, (repr(f"org/{name}"), "letters, digits"), lambda: eelib.load_model(f"org/{name}"))


@pytest.mark.parametrize(
    "name, part",
    [
        ("", "model is empty"),
        (" ", "model is empty"),
        ("a\0b", "model holds a NUL"),
        ("/", "letters, digits"),
        ("org/..", "letters, digits"),
        ("~nobody-of-this-name/llama", "can't be looked for"),
        ("a" * 5000, "can't be looked for"),
    ],
)
def test_name_that_names_nothing_is_refused_in_one_line(name, part, one_line):
    one_line(InputError, part, lambda: eelib.load_model(name))


def test_a_folder_has_its_own_name_however_it_is_written(folder_of, model_of, tmp_path, monkeypatch):
    folder = folder_of("llama")
    (folder / "inner").mkdir(exist_ok=True)
    (tmp_path / "linked").symlink_to(folder)
    monkeypatch.chdir(folder)
    for given in (folder, ".", "./", "inner/..", f"{folder}/", f"{folder}/.", "../llama", f"{folder}/inner/.."):
        model = eelib.load_model(given, device="cpu")
        assert (model.name, model.hash) == ("llama", model_of("llama").hash)
    monkeypatch.chdir(folder / "inner")
    assert eelib.load_model("..", device="cpu").name == "llama"
    assert eelib.load_model(str(tmp_path / "linked"), device="cpu").name == "linked"  # a link is a name of its own


def test_shipped_names_and_hub_ids_pass_as_they_are():
    assert path_of("pocket-llama") == path_of("pocket-llama/") == str(data_folder("models", "pocket-llama"))
    assert path_of("meta-llama/Llama-3.2-1B") == "meta-llama/Llama-3.2-1B"


def test_generation_settings_are_ignored_and_said(folder_of, tmp_path, capsys, model_of):
    assert not any("ignores" in line for line in capsys.readouterr().out.splitlines())
    loud = shutil.copytree(folder_of("llama"), tmp_path / "loud")
    network = families.build("llama")
    network.generation_config.update(repetition_penalty=1.7, num_beams=3, eos_token_id=[1, 7])
    network.generation_config.save_pretrained(loud)
    assert eelib.load_model(str(loud)).eos_ids == {1, 7}
    said = capsys.readouterr().out
    assert "num_beams=3" in said and "repetition_penalty=1.7" in said and "eos" not in said


def test_chat_template(model_of, one_line):
    model = model_of("llama")
    assert model.encode(["a b"]) == [model.tokenizer("a b")["input_ids"]]
    one_line(ValueError, ("llama", "chat template"), lambda: model.encode(["a"], chat=True))
    model.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<reply>{% endif %}"
    )
    try:
        assert model.encode(["a b"], chat=True) == [model.tokenizer("<user>a b<reply>")["input_ids"]]
    finally:
        model.tokenizer.chat_template = None


def test_a_model_that_reads_in_place_is_no_writer(model_of, one_line):
    assert model_of("llama").writer.writes
    one_line(CheckpointError, ("bert", "writes no tokens"), lambda: model_of("bert").writer)


def test_tokenizer_without_pad_or_begin(folder_of, tmp_path):
    bare = shutil.copytree(folder_of("llama"), tmp_path / "bare")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (bare / name).exists():
            known = json.loads((bare / name).read_text())
            kept = {k: v for k, v in known.items() if k not in ("pad_token", "bos_token")}
            (bare / name).write_text(json.dumps(kept))
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "pad_token_id": None, "bos_token_id": None}))
    model = eelib.load_model(str(bare), device="cpu")
    assert model.tokenizer.pad_token_id is None and model.pad_id == 1 and model.pads


@pytest.mark.parametrize("where", ["model.find_components", "model.prove_head", "model_kinds.find_head"])
def test_bug_in_probing_is_the_cause_of_the_refusal(where, folder_of, monkeypatch):
    """The reader gets one line that names the error; who looks for the bug finds it with its traceback."""

    def planted(*_args):
        raise TypeError("planted")

    monkeypatch.setattr(f"eelib.models.{where}", planted)
    with pytest.raises(CheckpointError, match="can't be read out .TypeError: planted") as caught:
        eelib.load_model(str(folder_of("llama")), device="cpu")
    cause = caught.value.__cause__
    assert isinstance(cause, TypeError) and cause.__traceback__ is not None
