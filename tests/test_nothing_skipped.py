"""With --nothing-skipped a run in which something was not tested is no green run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

def test_passed():
    pass

@pytest.mark.skipif(True, reason="no such browser")
def test_marked():
    raise AssertionError

def test_inside():
    pytest.importorskip("no_such_library")

@pytest.mark.gpu
@pytest.mark.skip(reason="no such GPU")
def test_gpu():
    raise AssertionError

@pytest.mark.xfail
def test_known():
    raise AssertionError
"""


def run(file: Path, *options: str) -> tuple[int, str]:
    """(status, output) of pytest with this project's settings on a file that lies elsewhere."""
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-p", "nothing_skipped", "-ra"]
    done = subprocess.run(
        [*command, "--color=no", "-p", "no:cacheprovider", *options, file],
        cwd=file.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        text=True,
        capture_output=True,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("workers", [(), ("--numprocesses", "2")])
def test_skips_are_failures_but_for_gpus_and_what_is_expected_to_fail(workers, tmp_path):
    """A file that is skipped whole, too."""
    (tmp_path / "test_made.py").write_text(TESTS)
    status, said = run(tmp_path / "test_made.py", "--nothing-skipped", *workers)
    assert status == 1 and "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error in" in said, said
    assert "no such browser" in said and "no_such_library" in said and "no such GPU" in said
    status, said = run(tmp_path / "test_made.py", *workers)
    assert status == 0 and "1 passed, 3 skipped, 1 xfailed in" in said, said
    (tmp_path / "test_made.py").write_text('import pytest\n\npytest.importorskip("no_such_library")\n' + TESTS)
    status, said = run(tmp_path / "test_made.py", "--nothing-skipped", *workers)
    assert status and "no_such_library" in said, said
