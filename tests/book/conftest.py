"""The built book, for the tests that read its pages and for those that look at them."""

from pathlib import Path

import pytest
from book_built import HTML, ROOT, up_to_date
from bs4 import BeautifulSoup


@pytest.fixture(scope="session")
def pages() -> dict[Path, BeautifulSoup]:
    """Every page, by path, of a book that is there and of today's sources: tests do not build it."""
    if not up_to_date(ROOT):
        pytest.fail("the book is missing or older than its sources: run make book", pytrace=False)
    return {
        path: BeautifulSoup(path.read_text(encoding="utf-8"), "lxml")
        for path in sorted(HTML.rglob("*.html"))
        if "_static" not in path.parts
    }
