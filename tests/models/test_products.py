"""Products of few rows are as near to float64 as torch's own, and torch's are used wherever ours do not fit."""

import copy

import pytest
import torch
from families import in_pairs
from oracle import assert_as_near
from torch import nn

from eelib.common.errors import SelfCheckError
from eelib.models import products

SHAPES = [(1, 16), (7, 48), (577, 1536), (7, 13)]  # outputs, inputs; the first 3 are for ours


@pytest.fixture
def calls(monkeypatch):
    """Rows of each product that is ours; they are used on every machine and for layers of any size."""
    found, plain = [], products.multiply
    for limit, value in (("SMALLEST", 0), ("LEAST", 0), ("GAIN", float("inf")), ("NO_LIMIT", 40)):
        monkeypatch.setattr(products, limit, value)

    def noted(x, weights):
        found.append(x.numel() // x.shape[-1])
        return plain(x, weights)

    monkeypatch.setattr(products, "multiply", noted)
    return found


def layer(outputs, inputs, bias=False, fits=True, dtype=torch.float32):
    made = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        made.weight.normal_(0.0, 3.0 / inputs**0.5)
        if fits:
            made.weight.copy_(made.weight.bfloat16())
    return made.to(dtype)


def fast(made, calls):
    products.use_fast_products(made)
    calls.clear()
    return made


@torch.no_grad()
def check(made, x):
    """The layer's products against float64, with what the plain way in its dtype errs."""
    exact, plain = copy.deepcopy(made).double()(x.double()), nn.functional.linear(x, made.weight, made.bias)
    got = made(x)
    assert got.shape == exact.shape and got.dtype == x.dtype
    assert_as_near(got, plain, exact)


@pytest.mark.parametrize(
    ("shape", "bias", "fits", "dtype", "cores"),
    in_pairs(SHAPES, [True, False], [True, False], [torch.float32, torch.bfloat16], [1, 2]),
    indirect=["cores"],
)
def test_as_near_as_torch_for_every_number_of_rows(shape, bias, fits, dtype, cores, calls):
    made = fast(layer(*shape, bias, fits, dtype), calls)
    rows = [*range(1, 10), 16, 17, 39, 40, 41]
    for count in rows:
        x = torch.randn(count, shape[1], dtype=dtype)
        x[0, 0] = 1000.0
        check(made, x)
    assert calls == (rows[:-1] if shape[1] % products.LANES == 0 else [])


def test_inputs_of_any_form(calls):
    """A row's products are the same whatever is beside it."""
    made = fast(layer(40, 32, bias=True), calls)
    wide = torch.randn(6, 3, 64)
    for x in (wide[0, 0, :32], wide[0, :, ::2], wide[:2, :, 32:], torch.randn(32, 4).T):
        check(made, x)
    assert calls == [1, 3, 6, 4]
    with torch.inference_mode():
        whole = made(wide[:, 0, :32])
        assert all(torch.equal(made(wide[i:j, 0, :32]), whole[i:j]) for i in range(6) for j in range(i + 1, 7))
    with pytest.raises(RuntimeError), torch.no_grad():
        made(torch.randn(2, 16))


@pytest.mark.parametrize(("shape", "bias", "cores"), in_pairs(SHAPES[:3], [True, False], [1, 2]), indirect=["cores"])
def test_products_of_8_bits_are_those_of_rounded_weights(shape, bias, cores, calls):
    """Each weight is at most half a step of its row off; the sums are as near to float64 as torch's."""
    made = layer(*shape, bias, fits=False)
    with torch.no_grad():
        made.weight[0] = 0.0
        step = made.weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / 127
        rounded = copy.deepcopy(made)
        rounded.weight.copy_((made.weight / step).round() * step)
        assert ((rounded.weight - made.weight).abs() <= 0.5001 * step).all()
        assert products.use_int8_products(made) == 1
        for count in (1, 2, 3, 4, 7, 16, 17):
            x = torch.randn(2, count, shape[1])
            exact = copy.deepcopy(rounded).double()(x.double())
            assert_as_near(made(x), rounded(x), exact)
    assert calls == [2, 4, 6, 8, 14, 32, 34]


CHANGES = {
    "through .data, all but the first number": lambda made: made.weight.data[0, 1:].add_(1.0),
    "another parameter": lambda made: setattr(made, "weight", nn.Parameter(made.weight + 1.0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_seen(change, calls):
    made = fast(layer(8, 16), calls)
    with torch.no_grad():
        CHANGES[change](made)
    check(made, torch.randn(2, 16))
    assert not calls


def test_gradients_other_dtypes_and_autocast_are_for_torch(calls):
    made = fast(layer(8, 16), calls)
    x = torch.randn(3, 16, requires_grad=True)
    made(x).square().sum().backward()
    torch.testing.assert_close(x.grad, (2 * x @ made.weight.T @ made.weight).detach())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert made(torch.randn(2, 16)).dtype == torch.bfloat16
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float64):
            assert made.to(dtype)(torch.randn(2, 16, dtype=dtype)).dtype == dtype
    assert not calls


def test_a_copy_has_its_own_weights(calls):
    """Of 8 bits, it has its own numbers: the original's memory may be used for something else by then."""
    made, x = fast(nn.Sequential(layer(8, 16)), calls), torch.randn(2, 16)
    other = copy.deepcopy(made)
    with torch.no_grad():
        other[0].weight.data[1:] += 1.0
        check(other[0], x)
        check(made[0], x)
        assert calls == [2]  # torch's are the copy's
        assert products.use_int8_products(other) == 1
        third, expected = copy.deepcopy(other), other(x)
        vars(other[0])["forward"].weights.numbers[:] = 0
        assert torch.equal(third(x), expected) and not other(x).any()


def test_a_wrong_product_is_no_result(calls, monkeypatch, one_line):
    plain = products.multiply
    monkeypatch.setattr(products, "multiply", lambda x, weights: plain(x, weights).flip(-1))
    one_line(SelfCheckError, "not torch's", lambda: products.use_fast_products(layer(8, 16)))


@pytest.mark.parametrize("name, value", [("SMALLEST", 8 * 16 + 1), ("LEAST", 1000), ("GAIN", 0.0)])
def test_nothing_is_changed_in_a_small_network_or_without_a_gain(name, value, calls, monkeypatch):
    monkeypatch.setattr(products, name, value)
    assert "forward" not in vars(fast(layer(8, 16), calls))
