"""What is put into a page of results as Sphinx reads it."""

import json
from types import SimpleNamespace

from docutils import nodes
from docutils.core import publish_doctree

from eestudy.book.answered import answered, fold_details, read


def made(first="# Title: what?\n\n**Question.** Why?", kind="markdown"):
    cells = [
        {"cell_type": kind, "metadata": {}, "source": first.splitlines(keepends=True)},
        {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": ["x = 1"]},
        {"cell_type": "code", "metadata": {"tags": ["injected-parameters"]}, "source": ["x = 2"]},
        {"cell_type": "code", "metadata": {}, "source": ["y = 1"]},
    ]
    return {"cells": cells}


def test_the_answer_stands_between_title_and_question():
    lines = answered(made(), "<p>42</p>")["cells"][0]["source"].splitlines()
    assert lines[0] == "# Title: what?" and lines[-1] == "**Question.** Why?"
    assert lines.index("<p>42</p>") == lines.index("```{raw} html") + 1


def test_cells_of_parameters_are_folded_and_others_are_not():
    parameters, injected, other = answered(made(), "")["cells"][1:]
    for cell in (parameters, injected):
        assert "hide-input" in cell["metadata"]["tags"] and "parameters" in " ".join(cell["metadata"]["tags"])
    shown = [cell["metadata"]["mystnb"]["code_prompt_show"] for cell in (parameters, injected)]
    assert len(set(shown)) == 2 and other["metadata"] == {}


def test_a_page_without_a_title_or_an_answer_keeps_its_text():
    for notebook, answer in ((made("No title"), "<p>1</p>"), (made(kind="code"), "<p>1</p>"), (made(), "")):
        before = "".join(notebook["cells"][0]["source"])
        assert "".join(answered(notebook, answer)["cells"][0]["source"]) == before


def test_only_pages_of_results_are_changed(tmp_path):
    (tmp_path / "generated/answers/m").mkdir(parents=True)
    (tmp_path / "generated/answers/m/n.html").write_text("<p>42</p>")
    app, content = SimpleNamespace(srcdir=tmp_path), ["# Prose"]
    read(app, "intro", content)
    assert content == ["# Prose"]
    for name, found in (("results/m/n", True), ("results/m/other", False)):
        content = [json.dumps(made())]
        read(app, name, content)
        assert ("<p>42</p>" in json.loads(content[0])["cells"][0]["source"]) is found


def test_a_link_to_a_page_that_is_not_there_is_its_words():
    notebook = made("See [the other](other.ipynb) and [it](https://a.org/b.ipynb).")
    page = answered(notebook, "", {"other"})["cells"][0]["source"]
    assert page == "See [the other](other.ipynb) and [it](https://a.org/b.ipynb)."
    assert answered(notebook, "")["cells"][0]["source"] == "See the other and [it](https://a.org/b.ipynb)."


def test_the_cell_that_answers_stands_under_the_title_and_its_template_is_hidden():
    notebook = made()
    notebook["cells"].append({"cell_type": "code", "metadata": {"tags": ["hide-input", "answer"]}, "source": ["say()"]})
    title, moved, rest, *others = answered(notebook, "<p>chips</p>")["cells"]
    assert title["source"] == "# Title: what?" and moved["source"] == ["say()"]
    assert "remove-input" in moved["metadata"]["tags"] and "<p>chips</p>" in rest["source"]
    assert "**Question.** Why?" in rest["source"] and len(others) == 3


def test_details_are_folded():
    document = publish_doctree("Title\n=====\n\nText.\n\nDetails\n-------\n\nMore.\n\nOther\n-----\n\nEnd.\n")
    fold_details(None, document)
    raw = [node.astext() for node in document.findall(nodes.raw)]
    assert raw == ['<details class="ee-details"><summary>Show the details</summary>', "</details>"]
