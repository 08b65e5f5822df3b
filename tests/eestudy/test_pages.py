"""Every claim of a page tried both ways on planted traces, and runs on which a page can conclude nothing."""

import json
import re

import nbformat
import numpy as np
import pytest
from pages import NOTEBOOKS, result, run_page, texts
from planted import NOUNS, STEPS, exits, plant
from test_planted_verdicts import SATURATION, questions, wide_model

import eelib

NEW = ("saturation", "length")  # notebooks that show their computation


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


MIDDLE = 18  # tokens of a planted output: no output of the shorter half is longer

# Exit layer by position p (from 0) and length n, of three; verdicts on P-L1, P-L2, P-L3. With one late token at the
# start, the mean of n tokens is 1 + 2 / n: it falls with n, ever less. Any slope is a weighted mean of the slopes
# between neighbouring lengths, so no draw can change these signs.
LENGTH = {
    "the first token late": (lambda p, n: np.where(p == 0, 3, 1), ("holds", "holds", "holds")),
    "the first token early": (
        lambda p, n: np.where(p == 0, 1, 3),
        ("does not hold", "not applicable", "does not hold"),
    ),
    # The shorter half stays at 3, the longer falls as 1 + 2 * MIDDLE / n, and inside those the end is late.
    "the last tokens late": (
        lambda p, n: np.where(p >= n - MIDDLE, 3, 1),
        ("holds", "does not hold", "does not hold"),
    ),
}


@pytest.mark.parametrize("name", LENGTH)
def test_length(name, planted_model, tmp_path):
    """References have one to eight words; each half of the outputs has groups enough for a verdict."""
    words = [[NOUNS[(i + j) % 10] for j in range(1 + i % 8)] for i in range(80)]
    rows = [{"source": f"Satz {i}.", "references": [" ".join(of_row)]} for i, of_row in enumerate(words)]
    file = tmp_path / "tiny.de-en.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    layer, wanted = LENGTH[name]

    def agrees(tokens):
        length = tokens.groupby("sequence")["position"].transform("max")  # the end token's place
        return exits(layer(tokens["position"].to_numpy(), length.to_numpy()), 3)

    made = plant(planted_model, eelib.load_task(str(file)), tmp_path / "runs", agrees, STEPS)
    assert 40 <= (made.sequences["length"] <= MIDDLE).sum() <= 50
    space = run_page("length", **asked(tmp_path, planted_model.name, str(file)) | {"model": str(tmp_path / "gpt2")})[0]
    found = result(space)
    assert {row["id"]: row["verdict"] for row in found["claims"]} == dict(zip(("P-L1", "P-L2", "P-L3"), wanted))
    own, levels = space["own"], np.eye(48)
    at_position = np.column_stack([own["length"], levels[own["position"]]]).astype(float)
    of_output = np.column_stack([own["position"], np.eye(80)[own["sequence"]]]).astype(float)
    for name, design in (("at_same", at_position), ("inside", of_output)):
        slope = np.linalg.lstsq(design, own["first"].astype(float), rcond=None)[0][0]
        assert found["overall"][name]["estimate"] == pytest.approx(slope)


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
    assert max(len([line for line in source.splitlines() if line.strip()]) for source in open_cells) <= 16
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
