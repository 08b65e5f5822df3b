"""The table of coverage on the page on the engine."""

from eestudy.book.intervals import intervals


def content(coverage, wide=1.1):
    row = {"claims": "P-S1", "wide": "", "no_width": 0.0, "width": 1.1, "needed": 1.0, "most_width": 1.5}
    rows = [
        row | {"statistic": "share", "groups": groups, "coverage": share, "asked": groups > 30, "kept": share > 0.93}
        for groups, share in ((30, 0.8), (60, coverage))
    ]
    gap = {"statistic": "gap", "groups": 60, "coverage": 0.99, "asked": True, "kept": True, "wide": "all at once"}
    limits = {"least": 0.93, "most": 0.97, "most_width": 1.5}
    return {"rows": [*rows, row | gap | {"width": wide}], "replications": 1000, "draws": 200} | limits


def test_the_goal_counts_what_is_asked_and_the_table_brackets_the_rest():
    page = "\n".join(intervals(content(0.95)))
    assert "2 of 2; 95.0% to 99.0%" in page and "(30: 80.0%), 60: 95.0%" in page
    assert "200 draws in place of the notebooks' 2,000" in page and "known to about 1.4 percentage points" in page
    assert "within bounds from 60 groups on" in page and "wide, with a reason" in page and "gap: all at once" in page
    narrow = "\n".join(intervals(content(0.805)))
    assert "1 of 2; 80.5% to 99.0%" in narrow and "too narrow from 60 groups on" in narrow
    assert "too wide from 60 groups on" in "\n".join(intervals(content(0.98)))


def test_an_interval_that_says_nothing_is_told_whatever_its_reason():
    page = "\n".join(intervals(content(0.95, wide=1.6)))
    assert "1.60 to 1.60 | uselessly wide" in page and "all at once" in page
