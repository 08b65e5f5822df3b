"""A model in service: decoding that really leaves early, batches with hard rows, the alarm and the kill switch (A)."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from eelib.common.errors import InputError, NotEstimable
from eelib.exits.calibration import by_agreement
from eelib.exits.decoding.generate import generate
from eelib.exits.exit_rule import ExitRule
from eelib.exits.policy import Policy, calibrate
from eelib.exits.trace_scores import curve, exits_of, rule_at
from eestudy.exits.shadow import Alarm, Service
from eestudy.exits.task_quality import quality_difference
from eestudy.old.analysis.production import CALIBRATION, REPORT, Crossed, Served, leaving, mean_of, outputs_of
from eestudy.old.analysis.speed import Way, few_exits, run
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.resampling import bootstrap_totals
from eestudy.old.statistics.stats import attempt, bootstrap_mean
from eestudy.old.study.study import Study

WAYS = ("deferred", "verified")
ROWS, SHORTEST = 8, 4  # rows of a batch; tokens of an output, or it is in no batch
HARD = (0, 1)  # hard rows of a batch
TIMED = 16  # tokens of each output, at most, in these batches
SHARES = (0.01, 0.05, 0.2, 1.0)  # of what is served, run at full depth too
STREAMS, CALM = 200, 2000  # simulated streams; shadowed outputs of each before the change
LONGEST = 5000  # shadowed outputs after a change, at most


# ---- decoding for real


def decoded(served: Served, sequences: int, batch: int) -> pd.DataFrame:
    """The first outputs of the report side of each kind's first task, decoded by its rule: a row per task and way.

    Columns: task, keys, layers (at which tokens leave), run (layers in the end), agrees (tokens that are full depth's,
    at their place), unchanged (outputs), score (its name), change (of the score, points), rejected (drafts that the
    last layer takes back).
    """
    rows = [decoded_by(served, task, keys, sequences, batch) for task in first_tasks(served) for keys in WAYS]
    return pd.DataFrame(rows)


def first_tasks(served: Served) -> list[str]:
    """Of each kind the first task that has a threshold."""
    first: dict[str, str] = {}
    for task in served.tasks:
        if served.rule_of(task) is not None:
            first.setdefault(served.kind(task), task)
    return list(first.values())


def decoded_by(served: Served, task: str, keys: str, sequences: int, batch: int) -> dict[str, object]:
    """A row of `decoded`; intervals resample the texts."""
    study, longest = served.study, served.study.parameters.max_new_tokens
    trace = study.traces[task]
    numbers = trace.tokens.loc[served.sides[task][REPORT], "sequence"].unique()[:sequences].tolist()
    asked = study.tasks[task].pick(numbers)
    made = generate(study.model, asked, served.rule_of(task), None, keys, None, batch, longest, batch_split=None)
    tokens = made.tokens.assign(group=made.tokens["sequence"].map(dict(enumerate(asked.groups))))
    at = tokens.assign(sequence=tokens["sequence"].map(dict(enumerate(numbers)))).set_index(["sequence", "position"])
    full = trace.tokens[trace.tokens["sequence"].isin(numbers)].set_index(["sequence", "position"])
    full = full.assign(same=full["token_id"] == at["token_id"].reindex(full.index)).reset_index()
    outputs = full.groupby("sequence").agg(same=("same", "min"), group=("group", "first"))
    before = trace.sequences.set_index("sequence").loc[numbers, "output"].tolist()
    change = quality_difference(asked, before, made.sequences["output"].tolist(), seed=served.seed)
    name, gain = next(iter(change.items()), ("", None))
    return {
        "task": task,
        "keys": keys,
        "layers": mean_of(tokens, "exit_layer", served.seed, share=False),
        "run": mean_of(tokens, "layers_run", served.seed, share=False),
        "agrees": mean_of(full, "same", served.seed),
        "unchanged": mean_of(outputs, "same", served.seed),
        "score": name,
        "change": gain,
        "rejected": attempt(lambda: rejected(made.sequences, asked.groups)) if keys == "verified" else None,
    }


def rejected(outputs: pd.DataFrame, groups: Sequence[str]) -> Interval:
    """Share of drafted tokens that are taken back; a row per output, with drafted and accepted. NotEstimable without a
    draft.
    """
    drafted, accepted = (outputs[name].to_numpy(int) for name in ("drafted", "accepted"))
    if not drafted.sum():
        raise NotEstimable("nothing was drafted")
    back = np.concatenate([np.zeros(accepted.sum()), np.ones((drafted - accepted).sum())])
    return bootstrap_mean(back, np.concatenate([np.repeat(groups, accepted), np.repeat(groups, drafted - accepted)]))


# ---- one deep row in a batch


def mixed_batches(served: Served, batches: int, few: int) -> pd.DataFrame:
    """Batches of easy rows, and the same with some of them hard, decoded early and plainly in turns.

    Easy and hard are the thirds of the first task's outputs, of both sides, with the lowest and the highest mean exit
    layer, by a gate asked at `few` layers; each batch has hard rows of its own as far as there are. Columns batch, hard
    (rows), early and plain (seconds per token). NotEstimable for too few outputs or no threshold.
    """
    task = served.tasks[0]
    study, trace = served.study, served.study.traces[task]
    rule = few_rule(served, task, few_exits(served.depth, few))
    exits = exits_of(rule, study.scores(rule, task), torch.tensor(trace.tokens["position"].to_numpy())).numpy()
    means = pd.DataFrame({"sequence": trace.tokens["sequence"], "exit": exits}).groupby("sequence")["exit"]
    depth = means.mean()[means.size() >= SHORTEST].sort_values(kind="stable")
    third = len(depth) // 3
    if third < ROWS:
        raise NotEstimable(f"{len(depth)} outputs of {task} are too few to part into easy and hard ones")
    easy, hard = depth.index[:third].to_numpy(), depth.index[-third:].to_numpy()
    random = np.random.default_rng(served.seed)
    rows: list[dict] = []
    order = random.permutation(hard)
    ways = {"early": Way("early", rule, "deferred"), "plain": Way("plain", None, "full")}
    for number in range(batches):
        chosen = random.choice(easy, ROWS, replace=False)
        mine = np.roll(order, -number * max(HARD))
        for count in np.roll(HARD, number):
            part = study.tasks[task].pick([*mine[:count].tolist(), *chosen[count:].tolist()])
            if not rows:
                for way in ways.values():
                    run(study.model, part, way, ROWS, TIMED)  # the first pays for what is made once
            times = {}
            for name in (("early", "plain"), ("plain", "early"))[number % 2]:
                made = run(study.model, part, ways[name], ROWS, TIMED)
                times[name] = sum(made.times.values()) / len(made.tokens)
            rows.append({"batch": number, "hard": int(count)} | times)
    return pd.DataFrame(rows)


def few_rule(served: Served, task: str, exits: tuple[int, ...]) -> ExitRule:
    """The gate asked at few layers, at the threshold that keeps the asked share of a task's tokens."""
    if not exits:
        raise NotEstimable(f"{served.name} has no layer below the last to ask a gate at")
    study, rule = served.study, replace(served.rule, exit_layers=exits)
    found, rows = study.scores(rule, task), served.sides[task][CALIBRATION]
    choice = by_agreement(curve(rule, found, study.traces[task], rows), study.parameters.kept)
    if choice.threshold is None or choice.threshold == np.inf:
        raise NotEstimable(f"no token of {task} may leave at layers {exits}: {choice.reason or 'too many were wrong'}")
    return rule_at(rule, choice.threshold)


def speed_with(times: pd.DataFrame, hard: int, seed: int = 0) -> Interval:
    """Times as fast as plain decoding in batches with so many hard rows; batches are resampled."""
    rows = times[times["hard"] == hard][["early", "plain"]].to_numpy(float)
    return bootstrap_totals(lambda t: t[:, 1] / t[:, 0], rows, seed=seed)


def stalled(times: pd.DataFrame, seed: int = 0) -> Interval:
    """Speed-up with one hard row less that with none, the same batches paired (A-P3)."""
    wide = times.pivot(index="batch", columns="hard")[["early", "plain"]]
    sums = np.column_stack([wide[way, count].to_numpy(float) for count in (1, 0) for way in ("early", "plain")])
    return bootstrap_totals(lambda t: t[:, 1] / t[:, 0] - t[:, 3] / t[:, 2], sums, seed=seed)


# ---- a stream that is watched


@dataclass(frozen=True)
class Change:
    """A change of traffic: task `task` comes to a service that was calibrated on task `of`.

    `calm`, `changed`: whether each output of either's report side differs anywhere from full depth's, at the threshold
    of `of`; `risk`: what is promised of `of`.
    """

    of: str
    task: str
    risk: float
    calm: np.ndarray
    changed: np.ndarray


def promised(served: Served, task: str) -> float:
    """What is promised of a task: the upper limit of the share of its calibration outputs that differ."""
    outputs = outputs_of(leaving(served, task, served.rule_of(task), CALIBRATION))
    return min(max(mean_of(outputs, "changed", served.seed).high, 0.01), 0.99)


def worst_change(served: Served, found: Crossed) -> Change:
    """That to a task of another kind which loses most beyond what is promised. NotEstimable where none does."""
    losses = {pair: outputs_of(frame)["changed"].to_numpy(float) for pair, frame in found.items() if len(frame)}
    risks = {of: promised(served, of) for of in served.tasks if served.rule_of(of) is not None and (of, of) in losses}
    pairs = [
        (lost.mean() - risks[of], of, task)
        for (task, of), lost in losses.items()
        if of in risks and served.kind(of) != served.kind(task)
    ]
    if not pairs or max(pairs)[0] <= 0:
        raise NotEstimable("no learnt task of another kind loses more than is promised")
    _, of, task = max(pairs)
    return Change(of, task, risks[of], losses[of, of], losses[task, of])


def watched(change: Change, alpha: float, seed: int = 0) -> pd.DataFrame:
    """Simulated streams: CALM shadowed outputs of the old traffic, then the new, drawn from their losses.

    A row per share of SHARES: share, delay and low, high (median and 95% range of outputs served from the change to the
    alarm; infinite where it did not come), missed (share of streams without an alarm), of an alarm that starts with the
    change; late (median), of one that has watched the old traffic; false (share of streams in which that one went off
    before the change).
    """
    random = np.random.default_rng(seed)
    fresh, late, wrongly = np.full(STREAMS, np.inf), np.full(STREAMS, np.inf), 0
    for stream in range(STREAMS):
        long = Alarm(change.risk, alpha)
        if any(long.see(loss) for loss in random.choice(change.calm, CALM)):
            wrongly += 1
            long = Alarm(change.risk, alpha)
        new = random.choice(change.changed, LONGEST)
        fresh[stream], late[stream] = waits(Alarm(change.risk, alpha), new), waits(long, new)
    rows = []
    for share in SHARES:
        found, after_calm = served_until(fresh, share, random), served_until(late, share, random)
        low, middle, high = np.quantile(found, [0.025, 0.5, 0.975], method="higher")
        rows.append(
            {
                "share": share,
                "delay": middle,
                "low": low,
                "high": high,
                "missed": float((~np.isfinite(fresh)).mean()),
                "late": float(np.quantile(after_calm, 0.5, method="higher")),
                "false": wrongly / STREAMS,
            }
        )
    return pd.DataFrame(rows)


def waits(alarm: Alarm, losses: np.ndarray) -> float:
    """After how many of these outputs an alarm goes off; infinite where it does not."""
    return next((float(place) for place, loss in enumerate(losses, 1) if alarm.see(loss)), np.inf)


def served_until(waited: np.ndarray, share: float, random: np.random.Generator) -> np.ndarray:
    """Outputs served until so many of them were shadowed [streams], each with a chance of `share`."""
    known, found = np.isfinite(waited), waited.copy()
    found[known] = waited[known] + random.negative_binomial(waited[known], share)
    return found


# ---- the policy as a file, refused and switched off


def policy_of(served: Served, epsilon: float, delta: float) -> Policy:
    """A policy with a guarantee for each kind of the learnt tasks: Learn-then-Test at (epsilon, delta)."""
    study = served.study
    tasks = {task: study.tasks[task] for task in served.tasks}
    traces = {task: study.traces[task] for task in served.tasks}
    gate = served.rule.gate.name
    return calibrate(study.model, tasks, traces, gate, epsilon=epsilon, delta=delta, seed=served.seed)


def refusal(policy: Policy, other: Study) -> str:
    """The line with which a policy is refused for another version of the model; "" where it is the same."""
    try:
        policy.check(other.model)
    except InputError as error:
        return str(error)
    return ""


def switched(served: Served, policy: Policy, count: int = ROWS) -> tuple[str, float, float]:
    """(task, share of its tokens that leave early in service before and after the kill switch is thrown), of the first
    outputs of the first task with a certified threshold; "" and NaN where none has one.
    """
    task = next((t for t in served.tasks if policy.thresholds.get(served.study.tasks[t].kind) is not None), "")
    if not task:
        return "", float("nan"), float("nan")
    asked, found = served.study.tasks[task].take(count), []
    with tempfile.TemporaryDirectory() as folder:
        switch = Path(folder) / "stop"
        service = Service(served.study.model, policy, Alarm(0.5), share=0.0, kill=switch)
        for _ in range(2):
            made = service.generate(asked, max_new_tokens=served.study.parameters.max_new_tokens)
            found.append(float((made.tokens["exit_layer"] < served.depth).mean()))
            switch.touch()
    return task, found[0], found[1]
