"""Tables and words of the section on monotonicity."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd

from eelib.tracing.trace import Trace
from eestudy.old.analysis import monotonicity as mono
from eestudy.old.analysis.architectures import where as where_of
from eestudy.old.analysis.monotonicity import DISTILLED, PLAIN, SHARES, WEIGHTED, Page
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.study.comparison import objective
from eestudy.old.study.results import Results
from eestudy.old.study.study import Study

Statistics = dict[str, Callable[[Trace], mono.Values]]  # by key in the results
SETTLED: Statistics = {f"settled_{name}": partial(mono.settled, share=share) for name, share in SHARES.items()}
RISING: Statistics = {
    f"{what}_{name}": partial(of, name=name)
    for name in mono.SCORES
    for what, of in (("rising", mono.rising), ("never_falling", mono.never_falling))
}
RULE: Statistics = {
    "ruled": mono.ruled,
    "changed_later": mono.changed_later,
    "changed_at_the_end": partial(mono.changed_later, at_the_end=True),
    "changed_after_one": partial(mono.changed_later, in_a_row=1),
}
HEADINGS = {
    "settled_sixth": "settled after 1/6 of the depth (%)",
    "settled_third": "settled after 1/3 (%)",
    "rising_probability": "top token: steps that rise (%)",
    "never_falling_probability": "top token: never falls (% of tokens)",
    "rising_final_probability": "final token: steps that rise (%)",
    "never_falling_final_probability": "final token: never falls (% of tokens)",
    "ruled": "three rising, to above 0.9 (% of tokens)",
    "changed_later": "of these, top-1 changes later (%)",
    "changed_at_the_end": "of these, ends as another (%)",
    "changed_after_one": "changes after one score above 0.9 (%)",
}
HALF, OF_M = "1/2", "M, Figure 2 (mean)"
DEPTHS = {"1/6": 2, "1/3": 4, HALF: 6, "2/3": 8, "5/6": 10}  # of M's twelve layers


# ---- for captions and plots


def where(page: Page) -> str:
    """Models, dtype, device and date, for captions."""
    return where_of(page.studies)


def curves_of_m(page: Page) -> dict[str, pd.DataFrame]:
    """{label: M's curve} of the models whose objective M has one for."""
    found = {page.label(study): mono.published_curve(page.objective(study)) for study in page.studies}
    return {label: curve for label, curve in found.items() if len(curve)}


def exits(page: Page) -> dict[str, float]:
    """{label of the distilled model: its first exit as a share of the depth}; {} where there is none."""
    study = page.roles.get(DISTILLED)
    return {page.label(study): page.first_exit / study.model.layers} if study else {}


# ---- what the prose states


def about_the_run(page: Page) -> dict[str, float | str]:
    """The page's own model, and how much of the run counts."""
    own = page.own
    return {
        "name": own.model.name,
        "depth": own.model.layers,
        "models": len(page.studies),
        "learnt_tasks": len(own.learnt_tasks),
        "all_tasks": len(own.traces),
    }


def learnt_note(page: Page) -> str:
    """Which tasks means run over."""
    names = [study.model.name for study in page.studies if not study.learnt_tasks]
    said = "Means run over the tasks that a model has learnt, each task alike."
    return (
        f"{said} {', '.join(names)}: no task is learnt, so figures are over all, and judge nothing." if names else said
    )


def told(interval: Interval) -> str:
    """A share as a percentage, with its interval."""
    return f"{interval.percent:.1f}".replace(" (", "% (", 1) if interval.known else "–"


def figures(study: Study, statistics: Statistics) -> dict[str, Interval]:
    """{key: mean over tasks}, as shares."""
    return {key: mono.mean(study, values) for key, values in statistics.items()}


def every(page: Page, statistics: Statistics) -> dict[str, dict[str, Interval]]:
    """{label: `figures`} of all models."""
    return {page.label(study): figures(study, statistics) for study in page.studies}


def others_in_words(lead: str, found: dict[str, dict[str, Interval]], key: str) -> str:
    """One figure of every model but the page's own, as a sentence."""
    said = [f"{label} {told(values[key])}" for label, values in list(found.items())[1:]]
    return f"{lead}: {'; '.join(said)}." if said else "No other model is part of this run."


def say_own(results: Results, found: dict[str, dict[str, Interval]]) -> None:
    """Glue the figures of the page's own model, in percent; keep those of the others under "label key"."""
    (_, own), *others = found.items()
    results.say_all({key: value.percent for key, value in own.items()})
    for label, values in others:
        for key, value in values.items():
            results.keep(f"{label} {key}", value.percent)


def keep_by_task(results: Results, page: Page) -> None:
    """Put every statistic of every model and task into a notebook's results, as shares."""
    for study in page.studies:
        label = study.model.name if study is not page.own else ""
        for task, trace in study.traces.items():
            alone = {key: one_task(study, values, trace) for key, values in (SETTLED | RISING | RULE).items()}
            results.put_all(f"{label} {task}".strip(), alone)


def one_task(study: Study, values: Callable[[Trace], mono.Values], trace: Trace) -> Interval:
    """The mean over the tokens of one task; NOTHING of none."""
    pair = values(trace)
    return mono.mean_of({trace.task_name: pair}, study.parameters.seed) if len(pair[0]) else NOTHING


# ---- tables


def models(page: Page) -> pd.DataFrame:
    """Who is on the page, how it was trained, and which of M's three it stands for."""
    of_m = {PLAIN: "plain T5", WEIGHTED: "CALM", DISTILLED: f"FREE, first exit at layer {page.first_exit}"}
    rows = []
    for study in page.studies:
        plain = page.plain(study)
        rows.append(
            {
                "model": page.label(study),
                "layers": study.model.layers,
                "trained from": plain.model.name if plain else "–",
                "objective, as its card says": objective(study.parameters.model) or "–",
                "shown beside M's": of_m.get(page.objective(study), "–"),
            }
        )
    return pd.DataFrame(rows)


def shown(found: dict[str, dict[str, Interval]]) -> pd.DataFrame:
    """A row per model, in percent, with headings for the page."""
    rows = [
        {"model": label, **{HEADINGS[key]: value.percent for key, value in values.items()}}
        for label, values in found.items()
    ]
    return pd.DataFrame(rows)


def confidence_table(page: Page) -> pd.DataFrame:
    """M's Figure 2 in numbers: a row per model that it has a curve for and share of the depth.

    Columns: model, depth, mean and deviation of the probability of the final token here (between two layers, those of
    the nearer one), and M's mean under both readings of its layers.
    """
    rows = []
    for study in page.studies:
        printed = mono.published_curve(page.objective(study))
        for share, blocks in DEPTHS.items() if len(printed) else ():
            layer = max(1, round(blocks / mono.M_LAYERS * study.model.layers))
            values = partial(mono.at_layer, name="final_probability", layer=layer)
            rows.append(
                {
                    "model": page.label(study),
                    "depth": share,
                    "layer": layer,
                    "mean here": mono.mean(study, values),
                    "deviation here": mono.deviation(study, values),
                    OF_M: in_m(printed, blocks),
                }
            )
    return pd.DataFrame(rows)


def settled_in_m() -> str:
    """The shares that M states for its weighted model, as text."""
    return " and ".join(f"{share:.0%}" for share in mono.published_settled()["unchanged"])


def keep_confidence(results: Results, table: pd.DataFrame) -> None:
    """Keep the figures of `confidence_table`, as "pocket-t5 mean at 1/6"."""
    for row in table.to_dict("records"):
        for what in ("mean", "deviation"):
            results.keep(f"{row['model']} {what} at {row['depth']}", row[f"{what} here"])


def confidence_in_words(table: pd.DataFrame) -> str:
    """The middle of `confidence_table`, model by model."""
    said = [
        f"{row['mean here']:.3f} in {row['model']}, where M has {row[OF_M]}"
        for row in table.to_dict("records")
        if row["depth"] == HALF and row["mean here"].known
    ]
    return f"Halfway through the layers, the mean probability of the final token is {'; '.join(said)}." if said else ""


def in_m(printed: pd.DataFrame, blocks: int) -> str:
    """M's mean after so many blocks: one reading of its index and the other, from the smaller to the larger."""
    found = sorted(
        float(printed["probability"][np.isclose(printed[side], blocks / mono.M_LAYERS)].iloc[0])
        for side in ("low", "high")
    )
    return " or ".join(f"{value:g}" for value in dict.fromkeys(found))


def drops(page: Page) -> dict[str, dict[str, Interval]]:
    """{label: drop, lowest of the means, falls} after the distilled model's first exit, of it and of its family.

    drop: as in M-M4, by token; drop_of_mean: mean probability at the exit minus the mean at the layer after it;
    falls: share of tokens whose probability falls right after it. {} where no model is distilled.
    """
    if DISTILLED not in page.roles:
        return {}
    exit_layer, study = page.first_exit, page.roles[DISTILLED]
    family = next(family for family in page.families if any(one is study for one in family))
    statistics: Statistics = {
        "drop": partial(mono.drop_after, layer=exit_layer),
        "next_step": partial(mono.next_step, layer=exit_layer),
        "falls": partial(mono.falls_at, layer=exit_layer),
    }
    return {page.label(one): figures(one, statistics) for one in family}


def keep_drops(results: Results, found: dict[str, dict[str, Interval]]) -> None:
    """Keep `drops`, as "pocket-t5 drop"."""
    for label, values in found.items():
        for key, value in values.items():
            results.keep(f"{label} {key}", value)


def shown_drops(found: dict[str, dict[str, Interval]]) -> pd.DataFrame:
    """`drops` for the page."""
    return pd.DataFrame(
        [
            {
                "model": label,
                "at the exit minus lowest after it, by token": values["drop"],
                "at the exit minus the layer after it": values["next_step"],
                "falls right after it (% of tokens)": values["falls"].percent,
            }
            for label, values in found.items()
        ]
    )


def drop_in_words(page: Page, found: dict[str, dict[str, Interval]]) -> str:
    """What `drops` shows of the distilled model, beside the plain one."""
    if not found:
        return "No model of this page is named as distilled, so there is no first exit to look at."
    study = page.roles[DISTILLED]
    values, plain = found[page.label(study)], page.plain(study)
    mean = values["next_step"].side("lower", "higher", "neither clearly lower nor higher")
    said = (
        f"{study.model.name} has its first exit at layer {page.first_exit}. At the layer after it, the mean "
        f"probability of the final token is {mean} ({values['next_step'].scaled(-1):+.3f}); it falls for "
        f"{told(values['falls'])} of tokens. A token's lowest value after the exit less that at the exit is on "
        f"average {values['drop'].scaled(-1):+.3f}."
    )
    of_plain = f"{found[page.label(plain)]['drop'].scaled(-1):+.3f}" if plain else ""
    return f"{said} At the same layer of {plain.model.name}, which has no exit, it is {of_plain}." if plain else said
