"""Whatever is drafted, however long, in whatever batch: the output is plain greedy decoding's, ties included.

What is drafted is what its source says, and as much as pays.
"""

import json
import os
from dataclasses import replace
from functools import cache
from itertools import product
from weakref import WeakKeyDictionary

import pytest
import torch
import transformers as hf
from exits_made import by_sequence, middle_rule
from families import CORE, FAMILIES, WIDE, in_pairs, save, tiny
from hypothesis import given
from hypothesis import strategies as st
from oracle import cut, two_ends

import eelib
from checks.tiny_texts import PROMPTS
from eelib.common.errors import InputError
from eelib.exits.cost import sizes_of
from eelib.exits.decoding import drafters, loop, pass_costs, verify
from eelib.exits.decoding import sequences as sequences_file
from eelib.exits.decoding.drafters import int8_model, quickest, trained_block
from eelib.exits.decoding.drafts import LONGEST, Drafting, ModelDrafts, Ngrams
from eelib.exits.decoding.generate import generate
from eelib.exits.decoding.loop import DraftRecord
from eelib.exits.decoding.pass_costs import ROWS, PassCosts, expected_speed_up
from eelib.exits.decoding.sequences import Batch, DecodedToken
from eelib.exits.decoding.verify import Verifier
from eelib.exits.exit_rule import ExitRule, fixed_exit
from eelib.exits.gates.gate import gate_named
from eelib.models import products
from eelib.models.block_runner import BlockRunner
from eelib.models.lens_adapters import DRAFT_FILE, DraftBlock, save_draft
from eelib.tracing.decode import greedy_decode, states_of

STEPS, SLACK = 14, sequences_file.SLACK


@pytest.fixture(scope="module")
def blocks(model_of, tmp_path_factory):
    """A data folder with blocks of both kinds for the tiny llama, whose drafts are sometimes right."""
    folder, model = tmp_path_factory.mktemp("data"), model_of("llama")
    for kind, layer in (("block", 2), ("features", model.layers)):
        torch.manual_seed(1)
        found = DraftBlock(model, kind, layer, torch.arange(0, model.vocab_size, 2))
        save_draft(found, folder / "models" / f"llama-{kind}", "llama", {"leg": {}})
    return folder


@pytest.fixture(autouse=True)
def shipped(blocks, monkeypatch):
    """Where the blocks of models are found; weights of 8 bits are for layers of any size; drafts go on, however few are
    accepted.
    """
    monkeypatch.setattr(products, "LEAST", 0)
    monkeypatch.setattr(drafters, "INT8_MODELS", WeakKeyDictionary())
    monkeypatch.setattr(drafters, "data_folder", lambda *parts: blocks.joinpath(*parts))
    monkeypatch.setattr(loop, "ENOUGH_DRAFTS", 10**9)


def out_of_memory():
    raise torch.OutOfMemoryError("full")


@pytest.fixture(scope="module")
def plain(model_of, many):
    """plain(family): (plain greedy decoding without end tokens, two tokens that end it at many lengths)."""

    @cache
    def run(name):
        model = model_of(name)
        before = model.network.generation_config.eos_token_id
        model.network.generation_config.eos_token_id = [model.vocab_size + 1]
        outputs = greedy_decode(model, model.tokenizer(many)["input_ids"], STEPS)
        model.network.generation_config.eos_token_id = before
        return outputs, two_ends(outputs)

    return run


CASES = in_pairs(CORE, ["prompt", "layer:1", "layer:2", "int8", "prompt+int8"], [None, 2, 5], [1, 4, 16])
BLOCKS = in_pairs(["auto", "block", "features", "prompt+block", "prompt+features"], [None, 3], [1, 4, 16])


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
    assert (tokens["layers_run"] == model.layers).all() and (tokens["accepted"] <= tokens["drafted"]).all()
    assert (tokens.groupby("sequence")["accepted"].sum() == sequences["accepted"]).all()
    assert (sequences["accepted"] <= sequences["drafted"]).all()
    assert (sequences["passes"] + sequences["accepted"] >= sequences["length"]).all()
    if length is not None:
        assert 0 < sequences["drafted"].sum() and (sequences["drafted"] <= length * (sequences["passes"] - 1)).all()
    if draft.startswith("layer"):
        assert (tokens.loc[tokens["accepted"], "exit_layer"] == int(draft[-1])).all()
        assert (tokens.loc[~tokens["accepted"], "exit_layer"] == model.layers).all()


@pytest.mark.parametrize(
    "gate, name, batch_size, split",
    in_pairs(["confidence", "patience", "state_saturation"], CORE, [1, 5, 16], [0, 10**9]),
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


@pytest.mark.parametrize("name, batch_size", [("llama", 1), ("llama", 16), ("gemma2", 4), ("gpt2", 16), ("t5", 4)])
def test_ties_are_decided_as_plain_decoding_decides_them(name, batch_size, model_of, eos, many, twins, monkeypatch):
    """Every token has a twin that the head tells from it by rounding alone; an output is decoded once more at most."""
    model = model_of(name)
    twins(model)
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


@pytest.mark.parametrize("batch_size", [1, 16])
def test_where_nothing_is_drafted_ties_are_those_of_plain_decoding(
    batch_size, model_of, eos, many, twins, costs, monkeypatch
):
    """Nothing is decoded twice."""
    model = model_of("llama")
    twins(model)
    eos(model, {model.vocab_size + 1})
    monkeypatch.setattr(verify, "greedy_decode", lambda *_: pytest.fail("a tie was decided by another pass"))
    costs(5.0)
    plain, made = (generate(model, many, draft=d, batch_size=batch_size, max_new_tokens=STEPS) for d in (None, "block"))
    assert made.ended and not made.sequences["drafted"].sum()
    assert by_sequence(made) == by_sequence(plain)


@pytest.mark.parametrize("draft", ["prompt", "layer:1", "block", "features", "int8"])
def test_a_model_that_is_of_another_type_later(draft, folder_of, many, one_line):
    """What was made of its weights before is made anew. In bfloat16 outputs may differ where tokens are tied."""
    model, given = eelib.load_model(str(folder_of("llama")), device="cpu"), dict(draft=draft, draft_length=2)
    for dtype in ("float32", "bfloat16"):
        model.network.to(getattr(torch, dtype))
        if (draft, dtype) == ("int8", "bfloat16"):
            one_line(InputError, "runs on cpu in bfloat16", lambda: generate(model, many, **given))
        else:
            made = generate(model, many, batch_size=4, max_new_tokens=6, **given)
            assert len(made.sequences) == len(many) and made.sequences["drafted"].sum() > 0


# What is drafted


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_drafts_of_8_bits_are_those_of_a_copy(name, model_of, many, eos):
    """Which shares all tensors of the model and leaves its products as they were; most of its drafts are right."""
    model = model_of(name)
    eos(model, {model.vocab_size + 1})
    prompts = model.tokenizer(many)["input_ids"]
    before = greedy_decode(model, prompts, STEPS)
    copied = int8_model(model)
    assert copied is int8_model(model) and copied.network is not model.network
    own = {tensor.data_ptr() for tensor in model.network.parameters()}
    assert all(tensor.data_ptr() in own for tensor in copied.network.parameters())
    made = generate(model, many, draft="int8", draft_length=3, batch_size=1, max_new_tokens=STEPS)
    assert by_sequence(made) == before == greedy_decode(model, prompts, STEPS)
    total = made.sequences[["drafted", "accepted"]].sum()
    assert total["accepted"] > 0.5 * total["drafted"]


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("kind", ["block", "features"])
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


@pytest.mark.parametrize("kind", ["block", "features"])
def test_torchs_inference_mode_changes_nothing(kind, model_of, many):
    """Of a block that is first read in it, neither."""
    model = replace(model_of("llama"))  # which has read none
    with torch.inference_mode():
        made = generate(model, many, draft=kind, max_new_tokens=6)
    assert by_sequence(made) == by_sequence(generate(model, many, max_new_tokens=6))
    assert not any(part.is_inference() for part in trained_block(model, kind).parameters())


def test_a_block_of_a_family_with_another_word_for_its_cache(many, tmp_path, monkeypatch):
    """GPT-NeoX: the block finds the keys and values of the tokens before; its LayerNorm takes no two types at once."""
    plain_family = replace(FAMILIES["gptj"], config=tiny(hf.GPTNeoXConfig, WIDE), blocks="gpt_neox.layers")
    monkeypatch.setitem(FAMILIES, "neox", plain_family)
    model = eelib.load_model(str(save("neox", tmp_path / "neox")), device="cpu")
    for dtype, kind in product((torch.float32, torch.bfloat16), ("block", "features")):
        model.network.to(dtype)
        before = by_sequence(generate(model, many, max_new_tokens=6))
        block = DraftBlock(model, kind, 2 if kind == "block" else model.layers, torch.arange(model.vocab_size))
        made = generate(model, many, draft=block, draft_length=2, max_new_tokens=6)
        assert made.sequences["drafted"].min() > 0
        assert dtype == torch.bfloat16 or by_sequence(made) == before  # near ties may fall otherwise


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
    for name, message in (("llama", "is damaged"), ("gpt2", "was trained for other weights")):
        folder = tmp_path / name / "models" / f"{name}-block"
        folder.mkdir(parents=True)
        content = (blocks / "models/llama-block" / DRAFT_FILE).read_bytes()
        (folder / DRAFT_FILE).write_bytes(b"nothing" if name == "llama" else content)
        monkeypatch.setattr(drafters, "data_folder", lambda *parts, at=tmp_path / name: at.joinpath(*parts))
        one_line(InputError, message, lambda of=name: generate(model_of(of), ["a"], draft="block"))
    for kind, layer in (("block", 0), ("block", 3), ("features", 2), ("head", 1)):
        message = f"draft block '{kind}' of layer {layer} is not allowed"
        one_line(InputError, message, lambda: DraftBlock(model_of("llama"), kind, layer, torch.arange(8)))
    block = DraftBlock(model_of("llama"), "block", 1, torch.arange(8))
    one_line(InputError, "made for another model than gpt2", lambda: generate(model_of("gpt2"), ["a"], draft=block))


# What pays


@pytest.mark.parametrize("draft", ["prompt", "layer:1", "block", "features"])
def test_drafts_end_where_they_cost_more_than_they_save(draft, model_of, many, costs, monkeypatch, capsys):
    """And where they pay, they go on: the only difference is what a further token of a pass costs.

    A trained block is read once, and tried without a cache; it reads prompts, and the text is searched, only where a
    draft may pay, or drafts are asked for.
    """
    model, ran, read, plain, load, guess = model_of("llama"), [], [], DraftBlock.at, drafters.load_draft, Ngrams.guess
    monkeypatch.setattr(DraftBlock, "at", lambda *given: ran.extend([draft] * bool(given[-1])) or plain(*given))
    monkeypatch.setattr(Ngrams, "guess", lambda *given: ran.append(draft) or guess(*given))
    monkeypatch.setattr(drafters, "load_draft", lambda *given: read.append(draft) or load(*given))
    model.draft_blocks.clear()
    trained = draft in drafters.KINDS
    for more, length, drafts in [(5.0, None, False), (5.0, 2, True), (0.0, None, True)][: 2 if trained else 3]:
        costs(more)
        made = generate(model, many, draft=draft, draft_length=length, batch_size=1, max_new_tokens=STEPS)
        assert (made.sequences["drafted"].sum() > 0) == drafts and bool(ran) == (drafts and draft != "layer:1")
        ran.clear()
        assert drafts or draft == "prompt" or made.ended.endswith("so it ends here")
        assert made.ended in capsys.readouterr().out
    assert read == [draft] * trained


def test_rows_at_the_end_of_their_outputs_do_not_end_drafting_for_all(model_of):
    """A pass costs the same for all rows. Where half of them have room for no draft, none pays, in this round alone."""
    made = ModelDrafts()
    made.layer, made.seconds = 1, lambda costs, rows: 0.2
    found = Drafting(PassCosts(2, (1, 8), (1.0, 1.0), (0.0, 0.0), (0.0, 0.0)), False, made, None)
    rows = Batch(model_of("llama"), [[1, 2], [1, 2]], STEPS).sequences
    for limit, drafts in ((1, False), (STEPS, True)):
        rows[1].limit = limit
        found.start(rows)
        assert bool(found.wanted(rows)) == drafts and not found.ended
    found.start(rows[:1])
    rows[0].tokens.append(DecodedToken(1, 1, 1, 1, float("nan"), drafted=True))  # as where float16 overflows
    found.drafted(rows[:1])
    assert found.kinds[rows[0]] == [("model", 0)]
    rows[0].tokens.pop()
    found.start(rows[:1])
    found.share = 0.1
    assert not found.wanted(rows[:1]) and found.ended.endswith("so it ends here")


@pytest.mark.parametrize("draft", ["prompt", "layer:2"])
def test_each_token_counts_once(draft, model_of, plain, eos, many, monkeypatch):
    """In what drafting takes for written, drafted end tokens included."""
    model, counted, learn = model_of("llama"), [], Drafting.learn
    eos(model, plain("llama")[1])
    monkeypatch.setattr(Drafting, "learn", lambda *given: counted.append(given[-1]) or learn(*given))
    made = generate(model, many, draft=draft, draft_length=3, max_new_tokens=STEPS)
    ends = made.tokens[made.tokens["token_id"].isin(model.eos_ids)]
    assert sum(counted) == len(made.tokens) and (draft == "prompt" or ends["accepted"].any())


@pytest.mark.parametrize("seconds", [0.9, 1.1])
def test_drafts_of_the_text_end_where_outputs_took_longer_with_them(seconds, capsys):
    """Of two outputs of 60 and 40 tokens, plain decoding runs 39 steps of two rows and 20 of one."""
    found = Drafting(PassCosts(1, (1, 2), (1.0, 2.0), (0.0, 0.0), (0.0, 0.0)), True, None, None)
    for batch in (1, 2):
        found.seconds = seconds * batch * (39 * 2 + 20)
        found.finish([60, 40])
        assert found.plain_seconds == batch * (39 * 2 + 20)
        assert found.from_text == (batch == 1 or seconds < 1) and bool(found.ended) != found.from_text
    assert ("1.10 times as long" in capsys.readouterr().out) == (seconds > 1)


def test_a_gates_drafting_ends_where_it_cannot_pay(model_of, plain, eos, many, monkeypatch, capsys):
    """One line says so; fewer drafts of layer 2 of 3 are accepted than what their layers cost."""
    model, given = model_of("llama"), dict(gate=fixed_exit(2), kv_policy="verified", max_new_tokens=STEPS)
    eos(model, {model.vocab_size + 1})
    whole = generate(model, many, **given).sequences
    assert whole["accepted"].sum() < whole["drafted"].sum() * 2 / 3
    monkeypatch.setattr(loop, "ENOUGH_DRAFTS", 16)
    made = generate(model, many, **given)
    assert by_sequence(made) == plain("llama")[0]
    assert 16 <= made.sequences["drafted"].sum() <= 16 + 8 * 4 < whole["drafted"].sum()
    assert capsys.readouterr().out == f"{made.ended}\n" and made.ended.endswith("so it ends here")
    assert generate(model, many, always_draft=True, **given).sequences.equals(whole)


def test_a_gates_drafting_has_ended_for_good(monkeypatch, capsys):
    """Whatever becomes of drafts that other rows of the batch had made before."""
    monkeypatch.setattr(loop, "ENOUGH_DRAFTS", 64)
    record = DraftRecord(costs=[31 / 64, 1.0])
    for drafted, accepted in ((64, 30), (4, 4), (4, 0)):
        record.add([1] * drafted, accepted, in_vain=False)
        assert record.ended.startswith("30 of 64 drafts were accepted, and a draft costs 0.48 of a pass")
    assert capsys.readouterr().out == f"{record.ended}\n"


@pytest.fixture
def agreeing(folder_of):
    """A llama of its own whose last block changes no state, so that all drafts of layer 2 are right."""
    model = eelib.load_model(str(folder_of("llama")), device="cpu", fast_products=False)
    last = model.blocks[-1]
    for layer in (last.self_attn.o_proj, last.mlp.down_proj):
        torch.nn.init.zeros_(layer.weight)
    return model


@pytest.mark.parametrize("exit_layers, ends", [((1, 2), True), ((2,), False)])
def test_a_gate_pays_for_its_reads_of_the_head(exit_layers, ends, agreeing, many, eos, monkeypatch, capsys):
    """Even if each draft is right: one that read the head at two layers, and one of layer 2 that read it once."""
    model, sizes = agreeing, sizes_of(agreeing)
    eos(model, {model.vocab_size + 1})
    monkeypatch.setattr(loop, "ENOUGH_DRAFTS", 16)
    score = lambda self, output, _: torch.full((len(output.positions),), float(output.layer))  # noqa: E731
    gate = gate_named("confidence")
    monkeypatch.setattr(type(gate), "score", score)
    rule = ExitRule(gate, 1.5, exit_layers=exit_layers)
    cost = (2 + len(exit_layers) * sizes.read) / sizes.full
    assert (cost > 1) == ends
    made = generate(model, many, rule, kv_policy="verified", max_new_tokens=STEPS)
    assert made.sequences["drafted"].sum() == made.sequences["accepted"].sum() > 0
    assert bool(made.ended) == ends and made.ended in capsys.readouterr().out
    assert f"a draft costs {cost:.2f} of a pass" in made.ended or not ends


def test_a_gate_that_is_asked_in_vain_costs_its_reads(monkeypatch):
    """A token that runs all layers costs a pass without a gate; what it costs beyond that is the drafting's."""
    record = DraftRecord(costs=[0.5, 1.75])
    record.add([1, 1], 2, in_vain=True)
    record.add([], 0, in_vain=True)
    record.add([1], 1, in_vain=False)
    assert (record.drafted, record.accepted, record.cost) == (3, 3, 3.0)


def test_the_quickest_way_is_chosen_by_what_passes_cost(model_of, costs, monkeypatch):
    model = model_of("llama")
    cases = [(2.0, 0.5, 0.9, ""), (0.5, 1.0, 0.1, "prompt"), (0.0, 1.0, 0.9, "prompt+features")]
    for more, of_8_bits, right, wanted in [*cases, (0.0, 0.1, 0.1, "prompt+int8"), (0.0, 0.9, 0.1, "prompt")]:
        costs(more, of_8_bits)
        monkeypatch.setattr(drafters, "FIRST", right)
        assert quickest(model, drafters.pass_costs(model)) == wanted
    costs(2.0)
    made = generate(model, ["the cat sat on"], draft="auto", max_new_tokens=4)
    assert (made.draft, made.kv_policy, made.sequences["drafted"].sum()) == ("", "full", 0)


@pytest.mark.parametrize("draft", ["layer:1", "block"])
def test_the_seconds_that_are_counted_are_those_of_the_calls_and_blocks_that_run(draft, model_of, eos, monkeypatch):
    """A call costs 100, a block 1, whatever the number of tokens; the trained block, too. Prompts are left out."""
    model, ran = model_of("llama"), []
    eos(model, {model.vocab_size + 1})
    flat = PassCosts(model.layers, (1, 512), (100.0, 100.0), (float(model.layers),) * 2, (0.0, 0.0))
    monkeypatch.setattr(drafters, "pass_costs", lambda *_: flat)
    for of, name, seconds in ((BlockRunner, "prepare", 100), (BlockRunner, "run", 1), (DraftBlock, "forward", 1)):
        plain = getattr(of, name)
        counted = lambda *given, plain=plain, seconds=seconds: ran.append(seconds) or plain(*given)  # noqa: E731
        monkeypatch.setattr(of, name, counted)
    generate(model, ["a"], max_new_tokens=1)  # which tests, once, that the model can be stopped
    ran.clear()
    made = generate(model, PROMPTS[:1], draft=draft, draft_length=2, max_new_tokens=STEPS)
    prompt = 100 + model.layers + (draft == "block")
    assert made.sequences["drafted"].sum() > 2 and made.expected[1] == pytest.approx(sum(ran) - prompt)


def test_the_expected_speed_up_by_hand():
    """Leviathan et al. 2023, section 3.3, where a pass costs the same for one token and for several."""
    costs = PassCosts(4, (1, 100), (0.0, 0.0), (4.0, 4.0), (0.0, 0.0))
    by_hand = [1.5 / 1.125, 1.75 / 1.25, 1.875 / 1.375]  # tokens of a round, and passes, of one draft and more
    assert expected_speed_up(costs, [0.5] * 3, 0.5) == pytest.approx((max(by_hand), 1 + by_hand.index(max(by_hand))))
    # drafts of layer 1 of 4, which verifying shares: of the pass over two tokens three blocks run both
    costs, plain = PassCosts(4, (1, 2), (0.1, 0.1), (4.0, 6.0), (0.0, 0.0)), 4.1
    for block in (0, 1):
        found = expected_speed_up(costs, [1.0], 1.0, shared=1, block=block)
        assert found == pytest.approx((2 * plain / (1 + 1.1 + block + 0.1 + 3 / 4 * 6), 1))
    assert expected_speed_up(costs, [0.1], 1.0) == (1.0, 0)


def test_costs_are_measured_once_an_hour_and_found_again(model_of, monkeypatch, tmp_path):
    """Never below those of fewer tokens; a damaged file, an old one, or one of something else is measured again."""
    monkeypatch.setenv("EELIB_CACHE", str(tmp_path))
    model = model_of("t5")

    def found_anew():
        monkeypatch.setattr(pass_costs, "MEASURED", {})
        return pass_costs.pass_costs(model)

    plain, fits = pass_costs.measured, lambda model, sequences=1: plain(model, 1) if sequences < 3 else out_of_memory()
    monkeypatch.setattr(pass_costs, "measured", fits)
    assert pass_costs.pass_costs(model, 4).rows  # of half as many, and of half of these
    monkeypatch.setattr(pass_costs, "measured", plain)
    for file in (tmp_path / "passes").iterdir():
        file.unlink()
    first = found_anew()
    for part in (first.call, first.blocks, first.head):
        assert list(part) == sorted(part) and min(part) > 0
    assert first.rows == ROWS[: len(first.rows)] and first.whole(1) < first.whole(2 * first.rows[-1])
    monkeypatch.setattr(pass_costs, "measured", lambda *_: PassCosts(1, (1,), (1.0,), (1.0,), (1.0,)))
    assert found_anew().whole(3) == first.whole(3)
    (file,) = (tmp_path / "passes").iterdir()
    content = file.read_text()
    right = json.loads(content)
    rows, head = right["rows"], right["head"]
    wrong = [{"layers": 9}, {"rows": []}, {"rows": 3}, {"rows": rows[::-1]}, {"rows": [0, *rows[1:]]}, {"head": None}]
    wrong += [{"head": head[1:]}, {"head": [str(seconds) for seconds in head]}, {"head": [[1.0]] * len(head)}]
    wrong += [{"head": [float("nan")] * len(head)}, {"head": [-1.0] * len(head)}, {"head": head[::-1]}]
    damaged = ["{", "{}", "[]", *(json.dumps(right | part) for part in wrong)]
    for text, age in [*((text, 0) for text in damaged), (content, 2 * pass_costs.FRESH)]:
        file.write_text(text)
        os.utime(file, (file.stat().st_atime, file.stat().st_mtime - age))
        assert found_anew().whole(1) == 3.0
    file.unlink()
    monkeypatch.setattr(pass_costs, "measured", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        found_anew()
    assert caught.value.__context__ is None  # that no file was found has nothing to do with it


def test_costs_are_those_of_the_way_that_a_model_computes(folder_of, monkeypatch, tmp_path):
    """With torch's products, without fused blocks and in another dtype a model is measured anew; a file holds for a
    model that computes in the same way.
    """
    monkeypatch.setenv("EELIB_CACHE", str(tmp_path))
    for limit, value in (("SMALLEST", 0), ("GAIN", float("inf"))):
        monkeypatch.setattr(products, limit, value)
    runs = []

    def measured(model, sequences=1):
        runs.append(model)
        return PassCosts(model.layers, (1,), *([float(len(runs))] for _ in range(3)))

    monkeypatch.setattr(pass_costs, "measured", measured)

    def costs(model):
        return pass_costs.pass_costs(model).call[0]

    fast, plain = (eelib.load_model(str(folder_of("llama")), device="cpu", fast_products=own) for own in (True, False))
    assert [costs(model) for model in (fast, plain, fast, plain)] == [1.0, 2.0, 1.0, 2.0]
    monkeypatch.setattr(pass_costs, "MEASURED", {})  # as in another process
    assert [costs(model) for model in (plain, fast)] == [2.0, 1.0]
    before = [vars(block).pop("forward") for block in fast.blocks]
    assert len(before) == fast.layers and costs(fast) == 3.0
    plain.network.to(torch.bfloat16)
    assert costs(plain) == 4.0
    plain.network.to(torch.float32)
    assert costs(plain) == 2.0
