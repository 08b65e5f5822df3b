"""What the probe run records: states of every layer, blocks, hooks that are removed afterwards, what is not finite."""

import families
import pytest
import torch
from families import FAMILIES
from near import assert_as_near

from checks.tiny_texts import tokenizer_for
from eelib.common.errors import CheckpointError
from eelib.models.model import prepare
from eelib.models.probe import Call, Runs, Unsupported, foreign_code


@pytest.mark.parametrize("name", FAMILIES)
def test_states_of_every_layer(name, runs_of):
    states, _, plain, exact = runs_of(name)
    assert_as_near(states, plain["states"], exact["states"], name)


@pytest.mark.parametrize("module, named", [("model.layers.1", "model.layers.1"), ("lm_head", "logits")])
def test_values_that_are_not_finite_are_named(module, named, one_line):
    network = families.build("llama")
    network.get_submodule(module).register_forward_hook(
        lambda _m, _a, out: out * float("nan") if isinstance(out, torch.Tensor) else (out[0] * float("nan"), *out[1:])
    )
    one_line(
        ValueError,
        ("odd", named, "not finite"),
        lambda: prepare(network, tokenizer_for("causal"), "odd", "causal"),
    )


def test_what_takes_or_gives_no_tensor_is_named(one_line):
    call = Call("layers.3.gate", torch.nn.Identity(), None, None)
    one_line(CheckpointError, ("layers.3.gate", "takes no"), lambda: call.taken)
    one_line(CheckpointError, ("layers.3.gate", "gives no"), lambda: call.given)
    one_line(CheckpointError, "logits", lambda: Runs([call]).logits)


def test_what_a_network_on_trial_raises_keeps_its_cause_and_memory_is_no_answer():
    with pytest.raises(Unsupported, match="KeyError: 'mask'") as caught, foreign_code():
        raise KeyError("mask")
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(torch.OutOfMemoryError), foreign_code():
        raise torch.OutOfMemoryError("CUDA out of memory")
