"""One pass over each row of logits on the CPU: everything a readout needs of them, compiled by numba."""

import math
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

FAST = {"reassoc", "contract", "nsz", "nnan", "arcp"}  # infinities keep their meaning: masked logits are -inf
BLOCK = 64  # columns whose maximum decides whether the search for the top-k looks at them one by one
LOWEST = np.float32(-87.0)  # exp() of it is the smallest normal float32
LOG2_E = np.float32(1 / math.log(2))
LN2_HIGH = np.float32(0.693359375)  # exact in few bits, so that n * LN2_HIGH is exact
LN2_LOW = np.float32(math.log(2) - 0.693359375)
LN2 = np.float32(math.log(2))
ONE, HALF = np.float32(1), np.float32(0.5)
E2, E3, E4, E5, E6, E7 = (np.float32(1 / math.factorial(n)) for n in range(2, 8))
L3, L5, L7, L9 = (np.float32(1 / n) for n in (3, 5, 7, 9))
ROOT_HALF = np.int32(0x3F3504F3)  # bits of the square root of 1/2


@intrinsic
def as_float(_context, value):
    """The float32 with these 32 bits."""
    return types.float32(types.int32), lambda _c, build, _s, args: build.bitcast(args[0], ir.FloatType())


@intrinsic
def as_bits(_context, value):
    """The 32 bits of a float32."""
    return types.int32(types.float32), lambda _c, build, _s, args: build.bitcast(args[0], ir.IntType(32))


@numba.njit(fastmath=FAST, inline="always")
def exp(x):
    """e^x for x <= 0 to float32 accuracy: 2^n times the series of e^r, |r| <= ln(2) / 2. A loop of it vectorizes."""
    x = max(x, LOWEST)
    n = np.int32(x * LOG2_E - HALF)
    r = x - np.float32(n) * LN2_HIGH - np.float32(n) * LN2_LOW
    series = ONE + r * (ONE + r * (E2 + r * (E3 + r * (E4 + r * (E5 + r * (E6 + r * E7))))))
    return series * as_float((n + np.int32(127)) << np.int32(23))


@numba.njit(fastmath=FAST, inline="always")
def log(x):
    """ln x for 0 < x <= 1 to float32 accuracy: the exponent's part plus 2 artanh((f - 1) / (f + 1))."""
    bits = as_bits(max(x, np.float32(1.2e-38))) - ROOT_HALF
    exponent = bits >> np.int32(23)
    f = as_float((bits & np.int32(0x007FFFFF)) + ROOT_HALF)
    s = (f - ONE) / (f + ONE)
    y = s * s
    return np.float32(exponent) * LN2 + (s + s) * (ONE + y * (L3 + y * (L5 + y * (L7 + y * L9))))


@numba.njit(fastmath=FAST, inline="always")
def largest(row, start, end):
    """The maximum of row[start:end]."""
    top = row[start]
    for j in range(start, end):
        top = max(top, row[j])
    return top


@numba.njit(inline="always")
def insert(value, index, values, ids):
    """Put a value that beats the last of the falling `values` in its place; of equals, the first stays ahead."""
    at = len(values) - 1
    while at > 0 and values[at - 1] < value:
        values[at], ids[at] = values[at - 1], ids[at - 1]
        at -= 1
    values[at], ids[at] = value, index


@numba.njit(inline="always")
def top_of(row, values, ids):
    """Fill `values` and `ids` with the k largest of a row, falling; of equals, the lower id first."""
    width, k = len(row), len(values)
    blocks = (width + BLOCK - 1) // BLOCK
    maxima = np.empty(blocks, np.float32)
    values[:], ids[:] = -np.inf, 0
    for b in range(blocks):
        maxima[b] = largest(row, b * BLOCK, min(width, (b + 1) * BLOCK))
        if maxima[b] > values[k - 1]:
            insert(maxima[b], np.int32(b), values, ids)
    floor = values[k - 1]  # at least k values are this large or larger
    values[:], ids[:] = -np.inf, 0
    for b in range(blocks):
        if maxima[b] >= floor and maxima[b] > values[k - 1]:
            for j in range(b * BLOCK, min(width, (b + 1) * BLOCK)):
                if row[j] > values[k - 1]:
                    insert(row[j], np.int32(j), values, ids)


@numba.njit(fastmath=FAST, inline="always")
def sums(row, top, own):
    """Sum of e^(z - top), sum of (z - top) e^(z - top), and how many logits lie above `own`."""
    total, weighted, above = np.float32(0), np.float32(0), np.int32(0)
    for j in range(len(row)):
        d = max(row[j] - top, LOWEST)
        e = exp(d)
        total += e
        weighted += e * d
        above += np.int32(row[j] > own)
    return total, weighted, above


@numba.njit(fastmath=FAST, nogil=True, cache=True)
def summarize(start, end, logits, wanted, values, ids, normalizer, entropy, rank):
    """Fill, for rows start..end of logits [n, V]: the top-k logits `values` [n, k] and `ids`, falling; `normalizer`
    [n], the log of the sum of exponentials; `entropy` [n] in nats; `rank` [n] of column `wanted` [n], 1 at the top."""
    for r in range(start, end):
        row = logits[r]
        top_of(row, values[r], ids[r])
        total, weighted, above = sums(row, values[r, 0], row[wanted[r]])
        size = math.log(total)
        normalizer[r] = values[r, 0] + size
        entropy[r] = size - weighted / total
        rank[r] = above + 1


@numba.njit(fastmath=FAST, nogil=True, cache=True)
def diverge(start, end, logits, normalizer, size, found):
    """Fill `found` [n], for rows start..end, with the Jensen-Shannon divergence, in nats, of each row of logits and the
    last of its `size` rows."""
    for r in range(start, end):
        last = r // size * size + size - 1
        total = np.float32(0)
        for j in range(logits.shape[1]):
            log_p = max(logits[r, j] - normalizer[r], LOWEST)
            log_q = max(logits[last, j] - normalizer[last], LOWEST)
            p, q = exp(log_p), exp(log_q)
            log_m = log((p + q) * HALF)
            total += p * (log_p - log_m) + q * (log_q - log_m)
        found[r] = total * HALF


def over_rows(function, count: int, *arrays) -> None:
    """Call function(start, end, *arrays) for slices of `count` rows, on as many threads as torch uses.

    The threads live for one call: they outlive no fork, and two traces in one process do not meet.
    """
    threads = max(1, min(torch.get_num_threads(), count))
    bounds = [count * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        for part in [pool.submit(function, *ends, *arrays) for ends in zip(bounds, bounds[1:])]:
            part.result()
