"""A study on a real Slurm, one of whose workers is killed: every byte has to be that of a plain run.

Two tiny random models go through three notebooks, with two workers for the traces of each, on a Slurm of one node: this
machine, for as long as the check lasts. A worker is killed with -9. Then the same study runs without Slurm. It needs
Slurm and munge installed, and root. It works in a temporary folder and ends its daemons; only the link to its
configuration stands elsewhere, where jobs look for it.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
CODE = ("eelib", "eestudy", "notebooks", "workflow")
FAMILIES, NOTEBOOKS, WORKERS = ("llama", "gpt2"), ("saturation", "length", "subwords"), 2
ASKED = {"tasks": "translation/de-en", "limit": 24, "max_new_tokens": 48, "batch_size": 2, "device": "cpu"}
PATIENCE = 3600  # seconds until what has to happen has happened
WORKER = "eestudy.book.worker"
EXECUTOR = ("snakemake-executor-plugin-slurm", "snakemake-executor-plugin-slurm-jobstep", "throttler")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "srun")
KNOWN = Path("/etc/slurm/slurm.conf")  # jobs of Snakemake's executor do not inherit SLURM_CONF
MARK = "EELIB_ONE_NODE"  # what they do inherit
CONFIGURATION = """\
ClusterName=eelib
SlurmctldHost={host}(127.0.0.1)
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory={memory} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class NoSlurm(Exception):
    """Slurm can't be started here; why, in one line."""


# ---- a Slurm of one node


def printed(folder: Path, *command: str) -> str:
    """What a program of the Slurm in a folder prints; NoSlurm with its last line where it fails."""
    # Into a file, not a pipe: a daemon keeps what it was started with, and a pipe would never end.
    with open(folder / "output", "w+") as file:
        known = os.environ | {MARK: str(folder)}
        done = subprocess.run(command, env=known, stdout=file, stderr=file, timeout=60)
        file.seek(0)
        text = file.read()
    if done.returncode:
        raise NoSlurm(f"{command[0]}: {(text.strip().splitlines() or ['it failed'])[-1]}")
    return text


@contextmanager
def one_node(folder: Path) -> Iterator[None]:
    """While open, daemons run whose files are in the folder, and KNOWN leads to them."""
    if os.getuid():
        raise NoSlurm("the daemons of Slurm take root")
    if lacking := [name for name in PROGRAMS if not shutil.which(name)]:
        raise NoSlurm(f"{', '.join(lacking)} not found; install slurm-wlm and munge")
    if os.path.lexists(KNOWN):
        raise NoSlurm(f"{KNOWN} is there: this machine belongs to a Slurm already")
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o700)
    (folder / "munge.key").touch(0o400)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    host, memory = socket.gethostname().split(".")[0], psutil.virtual_memory().total >> 20
    given = {"folder": folder, "host": host, "cores": os.cpu_count() or 1, "memory": memory}
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**given))
    files = [f"--{option}={folder}/munge.{end}" for option, end in (("key-file", "key"), ("socket", "socket"))]
    files += [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    try:
        KNOWN.symlink_to(folder / "slurm.conf")
        for command in (["munged", "--force", *files], ["slurmctld"], ["slurmd"]):
            printed(folder, *command)
        end = time.monotonic() + 60
        while "idle" not in printed(folder, "sinfo", "--noheader", "--format=%T"):
            if time.monotonic() > end:
                raise NoSlurm(f"the node takes no jobs: {(folder / 'slurmd.log').read_text()[-200:]}")
            time.sleep(0.5)
        yield
    finally:
        subprocess.run(["scancel", "--full", "--user=root"], capture_output=True, timeout=60)
        numbers = [int(file.read_text()) for file in folder.glob("*.pid")]
        daemons = [psutil.Process(number) for number in numbers if psutil.pid_exists(number)]
        for process in daemons:
            process.terminate()
        for process in psutil.wait_procs(daemons, timeout=30)[1]:
            process.kill()
        KNOWN.unlink(missing_ok=True)


def workers(folder: Path) -> list[psutil.Process]:
    """The processes in jobs of the Slurm in a folder that make traces."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it ended meanwhile
            known = process.environ()
            mine = known.get(MARK) == str(folder) and "SLURM_JOB_ID" in known
            found += [process] * (mine and any(part.endswith(WORKER) for part in process.cmdline()))
    return found


# ---- the study


def make_project(folder: Path, **settings: Any) -> None:
    """A copy of this checkout's code with tiny models and a study; data are linked, results are its own."""
    for name in CODE:
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "Snakefile", folder)
    (folder / "data").symlink_to(data_folder())
    models = {f"tiny/{family}": {"memory_gb": 2} | settings for family in FAMILIES}
    study = {"threads": 1, "parameters": ASKED, "models": models}
    study["notebooks"] = {name: {} for name in NOTEBOOKS}
    (folder / "study.yml").write_text(yaml.safe_dump(study))
    for family in FAMILIES:
        build("causal", family).save_pretrained(folder / "tiny" / family)
        tokenizer_for("causal").save_pretrained(folder / "tiny" / family)


@contextmanager
def called(project: Path, *settings: str, **known: str) -> Iterator[subprocess.Popen]:
    """`python -m eestudy.book` in a project, its output in a file; it ends with its `with`, and all that it started."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": f"{project}:{project.parent / 'executor'}"}
    command = [sys.executable, "-m", "eestudy.book", "study.yml", *settings, "results"]
    with open(project / "output.txt", "w") as file:
        process = subprocess.Popen(command, cwd=project, env=environment | known, stdout=file, stderr=file)
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):  # it has ended
            for other in [*psutil.Process(process.pid).children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):  # such as a look at the queue, which ended meanwhile
                    other.kill()
        process.wait()


def until(happened: Callable[[], bool | int], process: subprocess.Popen, project: Path, what: str) -> None:
    """Wait until `happened` is true; RuntimeError where the call ends before, or all takes too long."""
    end = time.monotonic() + PATIENCE
    while not happened():
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"waited for {what} in vain:\n{(project / 'output.txt').read_text()[-3000:]}")
        time.sleep(0.05)
    print(what, flush=True)


def disturbed(slurm: Path, project: Path) -> dict[str, int]:
    """The study on Slurm: a worker is killed on the way."""

    def at_work() -> bool:
        return len([*project.glob("runs/*/*/tokens-*.parquet")]) > 2 and len(workers(slurm)) > 1

    def restarts() -> int:  # the job's own Snakemake does it
        return sum("Trying to restart" in log.read_text() for log in project.glob(".snakemake/slurm_logs/**/*.log"))

    settings = ("--profile", "workflow/profiles/slurm", "--slurm-init-seconds-before-status-checks=10")
    with called(project, *settings, **{MARK: str(slurm)}) as process:
        until(at_work, process, project, "two workers are at work")
        workers(slurm)[0].kill()
        until(restarts, process, project, "the killed worker is started again")
        status = process.wait(timeout=PATIENCE)
    return {"workers_started_again": restarts(), "status": status}


def run(folder: Path) -> dict[str, Any]:
    """Everything in a folder; what came of it."""
    cluster, plain, slurm = folder / "cluster", folder / "plain", folder / "slurm"
    with one_node(slurm):
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(folder / "executor")]
        subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), *EXECUTOR], check=True)
        make_project(cluster, workers=WORKERS, hours=1)
        make_project(plain)
        found: dict[str, Any] = {"slurm": printed(slurm, "squeue", "--version").split()[-1]}
        found |= disturbed(slurm, cluster)
    with called(plain, "--cores", "2") as process:
        if process.wait(timeout=PATIENCE):
            raise RuntimeError(f"the plain run failed:\n{(plain / 'output.txt').read_text()[-3000:]}")
    kinds: dict[str, list[dict[tuple[str, ...], Any]]] = {
        "files": [{(name,): data for name, data in content(project / "runs").items()} for project in (plain, cluster)],
        "figures": [results_in(project / "results") for project in (plain, cluster)],
    }
    for name, (before, after) in kinds.items():
        differ = [where for where, _, _ in differences(before, after)]
        number = len(before.keys() | after.keys())
        found[name] = {"compared": number, "identical": number - len(differ), "differ": differ}
    return found


def goals(found: dict[str, Any]) -> list[Goal]:
    """The killed worker was replaced, and the bytes are those of a plain run."""
    return [
        goal("killed workers that were started again", found["workers_started_again"], at_least=1),
        goal("exit status of the call", abs(found["status"]), at_most=0),  # below 0: the signal that ended it
        *(
            all_of(f"{what} as in a plain run", found[key]["identical"], found[key]["compared"])
            for key, what in (("files", "files of traces"), ("figures", "figures"))
        ),
    ]


def main() -> None:
    asked = options(__doc__, "cluster").parse_args()
    depends = (*CODE, "Snakefile", *TINY, "checks/compare_results.py", "checks/store.py")
    head = headed("cluster", "snakemake", "papermill", depends=depends)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends all that was started, too
    with tempfile.TemporaryDirectory(prefix="eelib-cluster-") as folder:
        try:
            found = run(Path(folder))
        except NoSlurm as error:
            sys.exit(f"There is no Slurm here: {error}")
    finish(asked.output, head, goals(found), families=len(FAMILIES), notebooks=len(NOTEBOOKS), **found)
