"""Time saved beside layers saved, by the oracle that stops at each token's optimal exit layer (P §5, Table 5)."""

import numpy as np
import pandas as pd

from eestudy.claims import as_depth, published
from eestudy.exits.replay import load_replay
from eestudy.old.analysis.architectures import architecture, told
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.statistics.resampling import bootstrap_totals
from eestudy.old.study.results import Results
from eestudy.old.study.study import Study

Timings = dict[tuple[str, str], pd.DataFrame]  # {(model, task): `load_replay`}


def timings(studies: list[Study]) -> Timings:
    """The times of the learnt tasks (of all, if none is), where any were asked for.

    Nothing of a masked model: one pass reads all its positions, each with an exit layer of its own.
    """
    made = {}
    for study in studies:
        names = [n for n in study.traces if study.learnt[n]] or list(study.traces)
        for name in names if study.parameters.timed_sequences else ():
            made[study.model.name, name] = load_replay(study.traces[name])
    return {key: frame for key, frame in made.items() if len(frame)}


def speed(frame: pd.DataFrame, layers: int, seed: int = 0) -> dict[str, Interval]:
    """Ratios of sums over the sequences of `load_replay`, groups resampled together.

    time: full over oracle. whole: the same with encoder or prompt added to both. layers: L over the oracle's mean
    exit layer. fixed: the share of a full token's time that no exit saves, if each block takes the same time.
    """
    frame = frame.assign(depth=layers * frame["tokens"])
    sums = frame.groupby("group")[["full", "oracle", "before", "depth", "layers"]].sum().to_numpy(float)

    def fixed(t: np.ndarray) -> np.ndarray:
        return 1 - (1 - t[:, 1] / t[:, 0]) / (1 - t[:, 4] / t[:, 3])

    statistics_ = {
        "time": lambda t: t[:, 0] / t[:, 1],
        "whole": lambda t: (t[:, 0] + t[:, 2]) / (t[:, 1] + t[:, 2]),
        "layers": lambda t: t[:, 3] / t[:, 4],
    }
    found = {name: bootstrap_totals(statistic, sums, seed=seed) for name, statistic in statistics_.items()}
    saved = bool((frame["layers"] < frame["depth"]).any())
    return found | {"fixed": bootstrap_totals(fixed, sums, seed=seed) if saved else NOTHING}


def speed_rows(studies: list[Study], made: Timings, seed: int = 0) -> pd.DataFrame:
    """One row per timed model and task: architecture, model, task, learnt, L, sequences, tokens, the intervals of
    `speed`, milliseconds a token, mismatches, whether steps were cached (ideal) or there was one step only
    (one_pass), and where and when it was.
    """
    rows = []
    for study in studies:
        for name in study.traces:
            frame = made.get((study.model.name, name))
            if frame is None:
                continue
            tokens = int(frame["tokens"].sum())
            rows.append(
                {
                    "architecture": architecture(study.model),
                    "model": study.model.name,
                    "task": name,
                    "learnt": study.learnt[name],
                    "L": study.model.layers,
                    "sequences": len(frame),
                    "tokens": tokens,
                    **speed(frame, study.model.layers, seed),
                    "full_ms": 1000 * frame["full"].sum() / tokens,
                    "oracle_ms": 1000 * frame["oracle"].sum() / tokens,
                    "mismatches": int(frame["mismatches"].sum()),
                    "ideal": bool(frame["ideal"].all()),
                    "one_pass": study.model.kind == "classifier",
                    **frame.attrs,
                }
            )
    return pd.DataFrame(rows)


def keep(results: Results, rows: pd.DataFrame) -> None:
    """Put the figures of `speed_rows` into a notebook's results, under "model task"."""
    names = ("time", "whole", "fixed", "full_ms", "oracle_ms", "mismatches", "machine", "date", "layers", "tokens")
    for row in rows.to_dict("records"):
        results.put_all(f"{row['model']} {row['task']}", {f"timed_{name}": row[name] for name in names})


def published_speeds() -> pd.DataFrame:
    """P's Table 5, and L / avg of its Table 4 with avg counted from 1 (`highest`) and from 0 (`lowest`)."""
    exits, table = published("P-table-4"), published("P-table-5")
    base, avg = exits.attrs["columns"]["avg"]["layer_base"], dict(zip(exits["row"], exits["avg"]))
    bounds = [[row["layers"] / depth for depth in as_depth(avg[row["row"]], base)] for row in table.to_dict("records")]
    return table.assign(highest=[max(b) for b in bounds], lowest=[min(b) for b in bounds])


def time_in_words(studies: list[Study], made: Timings, seed: int = 0) -> str:
    """Time beside layers, a clause per model, all of its timed tasks taken together."""
    said = []
    for study in studies:
        name = study.model.name
        parts = [frame.assign(group=f"{task} " + frame["group"]) for (m, task), frame in made.items() if m == name]
        if study.model.kind == "masked":
            said.append(
                f"{name} is not timed, since one pass reads all positions of a text, each with an exit layer of its own"
            )
        elif parts:
            found = speed(pd.concat(parts), study.model.layers, seed)
            name += "" if any(study.learnt.values()) else ", which has learnt nothing,"
            said.append(
                f"{name} is {told(found['time'], ' times as fast', 2)}, where its layers alone would "
                f"allow {found['layers'].estimate:.2f}"
            )
    return f"With the oracle, {'; '.join(said)}." if said else "Nothing was timed in this run."


def measured_on(rows: pd.DataFrame) -> str:
    """Machine, threads and dates of `speed_rows`, for captions; empty where nothing was timed."""
    if not len(rows):
        return ""
    machines = {f"{r['machine']}, threads: {r['threads']}, {r['date']}" for r in rows.to_dict("records")}
    return f"; timed on {', '.join(sorted(machines))}"


def beyond_layers(printed: pd.DataFrame) -> str:
    """P's cells that save more time than layers, in words."""
    cells = [
        f"{row['model']} on {row['task']} is {row['speed_up']:.2f} times as fast, although L / avg allows no more than "
        f"{row['highest']:.2f} ({row['lowest']:.2f} counted from 0)"
        for row in printed.to_dict("records")
        if row["speed_up"] > row["highest"]
    ]
    if not cells:
        return "No cell of P saves more time than layers."
    return f"In the tables of P, {'; '.join(cells)}, if a speed-up is total time over total time."
