"""Give each job GPUs of its own on a machine with several: python -m workflow.gpus NUMBER COMMAND...

The command runs with CUDA_VISIBLE_DEVICES naming GPUs that no other job has; it waits for them. A GPU is taken by a
lock on a file that the command keeps open, so it is free once the command has ended, however that ends. Locks are
shared by the jobs of one user on one machine, or inside one job of a scheduler, which has given out its GPUs itself.
They go by name, so builds that run at once name GPUs in one way, by number or by UUID.
Where none is asked for, or the machine has none, the command runs as it is.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from filelock import lock_descriptor

from eelib.common.errors import InputError

SCHEDULED = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")  # a scheduler that gives out GPUs sets one of these


def gpus() -> list[str]:
    """List the GPUs of this machine that this process may use, as CUDA names them."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        names = [gpu.strip() for gpu in allowed.split(",")]
        names = names[: [*names, "-1"].index("-1")]  # CUDA sees none from -1 on
        return list(dict.fromkeys(filter(None, names)))
    try:
        query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


def lock_folder() -> Path:
    """Make the folder of the locks: on this machine, one for each user, or for each job of a scheduler."""
    job = next((os.environ[name] for name in SCHEDULED if os.environ.get(name)), "")
    folder = Path(tempfile.gettempdir(), re.sub(r"[^\w.-]", "_", f"eelib-gpus-{os.getuid()}-{job}".rstrip("-")))
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise InputError(f"{folder} is somebody else's, so GPUs can't be given out")
    return folder


def open_lock(path: Path) -> int:
    """Open a file that is only there to be locked, without following a link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def wait_for(count: int, known: list[str], folder: Path) -> dict[str, int]:
    """Lock so many of the GPUs, each as soon as it is free; one job after the other, so that none waits for another's.

    Returns:
        {GPU: descriptor of its locked file}

    Raises:
        InputError: the machine has fewer.
    """
    if count > len(known):
        raise InputError(f"{count} GPUs are asked for; there are {len(known)} ({', '.join(known)})")
    taken: dict[str, int] = {}
    queue = open_lock(folder / "queue")
    lock_descriptor(queue)
    while True:
        for gpu in known:
            if gpu not in taken and len(taken) < count:
                descriptor = open_lock(folder / gpu.replace("/", "_"))
                if lock_descriptor(descriptor, blocking=False):
                    taken[gpu] = descriptor
                else:
                    os.close(descriptor)
        if len(taken) == count:
            os.close(queue)
            return {gpu: taken[gpu] for gpu in known if gpu in taken}
        time.sleep(1)


def main() -> None:
    """Become the command, with GPUs of its own."""
    count, command = int(sys.argv[1]), sys.argv[2:]
    try:
        if count and (known := gpus()):
            taken = wait_for(count, known, lock_folder())
            for descriptor in taken.values():
                os.set_inheritable(descriptor, True)
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(taken)
    except InputError as error:
        sys.exit(str(error))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
