"""Every readout of every layer against the plainest float64 arithmetic, family by family."""

import math

import families
import pytest
import torch
from families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st

from checks.tiny_texts import PROMPTS
from eelib.lens import readout
from eelib.lens.readout import SCALARS, read
from eelib.tracing.decode import states_of

NEAR = 1e-3  # logits this close may swap places between float32 and float64


@pytest.fixture(params=FAMILIES, scope="module")
def both(request, model_of, oracle_of):
    """(model, readout, oracle's logits [n, L+1, V] and states, emitted ids, reference ids) over several sequences."""
    name = request.param
    model, oracle, family = model_of(name), oracle_of(name), FAMILIES[name]
    prompts = model.tokenizer(PROMPTS[:3])["input_ids"]
    outputs = prompts if model.kind == "masked" else [[40, 9, 77, 1], [200], [7, 7, 299]]
    runs = [families.oracle_run(oracle, family, p, o) for p, o in zip(prompts, outputs)]
    states = torch.cat([run["states"] for run in runs])
    logits = family.unembed(oracle, states)
    final = logits[:, -1].argmax(-1)
    known = torch.tensor([(i * 37) % model.vocab_size if i % 3 else -1 for i in range(len(final))])
    mine, _ = states_of(model, prompts, outputs)
    return model, read(model.unembed, mine, final, known), logits, states, final, known


def test_probabilities(both):
    _, got, logits, _, final, known = both
    p = (logits - logits.logsumexp(-1, keepdim=True)).exp()
    near = dict(rtol=2e-3, atol=1e-5)
    top = p.sort(-1, descending=True).values
    torch.testing.assert_close(got["probability"].double(), top[..., 0], **near)
    torch.testing.assert_close(got["margin"].double(), top[..., 0] - top[..., 1], rtol=2e-3, atol=5e-5)
    torch.testing.assert_close(got["topk_probability"].double(), top[..., :10], **near)
    rows = torch.arange(len(final))
    torch.testing.assert_close(got["final_probability"].double(), p[rows, :, final], **near)
    expected = p[rows, :, known.clamp(min=0)]
    expected[known < 0] = math.nan
    torch.testing.assert_close(got["reference_probability"].double(), expected, equal_nan=True, **near)


def test_top_ids(both):
    """The ids are distinct and their float64 logits are the largest ones, in order; ties may fall either way."""
    model, got, logits, _, _, _ = both
    ids = got["topk_ids"].long()
    largest = logits.sort(-1, descending=True).values[..., :10]
    torch.testing.assert_close(logits.gather(2, ids), largest, rtol=0, atol=NEAR)
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
    assert torch.equal(got["top1"], got["topk_ids"][..., 0])
    assert (got["top1"] == logits.argmax(-1)).double().mean() > 0.98


def test_rank(both):
    _, got, logits, _, final, _ = both
    own = logits.gather(2, final[:, None, None].expand(-1, logits.shape[1], 1))
    low, high = ((logits > own + shift).sum(-1) + 1 for shift in (NEAR, -NEAR))
    rank = got["final_rank"]
    assert ((low <= rank) & (rank <= high)).all() and (rank[:, -1] == 1).all()
    assert (high - low).double().mean() < 2  # the tolerance is narrow enough to mean something


def test_entropy_divergence_cosine(both):
    _, got, logits, states, _, _ = both
    logs = logits - logits.logsumexp(-1, keepdim=True)
    p = logs.exp()
    torch.testing.assert_close(got["entropy"].double(), -(p * logs).sum(-1), rtol=1e-3, atol=1e-4)
    q, middle = p[:, -1:], (p + p[:, -1:]) / 2
    js = ((p * (p / middle).log()).sum(-1) + (q * (q / middle).log()).sum(-1)) / 2
    torch.testing.assert_close(got["js_final"].double(), js, rtol=1e-3, atol=1e-5)
    last = states[:, -1:]
    cosine = (states * last).sum(-1) / states.norm(dim=-1) / last.norm(dim=-1)
    torch.testing.assert_close(got["cosine"].double(), cosine, rtol=1e-4, atol=1e-5)
    assert js[:, :-1].min() > 1e-4 and cosine[:, 0].max() < 0.99  # the layers do differ


class Plain(torch.nn.Module):
    """A unembed whose logits are the states themselves."""

    def __init__(self, width):
        super().__init__()
        self.vocab_size = self.hidden_size = width

    def forward(self, states):
        return states.float()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(-200, 200, width=32), min_size=3, max_size=3), min_size=2, max_size=5),
    st.integers(0, 2),
)
def test_bounds(layers, token):
    """Whatever the logits, extreme ones included: entropy, JS, rank and probabilities stay inside their bounds."""
    states = torch.tensor([layers])
    got = read(Plain(3), states, torch.tensor([token]))
    assert all(torch.isfinite(got[name]).all() for name in SCALARS if name != "reference_probability")
    assert got["reference_probability"].isnan().all()
    assert ((0 <= got["entropy"]) & (got["entropy"] <= math.log(3) + 1e-6)).all()
    assert ((0 <= got["js_final"]) & (got["js_final"] <= math.log(2) + 1e-6)).all() and got["js_final"][0, -1] < 2e-7
    assert ((1 <= got["final_rank"]) & (got["final_rank"] <= 3)).all()
    torch.testing.assert_close(got["topk_probability"].sum(-1), torch.ones(1, len(layers)), rtol=0, atol=1e-5)
    assert (got["topk_probability"] <= 1).all() and (got["margin"] >= 0).all()


FOUR = st.lists(st.floats(-30, 30, width=32), min_size=4, max_size=4)


@settings(max_examples=40, deadline=None)
@given(FOUR, FOUR)
def test_divergence_is_symmetric(a, b):
    there, back = (
        float(read(Plain(4), torch.tensor([pair]), torch.tensor([0]))["js_final"][0, 0]) for pair in ([a, b], [b, a])
    )
    assert there == pytest.approx(back, abs=1e-6)


def test_opposite_distributions_reach_ln_2():
    states = torch.tensor([[[500.0, 0.0], [0.0, 500.0]]])
    assert float(read(Plain(2), states, torch.tensor([1]))["js_final"][0, 0]) == pytest.approx(math.log(2), abs=1e-6)


def test_small_vocabulary_has_fewer_top_ids():
    assert read(Plain(4), torch.randn(2, 3, 4), torch.tensor([0, 1]))["topk_ids"].shape == (2, 3, 4)


def test_ties_count_for_the_token():
    assert read(Plain(4), torch.zeros(1, 2, 4), torch.tensor([3]))["final_rank"].tolist() == [[1, 1]]


def test_chunks_change_nothing(monkeypatch):
    torch.manual_seed(0)
    states, final = torch.randn(23, 4, 50), torch.arange(23)
    whole = read(Plain(50), states, final)
    monkeypatch.setattr(readout, "LOGITS_AT_ONCE", 50 * 5 + 1)
    parts = read(Plain(50), states, final)
    assert all(torch.equal(whole[k], parts[k]) or k == "reference_probability" for k in whole.values)


def test_given_last_state_is_the_target():
    torch.manual_seed(0)
    states, final = torch.randn(5, 3, 20), torch.arange(5)
    other = read(Plain(20), states[:, :2], final, last=states[:, 2])
    for name in ("js_final", "cosine", "entropy"):
        assert torch.equal(other[name], read(Plain(20), states, final)[name][:, :2])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_state_that_is_not_finite_is_named(bad, one_line):
    states = torch.zeros(2, 3, 4)
    states[1, 1, 2] = bad
    one_line(ValueError, "layer 1 of 2", lambda: read(Plain(4), states, torch.tensor([0, 0])))
