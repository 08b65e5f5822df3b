"""What is said of memory, and batches that are halved until they fit."""

import psutil
import pytest
import torch

from eelib.common.memory import Halving, free_memory, is_out_of_memory


def test_memory_that_is_free():
    assert 0 < free_memory(torch.device("cpu")) <= psutil.virtual_memory().total


def test_errors_that_mean_that_memory_is_used_up():
    assert is_out_of_memory(torch.OutOfMemoryError("x")) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_batches_are_halved_until_they_fit_and_that_is_said_once(capsys):
    def squares(items):
        if len(items) > 2:
            raise MemoryError
        return [item**2 for item in items]

    halving = Halving()
    assert halving.run(squares, [1, 2]) == [[1, 4]]
    assert halving.run(squares, [1, 2, 3, 4, 5, 6, 7]) == [[1], [4, 9], [16, 25], [36, 49]]
    assert halving.run(squares, [1, 2, 3]) == [[1], [4, 9]]
    assert capsys.readouterr().out == "out of memory: batches of 7 are halved\n"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("shapes do not match")])
def test_what_halving_can_t_mend_is_raised(error):
    def work(_):
        raise error

    with pytest.raises(type(error)):
        Halving().run(work, [1])
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError):
            Halving().run(work, [1, 2])
