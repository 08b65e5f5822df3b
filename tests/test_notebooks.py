"""Every notebook through papermill at the smallest size, on tiny models; the book runs them on its own."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import families
import nbformat
import pytest
import yaml
from pages import papermill
from papermill.inspection import inspect_notebook

from eestudy.claims import NOT_APPLICABLE, UNTESTABLE, claims

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [notebook.stem for notebook in NOTEBOOKS]
SHARED = {"model", "tasks", "limit", "max_new_tokens", "chat", "wording", "batch_size", "dtype", "device"}
SHARED |= {"runs_folder", "results_folder"}
SMALL = {"tasks": "translation/de-en", "limit": 4, "max_new_tokens": 4, "device": "cpu"}
ALONE = {  # without further models, and as little as may be of what is decoded and timed
    "architectures": {"beside": ""},
    "joint_optimization": {"others": "", "pair_sequences": 1},
    "gates": {"weighted": ""},
    "monotonicity": {"example_sequence": 0},
    "production": {"structured": "", "few_exits": 1, "sequences": 1, "batches": 2, "rows": 2, "timed_tokens": 1},
    "saturation": {"example_sequence": 0},
    "speed": {"timed_gates": "", "few_exits": 1, "sequences": 2, "timed_tokens": 2, "batch": 2, "kv_sequences": 2},
    "sublayers": {"site_sequences": 1},
}
PACKED = ("saturation", "sublayers")  # run on a GGUF file: one needs readouts alone, one parts of blocks


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{notebook: (finished process, model, folder of runs, folder of results)}, two at a time."""
    folder = tmp_path_factory.mktemp("notebooks")
    families.save("gpt2", folder / "gpt2")
    families.save_gguf(folder / "packed.gguf")  # with a chat template

    def run(name):
        model, values = folder / ("packed.gguf" if name in PACKED else "gpt2"), SMALL | ALONE.get(name, {})
        values |= {"after": str(model)} if name == "joint_optimization" else {}
        traces, results = folder / model.stem, folder / "results"
        folders = {"runs_folder": str(traces), "results_folder": str(results)}
        process = papermill(ROOT, name, folder / f"{name}.ipynb", model=str(model), **values, **folders)
        return process, model, traces, results

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(NAMES, pool.map(run, NAMES)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_runs_alone_and_writes_its_results(name, runs):
    process, model, traces, results = runs[name]
    assert process.returncode == 0, process.stderr[-3000:]
    written = json.loads((results / model.stem / f"{name}.json").read_text())
    assert written["model"] == model.stem and written["parameters"]["limit"] == 4
    assert {claim["id"] for claim in written["claims"]} == {claim.id for claim in claims() if claim.notebook == name}
    # Random weights know no task, so nothing is judged: what is concluded of a task that is known, tests/eestudy shows.
    assert not any(written["above_baseline"].values())
    assert all(claim["verdict"] in (UNTESTABLE, NOT_APPLICABLE) and claim["reason"] for claim in written["claims"])
    manifests = [json.loads(file.read_text()) for file in traces.rglob("manifest.json")]
    assert manifests and {manifest["chat"] for manifest in manifests} == {name in PACKED}
    assert name not in PACKED or {one["title"] for one in manifests} == {"packed, 8-bit (Q8_0), dequantized"}


def test_each_notebook_is_in_the_study_and_judged_on_planted_data():
    files = (ROOT / "tests/eestudy").glob("test_page*.py")
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    judged = set(re.findall(r'(?:verdicts|run_page)\(\s*"(\w+)"', code))
    assert judged == set(NAMES) == set(yaml.safe_load((ROOT / "study.yml").read_text())["notebooks"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_cells_are_short_and_declare_their_parameters(path):
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    live = path.stem in ("architectures", "production", "speed")  # they decode for real, and time it
    assert live or not any("import torch" in cell.source for cell in cells)
    assert sum("answer" in cell.metadata.get("tags", []) for cell in cells) == 1
    seen = [cell.source for cell in cells if not {"parameters", "hide-input"} & set(cell.metadata.get("tags", []))]
    assert all(len(list(filter(str.strip, source.splitlines()))) <= 16 for source in seen)
    assert any("assert " in source for source in seen)  # what a reader computes is what the library gives
    (parameters,) = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    declared = inspect_notebook(str(path))
    assert SHARED <= set(declared)
    assert all(p["help"] and p["inferred_type_name"] != "None" for p in declared.values())
    assert all("#" in line for line in parameters.source.splitlines())
