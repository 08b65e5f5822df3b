"""Tables and words of the page on production, and the verdicts of all its parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from eelib.common.errors import NotEstimable
from eelib.exits.policy import Policy
from eestudy.claims import Verdict
from eestudy.old.analysis import production as pr
from eestudy.old.analysis import production_budgets as budgeted
from eestudy.old.analysis import production_service as service
from eestudy.old.analysis import production_structured as structured
from eestudy.old.analysis.gate_rules import label
from eestudy.old.analysis.production import KINDS, Served
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.statistics.stats import attempt
from eestudy.old.study.claims import untestable
from eestudy.old.study.results import Results
from eestudy.old.study.study import Study
from eestudy.parameters import Parameters, as_parameter_error

NONE = "all layers"


@dataclass(frozen=True)
class Page:
    """Everything that the page shows; what could not be had is None or empty, with its reason in `why`.

    `crossed`: as of `production.crossed`; `left`, `kinds`, `tasks`: each task at its own threshold, with both tables.
    """

    before: Study
    served: Served
    crossed: pr.Crossed
    left: pr.Left
    kinds: pd.DataFrame
    tasks: pd.DataFrame
    budgets: dict[str, pr.Left]
    decoded: pd.DataFrame
    times: pd.DataFrame | None
    revised: pd.DataFrame
    change: service.Change | None
    delays: pd.DataFrame | None
    policy: Policy
    switched: tuple[str, float, float]
    refused: str
    structured: structured.Structured | None
    why: dict[str, str]


def open_page(p: Parameters) -> Page:
    """Trace, calibrate, decode, time and simulate what the parameters ask for. ParameterError as of the parts."""
    before, served = pr.open_served(p)
    with as_parameter_error():
        policy = service.policy_of(served, p.epsilon, p.delta)
    why: dict[str, str] = {}

    def part(name: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except NotEstimable as error:
            why[name] = str(error)
            return None

    orders = part("structured", lambda: structured.open_structured(p, served.rule, served.tasks[0]))
    crossed = pr.crossed(served)
    left = pr.at_own(crossed)
    change = part("change", lambda: service.worst_change(served, crossed))
    return Page(
        before,
        served,
        crossed,
        left,
        pr.kinds_table(left, served.seed),
        pr.tasks_table(served, left),
        budgeted.budgets(served, p.budget, pr.forbidden(p.never)),
        service.decoded(served, p.sequences, p.batch_size or service.ROWS),
        part("times", lambda: service.mixed_batches(served, p.batches, p.few_exits)),
        pr.revised(served, before) if before is not served.study else pd.DataFrame(),
        change,
        service.watched(change, p.alpha, p.seed) if change else None,
        policy,
        service.switched(served, policy),
        service.refusal(policy, before),
        orders,
        why,
    )


def verdicts(page: Page) -> list[Verdict]:
    """Verdicts on A-P1 to A-P4."""
    served, found = page.served, pr.verdicts(page.served, page.crossed)
    if page.times is None:
        found.append(untestable("A-P3", page.why["times"]))
    else:
        times = page.times
        judged = served.study.judge("A-P3", lambda: service.stalled(times, served.seed), tasks=1)
        found.append(replace(judged, models=served.name))
    return [*found, structured.verdict(page.structured, page.why.get("structured", ""))]


# ---- tables


def percent(share: Interval) -> Interval:
    """A share in percent; an exact limit next to 0 is 0."""
    return share.percent.mapped(lambda value: round(value, 3))


def traffics(page: Page) -> dict[str, pd.DataFrame]:
    """{traffic: `production.kinds_table`}: the learnt tasks, and structured output at another task's threshold."""
    own = f"{len(page.left)} tasks" if len(page.left) > 1 else next(iter(page.left))
    found = {f"{page.served.name}, {own}": page.kinds}
    if page.structured:
        of = page.structured
        found[f"{of.served.name}, {of.task}"] = pr.kinds_table({of.task: of.tokens}, page.served.seed)
    return found


def task_table(page: Page) -> pd.DataFrame:
    """As `production.tasks_table`, in percent, for the page."""
    table = page.tasks
    return pd.DataFrame(
        {
            "task": table["task"],
            "threshold": table["threshold"],
            "layers per token": table["layers"],
            "through all layers (%)": [percent(one) for one in table["deepest"]],
            "tokens wrong (%)": [percent(one) for one in table["wrong"]],
            "outputs changed (%)": [percent(one) for one in table["changed"]],
        }
    )


def budget_table(page: Page) -> pd.DataFrame:
    """A row per way and kind of token that is emitted: how many leave early, and how many of those are wrong; mean
    layers of all.
    """
    rows, seed = [], page.served.seed
    for way, left in page.budgets.items():
        for kind, name in [*KINDS.items(), (None, "all")]:
            early = attempt(lambda: pr.over_tasks(left, "early", kind, by="said", seed=seed))
            rows.append(
                {
                    "thresholds": way,
                    "tokens emitted": name,
                    "leave early (%)": percent(early),
                    "of these wrong (%)": percent(attempt(lambda: budgeted.wrong_of_early(left, kind, seed))),
                    "layers per token": "" if kind else attempt(lambda: pr.over_tasks(left, "exit_layer", seed=seed)),
                }
            )
    return pd.DataFrame(rows)


def decoded_table(page: Page) -> pd.DataFrame:
    """What decoding made of the outputs, a row per task and way, in percent and points of the task's first score."""
    table = page.decoded
    return pd.DataFrame(
        {
            "task": table["task"],
            "keys": table["keys"],
            "layer at which tokens leave": table["layers"],
            "layers run in the end": table["run"],
            "tokens that are full depth's (%)": [percent(one) for one in table["agrees"]],
            "outputs unchanged (%)": [percent(one) for one in table["unchanged"]],
            "quality, change in points": [
                f"{gain} ({name})" if gain is not None else "–" for gain, name in zip(table["change"], table["score"])
            ],
            "drafts rejected (%)": [percent(one) if one is not None else "–" for one in table["rejected"]],
        }
    )


def carried_table(page: Page) -> pd.DataFrame:
    """A row per task whose tokens leave, a column per task whose threshold they leave by: tokens wrong, percent."""
    rows = []
    for task, part in pr.carried(page.served, page.crossed).groupby("task", sort=False):
        rows.append({"tokens of": task} | {f"by {of}": percent(one) for of, one in zip(part["of"], part["wrong"])})
    return pd.DataFrame(rows)


def revised_table(page: Page) -> pd.DataFrame:
    """The earlier version's thresholds on the model that is served; tokens wrong, percent."""
    table = page.revised
    return pd.DataFrame(
        {
            "task": table["task"],
            "promised: wrong (%)": 100 * table["promised"],
            "found: wrong (%)": [percent(one) for one in table["wrong"]],
            "layers, earlier version": table["layers before"],
            "layers, this version": table["layers"],
        }
    )


def policy_table(policy: Policy) -> pd.DataFrame:
    """What the file holds, a row per kind of task."""
    rows = []
    for kind, value in policy.thresholds.items():
        risk = policy.risks.get(kind)
        rows.append(
            {
                "kind of task": kind.replace("_", " "),
                "threshold": NONE if value is None else f"{value:.3f}",
                "certified": policy.certified[kind],
                "outputs changed, other half (%)": percent(interval_of(risk)) if risk else NOTHING,
            }
        )
    return pd.DataFrame(rows)


def interval_of(risk: Mapping[str, float]) -> Interval:
    """A policy's recorded risk."""
    return Interval(risk["estimate"], risk["low"], risk["high"], int(risk["sequences"]))


def speeds(page: Page) -> pd.DataFrame:
    """Columns hard (rows of a batch), speed (Interval)."""
    assert page.times is not None
    times = page.times
    return pd.DataFrame({"hard": h, "speed": service.speed_with(times, h, page.served.seed)} for h in service.HARD)


def delay_table(page: Page) -> pd.DataFrame:
    """Delays of the alarm by shadowed share."""
    assert page.delays is not None
    return pd.DataFrame(
        {
            "run at full depth too": [f"{share:.0%}" for share in page.delays["share"]],
            "outputs until the alarm, median": page.delays["delay"],
            "95% of streams, from": page.delays["low"],
            "to": page.delays["high"],
            "streams without an alarm (%)": 100 * page.delays["missed"],
            "median, alarm long on": page.delays["late"],
            "false alarms (%)": 100 * page.delays["false"],
        }
    )


def structured_table(found: structured.Structured) -> pd.DataFrame:
    """A row per threshold: layers, outputs that fail the schema, identifiers that are wrong."""
    table = structured.ways_table(found)
    return pd.DataFrame(
        {
            "threshold": table["threshold"],
            "value": table["value"],
            "layers per token": table["layers"],
            "fails the schema (%)": [percent(one) for one in table["fails"]],
            "identifier wrong (%)": [percent(one) for one in table["identifier"]],
        }
    )


# ---- words


def change_in_words(page: Page) -> str:
    """Which traffic is changed for which, and what was promised and is lost."""
    if not page.change:
        return f"No change of traffic was simulated: {page.why['change']}."
    of = page.change
    return (
        f"Simulated is a service that was calibrated on {of.of}, with at most {of.risk:.0%} of outputs promised to "
        "differ (the upper limit of the share that did on the calibration half), to which "
        f"{of.task} comes, of which {of.changed.mean():.0%} differ at that threshold."
    )


def shadow_in_words(page: Page) -> str:
    """What a shadow rate buys, and what a calm time before costs."""
    if page.delays is None:
        return ""
    first, last = (page.delays.iloc[i] for i in (0, -1))

    def waits(delay: float) -> str:
        return f"after {delay:,.0f} outputs" if np.isfinite(delay) else "after more outputs than were simulated"

    return (
        f"With every output run at full depth too, half of the streams have their alarm {waits(last['delay'])}; with "
        f"{first['share']:.0%} of them, {waits(first['delay'])}. That is of an alarm that starts with the change. One "
        f"that has compared {service.CALM:,} outputs of the old traffic before "
        f"{'has lost its capital on these, and ' if last['late'] > last['delay'] else ''}"
        f"comes {waits(last['late'])} if all are compared. Before the change it went off falsely in "
        f"{last['false']:.1%} of the streams; at most {page.served.study.parameters.alpha:.0%} may."
    )


def switch_in_words(page: Page) -> str:
    """The kill switch, and the refusal."""
    task, before, after = page.switched
    if not task:
        return "No kind of task has a certified threshold here, so the service runs all layers and has nothing to stop."
    return (
        f"Served with this policy, {before:.0%} of the tokens of the first {service.ROWS} outputs to {task} leave "
        f"early; once the kill switch is thrown, {after:.0%}."
    )


def structured_in_words(page: Page) -> str:
    """What the validator sees at the other traffic's threshold."""
    if page.structured is None:
        return f"This part was not run: {page.why['structured']}."
    found, table = page.structured, structured.ways_table(page.structured).set_index("threshold")
    agrees = 1 - found.tokens["wrong"].mean()
    kept = found.served.study.parameters.kept

    def at(way: str, column: str) -> str:
        return f"{100 * table.loc[way, column].estimate:.0f}%"

    strict, carried = (f"{table.loc[way, 'layers']:.1f}" for way in (structured.VALIDATOR, structured.CARRIED))
    accepted = (
        f"With the threshold that a validator chose, {at(structured.VALIDATOR, 'fails')} and "
        f"{at(structured.VALIDATOR, 'identifier')} do, and {strict} layers run per token in place of {carried}."
    )
    if found.thresholds[structured.VALIDATOR] is None:
        accepted = "The validator accepts none of the thresholds that were tried, so all layers run."
    return (
        f"The threshold that keeps {kept:.0%} of the tokens of {found.other} keeps {agrees:.1%} of those of "
        f"{found.task}. With all layers, {at(structured.FULL, 'fails')} of the outputs fail the schema and "
        f"{at(structured.FULL, 'identifier')} have a wrong identifier. With this threshold, "
        f"{at(structured.CARRIED, 'fails')} and {at(structured.CARRIED, 'identifier')} do. {accepted}"
    )


def budget_in_words(page: Page) -> str:
    """What routing by class saves within the same budget."""
    one, many = (
        attempt(lambda: pr.over_tasks(page.budgets[way], "exit_layer")) for way in (budgeted.ONE, budgeted.EACH)
    )
    if not (one.known and many.known):
        return ""
    return (
        f"Calibrated to the same budget, a threshold for each kind of token takes {many.estimate:.2f} layers per "
        f"token, one threshold for all {one.estimate:.2f}."
    )


def keep(results: Results, page: Page) -> None:
    """Put the outcomes into a notebook's results, and what the prose says of them."""
    for row in page.tasks.to_dict("records"):
        results.put_all(row["task"], {name: row[name] for name in ("layers", "deepest", "wrong", "changed")})
    for row in page.kinds.to_dict("records"):
        for column in ("exit_layer", "early", "wrong"):
            if row[column].known:
                results.keep(f"{column}, {row['kind']}", row[column])
    if page.times is not None:
        for row in speeds(page).to_dict("records"):
            results.keep(f"times as fast, {row['hard']} hard rows", row["speed"])
    if page.delays is not None:
        for row in page.delays.to_dict("records"):
            results.keep(f"delay, {row['share']:.0%} shadowed", row["delay"])
            results.keep(f"delay after calm, {row['share']:.0%} shadowed", row["late"])
    if page.structured is not None:
        for row in structured.ways_table(page.structured).to_dict("records"):
            results.keep(f"fails the schema, {row['threshold']}", row["fails"])
    results.say("gate_name", label(page.served.rule.gate.name))
    results.tell("change_words", change_in_words(page))
    results.tell("shadow_words", shadow_in_words(page))
    results.tell("switch_words", switch_in_words(page))
    results.tell("refused_words", page.refused or "none is part of this page.")
    results.tell("structured_words", structured_in_words(page))
    results.tell("budget_words", budget_in_words(page))
    none = "" if len(page.decoded) else "No task has a threshold at which tokens leave, so nothing was decoded."
    results.tell("decoded_words", none)
    results.tell("times_words", f"No batches were timed: {page.why['times']}." if page.times is None else "")
