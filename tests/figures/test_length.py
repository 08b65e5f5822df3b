"""The plots of the length section, drawn from full and from empty tables."""

import matplotlib.pyplot as plt
import pytest
from length_made import make_trace, noisy

from eelib.tracing.trace import DEFINITIONS
from eestudy.old.analysis import length as le
from eestudy.old.figures import length as plots


@pytest.fixture(name="noisy")
def noisy_tokens():
    return noisy()


def test_figures_of_full_and_of_empty_tables(noisy):
    single = le.token_table(make_trace([5, 4, 3]))
    nothing = le.token_table(make_trace([5], cut={0}))
    for tables in ({"a": noisy, "b": single, "c": nothing}, {"c": nothing}):
        each = dict.fromkeys(DEFINITIONS, tables)
        for made_by, plot in (
            (le.by_length, plots.length_figure),
            (le.by_position, plots.position_figure),
            (le.by_both, lambda maps: plots.both_figure(maps, 12)),
        ):
            fig = plot({d: {n: made_by(t, d) for n, t in own.items()} for d, own in each.items()})
            fig.canvas.draw()
            assert fig.get_figwidth() <= 7.2
        slopes = {
            d: {n: {k: e.interval() for k, e in le.slopes_of(t, d).items()} for n, t in own.items()}
            for d, own in each.items()
        }
        plots.slope_figure(slopes).canvas.draw()
        plt.close("all")
