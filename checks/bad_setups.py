"""Setups that are wrong: study files, names, and checkpoints that somebody else made."""

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GOOD = "models: {a: {}}\nnotebooks: {n: {}}\n"
STUDIES: list[tuple[str, str]] = [  # and a part of what is said of each
    ("", "it is None; allowed is a mapping with notebooks and models"),
    ("[models, notebooks]", "it is ['models', 'notebooks']; allowed is a mapping"),
    ("models: {a: {}}", "it has no notebooks"),
    ("models: [a]\nnotebooks: {n: {}}", "models is ['a']; allowed is a mapping of at least one model"),
    ("models: {}\nnotebooks: {n: {}}", "models is {}; allowed is a mapping of at least one model"),
    ("models: {a: {}}\nnotebooks: [n]", "notebooks is ['n']; allowed is a mapping of at least one notebook"),
    ("models: {a: {}}\nnotebooks:", "notebooks is None"),
    ("models: {a: [1]}\nnotebooks: {n: {}}", "model a is [1]; allowed is a mapping of settings"),
    ("models: {a: {}}\nnotebooks: {n: [1]}", "notebook n is [1]; allowed is a mapping of parameters"),
    ("models: {a: {}}\nnotebooks: {unheard: {}}", "notebook unheard is not known; there are a, architectures, b"),
    *((f"threads: {n}\n{GOOD}", f"threads is {n}; allowed is a whole number, at least 1") for n in (0, -1, 1.5)),
    ("threads: many\n" + GOOD, "threads is 'many'"),
    ("threads: true\n" + GOOD, "threads is True"),
    ("threads:\n" + GOOD, "threads is None"),
    ("first: n\n" + GOOD, "first is 'n'; allowed is a list of names of notebooks"),
    ("first: [[n]]\n" + GOOD, "first[0] is ['n']; allowed is a text"),
    ("parameters: [limit]\n" + GOOD, "parameters is ['limit']; allowed is a mapping of parameters"),
    ("parameters: {limit: [1]}\n" + GOOD, "parameters.limit is [1]; allowed is a text, a number, true or false"),
    ("parameters: {limit: }\n" + GOOD, "parameters.limit is None"),
    ("parameters: {limit: 2026-01-01}\n" + GOOD, "parameters.limit is datetime.date"),
    ("parameters: {'a b': 1}\n" + GOOD, "whose names are of letters, digits and _"),
    *(
        (f"models: {{x/a.b: {{{setting}: {given}}}}}\nnotebooks: {{n: {{}}}}", f"model x/a.b: {setting} is {said}")
        for setting, given, said in (
            ("memory_gb", "much", "'much'; allowed is a whole number, at least 1"),
            ("memory_gb", "0", "0;"),
            ("memory_gb", ".inf", "inf;"),
            ("host_memory_gb", "0", "0; allowed is a whole number, at least 1"),
            ("workers", "-1", "-1; allowed is a whole number, at least 0"),
            ("workers", "all", "'all'; allowed is a whole number"),
            ("hours", "0", "0; allowed is a whole number, at least 1"),
            ("partition", "'a b'", "'a b'; allowed is a name of letters"),
            ("partition", "3", "3; allowed is a name of letters"),
            ("enabled", "'no'", "'no'; allowed is true or false"),
            ("enabled", "1", "1;"),
            ("gpu", "one", "'one'; allowed is a whole number, at least 0"),
            ("gpu", "-1", "-1;"),
            ("gpu", "0x7fffffffffff", "140737488355327; allowed is a whole number, at least 0, at most 100,000"),
            ("workers", "1000000000", "1000000000;"),
            ("memory_gb", "1.0e+300", "1e+300;"),
            ("parameters", "{model: other}", "{'model': 'other'}; allowed is a mapping of parameters"),
            ("gpu", "true", "True;"),
            ("threads", "0", "0;"),
            ("notebooks", "[n, n]", "['n', 'n']; allowed is a list of names of notebooks, each once"),
            ("parameters", "fast", "'fast'; allowed is a mapping of parameters"),
        )
    ),
    ("models: {7: {}}\nnotebooks: {n: {}}", "line 1: the key '7' is not a text"),
    ("models: {a: {}, [b]: {}}\nnotebooks: {n: {}}", "is not a text"),
    ("models: {yes: {}}\nnotebooks: {n: {}}", "the key 'yes' is not a text"),
    ("models: {a: {}, a: {}}\nnotebooks: {n: {}}", "line 1: the key 'a' is there for the second time"),
    (GOOD + "models: {b: {}}", "line 3: the key 'models' is there for the second time"),
    ("models: {x/m: {}, y/m: {}}\nnotebooks: {n: {}}", "two models would share the folder results/m"),
    ("models: {../..: {}}\nnotebooks: {n: {}}", "the last part of its name, '..' is not allowed"),
    (f"models: {{{'x' * 300}: {{}}}}\nnotebooks: {{n: {{}}}}", "has 300 characters; allowed are at most 100"),
    ("parameters: {results_folder: /etc}\n" + GOOD, "none of model, runs_folder, results_folder"),
    ("models: {'': {}}\nnotebooks: {n: {}}", "the last part of its name, '' is not allowed"),
    ("models: {'a\\nb': {gpu: one}}\nnotebooks: {n: {}}", "gpu is 'one'"),
    ("models: &a {a: *a}\nnotebooks: {n: {}}", "model a: unknown ['a']"),
    ("models: {a: {}\nnotebooks: {n: {}}", "line 2: "),
    ("models: !!python/object:os.system {}\nnotebooks: {n: {}}", "could not determine a constructor"),
    ("models: {a: *b}\nnotebooks: {n: {}}", "undefined alias"),
    ("\x07", "not YAML"),
    ("[" * 5_000, "nested too deeply"),
]

NAMES = (  # of folders, models and notebooks; the rule is letters, digits and _ . + -
    "$(touch made)",
    "`touch made`",
    "a;touch made",
    "a'b",
    'a"b',
    "a b",
    "a|b",
    "a&b",
    "a>b",
    "{a}",
    "{{a}}",
    "<b>a</b>",
    "[a](javascript:1)",
    "a\\b",
    "a\nb",
    "a\tb",
    "a\u202eb",
    "\u00e9",
    "\U0001f415",
    "*",
    "a#b",
    "a%b",
)

Change = Callable[[Path], object]


def config(**values: object) -> Change:
    """Other values in a configuration."""
    return lambda folder: changed(folder / "config.json", values)


def changed(file: Path, values: dict[str, object]) -> None:
    """Other values in a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def written(name: str, content: str | bytes) -> Change:
    """A file with another content."""
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def index(**named: object) -> Change:
    """An index of shards in place of the one file of weights."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}} | named))

    return change


def weights(change: Callable[[str, Any], Any]) -> Change:
    """Other weights."""

    def change_all(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        file = folder / "model.safetensors"
        save_file({key: change(key, value) for key, value in load_file(file).items()}, file, metadata={"format": "pt"})

    return change_all


def coded(_key: str, value: Any) -> Any:
    """Weights as int8 codes."""
    import torch

    return (value * 50).round().to(torch.int8) if value.dim() > 1 else value


def filled(number: float) -> Change:
    """Weights that are all the same."""
    return weights(lambda _key, value: value.fill_(number))


def spoilt(number: float) -> Change:
    """Weights of which one is no finite number."""

    def change(key: str, value: Any) -> Any:
        if key.endswith("3.mlp.down_proj.weight"):
            value[0, 0] = number
        return value

    return weights(change)


def replaced(name: str, make: Callable[[Path], object]) -> Change:
    """Something else where a file is."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def listening(path: Path) -> None:
    """A socket."""
    here = os.getcwd()
    os.chdir(path.parent)  # its path may not be long
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def header(size: int, content: bytes) -> Change:
    """A file of weights that begins with this."""
    return written("model.safetensors", size.to_bytes(8, "little") + content)


def chat(template: str) -> Change:
    """A chat template."""
    return written("chat_template.jinja", template)


def sparse(folder: Path) -> None:
    """A file that is large and takes no room."""
    with open(folder / "merges.txt", "wb") as file:
        file.truncate(2**35)


def wordless(folder: Path) -> None:
    """A tokenizer that knows three words."""
    kept = {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1, "b": 2}, "unk_token": "<unk>"}
    simple: dict[str, object] = {"normalizer": None, "post_processor": None, "decoder": None, "added_tokens": []}
    chat("{{ messages[0].content }}")(folder)
    changed(folder / "tokenizer.json", {"model": kept, "pre_tokenizer": {"type": "Whitespace"}} | simple)


RANGE = "{% for i in range(99999) %}"
FOLDERS: list[tuple[str, str, tuple[str, ...], Change]] = [  # case, what was given, parts of what is said, the change
    (
        "a shard outside the folder",
        "../x.safetensors",
        ("inside its folder",),
        index(weight_map={"a": "../x.safetensors"}),
    ),
    ("a shard outside the folder", "/x.safetensors", ("inside its folder",), index(weight_map={"a": "/x.safetensors"})),
    ("a shard outside the folder", "a/../../x", ("inside its folder",), index(weight_map={"a": "a/../../x"})),
    ("a shard with a NUL", "a\\0b", ("inside its folder",), index(weight_map={"a": "a\0b"})),
    ("a shard that is not there", "no.safetensors", ("lacks 1 of 1",), index(weight_map={"a": "no.safetensors"})),
    ("an index that holds numbers", "7", ("weight_map",), index(weight_map={"a": 7})),
    ("an index that holds a list", "[]", ("weight_map",), index(weight_map=["part.safetensors"])),
    ("an index of nothing", "{}", ("weight_map",), index(weight_map={})),
    ("an index without a map", "no weight_map", ("weight_map",), index()),
    ("an index that is a list", "[1]", ("not an object",), written("model.safetensors.index.json", "[1]")),
    *(
        ("a configuration that is no object", given, ("config.json",), written("config.json", given))
        for given in ("[]", "7", "null", '"llama"', "", "{", "NaN")
    ),
    ("a configuration nested too deeply", "100,000 brackets", ("config.json",), written("config.json", "[" * 100_000)),
    ("a configuration that is no UTF-8", "bytes", ("config.json",), written("config.json", b'{"a": "\xff\xfe"}')),
    *(
        (f"{key} in a configuration", repr(value), (key,), config(**{key: value}))
        for key, value in (
            ("max_position_embeddings", 0),
            ("max_position_embeddings", -5),
            ("max_position_embeddings", "long"),
            ("max_position_embeddings", 0.5),
            ("max_position_embeddings", True),
            ("num_hidden_layers", 0),
            ("num_hidden_layers", -1),
            ("num_hidden_layers", "many"),
            ("num_hidden_layers", [8]),
        )
    ),
    ("far too many layers", "200,000", ("200,000 layers",), config(num_hidden_layers=200_000)),
    ("more layers than weights", "16", ("lacks weights",), config(num_hidden_layers=16)),
    ("fewer layers than weights", "4", ("leaves out weights",), config(num_hidden_layers=4)),
    ("a vocabulary far too large", "10 ** 9", ("numbers",), config(vocab_size=10**9)),
    *(
        (f"{key} in a configuration", repr(value), ("model",), config(**{key: value}))
        for key, value in (
            ("model_type", 7),
            ("model_type", ""),
            ("architectures", "LlamaForCausalLM"),
            ("architectures", [7]),
            ("architectures", ["NoSuchModel"]),
            ("architectures", {"a": 1}),
            ("hidden_size", "wide"),
            ("hidden_size", 0),
            ("hidden_size", -8),
            ("num_attention_heads", 7),
            ("num_attention_heads", 0),
            ("num_attention_heads", "two"),
            ("vocab_size", -1),
            ("vocab_size", "large"),
            ("hidden_act", "no_such_function"),
            ("hidden_act", 7),
            ("rms_norm_eps", "small"),
            ("quantization_config", {"quant_method": "no-such-method"}),
            ("quantization_config", "int8"),
            ("quantization_config", {"quant_method": "gptq", "bits": 4}),
            ("rope_parameters", {"rope_type": "no-such-type"}),
            ("rope_parameters", "linear"),
        )
    ),
    ("weights named by a configuration", "transformers_weights", ("names weights",), config(transformers_weights="a")),
    ("an adapter beside the weights", "adapter_config.json", ("PEFT adapter",), written("adapter_config.json", "{}")),
    ("codes without scales", "int8 weights", ("quantized weights, I8",), weights(coded)),
    ("weights that are not finite", "one NaN", ("finite",), spoilt(float("nan"))),
    ("weights that are not finite", "one infinity", ("finite",), spoilt(float("inf"))),
    ("a header without end", "2 ** 60 bytes", ("a header of",), header(2**60, b"{}")),
    ("a header that is no JSON", "{{{", ("model.safetensors",), header(3, b"{{{")),
    ("a header that is a list", "[]", ("model.safetensors",), header(2, b"[]")),
    ("a header of no shapes", '{"a": 7}', ("model.safetensors",), header(8, b'{"a": 7}')),
    ("a file of weights of no bytes", "0 bytes", ("model.safetensors",), written("model.safetensors", "")),
    (
        "a file of weights that is a web page",
        "<html>",
        ("model.safetensors",),
        written("model.safetensors", "<html></html>"),
    ),
    ("a folder in place of weights", "model.safetensors/", ("model",), replaced("model.safetensors", Path.mkdir)),
    (
        "a link to nowhere in place of weights",
        "a link",
        ("model",),
        replaced("model.safetensors", lambda p: p.symlink_to("no")),
    ),
    ("a pipe beside the weights", "a.json", ("a pipe, socket or device",), replaced("a.json", os.mkfifo)),
    ("a pipe in place of the configuration", "config.json", ("a pipe, socket",), replaced("config.json", os.mkfifo)),
    ("a pipe in place of the tokenizer", "tokenizer.json", ("a pipe, socket",), replaced("tokenizer.json", os.mkfifo)),
    ("a socket beside the weights", "a.txt", ("a pipe, socket",), replaced("a.txt", listening)),
    (
        "a link to an endless device",
        "chat_template.jinja",
        ("a pipe, socket",),
        replaced("chat_template.jinja", lambda path: path.symlink_to("/dev/zero")),
    ),
    ("a damaged generation configuration", "{", ("generation_config.json",), written("generation_config.json", "{")),
    *(
        ("end tokens that are no ids", given, ("eos_token_id",), written("generation_config.json", given))
        for given in ('{"eos_token_id": "</s>"}', '{"eos_token_id": ["a"]}', '{"eos_token_id": {}}')
    ),
    ("a file without measure beside the weights", "merges.txt of 2 ** 35 bytes", ("34,359,738,368 bytes",), sparse),
    ("a tokenizer of no words", "three words in all", ("no words for most of the text",), wordless),
    ("a generation configuration that is a list", "[]", ("not an object",), written("generation_config.json", "[]")),
    ("a tokenizer that is a list", "[]", ("has no tokenizer",), written("tokenizer.json", "[]")),
    ("a tokenizer of nothing", "{}", ("has no tokenizer",), written("tokenizer.json", "{}")),
    ("a tokenizer's settings that are a list", "[]", ("has no tokenizer",), written("tokenizer_config.json", "[]")),
    *(
        (
            "model_max_length",
            repr(value),
            ("model_max_length",),
            lambda folder, value=value: changed(folder / "tokenizer_config.json", {"model_max_length": value}),
        )
        for value in ("long", [1], True, {"a": 1})
    ),
    (
        "a chat template that makes far too much of a prompt",
        "5 million words",
        ("25,000,000 characters of 6",),
        chat("{{ 'word ' * 5000000 }}"),
    ),
    (
        "a chat template that fills the memory",
        "10 GB of words",
        ("MemoryError",),
        chat("{{ 'word ' * 2000000000 }}"),
    ),
    (
        "a chat template without end",
        "two loops",
        ("does not end",),
        chat(f"{RANGE}{RANGE}{{% endfor %}}{{% endfor %}}"),
    ),
    ("a chat template that refuses", "raise_exception", ("fails (",), chat("{{ raise_exception('no') }}")),
    ("a chat template that is none", "{% for %}", ("fails (",), chat("{% for %}")),
    ("a chat template that looks for what is not there", "messages[9]", ("fails (",), chat("{{ messages[9].a.b }}")),
    (
        "a chat template that reaches for the machine",
        "__globals__",
        ("fails (",),
        chat("{{ cycler.__init__.__globals__ }}"),
    ),
]


def bad_studies() -> Iterator[tuple[str, str]]:
    """STUDIES, and those whose models and notebooks have names that no folder or shell should see."""
    yield from STUDIES
    for name in NAMES:
        yield json.dumps({"models": {f"x/{name}": {}}, "notebooks": {"n": {}}}), "the last part of its name"
    for name in NAMES[:6]:
        yield json.dumps({"models": {"a": {}}, "notebooks": {name: {}}}), "the name of notebook"
