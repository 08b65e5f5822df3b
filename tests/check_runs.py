"""Checks run in the process of a test, and the goals that they miss."""

import importlib
import json
import sys
from pathlib import Path

import pytest


def missed(goals):
    """The names of the goals that are missed."""
    return [row["goal"] for row in goals if not row["met"]]


def run(check, *options):
    """(exit status, report that --output names) of a check, run in this process."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["checks", *options])
        importlib.import_module(f"checks.{check}").main()
    path = Path(options[-1])
    return ended.value.code, json.loads(path.read_text()) if path.is_file() else None
