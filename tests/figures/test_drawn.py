"""The data of a figure, read from the figure itself: one named row per mark, no two series under one name."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.ticker import PercentFormatter

from eestudy.old.figures.drawn import drawn

BLUE, RED = "#0072B2", "#D55E00"


def made(draw, columns=1, **more):
    fig, axes = plt.subplots(1, columns, squeeze=False, **more)
    draw(*axes[0])
    return drawn(fig)


def test_a_line_has_the_limits_of_its_band_also_where_another_line_has_its_colour():
    def draw(axis):
        for label, shift, style in (("a", 0, "-"), ("b", 10, "--")):
            axis.fill_between([1, 2, 2], [shift, 1, 2], [shift + 4, 5, 6], color=BLUE, alpha=0.2)
            axis.plot([1, 2, 2], [shift + 2, 3, 4], style, color=BLUE, label=label)
        axis.set(xlabel="layer", ylabel="share of\ntokens")
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.axhline(7)
        axis.plot([0, 1], [0, 1], color="black", linestyle=":")  # these two only guide the eye
        axis.axvline(1.5, label="first exit")

    rows = made(draw)
    assert set(rows["x axis"]) == {"layer"} and set(rows["y axis"]) == {"share of tokens (1 = 100%)"}
    found = rows.set_index("series")[["kind", "x", "y low", "y", "y high"]]
    assert found.loc["a"].values.tolist() == [["line", 1, 0, 2, 4], ["line", 2, 1, 3, 5], ["line", 2, 2, 4, 6]]
    assert found.loc["b"].values.tolist() == [["line", 1, 10, 12, 14], ["line", 2, 1, 3, 5], ["line", 2, 2, 4, 6]]
    assert found.loc["first exit", ["kind", "x"]].tolist() == ["level", 1.5] and len(rows) == 7


def test_a_band_with_a_name_is_a_series_of_its_own():
    def draw(axis):
        axis.fill_between([1, 2], [0, 1], [4, 5], color=BLUE, label="one deviation")
        axis.plot([1, 2], [2, 3], color=BLUE, label="mean")

    rows = made(draw)
    assert rows["series"].tolist() == ["one deviation"] * 2 + ["mean"] * 2
    assert rows["y high"].tolist()[:2] == [4, 5] and rows["y high"].isna().tolist() == [False, False, True, True]


def test_bars_stand_at_their_ends_with_their_intervals():
    def draw(left, right):
        left.bar([1, 2], [3, 4], 0.4, yerr=[[1, 1], [2, 3]], label="a")
        left.bar([1.5, 2.5], [5, 6], 0.4, label="b")
        right.barh([0, 1], [3, -1], height=0.5, label="c")
        right.set(yticks=[0, 1], yticklabels=["de", "en"], xlabel="times as fast")

    rows = made(draw, 2)
    left, right = rows[rows["panel"] == "1"], rows[rows["panel"] == "2"]
    assert left[["series", "x", "y"]].values.tolist() == [["a", 1, 3], ["a", 2, 4], ["b", 1.5, 5], ["b", 2.5, 6]]
    assert left[["y low", "y high"]].values.tolist()[:2] == [[2, 5], [3, 7]] and left["y low"].isna().sum() == 2
    assert right[["series", "kind", "x", "y", "y name"]].values.tolist() == [
        ["c", "bar", 3, 0, "de"],
        ["c", "bar", -1, 1, "en"],
    ]


def test_points_have_both_intervals_and_the_names_of_their_rows():
    def draw(axis):
        for y, shift in ((0, -0.2), (1, 0.2)):  # two series beside their row, drawn as a line and a mark
            axis.plot([1, 3], [y + shift] * 2, color=RED)
            axis.plot(2, y + shift, "o", color=RED, label="drawn by hand")
        marks = axis.errorbar([5.0, 6], [0.0, 1], xerr=[[1, 1], [2, 2]], yerr=0.25, fmt="s", color=BLUE, capsize=3)
        marks.set_label("bars")
        axis.scatter([7], [1], color=RED, label="cloud")
        axis.plot(np.nan, 0, "o", color=RED, label="unknown")
        axis.set_yticks([0, 1], ["easy", "hard"])

    rows = made(draw)
    ends = ["x low", "x", "x high"]
    by_hand, bars = rows[rows["series"] == "drawn by hand"], rows[rows["series"] == "bars"]
    assert by_hand[[*ends, "y name"]].values.tolist() == [[1, 2, 3, "easy"], [1, 2, 3, "hard"]]
    assert bars[ends].values.tolist() == [[4, 5, 7], [5, 6, 8]]
    assert bars[["y low", "y high"]].values.tolist() == [[-0.25, 0.25], [0.75, 1.25]]
    assert rows["series"].tolist().count("cloud") == 1 and len(rows) == 5


def test_marks_that_a_legend_names_by_their_look_alone():
    def draw(axis):
        for fill, x in (("white", 1), (RED, 2)):
            axis.plot(x, 0, "o", color=RED, markerfacecolor=fill)
        handles = [
            plt.Line2D([], [], marker="o", color=RED, markerfacecolor=fill, linestyle="", label=label)
            for fill, label in (("white", "open"), (RED, "filled"))
        ]
        axis.figure.legend(handles=handles)

    assert made(draw)[["series", "x"]].values.tolist() == [["open", 1], ["filled", 2]]


def test_cells_of_heat_maps_have_a_quantity_and_the_names_of_their_row_and_column():
    def draw(left, right):
        values = np.array([[1.0, np.nan], [3.0, 4.0]])
        image = left.imshow(values, origin="lower", extent=(0.5, 2.5, 0.5, 2.5))
        left.figure.colorbar(image, ax=left, label="cosine")
        right.pcolormesh(values, label="mean")
        right.set_xticks([0.5, 1.5], ["de", "en"])

    rows = made(draw, 2)
    left, right = rows[rows["series"] == "cosine"], rows[rows["series"] == "mean"]
    assert left[["x", "y", "value"]].values.tolist() == [[1, 1, 1], [1, 2, 3], [2, 2, 4]]
    assert right[["x name", "value"]].values.tolist() == [["de", 1], ["de", 3], ["en", 4]] and len(rows) == 6


def test_small_multiples_are_told_apart_and_share_the_names_of_their_axes():
    fig, axes = plt.subplots(2, 2, sharex=True, sharey=True)
    for axis in axes.flat:
        axis.plot([1, 2, 3], [1, 2, 3], label="a")
    for axis, name in zip(axes[0], ("before", "after")):
        axis.set_title(name)
    for axis, name in zip(axes[:, 0], ("thresholds:\nshare", "patience:\nshare")):
        axis.set_ylabel(name)
    axes[1, 0].set_xlabel("layer")
    axes[1, 1].set_xlabel("depth")
    rows = drawn(fig).drop_duplicates("panel")
    assert rows["panel"].tolist() == [
        f"{a} / {b}: share" for b in ("thresholds", "patience") for a in ("before", "after")
    ]
    assert rows["x axis"].tolist() == ["layer", "depth"] * 2
    axes[0, 0].set_ylabel("")
    axes[1, 0].set_ylabel("")
    assert set(drawn(fig)["panel"]) == {f"{a} / row {b}" for b in (1, 2) for a in ("before", "after")}


@pytest.mark.parametrize(
    "places, labels, expected",
    [([1, 2], ["1", "2"], ""), ([0, 0.5], ["0%", "50%"], ""), ([0, 1], ["2", "3"], "2"), ([0, 1], ["0–4", "5"], "0–4")],
)
def test_ticks_that_only_say_their_number_are_no_names(places, labels, expected):
    def draw(axis):
        axis.plot([places[0]], [5], "o", label="a")
        axis.set_xticks(places, labels)

    assert made(draw).get("x name", [""])[0] == expected


def test_a_figure_of_nothing_has_no_rows():
    assert drawn(plt.figure()).empty
