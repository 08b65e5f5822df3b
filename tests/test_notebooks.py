"""Every notebook through papermill at small size, on a tiny model of another family; the book runs them on its own."""

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import families
import gguf_made
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


def papermilled(name: str, folder: Path, /, **values) -> subprocess.CompletedProcess:
    """A notebook's process at small size; its page, its runs and its results lie in a folder."""
    small = {"tasks": "translation/de-en", "limit": 4, "max_new_tokens": 12, "device": "cpu"}
    folders = {"runs_folder": folder / "runs", "results_folder": folder / "results"}
    return papermill(ROOT, name, folder / f"{name}.ipynb", **small | folders | values)


def tiny_beside(folder: Path) -> str:
    """A tiny encoder-decoder and a tiny classifier with three labels, each with its task."""
    rows = [{"premise": "The dog ran", "hypothesis": "a dog " * (i % 3 + 1), "label": i % 3} for i in range(9)]
    (folder / "tiny.mnli.jsonl").write_text("\n".join(map(json.dumps, rows)))
    t5, bert = (families.save(name, folder / name) for name in ("t5", "bert_labels"))
    return f"{t5} on translation/de-en; {bert} on {folder / 'tiny.mnli.jsonl'}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{notebook: (finished process, folder of results)}, two at a time."""
    folder = tmp_path_factory.mktemp("notebooks")
    model, after = (families.save("gpt2", folder / name, seed=seed) for seed, name in enumerate(("gpt2", "after")))
    others = tiny_beside(folder)
    pairs = "; ".join(f"{part.split(' on ')[0]} > {part}" for part in others.split("; "))  # each with itself
    more = {
        "architectures": {"beside": others, "timed_texts": 2},
        "joint_optimization": {"after": after, "pair_sequences": 2, "others": pairs},
        "gates": {"after": after, "weighted": f"{after} on translation/de-en"},
        "speed": {"after": after, "sequences": 3, "batch": 2, "timed_gates": f"{after} on translation/de-en"},
        "production": {"after": after, "sequences": 2, "batches": 2, "structured": ""},
        "monotonicity": {"after": after, "first_exit": 1, "beside_tasks": "translation/de-en", "beside_limit": 2}
        | {"example_sequence": 3, "plain": str(model), "weighted": after, "distilled": after, "beside_new_tokens": 4},
    }

    def run(name):
        return papermilled(name, folder, model=str(model), **more.get(name, {})), folder / "results" / "gpt2"

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(NAMES, pool.map(run, NAMES)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_runs_alone_and_writes_its_results(runs, name):
    process, results = runs[name]
    assert process.returncode == 0, process.stderr[-3000:]
    written = json.loads((results / f"{name}.json").read_text())
    assert written["model"] == "gpt2" and written["parameters"]["limit"] == 4
    assert {claim["id"] for claim in written["claims"]} == {claim.id for claim in claims() if claim.notebook == name}
    # Random weights know no task, so nothing is judged: what is concluded of a task that is known, tests/eestudy shows.
    assert not any(written["above_baseline"].values())
    assert all(claim["verdict"] in (UNTESTABLE, NOT_APPLICABLE) and claim["reason"] for claim in written["claims"])


def test_each_notebook_is_in_the_study_and_judged_on_planted_data():
    files = (ROOT / "tests/eestudy").glob("test_page*.py")
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    judged = set(re.findall(r'(?:verdicts|run_page)\(\s*"(\w+)"', code))
    assert judged == set(NAMES) == set(yaml.safe_load((ROOT / "study.yml").read_text())["notebooks"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["saturation", "sublayers"])  # from readouts alone, and from parts of blocks
def test_a_gguf_file_with_a_chat_template_goes_through_notebooks(name, tmp_path):
    gguf_made.write(tmp_path / "tiny.gguf")
    tasks = "translation/de-en,instructions/requests"
    process = papermilled(name, tmp_path, model=tmp_path / "tiny.gguf", tasks=tasks)
    assert process.returncode == 0, process.stderr[-3000:]
    written = json.loads((tmp_path / f"results/tiny/{name}.json").read_text())
    assert written["claims"] and not [claim for claim in written["claims"] if "template" in claim["reason"]]
    manifests = [json.loads(file.read_text()) for file in (tmp_path / "runs").rglob("manifest.json")]
    assert manifests and all(manifest["chat"] for manifest in manifests)
    assert {manifest["title"] for manifest in manifests} == {"tiny, 8-bit (Q8_0), dequantized"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_cells_are_short_and_declare_their_parameters(path):
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    live = path.stem in ("architectures", "production", "speed")  # they decode for real, and time it
    assert live or not any("import torch" in cell.source for cell in cells)
    assert sum("answer" in cell.metadata.get("tags", []) for cell in cells) == 1
    lines = [line for cell in nbformat.read(path, 4).cells for line in cell.source.splitlines()]
    assert max(map(len, lines)) <= 120
    seen = [cell.source for cell in cells if not {"parameters", "hide-input"} & set(cell.metadata.get("tags", []))]
    assert all(len(list(filter(str.strip, source.splitlines()))) <= 16 for source in seen)
    assert any("assert " in source for source in seen)  # what a reader computes is what the library gives
    (parameters,) = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    declared = inspect_notebook(str(path))
    assert SHARED <= set(declared)
    assert all(p["help"] and p["inferred_type_name"] != "None" for p in declared.values())
    assert all("#" in line for line in parameters.source.splitlines())
