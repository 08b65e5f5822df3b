"""The readout on a CPU: threads of one core each, a fast matrix product, and one compiled pass over each row."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import pairwise
from threading import Lock

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor, nn

from eelib.common.machine import compiled

Spread = Callable[..., None]  # (function, count, *arguments)


@contextmanager
def spread_over_cores() -> Iterator[Spread]:
    """While open, the yielded spread(function, count, *arguments) calls function(start, end, *arguments) for slices of
    range(count), on as many threads as torch uses, and waits for all.

    Meanwhile torch itself uses one core. The threads end with the context, so that later forks and other traces in the
    process have none of them.
    """
    cores = torch.get_num_threads()
    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def spread(function: Callable[..., None], count: int, *arguments: object) -> None:
            parts = max(1, min(cores, count))
            bounds = [count * i // parts for i in range(parts + 1)]
            for part in [pool.submit(function, *ends, *arguments) for ends in pairwise(bounds)]:
                part.result()

        torch.set_num_threads(1)
        try:
            yield spread
        finally:
            torch.set_num_threads(cores)


# The product

NARROW = 256  # columns that MKL computes at once; rows of the vocabulary lie far apart, and more take a third longer
_setting = Lock()  # torch's setting is one for all threads, so one changes it and puts it back at a time


@contextmanager
def onednn_products() -> Iterator[None]:
    """While open, oneDNN computes torch's float32 products in all threads, and may round the factors to bfloat16."""
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # the module replaces itself
    with _setting:
        before = settings.fp32_precision
        settings.fp32_precision = "bf16"
        try:
            yield
        finally:
            settings.fp32_precision = before


@cache
def onednn_is_better() -> bool:
    """Whether oneDNN's float32 products are faster than torch's and as exact: with AVX-512 bfloat16 but without AMX."""
    cpu, factor = torch.cpu, torch.full((256, 256), 1 + 2**-9)
    if not cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported() or not torch.backends.mkldnn.is_available():
        return False
    with onednn_products():
        return bool((factor @ factor != 256.0).all())  # which it is of factors that were rounded to bfloat16


def head_product(states: Tensor, head: nn.Linear, out: Tensor, spread: Spread) -> None:
    """Fill `out` [n, vocab_size] with float32 products of states [n, hidden_size] and the head's weights; no bias.

    `spread` divides the columns among the cores.
    """
    weights = head.weight.detach()  # torch.no_grad() does not reach other threads
    better = onednn_is_better()
    at_once = len(weights) if better else NARROW

    def product(start: int, end: int) -> None:
        for first in range(start, end, at_once):
            columns = slice(first, min(end, first + at_once))
            torch.mm(states, weights[columns].T, out=out[:, columns])

    with onednn_products() if better else nullcontext():
        spread(product, len(weights))


# The pass over each row

FAST = {"reassoc", "contract", "nsz", "nnan", "arcp"}  # infinities keep their meaning: masked logits are -inf
BLOCK = 64  # columns whose maximum decides whether the search for the top-k looks at them one by one
LOWEST = np.float32(-87.0)  # exp() of it is the smallest normal float32
FURTHEST = np.float32(-1e4)  # stands for the log of a share of 0 in a KL divergence, which would be infinite
LOG2_E = np.float32(1 / math.log(2))
LN2_HIGH = np.float32(0.693359375)  # exact in few bits, so that n * LN2_HIGH is exact
LN2_LOW = np.float32(math.log(2) - 0.693359375)
LN2 = np.float32(math.log(2))
ONE, HALF = np.float32(1), np.float32(0.5)
E2, E3, E4, E5, E6 = (np.float32(1 / math.factorial(n)) for n in range(2, 7))  # the next term is below 2e-7
ROOT_HALF = np.int32(0x3F3504F3)  # bits of the square root of 1/2
SMALLEST = np.float32(2.0**-126)  # that is normal
L0, L1, L2, L3, L4, L5, L6, L7, L8 = map(
    np.float32,
    np.polynomial.Chebyshev.interpolate(
        lambda t: np.where(t == 0, 1.0, np.log1p(t) / np.where(t == 0, 1.0, t)),
        8,
        domain=[math.sqrt(0.5) - 1, math.sqrt(2) - 1],
    )
    .convert(kind=np.polynomial.Polynomial)
    .coef,
)  # ln(1 + t) / t


@intrinsic
def as_float(_context, value):
    return types.float32(types.int32), lambda _c, build, _s, args: build.bitcast(args[0], ir.FloatType())


@intrinsic
def as_bits(_context, value):
    return types.int32(types.float32), lambda _c, build, _s, args: build.bitcast(args[0], ir.IntType(32))


@numba.njit(fastmath=FAST, inline="always")
def exp(x):
    """e^x for x <= 0 to float32 accuracy: 2^n times the series of e^r, |r| <= ln(2) / 2. A loop of it vectorizes."""
    x = max(x, LOWEST)
    n = np.int32(x * LOG2_E - HALF)
    r = x - np.float32(n) * LN2_HIGH - np.float32(n) * LN2_LOW
    series = ONE + r * (ONE + r * (E2 + r * (E3 + r * (E4 + r * (E5 + r * E6)))))
    return series * as_float((n + np.int32(127)) << np.int32(23))


@numba.njit(fastmath=FAST, inline="always")
def log(x):
    """ln x for 0 < x <= 1 to float32 accuracy: the exponent's part plus that of the rest, from 0.71 to 1.41."""
    bits = as_bits(max(x, SMALLEST)) - ROOT_HALF
    exponent = bits >> np.int32(23)
    t = as_float((bits & np.int32(0x007FFFFF)) + ROOT_HALF) - ONE
    series = L0 + t * (L1 + t * (L2 + t * (L3 + t * (L4 + t * (L5 + t * (L6 + t * (L7 + t * L8)))))))
    return np.float32(exponent) * LN2 + t * series


@numba.njit(fastmath=FAST, inline="always")
def largest(row, start, size):
    """The maximum of row[start:start + size]."""
    top = row[start]
    for j in range(start, start + size):
        top = max(top, row[j])
    return top


@numba.njit(fastmath=FAST, inline="always")
def block_maxima(row, found):
    """Fill `found` with the maximum of each `BLOCK` columns; the last block may be shorter."""
    whole = len(row) // BLOCK
    for b in range(whole):
        found[b] = largest(row, b * BLOCK, BLOCK)
    if whole < len(found):
        found[whole] = largest(row, whole * BLOCK, len(row) - whole * BLOCK)


@numba.njit(inline="always")
def insert(value, index, values, ids):
    """Insert a value above the last of `values`, which fall, at its place; among equals, the earlier stays ahead."""
    at = len(values) - 1
    while at > 0 and values[at - 1] < value:
        values[at], ids[at] = values[at - 1], ids[at - 1]
        at -= 1
    values[at], ids[at] = value, index


@numba.njit(inline="always")
def top_of(row, values, ids, maxima):
    """Fill `values` and `ids` with the k largest of a row, falling; of equals, the lower id first."""
    last = len(values) - 1
    block_maxima(row, maxima)
    values[:], ids[:] = -np.inf, 0
    for b in range(len(maxima)):
        if maxima[b] > values[last]:
            insert(maxima[b], np.int32(b), values, ids)
    floor = values[last]  # at least k values are this large or larger
    values[:] = -np.inf
    for b in range(len(maxima)):
        if maxima[b] >= floor and maxima[b] > values[last]:
            for j in range(b * BLOCK, min(len(row), (b + 1) * BLOCK)):
                if row[j] > values[last]:
                    insert(row[j], np.int32(j), values, ids)


@compiled(fastmath=FAST, nogil=True, error_model="numpy")
def summarize(start, end, logits, wanted, known, values, ids, normalizer, entropy, rank, known_rank):
    """Fill, for rows start..end of logits [n, V]: the top-k logits `values` [n, k] and `ids`, falling; `normalizer`
    [n], the log of the sum of exponentials; `entropy` [n] in nats; `rank` [n] of column `wanted` [n], 1 at the top;
    `known_rank` [n] of column `known` [n].
    """
    maxima = np.empty((logits.shape[1] + BLOCK - 1) // BLOCK, np.float32)
    for r in range(start, end):
        row = logits[r]
        top_of(row, values[r], ids[r], maxima)
        top, own, other = values[r, 0], row[wanted[r]], row[known[r]]
        total, weighted, above, above_known = np.float32(0), np.float32(0), np.int32(0), np.int32(0)
        for j in range(len(row)):
            d = max(row[j] - top, LOWEST)
            e = exp(d)
            total += e
            weighted += e * d
            above += np.int32(row[j] > own)
            above_known += np.int32(row[j] > other)
        size = math.log(total)
        normalizer[r] = top + size
        entropy[r] = size - weighted / total
        rank[r] = above + 1
        known_rank[r] = above_known + 1


@compiled(fastmath=FAST, nogil=True)
def diverge(start, end, logits, normalizer, size, js, kl):
    """Fill `js` and `kl` [n], in nats, for tokens start..end. A token has `size` rows of logits; the distribution p of
    each row is compared with q, that of the token's last row.

    Twice Jensen-Shannon is the sum of p (log p - log m) + q (log q - log m), with m = (p + q) / 2; Kullback-Leibler is
    the sum of q (log q - log p).
    """
    shares = np.empty(logits.shape[1], np.float32)
    for token in range(start, end):
        final = token * size + size - 1
        for j in range(len(shares)):
            shares[j] = exp(logits[final, j] - normalizer[final])
        for r in range(token * size, final + 1):
            row, last, twice, apart = logits[r], logits[final], np.float32(0), np.float32(0)
            for j in range(len(row)):
                log_p, log_q = row[j] - normalizer[r], max(last[j] - normalizer[final], LOWEST)
                q = shares[j]
                apart += q * (log_q - max(log_p, FURTHEST))
                log_p = max(log_p, LOWEST)
                p = exp(log_p)
                log_m = log((p + q) * HALF)
                twice += p * (log_p - log_m) + q * (log_q - log_m)
            js[r], kl[r] = HALF * twice, apart
