"""Tables of the sub-layer section: means by task, one token site by site, and both beside P's Table 10."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from eelib.tracing.trace import Trace
from eestudy.old.analysis.sublayers import (
    CONTRASTED,
    TOP_DOWN,
    Readings,
    Tasks,
    mean_over_layers,
    over_tasks,
    past_saturation,
    site_rows,
)
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.study.results import Results
from eestudy.old.study.study import Study
from eestudy.parameters import ParameterError

SITE_LABELS = {
    "block": "block output",
    "after_attention": "after attention",
    "feed_forward": "feed-forward module",
    "cross_attention": "cross-attention module",
    "attention": "attention module",
}
COLUMNS = {
    "confidence": "confidence",
    "final_overlap": "overlap with the final top ten",
    "neighbour_overlap": "overlap with the layer below",
    "in_top": "final token in the top ten, past saturation",
}


# ---- task by task


def site_table(tasks: Mapping[str, Readings], seed: int = 0) -> pd.DataFrame:
    """One row per task and site: Intervals of confidence and overlaps, and of in_top past saturation."""
    rows = []
    for task, read in tasks.items():
        one = {task: read}
        for name in (n for n in TOP_DOWN if n in read.names):
            found = {q: over_tasks(one, lambda m: mean_over_layers(m, q, name), seed) for q in CONTRASTED}
            found["in_top"] = over_tasks(one, lambda m: past_saturation(m, "in_top", (name,)), seed)
            rows.append({"task": task, "site": name, "tokens": len(read.groups)} | found)
    return pd.DataFrame(rows)


def keep(results: Results, table: pd.DataFrame) -> None:
    """Put the figures of `site_table` into a notebook's results."""
    for row in table.to_dict("records"):
        results.put_all(row["task"], {f"{key} {row['site']}": row[key] for key in COLUMNS})


def shown_site_table(table: pd.DataFrame, study: Study) -> pd.DataFrame:
    """`site_table` for the page."""
    learnt = ["yes" if study.learnt[name] else "not learnt" for name in table["task"]]
    shown = pd.DataFrame({"task": table["task"], "learnt": learnt, "tokens": table["tokens"]})
    shown["site"] = table["site"].map(SITE_LABELS)
    for key, heading in COLUMNS.items():
        shown[heading] = table[key].map(str)
    return shown


# ---- one token


@dataclass(frozen=True)
class Example:
    """The token of the top-10 table: its id, its saturation layer, a caption, and its `hypotheses`."""

    token_id: int
    saturation: int
    caption: str
    hypotheses: list[dict]


def example(study: Study, sequences: int, sequence: int = -1, position: int = -1) -> Example:
    """The token of the first task that `example_token` names, at the layers of `shown_layers`."""
    task, trace = next(iter(study.traces.items()))
    row = example_token(trace, sequences, sequence, position)
    token, depth = trace.sites.tokens.iloc[row], study.model.layers
    saturation = int(trace.exit_layer("stable")[trace.sites.rows[row]])
    caption = (
        f"Ten best tokens by site, for token {token['position']} of sequence {token['sequence']} of {task}: "
        f"“{study.token_text(token['token_id'])}”, settled from layer {saturation} of {depth} on. ␣ is a space. "
        f"{study.where}."
    )
    rows = hypotheses(trace, row, shown_layers(saturation, depth))
    return Example(int(token["token_id"]), saturation, caption, rows)


def example_token(trace: Trace, sequences: int, sequence: int = -1, position: int = -1) -> int:
    """Row of `trace.sites` to show. Position -1 chooses: among tokens with a letter (else all that are not end tokens),
    in `sequence` or in all for -1, the one whose saturation layer is nearest to half the depth; of equals the longest
    text, then the first. ParameterError, one line, names what is allowed.
    """
    tokens, mine = trace.sites.tokens, site_rows(trace, sequences)
    if sequence >= 0:
        if sequence not in set(tokens["sequence"][mine]):
            shown = sorted(set(tokens["sequence"][mine]))
            raise ParameterError(
                f"example_sequence {sequence} has no sub-layer readouts; allowed: -1, or {shown[0]} to {shown[-1]}"
            )
        mine = mine & (tokens["sequence"] == sequence).to_numpy()
    if position >= 0:
        if sequence < 0:
            raise ParameterError(f"example_position {position} needs an example_sequence, which is {sequence}")
        found = np.flatnonzero(mine & (tokens["position"] == position).to_numpy())
        if not len(found):
            last = tokens["position"][mine].max()
            raise ParameterError(
                f"example_position {position} is not in sequence {sequence}; allowed: -1, or 0 to {last}"
            )
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


def hypotheses(trace: Trace, row: int, layers: list[int]) -> list[dict]:
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


def beside_each_row(printed: pd.DataFrame, tasks: Tasks, seed: int = 0) -> pd.DataFrame:
    """P's lists, row by row, beside the judged tasks at the nearest layer of the same share of the depth."""
    depth, of = tasks.one.layers, int(printed["layer"].max())
    rows = []
    for line in printed_overlaps(printed).to_dict("records"):
        site, layer = line["site"], depth_matched(line["layer"], of, depth)
        exact = line["low"] == line["high"]
        absent = "not in the ten" if exact else "not among those read"
        rows.append(
            {
                "P's row": line["row"],
                "site": SITE_LABELS[site],
                "P: overlap with the final top ten": f"{line['low']:.1f}"
                + ("" if exact else f" to {line['high']:.1f}"),
                "P: rank of the final token": str(line["rank"] or absent),
                f"here: layer of {depth}": layer,
                "here: overlap with the final top ten": str(at_layer(tasks, "final_overlap", site, layer, seed)),
                "here: share with the final token in the ten": str(at_layer(tasks, "in_top", site, layer, seed)),
            }
        )
    return pd.DataFrame(rows)


def at_layer(tasks: Tasks, quantity: str, site: str, layer: int, seed: int) -> Interval:
    """A site's quantity at one layer, over the judged tasks; NOTHING where the model lacks the site."""
    if site not in tasks.sites:
        return NOTHING
    return over_tasks(tasks.judged, lambda m: (m.site(quantity, site)[:, layer - 1], m.groups), seed)


def beside_each_site(printed: pd.DataFrame, tasks: Tasks, seed: int = 0) -> pd.DataFrame:
    """P's complete lists by site, beside the judged tasks from saturation on, near which P's printed layers lie."""
    lists, pairs = printed_overlaps(printed), printed_neighbours(printed)
    rows = []
    for site in (name for name in tasks.sites if name in set(lists["site"])):
        mine, neighbours = lists[(lists["site"] == site) & lists["complete"]], pairs[pairs["site"] == site]["overlap"]
        overlap, in_top = (
            over_tasks(tasks.judged, lambda m: past_saturation(m, quantity, (site,), least=0), seed)
            for quantity in ("final_overlap", "in_top")
        )
        below = over_tasks(tasks.judged, lambda m: mean_over_layers(m, "neighbour_overlap", site), seed)
        rows.append(
            {
                "site": SITE_LABELS[site],
                "P: overlap with the final top ten": f"{mine['low'].mean():.2f} (lists: {len(mine)})",
                "here, settled": str(overlap),
                "P: final token in the ten": f"{(mine['rank'] > 0).sum()} of {len(mine)}",
                "here, settled (share)": str(in_top),
                "P: overlap with the layer below": f"{neighbours.mean():.2f} (pairs: {len(neighbours)})"
                if len(neighbours)
                else "–",
                "here, all layers": str(below),
            }
        )
    return pd.DataFrame(rows)
