"""Files inside a page, as links to be taken away."""

import pandas as pd
from bs4 import BeautifulSoup

from eestudy.book.layout import data_of
from eestudy.markup.offers import as_csv, offered


def test_links_hold_their_files_and_names_stay_text():
    link = BeautifulSoup(offered([("CSV", ("text/csv", b"a,\xc3\xa9"))], '"<x>'), "html.parser").a
    assert link.get_text() == "CSV" and link["download"] == '"<x>.csv'
    assert data_of(link["href"]) == ("csv", b"a,\xc3\xa9")


def test_numbers_of_a_csv_are_short():
    assert as_csv(pd.DataFrame({"a": [1 / 3, 2.0]})) == ("text/csv", b"a\n0.333333\n2\n")
