"""The tolerances are narrow where the dtype is fine, and a comparison by them can fail."""

import pytest
import torch

from eelib.common.tolerances import TOLERANCES, close, same


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_one_rounding_is_the_same_and_more_than_allowed_is_not(dtype):
    exact, one = torch.randn(40, 30, dtype=torch.float64), TOLERANCES[dtype]
    a = exact.to(dtype)
    nudged = (a.double() * (1 + torch.finfo(dtype).eps / 4)).to(dtype)
    assert same(nudged, a) and close(nudged, a)
    for compare, share in ((same, one.same), (close, one.close)):
        off = a.double().clone()
        off[3, 4] += 2 * share * float(off.abs().max())
        assert not compare(off.to(dtype), a)
    assert not close(a[:3], a[:2]) and not same(a * float("nan"), a)
