"""Plots and tables of the section on architectures."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import PercentFormatter

from eelib.tracing.trace import DEFINITIONS
from eestudy.claims import as_depth, published
from eestudy.old.analysis.architectures import ARCHITECTURES, BOTH, DECODER, ENCODER, of, where
from eestudy.old.figures.marks import name_points
from eestudy.old.figures.style import BLUE, GREEN, MARKERS, NOT_LEARNT, VERMILION, WIDTH, table
from eestudy.old.statistics.interval import Interval
from eestudy.old.study.study import Study

COLOURS = {DECODER: BLUE, BOTH: VERMILION, ENCODER: GREEN}
LINES = ("-", "--", ":", "-.")
# What the page is about comes first: a reader sees the left of a wide table.
EXIT_COLUMNS = [
    "model",
    "task",
    "learnt",
    "exit layer",
    "avg",
    "perc (%)",
    "quality",
    "by chance (%)",
    "above chance (points)",
    "avg / L",
    "L",
    "baseline",
    "sequences",
    "tokens",
    "cut",
]


def depth_figure(curves: pd.DataFrame) -> plt.Figure:
    """Share of tokens that could have left by relative depth; a panel per definition, a curve with its band per model.

    `curves`: `architectures.depth_curves`. Colours tell architectures apart, marks all models; those that have learnt
    none of their tasks are grey.
    """
    fig, axes = plt.subplots(1, len(DEFINITIONS), figsize=(7.6, 4.4), sharey=True, layout="constrained")
    for axis, definition in zip(axes, DEFINITIONS):
        panel = curves[curves["definition"] == definition]
        for number, (kind, model, curve) in enumerate(by_model(panel)):
            learnt = curve["learnt"].all()
            colour, marker = look(kind, number, learnt)
            axis.fill_between(curve["depth"], curve["low"], curve["high"], color=colour, alpha=0.12, linewidth=0)
            axis.plot(
                curve["depth"],
                curve["estimate"],
                color=colour,
                marker=marker,
                linestyle=LINES[number % 4],
                linewidth=1.8 if learnt else 1.2,
                markersize=4 if learnt else 5,
                zorder=2 if learnt else 1.9,
                label=f"{model} ({kind})" + ("" if learnt else ", nothing learnt"),
            )
        axis.set(xlabel="blocks run, as a share of the depth, l / L", title=f'"{definition}"', xlim=(0, 1), ylim=(0, 1))
        axis.set_xticks(np.linspace(0, 1, 5))
        axis.xaxis.set_major_formatter(PercentFormatter(1.0))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes[0].set_ylabel("tokens (or texts) with exit layer ≤ l")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


def by_model(table: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """(architecture, model, its rows), architecture by architecture."""
    return [
        (kind, str(model), rows)
        for kind in (ARCHITECTURES if len(table) else ())
        for model, rows in table[table["architecture"] == kind].groupby("model", sort=False)
    ]


def look(kind: str, number: int, learnt: bool) -> tuple[str, str]:
    """Colour of an architecture and marker of the model `number`, or of its tasks that it has or has not learnt."""
    grey, crosses = NOT_LEARNT
    return (COLOURS[kind], MARKERS[number % len(MARKERS)]) if learnt else (grey, crosses[number % len(crosses)])


def speed_figure(rows: pd.DataFrame, printed: pd.DataFrame) -> plt.Figure:
    """Time saved against layers saved: a mark with intervals per model and task, grey crosses where the task is not
    learnt, P's cells hollow, a line where both are the same.

    `rows`: `speedup.speed_rows`; `printed`: `speedup.published_speeds`, whose horizontal bars run between
    both readings of the layers.
    """
    fig, axis = plt.subplots(figsize=(WIDTH, 4.6), layout="constrained")
    for number, (model, cells) in enumerate(printed.groupby("model", sort=False)):
        marks = axis.errorbar(
            cells["highest"],
            cells["speed_up"],
            xerr=[cells["highest"] - cells["lowest"], 0 * cells["highest"]],
            ecolor="#bbbbbb",
            elinewidth=1,
            linestyle="",
            marker="so"[number % 2],
            markersize=6,
            markerfacecolor="none",
            markeredgecolor="#777777",
            label=f"P, Table 5: {model}",
        )
        name_points(marks, cells["task"])
    for number, (kind, model, cells) in enumerate(by_model(rows)):
        for learnt, some in cells.groupby("learnt", sort=False):
            colour, marker = look(kind, number, bool(learnt))
            marks = axis.errorbar(
                [interval.estimate for interval in some["layers"]],
                [interval.estimate for interval in some["time"]],
                xerr=np.hstack([sides(interval) for interval in some["layers"]]),
                yerr=np.hstack([sides(interval) for interval in some["time"]]),
                color=colour,
                marker=marker,
                markersize=6,
                elinewidth=1.1,
                linestyle="",
                label=f"{model} ({kind})" + ("" if learnt else ", not learnt"),
            )
            name_points(marks, some["task"])
    top = max([*printed["highest"], *printed["speed_up"], *(row.high for row in rows.get("layers", []))]) * 1.05
    axis.plot([1, top], [1, top], color="#444444", linewidth=1, linestyle="--", label="time saved as layers are")
    axis.axhline(1, color="#444444", linewidth=0.8)
    axis.set(
        xlabel="layers: L / mean exit layer of the oracle",
        ylabel="time: full run / oracle",
        xscale="log",
        yscale="log",
        xlim=(0.95, top),
    )
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_locator(plt.FixedLocator([0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12]))
        ticks.set_major_formatter("{x:g}")
        ticks.set_minor_locator(plt.NullLocator())
    fig.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


def sides(interval: Interval) -> np.ndarray:
    """Lengths of an interval's arms, [2, 1]."""
    return np.array([[interval.estimate - interval.low], [interval.high - interval.estimate]])


def show_exits(studies: list[Study], rows: pd.DataFrame, kind: str, caption: str, of_p: str = "") -> None:
    """P's table `of_p`, if any, then this run's models of one architecture; nothing where there is no row."""
    printed = printed_exits(published(of_p)) if of_p else []
    shown = exit_table(printed, rows[rows["architecture"] == kind])
    if len(shown):
        table(shown, f"{caption} {where(of(studies, kind))}.")


def exit_table(printed: list[dict], rows: pd.DataFrame) -> pd.DataFrame:
    """P's rows, then each model and task of `architectures.task_rows` twice, once for each definition."""
    shown = list(printed)
    for row in rows.to_dict("records"):
        for definition in DEFINITIONS:
            first, avg = definition == "first", row[f"avg {definition}"]
            shown.append(
                {
                    "model": row["model"],
                    "task": short(row["task"]),
                    "quality": scores(row["quality"]),
                    "baseline": scores(row["baseline"]),
                    "learnt": "yes" if row["learnt"] else "not learnt",
                    "L": row["layers"],
                    "exit layer": definition,
                    "avg": str(avg),
                    "avg / L": f"{avg.estimate / row['layers']:.2f}" if avg.known else "–",
                    "perc (%)": str(row[f"perc {definition}"].percent),
                    "by chance (%)": f"{100 * row['perc chance']:.1f}" if first and row["tokens"] else "–",
                    "above chance (points)": str(row["above chance"].percent) if first else "–",
                    "sequences": row["sequences"],
                    "tokens": row["tokens"],
                    "cut": row["cut"],
                }
            )
    return pd.DataFrame(shown, columns=EXIT_COLUMNS)


def printed_row(model: str, task: str, quality: str, row: dict, base: int | str) -> dict:
    """A row of P's Tables 3 or 4 for `exit_table`; avg / L under both readings where the layer base is unknown."""
    depths = " or ".join(f"{depth / row['layers']:.2f}" for depth in as_depth(row["avg"], base))
    return {
        "model": model,
        "task": task,
        "quality": quality,
        "baseline": "–",
        "learnt": "–",
        "L": row["layers"],
        "exit layer": "as printed",
        "avg": f"{row['avg']:.2f}",
        "avg / L": depths,
        "perc (%)": f"{row['perc']:.2f}",
        "by chance (%)": "–",
        "above chance (points)": "–",
        "sequences": "–",
        "tokens": "–",
        "cut": "–",
    }


def printed_exits(printed: pd.DataFrame) -> list[dict]:
    """Rows of P's Table 3 or Table 4, as `claims.published` gives them, for `exit_table`."""
    base, shown = printed.attrs["columns"]["avg"]["layer_base"], []
    for row in printed.to_dict("records"):
        if "bleu" in row:
            shown.append(
                printed_row(
                    "P: Transformer-base",
                    f"{row['task']}, {row['direction']}",
                    f"BLEU {row['bleu']:.2f}, COMET {row['comet']:.2f}",
                    row,
                    base,
                )
            )
        else:
            values = [v for v in (row["quality"], row["accuracy"]) if v is not None and np.isfinite(v)]
            names = row["metric"].split(", ")
            shown.append(
                printed_row(
                    f"P: {row['model']}",
                    row["task"],
                    ", ".join(f"{n} {v:.2f}" for n, v in zip(names, values)),
                    row,
                    base,
                )
            )
    return shown


def speed_table(printed: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """P's Table 5, then this run's times: `speedup.published_speeds` and `speedup.speed_rows`."""
    shown = [
        {
            "model": f"P: {row['model']}",
            "task": row["task"],
            "L": row["layers"],
            "layers: L / avg": f"{row['highest']:.2f} or {row['lowest']:.2f}",
            "time: full / oracle": f"{row['speed_up']:.2f}",
        }
        for row in printed.to_dict("records")
    ]
    shown += [
        {
            "model": row["model"],
            "task": short(row["task"]) + ("" if row["learnt"] else " (not learnt)"),
            "L": row["L"],
            "layers: L / avg": str(row["layers"]),
            "time: full / oracle": str(row["time"]),
            "whole request": str(row["whole"]),
            "ms a token, full": f"{row['full_ms']:.2f}",
            "ms a token, oracle": f"{row['oracle_ms']:.2f}",
            "time that stays (%)": str(row["fixed"].percent),
            "sequences": str(row["sequences"]),
            "tokens": str(row["tokens"]),
            "wrong": str(row["mismatches"]),
            "earlier tokens": "from the cache" if row["ideal"] else "none" if row["one_pass"] else "run again",
        }
        for row in rows.to_dict("records")
    ]
    return pd.DataFrame(shown).astype(object).fillna("–")


def short(task: str) -> str:
    """A task's name without its kind or folder."""
    return task.rpartition("/")[2]


def scores(values: dict[str, float]) -> str:
    """'BLEU 24.1, chrF 50.2', or a dash."""
    return ", ".join(f"{name} {value:.1f}" for name, value in values.items()) or "–"
