"""A study on a real Slurm: jobs are killed, cancelled and held up, and every byte has to be that of a plain run.

`python -m checks.cluster` runs two tiny random models through three notebooks, with two workers for the traces of each,
on a Slurm of one node: this machine (`checks.one_node`). A worker is killed with -9, the node is drained and resumes, a
notebook's job is cancelled, and the study is called again. Then the same study runs by `make book`, without workers.
Jobs that no node can take are asked for last. It works in a temporary folder, ends its daemons, writes
data/checks/cluster.json, and ends with status 1 where a byte differs. Where Slurm can't be had it says so in a line.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from checks.compare_results import differences, results_in
from checks.crashes import content
from checks.one_node import NoSlurm, OneNode
from checks.report import headed, write_report
from eelib.common.files import data_folder
from eelib.common.machine import versions

ROOT = Path(__file__).parents[1]
RESULT = data_folder("checks", "cluster.json")
CODE = (
    "Makefile",
    "Snakefile",
    "_config.yml",
    "constraints.txt",
    "pyproject.toml",
    "eelib",
    "eestudy",
    "notebooks",
    "workflow",
)
FAMILIES, NOTEBOOKS, WORKERS = ("llama", "gpt2"), ("saturation", "length", "subwords"), 2
ASKED = {"tasks": "translation/de-en", "limit": 96, "max_new_tokens": 48, "batch_size": 2, "device": "cpu"}
PATIENCE = 1800  # seconds until what has to happen has happened
WORKER = "eestudy.book.worker"
SCRIPTS = ("snakemake", "papermill")
OFTEN = "--slurm-init-seconds-before-status-checks=10"


def study(**settings: Any) -> str:
    """A study file of all models and notebooks; `settings` are those of each model."""
    models = {f"tiny/{family}": {"memory_gb": 2} | settings for family in FAMILIES}
    return yaml.safe_dump(
        {"threads": 1, "parameters": ASKED, "notebooks": {n: {} for n in NOTEBOOKS}, "models": models}
    )


def make_environment(folder: Path) -> None:
    """An environment with all packages of this one; what is installed into it goes with it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in SCRIPTS:
        lines = Path(sysconfig.get_path("scripts"), name).read_text().splitlines()
        (folder / "bin" / name).write_text("\n".join([f"#!{folder}/bin/python", *lines[1:]]) + "\n")
        (folder / "bin" / name).chmod(0o755)


def install_executor(folder: Path) -> None:
    """What a user of a cluster installs beside the project."""
    pins = ("--constraint", ROOT / "constraints.txt", "snakemake-executor-plugin-slurm")
    subprocess.run([folder / "bin/python", "-m", "pip", "install", "-qq", *pins], check=True)


def make_project(folder: Path, models: Path) -> None:
    """A copy of this checkout's code, with the tiny models beside it; data are linked, results are its own."""
    folder.mkdir()
    for name in CODE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / name)
    shutil.copytree(models, folder / "tiny")
    (folder / "data").symlink_to(data_folder())


def save_models(folder: Path) -> None:
    """The tiny models."""
    from checks.tiny import build
    from checks.tiny_texts import tokenizer_for

    for family in FAMILIES:
        build("causal", family).save_pretrained(folder / family)
        tokenizer_for("causal").save_pretrained(folder / family)


class Made:
    """A call of `python -m eestudy.book` in a project that runs on, its output in a file; it ends with its `with`."""

    def __init__(self, project: Path, environment: dict[str, str], study: str, *settings: str) -> None:
        bin_folder, self.project = project.parent / "venv/bin", project
        self.said = project / f"book-{time.time_ns()}.txt"
        clean = {key: value for key, value in environment.items() if not key.startswith(("MAKE", "MFLAGS"))}
        with open(self.said, "w") as file:
            self.process = subprocess.Popen(
                [bin_folder / "python", "-m", "eestudy.book", study, *settings],
                cwd=project,
                env=clean
                | {"PATH": f"{bin_folder}:{clean['PATH']}", "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> "Made":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def text(self) -> str:
        """What it has said so far."""
        return self.said.read_text(errors="replace")

    def until(self, happened: Callable[[], Any], what: str, pause: float = 0.2) -> Any:
        """What `happened` gives once it is true; RuntimeError where `make` ends before, or all takes too long."""
        end = time.monotonic() + PATIENCE
        while not (found := happened()):
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"waited for {what} in vain; it printed:\n{self.text()[-3000:]}")
            time.sleep(pause)
        return found

    def status(self) -> int:
        """Wait for its end; its exit status."""
        try:
            return self.process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"make did not end; it said:\n{self.text()[-3000:]}") from None

    def stop(self) -> None:
        """End it with all that it started."""
        if self.process.poll() is None:
            below = psutil.Process(self.process.pid).children(recursive=True)
            for process in [psutil.Process(self.process.pid), *below]:
                with suppress(psutil.NoSuchProcess):  # such as a look at the queue, which ended meanwhile
                    process.kill()
            self.process.wait()


def on_slurm(slurm: OneNode, project: Path, study: str = "study.yml", *more: str) -> Made:
    """The study of a project on Slurm."""
    profile = ("--profile", "workflow/profiles/slurm")
    return Made(project, slurm.environment, study, *profile, OFTEN, *more, "results")


def disturbed(slurm: OneNode, project: Path, told: Callable[[str], None]) -> dict[str, Any]:
    """The study on Slurm: a worker is killed, the node drained, a notebook cancelled; then it is called again."""
    found: dict[str, Any] = {}
    with on_slurm(slurm, project) as call:

        def at_work() -> bool:
            return len([*project.glob("runs/*/*/tokens-*.parquet")]) > 2 and len(slurm.processes(WORKER)) > 1

        call.until(at_work, "two workers at work", 0.05)
        slurm.processes(WORKER)[0].kill()
        told("a worker was killed")

        def restarts() -> int:  # the job's own Snakemake does it
            return sum("Trying to restart" in log.read_text() for log in project.glob(".snakemake/slurm_logs/**/*.log"))

        call.until(restarts, "the killed worker to be started again")
        found["workers_started_again"] = restarts()
        slurm.set_node("drain")
        call.until(lambda: not slurm.jobs() and slurm.jobs("pending"), "the drained node to be empty")
        found["held_by_the_drained_node"] = len(slurm.jobs("pending"))
        time.sleep(15)
        found["started_while_drained"] = len(slurm.jobs())
        slurm.set_node("resume")
        told(f"the drained node held {found['held_by_the_drained_node']} jobs, and resumes")

        def notebook() -> str | None:
            return next((number for number, what in slurm.jobs().items() if "notebook" in what), None)

        number = call.until(notebook, "a notebook's job")
        slurm.command("scancel", number)
        began = time.monotonic()
        call.until(lambda: f"SLURM-job '{number}' failed" in call.text(), "the cancelled job to be noticed")
        found["seconds_until_it_was_noticed"] = round(time.monotonic() - began, 1)
        told(f"a cancelled job was noticed after {found['seconds_until_it_was_noticed']} s")
        found["status_with_a_cancelled_job"] = call.status()
        found["finished_beside_it"] = len([*project.glob("results/*/*.json")])
    with on_slurm(slurm, project) as again:
        found["status_when_called_again"] = again.status()
        told(f"called again: status {found['status_when_called_again']}")
        if found["status_when_called_again"]:
            raise RuntimeError(f"the second call failed; it printed:\n{again.text()[-3000:]}")
    return found


def too_large(slurm: OneNode, project: Path) -> list[dict[str, Any]]:
    """What is said of jobs that the node can't take, for they ask for more memory, or more cores, than it has."""
    gigabytes, cores = slurm.memory // 1024 + 10, (os.cpu_count() or 1) * 4
    (project / "large.yml").write_text(study(workers=1, host_memory_gb=gigabytes))
    with on_slurm(slurm, project, "large.yml", "--forceall") as call:
        status, said = call.status(), call.text()
    named = [
        log for log in project.glob("logs/*/*.log") if log.stat().st_size and str(log.relative_to(project)) in said
    ]
    why = next((line.strip() for line in said.splitlines() if "can not be satisfied" in line), "")
    rows = [{"asked": f"{gigabytes} GB", "said": why, "ok": bool(status and why and not named)}]
    (project / "large.yml").write_text(study(workers=1, threads=cores))
    with on_slurm(slurm, project, "large.yml", "--forceall") as call:

        def waiting() -> list[str]:  # with the cores that it asks for, and why it waits
            lines = slurm.command("squeue", "--noheader", "--states=pending", "--format=%C %r").splitlines()
            return [line for line in lines if line.endswith("PartitionConfig")]

        lines = call.until(waiting, "jobs that no node can take")
    asked = {int(line.split()[0]) for line in lines}
    return [*rows, {"asked": f"{cores} cores", "said": f"squeue: {lines[0].split()[1]}", "ok": asked == {cores}}]


def traces(project: Path) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of every file of every trace but its lock and its times."""
    for folder in sorted(project.glob("runs/*/*")):
        for name, data in content(folder).items():
            yield f"{folder.relative_to(project / 'runs')}/{name}", data


def outputs(project: Path) -> Iterator[tuple[str, str]]:
    """(cell, what it shows) of every cell of every executed notebook, pictures included."""
    for page in sorted(project.glob("book/results/*/*.ipynb")):
        for number, cell in enumerate(json.loads(page.read_text(encoding="utf-8"))["cells"]):
            shown = [part.get("data", part.get("text")) for part in cell.get("outputs", [])]
            yield f"{page.parent.name}/{page.stem}, cell {number}", json.dumps(shown, sort_keys=True)


def compared(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """How many entries there are, how many are the same, and the names of those that are not."""
    names = one.keys() | other.keys()
    differ = sorted(name for name in names if one.get(name) != other.get(name))
    return {"compared": len(names), "identical": len(names) - len(differ), "differ": differ}


def report(folder: Path, memory: int) -> dict[str, Any]:
    """Run everything in a folder; what came of it."""
    began = time.monotonic()

    def told(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True)

    with OneNode(folder / "slurm", memory) as slurm:
        version = slurm.command("squeue", "--version").split()[-1]
        save_models(folder / "models")
        make_environment(folder / "venv")
        install_executor(folder / "venv")
        cluster, plain = folder / "cluster", folder / "plain"
        for project, settings in ((cluster, {"workers": WORKERS, "hours": 1}), (plain, {})):
            make_project(project, folder / "models")
            (project / "study.yml").write_text(study(**settings))
        told(f"Slurm {version} runs")
        happened = disturbed(slurm, cluster, told)
        large = too_large(slurm, cluster)
        told(f"{sum(row['ok'] for row in large)} of {len(large)} jobs that are too large were explained")
    with Made(plain, dict(os.environ), "study.yml", "--cores", "2", "results") as call:
        if call.status():
            raise RuntimeError(f"the plain run failed; it printed:\n{call.text()[-3000:]}")
    told("the plain run is done")
    before, after = (results_in(project / "results", False) for project in (plain, cluster))
    different = [where for where, _, _ in differences(before, after)]
    found = {
        "files": compared(dict(traces(cluster)), dict(traces(plain))),
        "figures": {
            "compared": len(before.keys() | after.keys()),
            "identical": len(before.keys() | after.keys()) - len(different),
            "differ": different,
        },
        "cells": compared(dict(outputs(cluster)), dict(outputs(plain))),
    }
    return {
        "versions": versions("snakemake", "papermill") | {"slurm": version},
        "models": len(FAMILIES),
        "notebooks": len(NOTEBOOKS),
        "workers": WORKERS,
        "seconds": round(time.monotonic() - began),
        "killed_workers": 1,
        **happened,
        "too_large": large,
        **found,
    }


def good(found: dict[str, Any]) -> bool:
    """Whether all happened as it should, and nothing differs."""
    return (
        found["started_while_drained"] == 0 < found["held_by_the_drained_node"]
        and found["status_with_a_cancelled_job"] != 0
        and found["status_when_called_again"] == 0
        and all(row["ok"] for row in found["too_large"])
        and all(found[key]["compared"] == found[key]["identical"] > 0 for key in ("files", "figures", "cells"))
    )


def end(*_: object) -> None:
    """End with all that was started; a second signal does not disturb it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit("asked to end")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULT, help=f"where the JSON goes ({RESULT})")
    parser.add_argument("--keep", type=Path, help="work in this new folder and leave it")
    asked = parser.parse_args()
    head, memory = headed("cluster"), psutil.virtual_memory().total >> 20
    signal.signal(signal.SIGTERM, end)
    try:
        if asked.keep:
            asked.keep.mkdir()
            found = report(asked.keep.resolve(), memory)
        else:
            with tempfile.TemporaryDirectory(prefix="eelib-cluster-") as name:
                found = report(Path(name), memory)
    except NoSlurm as error:
        sys.exit(f"There is no Slurm here, and none can be had: {error}")
    found["ok"] = good(found)
    write_report(asked.output, head, **found)
    print(json.dumps(found))
    sys.exit(0 if found["ok"] else 1)


if __name__ == "__main__":
    main()
