"""Load any Hugging Face checkpoint, find its parts by running it once, and prove that they were found."""

import hashlib
import inspect
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
)

from .probe import BlockParts, Tail, block_states, find_blocks, find_parts, find_tail, record

SHIPPED = Path(__file__).resolve().parent.parent / "data" / "models"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CLASSES = {"causal": AutoModelForCausalLM, "seq2seq": AutoModelForSeq2SeqLM, "masked": AutoModelForMaskedLM}
log = logging.getLogger(__name__)


@dataclass
class Model:
    """A checkpoint whose blocks, sub-layers, final norm and head are known and checked.

    `layers` is L: layer 0 is the embeddings, layer l the output of block l. `tail` maps states [n, width] to the
    logits [n, vocabulary] that the model itself would give. `parts[l - 1]` names the sub-layers of block l; where they
    could not be found, `parts` is empty and `parts_error` says why.
    """

    name: str
    kind: str
    network: nn.Module
    tokenizer: object
    blocks: list[nn.Module]
    tail: Tail
    parts: list[BlockParts]
    parts_error: str
    hash: str
    pads: bool

    @property
    def layers(self) -> int:
        """L, the number of blocks that produce tokens (the decoder's in an encoder-decoder)."""
        return len(self.blocks)

    @property
    def width(self) -> int:
        """Size of a hidden state."""
        return self.tail.width

    @property
    def vocabulary(self) -> int:
        """Number of logits."""
        return self.tail.vocabulary

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return next(self.network.parameters()).device

    @property
    def dtype(self) -> str:
        """Name of the weights' floating-point type."""
        return str(next(self.network.parameters()).dtype).removeprefix("torch.")

    @property
    def window(self) -> int:
        """Longest input plus output in tokens; the tokenizer's and the config's limits, whichever is smaller."""
        config = self.network.config.get_text_config(decoder=True)
        limits = [getattr(config, key, None) for key in ("max_position_embeddings", "n_positions", "n_ctx")]
        limits.append(self.tokenizer.model_max_length)
        return int(min([limit for limit in limits if isinstance(limit, int) and 0 < limit < 10**9], default=10**9))

    @property
    def eos_ids(self) -> set[int]:
        """Token ids that end an output: those of the generation config, else of the config, else of the tokenizer."""
        generation = getattr(self.network, "generation_config", None)
        for holder in (generation, self.network.config, self.tokenizer):
            ids = getattr(holder, "eos_token_id", None)
            if ids is not None:
                return set(ids) if isinstance(ids, (list, tuple)) else {ids}
        return set()

    @property
    def pad_id(self) -> int:
        """A token id for padding; any id serves, because padded positions are masked."""
        ids = [self.tokenizer.pad_token_id, getattr(self.network.config, "pad_token_id", None), *self.eos_ids, 0]
        return next(i for i in ids if i is not None and i >= 0)

    def accepts(self, argument: str) -> bool:
        """Whether the network's forward takes `argument`."""
        return argument in inspect.signature(self.network.forward).parameters


def shipped_models() -> list[str]:
    """Names of the language models that come with the project."""
    return sorted(p.parent.name for p in SHIPPED.glob("*/config.json"))


def load_model(name: str, dtype: str = "float32", device: str = "auto", revision: str | None = None,
               trust_remote_code: bool = False) -> Model:
    """Load a shipped name, a local folder or a hub id, and check it (see `probe`).

    Raises ValueError, one line: unknown name, dtype or device; weights that are not safetensors; no tokenizer;
    a model whose logits could not be rebuilt from its last captured state.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not known; allowed: {', '.join(DTYPES)}")
    place = resolve_device(device)
    shipped = SHIPPED / name
    path = str(shipped) if (shipped / "config.json").exists() else str(name)
    if not Path(path).is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise ValueError(f"model folder {path!r} does not exist")
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(path, **options)
        kind = kind_of(config)
        network, loaded = CLASSES[kind].from_pretrained(path, config=config, dtype=DTYPES[dtype], use_safetensors=True,
                                                        output_loading_info=True, **options)
    except Exception as error:  # transformers and safetensors raise many kinds; the reader needs one line
        known = ", ".join(shipped_models()) or "none"
        raise ValueError(f"model {name!r} could not be loaded ({first_line(error)}); shipped models: {known}; "
                         "or give a local folder or a hub id with safetensors weights") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    except Exception as error:
        raise ValueError(f"model {name!r} has no tokenizer that can be loaded ({first_line(error)})") from None
    if loaded["missing_keys"]:  # transformers would leave them random
        raise ValueError(f"model {name!r} lacks weights: {', '.join(sorted(loaded['missing_keys'])[:3])}")
    network.to(place).eval()
    note_ignored_generation(network, name)
    return prepare(network, tokenizer, Path(path).name, kind, weights_hash(path, revision))


def prepare(network: nn.Module, tokenizer, name: str, kind: str, weights: str = "") -> Model:
    """Wrap a network that is in memory: find blocks, tail and sub-layers with one probe run, and check them."""
    runs = record(network, kind, probe_ids(network, tokenizer))
    blocks = find_blocks(network, kind, runs)
    tail = find_tail(network, blocks, runs, name)
    try:
        parts, error = find_parts(blocks, runs, name), ""
    except ValueError as problem:
        parts, error = [], str(problem)
    model = Model(name, kind, network, tokenizer, [block for _, block in blocks], tail, parts, error, weights, False)
    model.pads = kind != "causal" or padding_is_inert(model)
    return model


def kind_of(config) -> str:
    """"causal", "seq2seq" or "masked", from the architecture that the checkpoint names."""
    architecture = (getattr(config, "architectures", None) or [""])[0]
    if config.is_encoder_decoder:
        return "seq2seq"
    if architecture.endswith("ForMaskedLM"):
        return "masked"
    if architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) or not architecture:
        return "causal"
    raise ValueError(f"architecture {architecture} is not one of causal, encoder-decoder or masked language model")


def resolve_device(device: str) -> torch.device:
    """"auto" (CUDA where there is one), or a torch device name that exists here; else ValueError."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
        return place
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} is not available ({first_line(error)}); allowed: auto, cpu, cuda, cuda:N"
                         ) from None


def probe_ids(network: nn.Module, tokenizer) -> Tensor:
    """Five different ordinary token ids, [1, 5]."""
    size = network.config.get_text_config(decoder=True).vocab_size
    special = set(getattr(tokenizer, "all_special_ids", []) or [])
    ids = [i for i in range(size // 7, size) if i not in special][:: max(1, size // 11)][:5]
    return torch.tensor([ids], device=next(network.parameters()).device)


@torch.no_grad()
def padding_is_inert(model: Model) -> bool:
    """Whether a left-padded row of a batch gets the states that it gets alone; if not, only equal lengths share one."""
    ids = probe_ids(model.network, model.tokenizer)
    alone = model.network(**causal_inputs(model, ids[:, 2:], torch.ones_like(ids[:, 2:])), use_cache=False).logits
    padded, mask = torch.cat([ids, ids]), torch.ones_like(ids).repeat(2, 1)
    padded[1, :2], mask[1, :2] = model.pad_id, 0
    both = model.network(**causal_inputs(model, padded, mask), use_cache=False).logits
    return bool((both[1, 2:] - alone[0]).abs().max() <= tolerance(alone) * alone.abs().max())


def causal_inputs(model: Model, ids: Tensor, mask: Tensor) -> dict:
    """Arguments of a causal forward: position ids count real tokens only, where the network takes them.

    They stay inside the window for rows that are finished and only keep their place in the batch.
    """
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.accepts("position_ids"):
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(0, model.window - 1)[:, -ids.shape[1]:]
    return inputs


def tolerance(tensor: Tensor) -> float:
    """Relative difference that rounding alone explains at the tensor's precision."""
    return 1e-4 if tensor.dtype in (torch.float32, torch.float64) else 5e-2


def note_ignored_generation(network: nn.Module, name: str) -> None:
    """Print what a checkpoint asks of generation and plain greedy decoding does not do (design: greedy is argmax)."""
    asked = getattr(network, "generation_config", None)
    if asked is None:
        return
    kept = {"eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version",
            "_from_model_config", "use_cache", "max_length", "max_new_tokens"}
    plain = GenerationConfig().to_dict()
    ignored = {k: v for k, v in asked.to_dict().items() if k not in kept and v not in (None, False, plain.get(k))}
    if ignored:
        print(f"{name}: greedy decoding ignores " + ", ".join(f"{k}={v}" for k, v in sorted(ignored.items())))


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


def first_line(error: Exception) -> str:
    """The first line of an error's text, for messages that must stay on one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


__all__ = ["Model", "block_states", "load_model", "prepare", "shipped_models"]
