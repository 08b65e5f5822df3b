"""The tolerances are narrow where the dtype is fine, and a comparison by them can fail."""

import pytest
import torch
from oracle import SLACK, allowed_error, assert_as_near

from eelib.common.tolerances import TOLERANCES, apart, close, factor_between, same, tolerance

torch.manual_seed(0)
EXACT = torch.randn(40, 30, dtype=torch.float64)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_one_rounding_is_the_same_and_more_than_allowed_is_not(dtype):
    a, one = EXACT.to(dtype), TOLERANCES[dtype]
    nudged = (a.double() * (1 + torch.finfo(dtype).eps / 4)).to(dtype)
    assert same(nudged, a) and close(nudged, a) and SLACK[dtype] >= torch.finfo(dtype).eps / 2
    top = float(a.double().abs().max())
    for compare, share in ((same, one.same), (close, one.close)):
        off = a.double().clone()
        off[3, 4] += 2 * share * top
        assert not compare(off.to(dtype), a)
    assert not close(a[:3], a[:2]) and not same(a * float("nan"), a)


def test_coarsest_dtype_decides():
    assert tolerance(EXACT, EXACT.bfloat16(), EXACT.float()) is TOLERANCES[torch.bfloat16]
    assert (
        apart(EXACT.float(), EXACT) < 1e-7
        and close(EXACT.bfloat16(), EXACT)
        and not same(EXACT.bfloat16(), EXACT * 1.1)
    )


def test_a_factor_that_is_1_up_to_rounding_is_1():
    off = EXACT.float() * 1.0005
    assert factor_between(EXACT, EXACT * (1 + 1e-12)) == 1.0 == factor_between(off, EXACT.float(), within=1e-3)
    assert factor_between(off, EXACT.float()) != 1.0


def test_what_is_ours_may_err_as_the_plain_way_does():
    plain, slack = EXACT.float(), SLACK[torch.float32]
    assert slack < allowed_error(plain, EXACT) / float(EXACT.abs().max()) < 2 * slack
    assert_as_near(plain, plain, EXACT)
    worse = plain.clone()
    worse[1, 2] += 3 * slack * float(EXACT.abs().max())
    with pytest.raises(AssertionError, match="one: off by"):
        assert_as_near(worse, plain, EXACT, "one")
    plain[5, 5] += 1.0  # where the plain way is bad, ours may be
    assert_as_near(worse, plain, EXACT)


def test_a_plain_way_that_overflows_allows_nothing():
    plain, ours = EXACT.float(), EXACT.float()
    plain[2, 3], ours[7, 7] = float("inf"), 1e30
    with pytest.raises(AssertionError, match="not finite"):
        assert_as_near(ours, plain, EXACT)
