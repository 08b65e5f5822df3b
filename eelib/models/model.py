"""Load any Hugging Face checkpoint, find its components by running it once, and check that they are right."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eelib.common.errors import CheckpointError, about
from eelib.common.files import model_folder
from eelib.common.values import check_name, first_line, reason
from eelib.models.attention import use_grouped_attention
from eelib.models.checkpoint import DTYPES, folder_of, path_of, read_checkpoint, resolve_device, resolve_dtype
from eelib.models.components import BlockComponents, find_components
from eelib.models.folder import ENCODER_WINDOW, WINDOWS, weights_hash
from eelib.models.fused_blocks import use_fused_blocks
from eelib.models.head import Head, end_token, find_classifier_head, find_head, prove_head
from eelib.models.lens_adapters import DRAFT_FILE, DraftBlock, Translators, base_of, origin_of, with_translators
from eelib.models.lora import hash_with_lora, lora_base
from eelib.models.model_kinds import MODEL_KINDS, Causal, ModelKind, stack
from eelib.models.probe import embeddings_of, find_blocks, record
from eelib.models.products import use_fast_products

TEMPLATE_TEXT = 2**20  # characters that a chat template may add to a prompt; a good one adds a few thousand
TEMPLATE_SECONDS = 10.0  # for one prompt, which takes a good template less than a thousandth of it


@dataclass
class Model:
    """A checkpoint whose blocks, sub-layers, final norm and head are known and checked.

    Layer 0 is the embeddings, layer l the output of block l; L is the number of blocks.

    Attributes:
        kind: causal, seq2seq, masked or classifier; `adapter` has the code that differs between them.
        unembed: maps states [n, hidden_size] to the logits [n, vocab_size] that the model itself would give; a
            classifier's vocabulary is its labels.
        components: the sub-layers of blocks 1 to L; empty where they could not be found.
        components_error: why they could not be found.
        hash: of the weights and all other files that can change outputs.
        pads: whether rows of different lengths may share a batch.
        cache: "growing" (ours, with the layers that the config names), "full" (ours, all layers alike), "own" (the
            network makes it) or "none" (each step runs the whole text).
        offset: the position id of a text's first token; None where the network takes no position ids.
        remark: a warning about the weights; empty if there is none.
        title: the name for captions, with the quantization where there is one.
        translators: the tuned lens through which inner states are read; None for the plain head.
        draft_blocks: draft blocks loaded so far, by file, its time of change, and device.
    """

    name: str
    kind: str
    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    blocks: list[nn.Module]
    unembed: Head
    components: list[BlockComponents]
    components_error: str
    hash: str
    pads: bool
    cache: str = "growing"
    offset: int | None = 0
    remark: str = ""
    title: str = ""
    translators: Translators | None = None
    draft_blocks: dict[tuple[Path, int, str], DraftBlock] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def adapter(self) -> ModelKind:
        """The inputs and read positions of a model of this kind."""
        return MODEL_KINDS[self.kind](self)

    @property
    def writer(self) -> Causal:
        """The `adapter` of a model that writes tokens. CheckpointError for a masked model or a classifier."""
        adapter = self.adapter
        if not isinstance(adapter, Causal):
            raise CheckpointError(f"{self.name}: a {self.kind} model writes no tokens")
        return adapter

    @property
    def layers(self) -> int:
        """L, the number of blocks that produce tokens (the decoder's in an encoder-decoder)."""
        return len(self.blocks)

    @property
    def hidden_size(self) -> int:
        return self.unembed.hidden_size

    @property
    def vocab_size(self) -> int:
        """Number of logits: tokens, or a classifier's labels."""
        return self.unembed.vocab_size

    @property
    def labels(self) -> list[str]:
        """Names of a classifier's labels, by number; empty for other kinds."""
        if self.kind != "classifier":
            return []
        names = getattr(self.network.config, "id2label", None) or {}
        return [str(names.get(i, i)) for i in range(self.vocab_size)]

    @property
    def device(self) -> torch.device:
        """The device of inputs: of a network spread over devices, that of its embeddings."""
        embeddings = embeddings_of(self.network)
        return next((embeddings if embeddings is not None else self.network).parameters()).device

    @property
    def dtype(self) -> str:
        """Name of the floating-point type that the network computes in (not that of quantized weights)."""
        kinds = [p.dtype for p in self.network.parameters() if p.dtype in DTYPES.values() or p.dtype == torch.float64]
        return str(kinds[0] if kinds else self.network.dtype).removeprefix("torch.")

    @property
    def context_length(self) -> int:
        """Longest input plus output in tokens: the smallest of the limits in the tokenizer and the config.

        With rotary embeddings of type "longrope" it is at most original_max_position_embeddings, since beyond that
        transformers uses other factors for every token of a call.
        """
        config = self.network.config.get_text_config(decoder=True)
        limits = [getattr(config, key, None) for key in WINDOWS]
        rotations = getattr(config, "rope_parameters", None)
        parts = [rotations, *rotations.values()] if isinstance(rotations, dict) else []  # some have them by layer type
        long = [part for part in parts if isinstance(part, dict) and part.get("rope_type") == "longrope"]
        limits += [part.get("original_max_position_embeddings") for part in long]
        limits = [limit - (self.offset or 0) if isinstance(limit, int) else None for limit in limits]
        limits.append(self.tokenizer.model_max_length)
        known = [limit for limit in limits if isinstance(limit, (int, float)) and 0 < limit < 10**9]
        return int(min(known, default=10**9))

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt: the encoder's window, or the window, less one token if the model writes."""
        if self.kind == "seq2seq":
            return int(getattr(self.network.config, ENCODER_WINDOW, None) or self.context_length)
        return self.context_length - self.adapter.writes

    @property
    def eos_ids(self) -> set[int]:
        """Token ids that end an output: those of the generation config, else of the config, else of the tokenizer."""
        generation = getattr(self.network, "generation_config", None)
        config = self.network.config
        for holder in (generation, config, config.get_text_config(decoder=True), self.tokenizer):
            ids = getattr(holder, "eos_token_id", None)
            if ids is not None:
                return set(ids) if isinstance(ids, (list, tuple)) else {ids}
        return set()

    @property
    def unknown_ids(self) -> set[int]:
        """Token ids for text that the vocabulary can't express; empty where it can express all text."""
        tokenizer = self.tokenizer
        inner = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        token = getattr(inner, "unk_token", None)
        ids = {tokenizer.unk_token_id, tokenizer.convert_tokens_to_ids(token) if token else None}
        frame = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id}
        return {i for i in ids - frame if i is not None}  # some use one token for all

    @property
    def pad_id(self) -> int:
        """A token id for padding; any id serves, because padded positions are masked."""
        ids = [self.tokenizer.pad_token_id, getattr(self.network.config, "pad_token_id", None), *self.eos_ids, 0]
        size = getattr(embeddings_of(self.network), "num_embeddings", None)
        return next(i for i in ids if isinstance(i, int) and 0 <= i < (size or i + 1))

    def read_through(self, states: Tensor) -> Tensor:
        """States [n, L+1, hidden_size] after the translators, if there are any."""
        return states if self.translators is None else self.translators(states)

    def read_through_at(self, layer: int, states: Tensor) -> Tensor:
        """One layer's states [n, hidden_size] after its translator, if there is one."""
        return states if self.translators is None else self.translators.at(layer, states)

    def encode(
        self,
        prompts: list[str],
        chat: bool = False,
        seconds: list[str] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """Token ids of prompts with the tokenizer's special tokens, or, with `chat`, in its chat template.

        `seconds` are the second texts of pairs. For a classifier, a row carries its token types if the network takes
        them (`TextIds`). `numbers` are the prompts' numbers, for messages. CheckpointError for `chat` with pairs or
        without a template; if the tokenizer fails, or gives token types or tokens that the network does not have.
        """
        if chat and seconds:
            raise CheckpointError(
                f"{self.name}: pairs of texts are not put into a chat template; allowed is chat=False"
            )
        if not chat:
            return self.adapter.rows_of(self.tokenized(prompts, numbers, text_pair=seconds or None))
        if not getattr(self.tokenizer, "chat_template", None):
            raise CheckpointError(f"{self.name}: the tokenizer has no chat template; allowed is chat=False")
        texts = [self.in_chat(prompt) for prompt in prompts]
        return self.tokenized(texts, numbers, add_special_tokens=False)["input_ids"]

    def tokenized(self, texts: list[str], numbers: Sequence[int] | None, **options: Any) -> dict[str, Any]:
        """The tokenizer's output, without its warning of long texts.

        CheckpointError where the tokenizer fails, or gives a token that the network does not have.
        """
        try:
            encoded = self.tokenizer(texts, verbose=False, **options)
        except Exception as error:  # such as for a text that its vocabulary does not have
            raise CheckpointError(f"{self.name}: the tokenizer fails ({reason(error)})") from error
        size = getattr(embeddings_of(self.network), "num_embeddings", None)
        for number, ids in enumerate(encoded["input_ids"]):
            if size and ids and max(ids) >= size:
                number = numbers[number] if numbers is not None else number
                raise CheckpointError(f"{self.name}: prompt {number} has token {max(ids)}; the model knows {size:,}")
        return dict(encoded)

    def in_chat(self, prompt: str) -> str:
        """A prompt as a user's message in the chat template. CheckpointError where the template fails or never ends."""
        turn, their = [{"role": "user", "content": prompt}], f"{self.name}: the tokenizer's chat template"
        try:
            with at_most(TEMPLATE_SECONDS):
                text = str(self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # whatever a template of somebody else's raises
            raise CheckpointError(f"{their} fails ({type(error).__name__}: {first_line(error)})") from error
        if len(text) > len(prompt) + TEMPLATE_TEXT:
            raise CheckpointError(f"{their} makes {len(text):,} characters of {len(prompt):,}")
        return text

    def read_at(self, ids: list[int]) -> int:
        """The position of a text that a classifier reads. CheckpointError where its end token is missing."""
        if self.unembed.reads == "first":
            return 0
        if self.unembed.reads == "eos":
            ends = [i for i, token in enumerate(ids) if token == end_token(self.network)]
            if not ends:
                raise CheckpointError(f"{self.name}: a text without an end token can't be classified")
            return ends[-1]
        pad = getattr(self.network.config.get_text_config(), "pad_token_id", None)
        return max((i for i, token in enumerate(ids) if token != pad), default=0)  # as transformers reads it


def load_model(
    name: str | Path,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    fast_products: bool = True,
) -> Model:
    """Load a model and check that its layers are found.

    A folder with translators loads the model that they belong to, read through them; a folder with LoRA adapters in
    PEFT's format loads the model that they belong to, with the adapters added to its weights.

    Args:
        name: a shipped or packaged name, a local folder, a GGUF file or a hub id.
        dtype: auto (float32 on a CPU, bfloat16 on a GPU), float32, bfloat16 or float16.
        device: auto (CUDA if there is any, else the CPU), balanced (spread over all devices), cpu, cuda or cuda:N.
        revision: branch, tag or commit of a hub id; for another name an error.
        trust_remote_code: whether code of the checkpoint's own may run.
        fast_products: on a CPU in float32 or bfloat16, linear layers use our own products of few rows if these take
            less time than torch's, which is measured at loading; weights that are bfloat16 numbers are then stored a
            second time. Attention does not copy keys and values that heads share; in float32, blocks of Llama's form
            are fused.

    Raises:
        InputError: one line. A name that is empty, or whose last part is not of letters, digits and _ . + - only.
        CheckpointError: one line. Unknown name, dtype or device; weights that are not safetensors or GGUF, or are not
            complete; no tokenizer; code of the folder's own; a quantized format whose library is missing; a model whose
            logits could not be rebuilt from its last captured state.
        StorageError: a packaged model can't be stored in the user's cache folder.
        SelfCheckError: our products are not torch's.
    """
    if dtype not in ("auto", *DTYPES):
        raise CheckpointError(f"dtype {dtype!r} is not known; allowed: auto, {', '.join(DTYPES)}")
    name, path = str(name), path_of(name)
    own_name = model_folder(path)
    check_name(f"model {name!r}: the last part of its name,", own_name)  # names the folders of what is made
    if (file := Path(path) / DRAFT_FILE).is_file():
        own = origin_of(file)
        raise CheckpointError(
            f"{name} is no model but a trained block that drafts for {own['model']}; load that one, and give generate "
            f"draft={own['kind']!r}"
        )
    if base := base_of(path):
        if base_of(path_of(base)):
            raise CheckpointError(f"{name} is read through translators of {base!r}, which has translators itself")
        model = load_model(base, dtype, device, revision, trust_remote_code, fast_products)
        return with_translators(model, Path(path))
    with about(f"model {own_name!r}"):
        base, lora = lora_base(path), None
    if base:
        lora, path = Path(path), path_of(base)
    if revision is not None and Path(path).exists():
        raise CheckpointError(f"{name}: revision={revision!r} is of a hub id, and this is {path}")
    where = resolve_device(device)
    dtype = resolve_dtype(dtype, where)
    with about(f"model {base or name!r}"):
        network, tokenizer, kind, title = read_checkpoint(
            base or name, path, dtype, where, revision, trust_remote_code, lora
        )
        weights = weights_hash(folder_of(path, revision))
    if lora:
        weights, title = hash_with_lora(lora, weights), f"{own_name}, LoRA adapters of {title or base}"
    note_ignored_generation(network, name)
    try:
        model = prepare(network, tokenizer, own_name, kind, weights)
    except CheckpointError:
        raise
    except Exception as error:  # whatever an unknown network raises, the reader needs one line
        raise CheckpointError(
            f"{own_name}: {type(network).__name__} can't be read out ({type(error).__name__}: {first_line(error)})"
        ) from error
    model.title = title or model.name
    if fast_products:  # after all that is proven: a fault of theirs is found by comparing them with torch's alone
        use_fast_products(model.network)
        use_fused_blocks(model.network)
        use_grouped_attention(model.network)
    if model.remark:
        print(f"{name}: {model.remark}")
    if model.adapter.writes and not any(end in range(model.vocab_size) for end in model.eos_ids):
        print(f"{name}: no end token of its vocabulary is known, so every output is as long as it may be")
    return model


def prepare(
    network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, kind: str, weights: str = ""
) -> Model:
    """Wrap a network that is in memory: find its blocks, head and sub-layers with one probe run, and check them.

    Checked: the head gives the network's own logits, for the last state and for a middle one put in its place; the
    sub-layers and the skip add up to each block's output; a causal network does not read to the right; states are
    finite; position ids, padding and cache do not change the logits, else they are not used. CheckpointError, one line
    naming the module; where only the sub-layers are not found, `components_error` says so instead.
    """
    ids, adapter = probe_ids(network, tokenizer), MODEL_KINDS[kind]
    runs = record(network, adapter.plain_inputs(network, adapter.probe_ids(network, ids)))
    blocks = find_blocks(network, runs, name, stack(network))
    if not bool(torch.isfinite(runs.logits).all()):
        raise CheckpointError(f"{name}: the logits hold values that are not finite")
    find = find_classifier_head if kind == "classifier" else find_head
    head, position = find(network, blocks[-1], runs, name)
    prove_head(network, head, blocks, runs, name, position)
    try:
        components, missing = find_components(network, blocks, runs, name), ""
    except CheckpointError as error:
        components, missing = [], str(error)
    modules = [call.module for call in blocks]
    model = Model(name, kind, network, tokenizer, modules, head, components, missing, weights, True)
    model.adapter.probe_feeding(runs, ids)
    if float(runs.logits.max() - runs.logits.min()) == 0:  # weights of zeros, or so large that a norm gives zeros
        model.remark = "all logits are the same, whatever the text: these weights know nothing"
    return model


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """TimeoutError if the Python code inside takes longer; this thread's clock is checked at each line of it."""
    end, before = time.monotonic() + seconds, sys.gettrace()

    def check(_frame: FrameType, _event: str, _value: object) -> Callable[..., Any]:
        if time.monotonic() > end:
            raise TimeoutError("it does not end")
        return check

    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(before)


def probe_ids(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Eight different ordinary token ids, [1, 8]."""
    size = getattr(network.config.get_text_config(decoder=True), "vocab_size", None) or len(tokenizer)
    special = set(getattr(tokenizer, "all_special_ids", []) or [])
    ids = [i for i in range(size // 7, size) if i not in special][:: max(1, size // 11)][:8]
    return torch.tensor([ids], device=next(network.parameters()).device)


def note_ignored_generation(network: PreTrainedModel, name: str) -> None:
    """Print the settings of a checkpoint's generation config that plain greedy decoding (argmax) ignores."""
    asked = getattr(network, "generation_config", None)
    given: dict[str, Any] = {} if asked is None else asked.to_diff_dict()
    tokens = ("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id")
    lengths = ("max_length", "max_new_tokens", "use_cache", "transformers_version", "_from_model_config")
    ignored = {k: v for k, v in given.items() if k not in tokens + lengths and v not in (None, False)}
    if ignored:
        print(f"{name}: greedy decoding ignores " + ", ".join(f"{k}={v}" for k, v in sorted(ignored.items())))
