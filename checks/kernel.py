"""How near the readout's CUDA kernel is to the bare matmul, on a machine with a GPU.

The kernel's readouts of some rows are checked against float64; then it is timed beside the bare matmul of that shape,
whose rate is the ceiling, chunked torch, and torch.compile of that. Times are medians, the ways taking turns.
"""

import importlib.util
import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from checks.report import Goal, finish, goal, headed, options

if importlib.util.find_spec("triton"):
    from eelib.lens import triton_readout as kernel

LEAST = 0.85  # of the matmul's rate
ROWS, WIDTH, VOCABULARIES, REPEATS = (64, 4096, 16_384), 4096, (32_000, 131_072), 15
TOP = 10
SAMPLE = 48  # rows compared with float64
CHUNK = 1 << 28  # logits that chunked torch holds at a time: 1 GiB in float32
MOST_ERROR = 1e-3  # of what is compared with float64


def compare(hidden: Tensor, weight: Tensor, final: Tensor) -> dict[str, float]:
    """Largest errors of the kernel's readouts on SAMPLE rows; exits with one line where one is out of bounds."""
    some = torch.linspace(0, len(hidden) - 1, SAMPLE, device=hidden.device).long()  # of all the kernel's tiles
    found = kernel.read_rows(hidden, kernel.Projection(weight), final, k=TOP)
    got = {name: value[some] for name, value in found.items()}
    z = hidden[some].double() @ weight.double().T
    logs = z.log_softmax(-1)
    errors = {
        "log_normalizer": got["log_normalizer"] - z.logsumexp(-1),
        "entropy": got["entropy"] + (logs.exp() * logs).sum(-1),
        "final_logit": got["final_logit"] - z.gather(1, final[some, None])[:, 0],
        "top_logits": got["top_logits"] - z.topk(TOP, dim=-1).values,
        "logits of top_ids": got["top_logits"] - z.gather(1, got["top_ids"].long()),
    }
    worst = {name: float(value.double().abs().max()) for name, value in errors.items()}
    if wrong := [name for name, error in worst.items() if not error < MOST_ERROR]:
        shape = f"{tuple(hidden.shape)} states, vocabulary {len(weight)}"
        sys.exit(f"{shape}: {', '.join(wrong)} differ from float64; nothing was written")
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


@torch.no_grad()
def timed(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each way; one call of each is not counted, then they take turns."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(REPEATS + 1):
        for name, way in ways.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            way()
            end.record()
            torch.cuda.synchronize()
            if turn:
                taken[name].append(start.elapsed_time(end) / 1000)
    return {name: statistics.median(values) for name, values in taken.items()}


def measure(count: int, vocabulary: int) -> dict:
    """All ways at one shape, in bfloat16."""
    torch.manual_seed(0)
    hidden = torch.randn(count, WIDTH, device="cuda").bfloat16()
    weight = (torch.randn(vocabulary, WIDTH, device="cuda") * 3 / WIDTH**0.5).bfloat16()
    final = torch.randint(0, vocabulary, (count,), device="cuda")
    worst = compare(hidden, weight, final)
    scores = torch.empty(count, vocabulary, dtype=torch.bfloat16, device="cuda")
    compiled, head = torch.compile(chunk, dynamic=False), kernel.Projection(weight)
    ways: dict[str, Callable[[], object]] = {
        "matmul": lambda: torch.matmul(hidden, weight.T, out=scores),
        "kernel": lambda: kernel.read_rows(hidden, head, final, k=TOP),
        "chunked torch": lambda: chunked(chunk, hidden, weight, final),
        "torch.compile": lambda: chunked(compiled, hidden, weight, final),
    }
    seconds = timed(ways)
    rates = {name: 2e-12 * count * WIDTH * vocabulary / value for name, value in seconds.items()}
    share = {name: rate / rates["matmul"] for name, rate in rates.items()}
    print(f"{count} rows, width {WIDTH}, vocabulary {vocabulary}: {share}", flush=True)
    shape = {"rows": count, "width": WIDTH, "vocabulary": vocabulary, "dtype": "bfloat16"}
    return shape | {"worst_error": worst, "seconds": seconds, "teraflops": rates, "share_of_matmul": share}


def goals(rows: list[dict]) -> list[Goal]:
    found = []
    for row in rows:
        shape = f"{row['rows']:,} rows of width {row['width']:,}, vocabulary {row['vocabulary']:,}"
        share = row["share_of_matmul"]["kernel"]
        found.append(goal(f"rate of the kernel as a share of the matmul's: {shape}", share, at_least=LEAST))
    return found


def main() -> None:
    asked = options(__doc__, "kernel").parse_args()
    if not torch.cuda.is_available():
        sys.exit("There is no GPU here, so there is nothing to measure and nothing was written.")
    head = headed("kernel", "triton", depends=("eelib/lens",), seed=0)
    gpu = torch.cuda.get_device_properties(0)
    head["machine"] |= {"gpu": f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"}
    head["versions"] |= {"cuda": torch.version.cuda}
    rows = [measure(count, size) for size in VOCABULARIES for count in ROWS]
    finish(asked.output, head, goals(rows), repeats=REPEATS, rows=rows)
