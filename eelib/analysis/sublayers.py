"""What the sub-layers say through the head: confidence, top-10 overlaps and rank of the final token (P §6.2, Table 10).

A site is read alone through the final norm and the head. Modules are what attention and feed-forward add; the stream is
the state that they add to: after attention, or the block's output in parallel blocks, which have no such state.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from eelib.common.errors import InputError
from eelib.common.interval import NOTHING, Interval
from eelib.common.stats import bootstrap_unweighted_mean_over_tasks

MODULES = ("attention", "feed_forward")
TOP_DOWN = ("block", "after_attention", "feed_forward", "cross_attention", "attention")  # P's order inside a block
QUANTITIES = ("confidence", "final_overlap", "neighbour_overlap", "log_rank")


@dataclass(frozen=True)
class Measures:
    """Site readouts of one task, end tokens left out. Arrays are [tokens, L, S], S in the order of `names`.

    confidence: top-1 probability. final_overlap: share of the top ten that is in the last block's top ten.
    other_overlap: the same with another token's final top ten, drawn at random. neighbour_overlap [tokens, L-1, S]:
    between layers l and l + 1 of one site. rank: of the emitted token, 1 = top. saturation [tokens]: exit layer,
    "stable". k: length of the lists, 10 or the vocabulary where that is smaller.
    """

    names: tuple[str, ...]
    groups: np.ndarray
    saturation: np.ndarray
    confidence: np.ndarray
    final_overlap: np.ndarray
    other_overlap: np.ndarray
    neighbour_overlap: np.ndarray
    rank: np.ndarray
    k: int

    @property
    def layers(self) -> int:
        """L."""
        return self.rank.shape[1]

    @property
    def stream(self) -> str:
        """The site that stands for the residual stream."""
        return "after_attention" if "after_attention" in self.names else "block"

    @property
    def log_rank(self) -> np.ndarray:
        """Base-10 logarithm of `rank`, whose mean gives the geometric mean of ranks."""
        return np.log10(self.rank)

    @property
    def in_top(self) -> np.ndarray:
        """1.0 where the emitted token is among the k best."""
        return (self.rank <= self.k).astype(float)

    @property
    def on_top(self) -> np.ndarray:
        """1.0 where the emitted token is the best."""
        return (self.rank == 1).astype(float)

    def site(self, quantity: str, name: str) -> np.ndarray:
        """One site's values of a quantity, [tokens, L] (neighbour_overlap: L-1)."""
        return getattr(self, quantity)[:, :, self.names.index(name)]


def site_rows(trace, sequences: int) -> np.ndarray:
    """Boolean, one per row of `trace.sites`: the rows of the task's first `sequences` sequences."""
    return trace.sites.tokens["sequence"].isin(trace.sequences["sequence"][:sequences]).to_numpy()


def measure(trace, sequences: int, seed: int = 0) -> Measures:
    """Measures of the first `sequences` sequences; a trace may hold more, and those do not change the result."""
    sites = trace.sites
    keep = np.flatnonzero(site_rows(trace, sequences) & trace.statistic_rows()[sites.rows])
    ids = sites["topk_ids"][keep]
    final = ids[:, -1, sites.names.index("block")]
    ring = np.random.default_rng(seed).permutation(len(keep))
    other = np.empty_like(final)
    other[ring] = final[np.roll(ring, 1)]  # no token gets its own list, unless it is the only one
    return Measures(
        names=sites.names,
        groups=sites.tokens["group"].to_numpy()[keep],
        saturation=trace.exit_layer("stable")[sites.rows[keep]],
        confidence=sites["probability"][keep].astype(float),
        final_overlap=overlap(ids, final[:, None, None]),
        other_overlap=overlap(ids, other[:, None, None]),
        neighbour_overlap=overlap(ids[:, 1:], ids[:, :-1]),
        rank=sites["final_rank"][keep].astype(float),
        k=ids.shape[-1],
    )


def overlap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Share of the ids in a [..., k] that are also in b [..., k]; both lists are free of repeats."""
    shared = sum((a == b[..., i, None]).sum(-1) for i in range(b.shape[-1]))  # k small comparisons spare memory
    return shared / a.shape[-1]


def contrast(measures: Measures, quantity: str) -> tuple[np.ndarray, np.ndarray]:
    """(stream minus the mean of attention and feed-forward, mean over layers [tokens]; groups): P-B1 to P-B3.

    Where the block's output stands for the stream, layer L is left out of final_overlap: there it is 1 by definition.
    """
    last = -1 if (measures.stream, quantity) == ("block", "final_overlap") else None
    stream, *modules = (measures.site(quantity, name)[:, :last] for name in (measures.stream, *MODULES))
    if not stream.shape[1]:
        return np.empty(0), measures.groups[:0]
    return (stream - np.mean(modules, axis=0)).mean(axis=1), measures.groups


def mean_over_layers(measures: Measures, quantity: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(a site's values, mean over layers [tokens]; groups)."""
    values = measures.site(quantity, name)
    return (values.mean(axis=1), measures.groups) if values.shape[1] else (np.empty(0), measures.groups[:0])


def past_saturation(
    measures: Measures, quantity: str, names: tuple[str, ...], least: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """(mean over the sites `names`; groups), one row per token and layer at least `least` above its saturation layer.

    P-B4 is `past_saturation(measures, "in_top", MODULES)`: a token that saturates at L has no such layer. Not for
    neighbour_overlap, whose columns start at layer 2.
    """
    token, layer = np.nonzero(np.arange(1, measures.layers + 1) >= measures.saturation[:, None] + least)
    return np.mean([measures.site(quantity, name)[token, layer] for name in names], axis=0), measures.groups[token]


def over_tasks(tasks: Mapping[str, Measures], values: Callable[[Measures], tuple], seed: int = 0) -> Interval:
    """Unweighted mean over the tasks that have rows; `values(measures)` -> (values, groups). NOTHING where none has."""
    found = {name: values(measures) for name, measures in tasks.items()}
    found = {name: pair for name, pair in found.items() if len(pair[0])}
    return bootstrap_unweighted_mean_over_tasks(found, seed=seed) if found else NOTHING


def curve(tasks: Mapping[str, Measures], quantity: str, name: str, seed: int = 0) -> pd.DataFrame:
    """A site's quantity by layer, unweighted over tasks: columns layer, estimate, low, high, sequences.

    Ranks come back as geometric means. The overlap of layers l and l + 1 stands at l + 1.
    """
    rows = []
    for layer in range(1, next(iter(tasks.values())).layers + 1):
        column = layer - (2 if quantity == "neighbour_overlap" else 1)
        if column < 0:
            continue
        found = over_tasks(tasks, lambda m: (m.site(quantity, name)[:, column], m.groups), seed)
        if quantity == "log_rank":
            found = Interval(*(10**v for v in found[:3]), found.sequences)
        rows.append({"layer": layer, **found._asdict()})
    return pd.DataFrame(rows, columns=["layer", *Interval._fields], dtype=float)


def around_saturation(tasks: Mapping[str, Measures], name: str, seed: int = 0, least: int = 30) -> pd.DataFrame:
    """Share of tokens whose final token is in a site's top ten, by layers from the saturation layer ("stable").

    Columns distance, estimate, low, high, sequences; a distance that fewer than `least` tokens reach is left out.
    """
    depth = next(iter(tasks.values())).layers
    rows = []
    for distance in range(1 - depth, depth):

        def at(measures: Measures) -> tuple[np.ndarray, np.ndarray]:
            layer = measures.saturation + distance
            inside = np.flatnonzero((layer >= 1) & (layer <= depth))
            return measures.site("in_top", name)[inside, layer[inside] - 1], measures.groups[inside]

        if sum(len(at(m)[0]) for m in tasks.values()) >= least:
            rows.append({"distance": distance, **over_tasks(tasks, at, seed)._asdict()})
    return pd.DataFrame(rows, columns=["distance", *Interval._fields], dtype=float)


def site_table(tasks: Mapping[str, Measures], seed: int = 0) -> pd.DataFrame:
    """One row per task and site: Intervals of confidence and overlaps, and of in_top past saturation."""
    rows = []
    for task, measures in tasks.items():
        one = {task: measures}
        for name in (n for n in TOP_DOWN if n in measures.names):
            rows.append(
                {"task": task, "site": name, "tokens": len(measures.groups)}
                | {
                    quantity: over_tasks(one, lambda m: mean_over_layers(m, quantity, name), seed)
                    for quantity in QUANTITIES[:3]
                }
                | {"in_top": over_tasks(one, lambda m: past_saturation(m, "in_top", (name,)), seed)}
            )
    return pd.DataFrame(rows)


# ---- one token


def example_token(trace, sequences: int, sequence: int = -1, position: int = -1) -> int:
    """Row of `trace.sites` to show. Position -1 chooses: among tokens with a letter (else all that are not end tokens),
    in `sequence` or in all for -1, the one whose saturation layer is nearest to half the depth; of equals the longest
    text, then the first. ValueError, one line, names what is allowed.
    """
    tokens, mine = trace.sites.tokens, site_rows(trace, sequences)
    if sequence >= 0:
        if sequence not in set(tokens["sequence"][mine]):
            shown = sorted(set(tokens["sequence"][mine]))
            raise InputError(
                f"example_sequence {sequence} has no sub-layer readouts; allowed: -1, or {shown[0]} to {shown[-1]}"
            )
        mine = mine & (tokens["sequence"] == sequence).to_numpy()
    if position >= 0:
        if sequence < 0:
            raise InputError(f"example_position {position} needs an example_sequence, which is {sequence}")
        found = np.flatnonzero(mine & (tokens["position"] == position).to_numpy())
        if not len(found):
            last = tokens["position"][mine].max()
            raise InputError(f"example_position {position} is not in sequence {sequence}; allowed: -1, or 0 to {last}")
        return int(found[0])
    plain = mine & ~tokens["is_eos"].to_numpy()
    words = plain & tokens["text"].str.contains(r"[^\W\d_]", regex=True).to_numpy()
    rows = np.flatnonzero(words if words.any() else plain if plain.any() else mine)
    far = np.abs(trace.exit_layer("stable")[trace.sites.rows[rows]] - trace.layers / 2)
    return int(rows[np.lexsort((rows, -tokens["text"].str.len().to_numpy()[rows], far))[0]])


def shown_layers(saturation: int, depth: int) -> list[int]:
    """Layers of the example table, from L down: the last two, and those just above, at and below saturation."""
    wanted = {depth, depth - 1, saturation + 1, saturation, saturation - 1}
    return sorted(wanted & set(range(1, depth + 1)), reverse=True)


def hypotheses(trace, row: int, layers: list[int]) -> list[dict]:
    """The token's top ten by layer and site, in the order of P's Table 10: layer, site, top_10, probability, rank."""
    sites = trace.sites
    ids, probability, rank = (sites[n][row] for n in ("topk_ids", "probability", "final_rank"))
    return [
        {
            "layer": layer,
            "site": name,
            "top_10": ids[layer - 1, s].tolist(),
            "probability": probability[layer - 1, s],
            "rank": rank[layer - 1, s],
        }
        for layer in layers
        for name in TOP_DOWN
        if name in sites.names
        for s in [sites.names.index(name)]
    ]


# ---- P's Table 10


def regrouped(printed: pd.DataFrame) -> list[dict]:
    """P's rows from the last layer down and in the order of `TOP_DOWN` inside a layer, as in `hypotheses`."""
    return sorted(printed.to_dict("records"), key=lambda row: (-row["layer"], TOP_DOWN.index(row["site"])))


def printed_overlaps(printed: pd.DataFrame) -> pd.DataFrame:
    """Overlaps of P's printed lists with the last block's: columns row, layer, site, complete, low, high, rank.

    low and high are shares of ten; they differ where pieces of a list cannot be read. rank: of the final token in the
    list, 0 where it is absent.
    """
    final = printed[printed["site"] == "block"].sort_values("layer")["top_10"].iloc[-1]
    rows = []
    for line in printed.to_dict("records"):
        readable = [piece for piece in line["top_10"] if piece is not None]
        shared = len(set(readable) & set(final))
        unread = len(final) - len(readable)
        rank = line["top_10"].index(final[0]) + 1 if final[0] in readable else 0
        rows.append(
            {key: line[key] for key in ("row", "layer", "site", "complete")}
            | {"low": shared / len(final), "high": (shared + unread) / len(final), "rank": rank}
        )
    return pd.DataFrame(rows)


def printed_neighbours(printed: pd.DataFrame) -> pd.DataFrame:
    """Overlaps of neighbouring layers where P prints both lists whole: columns site, layer (the upper), overlap."""
    whole = {(r["site"], r["layer"]): set(r["top_10"]) for r in printed.to_dict("records") if r["complete"]}
    rows = [
        {"site": site, "layer": layer, "overlap": len(ids & whole[site, layer - 1]) / len(ids)}
        for (site, layer), ids in whole.items()
        if (site, layer - 1) in whole
    ]
    return pd.DataFrame(rows, columns=["site", "layer", "overlap"])


def depth_matched(layer: int, of: int, depth: int) -> int:
    """The layer of a model of `depth` nearest to the same share of the depth as `layer` of `of`; halves round up."""
    return max(1, (2 * layer * depth + of) // (2 * of))
