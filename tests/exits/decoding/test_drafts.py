"""Every draft gives plain greedy decoding's output; what is drafted is what its source says; as many as pay."""

import os

import pytest
import torch
from families import CORE
from hypothesis import given
from hypothesis import strategies as st

import eelib
from eelib.common.errors import InputError
from eelib.common.machine import Timer
from eelib.exits.decoding import drafters, pass_costs
from eelib.exits.decoding.drafters import quickest, trained_block
from eelib.exits.decoding.drafts import LONGEST, Ngrams
from eelib.exits.decoding.generate import generate
from eelib.exits.decoding.pass_costs import ROWS, PassCosts, expected_speed_up
from eelib.models.lens_adapters import DRAFT_FILE, DraftBlock, save_draft
from eelib.tracing.decode import greedy_decode, states_of

STEPS = 20
ROTATED = ("llama", "gemma2")  # whose blocks can be copied as draft blocks
CASES = [(name, draft) for name in CORE for draft in ("prompt", "layer:1")]
CASES += [("llama", draft) for draft in ("auto", "block", "features", "prompt+block", "prompt+features")]


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
    """Where the blocks of models are found."""
    monkeypatch.setattr(drafters, "data_folder", lambda *parts: blocks.joinpath(*parts))


def ids_of(made):
    """Token ids of each sequence."""
    return made.tokens.groupby("sequence")["token_id"].agg(list).tolist()


@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("name, draft", CASES)
def test_the_output_is_that_of_plain_decoding(name, draft, batch_size, model_of, many):
    """Of as many drafts as pay, and of three whatever they cost; the tables count them."""
    model = model_of(name)
    wanted = greedy_decode(model, model.tokenizer(many)["input_ids"], STEPS)
    for length in (None, 3):
        made = generate(model, many, draft=draft, draft_length=length, batch_size=batch_size, max_new_tokens=STEPS)
        tokens, sequences = made.tokens, made.sequences
        assert ids_of(made) == wanted and made.kv_policy == "verified"
        assert (tokens["layers_run"] == model.layers).all()
        assert (tokens.groupby("sequence")["accepted"].sum() == sequences["accepted"]).all()
        assert (sequences["passes"] + sequences["accepted"] == sequences["length"]).all()
        assert length is None or sequences["drafted"].sum() > 0


def test_the_output_is_that_of_a_float64_network(model_of, oracle_of, many):
    """Token by token, over whole texts, without any code of ours."""
    model, network = model_of("llama"), oracle_of("llama")
    for draft in ("prompt", "layer:2", "block", "features"):
        made = generate(model, many, draft=draft, draft_length=3, batch_size=4, max_new_tokens=8)
        for prompt, output in zip(model.tokenizer(many)["input_ids"], ids_of(made)):
            with torch.no_grad():
                logits = network(torch.tensor([prompt + output])).logits[0]
            assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("kind", ["block", "features"])
def test_a_block_drafts_what_it_says_of_the_whole_text(kind, batch_size, model_of, many, monkeypatch):
    """Its first draft of each round, beside the block on all true states at once; prompts' tokens are in its head."""
    model, seen, accept = model_of("llama"), [], eelib.exits.decoding.loop.accept
    block = trained_block(model, kind)

    def recorded(sequence, *rest):
        done = len(sequence.ids) - sequence.drafts
        seen.append((sequence.ids[:done], sequence.ids[done:], sequence.prompt_length))
        accept(sequence, *rest)

    monkeypatch.setattr("eelib.exits.decoding.loop.accept", recorded)
    generate(model, many, draft=kind, draft_length=2, batch_size=batch_size, max_new_tokens=8)
    rounds = [one for one in seen if one[1]]
    assert len(rounds) > len(many)
    for text, drafts, prompt_length in rounds:
        states = states_of(model, [text[:1]], [[*text[1:], 0]])[0]  # at each token of the text
        places = torch.arange(len(text))[None]
        below = torch.ones(len(text), len(text), dtype=torch.bool).tril()[None, None]
        if kind == "block":
            read = block.features(block.at(states[None, :, block.layer], places, below))[0, -1]
        else:
            joined = block.joined(block.features(states[None, :-1, -1]), torch.tensor([text[1:]]))
            read = block.features(block.at(joined, places[:, 1:] - 1, below[..., 1:, 1:]))[0, -1]
        every = model.unembed.projection(read) if batch_size == 1 else None
        if batch_size == 1:
            allowed = sorted({*block.ids.tolist(), *text[:prompt_length]})
            assert drafts[0] == allowed[int(every[allowed].argmax())]
        else:  # the other prompts' tokens are there, too
            assert drafts[0] in {*block.ids.tolist(), *(t for one in seen for t in one[0][: one[2]])}


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 39))
def test_ngrams_are_those_of_a_plain_search(text, most, cut):
    found = Ngrams(text[:cut])
    found.extend(text[cut:])
    size, guessed = found.guess(most)
    matches = [(n, at) for n in range(1, LONGEST + 1) for at in range(n, len(text)) if text[at - n : at] == text[-n:]]
    if not matches:
        assert (size, guessed) == (0, [])
        return
    n, at = max(matches)
    whole = [*text]
    for _ in range(most):
        whole.append(whole[at + len(whole) - len(text)])
    assert (size, guessed) == (n, whole[len(text) :])


def test_drafts_end_where_they_cost_more_than_they_save(model_of, many, costs, capsys):
    """And where they pay, they go on: the only difference is what a further token of a pass costs."""
    model = model_of("llama")
    free, dear = {}, {}
    for found, more in ((free, 0.0), (dear, 5.0)):
        costs(more)
        for draft in ("prompt", "layer:1"):
            found[draft] = generate(model, many, draft=draft, max_new_tokens=STEPS)
    assert free["prompt"].sequences["drafted"].sum() > 0 == dear["prompt"].sequences["drafted"].sum()
    assert free["layer:1"].sequences["drafted"].sum() > 0 == dear["layer:1"].sequences["drafted"].sum()
    assert dear["layer:1"].ended.endswith("so it ends here") and dear["layer:1"].ended in capsys.readouterr().out
    assert ids_of(free["layer:1"]) == ids_of(dear["layer:1"])


def test_the_quickest_way_is_chosen_by_what_passes_cost(model_of, costs, monkeypatch):
    model = model_of("llama")
    for more, right, wanted in ((2.0, 0.9, ""), (0.5, 0.1, "prompt"), (0.0, 0.9, "prompt+features")):
        costs(more)
        monkeypatch.setattr(drafters, "FIRST", right)
        assert quickest(model, drafters.pass_costs(model)) == wanted
    costs(2.0)
    made = generate(model, ["the cat sat on"], draft="auto", max_new_tokens=4)
    assert (made.draft, made.kv_policy, made.sequences["drafted"].sum()) == ("", "full", 0)


@pytest.mark.parametrize("draft", ["prompt", "layer:1", "block", "features"])
def test_a_model_in_bfloat16_drafts(draft, folder_of, many):
    """Its outputs may differ where tokens are tied, so that only their number is held."""
    model = eelib.load_model(str(folder_of("llama")), dtype="bfloat16", device="cpu")
    made = generate(model, many, draft=draft, draft_length=2, batch_size=4, max_new_tokens=6)
    assert len(made.sequences) == len(many) and made.sequences["drafted"].sum() > 0


def test_the_expected_speed_up_by_hand():
    """Leviathan et al. 2023, section 3.3, where a pass costs the same for one token and for several."""
    costs = PassCosts(4, (1, 100), (0.0, 0.0), (4.0, 4.0), (0.0, 0.0))
    tokens = [1 + 0.5, 1 + 0.5 + 0.25, 1 + 0.5 + 0.25 + 0.125]
    by_hand = [sum_ / (1 + length * 0.125) for length, sum_ in enumerate(tokens, 1)]
    assert expected_speed_up(costs, [0.5] * 3, 0.5) == pytest.approx((max(by_hand), 1 + by_hand.index(max(by_hand))))
    # drafts of layer 1 of 4, which verifying shares: of the pass over two tokens three blocks run both
    costs = PassCosts(4, (1, 2), (0.0, 0.0), (4.0, 6.0), (0.0, 0.0))
    assert expected_speed_up(costs, [1.0], 1.0, shared=1) == pytest.approx((2 * 4 / (1 + 1 + 3 / 4 * 6), 1))
    assert expected_speed_up(costs, [0.1], 1.0) == (1.0, 0)


def test_a_block_of_other_weights_is_refused(model_of, blocks, tmp_path, monkeypatch, one_line):
    for name, tell in (("llama", lambda file: file.write_bytes(b"nothing")), ("gpt2", lambda file: None)):
        folder = tmp_path / name / "models" / f"{name}-block"
        folder.mkdir(parents=True)
        (folder / DRAFT_FILE).write_bytes((blocks / "models/llama-block" / DRAFT_FILE).read_bytes())
        tell(folder / DRAFT_FILE)
        monkeypatch.setattr(drafters, "data_folder", lambda *parts, at=tmp_path / name: at.joinpath(*parts))
        message = "is damaged" if name == "llama" else "was trained for other weights"
        one_line(InputError, message, lambda of=name: generate(model_of(of), ["a"], draft="block"))


def test_costs_are_measured_once_an_hour_and_found_again(model_of, monkeypatch, tmp_path):
    """Never below those of fewer tokens; a damaged file, or an old one, is measured again."""
    monkeypatch.setenv("EELIB_CACHE", str(tmp_path))
    monkeypatch.setattr(pass_costs, "MEASURED", {})
    model = model_of("t5")
    first = pass_costs.pass_costs(model)
    assert first.rows == ROWS[: len(first.rows)] and first.layers == model.layers
    for part in (first.call, first.blocks, first.head):
        assert list(part) == sorted(part) and min(part) > 0
    assert first.whole(1) < first.whole(first.rows[-1]) < first.whole(2 * first.rows[-1])
    (file,) = (tmp_path / "passes").iterdir()
    monkeypatch.setattr(pass_costs, "measured", lambda *_: PassCosts(1, (1,), (1.0,), (1.0,), (1.0,)))
    monkeypatch.setattr(pass_costs, "MEASURED", {})
    assert pass_costs.pass_costs(model).whole(3) == first.whole(3)
    content = file.read_text()
    for text, age in (("{", 0), (content, 2 * pass_costs.FRESH)):
        file.write_text(text)
        os.utime(file, (file.stat().st_atime, file.stat().st_mtime - age))
        monkeypatch.setattr(pass_costs, "MEASURED", {})
        assert pass_costs.pass_costs(model).whole(1) == 3.0
    assert Timer().seconds["draft"] == 0.0
