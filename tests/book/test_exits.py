"""What leaving early gained, as a part of the page on the engine."""

import pytest

from eestudy.book.exits import exits


def row(way, kind, tokens, batch=1, model="a", **more):
    seconds = {"seconds": 1.0, "tokens": tokens, "agrees": 99, "of": 100, "bound": None}
    return {"model": model, "batch": batch, "way": way, "kind": kind} | seconds | more


def content(lossless=170):
    rows = [
        row("plain", "plain", 90),
        row("transformers", "library", 100),
        row("layer 2, drafts of 2, verified", "lossless", lossless, bound=2.5),
        row("transformers' assistant_early_exit at 2", "library", 110, agrees=None, of=None),
        row("plain", "plain", 100, 8),
        row("layer 2, drafts of 2, verified", "lossless", 110, 8),
        row("assisted", "library", None, model="b", seconds=None, why="no such thing"),
    ]
    return {"rows": rows, "sequences": 4, "task": "made", "kept": 0.98}


@pytest.mark.parametrize("lossless, met, beside", [(170, "1.70", True), (120, "1.20", False)])
def test_goals_are_judged_against_the_fastest_plain_decoding(lossless, met, beside):
    page = "\n".join(exits(content(lossless)))
    goals = [line for line in page.splitlines() if " times | " in line or "not measured" in line]
    assert met in goals[0] and ("**met**" in goals[0]) == beside and "bound 2.50" in goals[0]
    assert "1.10" in goals[1] and "**not met**" in goals[1]
    assert "not measured" in goals[2] and "not measured" in goals[3]
    assert f"{lossless / 110:.2f}" in goals[4] and ("**met**" in goals[4]) == beside
    assert "b, assisted: no such thing" in page and "99.0%" in page


def test_the_loop_and_the_forecast_are_judged_by_their_worst():
    more = [
        row("loop without a gate", "loop", 96),
        row("network, token by token", "loop", 96, seconds=0.97),
        row("loop without a gate", "loop", 90, 8),
        row("network, token by token", "loop", 90, 8, seconds=0.8),
        row("gate, deferred", "lossy", 108, forecast=1.5),
        row("gate, deferred", "lossy", 110, 8, forecast=1.2),
    ]
    found = content()
    page = "\n".join(exits(found | {"rows": found["rows"] + more}))
    lines = [line for line in page.splitlines() if "without a gate, " in line or "forecast of" in line]
    assert "1.25 times (a, batch 8)" in lines[0] and "**not met**" in lines[0]
    assert "0.90 times (a)" in lines[1] and "**not met**" in lines[1]
    (fewer,) = [line for line in page.splitlines() if "| lossless, batch 8" in line]
    assert "0.98" in fewer  # 110 beside the network's 90 / 0.8
    assert "off by 17% on average, and by 25% at most (a, gate, deferred)" in lines[2]
    more[3]["seconds"] = 1.0
    page = "\n".join(exits(found | {"rows": found["rows"] + more}))
    assert "1.03 times (a, batch 1)" in page


def test_what_batches_leave_of_the_gain():
    crossing = [{"model": "a", "keys": "deferred", "rows": 16, "ruled": 1.345, "parted": 1.234, "together": 0.987}]
    page = "\n".join(exits(content() | {"crossover": crossing}))
    (line,) = [line for line in page.splitlines() if "1.23" in line]
    assert "deferred" in line and "16" in line and "1.34" in line and "0.99" in line
    assert "Parting" not in "\n".join(exits(content()))


def test_lossy_counts_what_keeps_enough_and_a_missed_goal_says_why():
    """The faster gate loses tokens, the slower one keeps them; with that one's score gone, neither counts."""
    freed = {"the gate and the head": 1.95, "calls and Python": 1.75, "prompts": 1.61}
    known = {"bound": 1.7, "forecast": 1.6, "if_free": freed}
    more = [
        row("gate at 2, deferred", "lossy", 190, agrees=90, score=30.0, **known),
        row("gate at 4, deferred", "lossy", 160, agrees=98, score=29.5, **known),
    ]
    found = content()
    found["rows"] += more
    found["rows"][0]["score"] = 30.0
    page = "\n".join(exits(found))
    (goal,) = [line for line in page.splitlines() if line.startswith("| lossy, one prompt")]
    assert "1.60 times" in goal and "**not met**" in goal and "keeping" not in goal
    (why,) = [line for line in page.splitlines() if line.startswith("- lossy")]
    assert "the bound, 1.70, puts 1.8 times out of reach of a, gate at 4, deferred" in why
    assert "1.95 without the cost of the gate and the head, 1.75 without the cost of calls" in why and "1.61" not in why
    more[1]["score"] = 20.0
    (goal,) = [line for line in "\n".join(exits(found)).splitlines() if line.startswith("| lossy, one prompt")]
    assert "1.90 times" in goal and "keeping 90.0%" in goal and "**not met**" in goal  # fast enough, and yet


def test_missed_drafts_tell_how_many_were_right():
    found = content(lossless=120)
    found["rows"][2] |= {"forecast": 1.3, "if_free": {"wrong drafts": 1.9}, "drafted": 50, "accepted": 40}
    (why,) = [line for line in "\n".join(exits(found)).splitlines() if line.startswith("- lossless")]
    assert "puts 1.6 times within reach" in why and "with 80% of its drafts right" in why and "1.90" in why


def test_other_shapes_are_judged_by_the_worst():
    shape = {"layers": 16, "width": 1024, "layer": 4, "draft": 4, "pattern": "a, layer 3 of 12", "accepted": 0.8}
    shape |= {"per_round": 3.2, "head": 2.0, "wide": 1.1, "speed_up": 1.8, "ceiling": 2.0, "ceiling_wide": 1.9}
    page = "\n".join(exits(content() | {"shapes": [shape, shape | {"width": 2048, "speed_up": 1.6}]}))
    (goal,) = [line for line in page.splitlines() if "other shapes, as a share" in line]
    assert "80% (16 x 2,048; of 2)" in goal and "**not met**" in goal
    (line,) = [line for line in page.splitlines() if line.startswith("| 16 x 1,024")]
    assert "90%" in line and "3.20" in line
    (goal,) = [line for line in "\n".join(exits(content() | {"shapes": [shape]})).splitlines() if "a share of" in line]
    assert "**met**" in goal


def test_readings_are_told_with_their_own_run():
    """Ratios within their own rows; when and on what they were measured, where that is not as the rest."""
    machine = {"cpu": "made", "cores": 2, "threads": 2}
    rows = [
        row("plain", "plain", 100, drafted=0, accepted=0),
        row("a: layer 2, drafts of 1, verified", "lossless", 80, bound=1.1, drafted=10, accepted=2, forecast=0.9),
        row("b: layer 2, drafts of 1, verified", "lossless", 90, bound=1.2, drafted=10, accepted=7, forecast=0.95),
        row("plain", "plain", 100, 8, drafted=0, accepted=0),
        row("b: layer 2, drafts of 1, verified", "lossless", 110, 8, bound=1.2, drafted=10, accepted=7),
    ]
    head = {"command": "made", "date": "2026-01-01", "machine": machine}
    part = head | {"sequences": 4, "rows": rows}
    page = "\n".join(exits(content() | head | {"readings": part}))
    assert "one prompt at a time: the best drafts of a are 0.90 times" in page
    assert "batch 8: the best drafts of a are 1.10 times" in page
    (line,) = [line for line in page.splitlines() if line.startswith("| 1 | b: layer 2")]
    assert "7 of 10" in line and "0.90" in line and "1.20" in line and "0.95" in line and "99.0%" in line
    assert "Measured apart" not in page and "1.70 times" in page  # the goals are those of the other rows
    apart = {"date": "2026-01-02"}, {"command": "another"}, {"machine": machine | {"threads": 1}, "load": 1.5}
    for other, told in zip(apart, ("2026-01-02", "by another,", "1 thread on 2 cores of made, 1.5 processes")):
        page = "\n".join(exits(content() | head | {"readings": part | other}))
        assert "Measured apart" in page and told in page
