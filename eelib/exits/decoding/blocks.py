"""Run part of a network's blocks, of any family: stop after one by raising, go on from stored states by swapping.

A call on tokens that have already been through the first blocks lets these return the stored states. Where a block
gives more than a state (T5's first one makes the position bias of all others) the first block runs again on each such
call, for that; its state is then replaced.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from eelib.common.errors import SelfCheckError
from eelib.exits.decoding.slots import Frame, Kept
from eelib.models.model import Model
from eelib.models.probe import output_of, with_tensor

Watch = Callable[[int, Tensor], bool]  # (layer, states [n, new, hidden_size]) -> whether to stop there


class Left(BaseException):
    """Raised after the block at which a run ends. No network's own handler catches it."""


class Blocks:
    """The blocks of one model while `open`; `frame` is that of the cache which the calls are given. `asked`: layers at
    which a gate is; an adapter block runs where its own is one of them.
    """

    def __init__(self, model: Model, frame: Frame, asked: frozenset[int] = frozenset()):
        self.model, self.frame = model, frame
        block = model.adapter_block
        self.adapts = block.layer if block and block.layer in asked else 0
        self.start, self.watched = 0, frozenset[int]()
        self.watch: Watch | None = None
        self.state: Tensor | None = None
        self.layer = 0
        self.inputs: dict[str, Any] = {}  # of the call
        self.adapted: Tensor | None = None  # of the adapter block's layer, what it has made of the call's states
        self.template: Any = None  # what the first block gave when it last ran, with its state

    @contextmanager
    def open(self) -> Iterator["Blocks"]:
        """Hooks are on the blocks."""
        handles = [b.register_forward_hook(self.hook(i)) for i, b in enumerate(self.model.blocks, 1)]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def hook(self, layer: int) -> Callable[[nn.Module, tuple, Any], None]:
        """After block `layer`."""

        def after(_module: nn.Module, _args: tuple, output: Any) -> None:
            if layer == 1 and not self.start:
                self.template = output
            if layer == self.adapts > self.start and self.watched:  # each token once: on its way through
                self.adapted = self.model.adapted(layer, output_of(output), self.inputs)
            if layer > self.start and layer in self.watched:
                self.layer, self.state = layer, output_of(output)
                if self.watch is None or self.watch(layer, self.state) or layer == self.model.layers:
                    raise Left

        return after

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While open, the network runs through undisturbed, and leaves nothing behind here."""
        before, self.watched, template = self.watched, frozenset(), self.template
        try:
            yield
        finally:
            self.watched, self.template = before, template

    def read(self, layer: int, rows: list[int] | slice, states: Tensor) -> Tensor:
        """The newest tokens' states [n, hidden_size] of some rows of the call that runs, as an adapter block has them
        read; `states` at other layers than its own.
        """
        if layer != self.adapts:
            return states
        assert self.adapted is not None
        return self.adapted[rows, -1]

    def run(self, inputs: dict, watched: frozenset[int], watch: Watch | None = None) -> tuple[int, Tensor]:
        """From the embeddings on, until `watch` says stop at one of the layers `watched`: (layer, its states)."""
        return self.call(inputs, 0, watched, watch)

    def go_on(
        self, inputs: dict, start: int, stored: Tensor, watched: frozenset[int], watch: Watch | None = None
    ) -> tuple[int, Tensor]:
        """The same, from the states `stored` [n, new, hidden_size] of layer `start` on."""
        with self.returning(start, stored, again=True):
            return self.call(inputs, start, watched, watch)

    def write_keys(self, inputs: dict, start: int, stored: Tensor) -> None:
        """Let the blocks above `start` write the keys and values that they make of the states `stored`, and no more."""
        self.frame.keys_only = True
        try:
            with self.returning(start, stored, again=False), self.giving_keys(start, stored):
                self.call(inputs, start, frozenset({self.model.layers}), None)
        finally:
            self.frame.keys_only = False

    def call(self, inputs: dict, start: int, watched: frozenset[int], watch: Watch | None) -> tuple[int, Tensor]:
        """One call of the network, which ends with a block."""
        self.start, self.watched, self.watch, self.inputs = start, watched, watch, inputs
        try:
            self.model.network(**inputs)
        except Left:
            assert self.state is not None
            return self.layer, self.state
        raise SelfCheckError(f"{self.model.name}: block {self.model.layers} did not run")

    def filled(self, state: Tensor) -> Any:
        """What a block gives, with another state in it."""
        return with_tensor(self.template, output_of(self.template), state)

    @property
    def carries(self) -> bool:
        """Whether blocks give tensors besides the state."""
        return count_tensors(self.template) > 1

    @contextmanager
    def returning(self, start: int, stored: Tensor, again: bool) -> Iterator[None]:
        """While open, the first `start` blocks give `stored`; `again`: the first one runs where it is needed."""
        first = self.model.blocks[0]
        forward = first.forward

        def run_again(*args: Any, **kwargs: Any) -> Any:
            self.template = forward(*args, **kwargs)
            return self.filled(stored)

        def give(*args: Any, **kwargs: Any) -> Any:
            return self.filled(stored)

        ways = [run_again if again and self.carries else give] + [give] * (start - 1)
        with swapped(dict(zip(self.model.blocks, ways))):
            yield

    @contextmanager
    def giving_keys(self, start: int, stored: Tensor) -> Iterator[None]:
        """While open, the blocks above `start` read `stored` and end where their keys and values are written."""

        def until_kept(forward: Callable[..., Any]) -> Callable[..., Any]:
            def keys_of(*args: Any, **kwargs: Any) -> Any:
                with suppress(Kept):
                    forward(*args, **kwargs)
                return self.filled(stored)

            return keys_of

        with swapped({block: until_kept(block.forward) for block in self.model.blocks[start:]}):
            yield


@contextmanager
def swapped(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """While open, modules run other forwards; those that had been put there before come back."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, old in before.items():
            if old is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = old


def count_tensors(value: Any) -> int:
    """How many tensors a module's output holds."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return sum(map(count_tensors, value))
    return int(isinstance(value, torch.Tensor))
