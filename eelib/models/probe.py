"""One recorded run of a network: every module's input and output, which modules are the blocks, and their states."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from threading import RLock
from traceback import walk_tb
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map
from transformers import PreTrainedModel

from eelib.common.errors import CheckpointError
from eelib.common.files import PACKAGE
from eelib.common.machine import is_out_of_memory
from eelib.common.values import first_line

NONE = torch.empty(0)  # in place of a tensor that there is not


@dataclass
class Call:
    """One module call of the probe run: its input and output, the first floating tensor of each; NONE without any."""

    name: str
    module: nn.Module
    input: Tensor
    output: Tensor


@dataclass
class Runs:
    """The calls of a probe run in order of completion, its arguments, and its logits."""

    calls: list[Call]
    inputs: dict[str, Any]
    logits: Tensor


class EndOfRun(BaseException):
    """Raised to end a run of a network, or of one block; as a BaseException, it passes a network's own handlers."""


class Unsupported(Exception):
    """A network failed with an argument, a mask, a cache or a shape that was tried on it."""


@contextmanager
def foreign_code() -> Iterator[None]:
    """Around one trial call of a network: an error becomes `Unsupported`, unless memory ran out.

    Nothing else belongs inside. An error raised in our own code, such as a cache or hook, is not changed either.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or raised_in(error, PACKAGE):
            raise
        raise Unsupported(f"{type(error).__name__}: {first_line(error)}") from error


def raised_in(error: BaseException, folder: Path) -> bool:
    """Whether an error was raised in a line of a file in `folder`."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return Path(frame.f_code.co_filename).is_relative_to(folder)


def there(tensor: Tensor | None, what: str) -> Tensor:
    """The tensor; CheckpointError if it is None, with `what` as the start of its message."""
    if tensor is None:
        raise CheckpointError(f"{what} no floating-point tensor")
    return tensor


def first_tensor(value: object) -> Tensor | None:
    """The first floating tensor of a module's output or input, however it is wrapped."""
    leaves = (value,) if isinstance(value, Tensor) else tree_iter(value)
    return next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)


def output_of(value: object) -> Tensor:
    """The first floating tensor of a module's output. CheckpointError if there is none."""
    return there(first_tensor(value), "a module gives")


def first_argument(args: tuple, kwargs: dict) -> Tensor | None:
    """The hidden state among a module's arguments; None where there is none."""
    return first_tensor([*args, kwargs.get("hidden_states"), *kwargs.values()])


def state_of(args: tuple, kwargs: dict) -> Tensor:
    """The hidden state among a module's arguments. CheckpointError if there is none."""
    return there(first_argument(args, kwargs), "a module takes")


def with_tensor(value: Any, old: Tensor, new: Tensor) -> Any:
    """`value` with the tensor `old` replaced by `new`, wherever it is nested."""
    return new if value is old else tree_map(lambda leaf: new if leaf is old else leaf, value)


def embeddings_of(network: PreTrainedModel) -> nn.Module | None:
    """The module of a network's input embeddings; None where it names none."""
    try:
        return network.get_input_embeddings()
    except NotImplementedError:
        return None


def accepts(network: nn.Module, argument: str) -> bool:
    return argument in arguments_of(type(network).forward)


@cache
def arguments_of(forward: Callable[..., object]) -> frozenset[str]:
    """Names of a forward's arguments; cached, since each step of a decoding needs them."""
    return frozenset(inspect.signature(forward).parameters)


@torch.no_grad()
def record(network: nn.Module, inputs: dict[str, Any]) -> Runs:
    """Run a network once, on the ids [1, tokens] among its arguments, and record every module's input and output.

    CheckpointError if the network has no head.
    """
    calls, home = list[Call](), inputs["input_ids"].device
    names = {module: name for name, module in network.named_modules()}

    def keep(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        found = first_argument(args, kwargs), first_tensor(output)
        calls.append(Call(names[module], module, *(NONE if t is None else t.detach().clone().to(home) for t in found)))

    with ExitStack() as hooks:
        for module in names:
            hooks.enter_context(module.register_forward_hook(keep, with_kwargs=True))
        output = network(**inputs)
    logits = there(getattr(output, "logits", None), "the network gives logits in")
    return Runs(calls, inputs, logits.detach().to(home))


def find_blocks(network: nn.Module, runs: Runs, name: str, inside: str = "") -> list[Call]:
    """The blocks' calls, in order: those of the longest ModuleList in which each call reads the previous one's output.

    A block that is called several times (shared weights) is listed once for each call. CheckpointError if there is no
    such list, or a block's output is not finite. `inside`: the beginning of the lists' names.
    """
    tokens = runs.inputs["input_ids"].shape[1]
    best: list[Call] = []
    reason = "no list of transformer blocks was found in the network"
    for path, module in network.named_modules():
        if not isinstance(module, nn.ModuleList) or not path.startswith(inside):
            continue
        names = {f"{path}.{i}" for i in range(len(module))}
        found = [call for call in runs.calls if call.name in names]
        if len(found) <= len(best):
            continue
        if not all(c.input.numel() and c.output.numel() for c in found) or len(found) < 2 <= len(module):
            continue
        shape = (1, tokens, *found[0].output.shape[-1:])
        odd = next((c for c in found if c.output.shape != shape), None)
        bad = next((c.name for c in found if odd is None and not bool(torch.isfinite(c.output).all())), None)
        if bad is not None:
            raise CheckpointError(f"{name}: the output of block {bad} holds values that are not finite")
        broken = next((b for a, b in pairwise(found) if not torch.equal(a.output, b.input)), None)
        if odd is not None:
            reason = (
                f"block {odd.name} gives a state of shape {tuple(odd.output.shape)}, not the same "
                f"(1, {tokens}, hidden_size) at every layer"
            )
        elif broken is not None:
            reason = f"block {broken.name} does not read what the block before it gave"
        else:
            best = found
    if not best:
        raise CheckpointError(f"{name}: {type(network).__name__}: {reason}")
    return best


TURNS: "WeakKeyDictionary[nn.Module, AbstractContextManager[bool]]" = WeakKeyDictionary()


def in_turn(blocks: list[nn.Module]) -> AbstractContextManager[bool]:
    """The lock of a network, found by its first block: threads that share a model use it one after the other."""
    return TURNS.setdefault(blocks[0], RLock())


@contextmanager
def block_states(blocks: list[nn.Module]) -> Iterator[list[Tensor]]:
    """While open, each forward fills the yielded list with L+1 states [batch, tokens, hidden_size], embeddings first.

    All states are on the device of the first block's input. Other threads wait for the network.
    """
    states: list[Tensor] = []

    def enter(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        if len(states) in (0, len(blocks) + 1) or blocks.count(blocks[0]) == 1:  # not a later call of a shared block
            states[:] = [state_of(args, kwargs)]

    def leave(_module: nn.Module, _args: tuple, output: object) -> None:
        states.append(output_of(output).to(states[0].device))

    with in_turn(blocks), ExitStack() as hooks:
        hooks.enter_context(blocks[0].register_forward_pre_hook(enter, with_kwargs=True))
        for block in dict.fromkeys(blocks):
            hooks.enter_context(block.register_forward_hook(leave))
        yield states


@contextmanager
def output_replaced(module: nn.Module, new: Tensor, call: int = 0) -> Iterator[None]:
    """While open, the module's output number `call` of a forward (0: the first) is `new`."""
    count = 0

    def swap(_module: nn.Module, _args: tuple, output: object) -> object:
        nonlocal count
        count += 1
        old = output_of(output)
        return with_tensor(output, old, new.reshape(old.shape).to(old.device)) if count == call + 1 else None

    with module.register_forward_hook(swap):
        yield
