"""One recorded run of a network: what every module took and gave, which modules are the blocks, and their states."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from eelib.common.errors import CheckpointError


@dataclass
class Call:
    """One module call of the probe run: what went in and what came out (first floating tensors only)."""

    name: str
    module: nn.Module
    taken: Tensor | None
    given: Tensor | None


@dataclass
class Runs:
    """The calls of a probe run in order of completion, its arguments, and the logits (None of a bare encoder)."""

    calls: list[Call] = field(default_factory=list)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None


def first_tensor(value) -> Tensor | None:
    """The first floating tensor of a module's output or input, however it is wrapped."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next((t for t in map(first_tensor, value) if t is not None), None)
    return None


def state_of(args: tuple, kwargs: dict) -> Tensor | None:
    """The hidden state among a module's arguments."""
    return first_tensor([*args, kwargs.get("hidden_states"), *kwargs.values()])


def with_tensor(value, old: Tensor, new: Tensor):
    """`value` with the tensor `old`, wherever it is inside, replaced by `new`."""
    if value is old:
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(with_tensor(v, old, new) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensor(v, old, new) for v in value)
    if isinstance(value, dict):
        return type(value)(**{k: with_tensor(v, old, new) for k, v in value.items()})
    return value


def accepts(network: nn.Module, argument: str) -> bool:
    """Whether the network's forward takes `argument`."""
    return argument in arguments_of(type(network))


@cache
def arguments_of(kind: type[nn.Module]) -> frozenset[str]:
    """Names of what a network's forward takes; looked up at each step of a decoding, so found once."""
    return frozenset(inspect.signature(kind.forward).parameters)


def plain_inputs(network: nn.Module, kind: str, ids: Tensor) -> dict:
    """Arguments of a run without a cache on `ids` [rows, tokens]; an encoder-decoder's target is its own source."""
    inputs = {"input_ids": ids}
    if kind == "seq2seq":
        inputs["decoder_input_ids"] = ids
    if kind in ("causal", "seq2seq") and (accepts(network, "use_cache") or accepts(network, "kwargs")):
        inputs["use_cache"] = False
    return inputs


@torch.no_grad()
def record(network: nn.Module, kind: str, ids: Tensor) -> Runs:
    """Run `ids` [1, tokens] once and keep every module's input and output."""
    runs, handles = Runs(inputs=plain_inputs(network, kind, ids)), []

    def hook(name):
        def keep(module, args, kwargs, output):
            taken, given = state_of(args, kwargs), first_tensor(output)
            runs.calls.append(
                Call(name, module, *(t if t is None else t.detach().clone().to(ids.device) for t in (taken, given)))
            )

        return keep

    for name, module in network.named_modules():
        handles.append(module.register_forward_hook(hook(name), with_kwargs=True))
    try:
        logits = getattr(network(**runs.inputs), "logits", None)
        runs.logits = logits if logits is None else logits.detach().to(ids.device)
    finally:
        for handle in handles:
            handle.remove()
    return runs


def stack_of(network: nn.Module, kind: str) -> str:
    """Name of the module whose blocks are read: an encoder-decoder's decoder, else the whole network ("")."""
    if kind == "seq2seq" or (kind == "classifier" and getattr(network.config, "is_encoder_decoder", False)):
        decoder = next((m for n, m in network.named_modules() if n.split(".")[-1] == "decoder"), None)
        if hasattr(network, "get_decoder") and network.get_decoder() is not network:
            decoder = network.get_decoder()
        return next((n for n, m in network.named_modules() if m is decoder), "")
    return ""


def find_blocks(network: nn.Module, runs: Runs, name: str, inside: str = "") -> list[Call]:
    """The blocks' calls, in order: the longest chain in which each call of a list's modules reads the one before.

    A block that is called several times (shared weights) stands in the list once for each call. Raises ValueError.
    """
    calls: dict[str, list[Call]] = {}
    place = {id(call): i for i, call in enumerate(runs.calls)}
    for call in runs.calls:
        calls.setdefault(call.name, []).append(call)
    tokens = runs.inputs["input_ids"].shape[1]
    best, reason = [], "no list of transformer blocks was found in the network"
    for path, module in network.named_modules():
        if not isinstance(module, nn.ModuleList) or not path.startswith(inside):
            continue
        found = [c for i in range(len(module)) for c in calls.get(f"{path}.{i}", [])]
        found.sort(key=lambda c: place[id(c)])
        if len(found) <= len(best):
            continue
        if any(c.taken is None or c.given is None for c in found) or len(found) < 2 <= len(module):
            continue
        odd = next(
            (
                c
                for c in found
                if c.given.ndim != 3 or c.given.shape[:2] != (1, tokens) or c.given.shape != found[0].given.shape
            ),
            None,
        )
        bad = next((c.name for c in found if odd is None and not bool(torch.isfinite(c.given).all())), None)
        if bad is not None:
            raise CheckpointError(f"{name}: the output of block {bad} holds values that are not finite")
        broken = next((b for a, b in zip(found, found[1:]) if not torch.equal(a.given, b.taken)), None)
        if odd is not None:
            reason = (
                f"block {odd.name} gives a state of shape {tuple(odd.given.shape)}, not the same "
                f"(1, {tokens}, width) at every layer"
            )
        elif broken is not None:
            reason = f"block {broken.name} does not read what the block before it gave"
        else:
            best = found
    if not best:
        raise CheckpointError(f"{name}: {type(network).__name__}: {reason}")
    return best


@contextmanager
def block_states(blocks: list[nn.Module]) -> Iterator[list[Tensor]]:
    """While open, each forward fills the yielded list with L+1 states [batch, tokens, hidden_size], embeddings first.

    All are on the device of the first block's input, wherever the blocks are.
    """
    states: list[Tensor] = []

    def enter(_module, args, kwargs):
        if len(states) in (0, len(blocks) + 1) or blocks.count(blocks[0]) == 1:  # not a later call of a shared block
            states[:] = [state_of(args, kwargs)]

    def leave(_module, _args, output):
        states.append(first_tensor(output).to(states[0].device))

    handles = [blocks[0].register_forward_pre_hook(enter, with_kwargs=True)]
    handles += [block.register_forward_hook(leave) for block in dict.fromkeys(blocks)]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def output_replaced(module: nn.Module, new: Tensor, call: int = 0) -> Iterator[None]:
    """While open, the module's output number `call` of a forward (0: the first) is `new`."""
    count = 0

    def swap(_module, _args, output):
        nonlocal count
        count += 1
        old = first_tensor(output)
        return with_tensor(output, old, new.reshape(old.shape).to(old.device)) if count == call + 1 else None

    handle = module.register_forward_hook(swap)
    try:
        yield
    finally:
        handle.remove()
