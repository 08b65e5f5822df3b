"""The effect of gates on finished traces, as tidy frames: sums at many thresholds, tokens at one, scores of outputs.

Teacher-forced: every token follows the model's own full-depth output, so an error does not change later tokens.
A threshold is chosen on the half "calibrate" of each task's groups and reported on "report". Which gates there are, and
how they are fitted, is in `eestudy.gates`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import takewhile

import numpy as np
import pandas as pd

from eelib.common.errors import InputError
from eelib.exits.cost import exit_costs, sizes_of
from eelib.models.model import Model
from eelib.tasks.classification import f1, matthews
from eelib.tasks.metrics import FromTotals, bleu_of_totals, mean_of
from eelib.tasks.task import Task, kind_named
from eelib.tracing.trace import Trace
from eestudy.exits.sweeps import Sweep
from eestudy.gates import FREE, GATES, halves, sweeps
from eestudy.study import Study

FORMS: tuple[FromTotals, ...] = (mean_of([]).from_totals, bleu_of_totals, f1, matthews)  # of the column `form`
WIDTH = 10  # numbers that the widest score, BLEU, needs of an output
SIDES = {side: [f"{side}_{at}" for at in range(WIDTH)] for side in ("early", "full")}
SUMS = ["outputs", "form", *SIDES["early"], *SIDES["full"]]
KEY = ["model", "task", "gate"]
WHERE = ["model", "task", "gate", "half", "threshold", "group"]
CURVES = [*WHERE, "tokens", "layers", "agreed", "sequences", "loss"]
EXITS = [*WHERE, "source", "sequence", "position", "token_id", "exit_layer", "optimal", "agrees", "cost"]
QUALITY = [*WHERE, "sequence", "layers", "tokens", *SUMS]
NAMES = {"model", "task", "gate", "half", "group", "source"}  # columns that hold text
Studies = Study | Sequence[Study]


# ---- the frames


def curves(studies: Studies, gates: Iterable[str] = GATES, thresholds: int | Sequence[float] = 60) -> pd.DataFrame:
    """Sums over the tokens of each group at many thresholds of each gate.

    Args:
        studies: one, or several.
        gates: of GATES and OUR_GATES. A gate for which a model has no file is left out, with a printed line.
        thresholds: their largest number in a task, in even steps of mean layers; or the thresholds themselves, rising.

    Returns:
        model, task, gate, half (calibrate or report), threshold, group; sums over the tokens that statistics count:
        tokens, layers (exit layers), agreed (full depth's token is emitted); sums over outputs: sequences, loss (share
        of an output's tokens, its end token included, that are not full depth's). FREE fits its threshold while
        decoding: its `threshold` is the layer of its one exit. If `thresholds` is a number, a threshold at which fewer
        layers run than at a lower one is left out, so that layers rise.
    """
    return _joined((one.curve(thresholds) for one in _each(studies, gates)), CURVES)


def exits(studies: Studies, chosen: pd.DataFrame) -> pd.DataFrame:
    """Every token that statistics count, at one threshold of each gate and task.

    Args:
        studies: one, or several.
        chosen: a row for each task, gate and threshold; for one model if there is a column `model`, else for each.
            A column `source` names the task that the threshold is from; without it, that is the task itself.

    Returns:
        model, task, gate, half, threshold, group, source, sequence, position, token_id (full depth's), exit_layer,
        optimal (the first layer that agrees), agrees (full depth's token is emitted), cost (floating-point operations,
        the gate's own included; a step at full depth without a gate is 1).

    Raises:
        InputError: a column of `chosen` is missing; a task is not in a study.
    """
    if missing := [name for name in ("task", "gate", "threshold") if name not in chosen]:
        raise InputError(f"chosen thresholds need a column {missing[0]}; there are {', '.join(map(str, chosen))}")
    frames = []
    for study in _several(studies):
        rows = chosen[chosen["model"] == study.model.name] if "model" in chosen else chosen
        if unknown := sorted(set(rows["task"]) - set(study.traces)):
            raise InputError(f"task {unknown[0]!r} is not in this study; there are {', '.join(study.traces)}")
        found = {(one.task, one.gate): one for one in _each(study, rows["gate"].unique())}
        for row in rows.to_dict("records"):
            if one := found.get((row["task"], row["gate"])):
                frames.append(one.tokens_at(row["threshold"]).assign(source=row.get("source", row["task"])))
    return _joined(frames, EXITS)


def quality(studies: Studies, gates: Iterable[str] = GATES, thresholds: int | Sequence[float] = 12) -> pd.DataFrame:
    """The numbers that give the task's first score, for each output, with early exits and at full depth.

    Args:
        studies: one, or several. Tasks in which a text has no reference are left out.
        gates: as in `curves`.
        thresholds: their largest number, in even steps of mean layers on the half "calibrate", the last one with no
            early exit there; or the thresholds themselves, rising.

    Returns:
        model, task, gate, half, threshold, group, sequence; sums over the tokens that statistics count: layers,
        tokens; the columns SUMS, from whose sums over outputs of one task `score` makes the score.
    """
    scored = (one for one in _each(studies, gates) if all(one.study.tasks[one.task].references))
    return _joined((one.quality(thresholds) for one in scored), QUALITY)


def calibrated(
    curves: pd.DataFrame, least: float, kept: Callable[[pd.DataFrame], np.ndarray] | None = None
) -> pd.DataFrame:
    """The lowest threshold from which on a share is at least `least` on the half "calibrate".

    Args:
        curves: as `curves` or `quality` returns them.
        least: the smallest share that is allowed.
        kept: the share, as a function of sums over all groups; None: the share of tokens that are full depth's.

    Returns:
        A row for each model, task and gate: these names, threshold, kept (the share) and the sums there; no row where
        no threshold reaches `least`.
    """
    half = curves[curves["half"] == "calibrate"].drop(columns=["half", "group"])
    sums = half.groupby([*KEY, "threshold"]).sum(numeric_only=True).reset_index()
    share = kept(sums) if kept else sums["agreed"] / sums["tokens"].clip(lower=1)
    sums = sums.assign(kept=share, enough=(share >= least).astype(int))
    steady = sums[::-1].groupby(KEY)["enough"].cummin()[::-1] == 1
    return sums[steady].groupby(KEY, as_index=False).first().drop(columns="enough")


def score(sums: pd.DataFrame, side: str = "early") -> np.ndarray:
    """The score (0-100) of summed outputs, [rows]; NaN without outputs.

    `sums`: the columns SUMS, each row a sum over outputs of one task; `side`: "early" exits or "full" depth.
    """
    values, outputs = sums[SIDES[side]].to_numpy(float), sums["outputs"].to_numpy(float)
    form = np.rint(sums["form"].to_numpy(float) / np.where(outputs > 0, outputs, np.nan))
    found = np.full(len(sums), np.nan)
    for number, of_totals in enumerate(FORMS):
        if (rows := form == number).any():
            found[rows] = of_totals(values[rows] if of_totals is bleu_of_totals else values[rows, :4])
    return found


def wide(curve: pd.DataFrame) -> pd.DataFrame:
    """The curve of one gate of one model as `interval_of` takes it: a row for each task and group.

    `curve`: rows of `curves` or of `quality`. Columns are (sum, point), of the sums that it has of tokens, layers,
    agreed and SUMS; in a task with fewer points the last point is repeated.
    """
    point = curve.groupby("task")["threshold"].rank(method="dense").astype(int)
    names = [name for name in ("tokens", "layers", "agreed", *SUMS) if name in curve]
    table = curve.assign(point=point).groupby(["task", "group", "point"])[names].sum().unstack("point")
    return pd.concat({name: table[name].ffill(axis=1) for name in names}, axis=1)


def agreement_at(totals: pd.DataFrame, at: Sequence[float] | np.ndarray) -> np.ndarray:
    """Agreement [rows, len(at)] where mean layers are `at`, linear between neighbouring points.

    `totals`: sums of `wide`, a row for each draw. NaN below a curve's first point. Points are sorted by mean layers,
    since FREE's need not rise with its threshold.
    """
    size = totals["tokens"].to_numpy(float)
    x, y = (totals[name].to_numpy(float) / size for name in ("layers", "agreed"))
    return between(x, y, at)


def between(x: np.ndarray, y: np.ndarray, at: Sequence[float] | np.ndarray) -> np.ndarray:
    """y [rows, len(at)] where x is `at`, of points [rows, points]."""
    order = np.argsort(x, axis=1, kind="stable")
    x, y = (np.take_along_axis(one, order, axis=1) for one in (x, y))
    return np.stack([np.interp(at, *points, left=np.nan) for points in zip(x, y)])


def score_at(totals: pd.DataFrame, at: Sequence[float] | np.ndarray) -> np.ndarray:
    """The score as a share of full depth's [rows, len(at)] where mean layers are `at`; see `agreement_at`.

    `totals`: sums of `wide`, made of rows of `quality`.
    """
    x = (totals["layers"] / totals["tokens"]).to_numpy(float)
    points = [totals.xs(point, axis=1, level=-1) for point in totals["tokens"].columns]
    with np.errstate(divide="ignore", invalid="ignore"):
        y = np.stack([score(point) / score(point, "full") for point in points], axis=1)
    return between(x, y, at)


# ---- one gate on one trace


class Scorer:
    """The numbers of outputs that give a task's first score; each output is decoded and scored once."""

    def __init__(self, task: Task, model: Model) -> None:
        self.task, self.model = task, model
        self.numbers: dict[tuple[int, bytes], np.ndarray] = {}
        self.form = 0  # index in FORMS; until an output is scored, of a mean

    def of(self, items: Sequence[int], outputs: Sequence[np.ndarray]) -> np.ndarray:
        """The numbers [n, WIDTH] of n items, from the token ids of their outputs."""
        keys = [(item, ids.tobytes()) for item, ids in zip(items, outputs)]
        if new := {key: self.text(ids.tolist()) for key, ids in zip(keys, outputs) if key not in self.numbers}:
            task = self.task.pick([item for item, _ in new])
            numbers, of_totals = next(iter(kind_named(task.kind).item_stats(task, list(new.values())).values()))
            self.form = FORMS.index(of_totals) if of_totals in FORMS else 0
            if not self.form:  # a mean over items
                numbers = np.column_stack([of_totals(numbers) / 100, np.ones(len(numbers))])
            self.numbers |= dict(zip(new, np.pad(numbers, ((0, 0), (0, WIDTH - numbers.shape[1])))))
        return np.stack([self.numbers[key] for key in keys])

    def text(self, ids: list[int]) -> str:
        """The text of token ids up to the first end token, or a classifier's label."""
        if self.model.labels:
            return self.model.labels[ids[0]]
        ends = self.model.eos_ids if self.model.adapter.writes else set()
        kept = list(takewhile(lambda token: token not in ends, ids))
        return str(self.model.tokenizer.decode(kept, clean_up_tokenization_spaces=False)) if kept else ""


@dataclass(frozen=True)
class Evaluated:
    """One gate on one trace of a study; `calibrates`: bool [tokens], the half "calibrate"."""

    study: Study
    task: str
    gate: str
    sweep: Sweep
    calibrates: np.ndarray

    @property
    def trace(self) -> Trace:
        return self.study.traces[self.task]

    @cached_property
    def outputs(self) -> pd.DataFrame:
        """A row for each output of the trace: model, task, gate, half, group, sequence."""
        about = {"model": self.study.model.name, "task": self.task, "gate": self.gate}
        tokens = self.trace.tokens.assign(**about, half=np.where(self.calibrates, "calibrate", "report"))
        return tokens.drop_duplicates("sequence")[["model", "task", "gate", "half", "group", "sequence"]]

    def at(
        self, thresholds: int | Sequence[float], rows: np.ndarray | None = None
    ) -> Iterator[tuple[float, np.ndarray, np.ndarray, np.ndarray]]:
        """(threshold, and [tokens]: exit layers, emitted tokens, costs) for each threshold, or, if `thresholds` is a
        number, for so many in even steps of mean layers over `rows` (bool [tokens]).

        Of so many, those at which fewer layers run than at a lower one are left out, but for FREE's: its thresholds are
        its exits, whose layers need not rise.
        """
        if is_number := isinstance(thresholds, (int, np.integer)):
            values = self.sweep.values(rows, int(thresholds))
        elif not (values := list(map(float, thresholds))):
            raise InputError("thresholds must be at least one, or their number")
        classifies = bool(self.study.model.labels)  # it reads the head once for a text
        positions = float(self.trace.sequences["prompt_tokens"].mean()) if classifies else 1.0
        sizes, emits = sizes_of(self.study.model, positions), self.sweep.tokens.numpy()
        counted, most = self.trace.statistic_rows(), 0
        for value, found in zip(values, self.sweep.exits(values)):
            layers, costs = found.numpy(), exit_costs(sizes, self.sweep.rule_at(value)) / sizes.full
            ran = int(layers[counted].sum())
            if is_number and self.gate != FREE and ran < most:
                continue
            most = max(most, ran)
            yield value, layers, emits[np.arange(len(emits)), layers - 1], costs[layers - 1]

    def curve(self, thresholds: int | Sequence[float]) -> pd.DataFrame:
        """One part of `curves`."""
        tokens, counted = self.trace.tokens, self.trace.statistic_rows()
        groups = self.outputs.drop_duplicates("group").drop(columns="sequence")
        group, output = (pd.factorize(tokens[name])[0] for name in ("group", "sequence"))
        owner = pd.Index(groups["group"]).get_indexer(self.outputs["group"])
        ended = counted | tokens["is_eos"].to_numpy()
        length = np.bincount(output[ended], minlength=len(owner)).clip(min=1)
        groups["tokens"], groups["sequences"] = np.bincount(group[counted], minlength=len(groups)), np.bincount(owner)
        parts = []
        for value, layers, emitted, _ in self.at(thresholds):
            agrees = emitted == tokens["token_id"].to_numpy()
            lost = np.bincount(output[ended], ~agrees[ended], len(owner)) / length
            each = {"layers": layers, "agreed": agrees}
            sums = {name: np.bincount(group[counted], of[counted], len(groups)) for name, of in each.items()}
            loss = np.bincount(owner, lost, len(groups))
            parts.append({"threshold": np.full(len(groups), value), **sums, "loss": loss})
        return _repeated(groups, parts)

    def tokens_at(self, threshold: float) -> pd.DataFrame:
        """One part of `exits`."""
        tokens, (found,) = self.trace.tokens[["sequence", "position", "token_id"]], self.at([threshold])
        value, layers, emitted, cost = found
        tokens = tokens.assign(threshold=value, exit_layer=layers, cost=cost, agrees=emitted == tokens["token_id"])
        tokens["optimal"] = self.trace.exit_layer("first")
        return tokens[self.trace.statistic_rows()].merge(self.outputs, on="sequence")

    def quality(self, thresholds: int | Sequence[float]) -> pd.DataFrame:
        """One part of `quality`."""
        tokens, counted, scorer = self.trace.tokens, self.trace.statistic_rows(), _scorer(self.study, self.task)
        starts, items = np.flatnonzero(~tokens["sequence"].duplicated()), self.outputs["sequence"].tolist()
        full = scorer.of(items, np.split(tokens["token_id"].to_numpy(np.int64), starts[1:]))
        about = {"tokens": np.add.reduceat(counted.astype(int), starts), "outputs": 1, "form": scorer.form}
        rows = self.outputs.assign(**about, **dict(zip(SIDES["full"], full.T)))
        parts = []
        for value, layers, emitted, _ in self.at(thresholds, self.calibrates):
            early = dict(zip(SIDES["early"], scorer.of(items, np.split(emitted, starts[1:])).T))
            ran = np.add.reduceat(layers * counted, starts)
            parts.append({"threshold": np.full(len(rows), value), "layers": ran, **early})
        return _repeated(rows, parts)


# ---- all of them


def _several(studies: Studies) -> Sequence[Study]:
    return studies if isinstance(studies, Sequence) else [studies]


def _repeated(rows: pd.DataFrame, parts: list[dict[str, np.ndarray]]) -> pd.DataFrame:
    """The rows once for each part, with the columns of that part; one frame for each would take far longer."""
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return pd.concat([rows] * len(parts), ignore_index=True).assign(**columns)


def _joined(frames: Iterable[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    if found := list(frames):
        return pd.concat(found, ignore_index=True)[columns]
    return pd.DataFrame({name: pd.Series(dtype=object if name in NAMES else float) for name in columns})


def _each(studies: Studies, gates: Iterable[str]) -> Iterator[Evaluated]:
    gates = list(gates)
    for study in _several(studies):
        for task, gate, sweep in sweeps(study, gates):
            yield Evaluated(study, task, gate, sweep, halves(study)[task])


@cache
def _scorer(study: Study, task: str) -> Scorer:
    return Scorer(study.tasks[task], study.model)
