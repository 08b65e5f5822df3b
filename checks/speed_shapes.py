"""The shapes that `checks.speed` measures: checkpoints with a trivial tokenizer, made once, and their prompts."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eelib.common.files import data_folder

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = data_folder("models", "pocket-llama")
TEXTS = data_folder("texts", "translation", "de-en.jsonl")


@dataclass(frozen=True)
class Shape:
    """A Llama-type model and how much of it is measured: `plan` is batch -> (sequences, new tokens of each).

    Token counts are chosen so that a cell takes seconds. Short prompts: the longer the prompt, the more of the time
    goes into reading it, which is the same for every way.
    """

    name: str
    layers: int
    width: int
    vocabulary: int
    intermediate: int
    heads: int
    key_value_heads: int
    tied: bool
    prompt_tokens: int
    plan: dict[int, tuple[int, int]]
    weights: str = "random"

    @property
    def size_mb(self) -> float:
        """Weights in float32."""
        attention = 2 * self.width**2 * (1 + self.key_value_heads / self.heads)
        block = attention + 3 * self.width * self.intermediate
        return 4 * (self.layers * block + (1 if self.tied else 2) * self.vocabulary * self.width) / 2**20


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("pocket-llama", 12, 256, 8192, 688, 4, 4, False, 16, {1: (2, 64), 16: (16, 64), 64: (64, 32)}, "shipped"),
        Shape("12x256-128k", 12, 256, 131072, 688, 4, 4, False, 16, {1: (2, 32), 16: (16, 16), 64: (64, 8)}),
        Shape("16x1024-32k", 16, 1024, 32768, 2816, 16, 4, False, 16, {1: (1, 32), 16: (16, 12), 64: (64, 8)}),
        Shape("16x2048-128k", 16, 2048, 131072, 8192, 32, 8, True, 4, {1: (1, 12), 16: (16, 4), 64: (64, 3)}),
    )
}
QUICK = Shape("tiny", 2, 32, 500, 64, 4, 2, False, 5, {1: (2, 6), 4: (8, 5)})


def checkpoint(shape: Shape, cache: Path) -> Path:
    """The folder of a shape's checkpoint; made if it is not there. It has no end token: outputs have a fixed length."""
    folder = cache / "shapes" / shape.name
    if (folder / "done").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if shape.weights == "shipped":
        endless_copy(SHIPPED, folder)
    else:
        random_llama(shape, shape.tied).save_pretrained(folder, max_shard_size="20GB")
        number_tokenizer(shape.vocabulary).save_pretrained(folder)
    (folder / "done").touch()
    return folder


def random_llama(shape: Any, tied: bool) -> LlamaForCausalLM:
    """A network of random weights, the same each time, with no end token: outputs have a fixed length.

    `shape` has layers, width, vocabulary, intermediate, heads and key_value_heads.
    """
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        tie_word_embeddings=tied,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def number_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Token i is the number i as text; spaces separate."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(vocabulary)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def endless_copy(source: Path, folder: Path) -> None:
    """A copy of a checkpoint whose configuration names no end token."""
    for file in source.iterdir():
        if file.suffix in (".safetensors", ".json") and file.name != "card.json":
            shutil.copy(file, folder)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = folder / name
        settings = json.loads(path.read_text(encoding="utf-8"))
        for key in ("eos_token_id", "eos_token"):
            if key in settings:
                settings[key] = None
        path.write_text(json.dumps(settings, indent=1), encoding="utf-8")


def prompts(shape: Shape, cache: Path, count: int, varied: bool = False) -> Path:
    """A JSON file {ids, texts} of `count` prompts: all as long as the shape says, or `varied`, 4 to 32 tokens."""
    path = cache / "shapes" / f"{shape.name}-prompts{'-varied' if varied else ''}-{count}.json"
    if path.exists():
        return path
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint(shape, cache))
    lengths = [4 + 7 * i % 29 if varied else shape.prompt_tokens for i in range(count)]
    sources = pieces_of_text(tokenizer) if shape.weights == "shipped" else None
    draw = torch.Generator().manual_seed(1)
    ids: list[list[int]] = []
    texts: list[str] = []
    while len(ids) < count:
        length = lengths[len(ids)]
        made = (
            next(sources)[:length]
            if sources
            else torch.randint(1, shape.vocabulary, (length,), generator=draw).tolist()
        )
        text = str(tokenizer.decode(made))
        if text.strip() and tokenizer(text)["input_ids"] == made and len(made) == length:  # the same for every way
            ids.append(made)
            texts.append(text)
    path.write_text(json.dumps({"ids": ids, "texts": texts}), encoding="utf-8")
    return path


def pieces_of_text(tokenizer: PreTrainedTokenizerFast) -> Iterator[list[int]]:
    """Token ids from the project's own sentences, endlessly, from a different place each time."""
    rows = [json.loads(line) for line in TEXTS.read_text(encoding="utf-8").splitlines()]
    stream = tokenizer(" ".join(row["source"] for row in rows), verbose=False)["input_ids"]
    at = 0
    while True:
        yield (stream + stream)[at : at + 64]
        at = (at + 11) % len(stream)
