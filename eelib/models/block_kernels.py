"""The compiled code of fused blocks: norms, products, rotations, attention over a cache and the activation.

`run_blocks` runs several blocks, one after the other, on the rows of one pass; what it calls stands above it. Arrays
are float32. Products and larger parts of the rest are shared by several cores.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from eelib.common.machine import compiled
from eelib.models.products import products, some_products

ALONE = 2**16  # numbers of an activation, or products of attention, that one core has done before a second has begun
SUMS: Any = {"contract", "reassoc"}  # sums may be taken in any order


def typed_pointer(_typing: Any, address: Any) -> Any:
    """The float32 numbers from an address on."""

    def generate(_context: Any, build: Any, _signature: Any, given: Any) -> Any:
        return build.inttoptr(given[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(address), generate


pointer: Any = intrinsic(typed_pointer)


@compiled(nogil=True)
def address_of(numbers: np.ndarray) -> Any:
    return np.int64(numbers.ctypes.data)  # numba has it without a sign, and makes floats of sums with such numbers


@compiled(nogil=True)
def same_numbers(starts: np.ndarray, numbers: np.ndarray) -> bool:
    """Whether from each address of `starts` on lie the numbers of its row."""
    for i in range(len(starts)):
        live = carray(pointer(starts[i]), (numbers.shape[1],))
        for k in range(numbers.shape[1]):
            if live[k] != numbers[i, k]:
                return False
    return True


@compiled(nogil=True)
def rotate(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    """Rotate each head of `heads` [rows, n * size] in place, by angles with cosines and sines [rows, size]."""
    size = cos.shape[1]
    half = size // 2
    for i in range(len(heads)):
        for start in range(0, heads.shape[1], size):
            for k in range(half):
                first, second = heads[i, start + k], heads[i, start + half + k]
                heads[i, start + k] = first * cos[i, k] - second * sin[i, k]
                heads[i, start + half + k] = second * cos[i, half + k] + first * sin[i, half + k]


@compiled(nogil=True)
def linear(x: int, rows: int, layers: np.ndarray, kind: Any, y: int, cores: int) -> None:
    """`products` of linear layers that may have scales and biases, of which each row of `layers` has the addresses."""
    products(x, rows, layers, kind, y, cores)
    for layer in range(len(layers)):
        n = layers[layer, 1]
        out = carray(pointer(y), (rows, n))
        if layers[layer, 3]:
            scales = carray(pointer(layers[layer, 3]), (n,))
            for i in range(rows):
                for j in range(n):
                    out[i, j] *= scales[j]
        if layers[layer, 4]:
            biases = carray(pointer(layers[layer, 4]), (n,))
            for i in range(rows):
                for j in range(n):
                    out[i, j] += biases[j]
        y += 4 * rows * n


@compiled(nogil=True)
def normed(
    states: np.ndarray, norm: int, eps: float, layers: np.ndarray, kind: Any, room: int, y: int, cores: int
) -> None:
    """`linear` of the RMS norms of states [rows, size], for which there is `room`."""
    rows, size = states.shape
    out, weight = carray(pointer(room), (rows, size)), carray(pointer(norm), (size,))
    for i in range(rows):
        total = 0.0
        for k in range(size):
            total += states[i, k] * states[i, k]
        factor = np.float32(1.0 / np.sqrt(total / size + eps))
        for k in range(size):
            out[i, k] = weight[k] * (states[i, k] * factor)
    linear(room, rows, layers, kind, y, cores)


def typed_power_of_2(_typing: Any, number: Any) -> Any:
    """2 to the power of a whole float32 number above -127."""

    def generate(_context: Any, build: Any, _signature: Any, given: Any) -> Any:
        bits = ir.IntType(32)
        exponent = build.add(build.fptosi(given[0], bits), bits(127))
        return build.bitcast(build.shl(exponent, bits(23)), ir.FloatType())

    return types.float32(number), generate


power_of_2: Any = intrinsic(typed_power_of_2)


@compiled(nogil=True, fastmath=SUMS)
def exponential(x: Any) -> Any:
    """exp(x) for float32 x <= 88, within 1e-7 (relative); loops of it use vectors, which those of numpy's do not.

    x = n log 2 + r with whole n, and the Taylor series of exp(r).
    """
    x = np.float32(-87) if x < np.float32(-87) else x
    n = np.floor(x * np.float32(1 / np.log(2)) + np.float32(0.5))
    r = x - n * np.float32(355 / 512) - n * np.float32(np.log(2) - 355 / 512)  # the first product is exact
    total = np.float32(1 / 5040)
    for inverse in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        total = total * r + np.float32(inverse)
    return total * power_of_2(n)


@compiled(nogil=True, fastmath=SUMS)
def activate(gate: np.ndarray, up: np.ndarray) -> None:
    """gate = SiLU(gate) * up."""
    for i in range(len(gate)):
        x = gate[i] if gate[i] > np.float32(-80) else np.float32(-80)  # below, SiLU is 0 in float32
        gate[i] = x / (np.float32(1) + exponential(-x)) * up[i]


@compiled(nogil=True, fastmath=SUMS)
def softmax(scores: np.ndarray, visible: np.ndarray, scaling: float) -> None:
    """Scores, scaled, to weights, in place; 0 for slots that are not visible."""
    largest, total = np.float32(-3e38), np.float32(0)
    for slot in range(len(scores)):
        scores[slot] = scores[slot] * scaling if visible[slot] else np.float32(-3e38)
        largest = max(largest, scores[slot])
    for slot in range(len(scores)):
        scores[slot] = exponential(scores[slot] - largest) if visible[slot] else np.float32(0)
        total += scores[slot]
    for slot in range(len(scores)):
        scores[slot] /= max(total, np.float32(1e-30))  # a padded row may see nothing


@compiled(nogil=True, fastmath=SUMS)
def add_values(weights: np.ndarray, values: int, out: np.ndarray) -> None:
    """out [size] = the weighted sum of the values [slots, size] that lie from an address on."""
    size, whole = len(out), len(weights) // 4 * 4
    rows = carray(pointer(values), (len(weights), size))
    out[:] = 0
    for slot in range(0, whole, 4):  # so that `out` is read and written for every fourth only
        one, two, three, four = rows[slot], rows[slot + 1], rows[slot + 2], rows[slot + 3]
        w, x, y, z = weights[slot], weights[slot + 1], weights[slot + 2], weights[slot + 3]
        for k in range(size):
            out[k] += w * one[k] + x * two[k] + y * three[k] + z * four[k]
    for slot in range(whole, len(weights)):
        last, w = rows[slot], weights[slot]
        for k in range(size):
            out[k] += w * last[k]


@compiled(nogil=True)
def some_heads(given: tuple, out: np.ndarray, first: int, last: int) -> None:
    """Attention of the pairs of a row and a head with the numbers first..last.

    Args:
        given: queries [rows, new, heads, size]; how many heads keys and values have; addresses of the keys and the
            values of all stored rows [n, such heads, slots, size], and their slots; which of these each row reads
            [rows]; which slots, of those that are filled, each token reads [1 or rows, new, slots]; and the scaling.
        out: [rows, new, heads, size].
    """
    queries, shared, cache, stored, visible, scaling = given
    new, heads, size = queries.shape[1:]
    slots = visible.shape[2]
    own, scores = np.empty((new, size), np.float32), np.empty((new, slots), np.float32)
    for pair in range(first, last):
        row, head = pair // heads, pair % heads
        at = 4 * size * cache[2] * (stored[row] * shared + head * shared // heads)
        own[:] = queries[row, :, head]
        some_products(address_of(own), new, cache[0] + at, slots, size, np.float32(0), address_of(scores), 0, slots)
        for i in range(new):
            softmax(scores[i], visible[row % len(visible), i], scaling)
            add_values(scores[i], cache[1] + at, out[row, i, head])


@compiled(nogil=True, parallel=True)
def shared_heads(given: tuple, out: np.ndarray, cores: int) -> None:
    """`some_heads` of all pairs, shared by several cores."""
    pairs = out.shape[0] * out.shape[2]
    for core in numba.prange(cores):
        some_heads(given, out, pairs * core // cores, pairs * (core + 1) // cores)


@compiled(nogil=True, parallel=True)
def shared_activate(gate: np.ndarray, up: np.ndarray, cores: int) -> None:
    """`activate` of all numbers, shared by several cores."""
    for core in numba.prange(cores):
        first, last = len(gate) * core // cores, len(gate) * (core + 1) // cores
        activate(gate[first:last], up[first:last])


@compiled(nogil=True)
def store(new: np.ndarray, buffer: np.ndarray, stored: np.ndarray, valid: np.ndarray, past: int) -> None:
    """Write new keys or values [rows, new, heads, size] into their slots of the buffer, where they are valid."""
    rows, count, heads, _ = new.shape
    for row in range(rows):
        for i in range(count):
            if valid[row, i]:
                for head in range(heads):
                    buffer[stored[row], head, past + i] = new[row, i, head]


@compiled(nogil=True)
def run_blocks(
    blocks: tuple,
    kind: Any,
    caches: np.ndarray,
    states: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    scaling: float,
    stored: np.ndarray,
    valid: np.ndarray,
    visible: np.ndarray,
    past: int,
    kv_only: bool,
    room: np.ndarray,
    cores: int,
) -> None:
    """Run blocks, one after the other, on states in place.

    Args:
        blocks: (layers [blocks, 7, 5], each as `linear` takes it: queries, keys, values, output, gate, up, down;
            addresses of the norms' weights [blocks, 2]; their epsilons [blocks, 2]).
        kind: a number of the weights' type.
        caches: of each block the addresses of keys and values, and their number of slots [blocks, 3].
        states: [rows * new, size].
        cos, sin: of the angles [rows * new, head size].
        stored: the row of the cache of each row [rows].
        valid: which of the new tokens are stored [rows, new].
        visible: which slots each token reads [1 or rows, new, slots].
        past: slots before the new tokens.
        kv_only: end after the keys and values of the first block.
        room: numbers to work in.
    """
    layers, norms, epsilons = blocks
    (count, size), (rows, new), head = states.shape, valid.shape, cos.shape[1]
    near, room = room[: count * size].reshape(count, size), room[count * size :]
    for block in range(len(layers)):
        own, most = layers[block], stored.max() + 1
        heads, shared, inner = own[0, 1] // head, own[1, 1] // head, count * own[4, 1]
        q, kv = count * heads * head, count * shared * head
        normed(states, norms[block, 0], epsilons[block, 0], own[:3], kind, address_of(near), address_of(room), cores)
        rotate(room[:q].reshape(count, heads * head), cos, sin)
        rotate(room[q : q + kv].reshape(count, shared * head), cos, sin)
        keys = carray(pointer(caches[block, 0]), (most, shared, caches[block, 2], head))
        values = carray(pointer(caches[block, 1]), (most, shared, caches[block, 2], head))
        store(room[q : q + kv].reshape(rows, new, shared, head), keys, stored, valid, past)
        store(room[q + kv : q + 2 * kv].reshape(rows, new, shared, head), values, stored, valid, past)
        if kv_only:
            return
        queries, found = room[:q].reshape(rows, new, heads, head), room[q + 2 * kv : 2 * q + 2 * kv]
        read = found.reshape(rows, new, heads, head)
        given = queries, shared, caches[block], stored, visible, scaling
        if cores > 1 and q * visible.shape[2] > ALONE:
            shared_heads(given, read, cores)
        else:
            some_heads(given, read, 0, rows * heads)
        linear(address_of(found), count, own[3:4], kind, address_of(near), cores)
        states += near
        normed(states, norms[block, 1], epsilons[block, 1], own[4:6], kind, address_of(near), address_of(room), cores)
        gate, up = room[:inner], room[inner : 2 * inner]
        if cores > 1 and inner > ALONE:
            shared_activate(gate, up, cores)
        else:
            activate(gate, up)
        linear(address_of(gate), count, own[6:], kind, address_of(near), cores)
        states += near
