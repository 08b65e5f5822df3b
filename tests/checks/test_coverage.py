"""The check of calibrated thresholds sees a way that is too bold."""

import numpy as np
from check_runs import missed

from checks import coverage
from eelib.exits.calibration import Choice


def test_promises_are_kept_and_a_way_that_is_too_bold_is_seen(monkeypatch):
    random = np.random.default_rng(0)
    for risks, draw in coverage.POPULATIONS.values():
        np.testing.assert_allclose(draw(random, 20_000).mean(axis=0), risks, atol=0.015)
    monkeypatch.setattr(coverage, "UNITS", (200,))
    assert not missed(coverage.goals(coverage.simulate(100)))

    def bold(losses):
        met = losses.mean(axis=0) <= coverage.EPSILON  # without any allowance for chance
        return Choice(0.0, "", len(losses), "", int(met.argmax()))

    name = f"{coverage.TEST}, fixed sequence"
    monkeypatch.setattr(coverage, "ways", lambda _: {name: bold})
    assert missed(coverage.goals(coverage.simulate(100)))
