"""Fixtures of what compares models: a page on a tiny gpt2 with two tiny models beside it."""

import pytest
from studies_made import values_in

from eestudy.old.study.comparison import timed_studies
from eestudy.parameters import Parameters


@pytest.fixture(scope="module")
def values(folder_of, tmp_path_factory):
    """Parameters of the page."""
    return values_in(tmp_path_factory.mktemp("studies"), folder_of)


@pytest.fixture(scope="module")
def found(values):
    """The studies, as if the models had learnt their tasks: random ones have not."""
    studies = timed_studies(Parameters(values))
    for study in studies:
        study.learnt = dict.fromkeys(study.traces, True)
    return studies
