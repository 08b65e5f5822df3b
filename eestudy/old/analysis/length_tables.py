"""The length page: its tables, the figures and words of its prose, and its verdicts.

`tokens` is {task: `length.token_table`}; slopes are {definition: {task: {name as in NAMES: slope}}}.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from eelib.tracing.trace import DEFINITIONS
from eestudy.claims import Verdict, claim
from eestudy.old.analysis.length import LEAST, counts, sequence_table, token_table
from eestudy.old.analysis.slopes import NAMES, Estimator, mean_over_tasks, minus, position_slope
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.stats import attempt
from eestudy.old.study.claims import carried
from eestudy.old.study.results import Results
from eestudy.old.study.study import Study

Tokens = Mapping[str, pd.DataFrame]
Slopes = Mapping[str, Mapping[str, Mapping[str, Estimator]]]
Intervals = Mapping[str, Mapping[str, Mapping[str, Interval]]]

CLAIMS = {"P-L1": "length", "P-L2": "halves", "P-L3": "position"}  # claim: the slope that it is judged on
STATED = {  # what P says in words, section 6.1, and the last of our own: the slope that has its sign
    "exit layer falls with output length": "length",
    "it falls fastest among short outputs": "halves",
    "not in P: it falls with position inside an output": "position",
}
ENDED = {"length": "length", "length_matched": "same position"}  # the slopes that end tokens left in can bend
SOME_LEARNT = "Figures over tasks are unweighted means over the learnt tasks."
NONE_LEARNT = (
    "No task is learnt in this run, so every figure over learnt tasks is missing (nan) and no claim is judged."
)
LEVEL = 0.05  # a trend is seen where its p-value, after Holm, is below


# ---- outputs


def about_the_run(study: Study) -> dict[str, float | str]:
    """What the prose says of the run itself."""
    learnt = study.learnt_tasks
    return {
        "name": study.model.name,
        "depth": study.model.layers,
        "learnt_tasks": len(learnt),
        "all_tasks": len(study.traces),
        "cut_at": study.parameters.max_new_tokens,
        "least_tokens": LEAST,
        "trend_level": LEVEL,
        "learnt_note": SOME_LEARNT if learnt else NONE_LEARNT,
    }


def output_table(study: Study, tokens: Tokens) -> pd.DataFrame:
    """One row per task: how many outputs there are, cut, empty and used; how many tokens; how long outputs are."""
    rows = []
    for task, trace in study.traces.items():
        size, lengths = counts(trace), sequence_table(tokens[task])["length"]
        shortest, middle, longest = np.quantile(lengths, [0, 0.5, 1]) if len(lengths) else [np.nan] * 3
        rows.append(
            {
                "task": task,
                "learnt": "yes" if study.learnt[task] else "not learnt",
                "outputs": size["sequences"],
                "cut": size["cut"],
                "empty": size["empty"],
                "used": size["used"],
                "tokens": len(tokens[task]),
                "shortest": shortest,
                "median length": middle,
                "longest": longest,
            }
        )
    return pd.DataFrame(rows)


def keep_outputs(results: Results, table: pd.DataFrame) -> None:
    """Keep the figures of `output_table`, and their sums for the prose."""
    for row in table.rename(columns={"outputs": "sequences", "median length": "median_length"}).to_dict("records"):
        keys = ("sequences", "cut", "empty", "used", "tokens", "median_length")
        results.put_all(row["task"], {key: row[key] for key in keys})
    results.say_all(table[["outputs", "cut", "empty", "used"]].sum().to_dict())


# ---- slopes and trends


def least_sequences() -> int:
    """A task with fewer is left out of means over tasks, unless all have fewer."""
    return claim("P-L1").minimum_sequences


def over_tasks(study: Study, slopes: Slopes, name: str, definition: str, kind: str = "") -> Interval:
    """One slope, unweighted mean over the learnt tasks (of one kind); NOTHING where no task has one."""
    chosen = [task for task in study.learnt_tasks if kind in ("", study.tasks[task].kind)]
    by_task = {task: slopes[definition][task][name] for task in chosen}
    return attempt(lambda: mean_over_tasks(by_task, study.parameters.seed, least_sequences()))


def overall(study: Study, slopes: Slopes) -> dict[str, dict[str, Interval]]:
    """{definition: {name: slope over the learnt tasks}}."""
    return {d: {name: over_tasks(study, slopes, name, d) for name in NAMES} for d in DEFINITIONS}


def overall_figures(study: Study, slopes: Slopes, means: Mapping[str, Mapping[str, Interval]]) -> dict:
    """Figures and words for the prose: `overall`, what each slope says, and two slopes on translation alone."""
    found: dict[str, Interval | float | str] = {}
    for d, slope in means.items():
        found |= {f"{name}_{d}": interval for name, interval in slope.items()}
        found[f"length_word_{d}"] = direction(slope["length"])
        found[f"position_word_{d}"] = direction(slope["position"])
        found[f"matched_word_{d}"] = direction(slope["length_matched"])
        found[f"half_position_{d}"] = slope["position"].estimate / 2
    for name in ("length", "halves"):
        found[f"{name}_translation"] = over_tasks(study, slopes, name, "first", "translation")
    return found


def direction(interval: Interval) -> str:
    """What a slope says of exit: 'earlier' where the whole interval is below 0, 'later' where above, else neither."""
    if not interval.known:
        return "at a layer that was not measured"
    return interval.side("later", "earlier", "neither clearly earlier nor clearly later")


def keep_trends(results: Results, trends: pd.DataFrame) -> None:
    """Keep the figures of `length.trends`, and on how many learnt tasks the exit layer falls and rises with length."""
    for row in trends.to_dict("records"):
        keys = ("tau_length", "p_length", "tau_position")
        results.put_all(row["task"], {f"{key}_{row['definition']}": row[key] for key in keys})
    seen = trends[trends["task"].isin(results.study.learnt_tasks) & (trends["p_length"] < LEVEL)]
    for definition in DEFINITIONS:
        tau = seen.loc[seen["definition"] == definition, "tau_length"]
        results.say_all({f"falling_{definition}": (tau < 0).sum(), f"rising_{definition}": (tau > 0).sum()})


def trend_table(study: Study, trends: pd.DataFrame) -> pd.DataFrame:
    """`length.trends` for the page: a row per task, both definitions side by side."""
    shown = pd.DataFrame({"task": list(study.labels.values())})
    for definition, part in trends.groupby("definition"):
        shown[f'tau with length, "{definition}"'] = part["tau_length"].to_list()
        shown[f'p, "{definition}"'] = part["p_length"].to_list()
        shown[f'tau with position, "{definition}"'] = part["tau_position"].to_list()
    return shown


def intervals(slopes: Slopes, seed: int = 0) -> Intervals:
    """Every slope with its interval."""
    return {
        d: {task: {name: slope.interval(seed) for name, slope in found.items()} for task, found in by_task.items()}
        for d, by_task in slopes.items()
    }


def keep_slopes(results: Results, found: Intervals) -> None:
    """Keep every slope of every task."""
    for definition, by_task in found.items():
        for task, slopes in by_task.items():
            results.put_all(task, {f"{name}_{definition}": interval for name, interval in slopes.items()})


def slope_table(study: Study, found: Intervals, means: Mapping[str, Interval], definition: str) -> pd.DataFrame:
    """All slopes by one definition: a row per task, and one for their mean over learnt tasks."""
    rows = []
    for task, slopes in found[definition].items():
        row = {"task": study.labels[task]} | {title: slopes[name] for name, title in NAMES.items()}
        cut_too = position_slope(token_table(study.traces[task], with_cut=True), definition)
        rows.append(row | {"position, cut outputs too": cut_too.interval(study.parameters.seed)})
    mean = {title: means[name] for name, title in NAMES.items()}
    return pd.DataFrame([*rows, {"task": "learnt tasks, mean"} | mean])


# ---- end tokens


def changes(with_eos: Slopes, without: Slopes) -> Slopes:
    """By how much end tokens left in change the slopes of ENDED, paired."""
    return {
        d: {task: {name: minus(with_eos[d][task][name], own[name]) for name in ENDED} for task, own in by_task.items()}
        for d, by_task in without.items()
    }


def end_tokens(study: Study, tokens: Tokens, with_eos: Slopes, change: Slopes) -> pd.DataFrame:
    """One row per task and definition: task, definition, mean exit layers end_token and others, and for each slope
    of ENDED with end tokens left in name_with_eos, and by how much they change it, name_eos_change (Intervals).
    """
    rows = []
    for task, trace in study.traces.items():
        every = token_table(trace, with_eos=True)
        ended = every[every["is_eos"]]
        for d in DEFINITIONS:
            row = {"task": task, "definition": d, "end_token": ended[d].mean(), "others": tokens[task][d].mean()}
            for name in ENDED:
                row[f"{name}_with_eos"] = with_eos[d][task][name].interval(study.parameters.seed)
                row[f"{name}_eos_change"] = change[d][task][name].interval(study.parameters.seed)
            rows.append(row)
    return pd.DataFrame(rows)


def keep_end_tokens(
    results: Results, table: pd.DataFrame, change: Slopes, means: Mapping[str, Mapping[str, Interval]]
) -> None:
    """Keep the figures of `end_tokens`, and what end tokens would do to the slopes over the learnt tasks."""
    for row in table.drop(columns="others").to_dict("records"):
        task, definition = row.pop("task"), row.pop("definition")
        results.put_all(task, {f"{key}_{definition}": value for key, value in row.items()})
    for definition in DEFINITIONS:
        for name in ENDED:
            over = over_tasks(results.study, change, name, definition)
            results.say(f"{name}_eos_change_{definition}", over)
            results.say(f"{name}_with_eos_{definition}", means[definition][name].estimate + over.estimate)


def end_token_table(study: Study, table: pd.DataFrame, definition: str) -> pd.DataFrame:
    """`end_tokens` of one definition, for the page."""
    part = table[table["definition"] == definition]
    shown = {
        "task": part["task"].map(study.labels),
        "end token": part["end_token"],
        "others": part["others"],
    }
    for name, title in ENDED.items():
        shown[f"{title} with EOS"] = [interval.estimate for interval in part[f"{name}_with_eos"]]
        shown[f"change, {title}"] = part[f"{name}_eos_change"]
    return pd.DataFrame(shown)


# ---- what P says


def sign_table(means: Mapping[str, Mapping[str, Interval]]) -> pd.DataFrame:
    """What P says in words beside this run: the slopes, and whether their signs are as stated, all below 0."""
    rows = []
    for text, name in STATED.items():
        row: dict[str, Interval | str] = {"P, section 6.1 and Figure 5": text, "P": "no number"}
        row |= {f'here, "{d}"': means[d][name] for d in DEFINITIONS}
        rows.append(row | {f'sign as stated, "{d}"': is_below_zero(means[d][name]) for d in DEFINITIONS})
    return pd.DataFrame(rows)


def is_below_zero(interval: Interval) -> str:
    """yes, no, or a dash, by the estimate alone."""
    return "–" if not interval.known else "yes" if interval.estimate < 0 else "no"


def verdicts(study: Study, slopes: Slopes, definition: str) -> list[Verdict]:
    """Verdicts on P-L1 to P-L3 by one definition, each beside those without one of the tasks: their slopes differ."""

    def verdict(claim_id: str, name: str) -> Verdict:
        by_task = {task: slopes[definition][task][name] for task in study.learnt_tasks}

        def of(tasks: Mapping[str, Estimator]) -> Verdict:
            least = claim(claim_id).minimum_sequences
            return study.judge(claim_id, lambda: mean_over_tasks(tasks, study.parameters.seed, least))

        without = {task: {other: of_it for other, of_it in by_task.items() if other != task} for task in by_task}
        return carried(of(by_task), {task: of(rest) for task, rest in without.items() if rest})

    return [verdict(claim_id, name) for claim_id, name in CLAIMS.items()]
