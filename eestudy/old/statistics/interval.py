"""An estimate with its interval: scaled, compared with a bound, and written."""

import math
from collections.abc import Callable
from typing import NamedTuple

from eestudy.markup.text import in_step


class Interval(NamedTuple):
    """Estimate with its 95% interval. sequences: groups behind it; the smallest sample's where several are joined.

    In tables `str(interval)`, as in 0.612 [0.580, 0.645]; in prose `f"{interval:.1f}"`, as in
    0.6 (95% interval 0.5 to 0.7).
    """

    estimate: float
    low: float
    high: float
    sequences: int

    @property
    def known(self) -> bool:
        """Whether there is an estimate; `NOTHING` has none."""
        return math.isfinite(self.estimate)

    def scaled(self, factor: float) -> "Interval":
        """The interval of `factor` times the statistic; what is 0 but for rounding is 0."""
        return self.mapped(lambda value: round(factor * value, 9) + 0.0)  # + 0.0: no minus zero

    @property
    def percent(self) -> "Interval":
        """A share as a percentage."""
        return self.scaled(100)

    def mapped(self, function: Callable[[float], float]) -> "Interval":
        """The interval of a monotonic function of the statistic."""
        estimate, low, high = map(function, self[:3])
        return Interval(estimate, min(low, high), max(low, high), self.sequences)

    def side(self, above: str, below: str, neither: str, of: float = 0.0) -> str:
        """`above` where the whole interval lies above `of`, `below` where all of it lies below, else `neither`."""
        return above if self.low > of else below if self.high < of else neither

    def __str__(self) -> str:
        if not self.known:
            return "–"
        estimate, low, high = in_step(*self[:3])
        return f"{estimate}\u00a0[{low},\u00a0{high}]"

    def __format__(self, pattern: str) -> str:
        if not pattern:
            return str(self)
        estimate, low, high = (written(value, pattern) for value in self[:3])
        return f"{estimate} (95% interval {low} to {high})" if self.known else "–"


NOTHING = Interval(math.nan, math.nan, math.nan, 0)  # where there is nothing to estimate from


def written(value: float, pattern: str) -> str:
    """A number by a format, without the sign of a zero."""
    text = format(value, pattern)
    return format(0.0, pattern) if text == format(-0.0, pattern) else text


def short_p(value: float) -> str:
    """A p-value with two significant digits; how small one is below a thousandth says nothing more."""
    return "–" if not math.isfinite(value) else "< 0.001" if value < 1e-3 else f"{value:.2g}"


def told(interval: Interval, unit: str, digits: int = 1) -> str:
    """An estimate with its unit, and its interval."""
    estimate, low, high = (f"{value:.{digits}f}" for value in interval[:3])
    return f"{estimate}{unit} (95% interval {low} to {high})"
