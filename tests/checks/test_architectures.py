"""The check of architectures passes sound ones, and sees what is planted."""

import importlib
import json
import os
import signal
import time

import pytest
import torch
import transformers
from check_runs import missed

import eelib.models.components
import eelib.models.head
import eelib.models.probe
from checks import architectures, tiny
from checks.one_architecture import check, passes
from checks.tiny import KINDS
from eelib.common.files import data_folder
from eelib.models.model_kinds import Causal


@pytest.mark.parametrize(
    "kind, model_type",
    [("causal", "falcon"), ("seq2seq", "t5"), ("masked", "albert"), ("classifier", "gpt2"), ("classifier", "bart")],
)
def test_sound_architectures_pass(kind, model_type):
    row = check(kind, model_type)
    assert passes(row) and row["reason"] == "" and row["architecture"] == KINDS[kind][model_type], row
    assert (row["decoding"] == "none") == (kind in ("masked", "classifier"))


def test_an_architecture_is_refused_with_a_reason_and_compared_in_float32_for_one():
    row = check("causal", "deepseek_v4")
    assert row["readout"] == "refused" and "block model.layers.0" in row["reason"] and not passes(row)
    row = check("causal", "mixtral")
    assert passes(row) and row["dtype"] == "float32" and "Error" in row["no_float64"]


def leaking(self, ids, mask, target=None, right=Causal.padded_inputs):
    return right(self, ids, mask, target) | ({"attention_mask": torch.ones_like(mask)} if len(ids) > 2 else {})


def wrong_head(self, states, right=eelib.models.head.Head.forward):
    return right(self, states) + 0.1 * (len(states) > 8)


def never(*_):
    raise RuntimeError("planted")


@pytest.mark.parametrize(
    "verdict, owner, name, planted, words",
    [
        ("readout", eelib.models.head.Head, "forward", wrong_head, "layer 0"),  # right for what the load tries
        ("sublayers", eelib.models.components, "roles_of", lambda *_: ["feed_forward", "attention"], "mix"),
        ("padding", Causal, "padded_inputs", leaking, "padded row"),
        (
            "decoding",
            "checks.one_architecture",
            "greedy_decode",
            lambda _, rows, n: [[7] * n for _ in rows],
            "plain loop",
        ),
        ("readout", "checks.one_architecture", "readouts", never, "planted"),
        ("readout", eelib.models.probe, "pairwise", None, "NoneType"),  # an error of our own is no refusal
        ("readout", tiny, "small_fields", None, "not built"),
    ],
)
def test_what_is_wrong_with_an_architecture_fails(verdict, owner, name, planted, words, monkeypatch):
    owner = importlib.import_module(owner) if isinstance(owner, str) else owner
    monkeypatch.setattr(owner, name, planted)
    row = check("causal", "llama")
    assert row[verdict] == "fail" and words in row["reason"], row
    assert missed(architectures.goals([row])) and "1 of 1" in architectures.goals([row])[0]["measured"]


@pytest.mark.parametrize(
    "limit, check, words",
    [
        (0.1, lambda *_: time.sleep(9), "longer than 0.1 s"),
        (60, lambda *_: os.kill(os.getpid(), signal.SIGKILL), "died"),
    ],
)
def test_a_check_that_takes_too_long_or_dies_has_failed(limit, check, words, monkeypatch):
    monkeypatch.setattr(architectures, "LIMIT", limit)
    monkeypatch.setattr(architectures, "check", check)
    row = architectures.checked("causal", "llama")
    assert row["readout"] == "fail" and words in row["reason"]


def test_the_kept_result_covers_every_architecture():
    """Of this version of transformers, as the sample that is computed again can not show."""
    kept = json.loads((data_folder("measured") / "architectures.json").read_text())
    assert kept["versions"]["transformers"] == transformers.__version__, f"run {kept['command']} again"
    rows = kept["rows"]
    assert [(r["kind"], r["model_type"]) for r in rows] == [(k, m) for k, names in KINDS.items() for m in names]
    assert kept["goals"] == architectures.goals(rows) and not missed(kept["goals"])
