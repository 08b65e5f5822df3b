"""The CPU's kernels against float64: rows of logits of odd widths, with ties, huge and masked; products; threads."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import numpy as np
import pytest
import torch
from oracle import assert_as_near, divergences
from torch import nn

from eelib.lens import cpu_kernels
from eelib.lens.cpu_kernels import spread_over_cores

WIDTHS = [1, 9, 63, 64, 65, 1000]


def summarized(logits, wanted, k, known=None):
    """(top-k values, ids, normalizer, entropy, rank, rank of the known column) of rows [n, V]."""
    n = len(logits)
    found = np.empty((n, k), np.float32), np.empty((n, k), np.int32), *np.empty((2, n), np.float32)
    found += tuple(np.empty((2, n), np.int32))
    cpu_kernels.summarize(0, n, logits, wanted, wanted if known is None else known, *found)
    return found


def by_torch(logits, dtype):
    """(normalizer, entropy) in a dtype of torch's."""
    z = torch.tensor(logits).to(dtype)
    return z.logsumexp(-1), torch.distributions.Categorical(logits=z).entropy()


@pytest.mark.parametrize(("width", "scale"), [*zip(WIDTHS, cycle([0.01, 3.0, 1e4]))])
def test_summary(width, scale):
    """Logits with one decimal: the small ones are all 0, and of equal ones the lower id comes first."""
    rng = np.random.default_rng(width)
    logits = (rng.normal(size=(7, width)) * scale).round(1).astype(np.float32)
    wanted, known = rng.integers(0, width, (2, 7))
    k = min(10, width)
    top, ids, normalizer, entropy, rank, known_rank = summarized(logits, wanted, k, known)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    assert (ids == order).all() and (top == np.take_along_axis(logits, order, 1)).all()
    for columns, found in ((wanted, rank), (known, known_rank)):
        assert (found == (logits > np.take_along_axis(logits, columns[:, None], 1)).sum(1) + 1).all()
    plain, exact = (by_torch(logits, dtype) for dtype in (torch.float32, torch.float64))
    assert_as_near(torch.tensor(normalizer), plain[0], exact[0])
    assert_as_near(torch.tensor(entropy), plain[1], exact[1])


def test_masked_logits_have_no_share():
    logits = np.full((1, 90), -np.inf, np.float32)
    logits[0, :12] = np.arange(12)
    _, ids, normalizer, entropy, rank, _ = summarized(logits, np.array([0]), 10)
    expected = by_torch(logits[:, :12], torch.float64)
    assert ids[0].tolist() == list(range(11, 1, -1)) and rank[0] == 12
    assert normalizer[0] == pytest.approx(expected[0].item(), rel=1e-6)
    assert entropy[0] == pytest.approx(expected[1].item(), rel=1e-5)


@pytest.mark.parametrize("width", WIDTHS)
def test_divergence(width):
    rng = np.random.default_rng(width)
    logits = (rng.normal(size=(12, width)) * 2).astype(np.float32)
    logits[2] = logits[3]  # tokens of four rows each: here p is q
    normalizer = summarized(logits, np.zeros(12, np.int64), 1)[2]
    found, apart = np.empty((2, 12), np.float32)
    cpu_kernels.diverge(0, 3, logits, normalizer, 4, found, apart)
    logs = [torch.tensor(logits).to(dtype).log_softmax(-1) for dtype in (torch.float32, torch.float64)]
    plain, wanted = (divergences(one, one[3::4].repeat_interleave(4, 0)) for one in logs)
    for values, as_torch, exact in zip((found, apart), plain, wanted):
        assert_as_near(torch.tensor(values), as_torch, exact)
        assert abs(values[2]) < 2e-7 and (np.abs(values[3::4]) < 2e-7).all()


def test_divergence_from_what_is_masked():
    """What both rows mask, or the last one alone, adds nothing; what the other one masks has a share of e^-10000."""
    logits = np.array([[0, 1, -np.inf, 2], [0, 1, -np.inf, -np.inf], [-np.inf, 1, -np.inf, 2]], np.float32)
    for first, second, expected in ((0, 1, "finite"), (0, 2, "finite"), (1, 2, "far")):
        pair = logits[[first, second]]
        normalizer = torch.tensor(pair).logsumexp(-1).numpy()
        js, kl = np.empty((2, 2), np.float32)
        cpu_kernels.diverge(0, 1, pair, normalizer, 2, js, kl)
        logs = torch.tensor(pair).log_softmax(-1)
        assert kl[0] == pytest.approx(float(divergences(logs, logs[1:])[1][0]), rel=1e-5)
        assert (kl[0] > 1000) == (expected == "far") and abs(kl[1]) < 1e-6 and js[0] <= math.log(2)


def head(width, vocabulary):
    made = nn.Linear(width, vocabulary, bias=False)
    made.weight.data.normal_(0.0, 3.0 / width**0.5)
    return made


@pytest.mark.parametrize("shape", [(1, 24, 11), (17, 65, 770), (5, 1024, 300)])  # rows, width, vocabulary
def test_products_are_as_near_as_float32(shape):
    """With one value a thousand times the others."""
    rows, width, vocabulary = shape
    made, states, out = head(width, vocabulary), torch.randn(rows, width), torch.empty(rows, vocabulary)
    states[0, 3] = 1000.0
    with spread_over_cores() as spread:
        cpu_kernels.head_product(states, made, out, spread)
    weight = made.weight.detach()
    assert_as_near(out, states @ weight.T, states.double() @ weight.double().T)


@pytest.mark.parametrize("factors, amx, used", [(1.0, False, False), (2.0, True, False), (2.0, False, True)])
def test_products_of_rounded_factors_are_not_used(factors, amx, used, monkeypatch):
    """The factors of the trial are 1 if they were rounded to bfloat16; 2 stands for others."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch, "full", lambda size, value: factors * torch.ones(size))
    assert cpu_kernels.onednn_is_better.__wrapped__() is used


def test_threads_put_the_setting_back(monkeypatch):
    """One that begins while another multiplies waits, so that it does not take the other's setting for its own."""
    settings, seen = torch.backends.mkldnn.matmul, []
    before = settings.fp32_precision
    monkeypatch.setattr(cpu_kernels, "onednn_is_better", lambda: True)

    def spread(*_product):
        seen.append(settings.fp32_precision)
        time.sleep(0.2 * len(seen))  # were both here at once, the one that came first would leave first

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: cpu_kernels.head_product(None, head(24, 11), None, spread), range(2)))
    assert seen == ["bf16", "bf16"] and settings.fp32_precision == before


@pytest.mark.parametrize("cores", [1, 3], indirect=True)
def test_every_row_once_on_each_number_of_cores(cores):
    """Slices cover the range, errors come through, and torch's number of threads is what it was."""
    before = torch.get_num_threads()
    for count in (1, 2, 7):
        seen = []
        with spread_over_cores() as spread:
            spread(lambda start, end, more: seen.extend(range(start, end)), count, None)
        assert sorted(seen) == list(range(count))
    with pytest.raises(ZeroDivisionError), spread_over_cores() as spread:
        spread(lambda start, end: 1 // 0, 5)
    assert torch.get_num_threads() == before
