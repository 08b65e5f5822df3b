"""LoRA adapters in PEFT's format: low-rank updates of another model's weights (Hu et al. 2021), added when it loads.

A folder of them has `adapter_config.json`, which names the model, and `adapter_model.safetensors`; and `config.json` if
the adapters add a head that the base lacks, such as a classifier's.
"""

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from eelib.common.errors import CheckpointError
from eelib.common.values import first_line
from eelib.models.folder import read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKENIZER = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja")  # if it has one
ROUNDED = b"sums rounded where the base is bfloat16"  # to tell what was made before they were
PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
PLAIN: dict[str, Any] = {  # what a setting has to be, where a file has it
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "alora_invocation_tokens": None,
    "layer_replication": None,
}
KEEPING = ("gaussian", "eva", "orthogonal", "mica")  # initializations by PEFT that leave the base as it is


def lora_base(path: str | Path) -> str:
    """The model whose weights a folder of LoRA adapters updates; "" for every other folder.

    CheckpointError for adapters of another kind, of a base that PEFT changed, or without the name of their model.
    """
    folder = Path(path)
    others = [file for file in folder.glob("*.safetensors") if file.name != WEIGHTS]
    if others or not ((folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()):
        return ""
    settings = read_object(folder / CONFIG)
    for key, allowed in PLAIN.items():
        if (given := settings.get(key, allowed) or allowed) != allowed:
            raise CheckpointError(f"{CONFIG} has {key} {given!r}; allowed is {allowed!r}")
    begun = settings.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower() not in KEEPING:
        raise CheckpointError(
            f"{CONFIG} has init_lora_weights {begun!r}, which changes the base; allowed: true, false, "
            f"{', '.join(KEEPING)}, or adapters saved with PEFT's path_initial_model_for_weight_conversion"
        )
    base, rank, alpha = (settings.get(key) for key in ("base_model_name_or_path", "r", "lora_alpha"))
    if not isinstance(base, str) or not base or Path(base) == folder:
        raise CheckpointError(f"{CONFIG} does not name the model that it is of")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1 or not isinstance(alpha, (int, float)):
        raise CheckpointError(
            f"{CONFIG} has r {rank!r} and lora_alpha {alpha!r}; r must be a whole number, at least 1, and lora_alpha a "
            "number"
        )
    return base


def hash_with_lora(folder: Path, base_hash: str) -> str:
    """The hash of a base and its adapters. CheckpointError where the adapters were trained for other weights."""
    try:
        with safe_open(folder / WEIGHTS, "pt") as content:
            trained_for = (content.metadata() or {}).get("model_hash", base_hash)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} is damaged ({first_line(error)})") from error
    if trained_for != base_hash:
        raise CheckpointError(
            f"{folder.name} was trained for other weights (hash {trained_for[:12]}) than these (hash {base_hash[:12]})"
        )
    names = (CONFIG, WEIGHTS, "config.json", *TOKENIZER)
    files = [folder / name for name in names if (folder / name).exists()]
    content = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(base_hash.encode() + ROUNDED + content).hexdigest()


@torch.no_grad()
def merge_lora(network: nn.Module, folder: Path) -> set[str]:
    """Add the updates to a network's weights, W + alpha / r * B A in float32; returns the names of replaced weights.

    Where W holds bfloat16 numbers, the sum is rounded to bfloat16: it is then as exact as the base, and read as fast. A
    tensor that is no update, such as a new head's, replaces the weight of its name. CheckpointError for a tensor that
    fits no weight, or that replaces a shared weight, which PEFT would replace in one of its places only.
    """
    settings = read_object(folder / CONFIG)
    scale = settings["lora_alpha"] / settings["r"]
    try:
        tensors = safetensors.torch.load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} is damaged ({first_line(error)})") from error
    weights, replaced = dict(network.named_parameters()), set()
    places = Counter(id(weight) for _, weight in network.named_parameters(remove_duplicate=False))
    for key, tensor in tensors.items():
        if key.endswith(UP) and key.removesuffix(UP) + DOWN in tensors:
            continue
        name, value = key.removeprefix(PREFIX), tensor.float()
        if update := key.endswith(DOWN):
            name = name.removesuffix(DOWN) + ".weight"
            up = tensors.get(key.removesuffix(DOWN) + UP, tensor[:0])
            value = scale * up.float() @ value if up.shape[1:] == value.shape[:1] == (settings["r"],) else up
        if name not in weights or value.shape != weights[name].shape:
            raise CheckpointError(f"{folder / WEIGHTS}: {key!r} fits no weight of {type(network).__name__}")
        if not torch.isfinite(value).all():
            raise CheckpointError(f"{folder / WEIGHTS} holds values that are not finite")
        if update:
            base = weights[name].float()
            value = base + value.to(base.device)
            if torch.equal(base, base.bfloat16().float()):
                value = value.bfloat16()
        elif places[id(weights[name])] > 1:
            raise CheckpointError(f"{folder / WEIGHTS}: {key!r} replaces a weight that the base's head shares")
        else:
            replaced.add(name)
        weights[name].copy_(value)
    return replaced
