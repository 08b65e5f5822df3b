"""The built book as files: all is there, described, numbered, linked, and can be taken away."""

import json
import re
import urllib.request

from book_built import ALLOWED, HTML, ROOT, slow

from eestudy.book.answers import ANSWERS, CONFIDENCE, FRONT, figures, sentences, together
from eestudy.book.study_file import StudyFile
from eestudy.study.claims import claims


@slow
def test_no_sentence_of_an_answer_is_left_out(pages):
    results = {
        ("m", path.stem): json.loads(path.read_text()) for path in (ROOT / "results/pocket-llama").glob("*.json")
    }
    assert {notebook for _, notebook in results} == set(ANSWERS)
    for (_, notebook), result in results.items():
        for pattern in ANSWERS[notebook]:
            assert sentences([pattern], figures(result)), (notebook, pattern)
    for pattern in (*FRONT, *CONFIDENCE):
        assert sentences([pattern], together(results, "m")), pattern


@slow
def test_every_page_of_the_study_is_in_the_book(pages):
    study = StudyFile.load(ROOT / "study.yml")
    wanted = {HTML / "results" / model / f"{notebook}.html" for model, notebook in study.runs}
    assert wanted <= set(pages)


@slow
def test_every_image_has_alternative_text(pages):
    missing = [
        (path.name, str(image)[:150])
        for path, page in pages.items()
        for image in page.select("article img")
        if not image.get("alt", "").strip() or image["alt"].endswith((".png", ".svg"))
    ]
    assert not missing


@slow
def test_each_page_has_an_icon_and_a_title_that_says_nothing_twice(pages):
    for path, page in pages.items():
        if page.select("meta[http-equiv=Refresh]"):
            continue
        said = [part.strip() for part in page.title.get_text().split("\u2014")]
        assert len(set(said)) == len(said), (path.name, said)
        assert (path.parent / page.select_one("link[rel=icon]")["href"]).exists(), path.name


@slow
def test_tables_have_captions_scopes_and_short_numbers(pages):
    """Numbers have no five digits behind their leading zeros."""
    for path, page in pages.items():
        for table in page.select("article table"):
            if table.find_parent(class_=["lens", "ee-apart"]) or not table.tr:
                continue
            where = (path.name, table.get_text()[:80])
            assert table.caption and table.caption.get_text().strip(), where
            assert {cell.get("scope") for cell in table.select("th")} <= {"col", "row", "colgroup", "rowgroup"}, where
            long = [cell for cell in table.select("td") if re.search(r"(?<![\d.])\d+\.0*[1-9]\d{4,}", cell.get_text())]
            assert not long or path.name == "cards.html", (where, long[:3])


@slow
def test_captions_are_unique_on_their_page_and_end_as_sentences_do(pages):
    for path, page in pages.items():
        numbers = page.select("article :is(caption, figcaption) .ee-number")
        said = [
            number.find_parent(["caption", "figcaption"]).get_text().partition(". ")[2].strip() for number in numbers
        ]
        assert len(set(said)) == len(said), path.name
        assert all(words.endswith((".", "?", "!")) for words in said), (path.name, said)


@slow
def test_figures_and_tables_are_numbered_and_can_be_taken_away(pages):
    """Numbers count up from 1; a notebook's figure is there as SVG, PNG and CSV, a table as CSV, a page as JSON."""
    for path, page in pages.items():
        for kind, label, least in (("figure", "Figure", {"SVG", "PNG", "CSV"}), ("table", "Table", {"CSV"})):
            numbered = page.select(f"article [id^={kind}-]:has(.ee-take)")
            assert [part["id"] for part in numbered] == [f"{kind}-{n + 1}" for n in range(len(numbered))], path.name
            for number, part in enumerate(numbered, 1):
                assert part.select_one(f".ee-number[href='#{kind}-{number}']").get_text() == f"{label} {number}."
                files = {link.get_text(): path.parent / link["href"] for link in part.select(".ee-take a")}
                assert set(files) >= (least if kind == "table" or "ee-figure" in part.get("class", ()) else {"PNG"})
                for name, file in files.items():
                    content = file.read_bytes()
                    assert {"PNG": b"\x89PNG", "SVG": b"</svg>", "CSV": b"\n"}[name] in content, (path.name, name)
        assert not page.select("article [src^='data:'], article [href^='data:']"), path.name
        if path.parent.parent.name == "results":
            (data,) = page.select(".ee-foot a[href$='results.json']")
            assert json.loads((path.parent / data["href"]).read_text(encoding="utf-8"))["notebook"] == path.stem


@slow
def test_each_page_says_where_it_comes_from(pages):
    for path, page in pages.items():
        if not page.article:
            continue
        foot = page.select_one(".ee-foot")
        assert re.search(r"Version \d.*run on \d{4}-\d\d-\d\d.*Licence: MIT", foot.get_text(), re.DOTALL), path.name
        for name, mark in (("cite.bib", "@software{"), ("CITATION.cff", "cff-version")):
            assert mark in (path.parent / foot.select_one(f"a[href$='{name}']")["href"]).read_text(encoding="utf-8")


@slow
def test_no_role_or_traceback_is_left_in_the_text(pages):
    marks = ("{glue", "{cite", "{include", "Traceback (most recent call last)")
    left = [
        (path.name, mark)
        for path, page in pages.items()
        for mark in marks
        if page.article and mark in page.article.get_text()
    ]
    assert not left


@slow
def test_nothing_loads_from_another_site(pages):
    loads = {
        tag.get("src") or tag.get("href")
        for page in pages.values()
        for tag in page.select("script[src], img[src], iframe[src], link[href]:not([rel=canonical])")
    }
    assert not {address for address in loads if "//" in address and not address.startswith(("data:", *ALLOWED))}


@slow
def test_internal_links_lead_somewhere(pages):
    broken = []
    for path, page in pages.items():
        for link in page.select("a[href]"):
            target, _, anchor = link["href"].partition("#")
            if ":" in target or target.startswith("//"):
                continue
            place = (path.parent / urllib.request.url2pathname(target)).resolve() if target else path
            known = pages.get(place)
            if not place.exists() or (anchor and known and not known.find(id=anchor)):
                broken.append((path.name, link["href"]))
    assert not broken


@slow
def test_pages_of_results_begin_with_their_answer(pages):
    """Under the title an answer with a number and a chip for each claim; what sets the page up is folded."""
    for path, page in pages.items():
        if path.parent.parent.name != "results":
            continue
        first = page.select_one("article h1").find_next_sibling()
        assert "ee-answer" in first["class"] and re.search(r"\d", first.p.get_text()), path.name
        notebook = path.stem
        assert len(first.select("a.ee-chip")) == sum(row.notebook == notebook for row in claims()), path.name
        for cell in page.select(".tag_parameters, .tag_injected-parameters"):
            assert cell.select_one("details:not([open]) pre"), path.name


@slow
def test_the_first_page_leads_to_every_page_of_results(pages):
    intro = pages[HTML / "intro.html"]
    linked = {link["href"] for link in intro.select(".ee-cards .ee-title a")}
    study = StudyFile.load(ROOT / "study.yml")
    assert linked == {f"results/{model}/{notebook}.html" for model, notebook in study.runs}
    assert re.search(r"\d", intro.select_one("p.ee-lead").get_text())
