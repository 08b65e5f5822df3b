"""The built book, for the tests that read its pages and for those that look at them."""

import pytest
from book_checks import HTML, ROOT, Pages, read, up_to_date


@pytest.fixture(scope="session")
def pages() -> Pages:
    """Every page, by path, of a book that is there and of today's sources: tests do not build it."""
    if not up_to_date(ROOT):
        pytest.fail("the book is missing or older than its sources: run make book", pytrace=False)
    return read(HTML)
