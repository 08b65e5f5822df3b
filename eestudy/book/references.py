"""The list of references under the names that the text cites them by: authors and year."""

from collections.abc import Iterable, Iterator
from typing import Any

from pybtex.plugin import register_plugin
from pybtex.style.formatting.unsrt import Style
from pybtex.style.labels import BaseLabelStyle
from pybtex.style.sorting.author_year_title import SortingStyle

NAME = "author_year"  # of the style; _config.yml asks for it
BRACES = str.maketrans("", "", "{}")  # they hold a name of several words together, and are no part of it


class Labels(BaseLabelStyle):
    """Shan et al., 2024: as `bibtex_reference_style: author_year` writes it in the text."""

    def format_labels(self, sorted_entries: Iterable[Any]) -> Iterator[str]:
        """A label for each entry, in their order."""
        for entry in sorted_entries:
            names = [" ".join(person.last_names) for person in entry.persons.get("author", [])]
            who = f"{names[0]} et al." if len(names) > 2 else " and ".join(names)
            who = who.translate(BRACES) or entry.key
            yield f"{who}, {entry.fields.get('year', 'n.d.')}"


class Sorting(SortingStyle):
    """By authors, years and titles, a name in braces among the others."""

    def sorting_key(self, entry: Any) -> tuple[str, ...]:
        """What an entry is sorted by."""
        return tuple(part.translate(BRACES).lower() for part in super().sorting_key(entry))


class ByAuthorAndYear(Style):
    """Entries in alphabetical order, with such labels."""

    default_label_style = Labels
    default_sorting_style = Sorting


def register() -> None:
    """Make the style known to Sphinx's bibliographies."""
    register_plugin("pybtex.style.formatting", NAME, ByAuthorAndYear)
