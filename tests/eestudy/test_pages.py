"""Every claim of a page tried both ways on planted traces, and runs on which a page can conclude nothing."""

import json
import re

import nbformat
import numpy as np
import pytest
from pages import NOTEBOOKS, result, run_page, texts
from planted import STEPS, exits, plant
from test_planted_verdicts import SATURATION, questions, wide_model

import eelib

NEW = ("saturation",)  # notebooks that show their computation


@pytest.mark.parametrize("verdict", SATURATION)
def test_saturation(verdict, planted_tasks, tmp_path):
    """Nearly all tokens early, at nearly the same layer, most of all into English; or nearly none, and less into it."""
    model = wide_model(tmp_path / "wide")
    tasks = [*planted_tasks, *(questions(tmp_path, f"asked{n}") for n in range(4))]
    for name, layer in zip(tasks, SATURATION[verdict], strict=True):
        plant(model, eelib.load_task(name), tmp_path / "runs", lambda t: exits(varied(t, layer), 3), STEPS)
    space = run_page("saturation", **asked(tmp_path, tmp_path / "wide", ",".join(tasks)))[0]
    found = result(space)
    assert {row["id"]: row["verdict"] for row in found["claims"]} == dict.fromkeys(
        ("P-S1", "P-S2", "P-S3", "P-S4", "P-S5"), verdict
    )


@pytest.mark.parametrize("notebook", NEW)
@pytest.mark.parametrize("family, rows", [("gpt2", 5), ("t5", 5), ("bert_labels", 40)])
def test_a_run_that_shows_nothing_says_so(notebook, family, rows, folder_of, tmp_path):
    """Five texts on which a random model writes nonsense, and a classifier that guesses."""
    texts_of = [{"source": f"Satz {i}.", "references": [f"Sentence {i}."]} for i in range(rows)]
    if family == "bert_labels":
        texts_of = [
            {"premise": f"The dog {i} ran", "hypothesis": "a green dog " * (i % 4 + 1), "label": i % 3}
            for i in range(rows)
        ]
    name = tmp_path / ("tiny.mnli.jsonl" if family == "bert_labels" else "tiny.de-en.jsonl")
    name.write_text("\n".join(map(json.dumps, texts_of)))
    space, shown = run_page(notebook, **asked(tmp_path, folder_of(family), str(name)))
    found = result(space)
    assert {row["verdict"] for row in found["claims"]} <= {"not testable here", "not applicable"}
    assert "nothing can be concluded" in found["answer"] and not re.search(r"\bnan\b", texts(shown), re.IGNORECASE)


@pytest.mark.parametrize("notebook", NEW)
def test_a_page_shows_its_computation(notebook):
    """A visible cell asserts that it finds what the library finds; no cell is longer than sixteen lines of code."""
    cells = [c for c in nbformat.read(NOTEBOOKS / f"{notebook}.ipynb", 4).cells if c.cell_type == "code"]
    open_cells = [c.source for c in cells if not {"hide-input", "parameters"} & set(c.metadata.get("tags", []))]
    assert any(line.startswith("assert ") for source in open_cells for line in source.splitlines())
    assert sum("answer" in cell.metadata.get("tags", []) for cell in cells) == 1


def varied(tokens, layer):
    """Exit layers by position, but for one token of every seventh output: groups that are all alike show nothing."""
    layers = layer(tokens["position"].to_numpy())
    other = (tokens["sequence"] % 7 == 0) & (tokens["position"] == 1)
    return np.where(other, 4 - layers, layers)


def asked(folder, model, tasks):
    """Parameters of a page whose texts, traces and results lie in `folder`."""
    kept = {"runs_folder": str(folder / "runs"), "results_folder": str(folder / "results")}
    return kept | {"model": str(model), "tasks": tasks, "limit": 0, "max_new_tokens": STEPS, "device": "cpu"}


def test_planted_layers_are_what_a_page_counts(planted_tasks, tmp_path):
    """The mean exit layer that the page states is that of the planted layers."""
    model = wide_model(tmp_path / "wide")
    task = eelib.load_task(planted_tasks[0])
    plant(model, task, tmp_path / "runs", lambda t: exits(1 + t["position"] % 3, 3), STEPS)
    space, _ = run_page("saturation", **asked(tmp_path, tmp_path / "wide", planted_tasks[0]))
    positions = space["tokens"]["position"].to_numpy()
    np.testing.assert_array_equal(space["tokens"]["first"], 1 + positions % 3)
    assert result(space)["overall"]["mean_first"]["estimate"] == pytest.approx(float(np.mean(1 + positions % 3)))
