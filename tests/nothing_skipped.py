"""pytest's option --nothing-skipped: a test that is skipped has failed, but for one with the mark `gpu`."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--nothing-skipped", action="store_true", help="a skip fails the run, but for the mark gpu")


def fail_if_skipped(report, node):
    """A report as it counts; a test that is expected to fail (xfail) is none that was skipped."""
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and node.config.getoption("nothing_skipped") and not node.get_closest_marker("gpu"):
        report.outcome, report.longrepr = "failed", f"{node.nodeid}: {report.longrepr[2]}"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item):
    return fail_if_skipped((yield), item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector):
    return fail_if_skipped((yield), collector)
