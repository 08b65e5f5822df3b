"""References are listed as the text cites them."""

from types import SimpleNamespace

from pybtex.database import Entry, Person
from pybtex.plugin import find_plugin

from eestudy.book.references import NAME, ByAuthorAndYear, Labels, register


def entry(*authors, year="2024"):
    made = Entry("misc", fields={"year": year}, persons={"author": [Person(name) for name in authors]})
    made.key = "key"
    return made


def test_one_author_two_and_more():
    entries = [entry("Page, E. S."), entry("Korn, A.", "van Graubard, B."), entry("Shan, A", "B, C", "D, E")]
    assert list(Labels().format_labels(entries)) == ["Page, 2024", "Korn and Graubard, 2024", "Shan et al., 2024"]
    assert list(Labels().format_labels([entry("{A group}")])) == ["A group, 2024"]
    assert list(Labels().format_labels([SimpleNamespace(persons={}, key="key", fields={})])) == ["key, n.d."]


def test_a_name_in_braces_is_sorted_among_the_others():
    entries = [entry("Zou, G."), entry("{A group}"), entry("{nobody}", year="2020"), entry("Bae, S.")]
    found = Labels().format_labels(ByAuthorAndYear().sort(entries))
    assert list(found) == ["A group, 2024", "Bae, 2024", "nobody, 2020", "Zou, 2024"]


def test_sphinx_finds_the_style():
    register()
    assert find_plugin("pybtex.style.formatting", NAME).default_label_style is Labels
