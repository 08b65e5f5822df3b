"""The exit status of the kernel's benchmark: its goal decides, and without a GPU nothing was measured."""

import json
import sys

import pytest
import torch

from checks import kernel


@pytest.fixture
def out(monkeypatch, tmp_path):
    """Where the benchmark writes."""
    monkeypatch.setattr(
        sys, "argv", ["kernel", "--vocabulary", "9", "--rows", "1", "2", "--output", str(tmp_path / "k")]
    )
    return tmp_path / "k"


def test_without_a_gpu_one_line_says_so(out, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        kernel.main()
    line = capsys.readouterr().err
    assert ended.value.code == 2 and line.startswith("No GPU here") and line.count("\n") == 1 and not out.exists()


@pytest.mark.parametrize("fast", [True, False])
def test_a_rate_below_the_goal_is_an_error(fast, out, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernel, "machine", dict)
    monkeypatch.setattr(kernel, "measure", lambda count, *_: {"rows": count, "reached": fast or count == 1})
    if fast:
        kernel.main()
    else:
        with pytest.raises(SystemExit, match="^1 of 2 shapes are below 0.85 of the matmul's rate$"):
            kernel.main()
    assert len(json.loads(out.read_text())["rows"]) == 2
