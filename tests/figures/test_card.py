"""Curves of cards: their axes are named after them, and their numbers can be taken away."""

from io import BytesIO

import pandas as pd
import pytest
from bs4 import BeautifulSoup

from eestudy.book.layout import data_of
from eestudy.book.pages import COUNTED, curve


@pytest.mark.parametrize(
    "values, label, across, along",
    [
        ([[25, 4.0], [50, 2.0]], "loss by step", "step", "loss"),
        ([[1, 0.5], [2, 0.75]], "dev accuracy by epoch", "epoch", "dev accuracy"),
        ([[25, 4.0], [50, 2.0]], "loss by part, captions", "step", "loss"),
        ([10.0, 20.0], "quality, agreement with the last layer, by layer", "layer", "agreement with the last layer"),
        ([10.0, 20.0], "quality, KL from the last layer", COUNTED, "KL from the last layer"),
    ],
)
def test_a_curve_names_its_axes_and_keeps_its_numbers(values, label, across, along):
    figure = BeautifulSoup(curve(values, label, "pocket"), "lxml").figure
    kept = {link.get_text(): data_of(link["href"])[1] for link in figure.select(".ee-take a")}
    rows = pd.read_csv(BytesIO(kept["CSV"]))
    pairs = values if isinstance(values[0], list) else [[i, value] for i, value in enumerate(values, 1)]
    assert list(rows) == [across, along] and rows.values.tolist() == pairs
    assert figure.figcaption.get_text().startswith(
        f"pocket, {label}: from {values[0][1] if pairs is values else 10:.3g}"
    )
