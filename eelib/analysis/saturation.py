"""Exit layers and saturation events (P §4, Tables 1, 2 and 7)."""

import numpy as np
import pandas as pd

from eelib.analysis.earliness import token_layers
from eelib.common.errors import InputError
from eelib.common.interval import NOTHING, Interval
from eelib.common.stats import bootstrap_mean, bootstrap_unweighted_mean_over_tasks
from eelib.tracing.exit_layers import DEFINITIONS


def chance_matches(top1: np.ndarray, final: np.ndarray, seed: int = 0, draws: int = 20) -> np.ndarray:
    """How often each token matches before layer L if its target is another token's, over `draws` shuffles; [tokens]."""
    rng = np.random.default_rng(seed)
    inner = top1[:, 1:-1]
    return np.mean([(inner == rng.permutation(final)[:, None]).any(1) for _ in range(draws)], axis=0)


def above_chance(trace, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(1.0 where a token exits before layer L ("first"), minus its chance of that [tokens], groups [tokens])."""
    rows = trace.statistic_rows()
    layers, groups = token_layers(trace, "first")
    chance = chance_matches(trace["top1"][rows], trace.tokens["token_id"].to_numpy()[rows], seed)
    return (layers < trace.layers) - chance, groups


def summary(trace, definition: str, seed: int = 0, with_eos: bool = False) -> dict[str, Interval]:
    """avg (mean exit layer) and perc (share below L) with intervals by group; end tokens left out unless `with_eos`."""
    layers, groups = token_layers(trace, definition)
    if with_eos:
        layers, groups = trace.exit_layer(definition).astype(float), trace.tokens["group"].to_numpy()
    if not len(layers):
        return {"avg": NOTHING, "perc": NOTHING}
    return {
        "avg": bootstrap_mean(layers, groups, seed=seed),
        "perc": bootstrap_mean((layers < trace.layers).astype(float), groups, seed=seed),
    }


def early_intervals(trace, definition: str, seed: int = 0) -> pd.DataFrame:
    """Share of tokens with exit_layer <= L - m for every m = 1..L-1 (P, Table 1): columns m, estimate, low, high."""
    layers, groups = token_layers(trace, definition)
    rows = [
        {"m": m, **bootstrap_mean((layers <= trace.layers - m).astype(float), groups, seed=seed)._asdict()}
        for m in range(1, trace.layers)
        if len(layers)
    ]
    return pd.DataFrame(rows, columns=["m", *Interval._fields])


def at_least_early(layers: np.ndarray, depth: int, fraction: float) -> np.ndarray:
    """1.0 where a token exits at least `fraction` of the depth early, rounded up to whole layers; float [tokens]."""
    return (layers <= depth - int(np.ceil(fraction * depth - 1e-9))).astype(float)


def example_sequence(trace, wanted: int = -1, least: int = 8, most: int = 14) -> int:
    """`wanted` if the trace has it; for -1 the first finished output of `least` to `most` tokens, else the shortest."""
    table = trace.sequences
    if wanted >= 0:
        if wanted not in set(table["sequence"]):
            raise InputError(
                f"example_sequence {wanted} is not in the trace; allowed: -1, or 0 to {table['sequence'].max()}"
            )
        return wanted
    fits = table[(~table["truncated"]) & table["length"].between(least, most)]
    return int((fits if len(fits) else table.sort_values("length"))["sequence"].iloc[0])


def lens_grid(trace, sequence: int, k: int = 5) -> pd.DataFrame:
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


def rank_by_layer(trace) -> np.ndarray:
    """Rank of the final token at layers 0..L: quantiles 0.25, 0.5, 0.75, float [3, L+1]."""
    return np.quantile(trace["final_rank"][trace.statistic_rows()], [0.25, 0.5, 0.75], axis=0)


def perc_over_tasks(tasks: dict[str, tuple], depth: int) -> dict[str, tuple]:
    """{task: (1.0 where the exit layer is below L, groups)} from {task: (exit layers, groups)}."""
    return {name: ((layers < depth).astype(float), groups) for name, (layers, groups) in tasks.items()}


def early_over_tasks(tasks: dict[str, tuple], depth: int, fraction: float) -> dict[str, tuple]:
    """{task: (1.0 where a token exits at least `fraction` of the depth early, groups)}."""
    return {name: (at_least_early(layers, depth, fraction), groups) for name, (layers, groups) in tasks.items()}


def relative_over_tasks(tasks: dict[str, tuple], depth: int) -> dict[str, tuple]:
    """{task: (exit layer / L, groups)}."""
    return {name: (layers / depth, groups) for name, (layers, groups) in tasks.items()}


def chance_over_tasks(traces: dict, names: list[str], seed: int = 0) -> float:
    """perc ("first") of shuffled targets, unweighted mean over tasks, end tokens left out."""
    shares = []
    for name in names:
        rows = traces[name].statistic_rows()
        final = traces[name].tokens["token_id"].to_numpy()[rows]
        shares.append(chance_matches(traces[name]["top1"][rows], final, seed).mean())
    return float(np.mean(shares)) if shares else float("nan")


def task_table(study, seed: int = 0) -> pd.DataFrame:
    """One row per task: sequences, quality, avg and perc of both definitions with intervals, chance, with EOS."""
    rows = []
    for name, made in study.traces.items():
        row = {
            "task": name,
            "sequences": len(made.sequences),
            "tokens": int(made.statistic_rows().sum()),
            "cut": int(made.sequences["truncated"].sum()),
            "learnt": study.learnt[name],
        }
        for definition in DEFINITIONS:
            row |= {f"{k} {definition}": v for k, v in summary(made, definition, seed).items()}
        row["perc chance"] = chance_over_tasks(study.traces, [name], seed) if row["tokens"] else float("nan")
        row["avg first, with EOS"] = summary(made, "first", seed, with_eos=True)["avg"]
        rows.append(row)
    return pd.DataFrame(rows)


def distribution(tasks: dict[str, tuple], depth: int, seed: int = 0) -> pd.DataFrame:
    """Share of tokens that exit at each layer, unweighted mean over tasks: columns layer, estimate, low, high."""
    return pd.DataFrame([{"layer": at, **settle_share(tasks, at, at, seed)._asdict()} for at in range(1, depth + 1)])


def settle_share(tasks: dict[str, tuple], least: int, most: int, seed: int = 0) -> Interval:
    """Share of tokens that exit at layers `least` to `most`, unweighted mean over tasks of (exit layers, groups)."""
    inside = {
        name: (((layers >= least) & (layers <= most)).astype(float), groups) for name, (layers, groups) in tasks.items()
    }
    return bootstrap_unweighted_mean_over_tasks(inside, seed=seed)
