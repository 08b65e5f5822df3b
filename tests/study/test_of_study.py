"""A page's model as its study has it."""

from study_made import made_study

from eestudy.old.study.of_study import OfStudy


def test_names_are_those_of_the_study():
    one = OfStudy(made_study({}, layers=7, seed=3))
    assert (one.name, one.depth, one.seed) == ("made", 7, 3)
