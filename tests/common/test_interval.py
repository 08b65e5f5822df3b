"""An interval scaled, compared with a bound, and written."""

from eelib.common.interval import NOTHING, Interval

SHARE = Interval(0.6125, 0.5801, 0.6449, 40)


def test_scaled_the_ends_stay_in_order_and_zero_has_no_sign():
    assert SHARE.percent == Interval(61.25, 58.01, 64.49, 40)
    assert SHARE.scaled(-1) == Interval(-0.6125, -0.6449, -0.5801, 40)
    assert str(Interval(1e-12, 0.0, 0.1, 3).scaled(-1).estimate) == "0.0"


def test_side_is_that_of_the_whole_interval():
    for bound, wanted in ((0.5, "above"), (0.6, "neither"), (0.7, "below"), (SHARE.low, "neither")):
        assert SHARE.side("above", "below", "neither", of=bound) == wanted


def test_written_in_tables_and_in_prose():
    assert str(SHARE) == f"{SHARE}" == "0.613\u00a0[0.58,\u00a00.645]"
    assert f"{SHARE:.1f}" == "0.6 (95% interval 0.6 to 0.6)"
    assert str(SHARE.scaled(10_000)) == "6,125\u00a0[5,801,\u00a06,449]"


def test_nothing_is_known_of_nothing():
    assert not NOTHING.known and str(NOTHING) == f"{NOTHING:.1f}" == "–" and not NOTHING.percent.known
    assert NOTHING.side("above", "below", "neither") == "neither"
