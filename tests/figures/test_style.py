"""Text that comes from models, tasks and tokens stays text wherever it is shown."""

from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from bs4 import BeautifulSoup

from eestudy.figures import grids
from eestudy.figures import style as figures
from eestudy.markup.text import visible
from eestudy.resampling import NOTHING, Interval

NASTY = [
    "<script>alert(1)</script>",
    "</td></table><img src=x onerror=alert(1)>",
    "&lt;b&gt;",
    "$x$",
    "\\(x\\)",
    "`a` | b",
    "\u202edlrow",
    "\"' onclick=alert(1)",
    "-->",
    "]]>",
    "{{ x }}",
    "```\n# x",
]
ALLOWED = {"div", "table", "thead", "tbody", "tr", "th", "td", "p", "b", "br", "small", "i", "span", "bdi", "a"}


def lens():
    """One output whose best token is another nasty text at each of the layers."""
    layers = len(NASTY)
    trace = SimpleNamespace(
        layers=layers,
        tokens=pd.DataFrame({"sequence": [0], "token_id": [0]}),
        final_ids=np.array([layers - 1]),
        exit_layer=lambda definition: np.array([layers]),
    )
    readouts = {"top1": np.array([[0, *range(layers)]]), "probability": np.ones((1, layers + 1))}
    trace = type("Made", (), vars(trace) | {"__getitem__": lambda self, name: readouts[name]})()
    trace.exit_layer = lambda definition: np.array([layers])
    return grids.lens(trace, 0, lambda i: visible(NASTY[int(i)]), " ".join(NASTY), range(1, layers + 1))


def plain(monkeypatch):
    shown = []
    monkeypatch.setattr(figures, "display", shown.append)
    figures.table(pd.DataFrame({NASTY[0]: NASTY}), " ".join(NASTY))
    return shown[0].data


@pytest.mark.parametrize("name", ["lens", "plain"])
def test_tables_are_inert(name, monkeypatch):
    """Parsed as a browser would: our own tags only, no attribute that runs, every text there as it was."""
    html = plain(monkeypatch) if name == "plain" else globals()[name]()
    page = BeautifulSoup(html, "html.parser")
    assert {tag.name for tag in page.find_all()} <= ALLOWED
    known = {"class", "style", "colspan", "border"}
    assert not [tag for tag in page.find_all() if set(tag.attrs) - known and tag.name != "a"]
    for link in page.find_all("a"):  # to what the output holds itself
        assert set(link.attrs) == {"download", "href"} and link["href"].startswith("data:text/csv;base64,")
    texts = [tag.get_text() for tag in page.find_all(["td", "th", "small", "bdi"])]
    wanted = [t.replace("\n", "\\n") for t in NASTY] if name == "plain" else map(visible, NASTY)
    assert all(any(text in shown for shown in texts) for text in wanted)
    for part in page.select("table, p:not(.ee-take)"):  # dollar signs are no formulas, in JupyterLab neither
        assert part.find_parent(class_="mathjax_ignore") or "mathjax_ignore" in part["class"]


def test_names_in_plots_are_no_formulas():
    """Outside of formulas a lone dollar or brace is text; as a formula this one can't be drawn."""
    with plt.rc_context():
        figures.style()
        fig, axis = plt.subplots()
        axis.set_title("$\\frac{$")
        fig.canvas.draw()
        plt.close(fig)


def test_a_table_writes_intervals_and_formats_numbers(monkeypatch):
    """A column of Intervals needs no format; what is not finite is a dash; other columns stay as they are."""
    shown = []
    monkeypatch.setattr(figures, "display", shown.append)
    frame = pd.DataFrame(
        {
            "interval": [Interval(0.5, 0.25, 0.75, 9), NOTHING],
            "share": [0.123, np.nan],
            "mixed": pd.Series([1, 2.5], dtype=object),
            "text": ["a", "b"],
        }
    )
    figures.table(frame, "caption", {"share": "{:.1f}"})
    page = BeautifulSoup(shown[0].data, "html.parser")
    rows = [[cell.get_text() for cell in row.find_all("td")] for row in page.find_all("tr")]
    assert rows[1:] == [["0.50\u00a0[0.25,\u00a00.75]", "0.1", "1", "a"], ["–", "–", "2.5", "b"]]
    assert frame["interval"][1] is NOTHING  # the caller's frame is not written to


def test_what_a_figure_says_is_no_formula(monkeypatch):
    shown = []
    monkeypatch.setattr(figures, "display", shown.append)
    figures.show(
        figures.Drawn([plt.figure()], pd.DataFrame({"x": [1]})),
        "$\\href{javascript:alert(1)}{x}$ " + NASTY[0],
        NASTY[1],
    )
    (figure,) = BeautifulSoup(shown[0].data, "html.parser").find_all("figure")
    assert {"tex2jax_ignore", "mathjax_ignore"} <= set(figure["class"])
    assert figure.figcaption.text.endswith(NASTY[0]) and not figure.find("script") and len(figure.find_all("img")) == 1


def test_a_column_that_never_varies_is_said_once(monkeypatch):
    shown = []
    monkeypatch.setattr(figures, "display", shown.append)
    frame = pd.DataFrame({"task": ["a", "a"], "cut": [0, 0]} | {name: [1, 2] for name in "bcdefgh"})
    figures.table(frame, "All.")
    page = BeautifulSoup(shown[0].data, "html.parser")
    assert [cell.get_text() for cell in page.find_all("th")] == ["task", *"bcdefgh"]
    assert page.select_one(".ee-caption").get_text() == "All. In every row: cut: 0."
    figures.table(frame[["task", "cut", "b"]], "All.")  # few columns stay as they are
    assert len(BeautifulSoup(shown[1].data, "html.parser").find_all("th")) == 3


def test_text_on_shaded_cells_can_be_read():
    """A contrast of 4.5 at every strength (WCAG 2)."""

    def light(red, green, blue):
        linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in (red, green, blue)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for strength in np.linspace(0, 1, 1001):
        behind, text = figures.shade(strength).removeprefix("background:rgb(").split(");color:")
        pair = sorted([light(*(int(v) / 255 for v in behind.split(","))), float(text == "#fff")])
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, strength
