"""GGUF files: found, checked by their header alone, and described; transformers reads their weights, dequantized."""

import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GgufConfig

from eelib.common.errors import CheckpointError
from eelib.common.values import reason


class GgufFile(NamedTuple):
    """What the header of a GGUF file states.

    Attributes:
        path: the file.
        architecture: its name as llama.cpp has it, such as "llama" or "gemma3".
        quantization: the type that holds most of the weights, such as "Q4_1" or "F16".
        tensors: their number.
        numbers: how many numbers the tensors hold together.
    """

    path: Path
    architecture: str
    quantization: str
    tensors: int
    numbers: int

    @property
    def title(self) -> str:
        """The file's name and its quantization, for captions and manifests."""
        bits = re.match(r"I?Q(\d)", self.quantization)
        width = f"{bits[1]}-bit ({self.quantization})" if bits else self.quantization
        return f"{self.path.stem}, {width}, dequantized"

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` for a network that computes with the dequantized weights."""
        return {
            "gguf_file": self.path.name,
            "quantization_config": GgufConfig(gguf_file=self.path.name, dequantize=True),
        }


def find_gguf(path: str | Path) -> Path | None:
    """The GGUF file that a path is, or the only one in a folder without a checkpoint of another format; else None.

    Raises:
        CheckpointError: the folder holds several.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return path if path.is_file() else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise CheckpointError(
            f"model folder {str(path)!r} holds {len(files)} GGUF files; allowed is the path of one of them"
        )
    return files[0] if files else None


def add_missing_types() -> None:
    """Let transformers read Q5_0 and Q5_1, as the library gguf defines them.

    Files in Q4_K and Q5_K hold them where a row is no multiple of 256 numbers; transformers 5.23 has no table of them.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
    from transformers.integrations.gguf import dequant

    for kind in (GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q5_1):
        if kind.value in dequant.GGML_BLOCK:
            continue

        def values(blocks: Tensor, dtype: torch.dtype, kind: GGMLQuantizationType = kind) -> Tensor:
            return torch.from_numpy(quants.dequantize(blocks.cpu().numpy(), kind)).to(blocks.device, dtype)

        dequant.GGML_BLOCK[kind.value] = GGML_QUANT_SIZES[kind]
        dequant.GGML_NAME[kind.value] = kind.name
        dequant._DEQUANT[kind.value] = values


def read_header(file: Path, name: str) -> GgufFile:
    """Read and check the header of a GGUF file, without its weights.

    Args:
        file: the file.
        name: the model's name, for messages.

    Raises:
        CheckpointError: the library gguf is missing, the header is damaged, or a tensor lies outside of the file.
    """
    try:
        from gguf import GGMLQuantizationType
        from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

        add_missing_types()
    except ImportError as error:
        raise CheckpointError(f"model {name!r} is a GGUF file, which needs the library gguf ({error})") from error
    try:
        header = GgufHeader.from_file(str(file))
        size, weights = file.stat().st_size, Counter[str]()
        for tensor in header.tensors:
            numbers = prod(tensor.shape)
            end = header.data_start + tensor.offset + tensor.nbytes
            if not tensor.shape or numbers < 1 or end > size:
                raise ValueError(f"tensor {tensor.name} of shape {list(tensor.shape)} does not fit {size:,} bytes")
            weights[GGMLQuantizationType(tensor.ggml_type).name] += numbers
        if not weights:
            raise ValueError("it holds no tensors")
        architecture = str(header.architecture)
        layers = read_gguf_metadata(str(file))[0].get(f"{architecture}.block_count", 0)
        if layers > len(header.tensors):  # transformers makes lists of that length before it looks at the weights
            raise ValueError(f"it states {layers:,} layers and holds {len(header.tensors):,} tensors")
        found = [int(block[1]) + 1 for tensor in header.tensors if (block := re.match(r"blk\.(\d+)\.", tensor.name))]
        if max(found, default=0) > layers:  # transformers leaves the others out without a word
            raise ValueError(f"it states {layers:,} layers and holds {max(found):,}")
    except Exception as error:  # whatever a damaged header makes the reader raise
        raise CheckpointError(f"model {name!r} could not be loaded ({file.name}: {reason(error)})") from error
    return GgufFile(file, architecture, weights.most_common(1)[0][0], len(header.tensors), sum(weights.values()))
