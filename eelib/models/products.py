"""Products of few rows on a CPU: each weight is read once for all rows, in bfloat16 where that is exact.

Decoding multiplies one row, or a few, by every weight of a network, so it takes as long as reading the weights. Sums
are float32. Where our products of many rows are also faster than torch's, they are used for many rows, too. The draft
"int8" uses weights that are rounded to 8 bits, half as many bytes as bfloat16.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from threading import Lock, local
from time import thread_time
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from torch import Tensor, nn

from eelib.common.errors import SelfCheckError
from eelib.common.machine import compiled
from eelib.common.tolerances import close

LANES = 16  # partial sums of a product; they are added up in the same order whatever rows are beside it
# 32 registers of 16 numbers, else 16 of 8; by numba's own word for the processor, by which it stores compiled code
LARGE = "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2]
TILE, WIDE = 4, 4 if LARGE else 1  # rows, and rows of weights, that are multiplied with each other at once
BLOCK = 64  # outputs whose weights stay near while all rows are multiplied by them
AHEAD, LINE = 4096, 64  # bytes: packed weights are fetched so far ahead of their use, a line of the cache at once
NEAR = 1024  # longest row of which TILE stay near; of longer ones, two are multiplied at once
ROWS = (1, 3, 6, 10, 16, 32, 64, 128, 256)  # numbers of rows at which our products are timed against torch's
SAMPLE, FULL = 2**24, 16  # weights with which they are timed: more than a processor keeps near; of more rows, fewer
NO_LIMIT = 2**31  # rows, where ours take less time at all of these numbers
SMALLEST = 2**22  # weights of a network below which a timing says more of the clock than of the products
LEAST = 2**16  # weights of a layer; with fewer, the call itself takes longer than what ours could save
OURS = (torch.float32, torch.bfloat16)
GAIN, RUNS = 0.9, 5  # share of torch's time that ours may take, the shortest of so many runs of each
ONE_CALL = Lock()  # numba's simplest threads serve one caller at a time
CHOSEN = local()  # `cores`: how many of its threads numba was last made to use here


def typed_dots(
    _typing: Any, rows: Any, columns: Any, x: Any, i: Any, w: Any, outputs: Any, size: Any, kind: Any, j: Any, y: Any
) -> Any:
    """y[i + r, j + c] = x[i + r] . w[j + c] for r < rows and c < columns, which are literals.

    x [rows, size], w [outputs, size] and y [rows, outputs] are addresses. x and y hold float32. w holds numbers of the
    type of `kind`: float32, or, as `packed` makes them, uint16 (upper halves of float32) or int8.
    """

    def generate(context: Any, build: Any, signature: Any, given: Any) -> Any:
        _, _, x, i, w, outputs, size, _, j, y = given
        number, bits, index = ir.FloatType(), ir.IntType(32), ir.IntType(64)
        lanes, part = ir.VectorType(number, LANES), number if kind == types.float32 else ir.IntType(kind.bitwidth)
        x, y = (build.inttoptr(address, number.as_pointer()) for address in (x, y))
        w = build.inttoptr(w, part.as_pointer())
        at = [build.add(i, index(row)) for row in range(rows.literal_value)]
        across = [build.add(j, index(column)) for column in range(columns.literal_value)]

        def load(start: Any, row: Any, k: Any, kind: Any, size_of: int) -> Any:
            place = build.gep(start, [build.add(build.mul(row, size), k)])
            return build.load(build.bitcast(place, ir.VectorType(kind, LANES).as_pointer()), align=size_of)

        def weights(c: int, k: Any) -> Any:
            if kind == types.float32:
                return load(w, across[c], k, number, 4)
            at = k  # of a group, the lanes lie one after the other
            if len(across) > 1:
                at = build.add(build.mul(k, index(WIDE)), index(c * LANES))
            packed = load(w, j, at, part, kind.bitwidth // 8)
            if kind == types.int8:
                return build.sitofp(build.sext(packed, ir.VectorType(bits, LANES)), lanes)
            wide = build.zext(packed, ir.VectorType(bits, LANES))
            return build.bitcast(build.shl(wide, ir.Constant(wide.type, [16] * LANES)), lanes)

        def fetch(k: Any) -> None:
            group = build.add(build.mul(j, size), build.mul(k, index(len(across))))
            for start in range(AHEAD, AHEAD + len(across) * LANES * kind.bitwidth // 8, LINE):
                place = build.gep(w, [build.add(group, index(start * 8 // kind.bitwidth))])
                build.call(prefetch, [build.bitcast(place, ir.IntType(8).as_pointer()), bits(0), bits(3), bits(1)])

        form = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), bits, bits, bits])
        prefetch = cgutils.get_or_insert_function(build.module, form, "llvm.prefetch.p0")
        zeros = ir.Constant(lanes, [0.0] * LANES)
        sums = [[cgutils.alloca_once_value(build, zeros) for _ in across] for _ in at]
        with cgutils.for_range_slice(build, index(0), size, index(LANES), index) as (k, _):
            near = [load(x, row, k, number, 4) for row in at]
            if kind != types.float32:  # packed, so that they lie one after the other
                fetch(k)
            for c in range(len(across)):
                weight = weights(c, k)
                for r, own in enumerate(near):
                    # "contract": rounded once where the processor multiplies and adds in one instruction
                    product = build.fmul(own, weight, flags=("contract",))
                    build.store(build.fadd(product, build.load(sums[r][c]), flags=("contract",)), sums[r][c])
        for r, row in enumerate(at):
            for c, column in enumerate(across):
                value, count = build.load(sums[r][c]), LANES
                while count > 1:  # add the upper half of the lanes to the lower one
                    count //= 2
                    parts = [list(range(count)), list(range(count, 2 * count))]
                    masks = [ir.Constant(ir.VectorType(bits, count), part) for part in parts]
                    value = build.fadd(*(build.shuffle_vector(value, value, mask) for mask in masks))
                place = build.gep(y, [build.add(build.mul(row, outputs), column)])
                build.store(build.extract_element(value, bits(0)), place)
        return context.get_dummy_value()

    whole = types.intp
    return types.void(rows, columns, whole, whole, whole, whole, whole, kind, whole, whole), generate


dots: Any = intrinsic(prefer_literal=True)(typed_dots)


@compiled(nogil=True)
def some_products(x: int, rows: int, w: int, outputs: int, size: int, kind: Any, y: int, first: int, last: int) -> None:
    """Columns first..last of y [rows, outputs] = x [rows, size] w [outputs, size]^T, all given as addresses.

    `size` is a multiple of LANES, `first` of WIDE; `kind` is a number of w's type.
    """
    whole, even, near = rows // TILE * TILE, first + (last - first) // WIDE * WIDE, size <= NEAR
    for begin in range(first, even, BLOCK):
        end = min(begin + BLOCK, even)
        for i in range(0, whole, TILE if near else 2):
            for j in range(begin, end, WIDE):
                if near:
                    dots(TILE, WIDE, x, i, w, outputs, size, kind, j, y)
                else:
                    dots(2, WIDE, x, i, w, outputs, size, kind, j, y)
        for j in range(begin, end, WIDE):
            if rows - whole == 1:
                dots(1, WIDE, x, whole, w, outputs, size, kind, j, y)
            elif rows - whole == 2:
                dots(2, WIDE, x, whole, w, outputs, size, kind, j, y)
            elif rows - whole == 3:
                dots(3, WIDE, x, whole, w, outputs, size, kind, j, y)
    for j in range(even, last):
        for i in range(rows):
            dots(1, 1, x, i, w, outputs, size, kind, j, y)


@compiled(nogil=True, parallel=True)
def shared_products(x: int, rows: int, layers: np.ndarray, kind: Any, y: int, cores: int) -> None:
    """`products` on several cores, each with its share of every matrix."""
    for core in numba.prange(cores):
        out = y
        for i in range(len(layers)):
            w, n, size = layers[i, 0], layers[i, 1], layers[i, 2]
            groups, last = n // WIDE, n if core + 1 == cores else n // WIDE * (core + 1) // cores * WIDE
            some_products(x, rows, w, n, size, kind, out, groups * core // cores * WIDE, last)
            out += 4 * rows * n


@compiled(nogil=True)
def products(x: int, rows: int, layers: np.ndarray, kind: Any, y: int, cores: int) -> None:
    """Products of x [rows, size] with several matrices, one after the other from the address y on.

    Each row of `layers` describes a matrix [n, size]: its address, n and size.
    """
    if cores > 1:
        shared_products(x, rows, layers, kind, y, cores)
    else:
        for i in range(len(layers)):
            some_products(x, rows, layers[i, 0], layers[i, 1], layers[i, 2], kind, y, 0, layers[i, 1])
            y += 4 * rows * layers[i, 1]


def on_all_cores(kernel: Callable[..., None], *args: Any) -> None:
    """Call compiled code, whose last argument is the number of cores, with as many as torch uses."""
    cores = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    if getattr(CHOSEN, "cores", 0) != cores:  # to ask numba takes as long as a small product
        # This also starts numba's threads, which one core needs, too: where two processes compiled this code together,
        # numba may have stored it without a note that it needs threads, and it crashes without them.
        numba.set_num_threads(cores)
        CHOSEN.cores = cores
    with ONE_CALL if cores > 1 else nullcontext():
        kernel(*args, cores)


def fits_bfloat16(weight: Tensor) -> bool:
    """Whether every number is a bfloat16 one, as in most published checkpoints."""
    return all(torch.equal(part.bfloat16().to(part.dtype), part) for part in weight.detach().split(4096))


def packed(numbers: np.ndarray) -> np.ndarray:
    """The numbers [n, k] reordered in groups of WIDE rows: LANES numbers of each row, then the next LANES of each."""
    n, k = numbers.shape
    whole = n // WIDE * WIDE
    if k % LANES or WIDE == 1:
        return numbers
    groups = numbers[:whole].reshape(whole // WIDE, WIDE, k // LANES, LANES).swapaxes(1, 2)
    return np.concatenate([groups.reshape(whole, k), numbers[whole:]])


class Weights:
    """The numbers of a linear layer [n, size] as the compiled code reads them.

    Attributes:
        about: [1, 3], their address, n and size.
        kind: a number of their type.
    """

    def __init__(self, numbers: np.ndarray):
        self.numbers, self.kind = numbers, numbers.dtype.type(0)
        self.about = np.array([[numbers.ctypes.data, *numbers.shape]], np.int64)

    def __reduce__(self) -> tuple:
        """A copy has its own numbers, at another address."""
        return Weights, (self.numbers,)


class FewRows:
    """The forward of one linear layer: products of up to `limit` rows are ours, all others torch's.

    torch's are also used where gradients are enabled, and for good once the layer's weights have changed. A change
    through `.data`, which torch does not count, is seen by the first and the last numbers only.
    """

    scales: Tensor | None = None

    def __init__(self, layer: nn.Linear, limit: int):
        self.layer, self.size, self.limit = weakref.ref(layer), layer.in_features, limit  # no circle of references
        self.weight, self.version, self.dtype = layer.weight, layer.weight._version, layer.weight.dtype
        own = torch.uint16 if self.dtype is torch.bfloat16 else torch.float32
        whole = layer.weight.detach().view(own).numpy()
        self.address, self.places = layer.weight.data_ptr(), (whole[0, :LANES], whole[-1, -LANES:])
        self.numbers = [place.tobytes() for place in self.places]
        if fits_bfloat16(layer.weight):
            whole = packed(layer.weight.detach().bfloat16().view(torch.uint16).numpy())
        self.weights = Weights(whole)

    def __reduce__(self) -> tuple:
        """A copy of the layer gets torch's forward, since changes of the copy's weights are not seen here."""
        return partial, (nn.Linear.forward, self.layer())

    def __call__(self, input: Tensor) -> Tensor:
        """Products [..., n] of input [..., k]."""
        layer, size = self.layer(), self.size
        assert layer is not None
        if not self.is_of(layer):
            vars(layer).pop("forward", None)
            return layer.forward(input)
        if not (0 < input.numel() <= self.limit * size and input.shape[-1] == size and is_plain(input, self.dtype)):
            return nn.Linear.forward(layer, input)
        y = multiply(input, self.weights)
        return (y if layer.bias is None else y.add_(layer.bias)).to(self.dtype)

    def is_of(self, layer: nn.Linear) -> bool:
        """Whether the layer's weights are those whose numbers this holds."""
        weight = layer._parameters.get("weight")
        return (
            weight is self.weight
            and weight._version == self.version
            and weight.data_ptr() == self.address
            # peft adds to all of a weight through .data
            and [place.tobytes() for place in self.places] == self.numbers
        )


class Int8Products:
    """The forward of a linear layer on the CPU whose weights are rounded to 8 bits, with one scale for each output."""

    limit = NO_LIMIT

    def __init__(self, layer: nn.Linear):
        weight = layer.weight.detach()
        self.scales = weight.abs().amax(dim=1).clamp_min(1e-30) / 127
        self.weights = Weights(packed((weight / self.scales[:, None]).round().to(torch.int8).numpy()))
        self.bias = layer.bias

    def __call__(self, input: Tensor) -> Tensor:
        """Products [..., n] of input [..., k], float32."""
        y = multiply(input, self.weights).mul_(self.scales)
        return y if self.bias is None else y.add_(self.bias)


def is_plain(input: Tensor, dtype: torch.dtype) -> bool:
    """Whether an input is a tensor of a dtype on the CPU, and nothing asks for gradients, autocast or torch.compile."""
    own = type(input) is Tensor and input.dtype is dtype and input.is_cpu
    return own and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling())


def multiply(input: Tensor, weights: Weights) -> Tensor:
    """Products [..., n], float32, of input [..., size] and weights [n, size]."""
    x = input.float().contiguous()
    outputs, size = weights.numbers.shape
    assert x.shape[-1] == size  # the compiled code reads from addresses
    y = x.new_empty(*x.shape[:-1], outputs)
    on_all_cores(products, x.data_ptr(), x.numel() // size, weights.about, weights.kind, y.data_ptr())
    return y


@torch.no_grad()
def use_fast_products(network: nn.Module, like: nn.Module | None = None) -> None:
    """Use our products of few rows in a network's linear layers, on the CPU in float32 or bfloat16, if they are faster.

    Args:
        network: any module.
        like: a network whose products were timed before; `network` takes its result.

    Raises:
        SelfCheckError: our products are not torch's.
    """
    layers = fit_layers(network)
    if like is not None:
        ways = (vars(module).get("forward") for module in like.modules())
        limit = next((way.limit for way in ways if isinstance(way, FewRows)), 0)
    else:
        large = sum(layer.weight.numel() for layer in layers) >= SMALLEST
        limit = rows_that_gain(layers) if large and layers else 0
    for layer in layers if limit else ():
        vars(layer)["forward"] = FewRows(layer, limit)


def use_int8_products(network: nn.Module) -> int:
    """Use weights rounded to 8 bits in the products of a network's linear layers.

    Args:
        network: must share no linear layer with a network that is to stay unchanged. Its own weights are not changed.

    Returns:
        The number of layers changed; the others are on another device, of another type, or too small to gain time.
    """
    layers = fit_layers(network)
    for layer in layers:
        vars(layer)["forward"] = Int8Products(layer)
    return len(layers)


def fit_layers(network: nn.Module) -> list[nn.Linear]:
    """The linear layers that are torch's own, on the CPU, in a dtype of OURS, large, with rows of whole LANES.

    Modules of the network that are copies of modules that used ours use their own forward again.
    """
    for module in network.modules():
        way = vars(module).get("forward")
        if isinstance(way, partial) and way.func is type(module).forward:
            vars(module).pop("forward")
    layers = [layer for layer in network.modules() if type(layer) is nn.Linear and "forward" not in vars(layer)]
    return [layer for layer in layers if is_fit(layer.weight)]


def is_fit(weight: Tensor) -> bool:
    """Whether weights are those that our products take."""
    usual = weight.is_contiguous() and weight.dtype in OURS and weight.device.type == "cpu"
    large = weight.numel() > LEAST and weight.shape[1] % LANES == 0
    return usual and large and not weight.is_inference()  # changes of what is made in inference mode can't be seen


def rows_that_gain(layers: list[nn.Linear]) -> int:
    """The largest of `ROWS` up to which our products of some of the layers are faster than torch's; NO_LIMIT for all.

    Measured is the processor time of one core, which other work on the machine hardly changes.
    """
    sizes = [0, *accumulate(layer.weight.numel() for layer in layers)]
    sample = [layer for layer, size in zip(layers, sizes) if size < SAMPLE]
    every, torchs = [FewRows(layer, ROWS[-1]) for layer in sample], [layer.forward for layer in sample]
    gained, cores, drawn = 0, torch.get_num_threads(), torch.Generator().manual_seed(0)
    setting = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]  # the module replaces itself
    rounds = setting in ("tf32", "bf16")  # torch's may round factors
    for rows in ROWS:
        ours = [way for way, size in zip(every, sizes) if size < SAMPLE * min(1.0, FULL / rows)]
        inputs = [torch.randn(rows, way.size, generator=drawn).to(way.dtype) for way in ours]
        for way, theirs, x in zip(ours, torchs, inputs):
            if not close(way(x).bfloat16() if rounds else way(x), theirs(x)):
                raise SelfCheckError(f"our products of {rows} rows are not torch's")
        torch.set_num_threads(1)
        try:
            times = [(seconds(ours, inputs), seconds(torchs, inputs)) for _ in range(RUNS)]  # in turn
        finally:
            torch.set_num_threads(cores)
        took, torch_took = map(min, zip(*times))
        if took > GAIN * torch_took:
            break
        gained = rows if rows < ROWS[-1] else NO_LIMIT
    return gained


def seconds(ways: Sequence[Callable[[Tensor], Tensor]], inputs: list[Tensor]) -> float:
    """Processor seconds of this thread for all products."""
    begin = thread_time()
    for way, x in zip(ways, inputs):
        way(x)
    return thread_time() - begin
