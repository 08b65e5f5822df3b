"""Run the blocks of a network of any family one by one, with the arguments that its own forward gives to them.

`prepare` calls the network once while each block only records its arguments and returns its input, so what runs is
everything but the blocks: embeddings, positions, masks. `run` then calls one block with these arguments and any states.
This works for networks that compute nothing from the states between two blocks; `find_blocks` refuses others.

Where a block returns more than states (T5's first block makes the position bias of all others), the first block runs in
`prepare`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel

from eelib.models.fused_blocks import FusedBlock, FusedNetwork
from eelib.models.kv_cache import CacheView
from eelib.models.model import Model
from eelib.models.probe import EndOfRun, foreign_code, in_turn, output_of, state_of, with_tensor


@dataclass
class Call:
    """One call of the network.

    Attributes:
        arguments: of each block: positional arguments, named ones, and the states among them; only of block 1 where
            those of the others are known to be alike.
        embeddings: states that enter block 1, [rows, new, hidden_size].
        first: the states after block 1, where it ran in `prepare`; else None.
        alike: whether all blocks get the same arguments beside the states, and none has a hook.
    """

    arguments: list[tuple[tuple, dict, Tensor]] = field(default_factory=list)
    embeddings: Tensor = field(default_factory=lambda: torch.empty(0))
    first: Tensor | None = None
    alike: bool = False

    def of_block(self, layer: int) -> tuple[tuple, dict, Tensor]:
        """The arguments of block `layer`."""
        return self.arguments[min(layer, len(self.arguments)) - 1]


class BlockRunner:
    """Runs the blocks of one model while `open`; `view` is the view of the cache that the calls' inputs hold."""

    def __init__(self, model: Model, view: CacheView):
        self.model, self.view = model, view
        self.preparing: Call | None = None
        self.fused: FusedNetwork | None = None  # where all blocks are fused
        self.output: Any = None  # what block 1 gave when it last ran: the form of a block's output
        self.first_only = False  # whether a call ends at block 1, since the blocks of the one before it were alike

    @contextmanager
    def open(self) -> Iterator["BlockRunner"]:
        """While open, calls can be prepared. Other calls of the network in this thread run as usual; threads wait."""
        blocks = self.model.blocks
        with in_turn(blocks):
            before: list[Any] = [block.__dict__.get("forward") for block in blocks]
            numbers = [way.number for way in before if isinstance(way, FusedBlock)]
            self.fused = before[0].network if numbers == [*range(len(blocks))] else None
            if self.fused:
                self.fused.trusted = self.fused.unchanged()  # once for all calls: nothing changes weights meanwhile
            try:
                for layer, block in enumerate(blocks, 1):
                    block.__dict__["forward"] = self.recorded(layer, block.forward)
                yield self
            finally:
                if self.fused:
                    self.fused.trusted = False
                for block, forward in zip(blocks, before):
                    block.__dict__.pop("forward", None)
                    if forward is not None:
                        block.__dict__["forward"] = forward

    def recorded(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward that, while a call is prepared, records its arguments and returns its input states."""

        def forward_or_record(*args: Any, **kwargs: Any) -> Any:
            call = self.preparing
            if call is None:
                return forward(*args, **kwargs)
            states = state_of(args, kwargs)
            call.arguments.append((args, kwargs, states))
            if layer == 1:
                call.embeddings = states
                if sum(isinstance(leaf, Tensor) for leaf in tree_iter(self.output)) != 1:  # not known yet, or more
                    output = forward(*args, **kwargs)
                    call.first = output_of(output)
                    self.output = with_tensor(output, call.first, call.first[:0])  # the form alone: states are large
            if layer == self.model.layers or self.first_only:
                raise EndOfRun  # so that the head does not run
            return with_tensor(self.output, output_of(self.output), states)

        return forward_or_record

    def prepare(self, inputs: dict[str, Any]) -> Call:
        """Run all of one call of the network but its blocks."""
        self.preparing = call = Call()
        try:
            with suppress(EndOfRun):
                self.model.network(**inputs)
        finally:
            self.preparing = None
        if self.fused:
            call.alike = self.alike(call.arguments)
            self.first_only = self.first_only or (call.alike and one_kind(self.model.network))
        return call

    def run(self, call: Call, layer: int, states: Tensor, last: int = 0) -> Tensor:
        """Run block `layer` (1..L), and those after it up to `last`, on states [rows, new, hidden_size]; returns the
        states after them.
        """
        last = max(layer, last)
        if layer == 1 and call.first is not None:
            layer, states = 2, call.first
        if last > layer and self.fused and call.alike:
            found = self.fused.run(layer - 1, last - 1, states, call.arguments[0][1])
            if found is not None:
                return found
        for each in range(layer, last + 1):
            states = output_of(self.call_block(call, each, states))
        return states

    def alike(self, arguments: list[tuple[tuple, dict, Tensor]]) -> bool:
        """Whether all blocks get the same arguments beside the states, and none has a hook."""
        _, named, _ = arguments[0]
        return all(
            len(args) == 1 and kwargs.keys() == named.keys() and all(kwargs[key] is named[key] for key in named)
            for args, kwargs, _ in arguments
        ) and not any(block._forward_hooks or block._forward_pre_hooks for block in self.model.blocks)

    def write_kv(self, call: Call, layer: int, states: Tensor) -> None:
        """Let each block above `layer` store its keys and values for `states`, and stop it there."""
        self.view.kv_only = True
        try:
            for above in range(layer + 1, self.model.layers + 1):
                with suppress(EndOfRun):
                    self.call_block(call, above, states)
        finally:
            self.view.kv_only = False

    def call_block(self, call: Call, layer: int, states: Tensor) -> Any:
        """The whole output of block `layer`, with `states` in place of the recorded ones in its arguments."""
        args, kwargs, recorded = call.of_block(layer)
        args = tuple(states if value is recorded else value for value in args)
        kwargs = {name: states if value is recorded else value for name, value in kwargs.items()}
        return self.model.blocks[layer - 1](*args, **kwargs)


def one_kind(network: PreTrainedModel) -> bool:
    """Whether all layers of a network get the same mask at any length: its config names one kind of layers, or none.

    Where a short text needs no mask, a call does not show this. Only networks of transformers itself count, since in
    foreign code a config need not say it.
    """
    with foreign_code():
        kinds = getattr(network.config.get_text_config(decoder=True), "layer_types", None)
    return type(network).__module__.startswith("transformers.") and len(set(kinds or [""])) == 1
