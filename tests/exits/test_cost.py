"""Costs by hand, of public models from their configurations and of tiny ones from their modules."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eelib.common.errors import InputError
from eelib.exits.cost import Sizes, break_even, deferred, drafting, parameters, prices, sizes_of
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named

# hidden size, feed-forward size, heads, heads of keys and values, vocabulary, layers: their published configurations.
PUBLIC = {"Llama-2-7B": (4096, 11008, 32, 32, 32000, 32), "Llama-3-8B": (4096, 14336, 32, 8, 128256, 32)}
SMALL = Sizes(layers=4, block=100, head=300, rows=30)  # H = 3


def sizes_by_hand(width, inner, heads, kv_heads, vocabulary, layers):
    narrow = width // heads * kv_heads
    return Sizes(layers, 2 * width * width + 2 * width * narrow + 3 * width * inner, vocabulary * width, vocabulary)


@pytest.mark.parametrize("name, expected", [("Llama-2-7B", 19.8), ("Llama-3-8B", 10.1)])
def test_where_reading_the_whole_head_at_every_layer_pays(name, expected):
    sizes = sizes_by_hand(*PUBLIC[name])
    assert round(break_even(sizes), 1) == expected
    at_break_even = np.interp(break_even(sizes), range(1, 33), np.arange(1, 33) * (1 + sizes.read))
    assert at_break_even == pytest.approx(sizes.full)  # what tokens pay that leave there by such a gate


@pytest.mark.parametrize("name", PUBLIC)
def test_the_networks_of_public_configurations_have_these_sizes(name):
    width, inner, heads, kv_heads, vocabulary, layers = PUBLIC[name]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=2,
    )
    with torch.device("meta"):
        network = LlamaForCausalLM(config)
    sizes = sizes_by_hand(*PUBLIC[name])
    assert parameters(network.model.layers[0]) == sizes.block and parameters(network.lm_head) == sizes.head


def test_a_loaded_models_sizes(model_of):
    model = model_of("llama")
    config, sizes = model.network.config, sizes_of(model)
    heads = config.num_attention_heads, config.num_key_value_heads
    by_hand = sizes_by_hand(
        config.hidden_size, config.intermediate_size, *heads, config.vocab_size, config.num_hidden_layers
    )
    assert sizes == by_hand
    assert sizes_of(model, positions=10).read == pytest.approx(sizes.read / 10)
    t5 = model_of("t5")
    biased = dict(t5.blocks[0].named_parameters())
    assert [name for name in biased if "relative_attention_bias" in name]
    assert parameters(t5.blocks[0]) == parameters(t5.blocks[1])  # the looked-up one does not count


def test_prices_by_hand():
    def price(gate, **more):
        rule = {key: more.pop(key) for key in ("exit_layers", "minimum_layer") if key in more}
        return prices(SMALL, ExitRule(gate_named(gate), **rule), **more).tolist()

    assert price("fixed") == [4, 5, 6, 7]  # l + H
    assert price("confidence") == [1 + 3, 2 + 6, 3 + 9, 4 + 9 + 3]
    assert price("confidence", exit_layers=(2,)) == [1, 5, 6, 4 + 3 + 3]
    assert price("confidence", minimum_layer=3) == [1, 2, 6, 4 + 3 + 3]
    assert price("patience", minimum_layer=3) == [4, 8, 12, 16]  # it remembers, so it has to be asked before
    assert price("state_saturation", gate_parameters=50) == [1 + 0.5 + 3, 2 + 1 + 3, 3 + 1.5 + 3, 4 + 1.5 + 3]

    def shortlist(layer):
        return 30 if layer == 1 else 5

    assert price("softmax_difference", rows=shortlist) == [1 + 3, 2 + 3.5, 3 + 4, 4 + 4 + 3]
    listed = ExitRule(gate_named("shortlist", k=5))
    assert prices(SMALL, listed).tolist() == price("softmax_difference", rows=shortlist)
    late = ExitRule(gate_named("shortlist", layer=2, k=5))
    assert prices(SMALL, late).tolist() == [1 + 3, 2 + 3, 3 + 3.5, 4 + 3.5 + 3]
    between = ExitRule(gate_named("shortlist", layer=1, k=5), exit_layers=(2, 3))  # lists where it is asked first
    assert prices(SMALL, between).tolist() == [1 + 3, 2 + 3, 3 + 3.5, 4 + 3.5 + 3]
    assert all((np.diff(price(gate)) >= 0).all() for gate in ("confidence", "fixed", "entropy", "schedule"))


def test_speed_ups_by_hand():
    assert SMALL.full == 7 and break_even(SMALL) == 7 / 4
    assert drafting(SMALL, 2, 0.5, 2) == pytest.approx((1 + 0.5 + 0.25) * 7 / (4 + 2 * 2 + 3 * 3))
    assert drafting(SMALL, 1, 1.0, 3) == pytest.approx(4 * 7 / (4 + 3 + 4 * 3))
    assert drafting(SMALL, 1, 1.0, 10**4) == pytest.approx(7 / 4, rel=1e-3)  # its limit, (L + H) / (E + H)
    assert deferred(SMALL, 1, 1.0) == 7 / 4 and deferred(SMALL, 2, 0.5) == pytest.approx(7 / (5 + 0.5 * 5))


def test_bad_input_is_one_line(one_line):
    one_line(
        InputError,
        ["confidence", "rows must be 0 to 30"],
        lambda: prices(SMALL, ExitRule(gate_named("confidence")), 31),
    )
    one_line(InputError, "layers 1 to 3", lambda: drafting(SMALL, 4, 0.5, 1))
    one_line(InputError, "shares 0 to 1", lambda: deferred(SMALL, 2, 1.5))
    one_line(
        InputError, "allowed are layers 1 to 4", lambda: prices(SMALL, ExitRule(gate_named("fixed"), minimum_layer=5))
    )
