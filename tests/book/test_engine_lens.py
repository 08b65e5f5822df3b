"""The lens's part of the page on the engine: its rate is held against both goals."""

import pytest

from eestudy.book.lens import lens


@pytest.mark.parametrize("rate, verdicts", [(25.0, (2, 0)), (12.0, (1, 1)), (0.5, (0, 2))])
def test_the_rate_is_judged_by_both_goals(rate, verdicts):
    rows = [{"direction": name, "tokens": 50, "seconds": 50 / rate} for name in ("de-en", "de-en", "en-de")]
    content = {"tokens_per_second": rate, "rows": rows, "least": 1, "goal": 20, "model": "m", "browser": "b 1"}
    content |= {"load_before": 0.5, "machine": {"cores": 2}}
    page = "\n".join(lens(content))
    assert (page.count("**met**"), page.count("**not met**")) == verdicts
    assert "load was 0.5 on 2 cores" in page
    assert f"| de-en | 2 | 100 | {100 / rate:.1f} | {rate:.1f} |" in page


def test_below_the_goal_on_a_busy_machine_is_no_verdict():
    row = {"direction": "de-en", "tokens": 10, "seconds": 2.0}
    content = {"tokens_per_second": 5.0, "rows": [row], "least": 1, "goal": 20, "model": "m", "browser": "b 1"}
    page = "\n".join(lens(content | {"load_before": 4.0, "machine": {"cores": 2}}))
    assert page.count("**met**") == 1 and "**not met**" not in page and "not measured" in page
