"""Limits in time and memory: what takes more is stopped; what does not, and another's limits, are left alone."""

import resource
import signal
import threading
import time

import pytest

from eelib.common.errors import CheckpointError
from eelib.models.limit import at_most, room_of


@pytest.fixture(autouse=True)
def no_timer():
    """Without the timer that ends tests which hang, which goes on afterwards."""
    left = signal.setitimer(signal.ITIMER_REAL, 0)[0]
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, left)


def spin(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def test_what_takes_too_long_is_stopped():
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="too long"), at_most(0.2, "too long"):
        spin(10)
    assert time.monotonic() - began < 5 and not signal.getitimer(signal.ITIMER_REAL)[0]


def test_the_limit_ends_with_what_it_is_on():
    before = signal.getsignal(signal.SIGALRM)
    with at_most(1, "too long"):
        pass
    spin(1.2)
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_timer_that_ends_later_goes_on():
    rang = []
    signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    signal.setitimer(signal.ITIMER_REAL, 3)
    with pytest.raises(CheckpointError), at_most(0.1, "too long"):
        spin(10)
    assert not rang and 0 < signal.getitimer(signal.ITIMER_REAL)[0] < 2.95
    spin(3.2)
    assert rang == [1]


def test_a_timer_that_ends_sooner_and_other_threads_have_no_limit():
    rang = []
    signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with at_most(1, "too long"):
        spin(1.5)
    assert rang == [1]
    done = []

    def other():
        with at_most(0.01, "too long"):
            spin(0.1)
        done.append(1)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(10)
    assert done == [1]


def test_what_takes_too_much_memory_is_stopped():
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MemoryError), room_of(1 << 28):
        bytearray(1 << 30)
    with room_of(1 << 28):
        assert resource.getrlimit(resource.RLIMIT_AS)[0] != before[0]
        with room_of(1 << 40):  # a lower limit stays
            inner = resource.getrlimit(resource.RLIMIT_AS)[0]
        assert inner == resource.getrlimit(resource.RLIMIT_AS)[0]
    assert resource.getrlimit(resource.RLIMIT_AS) == before and len(bytearray(1 << 30)) == 1 << 30
