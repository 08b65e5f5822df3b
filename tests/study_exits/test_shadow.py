"""The alarm's evidence by hand, how often it is wrong and how late, and a service that it stops."""

import math

import numpy as np
import pytest
from exits_made import policy_of

import eelib
from checks.tiny_texts import PROMPTS
from eelib.common.errors import InputError
from eestudy.exits.shadow import DriftAlarm, Service, bets


def test_the_evidence_by_hand():
    """Of losses 0 and 1 it is the likelihood of each bet over that of the promise, averaged."""
    alarm = DriftAlarm(0.1, 0.05)
    worse = [0.15, 0.2, 0.3, 0.5]
    assert bets(0.1) == pytest.approx(worse) and bets(0.9) == pytest.approx([0.95])
    assert alarm.evidence == 1.0
    for loss in (1, 0, 0, 1):
        alarm.see(loss)
    assert alarm.evidence == pytest.approx(np.mean([b**2 * (1 - b) ** 2 / (0.1**2 * 0.9**2) for b in worse]))
    alarm.see(0.4)
    stakes = [(b - 0.1) / 0.09 for b in worse]
    parts = [b**2 * (1 - b) ** 2 / (0.1**2 * 0.9**2) * (1 + s * 0.3) for b, s in zip(worse, stakes)]
    assert alarm.evidence == pytest.approx(np.mean(parts))
    assert (alarm.seen, alarm.lost, alarm.at) == (5, 2.4, None)


def test_it_goes_off_at_one_over_alpha_and_stays_on():
    alarm = DriftAlarm(0.05, 0.01)
    told = [alarm.see(1) for _ in range(3)] + [alarm.see(0) for _ in range(200)]
    assert alarm.at == told.index(True) + 1 and all(told[alarm.at - 1 :]) and alarm.evidence < 1
    by_hand = next(n for n in range(1, 9) if np.mean([(b / 0.05) ** n for b in bets(0.05)]) >= 100)
    assert alarm.at == by_hand


def first_alarms(true, risk, alpha, steps, streams, seed):
    """When the alarm of each of many streams of losses goes off; inf where it does not."""
    losses = np.random.default_rng(seed).random((streams, steps)) < true
    found = []
    for stream in losses:
        alarm = DriftAlarm(risk, alpha)
        found.append(next((n for n, loss in enumerate(stream, 1) if alarm.see(float(loss))), math.inf))
    return np.array(found)


def test_false_alarms_are_rare_however_long_one_looks():
    wrong = np.isfinite(first_alarms(0.1, 0.1, 0.1, 600, 300, 0)).mean()
    assert wrong <= 0.1 + 3 * math.sqrt(0.1 * 0.9 / 300)
    assert wrong > 0  # it is no alarm that never goes off


def service_of(model, threshold, risk=0.05, kv_policy="deferred", **more):
    """A service of a policy that was never calibrated."""
    return Service(model, policy_of(model, {"prompts": threshold}, kv_policy=kv_policy), DriftAlarm(risk), **more)


def test_a_service_goes_back_to_full_depth(model_of):
    """Once outputs differ too often; what the shadow saw is what was served."""
    model = model_of("llama")
    service = service_of(model, -1.0, share=0.5)
    full = eelib.generate(model, PROMPTS, max_new_tokens=6)
    assert service.early
    calls = 0
    while service.early and calls < 50:
        made = service.generate(PROMPTS, max_new_tokens=6)
        assert (made.tokens["exit_layer"][made.tokens["position"] > 0] == 1).all()
        calls += 1
    assert not service.early and len(service.shadowed) == service.alarm.seen and service.alarm.lost > 0
    assert 0 < service.alarm.seen < service.served == calls * len(PROMPTS)
    assert service.generate(PROMPTS, max_new_tokens=6).tokens.equals(full.tokens)


def test_a_service_that_keeps_its_promise_goes_on(model_of):
    model = model_of("llama")
    service = service_of(model, 2.0, share=1.0)
    for _ in range(10):
        service.generate(PROMPTS, max_new_tokens=4)
    assert service.early and service.alarm.lost == 0 and service.shadowed == list(range(10 * len(PROMPTS)))


def test_the_kill_switch(model_of, tmp_path):
    """A file: while it is there, all blocks run, and what was asked of drafts is not asked of full depth."""
    model, kill = model_of("llama"), tmp_path / "off"
    service = service_of(model, -1.0, kv_policy="verified", share=1.0, kill=kill)
    drafted = []
    for switch in (lambda: None, kill.touch, kill.unlink):
        switch()
        drafted.append(service.generate(PROMPTS, max_new_tokens=4, draft_length=2))
    assert [made.sequences["drafted"].sum() > 0 for made in drafted] == [True, False, True]
    first, *others = (made.tokens["token_id"].tolist() for made in drafted)
    assert others == [first, first] and service.alarm.lost == 0


def test_bad_input(model_of, folder_of, one_line):
    model = model_of("llama")
    coarse = eelib.load_model(str(folder_of("llama")), device="cpu", dtype="bfloat16")
    one_line(InputError, "risk 0", lambda: DriftAlarm(0.0))
    one_line(InputError, "alpha 1", lambda: DriftAlarm(0.1, 1.0))
    one_line(InputError, "loss 2", lambda: DriftAlarm(0.1).see(2))
    one_line(InputError, "share 2", lambda: service_of(model, 0.5, share=2))
    one_line(InputError, ["bfloat16", "share=0"], lambda: service_of(coarse, 0.5))
    assert service_of(coarse, 0.5, share=0).early
    other = policy_of(model, {"prompts": 0.5})
    one_line(InputError, "other weights", lambda: Service(model_of("gpt2"), other, DriftAlarm(0.1)))
