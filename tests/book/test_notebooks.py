"""What the book takes from notebooks."""

import json

from markdown_it import MarkdownIt

from eestudy.book.notebooks import executed, front_figures, heading


def test_no_figure_leaves_its_fence_on_the_front_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book/results/a").mkdir(parents=True)
    html = "<figure><img src=x>\n````\n```{include} /etc/hosts\n```\n</figure>"
    cell = {"metadata": {"tags": ["front-page"]}, "outputs": [{"data": {"text/html": html}}]}
    (tmp_path / "book/results/a/n.ipynb").write_text(json.dumps({"cells": [cell]}))
    (token,) = MarkdownIt().parse(front_figures("a", ["n"])[0])
    assert token.type == "fence" and token.info == "{raw} html" and token.content == html + "\n"


def test_a_notebook_s_title_or_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").mkdir()
    cells = [
        {"cell_type": "code", "source": ["# no title\n"]},
        {"cell_type": "markdown", "source": ["text\n", "# A title: what?\n", "# Another"]},
    ]
    (tmp_path / "notebooks/with.ipynb").write_text(json.dumps({"cells": cells}))
    (tmp_path / "notebooks/with_none.ipynb").write_text("")
    assert heading("with") == "A title: what?" and heading("with_none") == "with none"


def test_what_did_not_run_is_empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert executed("m", "n") == {} and front_figures("m", ["n"]) == ("", "")
