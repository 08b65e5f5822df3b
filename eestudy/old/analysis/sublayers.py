"""What the sub-layers say through the head: confidence, top-10 overlaps and rank of the final token (P §6.2).

A site is read alone through the final norm and the head. Modules are what attention and feed-forward add; the stream is
the state that they add to: after attention, or the block's output in parallel blocks, which have no such state.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from eelib.tracing.trace import Trace
from eestudy.claims import Verdict, claim
from eestudy.old.analysis.earliness import Values
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.statistics.stats import bootstrap_unweighted_mean_over_tasks
from eestudy.old.study.study import Study

MODULES = ("attention", "feed_forward")
TOP_DOWN = ("block", "after_attention", "feed_forward", "cross_attention", "attention")  # P's order inside a block
CONTRASTED = ("confidence", "final_overlap", "neighbour_overlap")  # quantities that P says set stream and modules apart
FEWEST = 30  # tokens at a distance from saturation, below which a share would mostly be noise


@dataclass(frozen=True)
class Readings:
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


def site_rows(trace: Trace, sequences: int) -> np.ndarray:
    """Boolean, one per row of `trace.sites`: the rows of the task's first `sequences` sequences."""
    return trace.sites.tokens["sequence"].isin(trace.sequences["sequence"][:sequences]).to_numpy()


def readings(trace: Trace, sequences: int, seed: int = 0) -> Readings:
    """Readings of the first `sequences` sequences; a trace may hold more, and those do not change the result."""
    sites = trace.sites
    keep = np.flatnonzero(site_rows(trace, sequences) & trace.statistic_rows()[sites.rows])
    ids = sites["topk_ids"][keep]
    final = ids[:, -1, sites.names.index("block")]
    ring = np.random.default_rng(seed).permutation(len(keep))
    other = np.empty_like(final)
    other[ring] = final[np.roll(ring, 1)]  # no token gets its own list, unless it is the only one
    return Readings(
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


def contrast(read: Readings, quantity: str) -> Values:
    """(stream minus the mean of attention and feed-forward, mean over layers [tokens]; groups): P-B1 to P-B3.

    Where the block's output stands for the stream, layer L is left out of final_overlap: there it is 1 by definition.
    """
    last = -1 if (read.stream, quantity) == ("block", "final_overlap") else None
    stream, *modules = (read.site(quantity, name)[:, :last] for name in (read.stream, *MODULES))
    if not stream.shape[1]:
        return np.empty(0), read.groups[:0]
    return (stream - np.mean(modules, axis=0)).mean(axis=1), read.groups


def mean_over_layers(read: Readings, quantity: str, name: str) -> Values:
    """(a site's values, mean over layers [tokens]; groups)."""
    values = read.site(quantity, name)
    return (values.mean(axis=1), read.groups) if values.shape[1] else (np.empty(0), read.groups[:0])


def past_saturation(read: Readings, quantity: str, names: tuple[str, ...], least: int = 1) -> Values:
    """(mean over the sites `names`; groups), one row per token and layer at least `least` above its saturation layer.

    P-B4 is `past_saturation(read, "in_top", MODULES)`: a token that saturates at L has no such layer. Not for
    neighbour_overlap, whose columns start at layer 2.
    """
    token, layer = np.nonzero(np.arange(1, read.layers + 1) >= read.saturation[:, None] + least)
    return np.mean([read.site(quantity, name)[token, layer] for name in names], axis=0), read.groups[token]


def over_tasks(tasks: Mapping[str, Readings], values: Callable[[Readings], Values], seed: int = 0) -> Interval:
    """Unweighted mean over the tasks that have rows; `values(read)` -> (values, groups). NOTHING where none has."""
    found = {name: values(read) for name, read in tasks.items()}
    found = {name: pair for name, pair in found.items() if len(pair[0])}
    return bootstrap_unweighted_mean_over_tasks(found, seed=seed) if found else NOTHING


def curve(tasks: Mapping[str, Readings], quantity: str, name: str, seed: int = 0) -> pd.DataFrame:
    """A site's quantity by layer, unweighted over tasks: columns layer, estimate, low, high, sequences.

    Ranks come back as geometric means. The overlap of layers l and l + 1 stands at l + 1.
    """
    first = 2 if quantity == "neighbour_overlap" else 1
    rows = []
    for layer in range(first, next(iter(tasks.values())).layers + 1):
        found = over_tasks(tasks, lambda m: (m.site(quantity, name)[:, layer - first], m.groups), seed)
        if quantity == "log_rank":
            found = found.mapped(lambda value: 10**value)
        rows.append({"layer": layer, **found._asdict()})
    return pd.DataFrame(rows, columns=["layer", *Interval._fields], dtype=float)


def around_saturation(tasks: Mapping[str, Readings], name: str, seed: int = 0, least: int = FEWEST) -> pd.DataFrame:
    """Share of tokens whose final token is in a site's top ten, by layers from the saturation layer ("stable").

    Columns distance, estimate, low, high, sequences; a distance that fewer than `least` tokens reach is left out.
    """
    depth = next(iter(tasks.values())).layers
    rows = []
    for distance in range(1 - depth, depth):

        def at(read: Readings) -> Values:
            layer = read.saturation + distance
            inside = np.flatnonzero((layer >= 1) & (layer <= depth))
            return read.site("in_top", name)[inside, layer[inside] - 1], read.groups[inside]

        if sum(len(at(m)[0]) for m in tasks.values()) >= least:
            rows.append({"distance": distance, **over_tasks(tasks, at, seed)._asdict()})
    return pd.DataFrame(rows, columns=["distance", *Interval._fields], dtype=float)


# ---- a study's tasks


@dataclass(frozen=True)
class Tasks:
    """Readings by task: `all` of a study; `judged`, the learnt ones whose sample holds as many groups as a verdict
    needs, or all learnt ones where none does; `drawn`, the same, or whatever has tokens where no task is learnt.
    """

    all: dict[str, Readings]
    judged: dict[str, Readings]
    drawn: dict[str, Readings]

    @property
    def one(self) -> Readings:
        """Any task's readings, for what they all share: sites, stream, depth, length of lists."""
        return next(iter(self.all.values()))

    @property
    def sites(self) -> list[str]:
        """The sites that the model has, from the block's output down."""
        return [name for name in TOP_DOWN if name in self.one.names]

    @property
    def contrasted(self) -> dict[str, str]:
        """{key in results: site} of the three sites that the claims set against each other."""
        return {"stream": self.one.stream, **{name: name for name in MODULES}}


def group_count(read: Readings) -> int:
    """How many sequences, or passages, the tokens come from."""
    return len(set(read.groups))


def read_tasks(study: Study, sequences: int) -> Tasks:
    """Readings of the first `sequences` sequences of every task."""
    every = {name: readings(trace, sequences, study.parameters.seed) for name, trace in study.traces.items()}
    with_tokens = {name: read for name, read in every.items() if len(read.groups)}
    learnt = {name: read for name, read in with_tokens.items() if study.learnt[name]}
    large = {name: read for name, read in learnt.items() if group_count(read) >= needed_groups()}
    judged = large or learnt
    return Tasks(every, judged, judged or with_tokens)


def needed_groups() -> int:
    """The groups that a verdict of this section needs, as the claims' record says."""
    return claim("P-B1").minimum_sequences


def about_the_run(study: Study, tasks: Tasks) -> dict[str, float | str]:
    """What the prose says of the model and its tasks."""
    after_attention = tasks.one.stream == "after_attention"
    return {
        "minimum": needed_groups(),
        "stream": "state after attention" if after_attention else "block output",
        "stream_note": "Its blocks have a state after attention, which stands for the residual stream below."
        if after_attention
        else "Its blocks are parallel: attention and feed-forward both read the block's input, so there is "
        "no state after attention. The block's output stands for the residual stream below instead.",
        "judged_tasks": len(tasks.judged),
        "all_tasks": len(tasks.all),
        "depth": study.model.layers,
        "k": tasks.one.k,
        "name": study.model.name,
    }


def scope(study: Study, tasks: Tasks) -> str:
    """For captions: the tasks that a figure averages over, and the run."""
    head = "Unweighted mean over " if tasks.judged else "No task is learnt; shown all the same: "
    counts = ", ".join(f"{name} ({group_count(read)} groups)" for name, read in tasks.drawn.items())
    tokens = sum(len(read.groups) for read in tasks.drawn.values())
    return f"{head}{counts}; {tokens:,} tokens. {study.where}."


def curves(tasks: Tasks, quantities: tuple[str, ...], seed: int = 0) -> dict[str, dict[str, pd.DataFrame]]:
    """{quantity: {site: `curve`}} over the tasks to be drawn; {} where there are none."""
    if not tasks.drawn:
        return {}
    return {
        quantity: {site: curve(tasks.drawn, quantity, site, seed) for site in tasks.sites} for quantity in quantities
    }


def curves_around_saturation(tasks: Tasks, seed: int = 0) -> dict[str, pd.DataFrame]:
    """{site: `around_saturation`} over the tasks to be drawn; {} where no distance has enough tokens."""
    found = {site: around_saturation(tasks.drawn, site, seed) for site in tasks.sites} if tasks.drawn else {}
    return found if any(map(len, found.values())) else {}


def means(tasks: Tasks, seed: int = 0) -> dict[str, Interval]:
    """Means over layers at the contrasted sites, by f"{quantity}_{key}"."""
    return {
        f"{quantity}_{key}": over_tasks(tasks.judged, lambda m: mean_over_layers(m, quantity, site), seed)
        for quantity in (*CONTRASTED, "other_overlap")
        for key, site in tasks.contrasted.items()
    }


def contrasts(tasks: Tasks, seed: int = 0) -> dict[str, Interval]:
    """Stream minus modules, by f"{quantity}_difference"."""
    return {f"{q}_difference": over_tasks(tasks.judged, lambda m: contrast(m, q), seed) for q in CONTRASTED}


def past_saturation_shares(tasks: Tasks, seed: int = 0) -> dict[str, Interval]:
    """Past saturation: how often the final token is in the top ten of sites, and on top of the stream."""
    stream = tasks.one.stream

    def share(quantity: str, *sites: str) -> Interval:
        return over_tasks(tasks.judged, lambda m: past_saturation(m, quantity, sites), seed)

    return {
        "past_modules": share("in_top", *MODULES),
        "past_attention": share("in_top", "attention"),
        "past_feed_forward": share("in_top", "feed_forward"),
        "past_stream": share("in_top", stream),
        "past_stream_top": share("on_top", stream),
    }


def in_percent(figures: Mapping[str, Interval]) -> dict[str, Interval]:
    """Shares as percentages, as the prose gives them."""
    return {key: share.percent for key, share in figures.items()}


def verdicts(study: Study, differences: Mapping[str, Interval], past: Mapping[str, Interval]) -> list[Verdict]:
    """Verdicts on P-B1 to P-B4, from `contrasts` and `past_saturation_shares`."""
    return [
        study.judge("P-B1", lambda: differences["final_overlap_difference"]),
        study.judge("P-B2", lambda: differences["confidence_difference"]),
        study.judge("P-B3", lambda: differences["neighbour_overlap_difference"]),
        study.judge("P-B4", lambda: past["past_modules"]),
    ]
