"""The page on when drafts pay, with planted layers, costs and a planted race, in all of which the answer is known."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pages import result, run_page, texts
from planted import STEPS, asked, deep_model, exits, kept_race, plant

import eelib
from eelib.common.errors import InputError
from eestudy import measured as kept_results

TALL, DRAFTED, HEAD, MOST = 10, 8, 2.0, 15
FLAT = {"layers": TALL, "rows": [1, 512], "call": [0.0, 0.0], "blocks": [float(TALL)] * 2, "head": [HEAD] * 2}


def race(weights, right, off, drafted=100, repeats=(1.6, 1.7), more=()):
    """Kept results in which `right` of 100 rounds of one draft are right, and forecasts are off by a share."""
    counts = {"drafted": drafted, "accepted": right, "passes": 110}
    own = {"kind": "lossless", "method": "block", "by_text": {name: [all_ // 10] * 10 for name, all_ in counts.items()}}
    if right:  # texts that are all the same have no interval
        own["by_text"]["accepted"][:2] = [right // 10 - 1, right // 10 + 1]
    own |= counts
    own |= {"times_plain": repeats[0], "ratios": [*repeats], "forecast": repeats[0] * (1 + off), "seconds": [6.0, 6.2]}
    rows = [own, {"kind": "plain", "method": "plain", "seconds": [10.0, 10.4]}]
    rows.append({"kind": "part", "method": "prompts alone", "seconds": [2.0, 2.2]})
    rows += [
        own | dict(zip(("kind", "method", *counts), ("forced", "block, one draft a round", *given))) for given in more
    ]
    forecast = kept_race("deep", weights, [], ()) | {"costs": {"1": FLAT, "16": FLAT}}
    return {"race": kept_race("deep", weights, rows, (1, 16)), "race_forecast": forecast}


def least_when_flat(layer):
    """The least chance at which drafts of a layer pay if a pass costs the same for any number of tokens, plainly."""
    for chance in np.arange(1, 1001) / 1000:
        for drafts in range(1, MOST + 1):
            tokens = sum(chance**n for n in range(drafts + 1))
            if tokens * (TALL + HEAD) > drafts * (layer + HEAD) + TALL + HEAD + 1e-9:
                return chance
    return np.nan


@pytest.fixture
def map_page(monkeypatch, planted_tasks, tmp_path):
    """map_page(kept): the page where three of four tokens exit by layer 8, its results and its texts."""
    model, task = deep_model(tmp_path / "deep", TALL), eelib.load_task(planted_tasks[0])
    plant(model, task, tmp_path / "runs", lambda t: exits(np.where(t["position"] % 4, DRAFTED, TALL), TALL), STEPS)

    def run(kept):
        def read(name):
            if not kept:
                raise InputError("no result has this name")
            return kept(model.hash)[name]

        monkeypatch.setattr(kept_results, "measured", read)
        space, shown = run_page("should_i_use_it", **asked(tmp_path, tmp_path / "deep", planted_tasks[0]))
        return space, result(space), re.sub(r"\s+", " ", texts(shown))

    return run


# No forecast would be off by 1 - 1 / 1.6, or 37.5%.
FORECASTS = [(90, 0.01, "better", "meets its goals"), (10, 0.5, "worse", "misses its goals")]


@pytest.mark.parametrize("right, off, than_none, goals", FORECASTS)
def test_acceptance_and_errors_are_those_of_the_race(right, off, than_none, goals, map_page):
    space, found, shown = map_page(lambda weights: race(weights, right, off))
    numbers = {name: value["estimate"] for name, value in found["overall"].items()}
    assert numbers["block_right"] == pytest.approx(right / 100) and numbers["error"] == pytest.approx(off)
    assert found["overall"]["block_right"]["low"] < right / 100 < found["overall"]["block_right"]["high"]
    assert numbers["layer_needed"] == pytest.approx(100 * least_when_flat(DRAFTED))
    own = space["study"].tokens.query("counted")
    assert numbers["layer_right"] == pytest.approx(100 * (own["position"] % 4 > 0).mean())
    points = space["points"][["estimate", "low", "high"]].to_numpy(float)
    assert points == pytest.approx(np.array([[2.025, 2.0, 2.05]] * 2))  # 8 / 4 and 8.2 / 4
    assert f"The forecast is {than_none} than no forecast" in shown and f"It {goals} (10% and 20%)" in shown
    assert f"by 37.5% (median) and 38% (largest), and ours is off by {100 * off:.1f}% and" in shown
    assert f"(2 combinations), the median error is {round(100 * off)}%, and it is too high in 2." in shown
    assert ("few texts do not confirm the map" in found["answer"]) == (right == 10)
    assert "Drafts of an early layer save time: one text" in " ".join(found["answer"].split())
    assert "decodes 1.60 times as fast as plain decoding** (median over tasks," in found["answer"]
    assert "1.60 to 1.70 in 2 repeats, prompts included, on " in found["answer"]
    assert f"{right} of 100 were right" in found["answer"]


@pytest.mark.parametrize(
    ["repeats", "answer"],
    [
        ((0.9, 0.8), "**Drafts of an early layer save no time: one text"),
        ((0.9, 1.1), "**Whether drafts of an early layer save time is not decided: one text"),
    ],
)
def test_all_repeats_have_to_agree_on_whether_drafts_save_time(repeats, answer, map_page):
    _, found, _ = map_page(lambda weights: race(weights, 90, 0.0, repeats=repeats))
    assert answer in " ".join(found["answer"].split())


def test_a_race_is_of_a_model_on_a_cpu_in_float32(monkeypatch):
    monkeypatch.setattr(kept_results, "measured", lambda name: race("abc", 90, 0.0)[name])
    model = SimpleNamespace(name="deep", hash="abc", device=torch.device("cpu"), dtype="float32")
    assert kept_results.measured_on("race", model)
    model.dtype = "bfloat16"
    assert kept_results.measured_on("race", model) is None


def test_a_block_that_drafted_nothing_has_no_acceptance(map_page):
    space, found, shown = map_page(lambda weights: race(weights, 0, 0.0, drafted=0))
    assert not space["block_right"].known and "made no drafts of layer" in found["answer"]
    assert "Whether drafts of an early layer save time is not decided" in found["answer"]
    assert "% of them are right." in found["answer"]
    assert not re.search(r"\bnan\b", shown, re.IGNORECASE)


def test_drafts_in_each_round_are_what_is_said_of_a_block_that_seldom_drafts(map_page):
    _, found, _ = map_page(lambda weights: race(weights, 0, 0.0, drafted=0, more=[(100, 90, 110)]))
    answer = " ".join(found["answer"].split())
    assert "Drafts of an early layer save time: one text" in answer and "90 of 100 were right" in answer
    assert found["overall"]["error"]["estimate"] == 0.0


def test_without_costs_the_page_says_why(map_page, monkeypatch):
    monkeypatch.setattr("eelib.exits.decoding.self_test.tested", lambda model: ("it has no cache", False))
    space, found, _ = map_page(None)
    assert (
        not space["raced"]
        and not space["costs"]
        and "can't be stopped at a block: it has no cache), so nothing" in found["answer"]
    )
    assert "needed, tokens as here (%)" not in space["others"]


def test_without_a_race_of_these_weights_the_page_says_so(map_page):
    space, found, shown = map_page(lambda weights: race("others", 90, 0.01))
    assert not space["raced"] and not len(space["points"])
    assert "No forecast of this model was compared with a race." in shown
    assert "No trained block was timed." in found["answer"] and "untrained layer 8" in found["answer"]
