"""An interval scaled, compared with a bound, and written."""

from eestudy.old.statistics.interval import NOTHING, Interval, in_step

SHARE = Interval(0.6125, 0.5801, 0.6449, 40)


def test_scaled_the_ends_stay_in_order_and_zero_has_no_sign():
    assert SHARE.percent == Interval(61.25, 58.01, 64.49, 40)
    assert SHARE.scaled(-1) == Interval(-0.6125, -0.6449, -0.5801, 40)
    assert str(Interval(1e-12, 0.0, 0.1, 3).scaled(-1).estimate) == "0.0"


def test_side_is_that_of_the_whole_interval():
    for bound, wanted in ((0.5, "above"), (0.6, "neither"), (0.7, "below"), (SHARE.low, "neither")):
        assert SHARE.side("above", "below", "neither", of=bound) == wanted


def test_written_in_tables_and_in_prose():
    assert str(SHARE) == f"{SHARE}" == "0.613\u00a0[0.580,\u00a00.645]"
    assert f"{SHARE:.1f}" == "0.6 (95% interval 0.6 to 0.6)"
    assert str(SHARE.scaled(10_000)) == "6,125\u00a0[5,801,\u00a06,449]"
    small = Interval(0.01, -0.02, 0.04, 40)
    assert (
        f"{small:.1f}" == "0.0 (95% interval 0.0 to 0.0)" and f"{small:+.2f}" == "+0.01 (95% interval -0.02 to +0.04)"
    )
    assert str(Interval(-0.0, -1.0, 0.5, 40)) == "0.00\u00a0[-1.00,\u00a00.50]"


def test_nothing_is_known_of_nothing():
    assert not NOTHING.known and str(NOTHING) == f"{NOTHING:.1f}" == "–" and not NOTHING.percent.known
    assert NOTHING.side("above", "below", "neither") == "neither"


def test_written_as_precisely_as_it_is_known():
    """Two digits of half the width, at most three of the estimate; an interval that leaves out zero shows it."""
    for values, wanted in (
        ((0.00632, -0.000573, 0.0131), ("0.0063", "-0.0006", "0.0131")),
        ((72.412, 70.93, 74.0), ("72.4", "70.9", "74.0")),
        ((9.94, 9.87, 10.03), ("9.94", "9.87", "10.03")),
        ((11.9, 11.9, 11.9), ("11.9", "11.9", "11.9")),
        ((1.67, 0.0422, 10.7), ("1.7", "0.04", "10.7")),
        ((-0.02, -0.05, 0.0), ("-0.020", "-0.050", "0.000")),
        ((0.0, -1e-6, 2.0), ("0.0", "0.0", "2.0")),
        ((-3e-5, -0.0026, 0.0043), ("0.0000", "-0.0026", "0.0043")),
    ):
        assert in_step(*values) == wanted
