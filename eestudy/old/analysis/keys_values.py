"""Decoding that leaves early and goes on from what it left behind, held against full decoding (P §6, Tables 6 and 11).

P lets each token leave at its best layer, the first that says what the last one says, and asks what the keys and values
do that later tokens find at the layers it skipped. Beside the best layer stands a gate that has to decide, and beside
copying and projecting the two policies under which nothing is missing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd
from transformers.utils import logging as transformers_logging

from eelib.common.errors import InputError, NotEstimable
from eelib.exits.decoding.gate_runner import FULL_DEPTH_TOKENS
from eelib.exits.decoding.generate import generate
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.models.model import Model, load_model
from eestudy.claims import Verdict
from eestudy.exits.task_quality import grouped, item_stats
from eestudy.old.analysis.length import position_bins
from eestudy.old.analysis.slopes import equal_count_bins, mean_over_tasks, slope_inside
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.resampling import bootstrap_unweighted_totals_over_tasks
from eestudy.old.statistics.stats import (
    bootstrap_unweighted_difference_over_tasks,
    bootstrap_unweighted_mean_over_tasks,
)
from eestudy.old.study.comparison import check_pairs
from eestudy.old.study.of_study import OfStudy
from eestudy.old.study.study import MINIMUM_GROUPS, Study, Values, large_enough
from eestudy.parameters import Parameters, as_parameter_error

ORACLE, GATE = "best layer", "gate"
LONGEST_PIECE, TIMES = 10, 3  # a loop: a piece of at most so many tokens, said at least so often on end
TOGETHER = 32  # sequences in a batch where the page leaves it to us
LEAST = 5  # groups behind a mean by position
STEPS = (0, 4, 8, 16, 32, 64, 128, 256, 512)  # first positions of the bins; none of the first bin left early


@dataclass(frozen=True)
class Way:
    """Who says when to leave (ORACLE or GATE), and what later tokens find at the layers that were skipped."""

    who: str
    keys: str

    @property
    def label(self) -> str:
        """As tables and figures name it."""
        return f"{self.who}, {self.keys}"


COPY, PROJECT = Way(ORACLE, "copy"), Way(ORACLE, "project")  # P's -d and -c
GATED = tuple(Way(GATE, keys) for keys in ("copy", "project", "deferred", "verified"))
CLEAN = Way(GATE, "deferred")  # nothing is missing: where it parts from full decoding, the gate is to blame
WAYS = (COPY, PROJECT, *GATED)


# ---- the models of a page


@dataclass(frozen=True)
class Side(OfStudy):
    """A model with its traces, and what each way of leaving made of the first `sequences` outputs of each task.

    tokens: {way: {task: frame}} with sequence, group, position, token_id, text, exit_layer, layers_run.
    outputs: {way: {task: texts}}. full: {task: frame} of full decoding, with sequence, group, position, token_id and
    truncated (whether the output was cut at the limit).
    """

    full: dict[str, pd.DataFrame]
    tokens: dict[Way, dict[str, pd.DataFrame]]
    outputs: dict[Way, dict[str, list[str]]]

    @cached_property
    def learnt(self) -> list[str]:
        """The learnt tasks, small ones only where all are small; claims and averages are over these."""
        found = {task: (frame, frame["group"]) for task, frame in self.full.items() if self.study.learnt[task]}
        return list(large_enough(found))

    @cached_property
    def beside(self) -> dict[Way, dict[str, pd.DataFrame]]:
        """`held_against` of each way and learnt task."""
        return {
            way: {task: held_against(self.full[task], frames[task]) for task in self.learnt}
            for way, frames in self.tokens.items()
        }

    def of_tokens(self, way: Way, column: str, where: str = "") -> dict[str, Values]:
        """{task: (a column of `beside`, groups)}, of the rows where the column `where` is true."""
        found = {task: frame[frame[where]] if where else frame for task, frame in self.beside[way].items()}
        return {t: (f[column].to_numpy(float), f["group"].to_numpy()) for t, f in found.items() if len(f)}

    def of_outputs(self, way: Way | None, value: Callable[[np.ndarray], float]) -> dict[str, Values]:
        """{task: (value(token ids) of each output, groups)}; of full decoding for None."""
        return {task: of_outputs((self.tokens[way] if way else self.full)[task], value) for task in self.learnt}


def open_sides(p: Parameters) -> list[Side]:
    """The page's own model and, where one is named, the one trained further; both traced, and decoded in every way.

    ParameterError for two of different architectures, one that writes nothing, and a gate that is not there.
    """
    if p.after.strip():
        check_pairs("after", [(p.model, p.after)])
    with as_parameter_error():
        return [open_side(p, name) for name in (p.model, p.after) if name.strip()]


def open_side(p: Parameters, name: str) -> Side:
    """One model. InputError for one that writes nothing."""
    rule = ExitRule(gate_named(p.gate), p.threshold, full_depth_tokens=FULL_DEPTH_TOKENS)
    model = writing_model(p, name)
    study = Study(p, model=name, loaded=model)
    numbers = {task: made.sequences["sequence"].tolist()[: p.sequences] for task, made in study.traces.items()}
    full = {
        task: made.tokens.loc[
            made.tokens["sequence"].isin(numbers[task]), ["sequence", "group", "position", "token_id", "truncated"]
        ].reset_index(drop=True)
        for task, made in study.traces.items()
    }
    tokens: dict[Way, dict[str, pd.DataFrame]] = {way: {} for way in WAYS}
    outputs: dict[Way, dict[str, list[str]]] = {way: {} for way in WAYS}
    for task, chosen in numbers.items():
        asked = study.tasks[task].pick(chosen)
        groups = dict(zip(chosen, asked.groups))
        for way in WAYS:
            made = generate(
                model,
                asked,
                gate="oracle" if way.who == ORACLE else rule,
                kv_policy=way.keys,
                batch_size=p.batch_size or TOGETHER,
                max_new_tokens=p.max_new_tokens,
                batch_split=None,
                always_draft=True,
            )
            frame = made.tokens.assign(sequence=made.tokens["sequence"].map(dict(enumerate(chosen))))
            tokens[way][task] = frame.assign(group=frame["sequence"].map(groups))
            outputs[way][task] = made.sequences["output"].tolist()
    return Side(study, full, tokens, outputs)


def writing_model(p: Parameters, name: str) -> Model:
    """A model as the page asks for it, without bars, which litter it. InputError for one that writes nothing."""
    transformers_logging.disable_progress_bar()
    model = load_model(name, dtype=p.dtype, device=p.device)
    if not model.adapter.writes:
        raise InputError(f"{name} writes no text; this page needs a causal or an encoder-decoder model")
    return model


# ---- one output against another


def held_against(full: pd.DataFrame, early: pd.DataFrame) -> pd.DataFrame:
    """The tokens of full decoding, with: agrees (the early output has the same token at the same position), exit_layer
    of that position (NaN beyond its end), first (agrees with all before: it could be the first to differ), length.
    """
    at = early.set_index(["sequence", "position"])[["token_id", "exit_layer"]].add_suffix("_early")
    both = full.join(at, on=["sequence", "position"])
    agrees = both["token_id"] == both["token_id_early"]
    differing = (~agrees).groupby(both["sequence"]).cumsum() - ~agrees  # before this token
    return full.assign(
        agrees=agrees,
        exit_layer=both["exit_layer_early"],
        first=differing == 0,
        length=full.groupby("sequence")["position"].transform("size"),
    )


def first_differences(beside: pd.DataFrame) -> pd.Series:
    """Position of each sequence's first token that differs, infinite where none does; of a frame of `held_against`."""
    where = beside["position"].where(~beside["agrees"], np.inf)
    return where.groupby(beside["sequence"]).min()


def causes(run: pd.DataFrame, clean: pd.DataFrame) -> pd.Series:
    """Who made each output differ: "gate" where the gate under true keys and values parted no later, else "keys".

    "" where nothing differs. Both are frames of `held_against`.
    """
    at, gate = first_differences(run), first_differences(clean)
    found = pd.Series(np.where(gate <= at, "gate", "keys"), index=at.index)
    return found.where(np.isfinite(at), "")


def has_loop(ids: np.ndarray) -> bool:
    """Whether a piece of 1 to LONGEST_PIECE tokens is said at least TIMES times on end (a single token once more)."""
    for length in range(1, LONGEST_PIECE + 1):
        same = ids[length:] == ids[:-length]
        ends = np.flatnonzero(~np.concatenate([[False], same, [False]]))
        if np.diff(ends).max(initial=1) - 1 >= (TIMES if length == 1 else (TIMES - 1) * length):
            return True
    return False


def of_outputs(tokens: pd.DataFrame, value: Callable[[np.ndarray], float]) -> Values:
    """(value(token ids), group) of each output."""
    found = tokens.groupby("sequence").agg(
        value=("token_id", lambda ids: float(value(ids.to_numpy()))), group=("group", "first")
    )
    return found["value"].to_numpy(), found["group"].to_numpy()


# ---- figures of a way


def agreement(side: Side, way: Way) -> Interval:
    """Share of full decoding's tokens that the early output has at their place; unweighted mean over learnt tasks."""
    return bootstrap_unweighted_mean_over_tasks(side.of_tokens(way, "agrees"), seed=side.seed)


def agreement_difference(side: Side, a: Way, b: Way) -> Interval:
    """The same of a less that of b, paired by group."""
    return bootstrap_unweighted_difference_over_tasks(
        side.of_tokens(a, "agrees"), side.of_tokens(b, "agrees"), seed=side.seed
    )


def unchanged(side: Side, way: Way) -> Interval:
    """Share of outputs that are full decoding's, token by token."""
    values = {}
    for task, frame in side.beside[way].items():
        whole = frame.groupby("sequence").agg({"agrees": "all", "group": "first"})
        values[task] = (whole["agrees"].to_numpy(float), whole["group"].to_numpy())
    return bootstrap_unweighted_mean_over_tasks(values, seed=side.seed)


def exit_depth(side: Side, way: Way) -> Interval:
    """Mean exit layer / L of the tokens that may leave early, those after the first four."""
    values = {}
    for task in side.learnt:
        frame = side.tokens[way][task]
        frame = frame[frame["position"] >= FULL_DEPTH_TOKENS]
        values[task] = (frame["exit_layer"].to_numpy(float) / side.depth, frame["group"].to_numpy())
    return bootstrap_unweighted_mean_over_tasks({t: pair for t, pair in values.items() if len(pair[0])}, seed=side.seed)


def loops(side: Side, way: Way | None) -> Interval:
    """Share of outputs with a loop; of full decoding for None."""
    return bootstrap_unweighted_mean_over_tasks(side.of_outputs(way, has_loop), seed=side.seed)


def more_loops(side: Side, way: Way) -> Interval:
    """Share of outputs with a loop, less that of full decoding, paired (P-K3)."""
    return bootstrap_unweighted_difference_over_tasks(
        side.of_outputs(way, has_loop), side.of_outputs(None, has_loop), seed=side.seed
    )


def length_slope(side: Side, way: Way) -> Interval:
    """Slope of an output's agreement on the length of full decoding's, per token; mean over learnt tasks (P-K1).

    Outputs that were cut at the limit have no length of their own, and are left out.
    """
    tasks = {}
    for task, frame in side.beside[way].items():
        frame = frame[~frame["truncated"].astype(bool)]
        means = frame.groupby("sequence").agg({"agrees": "mean", "length": "first", "group": "first"})
        if means["length"].nunique() > 1:
            tasks[task] = slope_inside(means["length"], means["agrees"], means["group"], cells=0)
    return mean_over_tasks(tasks, side.seed, MINIMUM_GROUPS)


def blamed(side: Side, way: Way, who: str) -> Interval:
    """Share of outputs whose first difference is due to `who`: "gate" or "keys"; the best layer never errs itself."""
    values = {}
    for task, frame in side.beside[way].items():
        groups = frame.groupby("sequence")["group"].first()
        found = causes(frame, side.beside[CLEAN][task]) if way.who == GATE else causes_of_keys(frame)
        values[task] = ((found == who).to_numpy(float), groups.to_numpy())
    return bootstrap_unweighted_mean_over_tasks(values, seed=side.seed)


def causes_of_keys(run: pd.DataFrame) -> pd.Series:
    """`causes` where only keys and values can be to blame."""
    return pd.Series(np.where(np.isfinite(first_differences(run)), "keys", ""))


def quality_change(side: Side, way: Way, half: int | None = None) -> Interval:
    """Score of the early outputs less that of full decoding's, in points of each task's first score, paired.

    Unweighted mean over learnt tasks. half: only the outputs in the shorter (0) or longer (1) half of full decoding's
    lengths, those left out that were cut at the limit.
    """
    parts = {}
    for task in side.learnt:
        outputs = side.full[task].groupby("sequence")
        sizes, rows = outputs["position"].size(), np.arange(outputs.ngroups)
        if half is not None:
            rows = np.flatnonzero(~outputs["truncated"].first().to_numpy(bool))
            rows = rows[equal_count_bins(sizes.iloc[rows], 2) == half]
        if not len(rows):
            continue
        asked = side.study.tasks[task].pick([int(sizes.index[row]) for row in rows])
        trace = side.study.traces[task].sequences.set_index("sequence")["output"]
        before = item_stats(asked, [trace[sizes.index[row]] for row in rows])
        after = item_stats(asked, [side.outputs[way][task][row] for row in rows])
        if not before:
            continue
        (old, score), (new, _) = next(iter(before.values())), next(iter(after.values()))

        def gain(totals: np.ndarray, score: Callable = score) -> np.ndarray:
            late, early = np.hsplit(totals, 2)
            return score(early) - score(late)

        parts[task] = (gain, grouped(np.hstack([old, new]), asked.groups))
    if not parts:
        raise NotEstimable("no learnt task has references")
    return bootstrap_unweighted_totals_over_tasks(parts, seed=side.seed)


def by_position(side: Side, ways: Sequence[Way], column: str = "agrees", where: str = "") -> pd.DataFrame:
    """Mean of a column of `held_against` by bins of position: columns way, bin, estimate, low, high, sequences.

    A bin in which a task has fewer than LEAST groups is of the other tasks.
    """
    rows = []
    for way in ways:
        binned: dict[int, dict[str, Values]] = {}
        for task, frame in side.beside[way].items():
            frame = frame[frame[where]] if where else frame
            for number, part in frame.groupby(position_bins(frame["position"], STEPS)):
                binned.setdefault(int(number), {})[task] = (part[column].to_numpy(float), part["group"].to_numpy())
        for number, values in sorted(binned.items()):
            values = {task: pair for task, pair in values.items() if len(set(pair[1])) >= LEAST}
            if values:
                found = bootstrap_unweighted_mean_over_tasks(values, seed=side.seed)
                rows.append({"way": way.label, "bin": number, **found._asdict()})
    return pd.DataFrame(rows, columns=["way", "bin", *Interval._fields])


# ---- verdicts


def verdicts(sides: Sequence[Side]) -> list[Verdict]:
    """Verdicts on P-K1 to P-K3, on the model trained further where there is one: P's section is about that."""
    side, own = sides[-1], sides[0]
    trained = side.study.model.hash != own.study.model.hash
    made: Mapping[str, Callable[[], Interval]] = {
        "P-K1": lambda: length_slope(side, COPY),
        "P-K2": lambda: agreement_difference(side, PROJECT, COPY),
        "P-K3": lambda: more_loops(side, COPY),
    }
    return [
        replace(side.study.judge(name, make, requirement_met=trained), models=side.name if side is not own else "")
        for name, make in made.items()
    ]
