"""Notebooks run cell by cell in this process, without a kernel: quick enough to try every claim both ways; and by
papermill, as a user and the book run them.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt
import nbformat
from IPython import display as ipython

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def run_page(name: str, **parameters: Any) -> tuple[dict[str, Any], list[Any]]:
    """The namespace after all cells of a notebook, and what it displayed, in order."""
    cells = [c for c in nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells if c.cell_type == "code"]
    sources = [cell.source for cell in cells]
    namespace: dict[str, Any] = {}
    at = next(n for n, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", []))
    given = "# Parameters\n" + "\n".join(f"{key} = {value!r}" for key, value in parameters.items())
    sources.insert(at + 1, given)
    namespace["In"] = sources
    shown: list[Any] = []
    plt.switch_backend("Agg")
    shell = SimpleNamespace(user_ns=namespace)  # where `check_parameters` looks
    import eestudy.figures.style
    import eestudy.results

    with (
        mock.patch.object(ipython, "display", shown.append),
        mock.patch.object(eestudy.figures.style, "display", shown.append),
        mock.patch.object(eestudy.results, "display", shown.append),
        mock.patch("IPython.get_ipython", return_value=shell),
    ):
        for source in sources:
            exec(compile(source, f"{name}.ipynb", "exec"), namespace)
    return namespace, shown


def texts(shown: list[Any]) -> str:
    """What was displayed, as text, without the pictures and files in it."""
    whole = "\n".join(str(getattr(item, "data", item)) for item in shown)
    return re.sub(r"base64,[\w+/=]+", "", whole)


def result(namespace: dict[str, Any]) -> dict[str, Any]:
    """The results file that a notebook wrote."""
    found = namespace["results"]
    return json.loads((found.folder / f"{found.notebook}.json").read_text(encoding="utf-8"))


def verdicts(namespace: dict[str, Any]) -> dict[str, str]:
    """The verdict on each claim in the results file that a notebook wrote."""
    return {row["id"]: row["verdict"] for row in result(namespace)["claims"]}


def program(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program of this environment, run in a folder whose packages it imports; on one thread."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "JUPYTER_PREFER_ENV_PATH": "1",
    }
    return subprocess.run(command, cwd=folder, env=environment | variables, capture_output=True, text=True, timeout=900)


def papermill(folder: Path, notebook: str, page: Path, /, **values: Any) -> subprocess.CompletedProcess[str]:
    """One plain papermill call in a folder, as a user types it: a notebook of the folder, and the page to write."""
    command = [sys.executable, "-m", "papermill", f"notebooks/{notebook}.ipynb", str(page)]
    command += ["-k", "python3", "--no-progress-bar"]
    for name, value in values.items():
        command += ["-r" if isinstance(value, str) else "-p", name, str(value)]
    return program(folder, *command)
