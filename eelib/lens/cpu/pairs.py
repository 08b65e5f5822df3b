"""Divergences between the rows of logits of one token, all pairs in one pass on the CPU, compiled by numba."""

import math

import numba
import numpy as np

from eelib.common.compiled import compiled
from eelib.lens.cpu.rows import FAST, HALF, exp, largest, log

COLUMNS = 128  # of all rows at a time: with what is kept of them they stay in the core's first cache
MASKED = np.float32(-1e30)  # stands for -inf, which less itself is no number; KL to a row that masks more is as large


@numba.njit(fastmath=FAST, inline="always")
def total_of(row, top):
    """The sum of e^(z - top), in float64 over parts in float32."""
    total = 0.0
    for start in range(0, len(row), COLUMNS):
        part = np.float32(0)
        for j in range(start, min(len(row), start + COLUMNS)):
            part += exp(max(row[j] - top, MASKED))
        total += part
    return total


@numba.njit(fastmath=FAST, inline="always")
def two_rows(a, p, log_p, b, q, log_q, size):
    """Sums over `size` columns, of logits a and b and shares p and q: of p (a - b), of q (b - a), and twice JS."""
    there, back, middle = np.float32(0), np.float32(0), np.float32(0)
    for j in range(size):
        apart = a[j] - b[j]
        log_m = log((p[j] + q[j]) * HALF)
        there += p[j] * apart
        back -= q[j] * apart
        middle += p[j] * (log_p[j] - log_m) + q[j] * (log_q[j] - log_m)
    return there, back, middle


@compiled(fastmath=FAST, nogil=True)
def compare(start, end, logits, kl, js):
    """Fill kl and js, zeros in float64 [n, S, S], for tokens start..end of float32 logits [n, S, V]: KL of row against
    column, and JS above the diagonal, in nats. KL is the mean difference of the logits less that of their normalizers,
    which are float64: a rounded one would be off for all columns alike. JS is exact where both rows are the same.
    """
    rows, width = logits.shape[1:]
    tops, totals = np.empty(rows, np.float32), np.empty(rows)
    below, shares, logs = np.empty((3, rows, COLUMNS), np.float32)
    for token in range(start, end):
        for i in range(rows):
            tops[i] = largest(logits[token, i], 0, width)
            totals[i] = total_of(logits[token, i], tops[i])
        for first in range(0, width, COLUMNS):
            size = min(COLUMNS, width - first)
            for i in range(rows):
                scale = np.float32(1 / totals[i])
                for j in range(size):
                    below[i, j] = max(logits[token, i, first + j] - tops[i], MASKED)
                    shares[i, j] = exp(below[i, j]) * scale
                    logs[i, j] = log(shares[i, j])
            for i in range(rows):
                for k in range(i + 1, rows):
                    there, back, middle = two_rows(below[i], shares[i], logs[i], below[k], shares[k], logs[k], size)
                    kl[token, i, k] += there
                    kl[token, k, i] += back
                    js[token, i, k] += middle / 2
        for i in range(rows):
            for k in range(rows):
                kl[token, i, k] -= math.log(totals[i] / totals[k])
