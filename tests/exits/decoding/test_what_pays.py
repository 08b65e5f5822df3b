"""Drafting goes on only where it saves time, by what passes of the model as it computes cost."""

import os

import pytest
import torch
from exits_made import by_sequence
from families import save

import eelib
from checks.tiny_texts import PROMPTS
from eelib.exits.cost import sizes_of
from eelib.exits.decoding import drafters, loop, pass_costs
from eelib.exits.decoding.drafters import quickest
from eelib.exits.decoding.drafts import Drafting, ModelDrafts, Ngrams
from eelib.exits.decoding.generate import generate
from eelib.exits.decoding.loop import DraftRecord
from eelib.exits.decoding.pass_costs import ROWS, PassCosts, expected_speed_up
from eelib.exits.decoding.sequences import Batch, DecodedToken
from eelib.exits.exit_rule import fixed_exit
from eelib.models import products
from eelib.models.block_runner import BlockRunner
from eelib.models.lens_adapters import DraftBlock

pytestmark = pytest.mark.usefixtures("shipped")
STEPS = 14


@pytest.mark.parametrize("draft", ["prompt", "layer:1", "block", "features"])
def test_drafts_end_where_they_cost_more_than_they_save(draft, model_of, many, costs, monkeypatch, capsys):
    """And where they pay, they go on: the only difference is what a further token of a pass costs.

    A trained block is read once; it reads prompts, and the text is searched, only where a draft may pay, or drafts are
    asked for.
    """
    model, ran, read, load, guess = model_of("llama"), [], [], drafters.load_draft, Ngrams.guess
    for name in ("in_call", "joined"):
        plain = getattr(DraftBlock, name)
        monkeypatch.setattr(DraftBlock, name, lambda *given, plain=plain: ran.append(draft) or plain(*given))
    monkeypatch.setattr(Ngrams, "guess", lambda *given: ran.append(draft) or guess(*given))
    monkeypatch.setattr(drafters, "load_draft", lambda *given: read.append(draft) or load(*given))
    model.draft_blocks.clear()
    trained = draft in drafters.KINDS
    for more, length, drafts in [(5.0, None, False), (5.0, 2, True), (0.0, None, True)][: 2 if trained else 3]:
        costs(more)
        made = generate(model, many, draft=draft, draft_length=length, batch_size=1, max_new_tokens=STEPS)
        assert (made.sequences["drafted"].sum() > 0) == drafts and bool(ran) == (drafts and draft != "layer:1")
        ran.clear()
        assert drafts or draft == "prompt" or made.ended.endswith(("so it ends here", "from here"))
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
    """One line says so; fewer drafts of layer 2 of 3 are accepted than what two layers and a read of the head cost."""
    model, given = model_of("llama"), dict(gate=fixed_exit(2), kv_policy="verified", max_new_tokens=STEPS)
    eos(model, {model.vocab_size + 1})
    whole = generate(model, many, **given).sequences
    assert whole["accepted"].sum() < whole["drafted"].sum() * 2 / 3
    monkeypatch.setattr(loop, "ENOUGH_DRAFTS", 16)
    made, sizes = generate(model, many, **given), sizes_of(model)
    assert by_sequence(made) == plain("llama")[0]
    assert 16 <= made.sequences["drafted"].sum() <= 16 + 8 * 4 < whole["drafted"].sum()
    assert capsys.readouterr().out == f"{made.ended}\n" and made.ended.endswith("so it ends here")
    assert f"a draft costs {(2 + sizes.read) / sizes.full:.2f} of a pass" in made.ended
    assert generate(model, many, always_draft=True, **given).sequences.equals(whole)


def test_what_a_gates_drafts_cost(monkeypatch, capsys):
    """A token that runs all layers costs a pass without a gate; what it costs beyond that is the drafting's. Drafting
    that has ended stays so, whatever becomes of drafts that other rows of the batch had made before.
    """
    record = DraftRecord(costs=[0.5, 1.75])
    for exit_layers, in_vain in (([1, 1], True), ([], True), ([1], False)):
        record.add(exit_layers, len(exit_layers), in_vain)
    assert (record.drafted, record.accepted, record.cost) == (3, 3, 3.0)
    monkeypatch.setattr(loop, "ENOUGH_DRAFTS", 64)
    record = DraftRecord(costs=[31 / 64, 1.0])
    for drafted, accepted in ((64, 30), (4, 4), (4, 0)):
        record.add([1] * drafted, accepted, in_vain=False)
        assert record.ended.startswith("30 of 64 drafts were accepted, and a draft costs 0.48 of a pass")
    assert capsys.readouterr().out == f"{record.ended}\n"


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
    made = generate(model, PROMPTS[:1], draft=draft, draft_length=2, max_new_tokens=STEPS)
    prompt = 100 + model.layers - 1 + 11 * (draft == "block")  # its first block runs while its call is prepared
    assert made.sequences["drafted"].sum() > 2 and made.expected[1] == pytest.approx(sum(ran) - prompt)


def test_the_expected_speed_up_by_hand():
    """Leviathan et al. 2023, section 3.3, where a pass costs the same for one token and for several."""
    costs = PassCosts(4, (1, 100), (0.0, 0.0), (4.0, 4.0), (0.0, 0.0))
    by_hand = [1.5 / 1.125, 1.75 / 1.25, 1.875 / 1.375]  # tokens of a round, and passes, of one draft and more
    assert expected_speed_up(costs, [0.5] * 3, 0.5) == pytest.approx((max(by_hand), 1 + by_hand.index(max(by_hand))))
    costs, plain = PassCosts(4, (1, 2), (0.1, 0.1), (4.0, 6.0), (0.0, 0.0)), 4.1
    for block in (False, True):  # which reads both tokens of the verifying pass
        found = expected_speed_up(costs, [1.0], 0.5, block=block)
        assert found == pytest.approx((2 * plain / (0.5 + 0.1 + (4 + block) / 4 * 6), 1))
    assert expected_speed_up(costs, [0.1], 1.0) == (1.0, 0)


def test_costs_are_measured_once_an_hour_and_found_again(model_of, monkeypatch, tmp_path):
    """Never below those of fewer tokens; a damaged file, or an old one, is measured again. Batches that do not fit into
    memory are halved.
    """
    monkeypatch.setenv("EELIB_CACHE", str(tmp_path))
    model, plain = model_of("t5"), pass_costs.measured

    def found_anew(measured, sequences=1):
        monkeypatch.setattr(pass_costs, "MEASURED", {})
        monkeypatch.setattr(pass_costs, "measured", measured)
        return pass_costs.pass_costs(model, sequences)

    def tight(model, sequences=1):
        if sequences > 2:
            raise torch.OutOfMemoryError("full")
        return plain(model)

    assert found_anew(tight, sequences=4).rows  # of half as many, and of half of these
    for file in (tmp_path / "passes").iterdir():
        file.unlink()
    first = found_anew(plain)
    for part in (first.call, first.blocks, first.head):
        assert list(part) == sorted(part) and min(part) > 0
    assert first.rows == ROWS[: len(first.rows)] and first.whole(1) < first.whole(2 * first.rows[-1])
    other = lambda *_: PassCosts(1, (1,), (1.0,), (1.0,), (1.0,))  # noqa: E731
    assert found_anew(other).whole(3) == first.whole(3)
    (file,) = (tmp_path / "passes").iterdir()
    content = file.read_text()
    for text, age in (("{", 0), ("{}", 0), ("[]", 0), (content, 2 * pass_costs.FRESH)):
        file.write_text(text)
        os.utime(file, (file.stat().st_atime, file.stat().st_mtime - age))
        assert found_anew(other).whole(1) == 3.0
    file.unlink()
    with pytest.raises(ZeroDivisionError) as caught:
        found_anew(lambda *_: 1 / 0)
    assert caught.value.__context__ is None  # that no file was found has nothing to do with it


def test_costs_are_those_of_the_way_that_a_model_computes(monkeypatch, tmp_path):
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
    folder = str(save("llama", tmp_path / "llama", head_dim=16))
    fast, plain = (eelib.load_model(folder, device="cpu", fast_products=own) for own in (True, False))
    first = [pass_costs.pass_costs(model).call[0] for model in (fast, plain, fast, plain)]
    monkeypatch.setattr(pass_costs, "MEASURED", {})  # as in another process
    again = [pass_costs.pass_costs(model).call[0] for model in (plain, fast)]
    assert (first, again) == ([1.0, 2.0, 1.0, 2.0], [2.0, 1.0])
    before = [vars(block).pop("forward") for block in fast.blocks]
    assert len(before) == fast.layers and pass_costs.pass_costs(fast).call[0] == 3.0
    plain.network.to(torch.bfloat16)
    assert pass_costs.pass_costs(plain).call[0] == 4.0
    plain.network.to(torch.float32)
    assert pass_costs.pass_costs(plain).call[0] == 2.0
