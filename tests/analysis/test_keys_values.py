"""Outputs that left early against full decoding's: made-up tokens whose shares, causes and loops are known by hand."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from study_made import made_study

from eestudy.old.analysis import keys_values as kv
from eestudy.old.analysis import keys_values_tables as tables

TASK = "translation/de-en"
HOLDS, FAILS, UNTESTABLE = "holds", "does not hold", "not testable here"


def tokens(rows, **columns):
    """A frame of outputs, lists of token ids; group g<sequence>."""
    flat = [(number, f"g{number:02d}", at, token) for number, ids in enumerate(rows) for at, token in enumerate(ids)]
    return pd.DataFrame(flat, columns=["sequence", "group", "position", "token_id"]).assign(
        **{"truncated": False} | columns
    )


def test_an_output_against_full_decodings():
    full = tokens([[5, 6, 7, 1], [5, 1]])
    early = tokens([[5, 9, 7], [5, 8, 9, 1]], exit_layer=2)
    found = kv.held_against(full, early)
    assert found["agrees"].tolist() == [True, False, True, False, True, False]
    assert found["first"].tolist() == [True, True, False, False, True, True]
    assert found["length"].tolist() == [4] * 4 + [2] * 2
    assert np.isnan(found["exit_layer"][3]) and found["exit_layer"][0] == 2  # the early output ends before
    assert kv.first_differences(found).tolist() == [1, 1]
    same = kv.held_against(full, full.assign(exit_layer=4))
    assert same["agrees"].all() and np.isinf(kv.first_differences(same)).all()


def test_who_made_an_output_part():
    full = tokens([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]], exit_layer=4)
    run = tokens([[1, 9, 3], [1, 9, 3], [1, 2, 3], [1, 2, 9]], exit_layer=4)
    clean = tokens([[1, 8, 3], [1, 2, 9], [9, 2, 3], [9, 2, 3]], exit_layer=4)
    found = kv.causes(kv.held_against(full, run), kv.held_against(full, clean))
    assert found.tolist() == ["gate", "keys", "", "gate"]


def loop_by_hand(ids):
    """The definition, word by word."""
    for length in range(1, kv.LONGEST_PIECE + 1):
        times = kv.TIMES + (length == 1)
        for start in range(len(ids) - times * length + 1):
            piece = ids[start : start + length]
            if all(ids[start + k * length : start + (k + 1) * length] == piece for k in range(times)):
                return True
    return False


def test_loops_are_those_of_the_definition():
    short = [list(ids) for size in range(8) for ids in itertools.product(range(2), repeat=size)]
    rng = np.random.default_rng(0)
    long = [rng.integers(0, 3, 30).tolist() for _ in range(200)]
    long += [[*range(9), *([*range(20, 20 + size)] * times), 7] for size in (2, 5, 10, 11) for times in (2, 3, 4)]
    found = [kv.has_loop(np.array(ids, dtype=int)) for ids in short + long]
    assert found == [loop_by_hand(ids) for ids in short + long] and 0 < sum(found) < len(found)


# ---- a page's verdicts, either way


LENGTHS = [6 + number % 20 for number in range(40)]


def side(spoilt, name="made", loop=False, references=True):
    """40 outputs; copying spoils the tokens for which spoilt(position, length) holds, other ways nothing."""
    rows = [[10 + at for at in range(length)] for length in LENGTHS]

    def early(ids):
        found = [99 + at if spoilt(at, len(ids)) else token for at, token in enumerate(ids)]
        return found + [7] * 4 if loop else found

    study = made_study({TASK: None}, layers=4)
    study.model.name = study.model.hash = name
    study.tasks[TASK] = SimpleNamespace(kind="translation")
    whole = tokens(rows)
    same = {way: {TASK: whole.assign(exit_layer=4)} for way in kv.WAYS}
    return kv.Side(study, {TASK: whole}, same | {kv.COPY: {TASK: tokens(map(early, rows), exit_layer=2)}}, {})


def verdicts(*sides):
    return {found.claim.id: found.verdict for found in kv.verdicts(sides)}


def test_claims_that_hold():
    worse = side(lambda at, length: at >= 6, "after", loop=True)  # the longer, the larger the share
    assert verdicts(side(lambda at, length: False), worse) == {"P-K1": HOLDS, "P-K2": HOLDS, "P-K3": HOLDS}


def test_claims_that_do_not_hold():
    """The shorter ones suffer, projecting loses what copying keeps, and full decoding loops where copying does not."""
    before, better = (side(lambda at, length: at < 3, name) for name in ("before", "after"))
    assert verdicts(before, better)["P-K1"] == FAILS
    spoilt = side(lambda at, length: at >= 6)
    turned = {kv.COPY: spoilt.tokens[kv.PROJECT], kv.PROJECT: spoilt.tokens[kv.COPY]}
    assert verdicts(before, replace(better, tokens=better.tokens | turned))["P-K2"] == FAILS
    looping = tokens([[10 + at for at in range(length)] + [7] * 4 for length in LENGTHS])
    assert verdicts(before, replace(better, full={TASK: looping}))["P-K3"] == FAILS
    assert verdicts(before, better)["P-K3"] == "undecided"  # nothing loops, in 40 outputs


def test_outputs_cut_at_the_limit_have_no_length():
    """Two that run on to the limit and agree there would hide that longer ones suffer."""
    one = side(lambda at, length: at >= 6)
    whole, copied = one.full[TASK], one.tokens[kv.COPY][TASK]
    cut = tokens([[5] * 400] * 2).assign(truncated=True)
    cut = cut.assign(sequence=cut["sequence"] + 40, group=cut["group"] + "cut")
    more = replace(
        one,
        full={TASK: pd.concat([whole, cut], ignore_index=True)},
        tokens=one.tokens | {kv.COPY: {TASK: pd.concat([copied, cut.assign(exit_layer=2)], ignore_index=True)}},
    )
    assert kv.length_slope(more, kv.COPY)[:3] == pytest.approx(kv.length_slope(one, kv.COPY)[:3])
    assert kv.agreement(more, kv.COPY).estimate > kv.agreement(one, kv.COPY).estimate


def test_loops_need_joint_optimization():
    alone = side(lambda at, length: at >= 6, loop=True)
    assert verdicts(alone) == {"P-K1": HOLDS, "P-K2": HOLDS, "P-K3": UNTESTABLE}


def test_shares_by_position_and_blame():
    one = side(lambda at, length: at >= 8)
    table = kv.by_position(one, [kv.COPY])
    assert table.set_index("bin")["estimate"].tolist() == [1, 1, 0, 0]
    first = kv.by_position(one, [kv.COPY], where="first").set_index("bin")["estimate"]
    assert first[0] == 1 and first[2] == 0 and 3 not in first  # all have parted by then
    longer = np.mean([length > 8 for length in LENGTHS])
    assert kv.blamed(one, kv.COPY, "keys").estimate == pytest.approx(longer)
    assert kv.blamed(one, kv.COPY, "gate").estimate == 0
    assert kv.unchanged(one, kv.COPY).estimate == pytest.approx(1 - longer)
    assert kv.exit_depth(one, kv.COPY).estimate == pytest.approx(0.5)
    assert "is the risk" not in tables.constant_in_words(one) and "equally risky" in tables.constant_in_words(one)


def test_ps_depths_are_counted_after_the_fourth_token():
    table = tables.beside_p([side(lambda at, length: False)])
    short = table.set_index(["jointly optimized", "keys and values"])["P, short sentence (%)"]
    assert short["yes", "project"] == pytest.approx(100 * np.mean([5, 8, 7, 7, 17, 2, 12, 8]) / 32)
    assert table["model"].tolist()[:2] == ["made", "made"] and table["this run (%)"].isna().tolist()[2:] == [True, True]
