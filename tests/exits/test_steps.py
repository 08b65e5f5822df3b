"""Forecasts: sums by hand for single rows and small batches, and the formula for drafts that are all right."""

from dataclasses import replace

import numpy as np
import pytest

from eelib.common.errors import InputError
from eelib.exits.step_costs import Costs, Line
from eelib.exits.steps import ALWAYS, Parting, Planned, crossover, seconds, speed_up

L = 4
COSTS = Costs(
    layers=L, call=100, block=Line(10, 1), head=Line(1000, 7), ask=Line(3, 0.5), key=0.25, step=10_000, prompt=1e6
)
BLOCK, HEAD, ASK = 11, 1007, 3.5  # of one token


def plan(exits, agrees=None):
    """A sequence; its first token, which comes with the prompt, has no exit."""
    return Planned(np.array([L, *exits]), np.array([True, *(agrees or [True] * len(exits))]))


def test_plain_decoding_runs_everything():
    found = seconds(COSTS, [plan([1, 2, L])], "full")
    assert found == pytest.approx(1e6 + 3 * (10_000 + 100 + L * BLOCK + HEAD))
    assert seconds(COSTS, [plan([])], "full") == 1e6


@pytest.mark.parametrize("keys, more", [("copy", 0), ("schedule", 0), ("project", 2 * 100 + (3 + 2) * 0.25)])
def test_a_row_alone_runs_to_its_exit(keys, more):
    """Asked at 1, 2 and 3 until it leaves; the head is read at the end only where it does not."""
    blocks = (1 + 2 + L) * BLOCK
    found = seconds(COSTS, [plan([1, 2, L])], keys, asked=(1, 2, 3))
    assert found == pytest.approx(1e6 + 3 * 10_100 + blocks + (1 + 2 + 3) * ASK + HEAD + more)


def test_deferred_tokens_go_along_with_the_next_deep_one():
    """Two wait at depth 1; the third is alone for one block, then there are three."""
    found = seconds(COSTS, [plan([1, 1, L])], "deferred")
    assert found == pytest.approx(1e6 + 3 * 10_100 + 100 + 3 * BLOCK + (L - 1) * (10 + 3) + HEAD)


def test_a_batch_waits_in_part_only():
    """One row leaves at 1, the other at 3: a cut more, and one row in the blocks after it."""
    found = seconds(COSTS, [plan([1]), plan([3])], "copy", batch=2, parting=ALWAYS)
    assert found == pytest.approx(2e6 + 10_000 + 2 * 100 + (10 + 2) + 2 * BLOCK)
    alone = seconds(COSTS, [plan([1]), plan([3])], "copy")
    assert alone == pytest.approx(2e6 + 2 * 10_100 + 4 * BLOCK)


def test_rows_part_where_it_pays():
    """A call costs 100, and a token 1 in each of at most three blocks; or a call 3."""
    rows = [plan([1]), plan([3])]
    found = seconds(COSTS, rows, "copy", batch=2)
    assert (
        found
        == pytest.approx(2e6 + 10_000 + 100 + 3 * (10 + 2))
        == seconds(COSTS, rows, "copy", batch=2, together=True)
    )
    cheap = replace(COSTS, call=3)
    for way in (None, ALWAYS, Parting(3, 1)):
        found = seconds(cheap, rows, "copy", batch=2, parting=way)
        assert found == pytest.approx(2e6 + 10_000 + 2 * 3 + (10 + 2) + 2 * BLOCK)
    dear = replace(COSTS, call=3.1)
    assert seconds(dear, rows, "copy", batch=2) == pytest.approx(2e6 + 10_000 + 3.1 + 3 * (10 + 2))


def test_who_is_taken_along_is_not_asked_and_waits_where_the_call_ended():
    """Deferred: one row leaves at 1 and rides to 3 with the other; its next token takes it on from there."""
    rows = [plan([1, L]), plan([3, L])]
    found = seconds(COSTS, rows, "deferred", asked=(1, 2, 3), batch=2)
    first = 100 + 3 * (10 + 2) + (3 + 2 * 0.5) + 2 * ASK
    second = 2 * 100 + 3 * (10 + 2) + (10 + 4) + 3 * (3 + 2 * 0.5) + 1000 + 2 * 7
    assert found == pytest.approx(2e6 + 2 * 10_000 + first + second)


def test_drafts_taken_along_are_verified():
    """What is not run of a draft is run later, so rows never part; the head is read once for each draft."""
    rows = [plan([1, 1]), plan([L, L])]
    free = Costs(L, 0.1, Line(0, 1), Line(0, 1), Line(0), 0, 0, 0)
    found = seconds(free, rows, "verified", batch=2, draft=4)
    assert found == pytest.approx(2 * (0.1 + L * 2 + 2))
    wrong = [plan([1, 1], [False, False]), plan([L, L])]  # replaced at once
    assert seconds(free, wrong, "verified", batch=2, draft=4) == found


def test_right_drafts_cost_what_the_formula_says():
    """Rounds of two drafts at layer 1 and one deep step for three tokens."""
    tokens, free = 9, Costs(L, 0, Line(1), Line(0.5), Line(0), 0, 0, 0)
    found = speed_up(free, [plan([1] * tokens)], "verified", draft=2)
    assert found == pytest.approx(3 * (L + 0.5) / (L + 2 * 1 + 0.5))
    wrong = plan([1] * tokens, [False] * tokens)  # each round emits one token
    assert speed_up(free, [wrong], "verified", draft=1) < 1


def test_a_wrong_draft_ends_its_round():
    """Tokens 1 and 2 are drafted, 1 is wrong: 2 is drafted again, and verified alone at the end."""
    free = Costs(L, 0, Line(1), Line(0), Line(0), 0, 0, 0)
    found = seconds(free, [plan([1, 1, 1], [False, True, True])], "verified", draft=2)
    rounds = (1 + 1 + L) + (1 + 1 + L)  # drafts 1 and 2, then 2 and 3; each then verified
    assert found == rounds


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="keys 'cached' is not known"):
        seconds(COSTS, [plan([1])], "cached")
    with pytest.raises(InputError, match="at least one sequence"):
        speed_up(COSTS, [], "copy")


def test_a_gate_that_does_not_read_the_head_pays_for_it_where_a_token_leaves():
    """Two rows leave together, and one runs to the end: a read of two, and a read of one."""
    unread = replace(COSTS, reads=False)
    rows = [plan([1]), plan([1]), plan([L])]
    for parting in (ALWAYS, None):
        more = seconds(unread, rows, "copy", batch=3, parting=parting) - seconds(
            COSTS, rows, "copy", batch=3, parting=parting
        )
        assert more == pytest.approx(1000 + 2 * 7)
    assert seconds(unread, rows, "full", batch=3) == seconds(COSTS, rows, "full", batch=3)


def test_waiting_for_the_deepest_row():
    """Two rows in one call down to layer 3; a row alone waits for nobody."""
    found = seconds(COSTS, [plan([1]), plan([3])], "copy", batch=2, together=True)
    assert found == pytest.approx(2e6 + 10_000 + 100 + 3 * (10 + 2))
    one = plan([1, 3, 2])
    assert seconds(COSTS, [one], "copy", together=True) == seconds(COSTS, [one], "copy")


def test_the_crossover_of_batches():
    """One by one both are the same; where tokens cost and calls do not, parting keeps what waiting loses."""
    free = Costs(L, 0, Line(0, 1), Line(0), Line(0), 0, 0, 0)
    mixed = [plan([1, 1, 1, 1]), plan([L, L, L, L])]
    found = crossover(free, mixed, "copy", sizes=(1, 2, 4))
    assert all(row["ruled"] == row["parted"] for row in found)
    assert [row["rows"] for row in found] == [1, 2, 4]
    assert found[0]["parted"] == found[0]["together"] == pytest.approx(8 * L / (4 + 4 * L))
    for row in found[1:]:
        assert row["parted"] == pytest.approx(8 * L / (4 + 4 * L)) and row["together"] == pytest.approx(1)
    bound = Costs(L, 0, Line(1), Line(0), Line(0), 0, 0, 0)  # a step costs the same for any number of rows
    assert crossover(bound, mixed, "copy", sizes=(2,))[0]["parted"] == pytest.approx(1)
    both = Costs(L, 5, Line(0, 1), Line(0), Line(0), 0, 0, 0)  # a call is dear for two rows, and cheap for sixteen
    few, many = crossover(both, mixed, "copy", sizes=(2, 16))
    assert few["ruled"] == few["together"] > few["parted"] and many["ruled"] == many["parted"] > many["together"]
    with pytest.raises(InputError, match="at least one"):
        crossover(free, [], "copy")
