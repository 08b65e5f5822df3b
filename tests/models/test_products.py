"""Products of few rows are as near to float64 as torch's own, and torch's are used wherever ours do not fit."""

import copy
import os
import pickle
import subprocess
import sys

import families
import pytest
import torch
from accelerate import cpu_offload
from families import CORE, in_pairs
from oracle import assert_as_near
from torch import nn

import eelib
from eelib.common.errors import SelfCheckError
from eelib.models import products

SHAPES = [(1, 16), (7, 48), (577, 1536), (1, 1), (7, 13), (577, 1535)]  # outputs, inputs; the first 3 are for ours


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
    "through .data": lambda made: made.weight.data.add_(1.0),
    "through .data, all but the first number": lambda made: made.weight.data[0, 1:].add_(1.0),
    "other data": lambda made: setattr(made.weight, "data", made.weight.data + 1.0),
    "another parameter": lambda made: setattr(made, "weight", nn.Parameter(made.weight + 1.0)),
    "a state": lambda made: made.load_state_dict({"weight": made.weight + 1.0}),
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
    made = fast(nn.Sequential(layer(8, 16)), calls)
    other = duplicate(made)
    with torch.no_grad():
        other[0].weight.data[1:] += 1.0
    check(other[0], torch.randn(2, 16))
    assert not calls and list(other.state_dict()) == ["0.weight"]
    check(made[0], torch.randn(2, 16))
    assert calls == [2]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copy_of_8_bits_reads_its_own_numbers(duplicate, calls):
    """Not those of the original, whose memory may be used for something else by then."""
    made = layer(8, 16)
    products.use_int8_products(made)
    other, x = duplicate(made), torch.randn(2, 16)
    with torch.no_grad():
        expected = made(x)
        vars(made)["forward"].weights.numbers[:] = 0
        assert torch.equal(other(x), expected) and not made(x).any()


@pytest.mark.parametrize("way", [products.use_fast_products, products.use_int8_products])
def test_forwards_of_other_libraries_stay(way, calls):
    """accelerate loads weights from elsewhere in a forward of its own, of a network that it spreads over devices."""
    made = nn.Sequential(layer(8, 16), nn.LayerNorm(8))
    x = torch.randn(2, 16)
    with torch.no_grad():
        expected = made(x)
        cpu_offload(made, execution_device="cpu")
        way(made)
        assert torch.equal(made(x), expected)


def test_weights_made_in_inference_mode_are_for_torch(calls):
    """torch counts no version of them."""
    with torch.inference_mode():
        made = fast(layer(8, 16), calls)
        check(made, torch.randn(2, 16))
    assert not calls


def test_ours_are_used_where_torchs_may_round_their_factors(calls, request):
    request.addfinalizer(lambda: torch.set_float32_matmul_precision("highest"))
    torch.set_float32_matmul_precision("medium")
    assert products.use_fast_products(layer(256, 256, fits=False)) > 0


def test_the_layout_is_that_of_the_compiled_code_on_disk():
    """Whatever instructions torch is told to use: numba's cache does not ask torch."""
    code = "from eelib.models import products; print(products.WIDE)"
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"ATEN_CPU_CAPABILITY": "default"},
        capture_output=True,
        text=True,
    )
    assert told.stdout == f"{products.WIDE}\n", told.stderr


@pytest.mark.slow
def test_code_that_another_process_compiled_in_part_runs(tmp_path):
    """Where a part of a function was stored before, numba stores the function without a note that it needs threads."""
    code = (
        "import sys, torch; from eelib.models import products; torch.set_num_threads(1)\n"
        "made = products.FewRows(torch.nn.Linear(16, 4), 1); x, y = torch.ones(1, 16), torch.empty(1, 4)\n"
        "about, kind = made.weights.about, made.weights.kind\n"
        "products.on_all_cores(getattr(products, sys.argv[1]), x.data_ptr(), 1, about, kind, y.data_ptr())"
    )
    for name in ("shared_products", "products", "products"):
        done = subprocess.run([sys.executable, "-c", code, name], env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)})
        assert done.returncode == 0


def test_a_wrong_product_is_no_result(monkeypatch):
    monkeypatch.setattr(products, "LEAST", 0)
    plain = products.multiply

    def of_rows_backwards(x, weights):
        return plain(x, products.Weights(weights.numbers[::-1].copy()))

    monkeypatch.setattr(products, "multiply", of_rows_backwards)
    with pytest.raises(SelfCheckError, match="not torch's"):
        products.use_fast_products(layer(8, 16))


def test_nothing_is_changed_in_a_small_network_or_without_a_gain(monkeypatch, folder_of):
    """Nor where it is not wanted."""
    cases = [("SMALLEST", 8 * 16 + 1, layer(8, 16)), ("LEAST", 1000, layer(8, 16)), ("GAIN", 0.0, layer(8, 16))]
    for name, value, made in [*cases, ("GAIN", 1.0, nn.LayerNorm(8))]:
        with monkeypatch.context() as patch:
            patch.setattr(products, "LEAST", 0)
            patch.setattr(products, name, value)
            assert products.use_fast_products(made) == 0 and "forward" not in vars(made)
    monkeypatch.setattr(products, "LEAST", 0)
    model = eelib.load_model(str(folder_of("llama")), device="cpu", fast_products=False)
    assert not any("forward" in vars(module) for module in model.network.modules())


@pytest.mark.parametrize("name", CORE)
def test_logits_of_families(name, folder_of, calls, plain_of, oracle_of):
    """Also under hooks, and with the head's weights tied to the embeddings. Of a block's products, some are called as a
    part of the block.
    """
    model = eelib.load_model(str(folder_of(name)), device="cpu")
    linear = [module for module in model.network.modules() if type(module) is nn.Linear]
    assert linear and all(isinstance(vars(module)["forward"], products.FewRows) for module in linear)
    prompt, output = families.sample(model)
    inputs = model.adapter.whole_inputs(prompt[:8], output[:3])
    calls.clear()
    seen = []
    handle = linear[0].register_forward_hook(lambda _module, _args, given: seen.append(given))
    with torch.no_grad():
        mine, plain, exact = (network(**inputs).logits for network in (model.network, plain_of(name), oracle_of(name)))
    handle.remove()
    assert calls and len(seen) == 1
    assert_as_near(mine, plain, exact)
    assert model.network.state_dict().keys() == plain_of(name).state_dict().keys()
