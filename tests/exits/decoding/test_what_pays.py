"""Drafting goes on only where it saves time, by what passes of the model as it computes cost."""

import os

import pytest
from exits_made import by_sequence

from checks.tiny_texts import PROMPTS
from eelib.exits.cost import sizes_of
from eelib.exits.decoding import drafters, loop, pass_costs
from eelib.exits.decoding.drafters import quickest
from eelib.exits.decoding.generate import generate
from eelib.exits.decoding.pass_costs import PassCosts, expected_speed_up
from eelib.exits.exit_rule import fixed_exit
from eelib.models.block_runner import BlockRunner
from eelib.models.lens_adapters import DraftBlock

pytestmark = pytest.mark.usefixtures("shipped")
STEPS = 14


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
    assert expected_speed_up(costs, [0.5] * 3, 0.5) == pytest.approx((max(by_hand), 1 + by_hand.index(max(by_hand))))
    costs, plain = PassCosts(4, (1, 2), (0.1, 0.1), (4.0, 6.0), (0.0, 0.0)), 4.1
    for block in (False, True):  # which reads both tokens of the verifying pass
        found = expected_speed_up(costs, [1.0], 0.5, block=block)
        assert found == pytest.approx((2 * plain / (0.5 + 0.1 + (4 + block) / 4 * 6), 1))
    assert expected_speed_up(costs, [0.1], 1.0) == (1.0, 0)


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
