"""A study on a real Slurm whose jobs are killed: every byte has to be that of a plain run.

Two tiny random models go through three notebooks, with two workers for the traces of each, on a Slurm of one node: this
machine, for as long as the check lasts. A worker is killed with -9, a notebook's job is cancelled, and the study is
called again. Then the same study runs without Slurm. It installs Slurm where apt is at hand, works in a temporary
folder, and ends its daemons; only the link to its configuration stands elsewhere, where jobs look for it.
"""

import json
import os
import shutil
import signal
import socket
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
from checks.report import TINY, Goal, all_of, finish, goal, headed, options
from checks.store import content
from checks.tiny import build
from checks.tiny_texts import tokenizer_for
from eelib.common.files import data_folder

ROOT = Path(__file__).parents[1]
CODE = (
    *("Makefile", "Snakefile", "_config.yml", "constraints.txt", "pyproject.toml"),
    *("eelib", "eestudy", "notebooks", "workflow"),
)
FAMILIES, NOTEBOOKS, WORKERS = ("llama", "gpt2"), ("saturation", "length", "subwords"), 2
ASKED = {"tasks": "translation/de-en", "limit": 96, "max_new_tokens": 48, "batch_size": 2, "device": "cpu"}
PATIENCE = 1800  # seconds until what has to happen has happened
WORKER = "eestudy.book.worker"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "srun")
KNOWN = Path("/etc/slurm/slurm.conf")  # jobs of Snakemake's executor do not inherit SLURM_CONF
MARK = "EELIB_ONE_NODE"  # what they do inherit
CONFIGURATION = """\
ClusterName=eelib
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory={memory} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class NoSlurm(Exception):
    """Slurm can't be installed or started here; why, in one line."""


# ---- a Slurm of one node


def install() -> None:
    """Have the programs of Slurm on the path; NoSlurm where they are not and can't be got."""
    if not (lacking := [name for name in PROGRAMS if not shutil.which(name)]):
        return
    if os.getuid() or not shutil.which("apt-get"):
        raise NoSlurm(f"{', '.join(lacking)} not found, and installing slurm-wlm and munge takes root and apt")
    print("installing slurm-wlm and munge", flush=True)
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # no service is to be started
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "slurm-wlm", "munge"]):
        done = subprocess.run(["apt-get", *command], env=quiet, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise NoSlurm(f"apt-get {command[0]}: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")


def free_ports() -> tuple[int, int]:
    """Two that nobody listens on now."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


class OneNode:
    """`with OneNode(folder) as slurm`: the daemons run, and `slurm.environment` leads to them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.host = folder, socket.gethostname().split(".")[0]
        self.environment = os.environ | {MARK: str(folder)}

    def __enter__(self) -> "OneNode":
        if os.getuid():
            raise NoSlurm("the daemons of Slurm take root")
        install()
        if os.path.lexists(KNOWN):
            raise NoSlurm(f"{KNOWN} is there: this machine belongs to a Slurm already")
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o700)
        (self.folder / "munge.key").touch(0o400)
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        given = {"folder": self.folder, "host": self.host, "ports": free_ports(), "cores": os.cpu_count() or 1}
        given["memory"] = psutil.virtual_memory().total >> 20
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**given))
        files = [f"--{option}={self.folder}/munge.{end}" for option, end in (("key-file", "key"), ("socket", "socket"))]
        files += [f"--{name}-file={self.folder}/munged.{name}" for name in ("pid", "log", "seed")]
        try:
            KNOWN.symlink_to(self.folder / "slurm.conf")
            for command in (["munged", "--force", *files], ["slurmctld"], ["slurmd"]):
                self.command(*command)
            end = time.monotonic() + 60
            while "idle" not in self.command("sinfo", "--noheader", "--format=%T"):
                if time.monotonic() > end:
                    raise NoSlurm(f"the node takes no jobs: {(self.folder / 'slurmd.log').read_text()[-200:]}")
                time.sleep(0.5)
        except BaseException:  # asked to end while it starts: nothing is left behind
            self.__exit__()
            raise
        return self

    def command(self, *command: str) -> str:
        """What a program of Slurm prints; NoSlurm with its last line where it fails."""
        # Into a file, not a pipe: a daemon keeps what it was started with, and a pipe would never end.
        with open(self.folder / "output", "w+") as file:
            done = subprocess.run(command, env=self.environment, stdout=file, stderr=file, timeout=60)
            file.seek(0)
            text = file.read()
        if done.returncode:
            raise NoSlurm(f"{command[0]}: {(text.strip().splitlines() or ['it failed'])[-1]}")
        return text

    def jobs(self) -> dict[str, str]:
        """{number: what Snakemake says of it} of the running jobs."""
        lines = self.command("squeue", "--noheader", "--states=running", "--format=%i|%k").splitlines()
        return dict(line.split("|", 1) for line in lines)

    def workers(self) -> list[psutil.Process]:
        """The processes in jobs of this Slurm that make traces."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it ended meanwhile
                known = process.environ()
                mine = known.get(MARK) == str(self.folder) and "SLURM_JOB_ID" in known
                found += [process] * (mine and any(part.endswith(WORKER) for part in process.cmdline()))
        return found

    def __exit__(self, *_: object) -> None:
        if shutil.which("scancel"):
            subprocess.run(["scancel", "--full", "--user=root"], env=self.environment, capture_output=True, timeout=60)
        files = [self.folder / name for name in ("slurmd.pid", "slurmctld.pid", "munged.pid")]
        numbers = [int(file.read_text()) for file in files if file.exists()]
        daemons = [psutil.Process(number) for number in numbers if psutil.pid_exists(number)]
        for process in daemons:
            process.terminate()
        for process in psutil.wait_procs(daemons, timeout=30)[1]:
            process.kill()
        if KNOWN.is_symlink() and KNOWN.readlink() == self.folder / "slurm.conf":
            KNOWN.unlink()


# ---- the study


def study(**settings: Any) -> str:
    """A study file of all models and notebooks; `settings` are those of each model."""
    models = {f"tiny/{family}": {"memory_gb": 2} | settings for family in FAMILIES}
    notebooks: dict[str, dict] = {name: {} for name in NOTEBOOKS}
    return yaml.safe_dump({"threads": 1, "parameters": ASKED, "notebooks": notebooks, "models": models})


def make_environment(folder: Path) -> None:
    """An environment with all packages of this one, and with Snakemake's executor for Slurm."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in ("snakemake", "papermill"):
        lines = Path(sysconfig.get_path("scripts"), name).read_text().splitlines()
        (folder / "bin" / name).write_text("\n".join([f"#!{folder}/bin/python", *lines[1:]]) + "\n")
        (folder / "bin" / name).chmod(0o755)
    pins = ("--constraint", ROOT / "constraints.txt", "snakemake-executor-plugin-slurm")
    subprocess.run([folder / "bin/python", "-m", "pip", "install", "-qq", *pins], check=True)


def make_project(folder: Path, **settings: Any) -> None:
    """A copy of this checkout's code with tiny models and a study; data are linked, results are its own."""
    folder.mkdir()
    for name in CODE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / name)
    (folder / "data").symlink_to(data_folder())
    (folder / "study.yml").write_text(study(**settings))
    for family in FAMILIES:
        build("causal", family).save_pretrained(folder / "tiny" / family)
        tokenizer_for("causal").save_pretrained(folder / "tiny" / family)


class Call:
    """`python -m eestudy.book` in a project, its output in a file; it ends with its `with`, and all that it started."""

    def __init__(self, project: Path, environment: dict[str, str], *settings: str) -> None:
        programs, self.output = project.parent / "venv/bin", project / f"book-{time.time_ns()}.txt"
        clean = {key: value for key, value in environment.items() if not key.startswith(("MAKE", "MFLAGS"))}
        clean |= {"PATH": f"{programs}:{clean['PATH']}", "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"}
        command = [str(programs / "python"), "-m", "eestudy.book", "study.yml", *settings, "results"]
        with open(self.output, "w") as file:
            self.process = subprocess.Popen(command, cwd=project, env=clean, stdout=file, stderr=subprocess.STDOUT)

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            below = psutil.Process(self.process.pid).children(recursive=True)
            for process in [psutil.Process(self.process.pid), *below]:
                with suppress(psutil.NoSuchProcess):  # such as a look at the queue, which ended meanwhile
                    process.kill()
            self.process.wait()

    def until(self, happened: Callable[[], Any], what: str) -> Any:
        """What `happened` gives once it is true; RuntimeError where the call ends before, or all takes too long."""
        end = time.monotonic() + PATIENCE
        while not (found := happened()):
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"waited for {what} in vain; it printed:\n{self.output.read_text()[-3000:]}")
            time.sleep(0.05)
        print(what, flush=True)
        return found

    def status(self) -> int:
        """Wait for its end; its exit status."""
        return self.process.wait(timeout=PATIENCE)


def disturbed(slurm: OneNode, project: Path) -> dict[str, Any]:
    """The study on Slurm: a worker is killed, a notebook cancelled; then it is called again."""
    settings = ("--profile", "workflow/profiles/slurm", "--slurm-init-seconds-before-status-checks=10")
    with Call(project, slurm.environment, *settings) as call:

        def at_work() -> bool:
            return len([*project.glob("runs/*/*/tokens-*.parquet")]) > 2 and len(slurm.workers()) > 1

        def restarts() -> int:  # the job's own Snakemake does it
            return sum("Trying to restart" in log.read_text() for log in project.glob(".snakemake/slurm_logs/**/*.log"))

        def notebook() -> str | None:
            return next((number for number, what in slurm.jobs().items() if "notebook" in what), None)

        call.until(at_work, "two workers are at work")
        slurm.workers()[0].kill()
        found = {"workers_started_again": call.until(restarts, "the killed worker is started again")}
        number = call.until(notebook, "a notebook's job runs")
        slurm.command("scancel", number)
        call.until(lambda: f"SLURM-job '{number}' failed" in call.output.read_text(), "the cancelled job is noticed")
        found["status_with_a_cancelled_job"] = call.status()
    with Call(project, slurm.environment, *settings) as again:
        return found | {"status_when_called_again": again.status()}


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


def run(folder: Path) -> dict[str, Any]:
    """Everything in a folder; what came of it."""
    cluster, plain = folder / "cluster", folder / "plain"
    with OneNode(folder / "slurm") as slurm:
        make_environment(folder / "venv")
        make_project(cluster, workers=WORKERS, hours=1)
        make_project(plain)
        found = {"slurm": slurm.command("squeue", "--version").split()[-1]} | disturbed(slurm, cluster)
    with Call(plain, dict(os.environ), "--cores", "2") as call:
        if call.status():
            raise RuntimeError(f"the plain run failed; it printed:\n{call.output.read_text()[-3000:]}")
    before, after = (results_in(project / "results", False) for project in (plain, cluster))
    number, different = len(before.keys() | after.keys()), [where for where, _, _ in differences(before, after)]
    figures = {"compared": number, "identical": number - len(different), "differ": different}
    files, cells = (compared(dict(part(cluster)), dict(part(plain))) for part in (traces, outputs))
    return found | {"files": files, "figures": figures, "cells": cells}


def goals(found: dict[str, Any]) -> list[Goal]:
    """What happened to jobs was noticed, and the bytes are those of a plain run."""
    rows = [
        goal("killed workers that were started again", found["workers_started_again"], at_least=1),
        goal("exit status of the call with a cancelled job", found["status_with_a_cancelled_job"], at_least=1),
        goal("exit status of the call after that", found["status_when_called_again"], at_most=0),
    ]
    for key, what in (("files", "files of traces"), ("figures", "figures"), ("cells", "cells of notebooks")):
        rows.append(all_of(f"{what} as in a plain run", found[key]["identical"], found[key]["compared"]))
    return rows


def end(*_: object) -> None:
    """End with all that was started; a second signal does not disturb it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit("asked to end")


def main() -> None:
    """The command line."""
    asked = options(__doc__, "cluster").parse_args()
    depends = ("eelib", "eestudy", "notebooks", "workflow", "Snakefile", *TINY)
    head = headed("cluster", "snakemake", "papermill", depends=depends)
    signal.signal(signal.SIGTERM, end)
    with tempfile.TemporaryDirectory(prefix="eelib-cluster-") as folder:
        try:
            found = run(Path(folder))
        except NoSlurm as error:
            sys.exit(f"There is no Slurm here, and none can be had: {error}")
    finish(asked.output, head, goals(found), models=len(FAMILIES), notebooks=len(NOTEBOOKS), **found)
