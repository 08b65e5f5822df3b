"""The tolerances are narrow where the dtype is fine, and a comparison by them or by the plain way's error can fail."""

import pytest
import torch
from oracle import SLACK, assert_as_near

from eelib.common.tolerances import TOLERANCES, close, same

torch.manual_seed(0)
EXACT = torch.randn(40, 30, dtype=torch.float64)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_one_rounding_is_the_same_and_more_than_allowed_is_not(dtype):
    a, one = EXACT.to(dtype), TOLERANCES[dtype]
    nudged = (a.double() * (1 + torch.finfo(dtype).eps / 4)).to(dtype)
    assert same(nudged, a) and close(nudged, a) and SLACK[dtype] >= torch.finfo(dtype).eps / 2
    for compare, share in ((same, one.same), (close, one.close)):
        off = a.double().clone()
        off[3, 4] += 2 * share * float(off.abs().max())
        assert not compare(off.to(dtype), a)
    assert not close(a[:3], a[:2]) and not same(a * float("nan"), a)


def test_what_is_ours_may_err_as_the_plain_way_does():
    """A plain way that overflows allows nothing."""
    plain = EXACT.float()
    assert_as_near(plain, plain, EXACT)
    worse = plain.clone()
    worse[1, 2] += 3 * SLACK[torch.float32] * float(EXACT.abs().max())
    with pytest.raises(AssertionError, match="one: off by"):
        assert_as_near(worse, plain, EXACT, "one")
    plain[5, 5] += 1.0  # where the plain way is bad, ours may be
    assert_as_near(worse, plain, EXACT)
    plain[2, 3], worse[7, 7] = float("inf"), 1e30
    with pytest.raises(AssertionError, match="not finite"):
        assert_as_near(worse, plain, EXACT)
