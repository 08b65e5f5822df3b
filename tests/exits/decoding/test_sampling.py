"""Sampling with verified drafts is distributed as sampling from the last layer, exactly; and is repeatable."""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

import eelib
from checks.tiny_texts import PROMPTS
from eelib.common.errors import InputError
from eelib.exits.decoding.row import Row
from eelib.exits.decoding.sampling import Sampler
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.registry import gate_named

P = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05, 0.0], dtype=torch.float64)
Q = torch.tensor([0.1, 0.4, 0.15, 0.05, 0.0, 0.3], dtype=torch.float64)
MANY = 20_000


def fits(counts, chances):
    """The p-value of counts {value: n}, what is rare taken together; 0 if something impossible came."""
    if any(chances[value] == 0 for value in counts):
        return 0.0
    total = sum(counts.values())
    common = [value for value, chance in enumerate(chances) if chance * total >= 5]
    seen, wanted = [counts.get(v, 0) for v in common], [chances[v] * total for v in common]
    rest = total - sum(wanted)
    if rest > 1e-9 * total:
        seen, wanted = [*seen, total - sum(seen)], [*wanted, rest]
    return chisquare(seen, np.array(wanted) * sum(seen) / sum(wanted)).pvalue


def rounds(checked):
    """Tokens of many rounds: drawn from Q, then held against P."""
    sampler, row = Sampler(1.0, 0, [0]), Row(0, [], 0, 1, 0)
    return Counter(checked(sampler, row, sampler.draw(row, Q)) for _ in range(MANY))


def test_a_checked_draft_is_distributed_as_the_last_layer_has_it():
    right = rounds(lambda sampler, row, draft: sampler.checked(row, draft, Q, P))
    assert fits(right, P.tolist()) > 0.001
    assert fits(rounds(lambda sampler, row, draft: draft), P.tolist()) < 1e-6  # the test can fail
    kept = lambda sampler, row, draft: draft if P[draft] > 0 else sampler.draw(row, P)  # noqa: E731
    assert fits(rounds(kept), P.tolist()) < 1e-6


def test_drafts_are_kept_as_often_as_can_be():
    """The chance is the overlap of the two, sum of min(p, q)."""
    sampler, row = Sampler(1.0, 1, [0]), Row(0, [], 0, 1, 0)
    drafts = [sampler.draw(row, Q) for _ in range(MANY)]
    kept = np.mean([sampler.checked(row, draft, Q, P) == draft for draft in drafts])
    overlap = float(torch.minimum(P, Q).sum())
    assert abs(kept - overlap) < 4 * np.sqrt(overlap * (1 - overlap) / MANY)
    assert all(sampler.checked(row, draft, P, P) == draft for draft in range(5))


@torch.no_grad()
def chances_after(model, prompt, output, temperature):
    """The plain network's distribution after a text, in float64."""
    ids = [*model.tokenizer([prompt])["input_ids"][0]]
    if model.network.config.is_encoder_decoder:
        inputs = model.adapter.plain_inputs(
            model.network, model.adapter.row(ids), model.adapter.row([model.adapter.start_id, *output])
        )
    else:
        inputs = {"input_ids": torch.tensor([[*ids, *output]])}
    return torch.softmax(model.network(**inputs).logits[0, -1].double() / temperature, dim=-1).tolist()


@pytest.mark.parametrize("name, draft", [("llama", 1), ("llama", 3), ("t5", 2)])
def test_outputs_are_distributed_as_those_of_full_depth(name, draft, model_of, eos):
    """Token by token, given what stands before it, over many outputs of one prompt."""
    model, temperature = model_of(name), 0.5
    eos(model, {model.vocab_size + 1})
    given = dict(batch_size=250, max_new_tokens=4, temperature=temperature, seed=3)
    made = eelib.generate(model, PROMPTS[:1] * 1000, exits=(2,), keys="verified", draft=draft, **given)
    assert 0 < made.sequences["accepted"].sum() < made.sequences["drafted"].sum()
    outputs = made.tokens.groupby("sequence")["token_id"].agg(tuple)
    checked = 0
    for place in range(4):
        for before, same in Counter(ids[:place] for ids in outputs).most_common(2):
            if same < 100:
                continue
            counts = Counter(ids[place] for ids in outputs if ids[:place] == before)
            assert fits(counts, chances_after(model, PROMPTS[0], before, temperature)) > 1e-3
            checked += 1
    assert checked >= 3


def test_outputs_do_not_depend_on_the_batch(model_of):
    """Each prompt has its own random numbers; another seed gives others."""
    model = model_of("llama")
    given = dict(exits=(2,), keys="verified", max_new_tokens=8, temperature=0.7)
    ids = [
        eelib.generate(model, PROMPTS, batch_size=size, seed=seed, **given).tokens["token_id"].tolist()
        for size, seed in ((1, 0), (4, 0), (4, 1))
    ]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_draft_reads_the_head_once(temperature, model_of, eos):
    """What the gate has read is what is drawn from: no more reads than after a gate that reads nothing."""
    model, reads = model_of("llama"), []
    eos(model, {model.vocab_size + 1})
    handle = model.unembed.register_forward_hook(lambda *_: reads.append(1))
    for rule in (
        ExitRule(gate_named("confidence"), -1.0, exit_layers=(2,)),
        ExitRule(gate_named("fixed"), 2.0, exit_layers=(2,)),
    ):
        reads.append(0)
        made = eelib.generate(model, PROMPTS, gate=rule, keys="verified", max_new_tokens=8, temperature=temperature)
        drafted = made.tokens[made.tokens["drafted"]]
        assert len(drafted) and (drafted["heads"] == 2).all()  # once as a draft, once by the last layer
    handle.remove()
    first, second = "".join(map(str, reads)).split("0")[1:]
    assert first == second


def test_at_nearly_no_temperature_it_is_greedy(model_of):
    model = model_of("gpt2")
    greedy = eelib.generate(model, PROMPTS, max_new_tokens=8)
    for keys, exits in (("verified", (1,)), ("full", None)):
        made = eelib.generate(model, PROMPTS, keys=keys, exits=exits, max_new_tokens=8, temperature=1e-6)
        assert made.tokens["token_id"].tolist() == greedy.tokens["token_id"].tolist()


@pytest.mark.parametrize(
    "given, parts",
    [
        (dict(temperature=-1.0), "temperature -1.0"),
        (dict(temperature="hot"), "temperature 'hot'"),
        (dict(temperature=float("nan")), "temperature nan"),
        (dict(temperature=0.5, exits=(1,), keys="deferred"), ["temperature 0.5", "'deferred'", "'verified'"]),
        (dict(seed=-1), "seed -1"),
    ],
)
def test_bad_input(given, parts, model_of, one_line):
    one_line(InputError, parts, lambda: eelib.generate(model_of("llama"), PROMPTS, **given))
