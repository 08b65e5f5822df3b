"""Bins of positions inside an output."""

from eestudy.old.analysis import length as le


def test_position_bins():
    assert le.position_bins([0, 3, 4, 5, 6, 511, 512, 9999]).tolist() == [0, 3, 4, 4, 5, 17, 18, 18]
    assert [le.bin_name(i) for i in (0, 4, len(le.STEPS) - 1)] == ["0", "4–5", "512–"]
