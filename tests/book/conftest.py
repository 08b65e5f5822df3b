"""The built book, for the tests that read its pages and for those that look at them."""

import subprocess
import sys
from pathlib import Path

import pytest
from book_built import HTML, ROOT
from bs4 import BeautifulSoup


@pytest.fixture(scope="session")
def pages() -> dict[Path, BeautifulSoup]:
    """Every page, by path; builds the book, or does nothing where it is up to date."""
    done = subprocess.run(
        ["make", "book", f"VENV={sys.prefix}"], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return {
        path: BeautifulSoup(path.read_text(encoding="utf-8"), "lxml")
        for path in sorted(HTML.rglob("*.html"))
        if "_static" not in path.parts
    }
