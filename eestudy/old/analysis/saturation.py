"""Exit layers and saturation events (P §4, Tables 1, 2 and 7)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from eelib.common.errors import NotEstimable
from eelib.tracing.trace import DEFINITIONS, Trace
from eestudy.old.analysis.earliness import Values, early, early_by_share, relative, token_layers, whole_layers
from eestudy.old.analysis.grid import grid_of
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.stats import (
    attempt,
    bootstrap_mean,
    bootstrap_task_contrast,
    bootstrap_unweighted_difference_over_tasks,
    bootstrap_unweighted_mean_over_tasks,
    spread_over_kinds,
)
from eestudy.old.study.claims import UNTESTABLE, Verdict, judge_between, published
from eestudy.old.study.parameters import ParameterError
from eestudy.old.study.results import Results
from eestudy.old.study.study import (
    MINIMUM_GROUPS,
    MOST_REPEATED,
    QUALITY,
    SHORTEST,
    TEXT,
    Study,
    repeated_tokens,
)

P_LAYERS = 32  # blocks of Llama-2-Chat-7B, on which P's Table 1 counts how early tokens are
THIRD = 10  # of them: claim P-S2's third of the depth, a row of that table
TOP = 10  # "near the top": among the ten most probable tokens
UP, DOWN, BETWEEN = "rounded up", "rounded down", "interpolated"
QUARTILES = [0.25, 0.5, 0.75]


# ---- one trace


def chance_matches(top1: np.ndarray, final: np.ndarray, seed: int = 0, draws: int = 20) -> np.ndarray:
    """How often each token matches before layer L if its target is another token's, over `draws` shuffles; [tokens]."""
    return swapped(top1, final, "first", seed, draws)[0]


def swapped(
    top1: np.ndarray, final: np.ndarray, definition: str, seed: int = 0, draws: int = 20
) -> tuple[np.ndarray, np.ndarray]:
    """(share of `draws` shuffles in which a token exits before layer L, mean exit layer / L) if targets are others'.

    Both [tokens]. "stable": from the exit layer to L - 1, for layer L never gives another's token.
    """
    rng = np.random.default_rng(seed)
    inner, layers = top1[:, 1:-1], top1.shape[1] - 1
    early, exits = np.zeros(len(inner)), np.zeros(len(inner))
    for _ in range(draws):
        match = inner == rng.permutation(final)[:, None]
        if definition == "stable":
            match = np.logical_and.accumulate(match[:, ::-1], axis=1)[:, ::-1]
        found = match.any(1)
        early += found
        exits += np.where(found, match.argmax(1) + 1 if match.shape[1] else 0, layers)
    return early / draws, exits / draws / layers


def swapped_values(trace: Trace, definition: str, seed: int = 0) -> tuple[Values, Values]:
    """`swapped` of the tokens of a trace, end tokens left out, each beside groups [tokens]."""
    rows = trace.statistic_rows()
    final, groups = (trace.tokens[name].to_numpy()[rows] for name in ("token_id", "group"))
    early_ones, depths = swapped(trace["top1"][rows], final, definition, seed)
    return (early_ones, groups), (depths, groups)


def chances(trace: Trace, seed: int = 0) -> np.ndarray:
    """`chance_matches` of the tokens of a trace, end tokens left out: [tokens]."""
    return swapped_values(trace, "first", seed)[0][0]


def above_chance(trace: Trace, seed: int = 0) -> Values:
    """(1.0 where a token exits before layer L ("first"), minus its chance of that [tokens], groups [tokens])."""
    before_last, groups = early(trace, "first")
    return before_last - chances(trace, seed), groups


def less_chance(study: Study) -> Interval:
    """perc ("first") less the share that matches by chance (claim P-S5): a share, so not the mean of `above_chance`."""
    seed = study.parameters.seed
    own = study.learnt_tokens(lambda made: early(made, "first"))
    swapped = study.learnt_tokens(lambda made: swapped_values(made, "first", seed)[0])
    return bootstrap_unweighted_difference_over_tasks(own, swapped, seed=seed)


def summary(trace: Trace, definition: str, seed: int = 0, with_eos: bool = False) -> dict[str, Interval]:
    """avg (mean exit layer) and perc (share below L) with intervals by group; end tokens left out unless `with_eos`."""
    layers, groups = token_layers(trace, definition)
    if with_eos:
        layers, groups = trace.exit_layer(definition).astype(float), trace.tokens["group"].to_numpy()
    values = {"avg": layers, "perc": (layers < trace.layers).astype(float)}
    return {
        name: attempt(lambda: bootstrap_mean(v, groups, seed=seed, share=name == "perc")) for name, v in values.items()
    }


def early_intervals(trace: Trace, definition: str, seed: int = 0) -> pd.DataFrame:
    """Share of tokens at least m layers early for every m = 1..L-1 (P, Table 1): columns m, estimate, low, high."""
    inner = range(1, trace.layers) if trace.statistic_rows().any() else ()
    rows = [{"m": m, **bootstrap_mean(*early(trace, definition, m), seed=seed)._asdict()} for m in inner]
    return pd.DataFrame(rows, columns=["m", *Interval._fields])


def example_sequence(trace: Trace, wanted: int = -1, least: int = 8, most: int = 14) -> int:
    """`wanted` if the trace has it; for -1 the first finished output of `least` to `most` tokens, else the shortest.

    ParameterError where the trace does not have it.
    """
    table = trace.sequences
    if wanted >= 0:
        if wanted not in set(table["sequence"]):
            last = table["sequence"].max()
            raise ParameterError(f"example_sequence {wanted} is not in the trace; allowed: -1, or 0 to {last}")
        return wanted
    fits = table[(~table["truncated"]) & table["length"].between(least, most)]
    return int((fits if len(fits) else table.sort_values("length"))["sequence"].iloc[0])


def outputs_to_explore(study: Study, count: int = 3, least: int = 8, most: int = 14) -> list[dict[str, Any]]:
    """The first finished outputs of `least` to `most` tokens of each task: `name`, and the `tokens` of its grid."""
    found = []
    for task, trace in study.traces.items():
        table = trace.sequences
        for row in table[~table["truncated"] & table["length"].between(least, most)].head(count).itertuples():
            found.append({"name": f"{task}: {row.output}", "tokens": grid_of(trace, row.sequence)})
    return found


def lens_grid(trace: Trace, sequence: int, k: int = 5) -> pd.DataFrame:
    """Top-k of every block for one sequence (P, Figure 1c): one row per position and layer 1..L.

    Columns: position, layer, topk_ids [k], topk_probability [k], token_id, and the exit layers `first` and `stable`.
    """
    rows = np.flatnonzero((trace.tokens["sequence"] == sequence).to_numpy())
    tokens = trace.tokens.iloc[rows]
    frame = pd.DataFrame(
        {
            "position": np.repeat(tokens["position"].to_numpy(), trace.layers),
            "layer": np.tile(np.arange(1, trace.layers + 1), len(rows)),
            "token_id": np.repeat(tokens["token_id"].to_numpy(), trace.layers),
        }
    )
    for name in ("topk_ids", "topk_probability"):
        values = trace[name][rows, 1:, :k]
        frame[name] = list(values.reshape(-1, values.shape[-1]))
    for definition in DEFINITIONS:
        frame[definition] = np.repeat(trace.exit_layer(definition)[rows], trace.layers)
    return frame


def rank_by_layer(trace: Trace) -> np.ndarray:
    """Rank of the final token at layers 0..L: its quartiles, float [3, L+1]."""
    return np.quantile(trace["final_rank"][trace.statistic_rows()], QUARTILES, axis=0)


# ---- tables, a row per task or per row of P's


def early_curves(study: Study) -> dict[str, dict[str, pd.DataFrame]]:
    """{definition: {task: `early_intervals`}}."""
    seed = study.parameters.seed
    return {d: {name: early_intervals(t, d, seed) for name, t in study.traces.items()} for d in DEFINITIONS}


def early_table(study: Study) -> pd.DataFrame:
    """P's Table 1 beside the learnt tasks of this run at the same share of the depth.

    Columns: those of P's table; layers, as many as that is here, and how it was made a number of them (`around`); and
    Intervals, as shares: first, stable.
    """
    rows, depth = [], study.model.layers
    for row in published("P-table-1").to_dict("records"):
        share = row["layers_early"] / P_LAYERS
        for layers, how in around(share, depth):
            found = {
                d: study.average(
                    partial(early_by_share, definition=d, share=share)
                    if how == BETWEEN
                    else partial(early, definition=d, layers=int(layers))
                )
                for d in DEFINITIONS
            }
            rows.append(row | {"layers": layers, "how": how} | found)
    return pd.DataFrame(rows)


def around(share: float, depth: int) -> list[tuple[float, str]]:
    """A share of the depth as layers, and how: whole as it is, rounded either way and interpolated, at least one."""
    up = whole_layers(share, depth)
    if math.isclose(up, share * depth):
        return [(up, "")]
    low = [(up - 1.0, DOWN), (share * depth, BETWEEN)] if up > 1 else []
    return [*low, (up, UP)]


def early_figures(table: pd.DataFrame) -> dict[str, Interval]:
    """The figures of `early_table` at whole layers, rounded up, as early_10_of_32_first."""
    rows = table[table["how"].isin(["", UP])].to_dict("records")
    return {f"early_{row['layers_early']}_of_{P_LAYERS}_{d}": row[d] for row in rows for d in DEFINITIONS}


def shown_early_table(table: pd.DataFrame, depth: int) -> pd.DataFrame:
    """`early_table` for the page, in percent."""
    for definition in DEFINITIONS:
        table = table.assign(**{definition: [share.percent for share in table[definition]]})
    layers = [f"{n:g} ({how})" if how else f"{n:g}" for n, how in zip(table["layers"], table["how"])]
    table = table.assign(layers=layers)
    names = {
        "layers_early": f"P: layers early of {P_LAYERS}",
        "WMT22": "WMT22 (%)",
        "CNN_DM": "CNN/DM (%)",
        "NarrativeQA": "NarrativeQA (%)",
        "layers": f"here: layers early of {depth}",
        **{d: f'here, "{d}" (%)' for d in DEFINITIONS},
    }
    return table[list(names)].rename(columns=names)


def task_table(study: Study, seed: int = 0) -> pd.DataFrame:
    """One row per task: sequences, quality, avg and perc of both definitions with intervals, chance, with EOS."""
    rows = []
    for name, trace in study.traces.items():
        row = {
            "task": name,
            "sequences": len(trace.sequences),
            "tokens": int(trace.statistic_rows().sum()),
            "cut": int(trace.sequences["truncated"].sum()),
            "repeated": 100 * study.repetition[name] if study.premise == TEXT else float("nan"),
            "judged": study.learnt[name],
        }
        for definition in DEFINITIONS:
            row |= {f"{k} {definition}": v for k, v in summary(trace, definition, seed).items()}
        row["perc chance"] = chances(trace, seed).mean() if row["tokens"] else float("nan")
        row["avg first, with EOS"] = summary(trace, "first", seed, with_eos=True)["avg"]
        rows.append(row)
    return pd.DataFrame(rows)


def keep(results: Results, table: pd.DataFrame) -> None:
    """Put the figures of `task_table`, and each task's quality, into a notebook's results."""
    keys = ("avg first", "perc first", "avg stable", "perc stable", "perc chance", "avg first, with EOS")
    for row in table.to_dict("records"):
        results.put_all(row["task"], {key.replace(", ", "_").replace(" ", "_"): row[key] for key in keys})
        results.put_all(row["task"], results.study.quality[row["task"]])


def shown_task_table(table: pd.DataFrame, study: Study) -> pd.DataFrame:
    """`task_table` for the page: shares in percent, quality as text."""
    shown = {
        "task": table["task"],
        "quality": [", ".join(f"{k} {v:.1f}" for k, v in study.quality[n].items()) or "–" for n in table["task"]],
        "judged": ["yes" if judged else "no" for judged in table["judged"]],
        "repeated (%)": table["repeated"],
    }
    for definition in DEFINITIONS:
        shown[f"avg {definition}"] = table[f"avg {definition}"]
        shown[f"perc {definition} (%)"] = [share.percent for share in table[f"perc {definition}"]]
    shown["perc chance (%)"] = 100 * table["perc chance"]
    return pd.DataFrame(shown).join(table[["avg first, with EOS", "sequences", "tokens", "cut"]])


def published_quality() -> pd.DataFrame:
    """P's Table 2, quality beside avg and perc, with headings for the page."""
    names = {
        "row": "P, Table 2",
        "layers": "layers",
        "comet_a": "COMET-22",
        "rouge_1": "ROUGE-1",
        "rouge_2": "ROUGE-2",
        "rouge_l": "ROUGE-L",
        "avg": "avg",
        "perc": "perc (%)",
    }
    return published("P-table-2")[list(names)].rename(columns=names)


def published_directions() -> pd.DataFrame:
    """P's Table 7: avg and perc of WMT22 by direction, a column per model."""
    wide = published("P-table-7").pivot(index="direction", columns="model", values=["avg", "perc"])
    wide.columns = [f"{value} {model}" for value, model in wide.columns]
    return wide.reset_index()


# ---- over tasks


def learnt_layers(study: Study, definition: str) -> dict[str, Values]:
    """{task: `token_layers`} of the learnt tasks."""
    return study.learnt_tokens(lambda t: token_layers(t, definition))


def overall(study: Study) -> dict[str, Interval | float]:
    """perc (in percent) and avg over the learnt tasks; chance: perc ("first") of shuffled targets."""
    found: dict[str, Interval | float] = {}
    for definition in DEFINITIONS:
        found[f"perc_{definition}"] = study.average(lambda t: early(t, definition)).percent
        found[f"avg_{definition}"] = study.average(lambda t: token_layers(t, definition), share=False)
    learnt = list(learnt_layers(study, "first"))
    return found | {"chance": 100 * chance_over_tasks(study.traces, learnt, study.parameters.seed)}


def about_the_run(study: Study) -> dict[str, float | str]:
    """What the prose says of the run itself: model, depth, dtype, tasks, and the checks that tracing made."""
    manifests = [trace.manifest for trace in study.traces.values()]
    return {
        "name": study.model.name,
        "depth": study.model.layers,
        "dtype": study.model.dtype,
        "learnt_tasks": len(learnt_layers(study, "first")),
        "all_tasks": len(study.traces),
        **{key: sum(manifest[key] for manifest in manifests) for key in ("mismatches", "rows", "skipped")},
        "minimum_groups": MINIMUM_GROUPS,
    }


def premise_figures() -> dict[str, float]:
    """What a task needs to be judged here: see `Study.sensible`."""
    return {"most_repeated": 100 * MOST_REPEATED, "shortest": SHORTEST}


def chance_over_tasks(traces: Mapping[str, Trace], names: list[str], seed: int = 0) -> float:
    """perc ("first") of shuffled targets, unweighted mean over tasks, end tokens left out."""
    return float(np.mean([chances(traces[name], seed).mean() for name in names])) if names else float("nan")


def settle_share(tasks: Mapping[str, Values], least: int, most: int, seed: int = 0) -> Interval:
    """Share of tokens that exit at layers `least` to `most`, unweighted mean over tasks of (exit layers, groups)."""
    inside = {
        name: (((layers >= least) & (layers <= most)).astype(float), groups) for name, (layers, groups) in tasks.items()
    }
    return bootstrap_unweighted_mean_over_tasks(inside, seed=seed)


def distribution(tasks: Mapping[str, Values], depth: int, seed: int = 0) -> pd.DataFrame:
    """Share of tokens that exit at each layer, unweighted mean over tasks: columns layer, estimate, low, high."""
    return pd.DataFrame([{"layer": at, **settle_share(tasks, at, at, seed)._asdict()} for at in range(1, depth + 1)])


def distributions(study: Study) -> dict[str, pd.DataFrame]:
    """{definition: `distribution`} of the learnt tasks, of all where none is learnt; {} where there are no tokens."""
    found = {}
    for definition in DEFINITIONS:
        every = {name: token_layers(trace, definition) for name, trace in study.traces.items()}
        pool = learnt_layers(study, definition) or {name: pair for name, pair in every.items() if len(pair[0])}
        if pool:
            found[definition] = distribution(pool, study.model.layers, study.parameters.seed)
    return found


def last_two_layers(study: Study) -> Interval:
    """Share of tokens that settle ("stable") only at one of the last two layers, over the learnt tasks."""
    depth, tasks = study.model.layers, learnt_layers(study, "stable")
    return attempt(lambda: settle_share(tasks, depth - 1, depth, study.parameters.seed))


def ranks(study: Study) -> dict[str, np.ndarray]:
    """{task: `rank_by_layer`} of the tasks with tokens."""
    return {name: rank_by_layer(trace) for name, trace in study.traces.items() if trace.statistic_rows().any()}


def top_from(study: Study, found: dict[str, np.ndarray]) -> float:
    """The layer from which on the median rank is at most TOP on every learnt task; NaN where none is learnt."""
    medians = [found[name][1] for name in study.learnt_tasks if name in found]
    if not medians:
        return float("nan")
    outside = np.flatnonzero(np.max(medians, axis=0) > TOP)
    return float(outside[-1] + 1) if len(outside) else 0.0


# ---- verdicts


def into_minus_out_of_english(study: Study) -> Interval:
    """perc ("first") of tasks into English minus that of tasks out of it (claim P-S4)."""
    tasks = study.learnt_tokens(lambda t: early(t, "first"))
    into = [name for name in tasks if study.tasks[name].target_language == "en"]
    out_of = [name for name in tasks if study.tasks[name].source_language == "en"]
    if not into or not out_of:
        raise NotEstimable("needs at least one judged task into English and one out of it")
    return bootstrap_task_contrast(tasks, into, out_of, seed=study.parameters.seed)


def fewest_to_a_side(study: Study) -> int:
    """Learnt tasks into English, or out of it where those are fewer."""
    of = [study.tasks[name] for name in study.learnt_tokens(lambda t: early(t, "first"))]
    return min(sum(task.target_language == "en" for task in of), sum(task.source_language == "en" for task in of))


def spread(study: Study) -> Interval:
    """Largest minus smallest mean of exit layer / L, "first", over the kinds of task (claim P-S3)."""
    tasks = study.learnt_tokens(lambda t: relative(t, "first"))
    kinds = {name: study.tasks[name].kind for name in tasks}
    if len(set(kinds.values())) < 2:
        raise NotEstimable("needs judged tasks of at least two kinds")
    return spread_over_kinds(tasks, kinds)


def a_third_early(study: Study) -> Verdict:
    """Verdict on claim P-S2, whose share of the depth may lie between two layers."""
    share = THIRD / P_LAYERS
    below = int(share * study.model.layers)
    found = study.judge("P-S2", lambda: study.average(lambda t: early_by_share(t, "first", share)))
    if found.interval is None or found.verdict == UNTESTABLE:
        return found
    whole = (max(below, 1), below + 1)  # every token is 0 layers early
    roundings = [study.average(partial(early, definition="first", layers=m)) for m in whole]
    return judge_between("P-S2", found.interval, roundings)


def verdicts(study: Study) -> list[Verdict]:
    """Verdicts on P-S1 to P-S5; where tasks are judged by their text, with those of the first wording beside them."""
    found = judged_claims(study)
    if study.premise == QUALITY:
        return found
    return [beside_first_wording(*pair) for pair in zip(found, judged_claims(study.under(QUALITY)), strict=True)]


def judged_claims(study: Study) -> list[Verdict]:
    """Verdicts on P-S1 to P-S5 over the tasks that are judged."""
    return [
        study.judge("P-S1", lambda: study.average(lambda t: early(t, "stable"))),
        a_third_early(study),
        study.judge("P-S3", lambda: spread(study)),
        study.judge("P-S4", lambda: into_minus_out_of_english(study), tasks=fewest_to_a_side(study)),
        study.judge("P-S5", lambda: less_chance(study)),
    ]


def beside_first_wording(verdict: Verdict, first: Verdict) -> Verdict:
    """A verdict whose note says what the first wording, which asked for tasks above their baseline, gives."""
    what = f"{first.verdict}, {first.interval}" if first.interval else f"{first.verdict}: {first.reason}"
    note = f"first wording, tasks above their baseline: {what}"
    return replace(verdict, note="; ".join(filter(None, (verdict.note, note))))


def without_repetition(study: Study) -> pd.DataFrame:
    """Mean exit layers of the judged tasks with all tokens, and without those in repeated 8-grams, in percent of L.

    A sensitivity check, on which nothing is judged: repetition makes every layer agree with the last one.
    """
    rows = []
    for name in study.learnt_tasks:
        trace = study.traces[name]
        used = trace.statistic_rows()
        fresh = used & ~repeated_tokens(trace)
        exits = {d: trace.exit_layer(d) for d in DEFINITIONS}
        means = {d: [exits[d][rows_].mean() for rows_ in (used, fresh)] for d in DEFINITIONS} if fresh.any() else {}
        found = {f"{d}, {which}": m for d, both in means.items() for which, m in zip(("all", "not repeated"), both)}
        rows.append({"task": name, "repeated (%)": 100 * (1 - fresh.sum() / used.sum()), **found})
    means_of = [f"{d}, {which}" for d in DEFINITIONS for which in ("all", "not repeated")]
    return pd.DataFrame(rows, columns=["task", "repeated (%)", *means_of])
