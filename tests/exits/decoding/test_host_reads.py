"""How often a step of decoding waits for the device: what the host reads of it, counted."""

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

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(name in func.__name__ for name in READS)
        return func(*args, **(kwargs or {}))


def per_step(model, monkeypatch, **given):
    """Reads of a step of one sequence after the prompt."""
    counts = []
    for steps in (9, 5):
        with monkeypatch.context() as patch, Counting() as mode:
            for name in ("tolist", "numpy"):  # which go round the dispatcher
                plain = getattr(torch.Tensor, name)

                def reading(self, *args, plain=plain, **kwargs):
                    mode.count += 1
                    return plain(self, *args, **kwargs)

                patch.setattr(torch.Tensor, name, reading)
            made = eelib.generate(model, PROMPTS[:1], max_new_tokens=steps, **given)
        assert len(made.tokens) == steps
        counts.append(mode.count)
    assert (counts[0] - counts[1]) % 4 == 0
    return (counts[0] - counts[1]) // 4


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_reads_per_step(name, model_of, eos, monkeypatch):
    """One a step without a gate; one more per layer that is asked and may stop, and none at the others."""
    model = model_of(name)
    eos(model, {model.vocab_size + 1})
    eelib.generate(model, PROMPTS[:1], max_new_tokens=2)  # what is tried once
    plain, confidence = per_step(model, monkeypatch), gate_named("confidence")
    for rule, asked in (
        (ExitRule(confidence, 2.0, exit_layers=(2,)), 1),
        (ExitRule(confidence, 2.0), model.layers - 1),
        (ExitRule(confidence, 2.0, full_depth_tokens=20), 0),
        (ExitRule(gate_named("patience"), 9.0, minimum_layer=model.layers - 1), 1),
    ):
        gated = per_step(model, monkeypatch, gate=rule, kv_policy="deferred")
        assert gated == plain + asked + 1  # and the scores, once a step
    fixed = per_step(model, monkeypatch, exit_layers=(1,), kv_policy="deferred")
    assert fixed <= plain + 2  # whether, the score and the token, in place of the last layer's token
