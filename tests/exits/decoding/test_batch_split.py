"""Where some sequences of a batch exit, the others go on in a smaller call, or all go on together: the same output."""

import pytest
from families import CORE

from checks.tiny_texts import PROMPTS
from eelib.exits.decoding.generate import generate
from eelib.exits.exit_rule import Estimated, ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.models.block_runner import BlockRunner
from eelib.tracing.decode import greedy_decode

STEPS = 9
SOME = 4  # tokens times blocks
WHAT = ["sequence", "position", "token_id", "exit_layer", "text"]


@pytest.mark.parametrize("keys", ["copy", "project", "deferred", "verified"])
@pytest.mark.parametrize("name", CORE)
def test_outputs_are_the_same_either_way(name, keys, model_of, many, middle_rule):
    """Of rows that leave at several layers, wait at several depths, and end at different lengths."""
    model = model_of(name)
    rule = middle_rule(model, PROMPTS)
    given = dict(gate=rule, kv_policy=keys, batch_size=8, max_new_tokens=STEPS)
    parted, along, some = (generate(model, many, batch_split=way, **given) for way in (0, None, SOME))
    for made in (along, some):
        assert made.tokens["token_id"].tolist() == parted.tokens["token_id"].tolist()
        assert made.sequences[["output", "length", "truncated"]].equals(
            parted.sequences[["output", "length", "truncated"]]
        )
        if keys != "verified":  # where drafts are verified earlier, other tokens are drafts
            assert made.tokens[WHAT].equals(parted.tokens[WHAT])
            assert made.tokens["score"].to_numpy() == pytest.approx(parted.tokens["score"].to_numpy(), abs=1e-4)
            assert made.tokens["kv_only_layers"].equals(parted.tokens["kv_only_layers"])
            assert made.tokens["head_reads"].equals(parted.tokens["head_reads"])
        assert (made.tokens["layers_run"] >= made.tokens["exit_layer"]).all()
    later = parted.tokens[parted.tokens["position"] > 0]
    assert (later["drafted"] if keys == "verified" else later["exit_layer"] < model.layers).any()
    if keys in ("copy", "project"):
        assert (along.tokens["layers_run"] > along.tokens["exit_layer"]).any()
        ran = [made.tokens["layers_run"].sum() for made in (parted, some, along)]
        assert ran[0] <= ran[1] <= ran[2] and ran[0] < ran[2]


@pytest.mark.parametrize("batch_size", [2, 5, 16])
@pytest.mark.parametrize("name", CORE)
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
            model,
            many,
            gate=rule,
            kv_policy="verified",
            draft_length=5,
            batch_size=batch_size,
            max_new_tokens=STEPS,
            batch_split=None,
        )
        assert made.tokens.groupby("sequence")["token_id"].agg(list).tolist() == wanted
        assert made.sequences["drafted"].sum() > 0 and (made.tokens["layers_run"] == model.layers).all()


def calls(model, prompts, monkeypatch, **given):
    """(rows, tokens of each) of every call of the network."""
    found, prepare = [], BlockRunner.prepare

    def counted(self, inputs):
        call = prepare(self, inputs)
        found.append(tuple(call.embeddings.shape[:2]))
        return call

    with monkeypatch.context() as patch:
        patch.setattr(BlockRunner, "prepare", counted)
        generate(model, prompts, **given)
    return found


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_batch_is_split_where_it_saves_enough(name, model_of, eos, monkeypatch):
    """One of two sequences exits after block 1 of 3: two blocks of one token are saved."""
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
    given = dict(gate=ExitRule(First(), 0.5, exit_layers=(1,)), kv_policy="copy", max_new_tokens=2)
    for split, later in ((2, [(2, 1), (1, 1)]), (3, [(2, 1)]), (None, [(2, 1)])):
        found = calls(model, PROMPTS[:2], monkeypatch, batch_split=split, **given)
        assert [one for one in found if one[1] == 1][-len(later) :] == later
        assert len([one for one in found if one[1] == 1]) == len(later) + (name == "t5")  # whose prompt is one token


def test_the_same_call_runs_the_same_blocks(model_of, many, middle_rule):
    """The rule looks at no clock: three calls give the same tables, layers that ran included."""
    model = model_of("gpt2")
    given = dict(gate=middle_rule(model, PROMPTS), kv_policy="copy", batch_size=16, max_new_tokens=STEPS)
    first, *others = (generate(model, many, **given) for _ in range(3))
    assert all(first.tokens.equals(one.tokens) and first.sequences.equals(one.sequences) for one in others)


def test_a_learnt_threshold_learns_the_same(model_of, many, middle_rule):
    """Rows that leave at the one shallow exit teach nothing, whether or not they are taken along."""
    model = model_of("llama")
    middle = middle_rule(model, many).threshold.value
    seen = []
    for way in (0, None):
        rule = ExitRule(gate_named("confidence"), Estimated(middle), exit_layers=(2,))
        made = generate(
            model, many, gate=rule, kv_policy="deferred", batch_size=16, max_new_tokens=STEPS, batch_split=way
        )
        learned = sorted(zip(rule.threshold.scores, rule.threshold.agreed))
        seen.append((made.tokens["token_id"].tolist(), made.tokens["exit_layer"].tolist(), learned))
        early = (made.tokens["exit_layer"] == 2).mean()
        assert 0.1 < early < 0.9 and len(learned) == (made.tokens["exit_layer"] == model.layers).sum()
    (*outputs, first), (*others, second) = seen
    assert outputs == others and [agreed for _, agreed in first] == [agreed for _, agreed in second]
    assert [score for score, _ in first] == pytest.approx([score for score, _ in second], rel=1e-5)
