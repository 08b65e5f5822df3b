"""How near a result has to be to the float64 one: as near as the plain way in its dtype, and a slack.

After apple/ml-cross-entropy, whose tests compare so.
"""

import torch
from torch import Tensor

from eelib.common.tolerances import SMALLEST

SLACK = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the largest value


def allowed_error(plain: Tensor, exact: Tensor) -> float:
    """How far a result may be from `exact` (float64): as far as the `plain` way in its dtype, and its slack.

    AssertionError where the plain way overflows, which would allow anything.
    """
    assert bool(plain.isfinite().all()), "the plain way is not finite, so it can't say how far ours may be off"
    worst = float((plain.double() - exact.double()).abs().max())
    return worst + SLACK[plain.dtype] * max(float(exact.double().abs().max()), SMALLEST)


def assert_as_near(ours: Tensor, plain: Tensor, exact: Tensor, what: str = "") -> None:
    """AssertionError, with both numbers, where `ours` is further from `exact` than `allowed_error`.

    The three have one shape, and NaN in the same places; `ours` and `plain` come in the same dtype, from two ways to
    what `exact` is in float64.
    """
    ours, plain, exact = (t.detach() for t in (ours, plain, exact))
    assert ours.shape == plain.shape == exact.shape, f"{what}: {ours.shape}, {plain.shape} and {exact.shape}"
    known = ~exact.isnan()
    assert torch.equal(known, ~ours.isnan()), f"{what}: NaN in other places"
    if bool(known.any()):
        ours, plain, exact = ours[known], plain[known], exact[known]
        error, allowed = float((ours.double() - exact.double()).abs().max()), allowed_error(plain, exact)
        assert error <= allowed, f"{what}: off by {error:.3g}, the plain way and the slack by {allowed:.3g}"
