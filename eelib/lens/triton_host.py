"""The readout on CUDA: one Triton pass over the vocabulary, no logits in memory; divergences in a second one.

Chunked torch (`readout`) is the fallback and means the same. Triton is imported at the first call, so it need not be
installed. With TRITON_INTERPRET=1, set before Triton is imported, the same code runs on the CPU, for tests.
"""

import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eelib.common.errors import InputError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WHOLE = ("final_rank", "reference_rank", "top_ids")  # int32; what else `read_rows` returns is float32
L2_STATES = 32 << 20  # bytes of states that programs running together may share: most of a Hopper's L2 cache


@dataclass(frozen=True)
class Tiles:
    """Shape of one program's work (rows x columns x depth of a matmul tile) and how Triton is to compile it."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3
    at_once: int = 1  # programs that one multiprocessor holds


INTERPRETED = Tiles(32, 256, 64)
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


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for the GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def supports(hidden: Tensor, weight: Tensor) -> bool:
    """Whether `read_rows` and `read_divergences` can take these: Triton there, one dtype, a CUDA device or the
    interpreter.
    """
    if importlib.util.find_spec("triton") is None or hidden.dtype != weight.dtype or hidden.dtype not in DTYPES:
        return False
    if interpreted():
        return not (hidden.is_cuda or weight.is_cuda)
    return (
        hidden.is_cuda
        and hidden.device == weight.device
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(hidden.device) >= (8, 0)
    )


@dataclass
class Head:
    """Output embeddings and what the model does to its scores: cap * tanh(after * (W h + head_bias) / cap) + bias."""

    weight: Tensor
    head_bias: Tensor | None
    bias: Tensor | None
    after: float
    cap: float

    def constants(self) -> dict[str, float]:
        """What is compiled into a kernel."""
        vocabulary, width = self.weight.shape
        return dict(vocabulary=vocabulary, width=width, after=self.after, cap=self.cap)


def contiguous(matrix: Tensor) -> Tensor:
    """A matrix as the kernels need it; the interpreter's matmul takes bfloat16 for integers, so there in float32."""
    matrix = matrix.detach().contiguous()
    return matrix.float() if interpreted() and matrix.dtype == torch.bfloat16 else matrix


def head_of(weight: Tensor, head_bias: Tensor | None, bias: Tensor | None, after: float, cap: float) -> Head:
    """A head with its biases in float32 on the weights' device; ValueError if one has another length."""

    def ready(name: str, value: Tensor | None) -> Tensor | None:
        if value is not None and value.numel() != weight.shape[0]:
            raise InputError(f"{name} has {value.numel()} values, but the vocabulary {weight.shape[0]} tokens")
        return None if value is None else value.detach().to(weight.device, torch.float32).flatten().contiguous()

    first, last = ready("head_bias", head_bias), ready("bias", bias)
    if last is not None and not cap:  # the same sum, but free: the matmul starts from it
        first, last = last / after if first is None else first + last / after, None
    return Head(contiguous(weight), first, last, float(after), float(cap))


@torch.no_grad()
def read_rows(
    hidden: Tensor,
    weight: Tensor,
    final_ids: Tensor,
    *,
    bias: Tensor | None = None,
    head_bias: Tensor | None = None,
    after: float = 1.0,
    cap: float = 0.0,
    k: int = 10,
    reference_ids: Tensor | None = None,
    tiles: Tiles | None = None,
) -> dict[str, Tensor]:
    """Readouts of `hidden` [n, hidden_size], states after the final norm, through `weight` [vocabulary, hidden_size].

    Logits are z = cap * tanh(after * (weight @ h + head_bias) / cap) + bias (cap 0: no tanh), summed in float32 and
    never rounded to the weights' dtype; -inf counts as float32's lowest value. Returns, on `hidden`'s device:
    float32 [n] log_normalizer, max, entropy (nats) and final_logit; int32 [n] final_rank (1: no logit is above the
    final token's); float32 [n, k] top_logits, falling, and int32 top_ids, the lower id first where logits are equal;
    with `reference_ids` [n] float32 reference_logit and int32 reference_rank, NaN and 0 for ids below 0. No logit is
    above log_normalizer. `final_ids` must lie in the vocabulary. `tiles` overrides the tuned tile shape. InputError if
    dtypes or widths differ, k is not in 1..vocabulary or `supports` says no.
    """
    head = head_of(weight, head_bias, bias, after, cap)
    check(hidden, weight)
    n, vocabulary = len(hidden), len(weight)
    if not 1 <= k <= vocabulary:
        raise InputError(f"k is {k}: 1 to {vocabulary}, the size of the vocabulary, is allowed")

    names = ["log_normalizer", "max", "entropy", "final_logit", "final_rank"]
    names += [] if reference_ids is None else ["reference_logit", "reference_rank"]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, (n,)) | dict.fromkeys(("top_logits", "top_ids"), (n, k))
    result = {
        name: torch.empty(shape, dtype=torch.int32 if name in WHOLE else torch.float32, device=hidden.device)
        for name, shape in shapes.items()
    }
    if n == 0:
        return result
    hidden = contiguous(hidden)
    final_ids = final_ids.to(hidden.device, torch.int32).contiguous()
    if reference_ids is not None:
        reference_ids = reference_ids.to(hidden.device, torch.int32).contiguous()
    with torch.cuda.device_of(hidden):  # Triton launches on the current device, which need not be the head's
        final_logit = result["final_logit"] = chosen(hidden, head, final_ids)
        reference_logit = None
        if reference_ids is not None:
            reference_logit = result["reference_logit"] = chosen(hidden, head, reference_ids)

        def pass_over(tiles: Tiles) -> list[Tensor]:
            return scan(hidden, head, final_ids, final_logit, reference_ids, reference_logit, k, tiles)

        tiles = tiles or tuned(hidden, head, reference_ids is not None, pass_over)
        merge(pass_over(tiles), result, final_ids, reference_ids, vocabulary)
    return result


@torch.no_grad()
def read_divergences(
    hidden: Tensor,
    weight: Tensor,
    log_normalizer: Tensor,
    hidden_last: Tensor,
    log_normalizer_last: Tensor,
    *,
    bias: Tensor | None = None,
    head_bias: Tensor | None = None,
    after: float = 1.0,
    cap: float = 0.0,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Divergences [n] in nats of the readouts of two sets of states [n, hidden_size]: Jensen-Shannon, 0 to ln 2, and
    Kullback-Leibler of the last one from the first, at least 0.

    The log-normalizers [n] are those of `read_rows`; the rest is as there. Both matmuls are done again, side by side.
    """
    from eelib.lens import triton_kernels

    head = head_of(weight, head_bias, bias, after, cap)
    check(hidden, weight)
    check(hidden_last, weight)
    n = len(hidden)
    if n == 0:
        return torch.zeros(0, device=hidden.device), torch.zeros(0, device=hidden.device)
    tiles = tiles or (INTERPRETED if interpreted() else PAIRED_FLOAT32 if hidden.dtype == torch.float32 else PAIRED)
    hidden, hidden_last = contiguous(hidden), contiguous(hidden_last)
    grid, layout = plan(tiles, head.weight, hidden, hidden_last)
    js, kl = torch.empty(2, layout["splits"], n, dtype=torch.float32, device=hidden.device)
    with torch.cuda.device_of(hidden):
        triton_kernels.divergence_kernel[grid](
            blocked(hidden, tiles.rows, layout),
            blocked(head.weight, tiles.columns, layout),
            blocked(hidden_last, tiles.rows, layout),
            log_normalizer.float().contiguous(),
            log_normalizer_last.float().contiguous(),
            head.head_bias,
            head.bias,
            js,
            kl,
            n,
            **layout,
            **head.constants(),
        )
    return js.sum(0).clamp(0.0, math.log(2.0)), kl.sum(0).clamp(min=0.0)


def check(hidden: Tensor, weight: Tensor) -> None:
    """ValueError, in one line, if the kernels can't take these."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise InputError(
            f"states {tuple(hidden.shape)} and weights {tuple(weight.shape)} must be [n, hidden_size] and "
            "[vocab_size, hidden_size]"
        )
    if not supports(hidden, weight):
        raise InputError(
            f"the kernel can't read {hidden.dtype} states on {hidden.device} with {weight.dtype} weights "
            f"on {weight.device}: it needs Triton, one device of CUDA 8.0 or newer, and one dtype of "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
        )


def blocked(matrix: Tensor, rows: int, layout: dict[str, int]) -> object:
    """A matrix as the kernels load it, [rows, depth] at a time: by a tensor descriptor if TMA, else by pointers."""
    if not layout["TMA"]:
        return matrix
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [rows, layout["DEPTH"]])


def aligned(matrix: Tensor) -> bool:
    """Whether the bulk copy engine can load it: each row starts at a multiple of 16 bytes."""
    return matrix.shape[1] * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0


def plan(tiles: Tiles, weight: Tensor, hidden: Tensor, *others: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """Grid and layout arguments: as many splits of the vocabulary as fill the multiprocessors best."""
    blocks, columns = math.ceil(len(hidden) / tiles.rows), math.ceil(len(weight) / tiles.columns)
    row_bytes = hidden.shape[1] * hidden.element_size()
    group = max(1, min(blocks, L2_STATES // (tiles.rows * row_bytes)))
    units = 3 if interpreted() else torch.cuda.get_device_properties(hidden.device).multi_processor_count
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


def chosen(hidden: Tensor, head: Head, ids: Tensor) -> Tensor:
    """The logit of one token per row [n]; NaN where the id is outside the vocabulary."""
    from eelib.lens import triton_kernels

    rows, depth = (32, 64) if interpreted() else (64, 32 if hidden.dtype == torch.float32 else 64)
    logits = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    triton_kernels.chosen_kernel[(math.ceil(len(hidden) / rows),)](
        hidden,
        head.weight,
        ids,
        logits,
        head.head_bias,
        head.bias,
        len(hidden),
        **head.constants(),
        ROWS=rows,
        DEPTH=depth,
        num_warps=4,
        num_stages=3,
    )
    return logits


def scan(
    hidden: Tensor,
    head: Head,
    final_ids: Tensor,
    final_logit: Tensor,
    reference_ids: Tensor | None,
    reference_logit: Tensor | None,
    k: int,
    tiles: Tiles,
) -> list[Tensor]:
    """Per split and row: largest logit, sum of powers, their moment, counts above the final and above the reference's
    token (not filled where there is none); top-k logits, ids.
    """
    from eelib.lens import triton_kernels

    grid, layout = plan(tiles, head.weight, hidden)
    shape, device = (layout["splits"], len(hidden)), hidden.device
    parts = [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(3)]
    parts += [torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2)]
    parts += [torch.empty(*shape, k, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32)]
    triton_kernels.scan_kernel[grid](
        blocked(hidden, tiles.rows, layout),
        blocked(head.weight, tiles.columns, layout),
        final_ids,
        final_logit,
        reference_ids,
        reference_logit,
        head.head_bias,
        head.bias,
        *parts,
        len(hidden),
        k=k,
        SLOTS=power_of_2(k),
        REFERENCE=reference_logit is not None,
        **layout,
        **head.constants(),
    )
    return parts


def merge(
    parts: list[Tensor], result: dict[str, Tensor], final_ids: Tensor, reference_ids: Tensor | None, vocabulary: int
) -> None:
    """Put the splits together into `result`."""
    from eelib.lens import triton_kernels

    splits, n, k = parts[-1].shape
    slots, lanes = power_of_2(k), power_of_2(splits)
    rows = max(1, min(16, 4096 // (slots * lanes)))
    triton_kernels.merge_kernel[(math.ceil(n / rows),)](
        *parts,
        final_ids,
        result["final_logit"],
        reference_ids,
        result.get("reference_logit"),
        result["log_normalizer"],
        result["max"],
        result["entropy"],
        result["final_rank"],
        result.get("reference_rank"),
        result["top_logits"],
        result["top_ids"],
        n,
        splits,
        math.log(vocabulary),
        k=k,
        SLOTS=slots,
        SPLITS=lanes,
        REFERENCE=reference_ids is not None,
        ROWS=rows,
        num_warps=4,
    )


def power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def tuned(hidden: Tensor, head: Head, reference: bool, launch: Callable[[Tiles], object]) -> Tiles:
    """The tile shape that ran fastest here for inputs of this size, tried at the first call and remembered."""
    if interpreted():
        return INTERPRETED
    if hidden.dtype == torch.float32:
        return FLOAT32
    few = len(hidden) <= 64
    key = (
        torch.cuda.get_device_name(hidden.device),
        hidden.dtype,
        power_of_2(len(hidden)),
        *head.constants().values(),
        head.head_bias is None,
        head.bias is None,
        reference,
    )
    if key not in _fastest:
        from triton.runtime.errors import OutOfResources

        times: dict[Tiles, float] = {}
        for tiles in FEW_ROWS if few else MANY_ROWS:
            try:
                times[tiles] = seconds(lambda: launch(tiles))
            except OutOfResources:  # a smaller card than a Hopper
                continue
        if not times:
            raise InputError(f"no tile shape of the kernel fits {key[0]}")
        _fastest[key] = min(times, key=times.__getitem__)
    return _fastest[key]


def seconds(call: Callable[[], object], repeats: int = 3) -> float:
    """Least seconds of a few calls on the current CUDA device, after one that is not counted."""
    call()
    least = math.inf
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        least = min(least, start.elapsed_time(end) / 1000)
    return least
