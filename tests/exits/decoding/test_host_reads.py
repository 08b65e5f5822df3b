"""How often a decoding waits for the device: what is read of it by the host, counted."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import eelib
from checks.tiny_texts import PROMPTS
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique")


class Counting(TorchDispatchMode):
    """Counts operations that need values on the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(name in func.__name__ for name in READS)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch):
    """`tolist` and `numpy` go round the dispatcher."""
    mode = Counting()
    with monkeypatch.context() as patch, mode:
        for name in ("tolist", "numpy"):
            plain = getattr(torch.Tensor, name)

            def reading(self, *args, plain=plain, **kwargs):
                mode.count += 1
                return plain(self, *args, **kwargs)

            patch.setattr(torch.Tensor, name, reading)
        yield mode


def reads(model, monkeypatch, steps, **given):
    """Reads of one row, of so many tokens."""
    with counted(monkeypatch) as mode:
        made = eelib.generate(model, PROMPTS[:1], max_new_tokens=steps, **given)
    assert len(made.tokens) == steps
    return mode.count


def per_step(model, monkeypatch, **given):
    """Of a step after the prompt."""
    long, short = (reads(model, monkeypatch, steps, **given) for steps in (9, 5))
    assert (long - short) % 4 == 0
    return (long - short) // 4


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_reads_per_step(name, model_of, eos, monkeypatch):
    """One per step without a gate; one more per layer that is asked and may stop, and none at the others."""
    model = model_of(name)
    eos(model, {model.vocab_size + 1})
    reads(model, monkeypatch, 2)  # what is tried once
    plain = per_step(model, monkeypatch)
    confidence = gate_named("confidence")
    for exits, asked in (((2,), 1), (None, model.layers - 1)):
        rule = ExitRule(confidence, 2.0, exit_layers=exits)
        gated = per_step(model, monkeypatch, gate=rule, kv_policy="deferred")
        assert gated == plain + asked + 1  # and the scores, once per step
    late = ExitRule(confidence, 2.0, full_depth_tokens=20)
    assert per_step(model, monkeypatch, gate=late, kv_policy="deferred") == plain + 1
    memory = ExitRule(gate_named("patience"), 9.0, minimum_layer=model.layers - 1)
    assert per_step(model, monkeypatch, gate=memory, kv_policy="deferred") == plain + 1 + 1
    leaving = per_step(model, monkeypatch, exit_layers=(1,), kv_policy="deferred")
    assert leaving <= plain + 2  # whether, the score and the token, in place of the last layer's token
