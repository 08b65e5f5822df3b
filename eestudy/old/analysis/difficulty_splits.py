"""Easy and difficult units of a study's tasks, split as M does and otherwise: what the section states and judges."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from eelib.common.errors import NotEstimable
from eestudy.claims import FAILS, HOLDS, REVERSED, UNTESTABLE, Verdict, claim, published
from eestudy.old.analysis.difficulty import (
    BAND,
    KINDS,
    PARTS,
    STARTS,
    Comparison,
    Sides,
    compare,
    comparison,
    outputs,
    prefixes,
    same_share,
    split,
    without_contrast,
)
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.stats import attempt
from eestudy.old.study.claims import judge
from eestudy.old.study.results import Results
from eestudy.old.study.study import MINIMUM_GROUPS, Study
from eestudy.parameters import ParameterError, Parameters

PROPERTIES = ("first_similar", "similar_states", "length", "mean_similarity")  # of prefixes and of whole outputs
NARROWER = (0.01, 0.1, 0.25)  # other shares of each end: M's own is not known, and narrower ends are more extreme
Score = Callable[[pd.DataFrame], pd.Series]  # of units; high is easy


def check(parameters: Parameters) -> None:
    """ParameterError where a share or a threshold makes no sense."""
    for name, allowed, most in (("share", "above 0, at most 0.5", 0.5), ("threshold", "above 0, at most 1", 1)):
        if not 0 < parameters[name] <= most:
            raise ParameterError(f"parameter {name} is {parameters[name]}; it must be {allowed}")


def check_depth(study: Study) -> None:
    """ParameterError for a model without a layer between the embeddings and the last."""
    if study.model.layers < 2:
        raise ParameterError(
            f"parameter model is {study.parameters.model!r}, which has one layer; this notebook needs two or more"
        )


def similarity(units: pd.DataFrame) -> pd.Series:
    """M's score of how easy a unit is."""
    return units["mean_similarity"]


def certainty(units: pd.DataFrame) -> pd.Series:
    """Our control's score, which looks at no state before the last."""
    return -units["entropy"]


@dataclass(frozen=True)
class Split:
    """Easy and difficult units of every task, and which tasks are learnt."""

    sides: dict[str, Sides]
    learnt: list[str]

    def of(self, task: str, name: str) -> Comparison:
        """One property in one task."""
        return comparison([self.sides[task]], name)

    def large(self, least: int = MINIMUM_GROUPS) -> list[Sides]:
        """The learnt tasks, those of fewer groups than `least` left out unless all are small."""
        chosen = [self.sides[task] for task in self.learnt]
        return [side for side in chosen if side.sequences >= least] or chosen

    def over(self, name: str, least: int = MINIMUM_GROUPS) -> Comparison:
        """One property over the tasks of `large`."""
        return comparison(self.large(least), name)


@dataclass(frozen=True)
class Splits:
    """A study's units, split by mean similarity as M does, and otherwise. {task: `prefixes`} and {task: `outputs`}."""

    study: Study
    prefixes: dict[str, pd.DataFrame]
    outputs: dict[str, pd.DataFrame]

    def split(self, tables: Mapping[str, pd.DataFrame], score: Score, share: float | None = None) -> Split:
        """Every task by itself and with a seed of its own; `share` is the parameters' where none is given."""
        p = self.study.parameters
        sides = {
            name: compare(table, score(table), share or p.share, [p.seed, number])
            for number, (name, table) in enumerate(tables.items())
        }
        return Split(sides, self.study.learnt_tasks)

    @cached_property
    def by_similarity(self) -> Split:
        """M's split of prefixes."""
        return self.split(self.prefixes, similarity)

    @cached_property
    def by_entropy(self) -> Split:
        """The control's split of prefixes."""
        return self.split(self.prefixes, certainty)

    @cached_property
    def of_finished(self) -> Split:
        """M's split of the prefixes of outputs that were not cut."""
        return self.split({name: units[~units["truncated"]] for name, units in self.prefixes.items()}, similarity)

    @cached_property
    def of_outputs(self) -> Split:
        """M's split of whole outputs."""
        return self.split(self.outputs, similarity)

    @property
    def shown(self) -> list[str]:
        """The tasks of figures: the learnt ones, or all where none is."""
        return self.study.learnt_tasks or list(self.study.traces)

    @property
    def whose(self) -> str:
        """`shown` in words."""
        return "the learnt tasks" if self.study.learnt_tasks else "all tasks, none of them learnt"

    def ends(self, task: str, score: Score = similarity) -> dict[str, np.ndarray]:
        """{kind: indices of a task's prefixes}, from the extreme inwards."""
        p, number = self.study.parameters, list(self.prefixes).index(task)
        return dict(zip(KINDS, split(score(self.prefixes[task]), p.share, [p.seed, number])))

    def cosines(self, score: Score) -> dict[str, np.ndarray]:
        """{kind: cosines [prefixes, L+1]} of the shown tasks, each split by itself."""
        parts: dict[str, list[np.ndarray]] = {kind: [] for kind in KINDS}
        for task in self.shown:
            rows, cosine = self.prefixes[task]["row"].to_numpy(), self.study.traces[task]["cosine"]
            for kind, side in self.ends(task, score).items():
                parts[kind].append(cosine[rows[side]])
        return {kind: np.concatenate(found) for kind, found in parts.items()}

    def rising(self) -> dict[str, pd.DataFrame]:
        """{kind: share of the shown tasks' prefixes that rise from each layer "start" on, with its interval}."""
        chosen = [self.by_similarity.sides[task] for task in self.shown]
        found = [comparison(chosen, f"increasing_{start}") for start in range(self.study.model.layers)]
        return {
            kind: pd.DataFrame([{"start": start, **getattr(c, kind)._asdict()} for start, c in enumerate(found)])
            for kind in KINDS
        }


def split_study(study: Study) -> Splits:
    """The units of every task of a study."""
    threshold = study.parameters.threshold
    return Splits(
        study,
        {name: prefixes(trace, threshold) for name, trace in study.traces.items()},
        {name: outputs(trace, threshold) for name, trace in study.traces.items()},
    )


# ---- what the prose states


def band_in_words() -> str:
    """10% to 90%, for a caption."""
    return " to ".join(f"{100 * quantile:.0f}%" for quantile in BAND)


def word(value: Interval, above: str, below: str) -> str:
    """Which side of 0 the whole interval lies on, for prose."""
    return value.side(above, below, f"not clearly {above} or {below}") if value.known else "not measured against"


def about_the_run(study: Study) -> dict[str, float | str]:
    """The model, its tasks, and the parameters as the prose names them."""
    p, depth = study.parameters, study.model.layers
    return {
        "depth": depth,
        "layer_before_last": depth - 1,
        "threshold": p.threshold,
        "share": 100 * p.share,
        "learnt_tasks": len(study.learnt_tasks),
        "all_tasks": len(study.traces),
        "name": study.model.name,
        "fraction_4": same_share(4, depth),
        "fraction_8": same_share(8, depth),
        "band": 100 * (BAND[1] - BAND[0]),
    }


def statements(splits: Splits) -> dict[str, Interval | float | str]:
    """Every figure over the learnt tasks that the prose states."""
    printed = published("M-table-1").set_index("property")
    found: dict[str, Interval | float | str] = {
        "length_finished": splits.of_finished.over("length").difference,
        "stays": stays_share(splits),
        "published_first": printed.loc["first_similar_state", "difficult"] - printed.loc["first_similar_state", "easy"],
        "published_length": printed.loc["length", "easy"] - printed.loc["length", "difficult"],
    }
    for key, chosen in (("", splits.by_similarity), ("control_", splits.by_entropy), ("output_", splits.of_outputs)):
        found |= {f"{key}{name}": value for name, value in properties(chosen).items()}
    for key, chosen in (("", splits.by_similarity), ("control_", splits.by_entropy)):
        found |= {f"{key}{name}": value for name, value in approach(chosen, splits.study.model.layers).items()}
    return found


def properties(chosen: Split) -> dict[str, Interval | str]:
    """Properties that prefixes and whole outputs share: easy, difficult, and the difference."""
    found: dict[str, Interval | str] = {}
    for name in PROPERTIES:
        c = chosen.over(name)
        found |= {f"{name}_easy": c.easy, f"{name}_difficult": c.difficult, name: c.difference}
    by_task = [chosen.of(task, "length").difference for task in chosen.learnt]
    longer, shorter = sum(one.low > 0 for one in by_task), sum(one.high < 0 for one in by_task)
    return found | {
        "length_word": word(chosen.over("length").difference, "longer than", "shorter than"),
        "length_tasks": f"surely longer on {longer} of {len(by_task)} learnt tasks, surely shorter on {shorter}",
    }


def approach(chosen: Split, depth: int) -> dict[str, Interval | str]:
    """How much later difficult prefixes are similar, and the shares that rise, in percent."""
    later = chosen.over("first_similar").difference.scaled(-1)
    found: dict[str, Interval | str] = {"later": later, "later_word": word(later, "later than", "sooner than")}
    for start in {*STARTS, *(same_share(k, depth) for k in STARTS)}:
        c = chosen.over(f"increasing_{start}")
        found |= {f"increasing_{start}_{part}": getattr(c, part).percent for part in PARTS}
    return found


def stays_share(splits: Splits) -> float:
    """Percentage of prefixes that stay similar once they are, unweighted mean over the learnt tasks."""
    shares = [splits.prefixes[name]["stays"].mean() for name in splits.study.learnt_tasks]
    return 100 * float(np.mean(shares)) if shares else float("nan")


def keep(results: Results, splits: Splits) -> None:
    """Put every property of every task into a notebook's results."""
    for task, sides in splits.by_similarity.sides.items():
        for name in sides.names:
            c, control = splits.by_similarity.of(task, name), splits.by_entropy.of(task, name)
            results.put_all(task, {f"{name} {part}": getattr(c, part) for part in PARTS})
            results.put_all(task, {f"{name} {part}, split by entropy": getattr(control, part) for part in PARTS})
            results.put(task, f"{name} easy deviation", c.easy_deviation)
            results.put(task, f"{name} difficult deviation", c.difficult_deviation)
        for name in PROPERTIES:
            c = splits.of_outputs.of(task, name)
            results.put_all(task, {f"output {name} {part}": getattr(c, part) for part in PARTS})
        results.put(task, "prefixes", len(splits.prefixes[task]))
        results.put(task, "prefixes on each side", sides.units)
        results.put(task, "outputs", len(splits.outputs[task]))


# ---- other shares


def other_shares(splits: Splits) -> dict[float, tuple[Split, Split]]:
    """{share of each end: (M's split of prefixes, of whole outputs)}, the parameters' share among them."""
    return {
        share: (splits.split(splits.prefixes, similarity, share), splits.split(splits.outputs, similarity, share))
        for share in sorted({*NARROWER, splits.study.parameters.share})
    }


def share_gaps(prefixes: Split, outputs: Split) -> dict[str, Comparison]:
    """The contrasts that the table of shares shows."""
    found = {name: prefixes.over(name) for name in ("first_similar", "length", "increasing_0")}
    return found | {"output_length": outputs.over("length")}


def share_statements(shares: dict[float, tuple[Split, Split]]) -> dict[str, Interval]:
    """The differences of `share_table`, for the results."""
    return {
        f"{name} at share {share:g}": found.difference
        for share, chosen in shares.items()
        for name, found in share_gaps(*chosen).items()
    }


# ---- verdicts


def judged_contrast(
    splits: Splits, chosen: Split, name: str, sign: float, least: int = MINIMUM_GROUPS, in_all: int = 0
) -> Interval:
    """easy minus difficult, or difficult minus easy for sign -1; NotEstimable says why there is none.

    `least`: groups of a task that counts, unless all have fewer; `in_all`: of all those tasks.
    """
    depth = splits.study.model.layers
    if splits.study.model.kind == "masked":
        raise NotEstimable("a masked model decodes no prefix")
    if name.startswith("increasing_") and int(name.removeprefix("increasing_")) > depth - 2:
        raise NotEstimable(f"the only step left is the one into the last of {depth} layers, or there is none")
    found = chosen.over(name, least)
    if without_contrast(found):
        raise NotEstimable(f"every unit of both kinds has the same value, {found.easy.estimate:g}")
    if not found.difference.known:
        units = "units" if chosen is splits.by_similarity else "finished outputs"
        raise NotEstimable(f"too few {units}: no task has both easy and difficult ones")
    groups = sum(side.sequences for side in chosen.large(least))
    if groups < in_all:
        raise NotEstimable(f"{groups} sequences in all tasks, fewer than {in_all}")
    return found.difference.scaled(sign)


def verdicts(splits: Splits) -> list[Verdict]:
    """Verdicts on M-D1 and M-D3 to M-D7; start layers as M counts them. Those on prefixes are held to the control."""
    prefixes, whole = splits.by_similarity, splits.of_outputs
    all_layers, after_4, after_8 = (f"increasing_{start}" for start in STARTS)
    return [
        verdict(splits, claim_id, chosen, name, sign)
        for claim_id, chosen, name, sign in (
            ("M-D1", prefixes, "first_similar", -1.0),
            ("M-D3", prefixes, "length", 1.0),
            ("M-D4", whole, "length", 1.0),
            ("M-D5", prefixes, all_layers, 1.0),
            ("M-D6", prefixes, after_4, -1.0),
            ("M-D7", prefixes, after_8, -1.0),
        )
    ]


def verdict(splits: Splits, claim_id: str, chosen: Split, name: str, sign: float) -> Verdict:
    """One of `verdicts`; its weight says where splitting by the last layer's entropy turns it around, its note what it
    would be with the tasks that its claim leaves out.
    """
    row = claim(claim_id)
    least = row.minimum_sequences
    made = splits.study.judge(
        claim_id, lambda: judged_contrast(splits, chosen, name, sign, least, row.minimum_in_all or 0)
    )
    if made.verdict != UNTESTABLE and len(chosen.large()) > len(chosen.large(least)):
        with_all = judged_contrast(splits, chosen, name, sign)
        otherwise = judge(claim_id, with_all._replace(sequences=least)).verdict
        made = replace(
            made, note=f"with the tasks of {MINIMUM_GROUPS} to {least - 1} sequences: {with_all}, {otherwise}"
        )
    if chosen is not splits.by_similarity or made.interval is None:
        return made
    control = attempt(lambda: judged_contrast(splits, splits.by_entropy, name, sign, least))
    turned = control.high < 0 if made.verdict == HOLDS else control.low > 0 if made.verdict == FAILS else False
    return made.weighing(REVERSED, bool(turned))
