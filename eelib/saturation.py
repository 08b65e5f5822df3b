"""Exit layers and saturation events (P §4, Tables 1, 2 and 7)."""

import numpy as np
import pandas as pd

from .stats import Interval, bootstrap_mean

DEFINITIONS = ("first", "stable")


def exit_layer(top1: np.ndarray, final: np.ndarray, definition: str) -> np.ndarray:
    """Exit layers 1..L, int [tokens], of top-1 ids [tokens, L+1] whose last column is `final` [tokens].

    "first": smallest l >= 1 whose top-1 is the final one. "stable": smallest l >= 1 from which it never changes again.
    """
    if definition not in DEFINITIONS:
        raise ValueError(f"definition {definition!r} is not known; allowed: {', '.join(DEFINITIONS)}")
    same = top1[:, 1:] == final[:, None]
    same[:, -1] = True
    if definition == "first":
        return same.argmax(1) + 1
    wrong = ~same[:, ::-1]  # from layer L downwards
    return np.where(wrong.any(1), same.shape[1] + 1 - wrong.argmax(1), 1)


def early_shares(layers: np.ndarray, depth: int) -> np.ndarray:
    """Share of tokens with exit_layer <= L - m, for m = 0..L-1 (P, Table 1), float [L]."""
    counts = np.bincount(layers, minlength=depth + 1)[1:]
    return (counts.cumsum() / len(layers))[::-1]


def chance_share(top1: np.ndarray, final: np.ndarray, seed: int = 0, draws: int = 20) -> float:
    """perc ("first") if each token's target were another token's: the share that matches by chance before layer L."""
    rng = np.random.default_rng(seed)
    inner = top1[:, 1:-1]
    return float(np.mean([(inner == rng.permutation(final)[:, None]).any(1).mean() for _ in range(draws)]))


def summary(trace, definition: str, seed: int = 0) -> dict[str, Interval]:
    """avg (mean exit layer) and perc (share below L) of a trace, end tokens left out, with intervals by group."""
    rows = trace.statistic_rows()
    layers = trace.exit_layer(definition)[rows]
    groups = trace.tokens["group"].to_numpy()[rows]
    return {"avg": bootstrap_mean(layers.astype(float), groups, seed=seed),
            "perc": bootstrap_mean((layers < trace.layers).astype(float), groups, seed=seed)}


def lens_grid(trace, sequence: int, k: int = 5) -> pd.DataFrame:
    """Top-k of every block for one sequence (P, Figure 1c): rows position x layer, with ids, probabilities, events."""
    rows = np.flatnonzero((trace.tokens["sequence"] == sequence).to_numpy() & trace.statistic_rows())
    frame = pd.DataFrame({
        "position": np.repeat(trace.tokens["position"].to_numpy()[rows], trace.layers),
        "layer": np.tile(np.arange(1, trace.layers + 1), len(rows)),
    })
    for name in ("topk_ids", "topk_probability"):
        frame[name] = list(trace[name][rows, 1:, :k].reshape(-1, k))
    for definition in DEFINITIONS:
        frame[definition] = np.repeat(trace.exit_layer(definition)[rows], trace.layers)
    return frame


def rank_by_layer(trace) -> np.ndarray:
    """Rank of the final token at layers 0..L: quantiles 0.25, 0.5, 0.75, float [3, L+1]."""
    return np.quantile(trace["final_rank"][trace.statistic_rows()], [0.25, 0.5, 0.75], axis=0)
