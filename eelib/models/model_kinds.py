"""The kinds of models: the inputs of each kind, whole or step by step, and the positions at which it is read.

A generative model takes one token after another. Each step is one call of the network with plain arguments, so code
that stops after a block, or drops rows from the batch, works on every kind alike:

    inputs, cache = kind.begin(prompts, limit)
    output = network(**inputs, **kind.cached(cache))
    inputs = kind.advance(kind.keep_rows(inputs, cache, rows), emitted)
"""

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, EncoderDecoderCache, PreTrainedModel

from eelib.common.errors import CheckpointError
from eelib.models.feeding import choose_cache, padding_is_inert, position_offset, refuse_right_reading
from eelib.models.head import end_token
from eelib.models.kv_cache import growing_cache
from eelib.models.probe import Runs, accepts

if TYPE_CHECKING:
    from eelib.models.model import Model

Inputs = dict[str, Any]  # arguments of a network's forward


class TextIds(list):
    """Token ids of one text; `types` has their token types if the network needs them, else it is empty."""

    types: list[int] | tuple = ()


class ModelKind:
    """A masked language model, read at each position of its input; other kinds override what differs."""

    writes: ClassVar[bool] = False  # it emits tokens, each fed with those before; else it reads a text at once
    left: ClassVar[bool] = False  # where rows of a batch are padded
    target: ClassVar[str] = "input_ids"  # the argument that holds the text whose states are read

    def __init__(self, model: "Model"):
        self.model = model

    # ---- before there is a model

    @staticmethod
    def plain_inputs(network: PreTrainedModel, ids: Tensor, target: Tensor | None = None) -> Inputs:
        """Arguments of a run without a cache on `ids` [rows, tokens]; `target`: an encoder-decoder's output ids."""
        return {"input_ids": ids}

    @staticmethod
    def probe_ids(network: PreTrainedModel, ids: Tensor) -> Tensor:
        """Ids [1, tokens] for the probe run."""
        return ids

    # ---- one text, whole

    def probe_feeding(self, runs: Runs, ids: Tensor) -> None:
        """Try, and set on the model, the first position id, whether rows may be padded, and the cache."""
        self.model.offset = position_offset(self.model, runs)
        self.model.pads = padding_is_inert(self.model, ids)

    def rows_of(self, encoded: dict) -> list[list[int]]:
        """The prompts, as the other methods take them, from a tokenizer's output."""
        return encoded["input_ids"]

    def input_ids_for(self, prompt: list[int], output: list[int]) -> list[int]:
        """The ids to run: the text itself or, if the model writes, the ids before the last token of `output`."""
        return prompt

    def read_positions(self, prompt: list[int]) -> slice:
        """The positions in `input_ids_for` whose states are read, one for each token of the output."""
        return slice(0, None)

    def whole_inputs(self, prompt: list[int], output: list[int]) -> Inputs:
        """Arguments of one run over all of a sequence, without a cache."""
        inputs = self.plain_inputs(self.model.network, self.row(self.input_ids_for(prompt, output)))
        return inputs | self.context([prompt])

    def last_logits(self, count: int = 1) -> Inputs:
        """The argument that limits logits to the last `count` positions, where the network takes it."""
        return {}

    def context(self, prompts: list[list[int]]) -> Inputs:
        """Arguments that are the same at every step."""
        return {}

    # ---- batches

    def row(self, ids: list[int]) -> Tensor:
        """Ids as a batch of one row, [1, tokens], on the model's device."""
        return torch.tensor([ids], device=self.model.device)

    def pad(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """(ids, mask) [rows, tokens] of prompts of any lengths."""
        rows, side = [torch.tensor(prompt) for prompt in prompts], "left" if self.left else "right"
        ids = pad_sequence(rows, batch_first=True, padding_value=self.model.pad_id, padding_side=side)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
        return ids.to(self.model.device), mask.to(self.model.device)

    def padded_inputs(self, ids: Tensor, mask: Tensor, target: Tensor | None = None) -> Inputs:
        """Arguments of one run over padded rows, without a cache; `target` as in `plain_inputs`."""
        return self.plain_inputs(self.model.network, ids, target) | {"attention_mask": mask}


class Classifier(ModelKind):
    """A sequence classifier, read at one position of its text."""

    @staticmethod
    def probe_ids(network: PreTrainedModel, ids: Tensor) -> Tensor:
        """With an end token before the last position, so that "eos" and "last" differ."""
        ids, end = ids.clone(), end_token(network)
        if end is not None:
            ids[:, -2] = end
        return ids

    def rows_of(self, encoded: dict) -> list[list[int]]:
        """With token types if the network takes them and not all are 0. CheckpointError if the network has fewer."""
        rows, types = encoded["input_ids"], encoded.get("token_type_ids") or []
        most = max(map(max, filter(None, types)), default=0)
        if not most or not accepts(self.model.network, "token_type_ids"):
            return rows
        known = getattr(self.model.network.config, "type_vocab_size", None)
        if known and most >= known:  # 0: the network reads none
            raise CheckpointError(
                f"{self.model.name}: the tokenizer gives token types up to {most}, the network knows {known}"
            )
        rows = [TextIds(row) for row in rows]
        for row, own in zip(rows, types):
            row.types = own
        return rows

    def read_positions(self, prompt: list[int]) -> slice:
        position = self.model.read_at(prompt)
        return slice(position, position + 1)

    def context(self, prompts: list[list[int]]) -> Inputs:
        """The token types of one text, if it has any. Several texts must have none."""
        types = [getattr(prompt, "types", ()) for prompt in prompts]
        return {"token_type_ids": torch.tensor(types, device=self.model.device)} if any(types) else {}


class Causal(ModelKind):
    """A decoder, which writes tokens, one at each step: prompt and output are one text, padded on the left."""

    writes = True
    left = True

    @staticmethod
    def uncached(network: PreTrainedModel) -> Inputs:
        """The argument that disables a network's own cache, where the network takes it."""
        return {"use_cache": False} if accepts(network, "use_cache") or accepts(network, "kwargs") else {}

    def probe_feeding(self, runs: Runs, ids: Tensor) -> None:
        """Also check that the model does not read to the right, and choose its cache."""
        refuse_right_reading(self.model, runs)
        super().probe_feeding(runs, ids)
        choose_cache(self.model, runs)

    def cached(self, cache: Cache | None) -> Inputs:
        """The cache's arguments of a step."""
        if self.model.cache == "none":
            return self.uncached(self.model.network)
        return {"past_key_values": cache, "use_cache": True}

    def last_logits(self, count: int = 1) -> Inputs:
        return {"logits_to_keep": count} if accepts(self.model.network, "logits_to_keep") else {}

    def next_ids(self, inputs: Inputs, emitted: list[int]) -> Tensor:
        """Ids [rows, new] of the next step: the emitted ones, or without a cache the whole text."""
        ids = torch.tensor(emitted, device=self.model.device)[:, None]
        return torch.cat([inputs[self.target], ids], dim=1) if self.model.cache == "none" else ids

    def keep_rows(self, inputs: Inputs, cache: Cache, rows: list[int]) -> Inputs:
        """Drop all but `rows` from the cache (in place) and from the arguments."""
        index = torch.tensor(rows, device=self.model.device)
        cache.batch_select_indices(index)
        return {"attention_mask": inputs["attention_mask"][index]}

    @staticmethod
    def plain_inputs(network: PreTrainedModel, ids: Tensor, target: Tensor | None = None) -> Inputs:
        return {"input_ids": ids} | Causal.uncached(network)

    def input_ids_for(self, prompt: list[int], output: list[int]) -> list[int]:
        """The prompt, then all of the output but its last token."""
        return [*prompt, *output[:-1]]

    def read_positions(self, prompt: list[int]) -> slice:
        """From the last token before the output on, which predicts its first token."""
        return slice(len(self.input_ids_for(prompt, [])) - 1, None)

    def padded_inputs(self, ids: Tensor, mask: Tensor, target: Tensor | None = None) -> Inputs:
        return self.plain_inputs(self.model.network, ids) | self.step_inputs(ids, mask, {})

    def begin(self, prompts: list[list[int]], limit: int = 0) -> tuple[Inputs, Cache | None]:
        """Arguments of the first step, and an empty cache for up to `limit` tokens."""
        ids, mask = self.pad(prompts)
        return self.step_inputs(ids, mask, {}) | self.last_logits(), self.new_cache(limit)

    def step_inputs(self, ids: Tensor, mask: Tensor, context: Inputs) -> Inputs:
        """Arguments of a run over `ids` [rows, new] after the tokens in the cache; `mask` [rows, old + new].

        Position ids, where the network takes them, count real tokens only. They stay inside the window for rows that
        are finished but still in the batch.
        """
        inputs = {**context, "input_ids": ids, "attention_mask": mask}
        if self.model.offset is not None and accepts(self.model.network, "position_ids"):
            positions = (mask.cumsum(1) - 1).clamp(0, self.model.context_length - 1)
            inputs["position_ids"] = positions[:, -ids.shape[1] :] + self.model.offset
        return inputs

    def advance(self, inputs: Inputs, emitted: list[int]) -> Inputs:
        """Arguments of the step after that of `inputs`: the emitted tokens, one per row."""
        ids = self.next_ids(inputs, emitted)
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, -1:])], dim=1)
        return self.step_inputs(ids, mask, {}) | self.last_logits()

    def new_cache(self, limit: int = 0) -> Cache | None:
        """An empty cache for up to `limit` tokens, with the config's kinds of layers only in the mode "growing"; None
        where the network makes its own or has none.
        """
        if self.model.cache not in ("growing", "full"):
            return None
        return growing_cache(self.model.network.config if self.model.cache == "growing" else None, limit)


class Seq2Seq(Causal):
    """An encoder-decoder: the source is encoded once, padded on the right; the output is a text of its own."""

    left = False
    target = "decoder_input_ids"

    @staticmethod
    def plain_inputs(network: PreTrainedModel, ids: Tensor, target: Tensor | None = None) -> Inputs:
        """Without a target, the source is also the target."""
        inputs = {"input_ids": ids, "decoder_input_ids": ids if target is None else target}
        return inputs | Causal.uncached(network)

    @property
    def start_id(self) -> int:
        """The token before an output: of the generation config, else of the config, as in transformers' `generate`."""
        holders = [getattr(self.model.network, "generation_config", None), self.model.network.config]
        names = ("decoder_start_token_id", "bos_token_id")
        chosen = [getattr(holder, name, None) for name in names for holder in holders]
        return next(i for i in (*chosen, self.model.pad_id) if i is not None)

    def input_ids_for(self, prompt: list[int], output: list[int]) -> list[int]:
        return [self.start_id, *output[:-1]]

    def whole_inputs(self, prompt: list[int], output: list[int]) -> Inputs:
        """The source, and as target the start token and the output without its last token."""
        return self.plain_inputs(self.model.network, self.row(prompt), self.row(self.input_ids_for(prompt, output)))

    def padded_inputs(self, ids: Tensor, mask: Tensor, target: Tensor | None = None) -> Inputs:
        return ModelKind.padded_inputs(self, ids, mask, target)

    def context(self, prompts: list[list[int]]) -> Inputs:
        ids, mask = self.pad(prompts)
        encoded = self.model.network.get_encoder()(input_ids=ids, attention_mask=mask, return_dict=True)
        return {"encoder_outputs": encoded, "attention_mask": mask}

    def begin(self, prompts: list[list[int]], limit: int = 0) -> tuple[Inputs, Cache | None]:
        start = torch.full((len(prompts), 1), self.start_id, device=self.model.device)
        return {**self.context(prompts), "decoder_input_ids": start}, self.new_cache(limit)

    def step_inputs(self, ids: Tensor, mask: Tensor, context: Inputs) -> Inputs:
        """`mask` is not used: the context holds the sources' mask, and outputs are not padded before their end."""
        return {**context, "decoder_input_ids": ids}

    def advance(self, inputs: Inputs, emitted: list[int]) -> Inputs:
        return {**inputs, "decoder_input_ids": self.next_ids(inputs, emitted)}

    def new_cache(self, limit: int = 0) -> Cache | None:
        """A cache for the output and one for the source."""
        if self.model.cache not in ("growing", "full"):
            return None
        return EncoderDecoderCache(growing_cache(limit=limit), growing_cache())

    def keep_rows(self, inputs: Inputs, cache: Cache, rows: list[int]) -> Inputs:
        encoded = inputs["encoder_outputs"]
        encoded.last_hidden_state = encoded.last_hidden_state[rows]
        return super().keep_rows(inputs, cache, rows) | {"encoder_outputs": encoded}


MODEL_KINDS: dict[str, type[ModelKind]] = {
    "causal": Causal,
    "seq2seq": Seq2Seq,
    "masked": ModelKind,
    "classifier": Classifier,
}


def stack(network: PreTrainedModel) -> str:
    """Name of the module whose blocks are read: an encoder-decoder's decoder; "" for the whole network."""
    if not getattr(network.config, "is_encoder_decoder", False):
        return ""
    decoder = network.get_decoder()
    return next((n for n, m in network.named_modules() if m is decoder), "")
