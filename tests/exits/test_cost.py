"""Costs by hand, of tiny models from their modules; forecasts."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from exits_made import policy_of

import eelib
from checks.tiny_texts import PROMPTS
from eelib.common.errors import InputError
from eelib.exits.cost import Sizes, exit_costs, parameters, sizes_of
from eelib.exits.decoding.generate import batches, encoded
from eelib.exits.decoding.pass_costs import PassCosts, pass_costs
from eelib.exits.exit_rule import ExitRule, fixed_exit
from eelib.exits.forecast import Forecast, Planned, step_seconds
from eelib.exits.gates.gate import gate_named
from eelib.exits.gates.state import StateClassifier
from eelib.exits.trace_scores import decide, make_scores
from eelib.models.lens_adapters import Translators
from eelib.tasks.task import Task

SMALL = Sizes(layers=4, block=100, head=300, rows=30)  # H = 3


def test_a_loaded_models_sizes(model_of):
    model = model_of("llama")
    config, sizes = model.network.config, sizes_of(model)
    width, vocabulary = config.hidden_size, config.vocab_size
    narrow = width // config.num_attention_heads * config.num_key_value_heads
    block = 2 * width * width + 2 * width * narrow + 3 * width * config.intermediate_size
    assert sizes == Sizes(config.num_hidden_layers, block, vocabulary * width, vocabulary)
    assert sizes_of(model, positions=10).read == pytest.approx(sizes.read / 10)
    through = replace(model, translators=Translators(model.layers, width))
    assert sizes_of(through) == replace(sizes, translator=width * width)
    first, second, _ = model_of("t5").blocks
    assert parameters(first) == parameters(second)  # the first one's table of position biases does not count


def test_exit_costs_by_hand():
    def cost(gate, rule=(), **more):
        return exit_costs(SMALL, ExitRule(gate_named(gate, **more), **dict(rule))).tolist()

    assert cost("fixed") == [4, 5, 6, 7]  # l + H
    assert cost("confidence") == [1 + 3, 2 + 6, 3 + 9, 4 + 9 + 3]
    assert cost("patience", {"minimum_layer": 3}) == [4, 8, 12, 16]  # it is stateful, so it has to be asked before
    assert cost("shortlist", k=5) == [1 + 3, 2 + 3.5, 3 + 4, 4 + 4 + 3]
    listed = cost("shortlist", {"exit_layers": (2, 3)}, k=5)  # lists where it is asked first
    assert listed == [1 + 3, 2 + 3, 3 + 3.5, 4 + 3.5 + 3]
    classifier = StateClassifier.of(StateClassifier.build(10), "tiny")  # of 10 * 10 + 10 * 2 weights; reads no head
    assert exit_costs(SMALL, ExitRule(classifier)) == pytest.approx(
        [1 + 1.2 + 3, 2 + 2.4 + 3, 3 + 3.6 + 3, 4 + 3.6 + 3]
    )
    lens = replace(SMALL, translator=50)  # half a block for each layer at which the gate is asked
    at_two = ExitRule(gate_named("confidence"), exit_layers=(1, 3))
    assert exit_costs(lens, at_two).tolist() == [1 + 3.5, 2 + 3.5, 3 + 7, 4 + 7 + 3]


# ---- in closed form

L = 4
ROWS = (1, 2, 32)  # a pass over m tokens: call 2, each block 9 + m, the head 50 + 2 m
COSTS = PassCosts(L, ROWS, (2.0,) * 3, tuple(L * (9.0 + m) for m in ROWS), tuple(50.0 + 2 * m for m in ROWS))
RULE = ExitRule(gate_named("confidence"), 0.9, exit_layers=(1, 2))


def plan(exits, agrees=None):
    return Planned(np.array([L, *exits]), np.array([True, *(agrees or [True] * len(exits))]))


@pytest.mark.parametrize("reads", [1.0, 0.0, [0.0, 1.0, 0.5, 0.5]])
def test_a_step_is_the_mean_over_all_ways_in_which_rows_exit(reads):
    exits, asked, share = [1, 1, 2, 4, 4], (1, 3), np.broadcast_to(reads, L)
    for batch in (1, 2, 3):
        total = []
        for depths in product(exits, repeat=batch):
            most, ends = max(depths), {depth for depth in depths if depth == L or not share[depth - 1]}
            read = len(ends) + sum(share[layer - 1] for layer in asked if layer <= most)
            total.append(2 + most * (9 + batch) + read * (50 + 2 * batch))
        found = step_seconds(COSTS, np.array(exits), "copy", asked, share, batch)
        assert found == pytest.approx(np.mean(total), rel=1e-12)


@pytest.mark.parametrize("draft, again", [(1, False), (3, False), (3, True)])
def test_rounds_of_drafts_are_the_mean_over_all_ways_in_which_they_go(draft, again):
    """A token drafts with a chance of 3 in 4 through layer 1 or 2, and is right with one of 2 in 3.

    The verifying pass runs the drafts' blocks again, or does not.
    """
    exits, agrees = [1, 1, 2, 4], [True, False, True, True]
    goes_on, right = 3 / 4, 2 / 3
    tokens = spent = 0.0
    for made in range(draft + 1):
        chance = goes_on**made * (1.0 if made == draft else 1 - goes_on)
        for outcome in product([True, False], repeat=made):
            of_it = chance * np.prod([right if one else 1 - right for one in outcome])
            tokens += of_it * (1 + next((i for i, one in enumerate(outcome) if not one), made))
        calls = 2 if made else 1  # drafts have run some blocks; up to there the newest token runs alone
        verifying = 2 * calls + (4 / 3) * 10 + (4 - 4 / 3) * (10 + made) + 52 + 2 * made
        verifying = 2 + 4 * (10 + made) + 52 + 2 * made if again else verifying
        spent += chance * (made * (2 + 10 * 4 / 3 + 52) + verifying + (52 if made < draft else 0))
    rule = ExitRule(gate_named("confidence"), exit_layers=(1,))
    found = Forecast(COSTS, [plan(exits, agrees)], rule, "verified", draft=draft, again=again).seconds("verified", 1.0)
    assert found == pytest.approx(4 / tokens * spent)


def test_one_row_by_hand():
    """Four tokens: the prompt's, one at 1, one at 2, one that runs all blocks and is asked twice; and of deferred
    tokens one that runs blocks 2 to 4 for all three.
    """
    found = Forecast(COSTS, [plan([1, 2, L], [True, False, True])], RULE, "copy", prompt=10.0, of="a on b")
    plain, early = 10 + 3 * (2 + 40 + 52), 10 + 3 * 2 + 7 * 10 + 6 * 52
    assert found.plain == pytest.approx(plain / 4) and found.early == pytest.approx(early / 4)
    assert found.speed_up == pytest.approx(plain / early)
    assert found.mean_layers == pytest.approx(7 / 3) and found.agreement == pytest.approx(2 / 3)
    assert found.bound == pytest.approx(3 * 92 / (70 + 3 * 52))
    free = {"the gate and the head": (156, 312), "calls": (6, 6), "prompts": (10, 10)}
    assert found.if_free == {part: pytest.approx((plain - a) / (early - b)) for part, (a, b) in free.items()}
    assert next(iter(found.if_free)) == "the gate and the head" and "the gate and the head it would be" in found.limit
    listed = Forecast(COSTS, found.plans, ExitRule(gate_named("shortlist", k=5)), "copy", rows=50)
    assert listed.early == pytest.approx((3 * 2 + 7 * 10 + (1 + 1.1 + 1.2 + 1) * 52) / 4)  # the whole head once
    deferred = Forecast(COSTS, [plan([1, 1, L])], fixed_exit(1), "deferred", prompt=1e6).seconds("deferred")
    assert deferred == pytest.approx(1e6 + 3 * (2 + 10) + 3 * (9 + 3) + 3 * 52)
    first, second = str(found).splitlines()
    assert first.startswith("a on b: confidence, copy, batch 1: 0.") and "66.7% of tokens" in second


# ---- the call


@pytest.mark.parametrize("gate, threshold", [("softmax_difference", 0.02), ("state_saturation", -0.5)])
def test_exits_are_those_of_a_trace(gate, threshold, model_of, tmp_path, one_line):
    """Of a gate on states, too, which no trace holds. A policy stands for a gate, its threshold, exits and keys."""
    model, task = model_of("gpt2"), Task.from_prompts(PROMPTS)
    rule, thresholds = ExitRule(gate_named(gate), threshold, (1, 2), 1, 2), {"prompts": threshold, "translation": None}
    policy = policy_of(model, thresholds, gate=gate, kv_policy="copy", exit_layers=(1, 2), full_depth_tokens=2)
    found = eelib.forecast(model, task=PROMPTS, max_new_tokens=8, policy=policy)
    trace = eelib.trace(model, task, max_new_tokens=8, folder=tmp_path, progress=False)
    make_scores(model, task, trace, [rule])
    exits, scores = decide(rule, trace)
    agrees = scores.emitted(exits).numpy() == trace.tokens["token_id"].to_numpy()
    assert exits.min() < model.layers and (found.rule, found.kv_policy, found.rows) == (rule, "copy", model.vocab_size)
    assert np.concatenate([one.exits for one in found.plans]).tolist() == exits.tolist()
    assert np.concatenate([one.agrees for one in found.plans]).tolist() == agrees.tolist()
    assert [len(one.exits) for one in found.plans] == trace.tokens.groupby("sequence").size().tolist()
    assert str(found).startswith(f"{model.name} on prompts: {gate}, ") and found.plain > 0
    one_line(InputError, "no token of translation exit", lambda: eelib.forecast(model, policy=policy))


def test_the_call_with_drafts(model_of):
    """Seconds by what passes cost and by the drafts that were right."""
    model, given = model_of("t5"), {"draft": "layer:1", "draft_length": 2, "max_new_tokens": 6, "batch_size": 2}
    found, made = eelib.forecast(model, task=PROMPTS, **given), eelib.generate(model, PROMPTS, **given)
    assert found.made.sequences.equals(made.sequences) and found.prompts > 0
    lengths, costs = made.sequences["length"], pass_costs(model, 2)
    alone = [max(lengths[batch]) - 1 for batch in batches(model, encoded(model, PROMPTS), 2)]
    plain, drafting = found.made.expected
    assert costs.whole(1) * sum(alone) <= plain * (1 + 1e-9) <= costs.whole(2) * sum(alone) * (1 + 2e-9)
    assert found.speed_up == (found.prompts + plain) / (found.prompts + drafting)


def test_bad_input_is_one_line(model_of, one_line):
    model, long = model_of("gpt2"), [*PROMPTS[:1], "a dog " * 99]
    one_line(InputError, "needs a gate, or exit_layers", lambda: eelib.forecast(model, task=PROMPTS))
    one_line(InputError, "prompt 1 has", lambda: eelib.forecast(model, "confidence", task=long))
    one_line(InputError, "needs a causal or encoder-decoder", lambda: eelib.forecast(model_of("bert"), "confidence"))
