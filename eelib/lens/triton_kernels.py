"""Triton code of the readout: one pass over the vocabulary with matmul, log-sum-exp, entropy, rank and top-k at once.

Imported by `triton_host` alone, and only where Triton is installed. A program owns a block of rows and a run of
vocabulary tiles; it keeps what it knows of each row in registers, so no logit is written to memory but the top ones.
"""

import triton
import triton.language as tl

FLOOR = tl.constexpr(-3.4028234663852886e38)  # float32's lowest value stands for a logit of -inf, which makes no NaN
FAR = tl.constexpr(-200.0)  # exp(FAR) is 0 in float32, and 0 * FAR is 0 where 0 * -inf is NaN
FURTHEST = tl.constexpr(-1e4)  # stands for the log of a share of 0, so that no divergence is infinite; exp() is 0
NO_ID = tl.constexpr(2147483647)


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
    """What a tile's sums start from: the head's bias of its columns, or zeros."""
    tile = tl.zeros((ROWS, COLUMNS), tl.float32)
    if head_bias is not None:  # added first, its registers are free again before the matmul
        tile += tl.load(head_bias + columns, mask=known, other=0.0)[None, :]
    return tile


@triton.jit
def product(
    hidden,
    weight,
    head_bias,
    row,
    column,
    n,
    vocabulary,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TMA: tl.constexpr,
):
    """hidden @ weight.T + head_bias for one tile: [ROWS, COLUMNS] in float32."""
    columns = column + tl.arange(0, COLUMNS)
    tile = begin(head_bias, columns, columns < vocabulary, ROWS, COLUMNS)
    for k in range(0, width, DEPTH):
        a = load(hidden, row, n, k, width, ROWS, DEPTH, TMA)
        b = load(weight, column, vocabulary, k, width, COLUMNS, DEPTH, TMA)
        tile = tl.dot(a, b.T, tile, input_precision="ieee")
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
        scores = product(
            hidden, weight, head_bias, block * ROWS, tile * COLUMNS, n, vocabulary, width, ROWS, COLUMNS, DEPTH, TMA
        )
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
    maximum,
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
    """Put the splits together: what `scan_kernel` wrote -> readouts [n] and top-k [n, k]; `limit` = ln(vocabulary).

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
    tl.store(maximum + rows, best, mask=there)
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
    Kullback-Leibler of the last one, q, from the other, p.

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
