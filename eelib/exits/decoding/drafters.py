"""Drafts made with a part of the model: one of its layers, a trained block after a layer, a trained block that reads
the last layer's features (EAGLE, Li et al. 2024), or all layers with weights of 8 bits.

A trained block reads some rows of the head only: those of the tokens that the model writes most (FR-Spec, Zhao et al.
2025), and of the prompts' tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from eelib.common.errors import InputError
from eelib.common.files import data_folder
from eelib.common.values import check_whole
from eelib.exits.decoding.drafts import FIRST, MOST, Drafting, ModelDrafts
from eelib.exits.decoding.pass_costs import PassCosts, expected_speed_up, pass_costs
from eelib.exits.decoding.sequences import Batch, DecodedSequence
from eelib.models.block_runner import BlockRunner, Call
from eelib.models.fused_blocks import use_fused_blocks
from eelib.models.lens_adapters import DRAFT_FILE, DraftBlock, load_draft, origin_of, visible
from eelib.models.model import Model
from eelib.models.probe import in_turn
from eelib.models.products import use_fast_products, use_int8_products

KINDS = ("block", "features", "int8")
DRAFTS = ("auto", "prompt", *KINDS, *(f"prompt+{kind}" for kind in KINDS), "layer:K")
GAIN = 1.15  # "auto" takes these only if decoding is expected to be so many times as fast
# How often int8 drafts are right, before there are any; of SmolLM2-135M's tokens, `checks.arithmetic` counts it.
INT8_RIGHT: tuple[float, ...] = (0.97,)
INT8_MODELS: "WeakKeyDictionary[nn.Module, Model]" = WeakKeyDictionary()
HEADS: "WeakKeyDictionary[nn.Module, DraftHead]" = WeakKeyDictionary()


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(token ids [n], the probability of each) by logits [n, V]."""
    logits = logits.float()
    best, ids = logits.max(-1)
    return ids, (best - logits.logsumexp(-1)).exp()


def version_of(weight: Tensor) -> int | None:
    """How often a weight was changed in place; None where torch does not count, of what is made in inference mode."""
    return None if weight.is_inference() else weight._version


class DraftHead:
    """Some rows of a model's head: those of a block's own tokens, and of the tokens in the batch's prompts."""

    def __init__(self, model: Model, block: DraftBlock):
        self.weight = model.network.get_output_embeddings().weight
        self.version = version_of(self.weight)
        self.frequent = block.ids
        self.rows = nn.Linear(model.hidden_size, len(self.frequent), bias=False, device="meta")
        self.rows.weight = nn.Parameter(self.weight[self.frequent].clone(), requires_grad=False)
        use_fast_products(self.rows, like=model.network)
        self.share = len(self.frequent) / model.vocab_size
        self.begin([])

    def is_of(self, model: Model) -> bool:
        """Whether the model's head has not changed: the same weights, of the same dtype on the same device."""
        weight, own = model.network.get_output_embeddings().weight, self.rows.weight
        same = (weight.dtype, weight.device) == (own.dtype, own.device)
        return same and self.weight is weight and self.version == version_of(weight)

    def begin(self, prompts: list[list[int]]) -> None:
        """Take the rows of the tokens in a new batch's prompts."""
        own = torch.tensor(sorted({token for prompt in prompts for token in prompt}), device=self.weight.device).long()
        more = own[~torch.isin(own, self.frequent)]
        self.ids, self.more = torch.cat([self.frequent, more]), self.weight[more]

    def best(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(token ids [n], the probability of each among the rows) after normed states [n, hidden_size]."""
        features = features.to(self.weight.dtype)
        logits = torch.cat([self.rows(features), nn.functional.linear(features, self.more)], dim=-1)
        at, chance = likeliest(logits)
        return self.ids[at], chance


def draft_head(model: Model, block: DraftBlock) -> DraftHead:
    """A block's rows of the head, made once. The block computes as the model's own blocks from here on."""
    found = HEADS.get(block)
    if found is None or not found.is_of(model):
        found = HEADS[block] = DraftHead(model, block)
    use_fast_products(block, like=model.network)
    use_fused_blocks(block)
    return found


class LayerDrafts(ModelDrafts):
    """Drafts of one inner layer, read through the bare head or through a trained block and its rows of the head.

    The pass that verifies drafts runs these layers again: a few more rows cost less than one more call.
    """

    def __init__(self, model: Model, layer: int, block: DraftBlock | None = None):
        self.model, self.layer = model, layer
        self.block, self.head = block, draft_head(model, block) if block else None
        self.expected = block.accepted if block else ()

    def seconds(self, costs: PassCosts, rows: int) -> float:
        own = costs.begin if self.block else 0.0
        return own + costs.upto(rows, self.layer + bool(self.block), self.head.share if self.head else 1.0)

    @contextmanager
    def open(self, prompts: list[list[int]], blocks: BlockRunner) -> Iterator[None]:
        self.blocks = blocks
        if self.head:
            self.head.begin(prompts)
        yield

    def next(self, batch: Batch, group: list[DecodedSequence], eos_ids: set[int]) -> None:
        call, states = last_states(self.blocks, batch, group, self.layer)
        if self.block and self.head:
            states = self.block.in_call(states, call.of_block(self.layer + 1))
            found = self.head.best(self.model.unembed.normed(states[:, -1]))
        else:
            found = likeliest(self.model.unembed(self.model.read_through_at(self.layer, states[:, -1])))
        self.emit(group, *found, eos_ids)


class FeatureDrafts(ModelDrafts):
    """Drafts of a block that reads the last layer's normed states, each with the token that follows it.

    Its keys and values are the extra layer of the batch's cache. For verified tokens it reads the true states; for
    drafts its own outputs, until a pass has verified them.
    """

    def __init__(self, model: Model, block: DraftBlock):
        self.model, self.reader, self.layer = model, block, model.layers
        self.head, self.expected = draft_head(model, block), block.accepted

    def seconds(self, costs: PassCosts, rows: int) -> float:
        return costs.upto(rows, 1, self.head.share)

    @contextmanager
    def open(self, prompts: list[list[int]], blocks: BlockRunner) -> Iterator[None]:
        self.head.begin(prompts)
        self.features: dict[DecodedSequence, tuple[int, Tensor]] = {}  # position of the first, [n, hidden_size]
        yield

    def observe(self, running: dict[DecodedSequence, int], states: Tensor) -> None:
        for (sequence, count), own in zip(running.items(), states):
            first, known = sequence.computed_tokens - count, self.features.get(sequence)
            new = self.reader.features(own[-count:])
            if known and known[0] < first:  # of tokens that have not been through the block
                new = torch.cat([known[1][: first - known[0]], new])
                first = known[0]
            self.features[sequence] = first, new

    def next(self, batch: Batch, group: list[DecodedSequence], eos_ids: set[int]) -> None:
        batch.align(group)
        due = {sequence: len(sequence.ids) - 1 - self.features[sequence][0] for sequence in group}
        width = max(due.values())
        parts = [self.features[sequence][1][:count] for sequence, count in due.items()]
        features = torch.stack([nn.functional.pad(part, (0, 0, width - len(part), 0)) for part in parts])
        following = [[0] * (width - count) + sequence.ids[-count:] for sequence, count in due.items()]
        tokens = torch.tensor(following, device=self.model.device)
        mask = batch.set_view(due, group[0].left_padding + len(group[0].ids) - 1)
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, -width:]
        made = self.reader.at(self.reader.joined(features, tokens), places, visible(mask, width), batch.cache.cache)
        made = self.reader.features(made[:, -1:].to(features.dtype))  # the block's own is float32; LayerNorm takes one
        for sequence, feature in zip(group, made):
            self.features[sequence] = len(sequence.ids) - 1, feature
        self.emit(group, *self.head.best(made[:, 0]), eos_ids)


class Int8Drafts(ModelDrafts):
    """Drafts of all layers, with weights of 8 bits."""

    expected = INT8_RIGHT

    def __init__(self, model: Model, batch_size: int):
        self.model, self.layer = int8_model(model), model.layers
        self.costs = pass_costs(self.model, batch_size)

    def seconds(self, costs: PassCosts, rows: int) -> float:
        return self.costs.whole(rows)

    def chance(self, score: float) -> float:
        return max(score, self.expected[0])

    @contextmanager
    def open(self, prompts: list[list[int]], blocks: BlockRunner) -> Iterator[None]:
        with BlockRunner(self.model, blocks.view).open() as self.blocks:
            yield

    def next(self, batch: Batch, group: list[DecodedSequence], eos_ids: set[int]) -> None:
        _, states = last_states(self.blocks, batch, group, self.layer)
        self.emit(group, *likeliest(self.model.unembed(states[:, -1])), eos_ids)


def last_states(blocks: BlockRunner, batch: Batch, group: list[DecodedSequence], layer: int) -> tuple[Call, Tensor]:
    """(the call, states [n, 1, hidden_size] after `layer`) of the newest token of each sequence of a group."""
    batch.align(group)
    call = blocks.prepare(batch.inputs(dict.fromkeys(group, 1)))
    return call, blocks.run(call, 1, call.embeddings, layer)


def int8_model(model: Model) -> Model:
    """A copy of a model with linear layers of 8 bits; it shares all other weights.

    It is made once. If the model's weights change later, drafts are worse, but outputs are still the model's.

    Raises:
        InputError: the model is not on a CPU in float32, or its layers are too small.
    """
    refused = InputError(
        f"draft='int8': {model.name} runs on {model.device.type} in {model.dtype}, or its layers are too small; weights"
        " of 8 bits are for large layers on a CPU in float32"
    )
    if model.device.type != "cpu" or model.dtype != "float32":  # now; a copy of before would be of no use
        raise refused
    if model.network not in INT8_MODELS:
        shared = {id(tensor): tensor for tensor in (*model.network.parameters(), *model.network.buffers())}
        with in_turn(model.blocks):  # a copy would keep what another thread has put in place of their forward
            network, blocks, unembed = deepcopy((model.network, model.blocks, model.unembed), shared)
        if not use_int8_products(network):
            raise refused
        use_fused_blocks(network)
        copied = replace(model, network=network, blocks=blocks, unembed=unembed, components=[])
        own = f"{model.hash}-int8" if model.hash else ""
        INT8_MODELS[model.network] = replace(copied, hash=own, translators=None)
    return INT8_MODELS[model.network]


def trained_block(model: Model, kind: str) -> DraftBlock:
    """The shipped draft block of a kind for a model, read once. InputError where there is none that fits."""
    file = data_folder("models", f"{model.name}-{kind}", DRAFT_FILE)
    if not file.is_file():
        raise InputError(
            f"draft={kind!r}: {model.name} has no trained block of this kind (there is no {file}); allowed without "
            "one: auto, prompt, layer:K, int8"
        )
    try:
        if origin_of(file)["model_hash"] != model.hash:
            raise InputError(f"draft={kind!r}: {file} was trained for other weights than those of {model.name}")
        known, key = model.draft_blocks, (file, file.stat().st_mtime_ns, str(model.device))
        if key not in known:
            known[key] = load_draft(model, file).requires_grad_(False).eval()
    except (SafetensorError, OSError, KeyError, RuntimeError) as error:
        raise InputError(f"draft={kind!r}: {file} is damaged ({type(error).__name__})") from error
    return known[key]


def check_draft_length(model: Model, length: int) -> None:
    """InputError for a draft length below 1, or as long as the window."""
    check_whole("draft_length", length, 1)
    if length >= model.context_length:
        raise InputError(f"draft_length {length} does not fit {model.name}'s window of {model.context_length} tokens")


@torch.inference_mode(False)  # which a caller may be in: a block's weights are to stay good for other calls
def drafting_of(
    model: Model, draft: str | DraftBlock, length: int | None, batch_size: int
) -> tuple[Drafting | None, str]:
    """(drafting, None for nothing; the draft's name) for the argument `draft` of `generate`.

    InputError for a draft that is unknown, or that the model does not have.
    """
    costs, block = pass_costs(model, batch_size), draft if isinstance(draft, DraftBlock) else None
    name = block.kind if block else str(draft)
    if block and ((own := block.of()) is None or own.network is not model.network):
        raise InputError(f"draft: this trained block was made for another model than {model.name}")
    if auto := name == "auto":
        name = quickest(model, costs, batch_size)
    if length is not None:
        check_draft_length(model, length)
    if auto and not name:
        return None, ""
    if name not in DRAFTS and not name.startswith("layer:"):
        raise InputError(f"draft={draft!r} is not known; allowed: {', '.join(DRAFTS)}, a trained block, None")
    drafts = None if name == "prompt" else drafts_of(model, name.removeprefix("prompt+"), batch_size, block)
    return Drafting(costs, name.startswith("prompt"), drafts, length), name


def drafts_of(model: Model, kind: str, batch_size: int, block: DraftBlock | None = None) -> ModelDrafts:
    """What makes the drafts of a kind, or of "layer:K"; `block`: None for the shipped one. InputError if the model has
    no such drafts.
    """
    if kind == "int8":
        return Int8Drafts(model, batch_size)
    if kind in KINDS:
        block = block or trained_block(model, kind)
        return LayerDrafts(model, block.layer, block) if kind == "block" else FeatureDrafts(model, block)
    layers = {f"layer:{layer}": layer for layer in range(1, model.layers)}
    if kind not in layers:
        raise InputError(f"draft={kind!r} is not allowed; {model.name} has layers 1 to {len(layers)} to draft")
    return LayerDrafts(model, layers[kind])


def quickest(model: Model, costs: PassCosts, sequences: int = 1) -> str:
    """The draft that "auto" stands for: the text's n-grams, if verifying a certain draft saves time, and the model's
    drafts that are expected to save most, if any save enough; "" if nothing saves time.
    """
    if costs.whole(2 * sequences) > 2 * costs.whole(sequences):
        return ""
    found, best = "prompt", GAIN
    for kind in KINDS:
        try:
            drafts = drafts_of(model, kind, sequences)
        except InputError:
            continue
        right = drafts.expected or (FIRST,)
        right += right[-1:] * (MOST - len(right))
        made = drafts.seconds(costs, sequences)
        speed_up = expected_speed_up(costs, right, made, sequences, drafts.block is not None)
        if speed_up > best:
            found, best = f"prompt+{kind}", speed_up
    return found
