"""Readouts of states through the head: top-k, probability, entropy, rank, divergence; in pieces of bounded size."""

import importlib.util
import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from eelib.common.errors import InputError
from eelib.lens.cpu_kernels import Spread, diverge, head_product, spread_over_cores, summarize
from eelib.models.head import Head

TOP = 10
LOGITS_AT_ONCE = 24 << 20  # most logits held at a time, in elements: 96 MB in float32
FEW_ROWS = 64  # with fewer, the head's own product is faster on a CPU
ROWS_AT_ONCE = 256  # with fewer rows, rearranging the weights takes longer than multiplying by them
FEWEST_LOGITS = 16 << 20  # fewest held at a time, unless all are fewer; most, where only the top-1 is read
STATES_AT_ONCE = 16 << 20  # bytes of states that a buffer holds before they are read
ON_GPU = 8  # times as many there, where a readout takes less time
SCALARS = (
    "entropy",
    "final_rank",
    "final_probability",
    "reference_rank",
    "reference_probability",
    "cosine",
    "js_final",
    "kl_final",
)
TOP_K = ("topk_ids", "topk_probability")
FROM_TOP_K = ("top1", "probability", "margin")  # computed from the top-k, so not stored
Readout = dict[str, Tensor]  # SCALARS [n, S] and TOP_K [n, S, k] of n tokens at S states each, on the CPU
Array = TypeVar("Array", Tensor, np.ndarray)


def from_top_k(name: str, top: Callable[[str], Array]) -> Array:
    """A readout of FROM_TOP_K, computed from `top(name)` [..., k], name in TOP_K; the margin is top-1 less top-2."""
    if name == "top1":
        return top("topk_ids")[..., 0]
    shares = top("topk_probability")
    return shares[..., 0] if name == "probability" else shares[..., 0] - shares[..., min(1, shares.shape[-1] - 1)]


def top_k(vocab_size: int) -> int:
    """Width of the top-k columns: `TOP`, or the vocabulary where that is smaller."""
    return min(TOP, vocab_size)


class LogitBuffer:
    """Memory for logits that is used again: new memory for every piece would take a third of the product's time."""

    def __init__(self) -> None:
        self.memory = torch.empty(0)

    def take(self, rows: int, columns: int) -> Tensor:
        """Uninitialized float32 [rows, columns]; the next call returns the same memory."""
        if self.memory.numel() < rows * columns:
            self.memory = torch.empty(rows * columns)
        return self.memory[: rows * columns].view(rows, columns)


@torch.no_grad()
def read(
    head: Head,
    states: Tensor,
    final_ids: Tensor,
    reference_ids: Tensor | None = None,
    logit_buffer: LogitBuffer | None = None,
) -> Readout:
    """Read states through a model's output head.

    Natural logarithms. Rank 1 is the top; ties count in favour of the token. The cosine is of states before the norm.
    Divergences compare a state's p with the last state's q: JS, symmetric, at most ln 2; KL, the sum of q ln(q / p).

    Args:
        head: the model's output head.
        states: [n, S, hidden_size], of S layers, before the final norm.
        final_ids: the last layer's tokens, [n].
        reference_ids: the reference's next tokens, [n]; -1 where there is none, which gives NaN.
        logit_buffer: memory for logits; callers that read in pieces give the same one each time.

    Raises:
        InputError: a state, or a sum of its logits, is not finite; it names the layer.
    """
    check_finite(states)
    k = top_k(head.vocab_size)
    known = torch.full((len(states),), -1) if reference_ids is None else reference_ids
    if type(head.projection) is nn.Linear and kernel_takes(states, head.projection.weight):
        return read_by_kernel(head, states, final_ids, known, k)
    most = min(LOGITS_AT_ONCE, max(FEWEST_LOGITS, ROWS_AT_ONCE * head.vocab_size))
    tokens = max(1, most // (head.vocab_size * states.shape[1]))
    pieces = zip(states.split(tokens), final_ids.split(tokens), known.split(tokens))
    logit_buffer = logit_buffer or LogitBuffer()
    with torch.inference_mode(False), torch.no_grad(), spread_over_cores() as spread:  # as in the other threads
        parts = [read_on_cpu(head, *piece, k, logit_buffer, spread) for piece in pieces]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def kernel_takes(states: Tensor, weight: Tensor) -> bool:
    """Whether the Triton kernel can read states through these weights, both on one CUDA device of 8.0 or newer."""
    return (
        states.is_cuda
        and states.device == weight.device
        and states.dtype == weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and importlib.util.find_spec("triton") is not None
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(states.device) >= (8, 0)
    )


def check_finite(values: Tensor, what: str = "states", first: int = 0) -> None:
    """InputError naming the first layer of values [n, layers, any] that is not finite; theirs begin with `first`."""
    if not bool(torch.isfinite(values).all()):
        bad = torch.isfinite(values).all(-1).all(0).tolist().index(False)
        raise InputError(
            f"the {what} of layer {bad + first} of {values.shape[1] - 1 + first} hold values that are not finite, "
            "so this batch was not written"
        )


@torch.no_grad()
def top_ids(head: Head, states: Tensor) -> list[int]:
    """The top-1 ids of states [n, hidden_size]."""
    pieces = states.split(max(1, FEWEST_LOGITS // head.vocab_size))
    if states.device.type != "cpu" or len(states) < FEW_ROWS:
        return torch.cat([head(piece).argmax(-1) for piece in pieces]).tolist()
    found, logit_buffer = [], LogitBuffer()
    with torch.inference_mode(False), torch.no_grad(), spread_over_cores() as spread:  # as in the other threads
        for piece in pieces:
            logits_into(head, piece, logits := logit_buffer.take(len(piece), head.vocab_size), spread)
            found.append(logits.argmax(-1))
    return torch.cat(found).tolist()


def logits_into(head: Head, states: Tensor, out: Tensor, spread: Spread) -> None:
    """Fill `out` [n, vocab_size] with logits of states [n, hidden_size]; a float32 head on a CPU writes in place."""
    projection = head.projection
    if type(projection) is not nn.Linear or projection.weight.dtype != torch.float32 or states.device.type != "cpu":
        out.copy_(head(states))
        return
    head_product(head.normed(states), projection, out, spread)
    if projection.bias is not None:
        out += projection.bias
    if head.logit_scale != 1.0:
        out *= head.logit_scale
    if head.softcap:
        out.div_(head.softcap).tanh_().mul_(head.softcap)
    if head.bias is not None:
        out += head.bias


def read_on_cpu(
    head: Head, states: Tensor, wanted: Tensor, known: Tensor, k: int, logit_buffer: LogitBuffer, spread: Spread
) -> Readout:
    """All readouts [n, S] of states [n, S, hidden_size]: one matrix product, then one pass over its rows on the CPU.

    States on a GPU come here if the Triton kernel can't read them: the GPU computes the logits, the CPU reads them.
    """
    count, sites, hidden_size = states.shape
    size = count * sites
    logits = logit_buffer.take(size, head.vocab_size)
    wanted, known = (ids.cpu().long().repeat_interleave(sites) for ids in (wanted, known))
    top, ids = torch.empty(size, k), torch.empty(size, k, dtype=torch.int32)
    normalizer, entropy, js, kl = (torch.empty(size) for _ in range(4))
    rank, known_rank = torch.empty(2, size, dtype=torch.int32)
    numbers, there = logits.numpy(), known.clamp(min=0)
    logits_into(head, states.reshape(size, hidden_size), logits, spread)
    filled = (wanted, there, top, ids, normalizer, entropy, rank, known_rank)
    spread(summarize, size, numbers, *(each.numpy() for each in filled))
    spread(diverge, count, numbers, normalizer.numpy(), sites, js.numpy(), kl.numpy())
    own = logits.gather(1, wanted[:, None])[:, 0]
    reference = logits.gather(1, there[:, None])[:, 0].masked_fill(known < 0, math.nan)
    got = dict(top_logits=top, top_ids=ids, log_normalizer=normalizer, entropy=entropy, js=js, kl=kl)
    got |= dict(final_rank=rank, final_logit=own, reference_rank=known_rank, reference_logit=reference)
    return finish(states, head.vocab_size, got)


def read_by_kernel(head: Head, states: Tensor, wanted: Tensor, known: Tensor, k: int) -> Readout:
    """All readouts [n, S] of states [n, S, hidden_size] by the Triton kernels, one of which gives the divergences."""
    from eelib.lens.triton_readout import Projection, read_divergences, read_rows

    count, sites, hidden_size = states.shape
    linear, device = head.projection, states.device
    assert isinstance(linear, nn.Linear)
    projection = Projection(linear.weight, linear.bias, head.bias, head.logit_scale, head.softcap)
    hidden = head.normed(states.reshape(count * sites, hidden_size))
    some_known = bool((known >= 0).any())
    wanted, known = (ids.to(device).repeat_interleave(sites) for ids in (wanted, known))
    got = read_rows(hidden, projection, wanted, k, known if some_known else None)
    unknown = torch.full((count * sites,), math.nan, device=device)
    last = torch.arange(count, device=device).repeat_interleave(sites) * sites + sites - 1
    norms = got["log_normalizer"]
    js, kl = read_divergences(hidden, projection, norms, hidden[last], norms[last])
    known_of = {"reference_rank": unknown, "reference_logit": unknown}
    return finish(states, head.vocab_size, known_of | got | {"js": js, "kl": kl})


def finish(states: Tensor, vocab_size: int, got: dict[str, Tensor]) -> Readout:
    """Readouts [n, S] and [n, S, k] of states [n, S, hidden_size], on the CPU.

    `got` has n S rows of what `triton_readout.read_rows` returns, and js and kl; reference_logit is NaN where there is
    no reference.
    """
    normalizer, reference = got["log_normalizer"], got["reference_logit"]
    check_finite(normalizer.reshape(*states.shape[:2], 1), "logits")
    found = {
        "topk_ids": got["top_ids"],
        "topk_probability": (got["top_logits"] - normalizer[:, None]).clamp(max=0.0).exp(),
        "entropy": got["entropy"].clamp(0.0, math.log(vocab_size)),
        "final_rank": got["final_rank"].float(),
        "final_probability": (got["final_logit"] - normalizer).clamp(max=0.0).exp(),
        "reference_rank": got["reference_rank"].float().masked_fill(reference.isnan(), math.nan),
        "reference_probability": (reference - normalizer).clamp(max=0.0).exp(),
        "js_final": got["js"].clamp(0.0, math.log(2.0)),
        "kl_final": got["kl"].clamp(min=0.0),
    }
    found = {name: value.reshape(*states.shape[:2], *value.shape[1:]) for name, value in found.items()}
    states = states.float()
    found["cosine"] = torch.cosine_similarity(states, states[:, -1:], dim=-1).clamp(-1.0, 1.0)
    return {name: value.cpu() for name, value in found.items()}


class ReadoutBuffer:
    """Reads states while they are made, in pieces of bounded size, so that memory stays bounded.

    Args:
        head: the model's output head.
        references: the token ids of each sequence's reference, or empty. The reference's next token is known as long
            as the output is the reference's beginning; after that it is -1, and its probability NaN.
        given: the references are the texts that the model reads, so that the next token is known everywhere.
        keep: give the states back, too, as "state" [n, L+1, hidden_size], float32.
    """

    def __init__(self, head: Head, references: list[list[int]], given: bool = False, keep: bool = False):
        self.head, self.references, self.given, self.keep = head, references, given, keep
        self.lengths, self.agrees = [0] * len(references), [True] * len(references)
        self.buffered: Tensor | None = None  # [room, L+1, hidden_size]
        self.filled, self.logit_buffer = 0, LogitBuffer()
        self.rows: list[int] = []
        self.ids: list[int] = []
        self.known: list[int] = []
        self.done: list[Readout] = []

    def add(self, states: Tensor, rows: list[int], ids: list[int]) -> None:
        """Add the states [n, L+1, hidden_size] that predict tokens `ids` [n] of sequences `rows` [n]."""
        count = len(rows)
        if self.buffered is None:
            most = STATES_AT_ONCE * (ON_GPU if states.is_cuda else 1)
            room = max(1, most // (states[0].numel() * states.element_size()))
            self.buffered = torch.empty(room, *states.shape[1:], dtype=states.dtype, device=states.device)
        if self.filled + count > len(self.buffered):
            self.flush()
        if count > len(self.buffered):
            half = count // 2
            self.add(states[:half], rows[:half], ids[:half])
            self.add(states[half:], rows[half:], ids[half:])
            return
        self.buffered[self.filled : self.filled + count] = states
        self.filled += count
        self.rows += rows
        self.ids += ids
        self.known += [self.next_reference(row, token) for row, token in zip(rows, ids)]

    def next_reference(self, row: int, token: int) -> int:
        """The reference's token at the position of `token`, the next token of sequence `row`; -1 where there is none,
        or where it has no logit.
        """
        at, reference = self.lengths[row], self.references[row]
        self.lengths[row] += 1
        wanted = reference[at] if self.agrees[row] and at < len(reference) else -1
        self.agrees[row] = self.given or wanted == token
        return wanted if wanted < self.head.vocab_size else -1

    def flush(self) -> None:
        if self.buffered is not None and self.filled:
            new, states = slice(len(self.ids) - self.filled, None), self.buffered[: self.filled]
            final, known = torch.tensor(self.ids[new]), torch.tensor(self.known[new])
            self.done.append(read(self.head, states, final, known, logit_buffer=self.logit_buffer))
            if self.keep:
                self.done[-1]["state"] = states.to("cpu", torch.float32, copy=True)
            self.filled = 0

    def finish(self) -> Readout:
        """All readouts, in order of sequence, then position."""
        self.flush()
        self.buffered, self.logit_buffer = None, LogitBuffer()
        order = torch.argsort(torch.tensor(self.rows), stable=True)
        names = list(self.done[0])  # one after the other, so that there are never two copies of all
        return {name: torch.cat([part.pop(name) for part in self.done])[order] for name in names}
