"""The sequences of a batch while they are decoded: the tokens of each, how deep each token has run, and their cache."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutput

from eelib.models.block_runner import Call
from eelib.models.kv_cache import RaggedKVCache
from eelib.models.model import Model
from eelib.models.probe import accepts, foreign_code

SLACK = 32  # slots that all sequences of a call waste before they move to the left


@dataclass
class DecodedToken:
    """One token of the output.

    Attributes:
        exit_layer: the layer whose readout gave the token.
        layers_run: the number of blocks that ran at the position that predicts it, by the end of decoding.
        head_reads: readouts of that position until the token was final.
        score: the gate's last score.
        kv_only_layers: blocks above the exit that made only keys and values of its state; `layers_run` counts them,
            too, if the token ran them with the rest of its batch.
        drafted, accepted: whether it was a draft; whether the last layer agreed.
    """

    token_id: int
    exit_layer: int
    layers_run: int
    head_reads: int
    score: float
    kv_only_layers: int = 0
    drafted: bool = False
    accepted: bool = False


@dataclass
class PendingToken:
    """A token of the text that has run `depth` blocks: its state after the last of them [hidden_size], None at 0."""

    depth: int = 0
    state: Tensor | None = None


@dataclass(eq=False)
class DecodedSequence:
    """One sequence.

    Attributes:
        index: the number of its prompt.
        ids: its text so far, of which the first `prompt_length` tokens are the prompt.
        limit: most tokens of output.
        batch_index: its row in the cache, where `left_padding` slots before its newest token hold no token of it.
        pending: tokens at the end of the text that have not run every block. Depths never rise from one to the next,
            because a token that runs a block takes along all that are due there.
        drafts: tokens at the end of the output that are not verified yet.
        draining: whether nothing may be drafted before the pending tokens have run every block.
        begun: tokens of the text that have run a block, or are pending.
        passes: times that the last layer was read.
    """

    index: int
    ids: list[int]
    prompt_length: int
    limit: int
    batch_index: int
    left_padding: int = 0
    tokens: list[DecodedToken] = field(default_factory=list)
    pending: list[PendingToken] = field(default_factory=list)
    drafts: int = 0
    draining: bool = False
    begun: int = 0
    finished: bool = False
    passes: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def computed_tokens(self) -> int:
        """Tokens of the text that have keys and values after this step, at the first layers at least."""
        return len(self.ids) - self.draining

    @property
    def room(self) -> int:
        """Most tokens that can be drafted now: the limit less one, since verifying gives one more token."""
        return self.limit - len(self.tokens) - 1

    def start(self) -> None:
        """The tokens that have not begun, at first the whole prompt, become pending; of a draining sequence, none."""
        self.pending += [PendingToken()] * (self.computed_tokens - self.begun)
        self.begun = self.computed_tokens

    def due(self, layer: int, running: int = 0) -> int:
        """How many of the last tokens block `layer` has to run; `running`: how many of them ran the block before it."""
        while running < len(self.pending) and self.pending[-1 - running].depth < layer:
            running += 1
        return running

    def emit(self, token: DecodedToken, eos_ids: set[int], verified: bool = True) -> None:
        """Put a token at the end of the output; a draft is not verified, and does not end the output yet."""
        self.ids.append(token.token_id)
        self.tokens.append(token)
        last = token.token_id in eos_ids or len(self.tokens) == self.limit
        if verified:
            self.finished = last
        else:
            self.drafts += 1
            self.draining = last


def takes_holes(model: Model) -> bool:
    """Whether a network allows empty slots between the tokens in its cache: it uses rotary embeddings by position ids,
    and no layer has a sliding window.
    """
    config = model.network.config
    if getattr(model.network.base_model, "rotary_emb", None) is None or not accepts(model.network, "position_ids"):
        return False
    with foreign_code():
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    return getattr(config, "sliding_window", None) is None and all(type(layer) is DynamicLayer for layer in layers)


class Batch:
    """Sequences that are decoded together. Where padding changes a row, only rows of one length run in one call.

    `drafts`: a part of the model drafts, and stores keys and values in the cache, too, which has one more layer for a
    trained block.
    """

    def __init__(self, model: Model, prompts: list[list[int]], max_new_tokens: int, drafts: bool = False):
        self.model, self.device, self.pad_id = model, model.device, model.pad_id  # asked for once: slow
        self.window = model.context_length
        self.writer, self.sequences = model.writer, list[DecodedSequence]()
        for index, prompt in enumerate(prompts):
            text = self.writer.input_ids_for(prompt, [])
            limit = max(1, min(max_new_tokens, self.window - len(text)))
            self.sequences.append(DecodedSequence(index, list(text), len(text), limit, index))
        self.padded = self.writer.left and model.pads
        self.context = self.writer.context(prompts)
        capacity = max(s.prompt_length for s in self.sequences) + max(s.limit for s in self.sequences) + SLACK
        self.moves = drafts or not takes_holes(model)  # tokens of a row lie in one piece
        self.visible = torch.ones(len(prompts), capacity + SLACK, dtype=torch.bool, device=self.device)
        self.cache = RaggedKVCache(model.layers, len(prompts), capacity, bool(self.context), drafts)

    def groups(self, sequences: list[DecodedSequence] | None = None) -> list[list[DecodedSequence]]:
        """Groups of the sequences (None: all) that may share a call."""
        sequences = self.sequences if sequences is None else sequences
        if self.padded:
            return [sequences]
        found: dict[int, list[DecodedSequence]] = {}
        for sequence in sequences:
            found.setdefault(sequence.computed_tokens, []).append(sequence)
        return list(found.values())

    def align(self, group: list[DecodedSequence]) -> None:
        """Let all sequences of a call end in one slot, the end of the furthest one.

        The stored tokens of a sequence stay where they are, with empty slots between them and its newest tokens. If
        some of the newest have run already, all its tokens move. No slot is beyond the window, where some networks have
        no positions.
        """
        end = max(sequence.left_padding + sequence.computed_tokens for sequence in group)
        spare = end - max(sequence.computed_tokens for sequence in group)
        if spare > SLACK or end > self.window:
            end -= spare
        if end > self.visible.shape[1]:
            self.visible = torch.nn.functional.pad(self.visible, (0, end), value=True)
        for sequence in group:
            by, row = end - sequence.left_padding - sequence.computed_tokens, sequence.batch_index
            stored = sequence.left_padding + sequence.begun - len(sequence.pending)
            sequence.left_padding += by
            if by > 0 and not self.moves and all(not token.depth for token in sequence.pending):
                self.visible[row, stored : stored + by] = False
            elif by:
                if not self.moves:
                    own = self.visible[row, :stored].nonzero()[:, 0]
                    self.cache.pack(row, own, stored)
                    self.visible[row, : stored - len(own)] = False
                    self.visible[row, stored - len(own) : stored] = True
                self.cache.shift(row, by, end)
                self.visible[row, : sequence.left_padding] = False
                self.visible[row, sequence.left_padding :] = True

    def rows(self, sequences: list[DecodedSequence]) -> Tensor | None:
        """Indices of sequences in the cache, None for all."""
        if len(sequences) == len(self.sequences):
            return None
        return torch.tensor([sequence.batch_index for sequence in sequences], device=self.device)

    def inputs(self, due: dict[DecodedSequence, int]) -> dict[str, Any]:
        """Arguments of a call of the network on the last tokens of some sequences; sets the cache's view for it."""
        width, first = max(due.values()), next(iter(due))
        mask = self.set_view(due, first.left_padding + first.computed_tokens)
        texts = [s.ids[max(0, s.computed_tokens - width) : s.computed_tokens] for s in due]
        ids = torch.tensor([[self.pad_id] * (width - len(text)) + text for text in texts], device=self.device)
        context = self.context_of(self.cache.view.rows)
        return {**self.writer.step_inputs(ids, mask, context), **self.writer.cached(self.cache.cache)}

    def set_view(self, due: dict[DecodedSequence, int], end: int) -> Tensor:
        """Set the cache's view for a call on the last tokens, before slot `end`, of some sequences; returns its mask
        [n, end].
        """
        counts, view = list(due.values()), self.cache.view
        width = max(counts)
        view.past, view.rows, view.valid = end - width, self.rows(list(due)), None
        if min(counts) < width:
            places = torch.arange(width, 0, -1, device=self.device)
            view.valid = places <= torch.tensor(counts, device=self.device)[:, None]
        return (self.visible if view.rows is None else self.visible[view.rows])[:, :end].long()

    def context_of(self, rows: Tensor | None) -> dict[str, Any]:
        """The encoder's output for some rows (None: all); empty without an encoder."""
        if rows is None or not self.context:
            return self.context
        encoded = BaseModelOutput(last_hidden_state=self.context["encoder_outputs"][0][rows])
        return {"encoder_outputs": encoded, "attention_mask": self.context["attention_mask"][rows]}

    def load(self, due: dict[DecodedSequence, int], call: Call, layer: int) -> Tensor:
        """The states that enter block `layer` [n, most, hidden_size], with zeros before shorter sequences' states."""
        if layer == 1:
            return call.embeddings
        found = [torch.stack([token.state for token in s.pending[-n:]]) for s, n in due.items()]  # type: ignore[misc]
        most = max(due.values())
        return torch.stack([torch.nn.functional.pad(states, (0, 0, most - len(states), 0)) for states in found])

    def store(self, ran: dict[DecodedSequence, int], layer: int, states: Tensor) -> None:
        """Store the states of tokens that stop after block `layer`, or go on in another call."""
        for (sequence, count), own in zip(ran.items(), states):
            if layer == self.model.layers:
                del sequence.pending[-count:]
            else:
                sequence.pending[-count:] = [PendingToken(layer, state) for state in own[-count:]]
            first = sequence.computed_tokens - count + 1 - sequence.prompt_length  # what the first of them predicts
            for token in sequence.tokens[max(0, first) :]:
                token.layers_run = layer

    def drop_finished(self) -> list[DecodedSequence]:
        """Remove the sequences that have ended from the batch, and return them."""
        finished = [sequence for sequence in self.sequences if sequence.finished]
        going = [sequence for sequence in self.sequences if not sequence.finished]
        if finished and going:
            before = torch.tensor([sequence.batch_index for sequence in going], device=self.device)
            free = [sequence.batch_index for sequence in finished if sequence.batch_index < len(going)]
            moved = {s.batch_index: free.pop() for s in going if s.batch_index >= len(going)}  # the last fill the gaps
            self.cache.select_rows(len(going), moved)
            for old, new in moved.items():
                self.visible[new] = self.visible[old]
            self.visible = self.visible[: len(going)]
            for sequence in going:
                sequence.batch_index = moved.get(sequence.batch_index, sequence.batch_index)
            order = sorted(range(len(going)), key=lambda i: going[i].batch_index)
            self.context, going = self.context_of(before[order]), [going[i] for i in order]
        self.sequences = going
        return finished
