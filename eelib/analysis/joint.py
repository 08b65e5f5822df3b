"""What joint optimization changes, on the same prompts before and after (P §5.1, Figures 3 and 4, Table 9)."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from eelib.analysis.earliness import token_layers
from eelib.common.interval import NOTHING, Interval
from eelib.common.stats import bootstrap_unweighted_difference_over_tasks, bootstrap_unweighted_mean_over_tasks
from eelib.models.checkpoint import path_of
from eelib.study.claims import Verdict, claim, untestable
from eelib.study.comparison import config_of, models_on_tasks
from eelib.study.parameters import ParameterError
from eelib.study.study import MINIMUM_GROUPS, Study
from eelib.tasks.quality import quality_difference
from eelib.tracing.exit_layers import DEFINITIONS
from eelib.tracing.trace import Trace

MEASURES = {
    "cosine": "cosine of states",
    "pearson": "Pearson correlation of states",
    "js": "JS of distributions (nats)",
    "kl": "KL of distributions (nats)",
}
SHAPE = (
    "architectures",
    "model_type",
    "num_hidden_layers",
    "num_decoder_layers",
    "decoder_layers",
    "hidden_size",
    "vocab_size",
    "num_labels",
)


def check_pairs(parameter: str, pairs: list[tuple[str, str]]) -> None:
    """ParameterError unless both checkpoints of each pair are there and of one architecture; nothing is decoded."""
    for before, after in pairs:
        configs = config_of("model" if parameter == "after" else parameter, before), config_of(parameter, after)
        one, two = (
            {name: getattr(config, name, getattr(config.get_text_config(decoder=True), name, None)) for name in SHAPE}
            for config in configs
        )
        if one != two:
            differs = "; ".join(f"{name} {one[name]} and {two[name]}" for name in SHAPE if one[name] != two[name])
            raise ParameterError(
                f"parameter {parameter}: {before} and {after} differ in {differs}; allowed are two "
                "checkpoints of one architecture"
            )


def objective(name: str) -> str:
    """What a model was trained for, as its card says; empty for a checkpoint without a card."""
    try:
        return json.loads((Path(path_of(name)) / "card.json").read_text(encoding="utf-8")).get("objective", "")
    except (OSError, ValueError):
        return ""


def objectives(names: list[str]) -> str:
    """What the models were trained for, in words: a sentence for each objective, with the models that share it."""
    shared: dict[str, list[str]] = {}
    for name in names:
        alike = shared.setdefault(objective(name) or "what its makers say, since there is no card", [])
        alike.append(Path(name).name)
    return " ".join(f"{', '.join(alike)}: {said}." for said, alike in shared.items()) or "None is part of this run."


def common_tasks(before: Study, after: Study) -> list[str]:
    """The tasks that the model has learnt before and after."""
    return [name for name in before.traces if before.learnt[name] and after.learnt[name]]


def large(old: dict[str, tuple], new: dict[str, tuple]) -> list[str]:
    """Tasks with MINIMUM_GROUPS groups before and after; all, if none has. `learnt_tokens` says why."""
    return [name for name in old if min(len(set(side[name][1])) for side in (old, new)) >= MINIMUM_GROUPS] or list(old)


def change(before: Study, after: Study, values: Callable, tasks: list[str], seed: int = 0) -> dict[str, Interval]:
    """{"before", "after", "difference"} of values(trace) -> (values, groups): unweighted means over the tasks.

    The difference is paired by group, the intervals resample groups. Small tasks count only where all are small.
    """
    old = {name: values(before.traces[name]) for name in tasks}
    new = {name: values(after.traces[name]) for name in tasks}
    if not tasks or not all(len(pair[0]) for side in (old, new) for pair in side.values()):
        return dict.fromkeys(("before", "after", "difference"), NOTHING)
    old, new = ({name: side[name] for name in large(old, new)} for side in (old, new))
    return {
        "before": bootstrap_unweighted_mean_over_tasks(old, seed=seed),
        "after": bootstrap_unweighted_mean_over_tasks(new, seed=seed),
        "difference": bootstrap_unweighted_difference_over_tasks(new, old, seed=seed),
    }


def layer_pairs(trace: Trace, measure: str, sequences: int) -> tuple[np.ndarray, np.ndarray]:
    """(a measure between layers 1..L [tokens, L, L], groups [tokens]) of the first `sequences`, end tokens left out.

    A trace keeps the pairs of as many sequences as it was ever asked for; two models may differ in that.
    """
    rows = trace.pairs["row"]
    first = set(trace.sequences["sequence"].iloc[:sequences])
    kept = trace.statistic_rows()[rows] & trace.tokens["sequence"].isin(first).to_numpy()[rows]
    return trace.pairs[measure][kept][:, 1:, 1:], trace.tokens["group"].to_numpy()[rows[kept]]


def likeness(trace: Trace, measure: str, sequences: int) -> tuple[np.ndarray, np.ndarray]:
    """(mean over all pairs of two different layers [tokens], groups [tokens]); otherwise as `layer_pairs`."""
    values, groups = layer_pairs(trace, measure, sequences)
    return values[:, ~np.eye(trace.layers, dtype=bool)].mean(axis=1).astype(float), groups


def mean_pairs(traces: dict[str, Trace], tasks: list[str], measure: str, sequences: int) -> np.ndarray:
    """Mean over tokens, then tasks, of `layer_pairs`: [L, L]."""
    return np.mean([layer_pairs(traces[name], measure, sequences)[0].mean(axis=0) for name in tasks], axis=0)


def by_layer(traces: dict[str, Trace], tasks: list[str], readout: str, seed: int = 0) -> pd.DataFrame:
    """Unweighted mean over tasks by layer 1..L, with intervals: columns layer, estimate, low, high, sequences.

    `readout` "confidence" is the probability of the layer's own top token (P, Figure 4); "agreement" the share of
    tokens whose top token is the one finally emitted.
    """
    values, groups = {}, {}
    for name in tasks:
        trace, rows = traces[name], traces[name].statistic_rows()
        final = trace.tokens["token_id"].to_numpy()[rows, None]
        values[name] = trace["probability"][rows] if readout == "confidence" else trace["top1"][rows] == final
        groups[name] = trace.tokens["group"].to_numpy()[rows]
    depth = traces[tasks[0]].layers
    return pd.DataFrame(
        [
            {
                "layer": layer,
                **bootstrap_unweighted_mean_over_tasks(
                    {name: (values[name][:, layer].astype(float), groups[name]) for name in tasks}, seed=seed
                )._asdict(),
            }
            for layer in range(1, depth + 1)
        ]
    )


def exit_share(trace: Trace, definition: str) -> tuple[np.ndarray, np.ndarray]:
    """(exit layer / L [tokens], groups)."""
    layers, groups = token_layers(trace, definition)
    return layers / trace.layers, groups


def early(trace: Trace, definition: str) -> tuple[np.ndarray, np.ndarray]:
    """(1.0 where a token leaves before layer L [tokens], groups)."""
    layers, groups = token_layers(trace, definition)
    return (layers < trace.layers).astype(float), groups


def same_prompts(before: Study, after: Study, task: str) -> tuple:
    """(task of the prompts that both models could take, outputs before, outputs after)."""
    old, new = (study.traces[task].sequences.set_index("sequence")["output"] for study in (before, after))
    both = sorted(set(old.index) & set(new.index))
    return before.tasks[task].pick(both), list(old[both]), list(new[both])


def change_table(before: Study, after: Study, seed: int = 0) -> pd.DataFrame:
    """One row per task: quality, avg and perc of both definitions, before, after and their difference.

    Columns: task, learnt (both times), metric (the name of the score), quality ({"before", "after": scores,
    "difference": Interval}), "avg first", "perc first", "avg stable", "perc stable" (as `change` gives them) and "same
    outputs", the share of outputs that did not change.
    """
    rows = []
    for name in before.traces:
        picked, old, new = same_prompts(before, after, name)
        differences = quality_difference(picked, old, new, seed)
        metric = next(iter(differences), "")
        row = {
            "task": name,
            "learnt": before.learnt[name] and after.learnt[name],
            "metric": metric,
            "quality": {
                "before": picked.quality(old).get(metric, float("nan")),
                "after": picked.quality(new).get(metric, float("nan")),
                "difference": differences.get(metric, NOTHING),
            },
            "same outputs": float(np.mean([a == b for a, b in zip(old, new)])),
        }
        for definition in DEFINITIONS:
            row[f"avg {definition}"] = change(before, after, lambda t, d=definition: token_layers(t, d), [name], seed)
            row[f"perc {definition}"] = change(before, after, lambda t, d=definition: early(t, d), [name], seed)
        rows.append(row)
    return pd.DataFrame(rows)


def in_words(table: pd.DataFrame, name: str, depth: int) -> str:
    """What a `change_table` of the model `name` with `depth` layers shows on its learnt tasks, in a sentence."""
    rows = [row for row in table.to_dict("records") if row["learnt"]]
    if not rows:
        return f"{name}: no task is learnt before and after."
    layers = sorted(100 * row["avg stable"]["difference"].estimate / depth for row in rows)
    span = " to ".join(dict.fromkeys(f"{value:+.1f}" for value in (layers[0], layers[-1])))
    quality = [row["quality"]["difference"] for row in rows]
    return (
        f'{name}, {len(rows)} of {len(table)} tasks learnt: the mean exit layer ("stable") changes by '
        f"{span}% of the depth; quality is lower with its whole interval on "
        f"{sum(change.high < 0 for change in quality)} of them and higher on "
        f"{sum(change.low > 0 for change in quality)}."
    )


def verdicts(before: Study, after: Study, tasks: list[str], differences: dict[str, Interval]) -> list[Verdict]:
    """Verdicts on claims about a pair, which they name; `differences` are after minus before, by claim."""
    met, pair = before.model.hash != after.model.hash, f"{before.model.name} → {after.model.name}"
    found = [
        before.judge(name, lambda value=value: value, requirement_met=met)
        if tasks
        else untestable(name, "no task of this run is learnt before and after")
        for name, value in differences.items()
    ]
    return [replace(verdict, models=pair) for verdict in found]


def likeness_in_words(cosine: Interval) -> str:
    """What the change of the mean cosine says, beside what P says of it."""
    if not np.isfinite(cosine.estimate):
        return "Nothing is known of the states."
    side = "less alike" if cosine.high < 0 else "more alike" if cosine.low > 0 else "neither clearly more nor less so"
    return (
        f"So the states have become {side}. P's section 5.1 sees no significant trend; its introduction and its "
        "conclusion say that the likeness of states rises. P-J2, below, asks only that the change stay within "
        f"{claim('P-J2').tolerance:g}, a tolerance that is ours."
    )


def other_pairs(text: str) -> list[tuple[str, str, str]]:
    """(before, after, tasks) of each "before > after on tasks"; ParameterError for another form."""
    example, found = "pocket-t5 > pocket-t5-weighted on translation/*", []
    for models, tasks in models_on_tasks("others", text, example):
        before, _, after = (name.strip() for name in models.partition(">"))
        if not (before and after):
            raise ParameterError(
                f"parameter others holds {models!r} on {tasks!r}; allowed are entries such as "
                f"{example!r}, several with semicolons, or nothing"
            )
        found.append((before, after, tasks))
    return found
