"""How near to the bare matmul is the readout's CUDA kernel? `python -m checks.kernel` on a machine with a GPU.

First the kernel's readouts of some rows are checked against float64; then it is timed beside the bare matmul of the
same shape (whose rate is the ceiling), chunked torch, torch.compile of that, and Liger's fused linear cross-entropy
where liger-kernel is installed (forward only: its loss alone, no top-k, rank or entropy). Times are medians of
CUDA-event timings, the ways taking turns. Writes data/checks/kernel.json and ends with status 1 where the kernel's rate
is below its goal; without a GPU it says so, writes nothing and ends with status 2.
"""

import argparse
import importlib.util
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from checks.report import headed, write_report
from eelib.common.files import data_folder
from eelib.common.machine import host
from eelib.lens import triton_host as kernel

OUT = data_folder("checks", "kernel.json")
GOAL = 0.85  # of the matmul's rate
TOP = 10
SAMPLE = 48  # rows compared with float64
CHUNK = 1 << 28  # logits that chunked torch holds at a time: 1 GiB in float32


def main() -> None:
    """Check, time and write; exits with one line if a readout is wrong."""
    asked = arguments()
    if not torch.cuda.is_available():
        print(
            "No GPU here, so there is nothing to measure and nothing was written. The kernel's results are tested "
            "without one: python -m pytest tests/lens/test_triton_kernels.py",
            file=sys.stderr,
        )
        sys.exit(2)
    head = headed("kernel", "triton", "liger-kernel")
    rows = [
        measure(count, asked.width, vocabulary, asked.repeats)
        for vocabulary in asked.vocabulary
        for count in asked.rows
    ]
    head |= {"machine": machine(), "versions": head["versions"] | {"cuda": torch.version.cuda}}
    write_report(asked.output, head, goal=GOAL, repeats=asked.repeats, rows=rows)
    print(f"wrote {asked.output}")
    if slow := [row for row in rows if not row["reached"]]:
        sys.exit(f"{len(slow)} of {len(rows)} shapes are below {GOAL} of the matmul's rate")


def arguments() -> argparse.Namespace:
    """Shapes and repeats."""
    parser = argparse.ArgumentParser(
        prog="python -m checks.kernel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=4096, help="width of the states")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_000, 131_072], help="sizes of the vocabulary")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 4096, 16_384], help="numbers of states")
    parser.add_argument("--repeats", type=int, default=15, help="timings of each way")
    parser.add_argument("--output", type=Path, default=OUT, help="the JSON file to write")
    return parser.parse_args()


def measure(count: int, width: int, vocabulary: int, repeats: int) -> dict:
    """All ways at one shape, in bfloat16."""
    torch.manual_seed(0)
    hidden = torch.randn(count, width, device="cuda").bfloat16()
    weight = (torch.randn(vocabulary, width, device="cuda") * 3 / width**0.5).bfloat16()
    final = torch.randint(0, vocabulary, (count,), device="cuda")
    worst = compare(hidden, weight, final)
    print(
        f"{count} rows, width {width}, vocabulary {vocabulary}: "
        + ", ".join(f"{name} within {value:.1e}" for name, value in worst.items())
    )
    scores = torch.empty(count, vocabulary, dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(chunk, dynamic=False)
    ways: dict[str, Callable[[], object]] = {
        "matmul": lambda: torch.matmul(hidden, weight.T, out=scores),
        "kernel": lambda: kernel.read_rows(hidden, weight, final, k=TOP),
        "chunked torch": lambda: chunked(chunk, hidden, weight, final),
        "torch.compile": lambda: chunked(compiled, hidden, weight, final),
    }
    liger = liger_loss()
    if liger is not None:
        ways["Liger"] = lambda: liger(weight, hidden, final)
    seconds = timed(ways, repeats)
    norm = kernel.read_rows(hidden, weight, final)["log_normalizer"]
    seconds |= timed(
        {"kernel, JS pass": lambda: kernel.read_divergences(hidden, weight, norm, hidden.flip(0), norm.flip(0))},
        repeats,
    )
    work = 2 * count * width * vocabulary
    rates = {name: work / value / 1e12 for name, value in seconds.items()}
    share = {name: rate / rates["matmul"] for name, rate in rates.items()}
    for name in seconds:
        print(f"  {name:16} {seconds[name] * 1e3:9.3f} ms {rates[name]:7.1f} TFLOP/s {share[name]:6.3f} of the matmul")
    return {
        "rows": count,
        "width": width,
        "vocabulary": vocabulary,
        "dtype": "bfloat16",
        "worst_error": worst,
        "seconds": seconds,
        "teraflops": rates,
        "share_of_matmul": share,
        "reached": share["kernel"] >= GOAL,
        "peak_mb": peaks(ways),
        "tiles": tile_times(hidden, weight, final),
    }


def compare(hidden: Tensor, weight: Tensor, final: Tensor) -> dict[str, float]:
    """Largest errors of the kernel's readouts on SAMPLE rows; exits with one line where one is out of bounds."""
    got = {name: value[:SAMPLE] for name, value in kernel.read_rows(hidden, weight, final, k=TOP).items()}
    z = hidden[:SAMPLE].double() @ weight.double().T
    logs = z.log_softmax(-1)
    own = z.gather(1, final[:SAMPLE, None])
    near = 1e-4
    low, high = ((z > own + shift).sum(-1) + 1 for shift in (near, -near))
    errors = {
        "log_normalizer": got["log_normalizer"] - z.logsumexp(-1),
        "entropy": got["entropy"] + (logs.exp() * logs).sum(-1),
        "final_logit": got["final_logit"] - own[:, 0],
        "top_logits": got["top_logits"] - z.topk(TOP, dim=-1).values,
        "logits of top_ids": got["top_logits"] - z.gather(1, got["top_ids"].long()),
    }
    worst = {name: float(value.double().abs().max()) for name, value in errors.items()}
    wrong = [name for name, value in worst.items() if not value < 1e-3]
    if not bool(((low <= got["final_rank"]) & (got["final_rank"] <= high)).all()):
        wrong.append("final_rank")
    if bool((got["max"] > got["log_normalizer"]).any()):
        wrong.append("log-probabilities above 0")
    top = kernel.read_rows(hidden, weight, final, k=1)["top_ids"][:, 0]
    if not bool((kernel.read_rows(hidden, weight, top)["final_rank"] == 1).all()):
        wrong.append("the rank of the top token")
    if wrong:
        sys.exit(
            f"{tuple(hidden.shape)} states, vocabulary {len(weight)}: {', '.join(wrong)} differ from float64; "
            "nothing was written"
        )
    return worst


def chunk(hidden: Tensor, weight: Tensor, final: Tensor) -> tuple[Tensor, ...]:
    """The same readouts of a few rows with plain torch, logits in memory."""
    z = (hidden @ weight.T).float()
    norm = z.logsumexp(-1)
    logs = z - norm[:, None]
    entropy = -(logs.exp() * logs).sum(-1)
    top, ids = z.topk(TOP, dim=-1)
    own = z.gather(1, final[:, None])
    return norm, entropy, top, ids, own[:, 0], (z > own).sum(-1) + 1


def chunked(read: Callable, hidden: Tensor, weight: Tensor, final: Tensor) -> list[Tensor]:
    """`chunk` over all rows, as many at a time as CHUNK logits allow."""
    rows = min(len(hidden), max(1, CHUNK // len(weight)))
    parts = [read(h, weight, f) for h, f in zip(hidden.split(rows), final.split(rows))]
    return [torch.cat(part) for part in zip(*parts)]


def liger_loss() -> Callable | None:
    """Liger's fused linear cross-entropy, or None (said once) where it is not installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        print("  liger-kernel is not installed, so its loss is not measured")
        return None
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()


@torch.no_grad()
def timed(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each way; one call of each is not counted, then they take turns."""
    for way in ways.values():
        way()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            way()
            end.record()
            torch.cuda.synchronize()
            taken[name].append(start.elapsed_time(end) / 1000)
    return {name: statistics.median(values) for name, values in taken.items()}


@torch.no_grad()
def peaks(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Megabytes that each way holds beyond its inputs."""
    result = {}
    for name, way in ways.items():
        if name != "matmul":  # its output was made beforehand
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            way()
            torch.cuda.synchronize()
            result[name] = (torch.cuda.max_memory_allocated() - before) / 1e6
    return result


def tile_times(hidden: Tensor, weight: Tensor, final: Tensor) -> list[dict]:
    """Every tile shape that fits, with its time, the fastest first."""
    from triton.runtime.errors import OutOfResources

    result = []
    for tiles in (*kernel.MANY_ROWS, *kernel.FEW_ROWS):
        try:
            spent = timed({"": lambda: kernel.read_rows(hidden, weight, final, k=TOP, tiles=tiles)}, 3)[""]
        except OutOfResources:
            spent = math.inf
        if math.isfinite(spent):
            result.append({**asdict(tiles), "seconds": spent})
    return sorted(result, key=lambda row: row["seconds"])


def machine() -> dict:
    """GPU, its memory and multiprocessors, and the host."""
    gpu = torch.cuda.get_device_properties(0)
    memory = round(gpu.total_memory / 2**30, 1)
    return {"gpu": gpu.name, "gpu_memory_gib": memory, "multiprocessors": gpu.multi_processor_count, **host()}


if __name__ == "__main__":
    main()
