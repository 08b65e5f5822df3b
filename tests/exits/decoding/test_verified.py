"""Verified drafts give plain greedy decoding's output, whatever is drafted, however long, in whatever batch."""

from itertools import combinations

import pytest
import torch
from families import CAUSAL, CORE

from checks.tiny_texts import PROMPTS, WINDOW
from eelib.common.machine import Timer
from eelib.exits.decoding import loop
from eelib.exits.decoding import sequences as sequences_file
from eelib.exits.decoding.gate_runner import GateRunner
from eelib.exits.decoding.generate import generate
from eelib.exits.decoding.kv_policies import KV_POLICIES
from eelib.exits.decoding.loop import Decoder
from eelib.exits.decoding.verify import PlainDecoding
from eelib.exits.exit_rule import ExitRule, fixed_exit
from eelib.exits.gates.gate import gate_named
from eelib.tracing.decode import greedy_decode

STEPS = 14


@pytest.fixture(autouse=True)
def drafting(monkeypatch):
    """Drafts go on, however few are accepted."""
    monkeypatch.setattr(loop, "ENOUGH_DRAFTS", 10**9)


def ids_of(made):
    """Token ids of each sequence."""
    return made.tokens.groupby("sequence")["token_id"].agg(list).tolist()


def cut(ids, ends):
    """Ids up to and with the first end token."""
    return ids[: next((i + 1 for i, t in enumerate(ids) if t in ends), len(ids))]


@pytest.fixture(scope="module")
def plain(model_of):
    """plain(family, prompts): what greedy decoding writes where nothing ends it."""
    known = {}

    def run(name, prompts):
        model = model_of(name)
        if name not in known:
            before = model.network.generation_config.eos_token_id
            model.network.generation_config.eos_token_id = [model.vocab_size + 1]
            known[name] = greedy_decode(model, model.tokenizer(prompts)["input_ids"], STEPS)
            model.network.generation_config.eos_token_id = before
        return known[name]

    return run


@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("name", CORE)
def test_the_output_is_that_of_plain_decoding(name, batch_size, model_of, plain, eos, many):
    """Rows accept different lengths; end tokens stand inside drafts, and the limit cuts drafts of five tokens."""
    model, outputs = model_of(name), plain(name, many)
    tokens = sorted({t for ids in outputs for t in ids})[:30]
    ends = max(combinations(tokens, 2), key=lambda pair: len({len(cut(ids, pair)) for ids in outputs}))
    eos(model, ends)
    expected = [cut(ids, ends) for ids in outputs]
    for exits, draft in (((2,), 5), ((1,), 2))[: 2 if batch_size == 4 else 1]:
        made = generate(
            model,
            many,
            draft=f"layer:{exits[0]}",
            draft_length=draft,
            batch_size=batch_size,
            max_new_tokens=STEPS,
        )
        assert ids_of(made) == expected
        sequences, tokens = made.sequences, made.tokens
        assert (sequences["truncated"].to_numpy() == [ids[-1] not in ends for ids in expected]).all()
        assert (tokens["accepted"] <= tokens["drafted"]).all() and sequences["accepted"].le(sequences["drafted"]).all()
        assert (sequences["drafted"] <= draft * (sequences["passes"] - 1)).all()  # the first pass is the prompt's
        assert (tokens.groupby("sequence")["accepted"].sum() == sequences["accepted"]).all()
        assert (tokens.loc[~tokens["accepted"], "exit_layer"] == model.layers).all()
        assert (tokens.loc[tokens["accepted"], "exit_layer"] == exits[0]).all()
        assert (tokens["layers_run"] == model.layers).all()


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_rows_accept_different_lengths_and_are_moved(name, model_of, plain, eos, many, monkeypatch):
    """Also where rows drift so far that all of them move back."""
    monkeypatch.setattr(sequences_file, "SLACK", 1)
    model = model_of(name)
    eos(model, {model.vocab_size + 1})
    made = generate(model, many, draft="layer:2", draft_length=4, batch_size=16, max_new_tokens=STEPS)
    assert ids_of(made) == plain(name, many)
    assert made.sequences["accepted"].nunique() > 2 and made.sequences["passes"].nunique() > 2
    assert (made.sequences["passes"] < STEPS).any()


@pytest.mark.parametrize("gate", ["confidence", "patience", "state_saturation"])
@pytest.mark.parametrize("name", CORE)
def test_drafts_of_a_gate_at_any_layer(gate, name, model_of, plain, eos, many, middle_rule):
    """Drafting goes on as long as the gate leaves; tokens wait at different depths."""
    model = model_of(name)
    eos(model, {model.vocab_size + 1})
    agreeing = ExitRule(gate_named("patience"), 0 if name == "marian" else 1)  # whose first two layers never agree
    rule = agreeing if gate == "patience" else middle_rule(model, PROMPTS, gate)
    for batch_size in (1, 5):
        made = generate(
            model, many, gate=rule, kv_policy="verified", draft_length=6, batch_size=batch_size, max_new_tokens=STEPS
        )
        assert ids_of(made) == plain(name, many)
        assert made.sequences["drafted"].sum() > 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_the_window_inside_a_draft(name, model_of, eos):
    model = model_of(name)
    assert name in CAUSAL
    eos(model, {model.vocab_size + 1})
    prompts = [[20 + (7 * i) % 200 for i in range(size)] for size in (WINDOW - 3, WINDOW - 9, 40, 5)]
    wanted = greedy_decode(model, prompts, 20)
    assert [len(ids) for ids in wanted] == [3, 9, 20, 20]
    timer = Timer()
    gate = GateRunner(model, ExitRule(gate_named("fixed"), 2.0), timer)
    for draft in (1, 7):
        rows = Decoder(model, KV_POLICIES["verified"], gate, draft, timer, 0).decode(prompts, 20)
        assert [[token.token_id for token in row.tokens] for row in rows] == wanted
        assert any(row.accepted for row in rows) and all(row.finished for row in rows)


@pytest.fixture
def twins():
    """twins(model): every second row of its head becomes the one before, but for the last bit; undone at the end."""
    undo = []

    def make(model):
        weight = model.unembed.projection.weight.data
        undo.append((weight, weight.clone()))
        even = weight[: len(weight) // 2 * 2 : 2]
        torch.manual_seed(0)
        to = even + torch.randn_like(even).sign()
        weight[1::2] = torch.where(torch.rand_like(even) < 0.2, torch.nextafter(even, to), even)

    yield make
    for weight, before in undo:
        weight.copy_(before)


@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("name", CORE[:-1])
def test_ties_are_decided_as_plain_decoding_decides_them(name, batch_size, model_of, eos, many, twins, monkeypatch):
    """Every token has a twin that the head tells from it by rounding alone."""
    model = model_of(name)
    twins(model)
    prompts = model.tokenizer(many)["input_ids"]
    ends = (model.vocab_size + 1,)
    eos(model, ends)
    alone = [greedy_decode(model, [prompt], STEPS)[0] for prompt in prompts]
    common = max({t for ids in alone for t in ids}, key=lambda t: sum(t in ids for ids in alone))
    eos(model, {common})
    asked = []
    after = PlainDecoding.next_token
    monkeypatch.setattr(PlainDecoding, "next_token", lambda self, output: asked.append(1) or after(self, output))
    made = generate(model, many, draft="layer:2", draft_length=3, batch_size=batch_size, max_new_tokens=STEPS)
    assert ids_of(made) == [cut(ids, {common}) for ids in alone]
    assert len(asked) > len(many)


def test_drafting_ends_where_it_cannot_pay(model_of, plain, eos, many, monkeypatch, capsys):
    """Said once; a draft of layer 2 of 3 costs 2 / 3 of a pass, and fewer of them are accepted."""
    model = model_of("llama")
    eos(model, {model.vocab_size + 1})
    given = dict(gate=fixed_exit(2), kv_policy="verified", draft_length=4, max_new_tokens=STEPS)
    whole = generate(model, many, **given).sequences
    assert whole["accepted"].sum() < whole["drafted"].sum() * 2 / 3
    monkeypatch.setattr(loop, "ENOUGH_DRAFTS", 16)
    made = generate(model, many, **given)
    assert ids_of(made) == plain("llama", many)
    assert 16 <= made.sequences["drafted"].sum() <= 16 + 8 * 4 < whole["drafted"].sum()
    assert capsys.readouterr().out.count("drafting costs more than it saves") == 1
    assert generate(model, many, always_draft=True, **given).sequences.equals(whole) and not capsys.readouterr().out
