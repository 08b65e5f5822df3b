"""Rows part or are taken along: what they emit is the same, what runs is what the rule says."""

import math

import pytest
import torch
from families import GENERATING

from checks.tiny_texts import PROMPTS
from eelib.common.errors import InputError
from eelib.exits.decoding import parting as parting_file
from eelib.exits.decoding.blocks import Blocks
from eelib.exits.decoding.generate import generate
from eelib.exits.decoding.parting import ALWAYS, NEVER, Parting, parting_of
from eelib.exits.exit_rule import Estimated, ExitRule
from eelib.exits.gates.registry import gate_named
from eelib.tracing.decode import greedy_decode

STEPS = 9
SOME = Parting(3.5, 1.0)  # four blocks of one token are worth a call
WHAT = ["sequence", "position", "token_id", "exit_layer", "text"]


@pytest.mark.parametrize("keys", ["copy", "project", "deferred", "verified"])
@pytest.mark.parametrize("name", GENERATING)
def test_outputs_are_the_same_either_way(name, keys, model_of, many, middle_rule):
    """Of rows that leave at several layers, wait at several depths, and end at different lengths."""
    model = model_of(name)
    rule = middle_rule(model, PROMPTS)
    given = dict(gate=rule, keys=keys, batch_size=8, max_new_tokens=STEPS)
    parted, along, some = (generate(model, many, parting=way, **given) for way in (ALWAYS, NEVER, SOME))
    for made in (along, some):
        assert made.tokens["token_id"].tolist() == parted.tokens["token_id"].tolist()
        assert made.sequences[["output", "length", "truncated"]].equals(
            parted.sequences[["output", "length", "truncated"]]
        )
        if keys != "verified":  # where drafts are verified earlier, other tokens are drafts
            assert made.tokens[WHAT].equals(parted.tokens[WHAT])
            assert made.tokens["score"].to_numpy() == pytest.approx(parted.tokens["score"].to_numpy(), abs=1e-4)
            assert made.tokens["keys_made"].equals(parted.tokens["keys_made"])
            assert made.tokens["heads"].equals(parted.tokens["heads"])
        assert (made.tokens["layers_run"] >= made.tokens["exit_layer"]).all()
    later = parted.tokens[parted.tokens["position"] > 0]
    assert (later["drafted"] if keys == "verified" else later["exit_layer"] < model.layers).any()
    if keys in ("copy", "project"):
        assert (along.tokens["layers_run"] > along.tokens["exit_layer"]).any()
        ran = [made.tokens["layers_run"].sum() for made in (parted, some, along)]
        assert ran[0] <= ran[1] <= ran[2] and ran[0] < ran[2]


@pytest.mark.parametrize("batch_size", [2, 5, 16])
@pytest.mark.parametrize("name", GENERATING)
def test_drafts_taken_along_are_verified_early(name, batch_size, model_of, eos, many, middle_rule):
    """And give plain decoding's output all the same."""
    model = model_of(name)
    prompts = model.tokenizer(many)["input_ids"]
    rule = middle_rule(model, PROMPTS)
    for ends in ({model.vocab_size + 1}, None):
        if ends:
            eos(model, ends)
            wanted = greedy_decode(model, prompts, STEPS)
            common = max({t for ids in wanted for t in ids}, key=lambda t: sum(t in ids for ids in wanted))
        else:
            eos(model, {common})
            wanted = greedy_decode(model, prompts, STEPS)
        made = generate(
            model, many, gate=rule, keys="verified", draft=5, batch_size=batch_size, max_new_tokens=STEPS, parting=NEVER
        )
        assert made.tokens.groupby("sequence")["token_id"].agg(list).tolist() == wanted
        assert made.sequences["drafted"].sum() > 0 and (made.tokens["layers_run"] == model.layers).all()


def calls(model, prompts, monkeypatch, **given):
    """(start, rows, tokens of each) of every call of the network, keys that are only written left out."""
    found, call = [], Blocks.call

    def told(self, inputs, start, watched, watch):
        states = call(self, inputs, start, watched, watch)
        if not self.frame.keys_only:
            found.append((start, *states[1].shape[:2]))
        return states

    with monkeypatch.context() as patch:
        patch.setattr(Blocks, "call", told)
        generate(model, prompts, **given)
    return found


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_rows_part_where_it_pays(name, model_of, eos, monkeypatch):
    """One of two rows leaves after block 1 of 3: two blocks of one token against a call."""
    model = model_of(name)
    eos(model, {model.vocab_size + 1})

    class First(type(gate_named("fixed"))):
        name = "first"

        def score(self, seen, memory):
            return (seen.token_before == wanted).float()

    plain = generate(model, PROMPTS[:2], max_new_tokens=2).tokens
    first = plain.loc[plain["position"] == 0, "token_id"].tolist()
    assert first[0] != first[1]
    wanted = first[0]
    given = dict(gate=ExitRule(First(), 0.5, exit_layers=(1,)), keys="copy", max_new_tokens=2)
    for way, later in ((Parting(2.0, 1.0), [(0, 2, 1), (1, 1, 1)]), (Parting(2.1, 1.0), [(0, 2, 1)])):
        found = calls(model, PROMPTS[:2], monkeypatch, parting=way, **given)
        assert found[-len(later) :] == later and len([one for one in found if one[2] == 1]) >= len(later)


def test_the_rule_by_hand():
    """b times tokens times blocks, against a call; all rows are as wide as the widest."""
    assert Parting(6.0, 1.0).pays([1, 1, 1], [1], 3) and not Parting(6.1, 1.0).pays([1, 1, 1], [1], 3)
    assert Parting(9.0, 1.0).pays([4, 1], [1], 1) is False and Parting(7.0, 1.0).pays([4, 1], [1], 1)
    assert not Parting(6.0, 1.0).pays([1, 1], [1], 9, later=True) and ALWAYS.pays([1, 1], [1], 0, later=True)


def test_the_same_costs_give_the_same_tables(model_of, many, middle_rule):
    model = model_of("gpt2")
    given = dict(gate=middle_rule(model, PROMPTS), keys="copy", batch_size=16, max_new_tokens=STEPS, parting=SOME)
    one, other = (generate(model, many, **given) for _ in range(2))
    assert one.tokens.equals(other.tokens) and one.sequences.equals(other.sequences)


def test_costs_are_measured_once_for_each_model_and_batch_size(model_of, monkeypatch):
    asked, measured = [], parting_file.measured
    monkeypatch.setattr(parting_file, "MEASURED", type(parting_file.MEASURED)())
    monkeypatch.setattr(parting_file, "measured", lambda *given: asked.append(given[1]) or measured(*given))
    for name in ("llama", "t5"):
        model, hooks = model_of(name), len(model_of(name).blocks[0]._forward_hooks)
        for size in (1, 2, 2, 4):
            generate(model, PROMPTS, exits=(1,), keys="copy", batch_size=size, max_new_tokens=2)
        assert len(model.blocks[0]._forward_hooks) == hooks
        found = parting_of(model, 4)
        assert 0 <= found.call < 10 and 0 <= found.each < 10
    assert asked == [2, 4, 2, 4]
    for given in (dict(), dict(exits=(1,)), dict(exits=(1,), keys="verified", temperature=0.5)):  # nobody parts, or all
        generate(model, PROMPTS, batch_size=3, max_new_tokens=2, **given)
    assert asked == [2, 4, 2, 4]


def test_rows_that_do_not_fit_are_halved_when_they_are_measured_too(model_of, monkeypatch, capsys):
    model, sizes, plain = model_of("llama"), [], parting_file.measured

    def tight(model, rows):
        sizes.append(rows)
        if rows > 2:
            raise torch.OutOfMemoryError("full")
        return plain(model, rows)

    monkeypatch.setattr(parting_file, "MEASURED", type(parting_file.MEASURED)())
    monkeypatch.setattr(parting_file, "measured", tight)
    given = dict(exits=(1,), keys="copy", batch_size=4, max_new_tokens=4)
    made = generate(model, PROMPTS, **given)
    assert sizes == [4, 2] and capsys.readouterr().out.count("halved") == 1
    wanted = generate(model, PROMPTS, parting=ALWAYS, **given)
    assert made.tokens["token_id"].tolist() == wanted.tokens["token_id"].tolist()


def test_a_learnt_threshold_learns_the_same(model_of, many, middle_rule):
    """Rows that leave at the one shallow exit teach nothing, whether or not they are taken along."""
    model = model_of("llama")
    middle = middle_rule(model, many).threshold.value
    seen = []
    for way in (ALWAYS, NEVER):
        rule = ExitRule(gate_named("confidence"), Estimated(middle), exit_layers=(2,))
        made = generate(model, many, gate=rule, keys="deferred", batch_size=16, max_new_tokens=STEPS, parting=way)
        learnt = sorted(zip(rule.threshold.scores, rule.threshold.agreed))
        seen.append((made.tokens["token_id"].tolist(), made.tokens["exit_layer"].tolist(), learnt))
        early = (made.tokens["exit_layer"] == 2).mean()
        assert 0.1 < early < 0.9 and len(learnt) == (made.tokens["exit_layer"] == model.layers).sum()
    (*outputs, first), (*others, second) = seen
    assert outputs == others and [agreed for _, agreed in first] == [agreed for _, agreed in second]
    assert [score for score, _ in first] == pytest.approx([score for score, _ in second], rel=1e-5)


@pytest.mark.parametrize("call, each", [(-1.0, 0.0), (0.0, -1.0), (math.nan, 0.0), (math.inf, 0.0)])
def test_bad_costs(call, each, one_line):
    one_line(InputError, ["parting", ">= 0"], lambda: Parting(call, each))
