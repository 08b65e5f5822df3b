"""The part of the book that Sphinx runs: lays out every page, keeps its files, and writes its foot. See _config.yml."""

import json
import posixpath
from functools import cache
from pathlib import Path
from typing import Any

from eestudy.book import references
from eestudy.book.citation import bibtex, commit_of, read_citation
from eestudy.book.layout import dressed
from eestudy.markup.text import harmless

FILES = "files"  # folder of the book for what can be taken away


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    references.register()
    app.connect("html-page-context", lay_out)
    app.connect("build-finished", keep_citation)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def lay_out(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Dress the body of a page, and hand its foot to the templates."""
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
        "results": keep("results.json", result_of(project, page).read_bytes()) if own else "",
        "dates": [known["dated"][page]] if own else known["dates"],
        "repository": app.config.html_theme_options.get("repository_url", ""),
        "bibtex": posixpath.join(up, FILES, "cite.bib"),
        "cff": posixpath.join(up, FILES, "CITATION.cff"),
    }


def result_of(project: Path, page: str) -> Path:
    """What the page results/MODEL/NOTEBOOK rests on."""
    return project / f"{page}.json"


@cache
def origin(project: Path, pages: frozenset[str]) -> dict[str, Any]:
    """What all pages have in common: version, licence, DOI, commit; date of each run, of the first and of the last."""
    citation = read_citation(project)
    dated = {
        page: harmless(str(json.loads(result_of(project, page).read_text(encoding="utf-8"))["date"]))
        for page in pages
        if page.startswith("results/") and result_of(project, page).exists()
    }
    dates = sorted(set(dated.values()))
    kept = {key: citation.get(key, "") for key in ("version", "license", "doi")}
    return kept | {"commit": commit_of(project), "dated": dated, "dates": dates[:1] + dates[1:][-1:]}


def keep_citation(app: Any, failed: Exception | None) -> None:
    """CITATION.cff, and the same as BibTeX, beside the pages."""
    project, out = Path(app.srcdir).parent, Path(app.outdir, FILES)
    if failed or not (citation := read_citation(project)):
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / "CITATION.cff").write_bytes((project / "CITATION.cff").read_bytes())
    known, url = origin(project, frozenset(app.env.found_docs)), app.config.html_theme_options.get("repository_url", "")
    year = known["dates"][-1][:4] if known["dates"] else ""
    (out / "cite.bib").write_text(bibtex(citation, year, url, known["commit"]), encoding="utf-8")
