"""The benchmark's part of the page on the engine: goals are judged on the rows."""

import pytest
from speed_made import linear, rows, speed

from eestudy.book import speed as book_speed


def met(content: dict) -> dict[str, bool | None]:
    """Verdicts by goal."""
    return {goal["goal"]: goal["met"] for goal in book_speed.goals(content)}


def test_every_goal_met_and_every_goal_missed():
    good = speed(rows(), (linear(1024, 1000.0, 90.0), linear(102400, 990.0, 95.0)))
    found = met(good)
    stacked = "Speed at batch 1 with 128k vocabulary, as a multiple of the plain way, stacked"
    assert found.pop(stacked) is False  # 20 / 11 is less than 5
    assert set(found.values()) == {True}
    bad_rows = rows(trace=100.0)
    for row in bad_rows:
        row["peak_above_decode_mb"], row["top1_differences"] = 300.0, 2
    bad = met(speed(bad_rows, (linear(1024, 1000.0, 90.0), linear(102400, 500.0, 400.0))))
    assert set(bad.values()) == {False}


def test_one_bad_cell_is_enough_and_is_named():
    content = speed(rows() + rows("16x2048-128k", 64, trace=12.1))
    goal = book_speed.floor_goal(content)
    assert not goal["met"]
    assert goal["measured"] == "1 of 2 cells; worst 1.21 times (16x2048-128k, batch 64)"


@pytest.mark.parametrize("vocabulary, batch, verdict", [(131072, 1, True), (131072, 16, None), (8192, 1, None)])
def test_five_times_the_plain_way_is_asked_at_batch_one_with_a_large_vocabulary_only(vocabulary, batch, verdict):
    content = speed(rows(batch=batch, vocabulary=vocabulary))
    assert book_speed.plain_goal(content, "plain, step by step")["met"] is verdict


def test_memory_of_long_outputs_counts_against_decoding_of_the_same_length():
    pairs = [linear(16384, 900.0, peak, "longer outputs", way) for way, peak in (("trace", 700.0), ("decode", 430.0))]
    goal = book_speed.memory_goal(speed(rows(), pairs))
    assert not goal["met"]
    assert "270 MB (pocket-llama, 16,384 tokens, batch 64)" in goal["measured"]


def test_a_peer_without_a_figure_has_a_dash_and_its_reason(tmp_path):
    cells = rows()
    peer = next(row for row in cells if row["way"] == "nnsight")
    peer |= {
        "seconds": [],
        "tokens_per_second": None,
        "ratio_to_floor": None,
        "top1_differences": None,
        "note": "its process ended with code 1",
    }
    page = "\n".join(book_speed.parts(speed(cells), ""))
    assert "- nnsight, 12x256-128k: its process ended with code 1" in page
    goal = book_speed.ahead_goal(speed(cells), "nnsight")
    assert goal["met"] is None and goal["measured"] == "not measured"
