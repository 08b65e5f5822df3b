"""How the study is cited, and what its pages say of where they come from."""

import json
import subprocess
from types import SimpleNamespace

from eestudy.book.citation import bibtex, commit_of, read_citation
from eestudy.book.extension import keep_citation, lay_out

CITATION = (
    'title: "A, B"\nversion: 1.2\nlicense: MIT\nauthors: [{name: The X group}, {family-names: Y, given-names: Z}]\n'
)


def test_bibtex_has_a_place_for_a_doi(tmp_path):
    (tmp_path / "CITATION.cff").write_text(CITATION)
    citation = read_citation(tmp_path)
    entry = bibtex(citation, "2026", commit="abc")
    assert (
        "author = {{The X group} and Y, Z}," in entry
        and "title = {{A, B}}," in entry
        and "note = {commit abc}," in entry
    )
    assert entry.startswith("% no DOI yet") and "url" not in entry
    with_both = bibtex(citation | {"doi": "10.1/x"}, "2026", "https://a.org")
    assert (
        with_both.startswith("@software{") and "doi = {10.1/x}," in with_both and "url = {https://a.org}," in with_both
    )


def test_the_commit_says_where_files_differ(tmp_path):
    assert commit_of(tmp_path) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "a").write_text("1")
    for words in (["init", "-q"], ["add", "a"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True)
    clean = commit_of(tmp_path)
    (tmp_path / "a").write_text("2")
    assert len(clean) >= 7 and commit_of(tmp_path) == f"{clean}+"


def test_a_page_s_foot(tmp_path):
    (tmp_path / "CITATION.cff").write_text(CITATION)
    for name, date in (("n", "2026-01-02"), ("m", "2026-02-03")):
        (tmp_path / "results/a").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"results/a/{name}.json").write_text(json.dumps({"date": date}))
    app = SimpleNamespace(
        srcdir=tmp_path / "book",
        outdir=tmp_path / "html",
        env=SimpleNamespace(found_docs={"intro", "results/a/n", "results/a/m", "results/a/none"}),
        config=SimpleNamespace(html_theme_options={"repository_url": "https://a.org"}),
    )
    feet = {}
    for page in ("results/a/n", "intro"):
        context = {"body": "<p></p>"}
        lay_out(app, page, "page.html", context, None)
        feet[page] = context["foot"]
    assert feet["results/a/n"]["dates"] == ["2026-01-02"] and feet["intro"]["dates"] == ["2026-01-02", "2026-02-03"]
    assert feet["results/a/n"]["results"] == "../../files/results/a/n/results.json" and not feet["intro"]["results"]
    assert (tmp_path / "html/files/results/a/n/results.json").exists()
    assert feet["intro"]["version"] == 1.2 and feet["intro"]["repository"] == "https://a.org"
    keep_citation(app, None)
    assert "year = {2026}" in (tmp_path / "html/files/cite.bib").read_text()
