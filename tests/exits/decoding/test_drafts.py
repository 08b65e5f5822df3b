"""Whatever is drafted, however long, in whatever batch: the output is plain greedy decoding's, ties included.

What is drafted is what its source says.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
import transformers as hf
from exits_made import by_sequence, middle_rule
from families import CORE, FAMILIES, WIDE, in_pairs, save, tiny
from hypothesis import given
from hypothesis import strategies as st
from oracle import cut

import eelib
from checks.tiny_texts import PROMPTS
from eelib.common.errors import InputError
from eelib.exits.decoding import drafters, loop, verify
from eelib.exits.decoding import sequences as sequences_file
from eelib.exits.decoding.drafters import int8_model, trained_block
from eelib.exits.decoding.drafts import LONGEST, Drafting, Ngrams
from eelib.exits.decoding.generate import generate
from eelib.exits.decoding.verify import Verifier
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.models.lens_adapters import DRAFT_FILE, DraftBlock
from eelib.tracing.decode import greedy_decode, states_of

pytestmark = pytest.mark.usefixtures("shipped")
STEPS, SLACK = 14, sequences_file.SLACK


CASES = in_pairs(CORE, ["prompt", "layer:1", "layer:2", "prompt+int8"], [None, 2, 5], [1, 4, 16])
BLOCKS = in_pairs(["auto", "block", "features", "prompt+features"], [None, 3], [1, 16])


@pytest.mark.parametrize("name, draft, length, batch_size", [*CASES, *(("llama", *case) for case in BLOCKS)])
def test_the_output_is_that_of_plain_decoding(name, draft, length, batch_size, model_of, plain, eos, many, monkeypatch):
    """Sequences accept different lengths; end tokens stand inside drafts, and the limit cuts drafts.

    With drafts of two, sequences that have drifted apart are moved back at once.
    """
    monkeypatch.setattr(sequences_file, "SLACK", 1 if length == 2 else SLACK)
    counted, learn = [], Drafting.learn
    monkeypatch.setattr(Drafting, "learn", lambda *given: counted.append(given[-1]) or learn(*given))
    model, (outputs, ends) = model_of(name), plain(name)
    eos(model, ends)
    expected = [cut(ids, ends) for ids in outputs]
    given = dict(draft=draft, draft_length=length, batch_size=batch_size, max_new_tokens=STEPS)
    made = generate(model, many, **given)
    tokens, sequences = made.tokens, made.sequences
    assert by_sequence(made) == expected and made.kv_policy == "verified"
    assert sum(counted) == len(tokens)  # also where an end token was drafted
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
    "gate, name, batch_size, split", in_pairs(["confidence", "patience"], CORE, [1, 16], [0, 10**9])
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


@pytest.mark.parametrize("name, batch_size", [("llama", 16), ("gemma2", 1), ("t5", 4)])
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


def test_where_nothing_is_drafted_ties_are_those_of_plain_decoding(model_of, eos, many, twins, costs, monkeypatch):
    """Nothing is decoded twice."""
    model = model_of("llama")
    twins(model)
    eos(model, {model.vocab_size + 1})
    monkeypatch.setattr(verify, "greedy_decode", lambda *_: pytest.fail("a tie was decided by another pass"))
    costs(5.0)
    plain, made = (generate(model, many, draft=d, batch_size=16, max_new_tokens=STEPS) for d in (None, "block"))
    assert made.ended and not made.sequences["drafted"].sum()
    assert by_sequence(made) == by_sequence(plain)


@pytest.mark.parametrize("draft", ["block", "int8"])
def test_a_model_that_is_of_another_type_later(draft, folder_of, many, one_line):
    """What was made of its weights before is made anew. In bfloat16 outputs may differ where tokens are tied."""
    model, given = eelib.load_model(str(folder_of("llama")), device="cpu"), dict(draft=draft, draft_length=2)
    for dtype in ("float32", "bfloat16"):
        model.network.to(getattr(torch, dtype))
        if (draft, dtype) == ("int8", "bfloat16"):
            one_line(InputError, "runs on cpu in bfloat16", lambda: generate(model, many, **given))
        else:
            assert generate(model, many, batch_size=4, max_new_tokens=6, **given).sequences["drafted"].sum() > 0


# What is drafted


def test_drafts_of_8_bits_are_those_of_a_copy(model_of, many, plain, eos):
    """Which shares all tensors of the model and leaves its products as they were; most of its drafts are right."""
    model, (before, _) = model_of("t5"), plain("t5")
    eos(model, {model.vocab_size + 1})
    copied = int8_model(model)
    assert copied is int8_model(model) and copied.network is not model.network
    own = {tensor.data_ptr() for tensor in model.network.parameters()}
    assert all(tensor.data_ptr() in own for tensor in copied.network.parameters())
    made = generate(model, many, draft="int8", draft_length=3, batch_size=1, max_new_tokens=STEPS)
    assert by_sequence(made) == before == greedy_decode(model, model.tokenizer(many)["input_ids"], STEPS)
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
