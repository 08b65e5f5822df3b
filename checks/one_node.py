"""A Slurm of one node, this machine, for as long as a `with` lasts: installed where apt is at hand; its daemons, keys
and state in one folder, on ports of its own. Only the link to its configuration stands elsewhere, where jobs look for
it.
"""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "srun")
PACKAGES = ("slurm-wlm", "munge")
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


def install() -> None:
    """Have the programs of Slurm on the path; NoSlurm where they are not and can't be got.

    Debian starts a service that it installs; this one is told not to, since the daemons here are its own.
    """
    if not (lacking := [name for name in PROGRAMS if not shutil.which(name)]):
        return
    if os.getuid() or not shutil.which("apt-get"):
        raise NoSlurm(f"{', '.join(lacking)} not found, and installing {' and '.join(PACKAGES)} takes root and apt")
    print(f"installing {' and '.join(PACKAGES)}", flush=True)
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(["apt-get", *command], env=quiet, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise NoSlurm(f"apt-get {command[0]}: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")


def configuration(folder: Path, host: str, ports: tuple[int, int], cores: int, memory: int) -> str:
    """The text of slurm.conf; `memory` in MiB."""
    return CONFIGURATION.format(folder=folder, host=host, ports=ports, cores=cores, memory=memory)


def free_ports() -> tuple[int, int]:
    """Two that nobody listens on now."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


class OneNode:
    """`with OneNode(folder) as slurm`: the daemons run, and `slurm.environment` leads to them."""

    def __init__(self, folder: Path, memory: int) -> None:
        self.folder, self.host, self.memory = folder, socket.gethostname().split(".")[0], memory
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
        key = self.folder / "munge.key"
        key.touch(0o400)
        key.write_bytes(os.urandom(1024))
        (self.folder / "slurm.conf").write_text(
            configuration(self.folder, self.host, free_ports(), os.cpu_count() or 1, self.memory)
        )
        files = [f"--{option}={self.folder}/munge.{end}" for option, end in (("key-file", "key"), ("socket", "socket"))]
        files += [f"--{name}-file={self.folder}/munged.{name}" for name in ("pid", "log", "seed")]
        try:
            KNOWN.symlink_to(self.folder / "slurm.conf")
            for command in (["munged", "--force", *files], ["slurmctld"], ["slurmd"]):
                self.command(*command)
            self.wait_until_idle()
        except (NoSlurm, subprocess.SubprocessError) as error:
            self.stop()
            raise NoSlurm(f"it does not start: {error}") from None
        except BaseException:  # told to end while it starts: nothing is left behind
            self.stop()
            raise
        return self

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Until the node takes jobs; NoSlurm with the log's last line where it does not."""
        end = time.monotonic() + seconds
        while "idle" not in self.command("sinfo", "--noheader", "--format=%T"):
            if time.monotonic() > end:
                logs = [self.folder / name for name in ("slurmd.log", "slurmctld.log")]
                said = [line for log in logs if log.exists() for line in log.read_text().splitlines()]
                raise NoSlurm((said or ["its daemons say nothing"])[-1])
            time.sleep(0.5)

    def command(self, *command: str) -> str:
        """What a program of Slurm prints; NoSlurm with its last line where it fails."""
        # Into a file, not a pipe: a daemon keeps what it was started with, and a pipe would never end.
        with open(self.folder / "said", "w+") as said:
            done = subprocess.run(command, env=self.environment, stdout=said, stderr=said, timeout=60)
            said.seek(0)
            text = said.read()
        if done.returncode:
            raise NoSlurm(f"{command[0]}: {(text.strip().splitlines() or ['it failed'])[-1]}")
        return text

    def jobs(self, state: str = "running") -> dict[str, str]:
        """{number: what Snakemake says of it} of the jobs in a state."""
        lines = self.command("squeue", "--noheader", f"--states={state}", "--format=%i|%k").splitlines()
        return dict(line.split("|", 1) for line in lines)

    def set_node(self, state: str) -> None:
        """Drain the node, or let it resume."""
        self.command("scontrol", "update", f"NodeName={self.host}", f"State={state}", "Reason=a check")

    def processes(self, named: str) -> list[psutil.Process]:
        """Processes in jobs of this Slurm whose command line has an argument that ends so."""
        return [process for process in psutil.process_iter() if self.owns(process, named)]

    def owns(self, process: psutil.Process, named: str) -> bool:
        """Whether a process is in a job of this Slurm, and has such an argument."""
        try:
            known = process.environ()
            mine = known.get(MARK) == str(self.folder) and "SLURM_JOB_ID" in known
            return mine and any(part.endswith(named) for part in process.cmdline())
        except psutil.Error:  # it ended meanwhile
            return False

    def stop(self) -> None:
        """End jobs and daemons; what does not end when asked is killed."""
        if shutil.which("scancel"):
            subprocess.run(["scancel", "--full", "--user=root"], env=self.environment, capture_output=True, timeout=60)
        known = [self.folder / name for name in ("slurmd.pid", "slurmctld.pid", "munged.pid")]
        ends = [
            psutil.Process(int(f.read_text())) for f in known if f.exists() and psutil.pid_exists(int(f.read_text()))
        ]
        for process in ends:
            process.terminate()
        for process in psutil.wait_procs(ends, timeout=30)[1]:
            process.kill()
        if KNOWN.is_symlink() and KNOWN.readlink() == self.folder / "slurm.conf":
            KNOWN.unlink()

    def __exit__(self, *_: object) -> None:
        self.stop()
