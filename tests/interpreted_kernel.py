"""The Triton readout in Triton's interpreter against float64; `test_triton_readout` runs this in a process of its own.

By hand: TRITON_INTERPRET=1 python -m pytest tests/interpreted_kernel.py
"""

import math
import os

import pytest
import torch
from oracle import assert_ranks, divergences
from torch.distributions import Categorical

from eelib.lens import triton_readout as kernel
from eelib.lens.cpu_kernels import spread_over_cores
from eelib.lens.readout import LogitBuffer, read_by_kernel, read_on_cpu
from eelib.lens.triton_readout import Projection, Tiles
from eelib.models.head import Head

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is off")
torch.set_num_threads(1)
NEAR = 2e-5  # logits of order 1 this close may swap places between float32 and float64
SHAPES = [
    (1, 24, 11, "float32", 3.0),
    (17, 160, 1000, "bfloat16", 3.0),
    (3, 65, 1000, "float16", 3.0),
    (66, 24, 257, "float32", 3.0),
    (17, 24, 1000, "float32", 1e4),
]


def logits_of(hidden, weight):
    """Logits in float64, written the plainest way."""
    return hidden.double() @ weight.double().T


def made(rows, width, vocabulary, dtype="float32", size=3.0):
    """States and weights whose logits have about the standard deviation `size`, final and reference ids."""
    torch.manual_seed(rows + vocabulary)
    hidden = torch.randn(rows, width).to(getattr(torch, dtype))
    weight = (torch.randn(vocabulary, width) * size / width**0.5).to(hidden.dtype)
    final = torch.randint(0, vocabulary, (rows,))
    final[::2] = logits_of(hidden, weight).argmax(-1)[::2]
    return hidden, weight, final, torch.randint(-1, vocabulary, (rows,))


def compare(got, z, final, k, near=NEAR):
    """Every readout against the logits z [n, vocabulary], and the bounds that hold whatever the rounding."""
    exact = dict(rtol=1e-6, atol=near)
    own = z.gather(1, final[:, None])
    torch.testing.assert_close(got["log_normalizer"].double(), z.logsumexp(-1), **exact)
    torch.testing.assert_close(got["entropy"].double(), Categorical(logits=z).entropy(), rtol=1e-5, atol=near)
    torch.testing.assert_close(got["final_logit"].double(), own[:, 0], **exact)
    torch.testing.assert_close(got["top_logits"].double(), z.sort(-1, descending=True).values[:, :k], **exact)
    torch.testing.assert_close(z.gather(1, got["top_ids"].long()), got["top_logits"].double(), **exact)
    assert_ranks(got["final_rank"], z, final, near)
    bounds(got, z.shape[1])


def bounds(got, vocabulary):
    """No log-probability above 0, entropy within [0, ln V], top-k in order and without repeats."""
    assert (got["final_logit"] <= got["log_normalizer"]).all()
    assert (got["top_logits"] <= got["log_normalizer"][:, None]).all()
    assert ((0 <= got["entropy"]) & (got["entropy"] <= math.log(vocabulary) + 1e-6)).all()
    assert (got["top_logits"].diff(dim=1) <= 0).all() and (got["top_ids"].sort(1).values.diff(dim=1) > 0).all()
    assert ((1 <= got["final_rank"]) & (got["final_rank"] <= vocabulary)).all()


@pytest.mark.parametrize(("rows", "width", "vocabulary", "dtype", "size"), SHAPES)
def test_odd_shapes_and_large_logits(rows, width, vocabulary, dtype, size):
    """Of large ones too, log-probabilities stay at or below 0, as rounding of z * log2(e) would not allow."""
    hidden, weight, final, reference = made(rows, width, vocabulary, dtype, size)
    head, z, near = Projection(weight), logits_of(hidden, weight), max(NEAR, size * 5e-6)
    got = kernel.read_rows(hidden, head, final, reference_ids=reference)
    compare(got, z, final, 10, near)
    assert (got["final_rank"][::2] == 1).all() and (got["final_logit"][::2] == got["top_logits"][::2, 0]).all()
    expected = z.gather(1, reference.clamp(min=0)[:, None])[:, 0].masked_fill(reference < 0, math.nan)
    torch.testing.assert_close(got["reference_logit"].double(), expected, rtol=1e-6, atol=near, equal_nan=True)
    assert_ranks(got["reference_rank"], z, reference, near)
    assert (got["reference_rank"][reference < 0] == 0).all()
    again = kernel.read_rows(hidden, head, final, reference_ids=got["top_ids"][:, -1])
    assert (again["reference_rank"] == 10).all()


def test_ties():
    """Whole numbers, so every sum is exact and most logits are shared: ids, ranks and logits are exact too. Neither
    tile shapes nor strides change that.
    """
    torch.manual_seed(1)
    hidden = torch.randint(-1, 2, (17, 24)).float()
    weight = torch.randint(-1, 2, (700, 24)).float()
    z = logits_of(hidden, weight)
    final = torch.arange(17) * 40
    got = kernel.read_rows(hidden.T.contiguous().T, Projection(weight), final, k=16, tiles=Tiles(16, 32, 32))
    values, ids = z.sort(dim=1, descending=True, stable=True)
    assert torch.equal(got["top_ids"].long(), ids[:, :16]) and torch.equal(got["top_logits"].double(), values[:, :16])
    own = z.gather(1, final[:, None])
    assert torch.equal(got["final_rank"].long(), (z > own).sum(1) + 1)
    assert torch.equal(got["final_logit"].double(), own[:, 0])
    assert (values[:, 15] == values[:, 16]).any()  # ties across the edge of the list did occur


def test_bias_of_minus_infinity():
    """Forbidden tokens have no probability, rank last, and fill the list, lower ids first, where nothing is left."""
    hidden, weight, _, _ = made(3, 65, 600)
    bias = torch.full((600,), -math.inf)
    bias[[500, 7, 300]] = 0.0
    head, final = Projection(weight, bias=bias), torch.tensor([7, 500, 0])
    got, z = kernel.read_rows(hidden, head, final, k=5), logits_of(hidden, weight) + bias.double()
    assert torch.equal(got["top_ids"][:, :3].long(), z.topk(3).indices)
    assert got["top_ids"][:, 3:].tolist() == [[0, 1]] * 3 and (got["top_logits"][:, 3:] < -1e38).all()
    torch.testing.assert_close(got["log_normalizer"].double(), z.logsumexp(-1), rtol=0, atol=NEAR)
    torch.testing.assert_close(got["entropy"].double(), Categorical(logits=z).entropy(), rtol=0, atol=NEAR)
    assert got["final_rank"][2] == 4 and got["final_logit"][2] < -1e38
    bounds(got, 600)
    norms = got["log_normalizer"], kernel.read_rows(hidden.flip(0), head, final)["log_normalizer"]
    js, kl = kernel.read_divergences(hidden, head, norms[0], hidden.flip(0), norms[1])
    assert ((0 <= js) & (js <= math.log(2))).all() and js[1] < 1e-6 < js[0]
    logs = z[:, [500, 7, 300]].log_softmax(-1)
    torch.testing.assert_close(kl.double(), divergences(logs, logs.flip(0))[1], rtol=1e-4, atol=NEAR)


@pytest.mark.parametrize(
    ("scale", "cap", "biased", "known"),
    [
        (1.0, 0.0, (False, False), [-1] * 5),
        (2.0, 5.0, (True, True), [3, -1, 0, 256, -1]),
        (0.5, 0.0, (True, True), [3, -1, 0, 256, -1]),
    ],
)
def test_readout_by_kernel_is_the_readout_on_the_cpu(scale, cap, biased, known):
    """Every readout of `readout.read`, through norm, the head's bias, scaling, soft cap and last bias, both ways."""
    projection, norm = torch.nn.Linear(24, 257, bias=biased[0]), torch.nn.LayerNorm(24)
    head = Head([norm], projection, 24, 257, 1.5, scale, cap, torch.randn(257) if biased[1] else None)
    states, wanted, known = torch.randn(5, 4, 24), torch.arange(5), torch.tensor(known)
    with torch.no_grad():
        mine = read_by_kernel(head, states, wanted, known, 10)
        with spread_over_cores() as spread:
            plain = read_on_cpu(head, states, wanted, known, 10, LogitBuffer(), spread)
    assert set(mine) == set(plain)
    for name, values in plain.items():
        torch.testing.assert_close(mine[name].double(), values.double(), rtol=1e-4, atol=1e-5, equal_nan=True)
