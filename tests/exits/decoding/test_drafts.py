"""Whatever is drafted, however long, in whatever batch: the output is plain greedy decoding's, ties included.

What is drafted is what its source says. Drafting goes on only where it saves time, by what passes of the model as it
computes cost.
"""

import os
from functools import partial

import numpy as np
import pytest
import torch
from exits_made import by_sequence, middle_rule
from families import CORE, in_pairs
from hypothesis import given
from hypothesis import strategies as st
from oracle import cut

from checks.tiny_texts import PROMPTS
from eelib.common.errors import InputError
from eelib.exits.cost import sizes_of
from eelib.exits.decoding import drafters, loop, pass_costs, verify
from eelib.exits.decoding import sequences as sequences_file
from eelib.exits.decoding.drafters import int8_model, quickest, trained_block
from eelib.exits.decoding.drafts import LONGEST, Ngrams
from eelib.exits.decoding.generate import generate
from eelib.exits.decoding.pass_costs import PassCosts, expected_speed_up
from eelib.exits.decoding.verify import Verifier
from eelib.exits.exit_rule import ExitRule, fixed_exit
from eelib.exits.gates.gate import gate_named
from eelib.models.block_runner import BlockRunner
from eelib.models.lens_adapters import DRAFT_FILE, DraftBlock
from eelib.tracing.decode import greedy_decode, states_of

pytestmark = pytest.mark.usefixtures("shipped")
STEPS, SLACK = 14, sequences_file.SLACK

CASES = in_pairs(CORE, ["prompt", "layer:2", "prompt+int8"], [None, 2, 5], [1, 4, 16])
BLOCKS = in_pairs(["auto", "block", "features", "prompt+features"], [None, 3], [1, 16])


@pytest.mark.parametrize("name, draft, length, batch_size", [*CASES, *(("llama", *case) for case in BLOCKS)])
def test_the_output_is_that_of_plain_decoding(name, draft, length, batch_size, model_of, plain, eos, many, monkeypatch):
    """Sequences accept different lengths; end tokens stand inside drafts, and the limit cuts drafts.

    With drafts of two, sequences that have drifted apart are moved back at once.
    """
    monkeypatch.setattr(sequences_file, "SLACK", 1 if length == 2 else SLACK)
    model, (outputs, ends) = model_of(name), plain(name)
    eos(model, ends)
    expected = [cut(ids, ends) for ids in outputs]
    given = dict(draft=draft, draft_length=length, batch_size=batch_size, max_new_tokens=STEPS)
    made = generate(model, many, **given)
    tokens, sequences = made.tokens, made.sequences
    assert by_sequence(made) == expected and made.kv_policy == "verified"
    assert (sequences["truncated"].to_numpy() == [ids[-1] not in ends for ids in expected]).all()
    assert (tokens.groupby("sequence")["accepted"].sum() == sequences["accepted"]).all()
    assert (sequences["passes"] + sequences["accepted"] >= sequences["length"]).all()
    if length is not None:
        assert 0 < sequences["drafted"].sum() and (sequences["drafted"] <= length * (sequences["passes"] - 1)).all()
    if draft.startswith("layer"):
        assert (tokens["exit_layer"].to_numpy() == np.where(tokens["accepted"], int(draft[-1]), model.layers)).all()


@pytest.mark.parametrize(
    "gate, name, batch_size, split", in_pairs(["confidence", "patience"], CORE, [2, 16], [0, 10**9])
)
def test_drafts_of_a_gate_at_any_layer(gate, name, batch_size, split, model_of, plain, eos, many, monkeypatch):
    """Tokens are pending at different depths; those that are taken along are verified early."""
    monkeypatch.setattr(loop, "BATCH_SPLIT", split)
    model, (outputs, ends) = model_of(name), plain(name)
    agreeing = ExitRule(gate_named("patience"), 0 if name == "marian" else 1)  # whose first two layers never agree
    rule = agreeing if gate == "patience" else middle_rule(model, PROMPTS, gate)
    for ends_at in ((model.vocab_size + 1,), ends):
        eos(model, ends_at)
        given = dict(kv_policy="verified", draft_length=6, batch_size=batch_size)
        made = generate(model, many, rule, max_new_tokens=STEPS, **given)
        assert by_sequence(made) == [cut(ids, ends_at) for ids in outputs]
        assert made.sequences["drafted"].sum() > 0 and (made.tokens["layers_run"] == model.layers).all()


@pytest.mark.parametrize("name, batch_size", [("llama", 16), ("t5", 1)])
def test_ties_are_decided_as_plain_decoding_decides_them(name, batch_size, model_of, eos, many, monkeypatch, request):
    """Every token has a twin that the head tells from it by rounding alone; an output is decoded once more at most."""
    model = model_of(name)
    weight = model.unembed.projection.weight.data
    request.addfinalizer(partial(weight.copy_, weight.clone()))
    even = weight[: len(weight) // 2 * 2 : 2]
    to = even + torch.randn_like(even).sign()
    weight[1::2] = torch.where(torch.rand_like(even) < 0.2, torch.nextafter(even, to), even)
    eos(model, {model.vocab_size + 1})
    alone = [greedy_decode(model, [prompt], STEPS)[0] for prompt in model.tokenizer(many)["input_ids"]]
    common = max({t for ids in alone for t in ids}, key=lambda t: sum(t in ids for ids in alone))
    eos(model, {common})
    tied, again, decided = [], [], Verifier.decided
    monkeypatch.setattr(Verifier, "decided", lambda self, *given: tied.append(given[1] < 0) or decided(self, *given))
    monkeypatch.setattr(verify, "greedy_decode", lambda *given: again.append(1) or greedy_decode(*given))
    made = generate(model, many, draft="layer:2", draft_length=3, batch_size=batch_size, max_new_tokens=STEPS)
    assert by_sequence(made) == [cut(ids, {common}) for ids in alone]
    assert sum(tied) > len(many) >= len(again) > 0


# What is drafted


def test_drafts_of_8_bits_are_those_of_a_copy(model_of, many, eos):
    """Which shares all tensors of the model; most of its drafts are right."""
    model = model_of("t5")
    eos(model, {model.vocab_size + 1})
    own = {tensor.data_ptr() for tensor in model.network.parameters()}
    assert all(tensor.data_ptr() in own for tensor in int8_model(model).network.parameters())
    made = generate(model, many, draft="int8", draft_length=3, batch_size=1, max_new_tokens=STEPS)
    total = made.sequences[["drafted", "accepted"]].sum()
    assert total["accepted"] > 0.5 * total["drafted"]


@pytest.mark.parametrize("kind, batch_size", [("block", 1), ("features", 4)])
def test_a_block_drafts_what_it_says_of_the_whole_text(kind, batch_size, model_of, many, monkeypatch):
    """Its first draft of each round, beside the block on all true states at once; prompts' tokens are in its head."""
    model, rounds, accept = model_of("llama"), [], Verifier.accept
    block = trained_block(model, kind)

    def recorded(self, sequence, *rest):
        done = len(sequence.ids) - sequence.drafts
        if sequence.drafts:
            rounds.append((sequence.ids[:done], sequence.ids[done], sequence.prompt_length))
        accept(self, sequence, *rest)

    monkeypatch.setattr(Verifier, "accept", recorded)
    generate(model, many, draft=kind, draft_length=2, batch_size=batch_size, max_new_tokens=8)
    assert len(rounds) > len(many)
    for text, first, prompt_length in rounds:
        states = states_of(model, [text[:1]], [[*text[1:], 0]])[0]  # at each token of the text
        inner = states[None, :, block.layer]
        if kind == "features":
            inner = block.joined(block.features(states[None, :-1, -1]), torch.tensor([text[1:]]))
        places = torch.arange(inner.shape[1])
        below = (places[:, None] >= places)[None, None]
        read = block.features(block.at(inner, places[None], below))[0, -1]
        logits, own = model.unembed.projection(read), sorted({*block.ids.tolist(), *text[:prompt_length]})
        assert logits[first] >= logits[own].max() - 1e-4  # tokens of the batch's other prompts are allowed, too
        assert batch_size > 1 or first in own


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 39))
def test_ngrams_are_those_of_a_plain_search(text, most, cut_at):
    found = Ngrams(text[:cut_at])
    found.extend(text[cut_at:])
    matches = [(n, at) for n in range(1, LONGEST + 1) for at in range(n, len(text)) if text[at - n : at] == text[-n:]]
    if not matches:
        assert found.guess(most) == (0, [])
        return
    n, at = max(matches)
    whole = [*text]
    for _ in range(most):
        whole.append(whole[at + len(whole) - len(text)])
    assert found.guess(most) == (n, whole[len(text) :])


def test_a_block_of_other_weights_is_refused(model_of, blocks, tmp_path, monkeypatch, one_line):
    block = trained_block(model_of("llama"), "block")
    one_line(InputError, "made for another model than gpt2", lambda: generate(model_of("gpt2"), ["a"], draft=block))
    for name, message in (("llama", "is damaged"), ("gpt2", "was trained for other weights")):
        folder = tmp_path / name / "models" / f"{name}-block"
        folder.mkdir(parents=True)
        content = (blocks / "models/llama-block" / DRAFT_FILE).read_bytes()
        (folder / DRAFT_FILE).write_bytes(b"nothing" if name == "llama" else content)
        monkeypatch.setattr(drafters, "data_folder", lambda *parts, at=tmp_path / name: at.joinpath(*parts))
        one_line(InputError, message, lambda of=name: generate(model_of(of), ["a"], draft="block"))


@pytest.mark.parametrize("draft", ["prompt", "layer:1"])
def test_drafts_end_where_they_cost_more_than_they_save(draft, model_of, costs, capsys):
    """And where they pay, or are asked for, they go on: the only difference is what a further token of a pass costs."""
    model = model_of("llama")
    for more, length, drafts in [(5.0, None, False), (5.0, 2, True), (0.0, None, True)]:
        costs(more)
        made = generate(model, PROMPTS, draft=draft, draft_length=length, batch_size=1, max_new_tokens=STEPS)
        assert (made.sequences["drafted"].sum() > 0) == drafts
        assert drafts or draft == "prompt" or made.ended.endswith("so it ends here")
        assert made.ended in capsys.readouterr().out


def test_a_gates_drafting_ends_where_it_cannot_pay(model_of, plain, eos, many, monkeypatch, capsys):
    """One line says so; fewer drafts of layer 2 of 3 are accepted than what two layers and a read of the head cost."""
    model, given = model_of("llama"), dict(gate=fixed_exit(2), kv_policy="verified", max_new_tokens=STEPS)
    eos(model, {model.vocab_size + 1})
    whole = generate(model, many, **given).sequences
    monkeypatch.setattr(loop, "ENOUGH_DRAFTS", 16)
    made, sizes = generate(model, many, **given), sizes_of(model)
    assert by_sequence(made) == plain("llama")[0]
    assert 16 <= made.sequences["drafted"].sum() <= 16 + 8 * 4 < whole["drafted"].sum()
    assert capsys.readouterr().out == f"{made.ended}\n" and made.ended.endswith("so it ends here")
    assert f"a draft costs {(2 + sizes.read) / sizes.full:.2f} of a pass" in made.ended
    assert generate(model, many, always_draft=True, **given).sequences.equals(whole)


def test_the_quickest_way_is_chosen_by_what_passes_cost(model_of, costs, monkeypatch):
    model = model_of("llama")
    cases = [(2.0, 0.5, 0.9, ""), (0.5, 1.0, 0.1, "prompt"), (0.0, 1.0, 0.9, "prompt+features")]
    for more, of_8_bits, right, wanted in [*cases, (0.0, 0.1, 0.1, "prompt+int8"), (0.0, 0.9, 0.1, "prompt")]:
        costs(more, of_8_bits)
        monkeypatch.setattr(drafters, "FIRST", right)
        assert quickest(model, drafters.pass_costs(model)) == wanted
    costs(2.0)
    made = generate(model, ["the cat sat on"], draft="auto", max_new_tokens=4)
    assert (made.draft, made.kv_policy) == ("", "full")


def test_the_seconds_that_are_counted_are_those_of_the_calls_and_blocks_that_run(model_of, eos, monkeypatch):
    """A call costs 100, a block 1, whatever the number of tokens; the trained block 10 more. Prompts are left out."""
    model, ran = model_of("llama"), []
    eos(model, {model.vocab_size + 1})
    flat = PassCosts(model.layers, (1, 512), (100.0, 100.0), (float(model.layers),) * 2, (0.0, 0.0), 10.0)
    monkeypatch.setattr(drafters, "pass_costs", lambda *_: flat)
    for of, name, cost in ((BlockRunner, "prepare", 100), (BlockRunner, "call_block", 1), (DraftBlock, "in_call", 11)):
        plain = getattr(of, name)
        monkeypatch.setattr(of, name, lambda *given, plain=plain, cost=cost: ran.append(cost) or plain(*given))
    generate(model, ["a"], max_new_tokens=1)  # which tests, once, that the model can be stopped
    ran.clear()
    made = generate(model, PROMPTS[:1], draft="block", draft_length=2, max_new_tokens=STEPS)
    prompt = 100 + model.layers - 1 + 11  # its first block runs while its call is prepared
    assert made.sequences["drafted"].sum() > 2 and made.expected[1] == pytest.approx(sum(ran) - prompt)


def test_the_expected_speed_up_by_hand():
    """Leviathan et al. 2023, section 3.3, where a pass costs the same for one token and for several."""
    costs = PassCosts(4, (1, 100), (0.0, 0.0), (4.0, 4.0), (0.0, 0.0))
    by_hand = [1.5 / 1.125, 1.75 / 1.25, 1.875 / 1.375]  # tokens of a round, and passes, of one draft and more
    assert expected_speed_up(costs, [0.5] * 3, 0.5) == pytest.approx(max(by_hand))
    costs, plain = PassCosts(4, (1, 2), (0.1, 0.1), (4.0, 6.0), (0.0, 0.0)), 4.1
    for more in (0, 1, -2):  # blocks beside the model's own that both tokens of the verifying pass run
        found = expected_speed_up(costs, [1.0], 0.5, more=more)
        assert found == pytest.approx(2 * plain / (0.5 + 0.1 + (4 + more) / 4 * 6))
    assert expected_speed_up(costs, [0.1], 1.0) == 1.0


def test_costs_are_measured_once_an_hour_and_found_again(model_of, monkeypatch, tmp_path):
    """Never below those of fewer tokens; a damaged file, or an old one, is measured again."""
    monkeypatch.setenv("EELIB_CACHE", str(tmp_path))
    model, plain = model_of("t5"), pass_costs.measured

    def found_anew(measured):
        monkeypatch.setattr(pass_costs, "MEASURED", {})
        monkeypatch.setattr(pass_costs, "measured", measured)
        return pass_costs.pass_costs(model)

    first = found_anew(plain)
    for part in (first.call, first.blocks, first.head):
        assert list(part) == sorted(part) and min(part) > 0
    other = lambda *_: PassCosts(1, (1,), (1.0,), (1.0,), (1.0,))  # noqa: E731
    assert found_anew(other).whole(3) == first.whole(3)
    (file,) = (tmp_path / "passes").iterdir()
    content = file.read_text()
    for text, age in (("{", 0), ("{}", 0), (content, 2 * pass_costs.FRESH)):
        file.write_text(text)
        os.utime(file, (file.stat().st_atime, file.stat().st_mtime - age))
        assert found_anew(other).whole(1) == 3.0
