"""The page on when drafts pay, with planted layers, costs and a planted race, in all of which the answer is known."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pages import result, run_page, texts
from planted import STEPS, asked, deep_model, exits, plant

import eelib
from eelib.common.errors import InputError
from eestudy import measured as kept_results

TALL, DRAFTED, HEAD = 10, 8, 2.0
FLAT = {"layers": TALL, "rows": [1, 512], "call": [0.0, 0.0], "blocks": [float(TALL)] * 2, "head": [HEAD] * 2}


def race(weights, right, off, repeats=(1.6, 1.7)):
    """Kept results in which `right` of 100 rounds of one draft are right, and forecasts are off by a share."""
    counts = {"drafted": 100, "accepted": right, "passes": 110}
    times = {"times_plain": repeats[0], "ratios": [*repeats], "forecast": repeats[0] * (1 + off), "seconds": [6.0, 6.2]}
    by_text = {name: [every // 10] * 10 for name, every in counts.items()}
    by_text["accepted"][:2] = [right // 10 - 1, right // 10 + 1]  # texts that are all the same have no interval
    ways = [{"kind": "lossless", "method": "block", "by_text": by_text} | counts | times]
    ways.append({"kind": "plain", "method": "plain", "seconds": [10.0, 10.4]})
    ways.append({"kind": "part", "method": "prompts alone", "seconds": [2.0, 2.2]})
    rows = [{"task": "a/b", "batch": size, "texts": 10} | way for size in (1, 16) for way in ways]
    head = {"models": {"deep": weights}, "date": "2026-01-01", "commit": "abc", "machine": {"cpu": "a processor"}}
    return {"race": head | {"rows": rows}, "race_forecast": head | {"costs": {"1": FLAT, "16": FLAT}}}


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


# Right drafts of 100, the forecast's error, times plain decoding in two repeats, the error without a forecast.
RACES = {
    "save time": (90, 0.01, (1.6, 1.7), 1 - 1 / 1.6, "better", "meets its goals"),
    "save no time": (10, 0.5, (0.9, 0.8), 1 / 0.9 - 1, "worse", "misses its goals"),
}


@pytest.mark.parametrize("answer", RACES)
def test_acceptance_and_errors_are_those_of_the_race(answer, map_page):
    right, off, repeats, by_none, than_none, goals = RACES[answer]
    space, found, shown = map_page(lambda weights: race(weights, right, off, repeats=repeats))
    numbers = {name: value["estimate"] for name, value in found["overall"].items()}
    assert numbers["block_right"] == pytest.approx(right / 100) and numbers["error"] == pytest.approx(off)
    assert found["overall"]["block_right"]["low"] < right / 100 < found["overall"]["block_right"]["high"]
    assert numbers["none_error"] == pytest.approx(by_none)
    own = space["study"].tokens.query("counted")
    assert numbers["layer_right"] == pytest.approx(100 * (own["position"] % 4 > 0).mean())
    points = space["points"][["estimate", "low", "high"]].to_numpy(float)
    assert points == pytest.approx(np.array([[2.025, 2.0, 2.05]] * 2))  # 8 / 4 and 8.2 / 4
    assert f"The forecast is {than_none} than no forecast" in shown and f"It {goals} (10% and 20%)" in shown
    said = " ".join(found["answer"].split())
    assert f"Drafts of an early layer {answer}: one text" in said and f"{right} of 100 were right" in said
    assert f"decodes {repeats[0]:.2f} times as fast as plain decoding" in said


def test_a_race_is_of_a_model_on_a_cpu_in_float32(monkeypatch):
    monkeypatch.setattr(kept_results, "measured", lambda name: race("abc", 90, 0.0)[name])
    model = SimpleNamespace(name="deep", hash="abc", device=torch.device("cpu"), dtype="float32")
    assert kept_results.measured_on("race", model)
    for other in ({"hash": "abd"}, {"dtype": "bfloat16"}):
        assert kept_results.measured_on("race", SimpleNamespace(**vars(model) | other)) is None


def test_without_a_race_and_costs_the_page_says_why(map_page, monkeypatch):
    monkeypatch.setattr("eelib.exits.decoding.self_test.tested", lambda model: ("it has no cache", False))
    space, found, _ = map_page(None)
    assert not space["raced"] and not space["costs"] and not len(space["points"])
    assert "can't be stopped at a block: it has no cache), so nothing" in found["answer"]
