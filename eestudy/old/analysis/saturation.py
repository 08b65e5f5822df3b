"""Exit layers by chance, and the lens of one output, for pages that are not rewritten yet."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from eelib.tracing.trace import DEFINITIONS, Trace
from eestudy.old.analysis.earliness import Values, early, token_layers
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.stats import (
    attempt,
    bootstrap_mean,
    bootstrap_unweighted_mean_over_tasks,
)
from eestudy.old.study.study import (
    TEXT,
    Study,
)

P_LAYERS = 32  # blocks of Llama-2-Chat-7B, on which P's Table 1 counts how early tokens are
THIRD = 10  # of them: claim P-S2's third of the depth, a row of that table
TOP = 10  # "near the top": among the ten most probable tokens
UP, DOWN, BETWEEN = "rounded up", "rounded down", "interpolated"
QUARTILES = [0.25, 0.5, 0.75]


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


def summary(trace: Trace, definition: str, seed: int = 0, with_eos: bool = False) -> dict[str, Interval]:
    """avg (mean exit layer) and perc (share below L) with intervals by group; end tokens left out unless `with_eos`."""
    layers, groups = token_layers(trace, definition)
    if with_eos:
        layers, groups = trace.exit_layer(definition).astype(float), trace.tokens["group"].to_numpy()
    values = {"avg": layers, "perc": (layers < trace.layers).astype(float)}
    return {
        name: attempt(lambda: bootstrap_mean(v, groups, seed=seed, share=name == "perc")) for name, v in values.items()
    }


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


def chance_over_tasks(traces: Mapping[str, Trace], names: list[str], seed: int = 0) -> float:
    """perc ("first") of shuffled targets, unweighted mean over tasks, end tokens left out."""
    return float(np.mean([chances(traces[name], seed).mean() for name in names])) if names else float("nan")


def settle_share(tasks: Mapping[str, Values], least: int, most: int, seed: int = 0) -> Interval:
    """Share of tokens that exit at layers `least` to `most`, unweighted mean over tasks of (exit layers, groups)."""
    inside = {
        name: (((layers >= least) & (layers <= most)).astype(float), groups) for name, (layers, groups) in tasks.items()
    }
    return bootstrap_unweighted_mean_over_tasks(inside, seed=seed)
