"""Every readout of every layer against the plainest float64 arithmetic, family by family."""

import math

import plain_runs
import pytest
import torch
from families import FAMILIES, identity_unembed
from hypothesis import given, settings
from hypothesis import strategies as st
from near import allowed_error, assert_as_near

from checks.tiny_texts import PROMPTS
from eelib.lens import readout
from eelib.lens.readout import SCALARS, ReadoutBuffer, read
from eelib.tracing.decode import states_of


@pytest.fixture(params=FAMILIES, scope="module")
def both(request, model_of, plain_of, oracle_of):
    """(readout; (logits [n, L+1, V], readouts by name), plain in float32; the same in float64; final, known ids)."""
    name = request.param
    model, family = model_of(name), FAMILIES[name]
    prompts = model.tokenizer(PROMPTS[:3])["input_ids"]
    outputs = [[40, 9, 77, 1], [200], [7, 7, 299]] if model.adapter.writes else prompts
    found, final, known = [], None, None
    for network in (oracle_of(name), plain_of(name)):
        runs = [plain_runs.oracle_run(network, family, p, o) for p, o in zip(prompts, outputs, strict=True)]
        states = torch.cat([run["states"] for run in runs])
        logits = family.unembed(network, states)
        if final is None:
            final = logits[:, -1].argmax(-1)
            known = torch.tensor([(i * 37) % model.vocab_size if i % 3 else -1 for i in range(len(final))])
        found.append((logits, plain_runs.readouts(logits, states, final, known)))
    exact, plain = found
    return read(model.unembed, states_of(model, prompts, outputs)[0], final, known), plain, exact, (final, known)


def test_values(both):
    """Each is as near to float64 as the definitions are that are worked out in float32."""
    got, (_, plain), (_, exact), _ = both
    for name, values in exact.items():
        assert_as_near(got[name], plain[name], values, name)
    js, cosine = exact["js_final"], exact["cosine"]
    assert js[:, :-1].min() > 1e-4 and cosine[:, 0].max() < 0.99  # the layers do differ


def test_top_ids(both):
    """The ids are distinct, and their float64 logits the largest ones in order, but where rounding explains another."""
    got, (plain, _), (logits, _), _ = both
    near = 2 * allowed_error(plain, logits)  # two logits may each be off by so much
    ids = got["topk_ids"].long()
    largest = logits.sort(-1, descending=True).values[..., :10]
    assert ((logits.gather(2, ids) - largest).abs() <= near).all()
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
    assert torch.equal(got["top1"], got["topk_ids"][..., 0])
    clear = largest[..., 0] - largest[..., 1] > near
    assert torch.equal(got["top1"][clear].long(), logits.argmax(-1)[clear])
    assert clear.double().mean() > 0.99  # the margin is narrow enough to mean something


def test_ranks(both):
    """Of the last layer's token, and of the reference's, NaN where there is none."""
    got, (plain, _), (logits, _), (final, known) = both
    near = 2 * allowed_error(plain, logits)
    for name, ids in (("final_rank", final), ("reference_rank", known)):
        own = logits.gather(2, ids.clamp(min=0)[:, None, None].expand(-1, logits.shape[1], 1))
        low, high = ((logits > own + shift).sum(-1) + 1 for shift in (near, -near))
        rank, there = got[name], ids >= 0
        assert ((low <= rank) & (rank <= high))[there].all() and rank[~there].isnan().all()
        assert (high - low <= 1).double().mean() > 0.9  # nearly always one rank is allowed: `high` counts the token
    assert (got["final_rank"][:, -1] == 1).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(-200, 200, width=32), min_size=3, max_size=3), min_size=2, max_size=5),
    st.integers(0, 2),
)
def test_bounds(layers, token):
    """Whatever the logits, extreme ones included: entropy, JS, rank and probabilities stay inside their bounds."""
    states = torch.tensor([layers])
    got = read(identity_unembed(3), states, torch.tensor([token]))
    assert all(got[name].isnan().all() if "reference" in name else got[name].isfinite().all() for name in SCALARS)
    assert ((0 <= got["entropy"]) & (got["entropy"] <= math.log(3) + 1e-6)).all()
    assert ((0 <= got["js_final"]) & (got["js_final"] <= math.log(2) + 1e-6)).all() and got["js_final"][0, -1] < 2e-7
    assert (got["kl_final"] >= 0).all() and got["kl_final"][0, -1] < 1e-6
    assert ((1 <= got["final_rank"]) & (got["final_rank"] <= 3)).all()
    torch.testing.assert_close(got["topk_probability"].sum(-1), torch.ones(1, len(layers)), rtol=0, atol=1e-5)
    assert (got["topk_probability"] <= 1).all() and (got["margin"] >= 0).all()


def test_extremes():
    """Fewer ids than ten of a small vocabulary; ties count for the token; opposite distributions are ln 2 apart."""
    assert read(identity_unembed(4), torch.randn(2, 3, 4), torch.tensor([0, 1]))["topk_ids"].shape == (2, 3, 4)
    assert read(identity_unembed(4), torch.zeros(1, 2, 4), torch.tensor([3]))["final_rank"].tolist() == [[1, 1]]
    found = read(identity_unembed(2), torch.tensor([[[500.0, 0.0], [0.0, 500.0]]]), torch.tensor([1]))
    assert float(found["js_final"][0, 0]) == pytest.approx(math.log(2), abs=1e-6)


def test_chunks_change_nothing(monkeypatch):
    torch.manual_seed(0)
    states, final = torch.randn(23, 4, 50), torch.arange(23)
    whole = read(identity_unembed(50), states, final)
    monkeypatch.setattr(readout, "LOGITS_AT_ONCE", 50 * 5 + 1)
    parts = read(identity_unembed(50), states, final)
    assert all(torch.equal(whole[k], parts[k]) or "reference" in k for k in whole.values)


def test_given_last_state_is_the_target():
    torch.manual_seed(0)
    states, final = torch.randn(5, 3, 20), torch.arange(5)
    other = read(identity_unembed(20), states[:, :2], final, last=states[:, 2])
    for name in ("js_final", "kl_final", "cosine", "entropy"):
        assert torch.equal(other[name], read(identity_unembed(20), states, final)[name][:, :2])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_state_that_is_not_finite_is_named(bad, one_line):
    states = torch.zeros(2, 3, 4)
    states[1, 1, 2] = bad
    one_line(ValueError, "layer 1 of 2", lambda: read(identity_unembed(4), states, torch.tensor([0, 0])))


@pytest.mark.parametrize("room", [1, 400, 4000, 1 << 20])
def test_states_that_come_in_pieces_and_any_order(room, monkeypatch):
    monkeypatch.setattr(readout, "STATES_AT_ONCE", room)
    torch.manual_seed(0)
    lengths = [4, 1, 6]
    states = [torch.randn(n, 3, 20) for n in lengths]
    ids = [torch.arange(n) + 5 for n in lengths]
    buffer = ReadoutBuffer(identity_unembed(20), [[]] * 3)
    for step in range(6):
        rows = [row for row in (2, 0, 1) if step < lengths[row]]
        buffer.add(torch.stack([states[row][step] for row in rows]), rows, [int(ids[row][step]) for row in rows])
    got, whole = buffer.finish(), read(identity_unembed(20), torch.cat(states), torch.cat(ids))
    for name, values in whole.values.items():
        torch.testing.assert_close(got[name], values, rtol=0, atol=0, equal_nan=True)


def test_reference_is_known_while_the_output_follows_it():
    buffer = ReadoutBuffer(identity_unembed(20), [[3, 4, 5], []])
    for token in [3, 9, 5]:
        buffer.add(torch.zeros(2, 2, 20), [0, 1], [token, token])
    known = buffer.finish()["reference_probability"][:, 0]
    expected = torch.tensor([1 / 20, 1 / 20, math.nan] + [math.nan] * 3)  # the first departure is still known
    torch.testing.assert_close(known, expected, equal_nan=True)
