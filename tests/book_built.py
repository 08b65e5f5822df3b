"""The book that `make book` builds: where it is, and what marks a test that needs it."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HTML = ROOT / "book/_build/html"
ALLOWED = ("https://cdn.jsdelivr.net/npm/mathjax@",)  # what Jupyter Book itself loads from elsewhere


def slow(test):
    """The first of these builds the book, which can take as long as the study does."""
    return pytest.mark.slow(pytest.mark.timeout(3600)(test))
