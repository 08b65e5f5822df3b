"""Float32 matrix products at full accuracy on CPUs that multiply bfloat16 faster, for weights that fit bfloat16."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from eelib.lens.cpu.parallel import Spread

_fits: "WeakKeyDictionary[nn.Module, bool]" = WeakKeyDictionary()


@cache
def has_fast_bfloat16() -> bool:
    """Whether this CPU has instructions that multiply bfloat16 and add in float32."""
    return torch.backends.mkldnn.is_available() and bool(
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def fits_bfloat16(head: nn.Linear) -> bool:
    """Whether every float32 weight is a bfloat16 number, as in most published checkpoints; found once per head."""
    if head not in _fits:
        _fits[head] = all(bool((part.bfloat16().float() == part).all()) for part in head.weight.split(4096))
    return _fits[head]


@contextmanager
def bfloat16_products() -> Iterator[None]:
    """While open, oneDNN rounds float32 factors to bfloat16, multiplies these and adds in float32."""
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # the module replaces itself
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def head_product(states: Tensor, head: nn.Linear, out: Tensor, spread: Spread) -> None:
    """Fill `out` [n, vocab_size] with float32 products of states [n, hidden_size] and the head's weights; no bias.

    A state is the sum of two bfloat16 numbers up to 2^-17 of itself, so where the weights are bfloat16 numbers two
    bfloat16 products make one of float32, in less time. `spread` shares the columns out to the cores.
    """
    weights = head.weight.detach()  # torch.no_grad() does not reach other threads

    def plain(start: int, end: int) -> None:
        torch.mm(states, weights[start:end].T, out=out[:, start:end])

    def split(start: int, end: int) -> None:
        part, weight = out[:, start:end], weights[start:end].T
        torch.mm(high, weight, out=part)
        torch.addmm(part, low, weight, out=part)

    if not (has_fast_bfloat16() and fits_bfloat16(head)):
        spread(plain, len(head.weight))
        return
    high = states.bfloat16().float()
    low = states - high
    with bfloat16_products():
        spread(split, len(head.weight))
