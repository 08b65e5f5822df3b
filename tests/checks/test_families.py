"""The sweep over all architectures: its verdicts can fail, and its kept result is of every architecture there is."""

import json

import pytest
import torch
import transformers

import eelib.models.components
import eelib.models.head
import eelib.models.probe
from checks import families as sweep
from checks import tiny
from checks.one_family import check
from checks.tiny import KINDS
from eelib.models.model_kinds import Causal


@pytest.mark.parametrize(
    "kind, model_type",
    [
        ("causal", "llama"),
        ("causal", "falcon"),
        ("causal", "gemma2"),
        ("seq2seq", "t5"),
        ("masked", "albert"),
        ("classifier", "gpt2"),
        ("classifier", "bart"),
    ],
)
def test_sound_architectures_pass(kind, model_type):
    row = check(kind, model_type)
    assert sweep.passes(row) and row["built"] and row["reason"] == "", row
    assert row["architecture"] == KINDS[kind][model_type]
    assert (row["decoding"] == "none") == (kind in ("masked", "classifier"))


def test_crash_is_not_tried_again(monkeypatch):
    """A check that fails once and would pass the second time has failed."""
    calls = []

    def once(model, oracle, prompts):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("planted")
        return "pass"

    monkeypatch.setattr("checks.one_family.readouts", once)
    row = check("causal", "llama")
    assert row["readout"] == "fail" and "planted" in row["reason"] and len(calls) == 1


def test_refusal_has_a_reason():
    row = check("causal", "deepseek_v4")
    assert row["readout"] == "refused" and "block model.layers.0" in row["reason"] and not sweep.passes(row)


def test_error_of_our_own_is_no_refusal(monkeypatch):
    """Neither in the library, where the load makes a line of it, nor in what builds the tiny network."""
    monkeypatch.setattr(eelib.models.probe, "pairwise", None)
    row = check("causal", "llama")
    assert row["readout"] == "fail" and "NoneType" in row["reason"]
    monkeypatch.setattr(tiny, "small_fields", None)
    row = check("causal", "llama")
    assert row["readout"] == "fail" and not row["built"]


def test_check_that_takes_too_long_has_failed(monkeypatch):
    monkeypatch.setattr(sweep, "LIMIT", 0.1)
    row = sweep.Worker().ask("causal", "llama")
    assert row["readout"] == "fail" and "longer" in row["reason"] and 0.1 <= row["seconds"] < 60
    assert "1 fail" in sweep.summary([row])


def test_network_without_float64_says_why(monkeypatch):
    row = check("causal", "mixtral")
    assert sweep.passes(row) and row["dtype"] == "float32" and "Error" in row["no_float64"]
    assert check("causal", "llama")["no_float64"] == ""
    monkeypatch.setattr("checks.one_family.arguments", None)  # an error of ours does not make a network its own oracle
    with pytest.raises(TypeError):
        check("causal", "llama")


def test_wrong_head_fails(monkeypatch):
    """An unembed that is right for what the load tries and wrong for other states."""
    right = eelib.models.head.Head.forward
    monkeypatch.setattr(
        eelib.models.head.Head, "forward", lambda self, states: right(self, states) + 0.1 * (len(states) > 8)
    )
    row = check("causal", "llama")
    assert row["readout"] == "fail" and "layer 0" in row["reason"]


def test_wrong_sites_fail(monkeypatch):
    """Attention and feed-forward under each other's names."""
    monkeypatch.setattr(eelib.models.components, "roles_of", lambda *_: ["feed_forward", "attention"])
    assert check("causal", "llama")["sublayers"] == "fail"


def test_wrong_decoding_fails(monkeypatch):
    monkeypatch.setattr("checks.one_family.greedy_decode", lambda model, prompts, steps: [[7] * steps for _ in prompts])
    assert check("causal", "llama")["decoding"] == "fail"


def test_padding_that_leaks_fails(monkeypatch):
    """A mask that is right for the two rows which the load tries and wrong for more."""
    right = Causal.padded_inputs

    def leaking(self, ids, mask, target=None):
        return right(self, ids, mask, target) | ({"attention_mask": torch.ones_like(mask)} if len(ids) > 2 else {})

    monkeypatch.setattr(Causal, "padded_inputs", leaking)
    assert check("causal", "llama")["padding"] == "fail"


def test_kept_result_covers_every_architecture():
    """One row each, nothing fails, every refusal says why; 9 of 10 attention-based causal readouts pass."""
    kept = json.loads(sweep.RESULT.read_text())
    swept = kept["versions"]["transformers"]
    if swept != transformers.__version__:
        line = f"{sweep.RESULT.name} is of transformers {swept}, not {transformers.__version__}"
        pytest.fail(f"{line}: run python -m checks.families again", pytrace=False)
    rows = kept["rows"]
    assert [(r["kind"], r["model_type"]) for r in rows] == [(k, m) for k, names in KINDS.items() for m in names]
    assert not [r for r in rows if "fail" in [r[k] for k in sweep.VERDICTS]]
    assert all(sweep.passes(r) or (r["reason"] and "\n" not in r["reason"]) for r in rows)
    causal = [r for r in rows if r["kind"] == "causal" and r["built"] and r["attention_based"]]
    assert sum(r["readout"] == "pass" for r in causal) >= 0.9 * len(causal)
