"""The page on the engine: goals are computed from the checks' rows, and a check that has not run says so."""

import importlib.util
import json
import re

import pytest
from bs4 import BeautifulSoup
from speed_made import rows, speed

from eestudy.book import engine as book_engine


def test_no_check_has_run(tmp_path):
    found = book_engine.engine(tmp_path)
    assert set(found) == {
        f"engine_{name}"
        for name in (
            *("families", "crashes", "many_prompts", "bad_input", "reproducible"),
            *("joint_memory", "lens", "coverage", "exits", "statistics", "speed", "kernel", "cluster"),
        )
    }
    assert all(f"`python -m checks.{name[7:]}` runs it" in page for name, page in found.items())
    assert all(importlib.util.find_spec(f"checks.{name[7:]}") for name in found)


def test_failed_cases_are_shown_first_and_hostile_text_is_inert():
    cases = [
        {"case": "empty text", "given": "", "message": "prompt 0 is empty", "ok": True, "seconds": 0.04},
        {"case": "script", "given": "<script>|", "message": "Traceback", "ok": False, "seconds": 11.4},
    ]
    page = "\n".join(book_engine.bad_input({"rows": cases}))
    assert "**1 of 2 cases went as they should.**" in page
    assert "Half of the answers took at most 11.40 seconds, the slowest 11.4 (script)." in page
    assert page.index("Traceback") < page.index("{dropdown}")
    assert not re.search(r"(?<!\\)<script", page)


def test_the_plot_is_drawn_and_described(tmp_path):
    (tmp_path / "speed.json").write_text(json.dumps(speed(rows() + rows("pocket-llama", 16, 8192))))
    page = book_engine.engine(tmp_path)["engine_speed"]
    (figure,) = BeautifulSoup(page, "lxml").select("figure.ee-figure")
    assert [link.get_text() for link in figure.select(".ee-take a")] == ["SVG", "CSV"]
    assert len(figure.img["src"]) > 10_000
    alt = figure.img["alt"]
    assert "trace: 1.10 to 1.10" in alt and "pocket-llama" in alt
    assert "Measured on: made, 2 cores; 2026-01-02; torch 2." in page


def test_the_kernel_is_judged_on_its_worst_shape():
    shape = {"width": 4096, "vocabulary": 32000, "dtype": "bfloat16", "teraflops": {"matmul": 700.0, "kernel": 600.0}}
    content = {
        "goal": 0.85,
        "rows": [
            shape | {"rows": 64, "share_of_matmul": {"matmul": 1.0, "kernel": 0.9}},
            shape | {"rows": 4096, "share_of_matmul": {"matmul": 1.0, "kernel": 0.8}},
        ],
    }
    page = "\n".join(book_engine.kernel(content))
    assert "1 of 2 shapes; worst 0.800 | **not met** |" in page
    assert "| 4,096 | 4,096 | 32,000 | 700 | 0.800 |" in page
    content["rows"].pop()
    assert "**met**" in "\n".join(book_engine.kernel(content))


def test_figures_of_a_check_are_shown_whatever_their_form():
    found = {
        "date": "2026-01-02",
        "killed": {"kills": 60, "identical": 60},
        "ok": True,
        "damaged": [{"how": "cut | short", "identical": True}],
        "runs": [{"run": i} for i in range(13)],
    }
    page = "\n".join(book_engine.outcome(found))
    assert "| kills | 60 |" in page and "| cut \\| short | yes |" in page
    assert page.count("{dropdown}") == 1 and "2026" not in page


def crash_report(**changes) -> dict:
    """crashes.json where everything went well, but for `changes` of the kills."""
    return {
        "killed": {"kills": 65, "runs": 11, "identical": 11, "moments": {"during a write": 65}} | changes,
        "damaged": [{"file": "a", "damage": "cut in half", "identical": True}] * 13,
        "workers_killed": {"kills": 240, "workers": 3, "runs": 9, "identical": 9},
        "two_processes": {"rounds": 6, "shared": 6, "identical": 6},
        "full_disk": {"tested": True, "half_files": [], "message": "needs 9 bytes", "identical": True},
    }


@pytest.mark.parametrize("changes, missed", [({}, 0), ({"identical": 10}, 1), ({"kills": 59}, 1)])
def test_crashes_are_judged(changes, missed):
    page = "\n".join(book_engine.crashes(crash_report(**changes)))
    assert page.count("**not met**") == missed and page.count("**met**") == 7 - missed
    assert "by moment: during a write 65." in page


def test_a_disk_that_was_not_filled_is_not_judged():
    why = {"tested": False, "why": "no right to mount"}
    page = "\n".join(book_engine.crashes(crash_report() | {"full_disk": why}))
    assert "| no right to mount | not measured |" in page and page.count("**met**") == 6


@pytest.mark.parametrize("twice, verdict", [(0, "**met**"), (2, "**not met**")])
def test_many_prompts_are_told(twice, verdict):
    content = {
        "prompts": 100_000,
        "workers": 8,
        "shards": 1563,
        "shards_made_twice": twice,
        "prompts_per_second": 381.8,
    }
    content |= {"rows_per_second": 1527.0, "peak_memory_mb": 702, "seconds_to_start_again": 9.4, "of_them_loading": 8.2}
    page = "\n".join(book_engine.many_prompts(content))
    assert "100,000 prompts" in page and "382 prompts a second, 1,527 rows" in page and "702 MB" in page
    assert verdict in page


@pytest.mark.parametrize("share, verdict", [(1.5, "**met**"), (1.51, "**not met**")])
def test_a_joint_step_takes_at_most_half_more_memory(share, verdict):
    plain = {
        "vocabulary": 8192,
        "way": "plain",
        "peak_mb": 1000.0,
        "memory_of_plain": 1.0,
        "seconds_per_step": 1.0,
        "time_of_plain": 1.0,
    }
    rows = [
        plain,
        plain | {"way": "joint", "peak_mb": 1000 * share, "memory_of_plain": share},
        plain | {"way": "joint, all logits held", "memory_of_plain": 9.0},
    ]
    page = "\n".join(book_engine.joint_memory({"rows": rows, "most": 1.5, "network": "n", "batch": "b"}))
    assert page.count("met**") == 1 and verdict in page and f"| joint | {1000 * share:,.0f} | {share:.2f} |" in page


def test_only_float32_has_to_be_the_same_across_batch_sizes():
    row = {
        "dtype": "float32",
        "batch_size": 4,
        "against": 1,
        "sequences": 48,
        "sequences_with_another_output": 0,
        "top1_compared": 100,
        "top1_differs": 0,
        "largest_margin_of_a_top1_that_differs": None,
        "mean_difference": {"probability": 1e-7},
    }
    low = row | {"dtype": "bfloat16", "top1_differs": 7, "largest_margin_of_a_top1_that_differs": 0.02}
    content = {"equal_runs": [{"dtype": "float32", "files": 9, "same_bytes": True}], "batch_sizes": [row, low]}
    page = "\n".join(book_engine.reproducible(content))
    assert page.count("**met**") == 2 and "| bfloat16 | 4 | 1 | 0 of 48 | 7 of 100 | 0.02 | 1e-07 |" in page
    content["batch_sizes"][0] = row | {"top1_differs": 1}
    assert "1 of 100 | **not met**" in "\n".join(book_engine.reproducible(content))


def test_a_byte_that_differs_on_the_cluster_is_a_goal_that_is_not_met():
    same = {"compared": 9, "identical": 9, "differ": []}
    content = {
        "files": same,
        "figures": same,
        "cells": same | {"identical": 8, "differ": ["a"]},
        "too_large": [{"asked": "70 GB", "said": "<b>no", "ok": True}],
        "started_while_drained": 0,
        "held_by_the_drained_node": 2,
        "models": 2,
        "notebooks": 3,
        "workers": 2,
        "seconds_until_it_was_noticed": 9.4,
    }
    page = "\n".join(book_engine.cluster(content))
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines() if line.startswith("| ")}
    assert "| 9 of 9 | **met** |" in lines["Files of traces as in a plain run"]
    assert "| 8 of 9 | **not met** |" in lines["Cells of notebooks as in a plain run"]
    assert "| 0, while 2 waited | **met** |" in lines["Jobs that start on a node that is drained"]
    assert "\\<b\\>no" in lines["70 GB"]
