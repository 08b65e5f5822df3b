"""The readout on CUDA: one Triton pass over the vocabulary, no logits in memory; divergences in a second one.

A program owns a block of rows and a run of vocabulary tiles. It holds the sums of each row in registers, so of the
logits only the top ones are written to memory. Where the kernels can't run, `cpu_kernels` computes the same.

This module needs Triton: `readout` imports it where the kernels can be used. With TRITON_INTERPRET=1, set before Triton
is imported, the same code runs on the CPU, for tests.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench
from triton.tools.tensor_descriptor import TensorDescriptor

from eelib.common.errors import InputError

FLOOR = tl.constexpr(-3.4028234663852886e38)  # float32's lowest value stands for a logit of -inf, which makes no NaN
FAR = tl.constexpr(-200.0)  # exp(FAR) is 0 in float32, and 0 * FAR is 0 where 0 * -inf is NaN
FURTHEST = tl.constexpr(-1e4)  # stands for the log of a share of 0, so that no divergence is infinite; exp() is 0
NO_ID = tl.constexpr(2147483647)

# The kernels


@triton.jit
def load(source, row, rows, column, width, ROWS: tl.constexpr, DEPTH: tl.constexpr, TMA: tl.constexpr):
    """A [ROWS, DEPTH] block of a contiguous matrix [rows, width], zeros outside; `source`: descriptor or pointer."""
    if TMA:
        block = source.load([row, column])
    else:
        down, right = row + tl.arange(0, ROWS), column + tl.arange(0, DEPTH)
        inside = (down < rows)[:, None] & (right < width)[None, :]
        block = tl.load(source + down.to(tl.int64)[:, None] * width + right[None, :], mask=inside, other=0.0)
    return block


@triton.jit
def begin(head_bias, columns, known, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The start of a tile's sums: the head's bias of its columns, or zeros."""
    tile = tl.zeros((ROWS, COLUMNS), tl.float32)
    if head_bias is not None:  # added first, its registers are free again before the matmul
        tile += tl.load(head_bias + columns, mask=known, other=0.0)[None, :]
    return tile


@triton.jit
def finish(scores, columns, known, head_bias, bias, after: tl.constexpr, cap: tl.constexpr):
    """The model's logits from the head's scores of the vocabulary's `columns`: scale, soft-cap, last bias."""
    if after != 1.0:
        scores *= after
    if cap != 0.0:
        scores = cap - tl.fdiv(2.0 * cap, 1.0 + tl.exp(scores * (2.0 / cap)))  # cap * tanh(scores / cap)
    if bias is not None:
        scores += tl.load(bias + columns, mask=known, other=0.0)
    if head_bias is not None or bias is not None:
        scores = tl.maximum(scores, FLOOR)
    return scores


@triton.jit
def block_and_split(pid, n, splits, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Row block and split of a program: GROUP row blocks take all their splits before the next GROUP starts.

    Programs that run together then share GROUP blocks of states and `splits` tiles of weights, which fit the L2 cache.
    """
    blocks = tl.cdiv(n, ROWS)
    first = pid // (GROUP * splits) * GROUP
    size = tl.minimum(blocks - first, GROUP)
    inside = pid % (GROUP * splits)
    return first + inside % size, inside // size


@triton.jit
def chosen_kernel(
    hidden,
    weight,
    ids,
    logits,
    head_bias,
    bias,
    n,
    vocabulary: tl.constexpr,
    width: tl.constexpr,
    after: tl.constexpr,
    cap: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """logits[i] = row i's logit of token ids[i]: the diagonal of a tile product, so it rounds as in `scan_kernel`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.load(ids + rows, mask=rows < n, other=-1)
    there = (tokens >= 0) & (tokens < vocabulary)
    tile = begin(head_bias, tokens, there, ROWS, ROWS)
    for k in range(0, width, DEPTH):
        depth = k + tl.arange(0, DEPTH)
        inside = there[:, None] & (depth < width)[None, :]
        a = tl.load(hidden + rows.to(tl.int64)[:, None] * width + depth[None, :], mask=inside, other=0.0)
        b = tl.load(weight + tokens.to(tl.int64)[:, None] * width + depth[None, :], mask=inside, other=0.0)
        tile = tl.dot(a, b.T, tile, input_precision="ieee")
    diagonal = tl.arange(0, ROWS)[:, None] == tl.arange(0, ROWS)[None, :]
    scores = tl.sum(tl.where(diagonal, tile, 0.0), axis=1)
    scores = finish(scores, tokens, there, head_bias, bias, after, cap)
    tl.store(logits + rows, tl.where(there, scores, float("nan")), mask=rows < n)


@triton.jit
def scan_kernel(
    hidden,
    weight,
    final_ids,
    final_logits,
    reference_ids,
    reference_logits,
    head_bias,
    bias,
    largest,
    total,
    weighted,
    above,
    above_reference,
    top_logits,
    top_ids,
    n,
    splits,
    vocabulary: tl.constexpr,
    width: tl.constexpr,
    after: tl.constexpr,
    cap: tl.constexpr,
    k: tl.constexpr,
    SLOTS: tl.constexpr,
    REFERENCE: tl.constexpr,
    TMA: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One split of the vocabulary for ROWS rows.

    Writes, at [split, row]: the largest logit m, the sum of e^(z-m), the sum of (z-m) e^(z-m), the number of logits
    above the final token's and, with REFERENCE, the reference's, and the k largest logits with their ids, in any order.
    """
    block, split = block_and_split(tl.program_id(0), n, splits, ROWS, GROUP)
    rows = block * ROWS + tl.arange(0, ROWS)
    there = rows < n
    final = tl.load(final_logits + rows, mask=there, other=float("inf"))
    final_id = tl.load(final_ids + rows, mask=there, other=-1)
    most = tl.full((ROWS,), FLOOR, tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    higher = tl.zeros((ROWS,), tl.int32)
    if REFERENCE:
        reference = tl.load(reference_logits + rows, mask=there, other=float("inf"))
        reference_id = tl.load(reference_ids + rows, mask=there, other=-1)
        higher_reference = tl.zeros((ROWS,), tl.int32)
    slots = tl.arange(0, SLOTS)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    values = tl.where(slots < k, float("-inf"), float("inf"))  # slots past k are never the lowest, so never replaced
    ids = NO_ID - slots
    lowest = tl.min(values, axis=1)

    tiles = tl.cdiv(vocabulary, COLUMNS)
    for tile in range(split * tiles // splits, (split + 1) * tiles // splits):
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        known = columns < vocabulary
        scores = begin(head_bias, columns, known, ROWS, COLUMNS)
        for depth in range(0, width, DEPTH):
            a = load(hidden, block * ROWS, n, depth, width, ROWS, DEPTH, TMA)
            b = load(weight, tile * COLUMNS, vocabulary, depth, width, COLUMNS, DEPTH, TMA)
            scores = tl.dot(a, b.T, scores, input_precision="ieee")
        scores = finish(scores, columns[None, :], known[None, :], head_bias, bias, after, cap)
        if vocabulary % COLUMNS != 0:
            scores = tl.where(known[None, :], scores, float("-inf"))
        best = tl.max(scores, axis=1)

        # Subtract before scaling by log2(e): z * log2(e) - m * log2(e) in one step can round above 0 at z = m.
        new = tl.maximum(most, best)
        fall = tl.maximum(most - new, FAR)
        gap = tl.maximum(scores - new[:, None], FAR)
        power = tl.exp(gap)
        keep = tl.exp(fall)
        moment = keep * (moment + fall * mass) + tl.sum(gap * power, axis=1)
        mass = keep * mass + tl.sum(power, axis=1)
        most = new
        other = columns[None, :] != final_id[:, None]  # a token is not above itself, however its two sums rounded
        higher += tl.sum((other & (scores > final[:, None])).to(tl.int32), axis=1)
        if REFERENCE:
            other = columns[None, :] != reference_id[:, None]
            higher_reference += tl.sum((other & (scores > reference[:, None])).to(tl.int32), axis=1)

        # Each turn moves one logit a row into the list, until no row's best beats its k-th; most tiles need few turns.
        better = best > lowest
        while tl.max(better.to(tl.int32), axis=0) > 0:
            at = tl.min(tl.where(scores == best[:, None], columns[None, :], NO_ID), axis=1)
            worst = values == lowest[:, None]
            last = tl.max(tl.where(worst, ids, -1), axis=1)
            out = better[:, None] & worst & (ids == last[:, None])
            values = tl.where(out, best[:, None], values)
            ids = tl.where(out, at[:, None], ids)
            lowest = tl.min(values, axis=1)
            scores = tl.where(columns[None, :] == at[:, None], float("-inf"), scores)
            best = tl.max(scores, axis=1)
            better = best > lowest

    index_of_row = split.to(tl.int64) * n + rows
    tl.store(largest + index_of_row, most, mask=there)
    tl.store(total + index_of_row, mass, mask=there)
    tl.store(weighted + index_of_row, moment, mask=there)
    tl.store(above + index_of_row, higher, mask=there)
    if REFERENCE:
        tl.store(above_reference + index_of_row, higher_reference, mask=there)
    where = index_of_row[:, None] * k + slots
    tl.store(top_logits + where, values, mask=there[:, None] & (slots < k))
    tl.store(top_ids + where, ids, mask=there[:, None] & (slots < k))


@triton.jit
def merge_kernel(
    largest,
    total,
    weighted,
    above,
    above_reference,
    part_logits,
    part_ids,
    final_ids,
    final_logits,
    reference_ids,
    reference_logits,
    log_normalizer,
    entropy,
    rank,
    rank_of_reference,
    top_logits,
    top_ids,
    n,
    splits,
    limit,
    k: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    REFERENCE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge the splits that `scan_kernel` wrote into readouts [n] and top-k [n, k]; `limit` is ln(vocabulary).

    A token in the top-k takes its logit and rank from there, so the top token has rank 1 however the sums rounded.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < n
    parts = tl.arange(0, SPLITS)
    where = parts.to(tl.int64)[None, :] * n + rows[:, None]
    inside = there[:, None] & (parts < splits)[None, :]
    most = tl.load(largest + where, mask=inside, other=FLOOR)
    best = tl.max(most, axis=1)
    fall = tl.maximum(most - best[:, None], FAR)
    power = tl.exp(fall)
    sums = tl.load(total + where, mask=inside, other=0.0)
    mass = tl.sum(power * sums, axis=1)
    moment = tl.sum(power * (tl.load(weighted + where, mask=inside, other=0.0) + fall * sums), axis=1)
    mass = tl.where(there, mass, 1.0)
    log_mass = tl.log(mass)
    tl.store(log_normalizer + rows, best + log_mass, mask=there)
    tl.store(entropy + rows, tl.minimum(tl.maximum(log_mass - moment / mass, 0.0), limit), mask=there)

    final = tl.load(final_ids + rows, mask=there, other=-1)
    final_logit = tl.minimum(tl.load(final_logits + rows, mask=there, other=0.0), best)
    final_rank = 1 + tl.sum(tl.load(above + where, mask=inside, other=0), axis=1)
    if REFERENCE:
        reference = tl.load(reference_ids + rows, mask=there, other=-1)
        reference_logit = tl.load(reference_logits + rows, mask=there, other=0.0)
        reference_logit = tl.minimum(reference_logit, best, propagate_nan=tl.PropagateNan.ALL)
        reference_rank = 1 + tl.sum(tl.load(above_reference + where, mask=inside, other=0), axis=1)

    slot = tl.arange(0, SPLITS * SLOTS)
    source = (slot // SLOTS).to(tl.int64)[None, :] * n + rows[:, None]
    inside = there[:, None] & ((slot // SLOTS < splits) & (slot % SLOTS < k))[None, :]
    source = source * k + (slot % SLOTS)[None, :]
    values = tl.load(part_logits + source, mask=inside, other=float("-inf"))
    ids = tl.load(part_ids + source, mask=inside, other=NO_ID)
    previous = tl.full((ROWS,), float("inf"), tl.float32)
    greater = tl.zeros((ROWS,), tl.int32)
    for i in range(k):
        value = tl.max(values, axis=1)
        token = tl.min(tl.where(values == value[:, None], ids, NO_ID), axis=1)
        tl.store(top_logits + rows * k + i, value, mask=there)
        tl.store(top_ids + rows * k + i, token, mask=there)
        greater = tl.where(value < previous, i, greater)
        previous = value
        final_logit = tl.where(token == final, value, final_logit)
        final_rank = tl.where(token == final, greater + 1, final_rank)
        if REFERENCE:
            reference_logit = tl.where(token == reference, value, reference_logit)
            reference_rank = tl.where(token == reference, greater + 1, reference_rank)
        values = tl.where(ids == token[:, None], float("-inf"), values)
    tl.store(final_logits + rows, final_logit, mask=there)
    tl.store(rank + rows, final_rank, mask=there)
    if REFERENCE:
        tl.store(reference_logits + rows, reference_logit, mask=there)
        tl.store(rank_of_reference + rows, tl.where(reference < 0, 0, reference_rank), mask=there)


@triton.jit
def divergence_kernel(
    hidden,
    weight,
    hidden_last,
    normalizer,
    normalizer_last,
    head_bias,
    bias,
    js,
    kl,
    n,
    splits,
    vocabulary: tl.constexpr,
    width: tl.constexpr,
    after: tl.constexpr,
    cap: tl.constexpr,
    TMA: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One split's share of the divergences between the two rows of each pair, at [split, row]: Jensen-Shannon, and
    Kullback-Leibler, sum q log(q / p), where q is of the last layer's row and p of the other.

    With p, q and d = log p - log q: log p - log((p + q) / 2) = min(d, 0) - log((1 + e^-|d|) / 2), and for q with -d.
    """
    block, split = block_and_split(tl.program_id(0), n, splits, ROWS, GROUP)
    rows = block * ROWS + tl.arange(0, ROWS)
    there = rows < n
    norm = tl.load(normalizer + rows, mask=there, other=0.0)
    norm_last = tl.load(normalizer_last + rows, mask=there, other=0.0)
    found = tl.zeros((ROWS,), tl.float32)
    apart = tl.zeros((ROWS,), tl.float32)
    tiles = tl.cdiv(vocabulary, COLUMNS)
    for tile in range(split * tiles // splits, (split + 1) * tiles // splits):
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        known = columns < vocabulary
        one = begin(head_bias, columns, known, ROWS, COLUMNS)
        two = begin(head_bias, columns, known, ROWS, COLUMNS)
        for k in range(0, width, DEPTH):
            b = load(weight, tile * COLUMNS, vocabulary, k, width, COLUMNS, DEPTH, TMA)
            a = load(hidden, block * ROWS, n, k, width, ROWS, DEPTH, TMA)
            one = tl.dot(a, b.T, one, input_precision="ieee")
            a = load(hidden_last, block * ROWS, n, k, width, ROWS, DEPTH, TMA)
            two = tl.dot(a, b.T, two, input_precision="ieee")
        one = finish(one, columns[None, :], known[None, :], head_bias, bias, after, cap)
        two = finish(two, columns[None, :], known[None, :], head_bias, bias, after, cap)
        one = tl.maximum(one - norm[:, None], FURTHEST)
        two = tl.maximum(two - norm_last[:, None], FURTHEST)
        if vocabulary % COLUMNS != 0:
            one = tl.where(known[None, :], one, FURTHEST)
            two = tl.where(known[None, :], two, FURTHEST)
        d = one - two
        middle = tl.log(0.5 + 0.5 * tl.exp(-tl.abs(d)))
        share = tl.exp(two)
        apart -= tl.sum(share * d, axis=1)
        both = tl.exp(one) * (tl.minimum(d, 0.0) - middle) + share * (tl.minimum(-d, 0.0) - middle)
        found += 0.5 * tl.sum(both, axis=1)
    tl.store(js + split.to(tl.int64) * n + rows, found, mask=there)
    tl.store(kl + split.to(tl.int64) * n + rows, apart, mask=there)


# What calls them

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter stands in for the GPU
L2_STATES = 32 << 20  # bytes of states that programs running together may share: most of a Hopper's L2 cache


class Tiles(NamedTuple):
    """Shape of one program's work (rows x columns x depth of a matmul tile) and Triton's options for compiling it."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3
    at_once: int = 1  # programs that one multiprocessor holds


SMALL = Tiles(32, 256, 64)  # in the interpreter
FLOAT32 = Tiles(64, 64, 32, warps=8)
PAIRED = Tiles(128, 128, 64, warps=8)
PAIRED_FLOAT32 = Tiles(64, 64, 16, warps=8)
FEW_ROWS = (Tiles(64, 128, 64, stages=4, at_once=2), Tiles(64, 256, 64, warps=8, stages=4))
MANY_ROWS = (
    Tiles(128, 256, 64, warps=8),
    Tiles(128, 256, 64, warps=8, stages=4),
    Tiles(256, 128, 64, warps=8),
    Tiles(128, 128, 64, at_once=2),
    Tiles(128, 128, 64, warps=8, stages=4),
)
_fastest: dict[tuple, Tiles] = {}


@dataclass
class Projection:
    """The projection of a state h to logits cap * tanh(after * (W h + head_bias) / cap) + bias; no tanh if cap is 0."""

    weight: Tensor
    head_bias: Tensor | None = None
    bias: Tensor | None = None
    after: float = 1.0
    cap: float = 0.0

    def __post_init__(self) -> None:
        """Store the biases as the kernels need them: flat, in float32, on the weights' device."""
        self.weight = contiguous(self.weight)
        first, last = (
            None if bias is None else bias.detach().to(self.weight.device, torch.float32).flatten().contiguous()
            for bias in (self.head_bias, self.bias)
        )
        if last is not None and not self.cap:  # the same sum, but free: the matmul starts from it
            first, last = last / self.after if first is None else first + last / self.after, None
        self.biases = first, last
        vocabulary, width = self.weight.shape
        # what is compiled into a kernel
        self.constants = dict(vocabulary=vocabulary, width=width, after=float(self.after), cap=float(self.cap))


def contiguous(matrix: Tensor) -> Tensor:
    """A contiguous matrix; in the interpreter, whose matmul reads bfloat16 as integers, in float32."""
    matrix = matrix.detach().contiguous()
    return matrix.float() if INTERPRETED and matrix.dtype == torch.bfloat16 else matrix


@torch.no_grad()
def read_rows(
    hidden: Tensor,
    head: Projection,
    final_ids: Tensor,
    k: int = 10,
    reference_ids: Tensor | None = None,
    tiles: Tiles | None = None,
) -> dict[str, Tensor]:
    """Readouts of states after the final norm.

    Logits are summed in float32 and never rounded to the weights' dtype; -inf counts as float32's lowest value. No
    logit is above log_normalizer.

    Args:
        hidden: states [n, hidden_size], n at least 1, in the weights' dtype.
        head: the projection that gives their logits.
        final_ids: the last layer's tokens [n].
        k: how many of the largest logits are given, at most the size of the vocabulary.
        reference_ids: the reference's tokens [n]; below 0 where there is none, which gives NaN and rank 0.
        tiles: tile shape to use in place of the tuned one.

    Returns:
        On the states' device: float32 [n] log_normalizer, entropy (nats) and final_logit; int32 [n] final_rank (1:
        no logit is above the final token's); float32 [n, k] top_logits, falling, and int32 top_ids, the lower id first
        where logits are equal; with `reference_ids` float32 [n] reference_logit and int32 reference_rank.
    """
    n, device = len(hidden), hidden.device
    names = ["log_normalizer", "entropy", "final_rank", "top_logits", "top_ids"]
    names += [] if reference_ids is None else ["reference_rank"]
    result = {
        name: torch.empty(
            (n, k) if name.startswith("top") else n,
            dtype=torch.int32 if name.endswith(("rank", "ids")) else torch.float32,
            device=device,
        )
        for name in names
    }
    hidden, tokens = contiguous(hidden), {"final": final_ids, "reference": reference_ids}
    ids = {name: None if some is None else some.to(device, torch.int32).contiguous() for name, some in tokens.items()}
    with torch.cuda.device_of(hidden):  # Triton launches on the current device, which need not be the head's
        for name, some in ids.items():
            if some is not None:
                result[f"{name}_logit"] = chosen(hidden, head, some)
        pass_over = partial(scan, hidden, head, ids, result, k)
        tiles = tiles or tuned(hidden, head, reference_ids is not None, pass_over)
        merge(pass_over(tiles), ids, result, len(head.weight))
    return result


@torch.no_grad()
def read_divergences(
    hidden: Tensor,
    head: Projection,
    log_normalizer: Tensor,
    hidden_last: Tensor,
    log_normalizer_last: Tensor,
) -> tuple[Tensor, Tensor]:
    """Divergences [n] in nats of the readouts of two sets of states [n, hidden_size]: Jensen-Shannon, 0 to ln 2, and
    Kullback-Leibler, sum q ln(q / p) with q of `hidden_last`, at least 0.

    The log-normalizers [n] are those of `read_rows`. Both matmuls are done again, side by side.
    """
    n = len(hidden)
    tiles = SMALL if INTERPRETED else PAIRED_FLOAT32 if hidden.dtype == torch.float32 else PAIRED
    hidden, hidden_last = contiguous(hidden), contiguous(hidden_last)
    grid, layout = plan(tiles, head.weight, hidden, hidden_last)
    js, kl = torch.empty(2, layout["splits"], n, dtype=torch.float32, device=hidden.device)
    matrices = [blocked(hidden, tiles.rows, layout), blocked(head.weight, tiles.columns, layout)]
    matrices.append(blocked(hidden_last, tiles.rows, layout))
    normalizers = [norm.float().contiguous() for norm in (log_normalizer, log_normalizer_last)]
    with torch.cuda.device_of(hidden):
        divergence_kernel[grid](*matrices, *normalizers, *head.biases, js, kl, n, **layout, **head.constants)
    return js.sum(0).clamp(0.0, math.log(2.0)), kl.sum(0).clamp(min=0.0)


def blocked(matrix: Tensor, rows: int, layout: dict[str, int]) -> object:
    """A matrix as the kernels load it, [rows, depth] at a time: by a tensor descriptor if TMA, else by pointers."""
    return TensorDescriptor.from_tensor(matrix, [rows, layout["DEPTH"]]) if layout["TMA"] else matrix


def aligned(matrix: Tensor) -> bool:
    """Whether the bulk copy engine (TMA) can load a matrix: each row starts at a multiple of 16 bytes."""
    return matrix.shape[1] * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0


def plan(tiles: Tiles, weight: Tensor, hidden: Tensor, *others: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """Grid and layout arguments: as many splits of the vocabulary as fill the multiprocessors best."""
    blocks, columns = math.ceil(len(hidden) / tiles.rows), math.ceil(len(weight) / tiles.columns)
    row_bytes = hidden.shape[1] * hidden.element_size()
    group = max(1, min(blocks, L2_STATES // (tiles.rows * row_bytes)))
    units = 3 if INTERPRETED else torch.cuda.get_device_properties(hidden.device).multi_processor_count
    programs = units * tiles.at_once
    fewest = min(columns, max(1, programs // group))

    def time_of(splits: int) -> int:
        return math.ceil(blocks * splits / programs) * math.ceil(columns / splits)

    splits = min(range(fewest, min(columns, 2 * fewest) + 1), key=time_of)
    return (blocks * splits,), dict(
        splits=splits,
        TMA=all(map(aligned, (weight, hidden, *others))),
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        GROUP=group,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def chosen(hidden: Tensor, head: Projection, ids: Tensor) -> Tensor:
    """The logit of one token per row [n]; NaN where the id is outside the vocabulary."""
    rows, depth = (32, 64) if INTERPRETED else (64, 32 if hidden.dtype == torch.float32 else 64)
    logits, tile = torch.empty(len(hidden), device=hidden.device), dict(ROWS=rows, DEPTH=depth)
    given = (hidden, head.weight, ids, logits, *head.biases, len(hidden))
    chosen_kernel[(math.ceil(len(hidden) / rows),)](*given, **head.constants, **tile, num_warps=4, num_stages=3)
    return logits


def scan(
    hidden: Tensor, head: Projection, ids: dict[str, Tensor | None], result: dict[str, Tensor], k: int, tiles: Tiles
) -> list[Tensor]:
    """What `scan_kernel` writes, [splits, n]: largest logit, sum of powers, their moment, counts above the final and
    above the reference's token (not filled where there is none); [splits, n, k]: top-k logits, ids.
    """
    grid, layout = plan(tiles, head.weight, hidden)
    reference = result.get("reference_logit")
    shape: tuple[int, ...] = (layout["splits"], len(hidden))
    sizes = [(shape, torch.float32)] * 3 + [(shape, torch.int32)] * 2
    sizes += [((*shape, k), torch.float32), ((*shape, k), torch.int32)]
    parts = [torch.empty(size, dtype=dtype, device=hidden.device) for size, dtype in sizes]
    matrices = (blocked(hidden, tiles.rows, layout), blocked(head.weight, tiles.columns, layout))
    tokens = (ids["final"], result["final_logit"], ids["reference"], reference)
    options: dict[str, Any] = dict(k=k, SLOTS=triton.next_power_of_2(k), REFERENCE=reference is not None)
    given = (*matrices, *tokens, *head.biases, *parts, len(hidden))
    scan_kernel[grid](*given, **options, **layout, **head.constants)
    return parts


def merge(parts: list[Tensor], ids: dict[str, Tensor | None], result: dict[str, Tensor], vocabulary: int) -> None:
    """Merge the splits into `result`."""
    splits, n, k = parts[-1].shape
    slots, lanes = triton.next_power_of_2(k), triton.next_power_of_2(splits)
    rows = max(1, min(16, 4096 // (slots * lanes)))
    tokens = (ids["final"], result["final_logit"], ids["reference"], result.get("reference_logit"))
    names = ("log_normalizer", "entropy", "final_rank", "reference_rank", "top_logits", "top_ids")
    given = (*parts, *tokens, *map(result.get, names), n, splits, math.log(vocabulary))
    options = dict(k=k, SLOTS=slots, SPLITS=lanes, REFERENCE=ids["reference"] is not None, ROWS=rows)
    merge_kernel[(math.ceil(n / rows),)](*given, **options, num_warps=4)


def tuned(hidden: Tensor, head: Projection, reference: bool, launch: Callable[[Tiles], object]) -> Tiles:
    """The tile shape that ran fastest here for inputs of this size, tried at the first call and remembered."""
    if INTERPRETED or hidden.dtype == torch.float32:
        return SMALL if INTERPRETED else FLOAT32
    biased = [bias is not None for bias in head.biases]
    size = triton.next_power_of_2(len(hidden))
    key = (hidden.device, hidden.dtype, size, *head.constants.values(), *biased, reference)
    if key not in _fastest:
        times: dict[Tiles, float] = {}
        for tiles in FEW_ROWS if len(hidden) <= 64 else MANY_ROWS:
            try:
                times[tiles] = do_bench(partial(launch, tiles), warmup=1, rep=10, return_mode="min")
            except OutOfResources:  # a smaller card than a Hopper
                continue
        if not times:
            raise InputError(f"no tile shape of the kernel fits {torch.cuda.get_device_name(hidden.device)}")
        _fastest[key] = min(times, key=times.__getitem__)
    return _fastest[key]
