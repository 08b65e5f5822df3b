"""What faults of published codes do to their papers' conclusions: M's scores and its ratchet, FREE's estimator."""

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.trace_scores import Curve, exits_of
from eestudy.exits.quality import Quality, scored
from eestudy.old.analysis import mee, quality_curves
from eestudy.old.analysis.gate_rules import FREE, Asked, label
from eestudy.old.analysis.gates import as_layer, where_left
from eestudy.old.analysis.quality_curves import Qualities
from eestudy.old.statistics.interval import NOTHING, Interval, told
from eestudy.old.statistics.stats import attempt, bootstrap_unweighted_mean_over_tasks
from eestudy.old.study.results import Results

DESCRIBED, CODE, RATCHET, ESTIMATOR = (
    "as described",
    "with the code's score and threshold",
    "with its ratchet, too",
    "with the code's estimator",
)
OF_M, OF_CALM = "monotone", "softmax_difference"
TEXT_THRESHOLD, CODE_THRESHOLD = 0.9, 0.7  # M's text and M's scripts


def published_rules(minimum_layer: int = 1) -> dict[str, tuple[ExitRule, ExitRule]]:
    """{gate: (as M's text describes it, but for its own minimum layer, as its scripts run it, without one)}."""
    made = {}
    for gate in (OF_M, "state_saturation", OF_CALM):
        faulty = gate_named(gate) if gate == OF_CALM else gate_named(gate, as_published=True)
        described = ExitRule(gate_named(gate), TEXT_THRESHOLD, minimum_layer=minimum_layer)
        made[gate] = (described, ExitRule(faulty, CODE_THRESHOLD))
    return made


def all_rules(minimum_layer: int = 1) -> list[ExitRule]:
    """The same in one list."""
    return [rule for both in published_rules(minimum_layer).values() for rule in both]


Exits = Callable[[str], tuple[Tensor, Tensor]]  # of a task: exit layers [n], what leaving at layers 1..L emits [n, L]


def versions(of: Asked) -> dict[tuple[str, str], Exits]:
    """{(gate, version): where a task's tokens leave}."""
    found: dict[tuple[str, str], Exits] = {}

    def by(rule: ExitRule, ratchet: bool) -> Exits:
        def exits(task: str) -> tuple[Tensor, Tensor]:
            trace = of.study.traces[task]
            scores = of.study.scores(rule, task)
            sequence, position = (torch.tensor(trace.tokens[name].to_numpy()) for name in ("sequence", "position"))
            left = exits_of(rule, scores, position)
            return (ratcheted(left, sequence, position) if ratchet else left), scores.tokens

        return exits

    def free(as_published: bool) -> Exits:
        def exits(task: str) -> tuple[Tensor, Tensor]:
            way = of.free(task, as_published)
            middle = way.values(None, 0)[:-1]
            (left,) = way.exits(middle[len(middle) // 2 : len(middle) // 2 + 1])
            return left, way.tokens

        return exits

    for gate, (described, code) in published_rules(of.study.parameters.minimum_layer).items():
        found |= {
            (gate, DESCRIBED): by(described, False),
            (gate, CODE): by(code, False),
            (gate, RATCHET): by(code, True),
        }
    return found | {(FREE, DESCRIBED): free(False), (FREE, ESTIMATOR): free(True)}


Scored = dict[tuple[str, str], dict[str, Quality]]  # by gate and version, then task


def outcomes(of: Asked) -> tuple[pd.DataFrame, Scored]:
    """(a row per gate and version: mean exit layer, agreement, quality kept, mean over `few` tasks; qualities)."""
    rows, scores, seed = [], {}, of.study.parameters.seed
    for (gate, version), exits in versions(of).items() if of.tasks else ():
        made, agrees, saved = {}, {}, {}
        for task in of.few:
            trace, (left, tokens) = of.study.traces[task], exits(task)
            made[task] = scored([0.0], [left], tokens, trace, of.scorer(task))
            at, same, groups = where_left(trace, left, tokens)
            agrees[task], saved[task] = (same.astype(float), groups), (1 - at / of.depth, groups)
        scores[gate, version] = made
        rows.append(
            {
                "gate": label(gate),
                "version": version,
                "exit layer": as_layer(bootstrap_unweighted_mean_over_tasks(saved, seed=seed), of.depth),
                "agreement (%)": bootstrap_unweighted_mean_over_tasks(agrees, seed=seed).percent,
                "quality kept (%)": attempt(lambda: kept(made, seed=seed)).percent,
            }
        )
    return pd.DataFrame(rows), scores


def kept(made: Qualities, less: Qualities | None = None, seed: int = 0) -> Interval:
    """Share of full depth's quality, unweighted mean over tasks; less another way's, paired, where that is given."""
    return quality_curves.kept(made, lambda one: np.ones(1), seed, less)


def leads(scores: Scored, seed: int = 0) -> dict[str, Interval]:
    """{version: quality kept by monotone less that by the softmax difference, as a share of full depth's}."""
    return {
        version: attempt(lambda: kept(scores[OF_M, version], scores[OF_CALM, version], seed), NOTHING)
        for version in (DESCRIBED, CODE, RATCHET)
        if (OF_M, version) in scores
    }


def at_equal_layers(along: Mapping[str, Mapping[str, Curve]], seed: int = 0) -> Interval:
    """Agreement of monotone less the softmax difference's, in points, over the mean layers that both go through."""
    return attempt(lambda: mee.lead(along, [OF_M], [OF_CALM], seed)).percent


def in_words(table: pd.DataFrame, scores: Scored, lead: Interval, seed: int = 0) -> str:
    """What M's conclusion rests on, fault by fault, beside equal layers; and what FREE's estimator's fault does.

    `lead`: agreement of monotone less the softmax difference's at equal mean layers, in points.
    """
    if table.empty:
        return "Nothing is learnt, so nothing can be said of the faults."
    layer = {(row["gate"], row["version"]): row["exit layer"].estimate for row in table.to_dict("records")}
    each = []
    for version, gain in leads(scores, seed).items():
        ran = [layer[label(gate), version] for gate in (OF_M, OF_CALM)]
        each.append(f"{version}, {told(gain.percent, ' points')}, at {ran[0]:.1f} against {ran[1]:.1f} mean layers")
    free, faulty = (scores[FREE, version] for version in (DESCRIBED, ESTIMATOR))
    before, after = (layer[label(FREE), version] for version in (DESCRIBED, ESTIMATOR))
    share = attempt(lambda: kept(free, seed=seed)).percent
    change = attempt(lambda: kept(faulty, free, seed)).percent
    return (
        f"Quality that monotone keeps, less what the softmax difference keeps: {'; '.join(each)}. Over the mean layers "
        f"that both go through, its agreement less the other's is {told(lead, ' points')}. FREE as described leaves at "
        f"layer {before:.1f} on average and keeps {told(share, '%')} of the quality; the code's estimator changes that "
        f"by {told(change, ' points')}, and leaves at layer {after:.1f}."
    )


def keep(results: Results, table: pd.DataFrame, scores: Scored, lead: Interval) -> None:
    """Put the outcomes into a notebook's results, and what the prose says of them."""
    for row in table.to_dict("records"):
        for column in ("exit layer", "quality kept (%)"):
            results.keep(f"{column}, {row['gate']}, {row['version']}", row[column])
    results.tell("published_words", in_words(table, scores, lead, results.study.parameters.seed))


def ratcheted(exits: Tensor, sequences: Tensor, positions: Tensor, batch_size: int = 32) -> Tensor:
    """Exit layers [tokens] as M's code decodes them: once all rows of a batch exit by layer k, no later step of the
    batch runs deeper than k, for the blocks above have lost their keys.

    Batches are of so many sequences in their order; a row that has ended asks for nothing.
    """
    batch = torch.unique(sequences, return_inverse=True)[1] // batch_size
    out = exits.clone()
    for number in batch.unique():
        deepest = int(exits.max())
        for position in positions[batch == number].unique():  # sorted
            rows = (batch == number) & (positions == position)
            out[rows] = out[rows].clamp(max=deepest)
            deepest = int(out[rows].max())
    return out
