"""Products of few rows on a CPU: each weight is read once, as bfloat16 where it is such a number; sums are float32.

Decoding multiplies one row, or a few, by every weight of a network, so it takes as long as reading the weights.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from threading import Lock
from time import thread_time
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor, nn

from eelib.common.compiled import compiled
from eelib.common.errors import SelfCheckError
from eelib.common.tolerances import close

LANES = 16  # partial sums of a product; they are added up in the same order whatever rows are beside it
TILE = 4  # rows that share one pass over a row of weights
BLOCK = 8  # outputs for which all rows are multiplied before the next weights are read
ROWS = (1, 3, 6, 10, 16)  # numbers of rows at which our products are timed against torch's
SAMPLE = 2**24  # weights with which they are timed: more than a processor keeps near
SMALLEST = 2**22  # weights of a network below which a timing says more of the clock than of the products
GAIN = 0.9  # share of torch's time that ours may take
ONE_CALL = Lock()  # numba's simplest threads serve one caller at a time


def typed_dots(_typing: Any, rows: Any, x: Any, i: Any, w: Any, j: Any, y: Any) -> Any:
    """y[i + r, j] = x[i + r] . w[j] for r < rows, a literal; w of float32, or its upper halves in uint16."""
    if {x.layout, w.layout, y.layout} != {"C"}:
        raise numba.TypingError("rows must be contiguous")

    def generate(context: Any, build: Any, signature: Any, given: Any) -> Any:
        number, bits, half, index = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(64)
        xs, ws, ys = (context.make_array(signature.args[at])(context, build, given[at]) for at in (1, 3, 5))
        size, outputs = build.extract_value(xs.shape, 1), build.extract_value(ys.shape, 1)
        at = [build.add(given[2], index(row)) for row in range(rows.literal_value)]

        def load(array: Any, row: Any, k: Any, kind: Any) -> Any:
            place = build.gep(array.data, [build.add(build.mul(row, size), k)])
            return build.load(build.bitcast(place, ir.VectorType(kind, LANES).as_pointer()), align=kind.width // 8)

        def weights(k: Any) -> Any:
            if signature.args[3].dtype == types.float32:
                return load(ws, given[4], k, bits)
            wide = build.zext(load(ws, given[4], k, half), ir.VectorType(bits, LANES))
            return build.shl(wide, ir.Constant(wide.type, [16] * LANES))

        lanes = ir.VectorType(number, LANES)
        sums = [cgutils.alloca_once_value(build, ir.Constant(lanes, [0.0] * LANES)) for _ in at]
        with cgutils.for_range_slice(build, index(0), size, index(LANES), index) as (k, _):
            weight = build.bitcast(weights(k), lanes)
            for row, total in zip(at, sums):
                # "contract": rounded once where the processor multiplies and adds in one instruction
                product = build.fmul(build.bitcast(load(xs, row, k, bits), lanes), weight, flags=("contract",))
                build.store(build.fadd(product, build.load(total), flags=("contract",)), total)
        for row, total in zip(at, sums):
            value, count = build.load(total), LANES
            while count > 1:  # add the upper half of the lanes to the lower one
                count //= 2
                parts = [list(range(count)), list(range(count, 2 * count))]
                masks = [ir.Constant(ir.VectorType(bits, count), part) for part in parts]
                value = build.fadd(*(build.shuffle_vector(value, value, mask) for mask in masks))
            place = build.gep(ys.data, [build.add(build.mul(row, outputs), given[4])])
            build.store(build.extract_element(value, bits(0)), place)
        return context.get_dummy_value()

    return types.void(rows, x, i, w, j, y), generate


dots: Any = intrinsic(prefer_literal=True)(typed_dots)


@compiled(nogil=True)
def some_products(x: np.ndarray, w: np.ndarray, y: np.ndarray, first: int, last: int) -> None:
    """Columns first..last of y [m, n] = x [m, k] w [n, k]^T, for k a multiple of LANES."""
    whole = len(x) // TILE * TILE
    for i in range(0, whole, TILE):
        for j in range(first, last):
            dots(TILE, x, i, w, j, y)
    for j in range(first, last):
        if len(x) - whole == 1:
            dots(1, x, whole, w, j, y)
        elif len(x) - whole == 2:
            dots(2, x, whole, w, j, y)
        elif len(x) - whole == 3:
            dots(3, x, whole, w, j, y)


@compiled(nogil=True, parallel=True)
def products(x: np.ndarray, w: np.ndarray, y: np.ndarray) -> None:
    """All columns, on as many cores as numba is set to use."""
    for part in numba.prange((len(w) + BLOCK - 1) // BLOCK):
        some_products(x, w, y, part * BLOCK, min(len(w), part * BLOCK + BLOCK))


@compiled(nogil=True)
def halve(bits: np.ndarray, found: np.ndarray) -> bool:
    """Fill `found` with the upper halves of 32-bit numbers; whether all lower halves are 0."""
    rest = np.uint32(0)
    for k in range(len(bits)):
        rest |= bits[k]
        found[k] = bits[k] >> np.uint32(16)
    return rest & np.uint32(0xFFFF) == 0


class FewRows:
    """The forward of one linear layer: products of up to `limit` rows are ours, all others torch's.

    torch's are also those that a gradient may be asked of, and all once the layer has other weights.
    """

    def __init__(self, layer: nn.Linear, limit: int):
        self.layer, self.size, self.limit = weakref.ref(layer), layer.in_features, limit  # no circle of references
        self.weight, self.version = layer.weight, layer.weight._version
        self.whole = layer.weight.detach().numpy()
        self.first, self.address = self.whole.item(0), layer.weight.data_ptr()
        halves = np.empty(self.whole.shape, np.uint16)
        self.w = halves if halve(self.whole.view(np.uint32).ravel(), halves.ravel()) else self.whole

    def __reduce__(self) -> tuple:
        """A copy of a layer, whose weights may change unnoticed here, has torch's forward."""
        return partial, (nn.Linear.forward, self.layer())

    def __call__(self, input: Tensor) -> Tensor:
        """Products [..., n] of input [..., k]."""
        layer = self.layer()
        assert layer is not None
        if not (
            0 < input.numel() <= self.limit * self.size
            and input.shape[-1] == self.size
            and type(input) is Tensor
            and input.dtype is torch.float32
            and input.device.type == "cpu"
            and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling())
            and layer.weight is self.weight
            and self.weight._version == self.version
            and self.weight.data_ptr() == self.address
            and self.whole.item(0) == self.first  # peft adds to weights through .data, which counts no version
        ):
            return nn.Linear.forward(layer, input)
        y = torch.empty(*input.shape[:-1], len(self.w))
        multiply(input.contiguous().view(-1, self.size).numpy(), self.w, y.view(-1, len(self.w)).numpy())
        return y if layer.bias is None else y.add_(layer.bias)


def multiply(x: np.ndarray, w: np.ndarray, y: np.ndarray) -> None:
    """Fill y [m, n] with x [m, k] w [n, k]^T, on as many cores as torch uses."""
    cores = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]  # set as it is imported
    if cores == 1:
        some_products(x, w, y, 0, len(w))
        return
    with ONE_CALL:
        if numba.get_num_threads() != cores:
            numba.set_num_threads(cores)
        products(x, w, y)


@torch.no_grad()
def use_fast_products(network: nn.Module) -> int:
    """Have a network's linear layers, on the CPU in float32, multiply few rows by ours where that takes less time.

    Returns:
        The largest number of rows that are multiplied so; 0 where torch is as fast, and nothing was changed.

    Raises:
        SelfCheckError: our products are not torch's.

    """
    layers = [module for module in network.modules() if isinstance(module, nn.Linear) and is_fit(module)]
    worthwhile = sum(layer.weight.numel() for layer in layers) >= SMALLEST
    limit = rows_that_gain(layers) if worthwhile and layers else 0
    for layer in layers if limit else ():
        vars(layer)["forward"] = FewRows(layer, limit)
    return limit


def is_fit(layer: nn.Linear) -> bool:
    """Whether a linear layer is as torch makes it, of float32 on the CPU, and its rows of weights are whole lanes."""
    weight = layer.weight
    as_made = type(layer) is nn.Linear and "forward" not in vars(layer)
    lanes = weight.numel() > 0 and weight.shape[1] % LANES == 0 and weight.is_contiguous()
    return as_made and lanes and weight.dtype is torch.float32 and weight.device.type == "cpu"


def rows_that_gain(layers: list[nn.Linear]) -> int:
    """The largest of `ROWS` up to which our products of some of the layers take less of one core's time than torch's.

    Time of one core, not of the clock: other work on the machine hardly changes it, so each load finds the same.
    """
    some: dict[nn.Linear, FewRows] = {}
    for layer in layers:
        if sum(known.weight.numel() for known in some) < SAMPLE:
            some[layer] = FewRows(layer, ROWS[-1])
    gained, cores = 0, torch.get_num_threads()
    for rows in ROWS:
        inputs = [torch.randn(rows, layer.in_features) for layer in some]
        on_all_cores = next(iter(some.values()))(inputs[0])
        torch.set_num_threads(1)
        try:
            (ours_took, ours), (torch_took, theirs) = (run_twice(ways, inputs) for ways in (some.values(), some))
        finally:
            torch.set_num_threads(cores)
        if not all(map(close, [on_all_cores, *ours], [theirs[0], *theirs])):
            raise SelfCheckError(f"our products of {rows} rows are not torch's")
        if ours_took > GAIN * torch_took:
            break
        gained = rows
    return gained


def run_twice(ways: Iterable[Callable[[Tensor], Tensor]], inputs: list[Tensor]) -> tuple[float, list[Tensor]]:
    """(seconds of this thread for all products, the shorter of two times; the products)."""
    times = []
    for _ in range(2):
        begin = thread_time()
        found = [way(x) for way, x in zip(ways, inputs)]
        times.append(thread_time() - begin)
    return min(times), found
