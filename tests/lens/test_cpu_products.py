"""The product by two bfloat16 ones is as near to float64 as float32's own product."""

import pytest
import torch
from torch import nn

from eelib.common.tolerances import assert_as_near
from eelib.lens.cpu import products
from eelib.lens.cpu.parallel import spread_over_cores


def head(width, vocabulary, fits):
    torch.manual_seed(width)
    made = nn.Linear(width, vocabulary, bias=False)
    made.weight.data.normal_(0.0, 3.0 / width**0.5)
    if fits:
        made.weight.data.copy_(made.weight.bfloat16().float())
    return made


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("fits", [False, True])
@pytest.mark.parametrize(("rows", "width", "vocabulary"), [(1, 24, 11), (17, 65, 257), (64, 256, 1000), (5, 1024, 300)])
def test_as_near_as_float32(fast, fits, rows, width, vocabulary, monkeypatch):
    """Also where one value of a state is a thousand times the others, and on CPUs without the instructions."""
    monkeypatch.setattr(products, "has_fast_bfloat16", lambda: fast)
    made = head(width, vocabulary, fits)
    states = torch.randn(rows, width)
    states[0, 3] = 1000.0
    weight, out = made.weight.detach(), torch.empty(rows, vocabulary)
    with spread_over_cores() as spread:
        products.head_product(states, made, out, spread)
    assert_as_near(out, states @ weight.T, states.double() @ weight.double().T)


def test_which_weights_fit():
    assert products.fits_bfloat16(head(30, 9000, True)) and not products.fits_bfloat16(head(30, 9000, False))


def test_the_setting_is_put_back():
    before = torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(RuntimeError), products.bfloat16_products():
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        raise RuntimeError
    assert torch.backends.mkldnn.matmul.fp32_precision == before


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_every_row_once_on_each_number_of_cores(cores):
    """Slices cover the range, errors come through, and torch's number of threads is what it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        for count in (1, 2, 7):
            seen = []
            with spread_over_cores() as spread:
                spread(lambda start, end, more: seen.extend(range(start, end)), count, None)
            assert sorted(seen) == list(range(count))
        with pytest.raises(ZeroDivisionError), spread_over_cores() as spread:
            spread(lambda start, end: 1 // 0, 5)
        assert torch.get_num_threads() == cores
    finally:
        torch.set_num_threads(before)
