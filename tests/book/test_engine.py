"""The page on the engine: goals are computed from the checks' rows, and a check that has not run says so."""

import json
import re

import pytest

from eelib.book import engine as book_engine
from eelib.book import speed as book_speed

WAYS = {
    "decode": 4.0,
    "head": 6.0,
    "floor": 10.0,
    "trace": 11.0,
    "generate": 5.0,
    "plain, step by step": 60.0,
    "plain, stacked": 20.0,
    "nnsight": 30.0,
    "transformer-lens": 40.0,
    "tuned-lens": 25.0,
}


def rows(
    shape: str = "12x256-128k", batch: int = 1, vocabulary: int = 131072, tokens: int = 100, **seconds: float
) -> list[dict]:
    """The rows of one cell; `seconds` replaces some of the times."""
    times = WAYS | {key.replace("_", " "): value for key, value in seconds.items()}
    return [
        {
            "shape": shape,
            "layers": 12,
            "width": 256,
            "vocabulary": vocabulary,
            "batch": batch,
            "sequences": batch,
            "prompt_tokens": 16,
            "tokens": tokens,
            "way": way,
            "seconds": [time, time * 1.1],
            "tokens_per_second": tokens / time,
            "peak_mb": 120.0,
            "loaded_mb": 500.0,
            "peak_above_decode_mb": 100.0,
            "ratio_to_floor": time / times["floor"],
            "top1_differences": 0,
            "ties": 1,
            "not_compared": 0,
            "note": "",
        }
        for way, time in times.items()
    ]


def linear(tokens: int, rate: float, peak: float, series: str = "more sequences", way: str = "trace") -> dict:
    """One row of the runs with more tokens."""
    return {
        "series": series,
        "shape": "pocket-llama",
        "way": way,
        "batch": 64,
        "sequences": 64,
        "prompt_tokens": 16,
        "tokens": tokens,
        "seconds": [tokens / rate],
        "tokens_per_second": rate,
        "peak_mb": peak,
        "note": "",
    }


def speed(cells: list[dict], linearity: tuple = ()) -> dict:
    """The content of speed.json."""
    return {
        "machine": {"cpu": "made", "cores": 2},
        "versions": {"torch": "2"},
        "date": "2026-01-02",
        "finished": True,
        "repeats": 2,
        "rows": cells,
        "linearity": list(linearity),
    }


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


def test_no_check_has_run(tmp_path):
    found = book_engine.engine(tmp_path, tmp_path)
    assert set(found) == {
        f"engine_{name}"
        for name in ("families", "crashes", "bad_input", "reproducible", "joint_memory", "speed", "kernel")
    }
    assert found["engine_kernel"] == book_engine.NO_GPU
    assert found["engine_speed"] == "The check `speed` has not been run yet.\n"


def family(name: str, **values) -> dict:
    """One family's row; passes everything unless told otherwise."""
    return {
        "architecture": name,
        "model_type": name.lower(),
        "kind": "causal",
        "built": True,
        "attention_based": True,
        "readout": "pass",
        "sublayers": "pass",
        "padding": "batched",
        "decoding": "pass",
        "reason": "",
    } | values


def test_families_are_counted_by_kind_and_the_goal_leaves_out_what_is_not_asked():
    refused = [
        family("Refused", sublayers="refused", reason="module x"),
        family("State", attention_based=False, readout="fail"),
        family("Unbuilt", built=False, readout="", sublayers="", padding="", decoding=""),
    ]
    tried = [family(f"Good{i}") for i in range(9)] + refused
    goal = book_engine.family_goal(tried)
    assert goal["met"] and goal["measured"] == "9 of 10 (90%)"
    assert not book_engine.family_goal([*tried, family("Worse", padding="fail")])["met"]
    masked = family("BertForMaskedLM", kind="masked", padding="equal lengths", decoding="none")
    page = "\n".join(book_engine.families({"rows": [*tried, masked]}))
    assert "| Causal | 11 of 12 | 10 | 10 | 11 | 11 | 9 |" in page
    assert "| Masked | 1 of 1 | 1 | 1 | 1 | – | 1 |" in page
    assert page.count(":::{dropdown}") == 2
    assert "| refused | sub-layers: refused | module x |" in page
    assert "(9):** good0, good1" in page and "only rows of equal length share a batch (1):** bertformaskedlm" in page


def test_failed_cases_are_shown_first_and_hostile_text_is_inert():
    cases = [
        {"case": "empty text", "given": "", "message": "prompt 0 is empty", "ok": True},
        {"case": "script", "given": "<script>|", "message": "Traceback", "ok": False},
    ]
    page = "\n".join(book_engine.bad_input({"rows": cases}))
    assert "**1 of 2 cases went as they should.**" in page
    assert page.index("Traceback") < page.index(":::{dropdown}")
    assert not re.search(r"(?<!\\)<script", page)


def test_the_plot_is_drawn_and_described(tmp_path):
    (tmp_path / "speed.json").write_text(json.dumps(speed(rows() + rows("pocket-llama", 16, 8192))))
    page = book_engine.engine(tmp_path, tmp_path / "generated")["engine_speed"]
    assert (tmp_path / "generated" / "engine_speed.png").stat().st_size > 10_000
    alt = re.search(r":alt: (.*)", page)[1]
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
    assert page.count(":::{dropdown}") == 1 and "2026" not in page


def crash_report(**changes) -> dict:
    """crashes.json where everything went well, but for `changes` of the kills."""
    return {
        "killed": {"kills": 65, "runs": 11, "identical": 11, "moments": {"during a write": 65}} | changes,
        "damaged": [{"file": "a", "damage": "cut in half", "identical": True}] * 13,
        "two_processes": {"rounds": 6, "one_waited": 6, "identical": 6},
        "full_disk": {"tested": True, "half_files": [], "message": "needs 9 bytes", "identical": True},
    }


@pytest.mark.parametrize("changes, missed", [({}, 0), ({"identical": 10}, 1), ({"kills": 49}, 1)])
def test_crashes_are_judged(changes, missed):
    page = "\n".join(book_engine.crashes(crash_report(**changes)))
    assert page.count("**not met**") == missed and page.count("**met**") == 6 - missed
    assert "by moment: during a write 65." in page


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
