"""No window is opened; each test draws in the book's style and leaves no figure behind."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pytest

from eestudy.figures import style


@pytest.fixture(autouse=True)
def close():
    with plt.rc_context():
        style.style()
        yield
    plt.close("all")
