"""A GPU of its own for each job on a machine with several: python -m eelib.common.cards NUMBER COMMAND...

The command runs with CUDA_VISIBLE_DEVICES naming cards that no other job has; it waits for them. A card's lease is a
locked file that the command holds open, so it ends with it, however that ends. Leases are shared by the jobs of one
user on one machine, or inside one job of a scheduler, which has given out its cards itself. Where none is asked for, or
the machine has none, the command runs as it is.
"""

import fcntl
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from eelib.common.errors import InputError
from eelib.common.leases import open_lock
from eelib.common.values import check_whole

SCHEDULED = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")  # who gives out cards sets one of these


def cards() -> list[str]:
    """The cards of this machine that this process may use, as CUDA names them."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [card.strip() for card in allowed.split(",") if card.strip() and card.strip() != "-1"]
    try:
        query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


def claim_cards(count: int, known: list[str], folder: Path) -> dict[str, int]:
    """{card: descriptor of its locked file} of `count` free ones; empty where there are fewer, for then none is kept.

    So two jobs that want two each can't end with one each.
    """
    taken: dict[str, int] = {}
    for card in known:
        descriptor = open_lock(folder / f"card-{card}".replace("/", "_"))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        taken[card] = descriptor
        if len(taken) == count:
            return taken
    for descriptor in taken.values():
        os.close(descriptor)
    return {}


def folder_of_leases() -> Path:
    """Where the locks lie: on this machine, one folder for each user, or for each job of a scheduler."""
    job = next((os.environ[name] for name in SCHEDULED if os.environ.get(name)), "")
    folder = Path(tempfile.gettempdir(), re.sub(r"[^\w.-]", "_", f"eelib-cards-{os.getuid()}-{job}".rstrip("-")))
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise InputError(f"{folder} is somebody else's, so cards can't be given out")
    return folder


def wait_for_cards(count: int, known: list[str], folder: Path, pause: float = 1.0) -> dict[str, int]:
    """`claim_cards`, as soon as there are so many; one after the other, so that who wants two gets them in the end.

    InputError where the machine has not so many.
    """
    if count > len(known):
        raise InputError(f"{count} GPUs are asked for; there are {len(known)} ({', '.join(known)})")
    turn = open_lock(folder / "turn")
    try:
        fcntl.flock(turn, fcntl.LOCK_EX)
        while not (taken := claim_cards(count, known, folder)):
            time.sleep(pause)
        return taken
    finally:
        os.close(turn)


def main() -> None:
    """Become the command, with cards of its own."""
    count, command = int(sys.argv[1]), sys.argv[2:]
    check_whole("GPUs", count, 0)
    if count and (known := cards()):
        try:
            taken = wait_for_cards(count, known, folder_of_leases())
        except InputError as error:
            sys.exit(str(error))
        for descriptor in taken.values():
            os.set_inheritable(descriptor, True)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(taken)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
