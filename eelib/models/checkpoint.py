"""Files of a checkpoint: where it is, which class its config names, weights, tokenizer, hash; refusals of one line."""

import hashlib
import importlib.util
import json
from pathlib import Path

import torch
import transformers
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

from eelib.common.data import data_folder
from eelib.common.errors import CheckpointError
from eelib.common.values import check_text, first_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CLASSES = {
    "causal": AutoModelForCausalLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    "masked": AutoModelForMaskedLM,
    "classifier": AutoModelForSequenceClassification,
}
# Libraries of the quantized formats, where the format's name is not the library's.
QUANTIZERS = {
    "bitsandbytes": "bitsandbytes",
    "bitsandbytes_4bit": "bitsandbytes",
    "bitsandbytes_8bit": "bitsandbytes",
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "quanto": "optimum.quanto",
    "compressed-tensors": "compressed_tensors",
    "torchao": "torchao",
    "hqq": "hqq",
    "aqlm": "aqlm",
    "eetq": "eetq",
    "vptq": "vptq",
    "higgs": "flute",
    "fbgemm_fp8": "fbgemm_gpu",
    "auto-round": "auto_round",
}


def shipped_models() -> list[str]:
    """Names of the language models that come with the project."""
    return sorted(p.parent.name for p in data_folder("models").glob("*/config.json"))


def path_of(name: str | Path) -> str:
    """A shipped model's folder, a local folder (`~` expanded), or the name: a hub id. CheckpointError if missing."""
    name = str(name)
    check_text("model", name)
    try:
        path = data_folder("models", name)
        if not (path / "config.json").exists():
            path = Path(name).expanduser()
        if path.is_dir():  # . and .. have a name only where they lead; a link keeps its own
            return str(path.resolve() if path.name in ("", "..") else path)
    except (OSError, RuntimeError) as error:  # longer than a path can be; the home of nobody
        raise CheckpointError(f"model {name!r} can't be looked for ({first_line(error)})") from error
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CheckpointError(f"model folder {name!r} does not exist")
    return name


def check_folder(path: str, name: str, trust_remote_code: bool) -> None:
    """Refuse a local folder whose weights are not safetensors or not all there, or that needs code of its own."""
    folder = Path(path)
    if not folder.is_dir():
        return
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"model {name!r} could not be loaded (config.json: {first_line(error)})") from error
    if config.get("auto_map") and not trust_remote_code and not known_class(config):
        raise CheckpointError(
            f"model {name!r} needs code of its own from its folder; allowed only with trust_remote_code=True"
        )
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"model {name!r} could not be loaded ({index.name}: {first_line(error)})") from error
        missing = sorted(shard for shard in shards if not (folder / shard).exists())
        if missing:
            raise CheckpointError(
                f"model {name!r} lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing[:3])}"
            )
    elif not any(folder.glob("*.safetensors")):
        kinds = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf")
        other = sorted(f.name for f in folder.glob("*") if f.suffix in kinds)
        what = f"has weights only as {', '.join(other[:3])}" if other else "has no weights"
        raise CheckpointError(f"model {name!r} {what}; allowed are safetensors files")


def known_class(config: dict) -> bool:
    """Whether the installed transformers has the architecture that a config names."""
    return hasattr(transformers, (config.get("architectures") or [""])[0] or "-")


def kind_of(config: PretrainedConfig) -> str:
    """One of CLASSES, from the architecture that a checkpoint names. CheckpointError if it is of none of them."""
    architecture = (getattr(config, "architectures", None) or [""])[0]
    text_classes = {
        kind: set(names.values())
        for kind, names in (
            ("causal", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
            ("masked", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
            ("seq2seq", auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
            ("classifier", auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        )
    }
    if architecture in text_classes["classifier"] or architecture.endswith("ForSequenceClassification"):
        return "classifier"
    only_causal = architecture in text_classes["causal"] and architecture not in text_classes["seq2seq"]
    if config.is_encoder_decoder and not only_causal:
        return "seq2seq"
    if architecture.endswith("ForMaskedLM") or (
        architecture in text_classes["masked"]
        and architecture not in text_classes["seq2seq"]
        and not (getattr(config, "is_decoder", False) or getattr(config, "causal", False))
    ):
        return "masked"
    if (
        architecture in text_classes["causal"] | text_classes["seq2seq"]
        or not architecture
        or architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
    ):
        return "causal"
    raise CheckpointError(
        f"architecture {architecture} is not a causal, encoder-decoder or masked language model or a "
        "sequence classifier"
    )


def resolve_device(device: str) -> torch.device | None:
    """The device of "auto" (CUDA if there is any), of "balanced" (None: spread over all), or one that exists here."""
    if device == "balanced":
        if importlib.util.find_spec("accelerate") is None:
            raise CheckpointError("device 'balanced' needs the library accelerate, which is not installed")
        return None
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
        return found
    except (RuntimeError, AssertionError) as error:
        raise CheckpointError(
            f"device {device!r} is not available ({first_line(error)}); allowed: auto, balanced, cpu, cuda, cuda:N"
        ) from error


def check_quantizer(config: PretrainedConfig, name: str) -> bool:
    """Whether the checkpoint is quantized; CheckpointError names the library that it needs and lacks."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return False
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(
        settings.get("quant_method")
        or ("bitsandbytes" if settings.get("load_in_8bit") or settings.get("load_in_4bit") else "")
    )
    library = QUANTIZERS.get(method)
    for needed in filter(None, (library, "accelerate")):
        if not installed(needed):
            raise CheckpointError(
                f"model {name!r} is quantized with {method}, which needs the library {needed}; it is not installed"
            )
    return True


def installed(library: str) -> bool:
    """Whether a library can be imported."""
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:
        return False


def read_checkpoint(
    name: str, path: str, dtype: str, device: torch.device | None, revision: str | None, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """(network in eval mode, tokenizer, kind) of a folder or hub id. Raises CheckpointError, one line."""
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    check_folder(path, name, trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(path, **options)
        kind = kind_of(config)
    except Exception as error:  # transformers raises many kinds; the reader needs one line
        raise not_loaded(name, error) from error
    network_class = getattr(transformers, (config.architectures or [""])[0] or "-", CLASSES[kind])
    config_class = getattr(network_class, "config_class", None)
    if config_class and not isinstance(config, config_class):
        config = config.get_text_config(decoder=True)  # the language model of a larger one
    quantized = check_quantizer(config, name)
    spread = {"device_map": "auto"} if device is None else {"device_map": {"": device}} if quantized else {}
    more = {"trust_remote_code": trust_remote_code} if network_class is CLASSES[kind] else {}
    try:
        network, loaded = network_class.from_pretrained(
            path,
            config=config,
            dtype=DTYPES[dtype],
            use_safetensors=True,
            output_loading_info=True,
            revision=revision,
            **spread,
            **more,
        )
    except Exception as error:  # safetensors too
        raise not_loaded(name, error) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    except Exception as error:
        raise CheckpointError(f"model {name!r} has no tokenizer that can be loaded ({first_line(error)})") from error
    if loaded["missing_keys"]:  # transformers would leave them random
        raise CheckpointError(f"model {name!r} lacks weights: {', '.join(sorted(loaded['missing_keys'])[:3])}")
    if device is not None and not quantized:
        network.to(device)
    return network.eval(), tokenizer, kind


def not_loaded(name: str, error: Exception) -> CheckpointError:
    """One line that says why, and what could be asked for."""
    known = ", ".join(shipped_models()) or "none"
    return CheckpointError(
        f"model {name!r} could not be loaded ({first_line(error)}); shipped models: {known}; "
        "or give a local folder or a hub id with safetensors weights"
    )


def weights_hash(path: str, revision: str | None) -> str:
    """SHA-256 over the names and bytes of the weight and tokenizer files of a folder or of a cached hub snapshot."""
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import hf_hub_download

        folder = Path(hf_hub_download(path, "config.json", revision=revision)).parent
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*")):
        if file.suffix in (".safetensors", ".json", ".txt", ".model", ".spm") and file.name != "card.json":
            digest.update(file.name.encode())
            with open(file, "rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
