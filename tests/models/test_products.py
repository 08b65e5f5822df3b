"""Products of few rows are as near to float64 as torch's own, and torch's are used wherever ours do not fit."""

import copy
import pickle
from threading import local

import pytest
import torch
from accelerate import cpu_offload
from families import in_pairs
from oracle import assert_as_near
from torch import nn

from eelib.common.errors import SelfCheckError
from eelib.models import products

SHAPES = [(1, 16), (7, 48), (577, 1536), (7, 13)]  # outputs, inputs; the first 3 are for ours


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """Ours are tried on small networks, too."""
    monkeypatch.setattr(products, "SMALLEST", 0)


@pytest.fixture
def calls(monkeypatch):
    """Rows of each product that is ours; they are used on every machine and for layers of any size."""
    found, plain = [], products.multiply
    monkeypatch.setattr(products, "GAIN", float("inf"))
    monkeypatch.setattr(products, "LEAST", 0)
    monkeypatch.setattr(products, "NO_LIMIT", 40)

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
    inputs = [wide[0, 0, :32], wide[0, :, ::2], wide[:2, :, 32:], wide[:2, 0:1, :32], torch.randn(32, 4).T]
    for x in inputs:
        check(made, x)
    assert calls == [1, 3, 6, 2, 4]
    assert made(torch.empty(2, 0, 32)).shape == (2, 0, 40)
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
        short = torch.randn(2, shape[1]).bfloat16()  # as an earlier layer leaves it under autocast
        assert torch.equal(made(short), made(short.float()))
    assert calls == [2, 4, 6, 8, 14, 32, 34, 2, 2]


CHANGES = {
    "in place": lambda made: made.weight.mul_(2.0),
    "through .data, all but the first number": lambda made: made.weight.data[0, 1:].add_(1.0),
    "other data": lambda made: setattr(made.weight, "data", made.weight.data + 1.0),
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
    expected = 2 * x @ made.weight.T
    torch.testing.assert_close(made.weight.grad, (expected.T @ x).detach())
    torch.testing.assert_close(x.grad, (expected @ made.weight).detach())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert made(torch.randn(2, 16)).dtype == torch.bfloat16
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float64):
            assert made.to(dtype)(torch.randn(2, 16, dtype=dtype)).dtype == dtype
    assert not calls


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copy_has_its_own_weights_and_torchs_products(duplicate, calls):
    """Of 8 bits, it has its own numbers: the original's memory may be used for something else by then."""
    made, x = fast(nn.Sequential(layer(8, 16)), calls), torch.randn(2, 16)
    other = duplicate(made)
    with torch.no_grad():
        other[0].weight.data[1:] += 1.0
        check(other[0], x)
        assert not calls and list(other.state_dict()) == ["0.weight"]
        check(made[0], x)
        assert calls == [2]
        assert products.use_int8_products(other) == 1
        third, expected = duplicate(other), other(x)
        vars(other[0])["forward"].weights.numbers[:] = 0
        assert torch.equal(third(x), expected) and not other(x).any()


def test_forwards_of_other_libraries_and_weights_of_inference_mode_are_for_torch(calls):
    """accelerate loads weights from elsewhere in a forward of its own; of the others, torch counts no version."""
    made, x = nn.Sequential(layer(8, 16), nn.LayerNorm(8)), torch.randn(2, 16)
    with torch.no_grad():
        expected = made(x)
        cpu_offload(made, execution_device="cpu")
        assert torch.equal(fast(made, calls)(x), expected)
    with torch.inference_mode():
        check(fast(layer(8, 16), calls), x)
    assert not calls


def test_ours_are_used_where_torchs_may_round_their_factors(calls, request):
    request.addfinalizer(lambda: torch.set_float32_matmul_precision("highest"))
    torch.set_float32_matmul_precision("medium")
    assert "forward" in vars(fast(layer(256, 256, fits=False), calls))


def test_numbas_threads_are_started_for_one_core_too(calls, monkeypatch):
    """Code that two processes compiled together may be stored without a note that it needs them, and crash."""
    asked, made = [], fast(layer(8, 16), calls)
    monkeypatch.setattr(products, "CHOSEN", local())
    monkeypatch.setattr(products.numba, "set_num_threads", asked.append)
    check(made, torch.randn(2, 16))
    assert asked == [torch.get_num_threads()] == [1]


def test_a_wrong_product_is_no_result(monkeypatch):
    monkeypatch.setattr(products, "LEAST", 0)
    plain = products.multiply
    monkeypatch.setattr(products, "multiply", lambda x, weights: plain(x, weights).flip(-1))
    with pytest.raises(SelfCheckError, match="not torch's"):
        products.use_fast_products(layer(8, 16))


def test_nothing_is_changed_in_a_small_network_or_without_a_gain(monkeypatch):
    monkeypatch.setattr(products, "LEAST", 0)
    for name, value in [("SMALLEST", 8 * 16 + 1), ("LEAST", 1000), ("GAIN", 0.0)]:
        with monkeypatch.context() as patch:
            patch.setattr(products, name, value)
            made = layer(8, 16)
            products.use_fast_products(made)
            assert "forward" not in vars(made)
