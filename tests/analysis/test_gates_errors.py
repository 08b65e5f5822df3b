"""What gates get wrong: classes of tokens and carried thresholds by hand."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from eestudy.old.analysis import gates_errors as errors
from eestudy.old.statistics.interval import Interval

GROUPS = 40


@pytest.fixture
def tokens():
    """Twenty tokens of forty groups: later pieces at even positions."""
    position = np.tile(np.arange(20), GROUPS)
    piece = np.where(position % 2, "single", "suffix")
    group = np.repeat([f"g{i:02d}" for i in range(GROUPS)], 20)
    tag = np.where(position < 10, "NOUN", "")
    return pd.DataFrame({"task": "de-en", "piece": piece, "tag": tag, "position": position, "group": group})


def test_classes_are_exclusive_and_large_enough(tokens):
    found = errors.classes(tokens)
    assert list(found["position"]) == ["1-3", "4-10", "11-30"]  # 120, 280 and 400; none from 31 on
    assert sum(rows.sum() for rows in found["position"].values()) == 20 * GROUPS
    assert list(found["piece"]) == ["whole word", "later piece"] and list(found["part of speech"]) == ["NOUN"]


def test_too_early_by_hand(tokens):
    """A third of the later pieces is wrong, and no whole word."""
    wrong = (tokens["piece"] == "suffix") & (tokens["position"] % 6 == 0)
    found = {"confidence": {"de-en": SimpleNamespace(agrees=~wrong.to_numpy())}}
    table = errors.too_early(found, tokens).set_index("class")
    assert table.loc["later piece", "wrong"].estimate == pytest.approx(wrong.sum() / (10 * GROUPS))
    assert table.loc["whole word", "wrong"].estimate == 0
    assert table.loc["later piece", "more"].low > 0 > table.loc["whole word", "more"].high
    words = errors.early_in_words(table.reset_index(), "here")
    assert (
        "By piece, surely more often: later piece (1 of 1 gates); surely less often: whole word (1 of 1 gates)."
        in words
    )


def kept(share, width=0.01):
    return Interval(share, share - width, share + width, 40)


@pytest.fixture
def carried():
    """Confidence fails from b to a, a fixed layer never leaves."""
    rows = [("confidence", one, two, kept(0.8 if (one, two) == ("b", "a") else 0.99), 3.0, False)
            for one in "ab" for two in "ab"]  # fmt: skip
    rows += [("fixed", one, two, kept(1.0, 0), 4.0, True) for one in "ab" for two in "ab"]
    return pd.DataFrame(rows, columns=["gate", "from", "to", "kept", "layers", "never"])


def test_thresholds_that_fail_elsewhere_are_named(carried):
    table = errors.carried_table(carried, 0.98).set_index("gate")
    assert table.loc["confidence", "others: below 98%"] == "1 of 2" and table.loc["confidence", "surely"] == 1
    assert tuple(table.loc["confidence", ["from", "to"]]) == ("b", "a") and table.loc["fixed", "surely"] == 0
    words = errors.carried_in_words(carried, 0.98)
    assert "never for fixed (which never leaves)" in words and "confidence (1 of 2 pairs)" in words
    assert "Thresholds from b fail most often: 1 of 1 times." in words
    assert "fewer than two" in errors.carried_in_words(carried[carried["from"] == carried["to"]], 0.98)
