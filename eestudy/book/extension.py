"""A Sphinx extension (see _config.yml): lays out every page, stores its files, and gives values to its foot."""

import json
import posixpath
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pybtex.plugin import register_plugin
from pybtex.style.formatting.unsrt import Style
from pybtex.style.labels import BaseLabelStyle
from pybtex.style.sorting.author_year_title import SortingStyle

from eestudy.book.layout import dressed
from eestudy.markup.text import harmless

FILES = "files"  # folder of the book for what can be taken away
STYLE = "author_year"  # of the list of references; _config.yml asks for it
BRACES = str.maketrans("", "", "{}")  # they hold a name of several words together, and are no part of it


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    register_plugin("pybtex.style.formatting", STYLE, ByAuthorAndYear)
    app.connect("html-page-context", lay_out)
    app.connect("build-finished", keep_citation)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def lay_out(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Lay out the body of a page, and pass the values of its foot to the templates."""
    project, out = Path(app.srcdir).parent, Path(app.outdir)
    up = posixpath.relpath(".", posixpath.dirname(page) or ".")

    def keep(name: str, content: bytes) -> str:
        path = posixpath.join(FILES, page, name)
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_bytes(content)
        return posixpath.join(up, path)

    if context.get("body"):
        context["body"] = dressed(context["body"], keep)
    known = origin(project, frozenset(app.env.found_docs))
    own = page in known["dated"]
    context["foot"] = known | {
        "results": keep("results.json", (project / f"{page}.json").read_bytes()) if own else "",
        "dates": [known["dated"][page]] if own else known["dates"],
        "repository": app.config.html_theme_options.get("repository_url", ""),
        "bibtex": posixpath.join(up, FILES, "cite.bib"),
        "cff": posixpath.join(up, FILES, "CITATION.cff"),
    }


@cache
def origin(project: Path, pages: frozenset[str]) -> dict[str, Any]:
    """Values that all pages share: version, licence, DOI, commit; date of each run, of the first and of the last."""
    citation = read_citation(project)
    results = {page: project / f"{page}.json" for page in pages if page.startswith("results/")}
    dated = {
        page: harmless(str(json.loads(path.read_text(encoding="utf-8"))["date"]))
        for page, path in results.items()
        if path.exists()
    }
    dates = sorted(set(dated.values()))
    kept = {key: citation.get(key, "") for key in ("version", "license", "doi")}
    return kept | {"commit": commit_of(project), "dated": dated, "dates": dates[:1] + dates[1:][-1:]}


def keep_citation(app: Any, failed: Exception | None) -> None:
    """Write CITATION.cff, and the same as BibTeX, beside the pages."""
    project, out = Path(app.srcdir).parent, Path(app.outdir, FILES)
    if failed or not (citation := read_citation(project)):
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / "CITATION.cff").write_bytes((project / "CITATION.cff").read_bytes())
    known, url = origin(project, frozenset(app.env.found_docs)), app.config.html_theme_options.get("repository_url", "")
    year = known["dates"][-1][:4] if known["dates"] else ""
    (out / "cite.bib").write_text(bibtex(citation, year, url, known["commit"]), encoding="utf-8")


# ---- how to cite the study


def read_citation(folder: Path) -> dict[str, Any]:
    """CITATION.cff of a project; empty where it has none."""
    path = folder / "CITATION.cff"
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}


def bibtex(citation: dict[str, Any], year: str, url: str = "", commit: str = "") -> str:
    """A BibTeX entry; if there is no DOI yet, a comment above says where it will be."""
    values = {
        "title": f"{{{citation.get('title', '')}}}",
        "author": " and ".join(map(name_of, citation.get("authors", []))),
        "year": year,
        "version": citation.get("version"),
        "note": f"commit {commit}" if commit else "",
        "doi": citation.get("doi"),
        "url": url,
    }
    lines = [f"  {key} = {{{value}}}" for key, value in values.items() if value]
    comment = "" if citation.get("doi") else "% no DOI yet: one in CITATION.cff is written here as doi = {...}\n"
    return "\n".join([f"{comment}@software{{early_exit_study,", *(f"{line}," for line in lines), "}\n"])


def name_of(author: dict[str, str]) -> str:
    """An author in BibTeX's form; a group's name is in braces."""
    if "family-names" in author:
        return f"{author['family-names']}, {author.get('given-names', '')}".removesuffix(", ")
    return f"{{{author['name']}}}"


def commit_of(folder: Path) -> str:
    """The commit that a working tree is at, with "+" where tracked files differ from it; "" where there is none."""
    command = ["git", "-C", str(folder), "describe", "--always", "--exclude=*", "--abbrev=10", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


# ---- the list of references under the names that the text cites them by


class Labels(BaseLabelStyle):
    """Labels such as "Shan et al., 2024", as `bibtex_reference_style: author_year` writes them in the text."""

    def format_labels(self, sorted_entries: Iterable[Any]) -> Iterator[str]:
        """A label for each entry, in their order."""
        for entry in sorted_entries:
            names = [" ".join(person.last_names) for person in entry.persons.get("author", [])]
            who = f"{names[0]} et al." if len(names) > 2 else " and ".join(names)
            who = who.translate(BRACES) or entry.key
            yield f"{who}, {entry.fields.get('year', 'n.d.')}"


class Sorting(SortingStyle):
    """Sorts by authors, years and titles, without braces around names."""

    def sorting_key(self, entry: Any) -> tuple[str, ...]:
        return tuple(part.translate(BRACES).lower() for part in super().sorting_key(entry))


class ByAuthorAndYear(Style):
    """Entries in the order of `Sorting`, with `Labels`."""

    default_label_style = Labels
    default_sorting_style = Sorting
