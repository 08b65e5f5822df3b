"""How far apart two results may lie that differ by rounding only: a table by dtype, and comparisons that use it.

The table has the allowed difference of two results in one dtype, as a share of the largest value. Loading a checkpoint
and the sweep over architectures (checks/architectures.py) use it. Tests compare with a float64 result instead, and
allow the error that the plain computation has itself (tests/oracle.py). The numbers were measured over the
architectures of transformers: results that must agree differ by less, results that must not agree (another candidate
for a sub-layer, a cache that does not fit) differ by more.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST = 1e-6  # where all values are smaller than this, differences are divided by it


@dataclass(frozen=True)
class Tolerance:
    """Shares of the largest absolute value, but for `tie`.

    `same`: between one computation seen twice, such as a sum and its terms. `close`: between two ways to one result,
    such as steps with a cache and a run without. `factor`: between 1 and a factor found by least squares. `tie`: in
    nats, between two logits whose order may differ from one way to another.
    """

    same: float
    close: float
    factor: float
    tie: float


TOLERANCES = {
    # Networks work out norms, softmax and rotations in float32 whatever their dtype, and logits are read in float32, so
    # two ways differ by a float32 error; sums and copies do not.
    torch.float64: Tolerance(same=1e-10, close=1e-5, factor=1e-9, tie=1e-6),
    # 1.2e-7 a rounding. Sums measured at most 1.4e-6, the nearest wrong sum 4e-4; ways at most 4e-5, the nearest 3e-4.
    torch.float32: Tolerance(same=1e-5, close=1e-4, factor=1e-5, tie=1e-3),
    # 9.8e-4 a rounding; products are added up in float32 and rounded once. Sums at most 8e-4, ways at most 1.3e-2.
    torch.float16: Tolerance(same=2e-3, close=2e-2, factor=1e-3, tie=3e-2),
    # 7.8e-3 a rounding. Sums at most 7e-3, ways at most 2.6e-2 and the nearest wrong one 3.3e-2.
    torch.bfloat16: Tolerance(same=1e-2, close=3e-2, factor=1e-3, tie=0.25),
}


def tolerance(*tensors: Tensor) -> Tolerance:
    """The tolerance of the coarsest dtype among tensors."""
    return TOLERANCES[max((t.dtype for t in tensors), key=lambda dtype: TOLERANCES[dtype].same)]


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors of one shape, as a share of b's largest value; infinite if any is NaN."""
    a, b = a.detach().double(), b.detach().double().to(a.device)
    worst = float((a - b).abs().max() / b.abs().max().clamp(min=SMALLEST))
    return worst if worst == worst else float("inf")


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors differ by rounding only: results of the same operations, or a sum and its terms."""
    return a.shape == b.shape and apart(a, b) <= tolerance(a, b).same


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one result, computed in two ways."""
    return a.shape == b.shape and apart(a, b) <= tolerance(a, b).close


def factor_between(a: Tensor, b: Tensor, within: float | None = None) -> float:
    """The least-squares factor c of a = c b; exactly 1.0 if nearer to 1 than `within` (None: the dtype's `factor`)."""
    factor = float((a.double() * b.double()).sum() / (b.double() ** 2).sum().clamp(min=1e-30))
    return 1.0 if abs(factor - 1.0) < (within or tolerance(a, b).factor) else factor


def same_direction(a: Tensor, b: Tensor) -> bool:
    """Whether b is a times a constant, up to rounding in their dtype."""
    return a.shape == b.shape and apart(a.double() * factor_between(b, a), b) <= tolerance(a, b).same
