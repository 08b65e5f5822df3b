"""The CPU's kernels against float64: rows of logits of odd widths, with ties, huge and masked; products; threads."""

from itertools import cycle

import numpy as np
import pytest
import torch
from oracle import assert_as_near, divergences
from torch import nn
from torch.distributions import Categorical

from eelib.lens import cpu_kernels
from eelib.lens.cpu_kernels import spread_over_cores

WIDTHS = [1, 63, 64, 65, 1000]


def summarized(logits, wanted, known, k):
    """(top-k values, ids, normalizer, entropy, rank, rank of the known column) of rows [n, V]."""
    n = len(logits)
    found = np.empty((n, k), np.float32), np.empty((n, k), np.int32), *np.empty((2, n), np.float32)
    found += tuple(np.empty((2, n), np.int32))
    cpu_kernels.summarize(0, n, logits, wanted, known, *found)
    return found


@pytest.mark.parametrize(("width", "scale"), [*zip(WIDTHS, cycle([0.01, 3.0, 1e4]))])
def test_summary(width, scale):
    """Logits with one decimal: the small ones are all 0, and of equal ones the lower id comes first. What is masked has
    no share.
    """
    rng = np.random.default_rng(width)
    logits = (rng.normal(size=(7, width)) * scale).round(1).astype(np.float32)
    wanted, known = rng.integers(0, width, (2, 7))
    k = min(10, width)
    masked = np.pad(logits, ((0, 0), (0, 90)), constant_values=-np.inf)
    top, ids, normalizer, entropy, rank, known_rank = summarized(masked, wanted, known, k)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    assert (ids == order).all() and (top == np.take_along_axis(logits, order, 1)).all()
    for columns, found in ((wanted, rank), (known, known_rank)):
        assert (found == (logits > np.take_along_axis(logits, columns[:, None], 1)).sum(1) + 1).all()
    plain, exact = (torch.tensor(logits).to(dtype) for dtype in (torch.float32, torch.float64))
    assert_as_near(torch.tensor(normalizer), plain.logsumexp(-1), exact.logsumexp(-1))
    assert_as_near(torch.tensor(entropy), Categorical(logits=plain).entropy(), Categorical(logits=exact).entropy())


@pytest.mark.parametrize("width", WIDTHS)
def test_divergence(width):
    """What both rows mask adds nothing."""
    rng = np.random.default_rng(width)
    logits = (rng.normal(size=(12, width)) * 2).astype(np.float32)
    logits[2] = logits[3]  # tokens of four rows each: here p is q
    masked = np.pad(logits, ((0, 0), (0, 5)), constant_values=-np.inf)
    normalizer = summarized(masked, *np.zeros((2, 12), np.int64), 1)[2]
    found, apart = np.empty((2, 12), np.float32)
    cpu_kernels.diverge(0, 3, masked, normalizer, 4, found, apart)
    logs = [torch.tensor(logits).to(dtype).log_softmax(-1) for dtype in (torch.float32, torch.float64)]
    plain, wanted = (divergences(one, one[3::4].repeat_interleave(4, 0)) for one in logs)
    for values, as_torch, exact in zip((found, apart), plain, wanted):
        assert_as_near(torch.tensor(values), as_torch, exact)
        assert abs(values[2]) < 2e-7 and (np.abs(values[3::4]) < 2e-7).all()


@pytest.mark.parametrize("cores", [1, 3], indirect=True)
def test_products_of_all_columns_are_as_near_as_float32(cores):
    """With one value a thousand times the others. Errors come through, and torch's number of threads comes back."""
    made, states, out = nn.Linear(65, 770, bias=False), torch.randn(17, 65), torch.full((17, 770), np.nan)
    made.weight.data.normal_(0.0, 0.4)
    states[0, 3] = 1000.0
    before = torch.get_num_threads()
    with spread_over_cores() as spread:
        cpu_kernels.head_product(states, made, out, spread)
    weight = made.weight.detach()
    assert_as_near(out, states @ weight.T, states.double() @ weight.double().T)
    with pytest.raises(ZeroDivisionError), spread_over_cores() as spread:
        spread(lambda start, end: 1 // 0, 5)
    assert torch.get_num_threads() == before
