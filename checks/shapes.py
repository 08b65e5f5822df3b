"""Llama-type checkpoints of random weights with a trivial tokenizer, to be timed; they have no end token."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eelib.common.files import data_folder
from eelib.models.checkpoint import path_of

TRAINED, TEXTS = ("pocket-llama", "smollm2-135m-instruct"), "translation/en-de.jsonl"


@dataclass(frozen=True)
class Shape:
    """A network, and how much is decoded so that it takes seconds: `plan` is batch -> (sequences, new tokens of each).

    Short prompts: the longer the prompt, the more of the time goes into reading it, which is the same for every way.
    """

    layers: int
    width: int
    vocabulary: int
    intermediate: int
    heads: int
    key_value_heads: int
    tied: bool = False
    prompt_tokens: int = 16
    plan: dict[int, tuple[int, int]] = field(default_factory=dict, hash=False)

    @property
    def size_mb(self) -> float:
        """Weights in float32."""
        attention = 2 * self.width**2 * (1 + self.key_value_heads / self.heads)
        block = attention + 3 * self.width * self.intermediate
        return 4 * (self.layers * block + (1 if self.tied else 2) * self.vocabulary * self.width) / 2**20


def random_llama(shape: Shape) -> LlamaForCausalLM:
    """A network of random weights, the same each time, with no end token: outputs have a fixed length."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        tie_word_embeddings=shape.tied,
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


def checkpoint(name: str, shape: Shape, cache: Path) -> Path:
    """The folder of a shape's checkpoint; made if it is not there. A trained model's is a copy without end token."""
    folder = cache / "shapes" / name
    if (folder / "done").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if name in TRAINED:
        for file in Path(path_of(name)).iterdir():
            if file.suffix == ".safetensors":
                shutil.copy(file, folder)
            elif file.suffix == ".json" and file.name != "card.json":
                settings = json.loads(file.read_text(encoding="utf-8"))
                ends = {key: None for key in ("eos_token_id", "eos_token") if key in settings}
                (folder / file.name).write_text(json.dumps(settings | ends), encoding="utf-8")
    else:
        random_llama(shape).save_pretrained(folder, max_shard_size="20GB")
        number_tokenizer(shape.vocabulary).save_pretrained(folder)
    (folder / "done").touch()
    return folder


def prompts(name: str, shape: Shape, cache: Path, count: int, varied: bool = False) -> Path:
    """A JSON file {ids, texts} of `count` prompts: all as long as the shape says, or `varied`, 4 to 32 tokens."""
    path = cache / "shapes" / f"{name}-prompts{'-varied' if varied else ''}-{count}.json"
    if path.exists():
        return path
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint(name, shape, cache))
    source = pieces_of_text(tokenizer) if name in TRAINED else random_ids(shape.vocabulary)
    ids: list[list[int]] = []
    texts: list[str] = []
    while len(ids) < count:
        made = next(source)[: 4 + 7 * len(ids) % 29 if varied else shape.prompt_tokens]
        text = str(tokenizer.decode(made))
        if text.strip() and tokenizer(text)["input_ids"] == made:  # the same for every way
            ids.append(made)
            texts.append(text)
    path.write_text(json.dumps({"ids": ids, "texts": texts}), encoding="utf-8")
    return path


def random_ids(vocabulary: int) -> Iterator[list[int]]:
    """Token ids, endlessly, the same each time."""
    draw = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(1, vocabulary, (64,), generator=draw).tolist()


def pieces_of_text(tokenizer: PreTrainedTokenizerFast) -> Iterator[list[int]]:
    """Token ids from the project's own sentences, endlessly, from a different place each time."""
    rows = [json.loads(line) for line in data_folder("texts", TEXTS).read_text(encoding="utf-8").splitlines()]
    stream = tokenizer(" ".join(row["source"] for row in rows), verbose=False)["input_ids"]
    at = 0
    while True:
        yield (stream + stream)[at : at + 64]
        at = (at + 11) % len(stream)
