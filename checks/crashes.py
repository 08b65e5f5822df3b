"""Kill -9 a trace again and again: what a rerun makes of it must be, byte for byte, what an undisturbed run makes.

`python -m checks.crashes [--kills 150] [--seed 0]` traces the shipped pocket-llama, kills at random moments and at
moments that aim at writes; then as often among several workers that make one trace together, while the others go on. It
damages files of every kind, lets two processes ask at once, and fills a disk. It writes data/checks/crashes.json and
ends with status 1 where a single byte differs, or where a part could not be run.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from tqdm import tqdm

from checks.report import headed, write_report
from eelib.common.files import data_folder
from eelib.tracing.store import load_manifest, records

RESULT = data_folder("checks", "crashes.json")
WORKERS = 3
TASK, LIMIT = "translation/de-en", 24
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "batch_size": 4, "sites": 2, "pairs": 2}
AIMS = ("at random", "when a file is being written", "when a file is new")
PARTS = ("killed", "workers_killed", "damaged", "two_processes", "full_disk")
MOMENTS = ("before the first file", "during decoding or reading", "during a write", "between the files of a shard")


class Traced:
    """The model and task, loaded once; children are forked from this process and do the work."""

    def __init__(self) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import torch

        torch.set_num_threads(1)  # threads do not survive a fork
        from eelib import load_model, load_task, trace
        from eelib.tracing import make as making

        self.making = making
        self.model, self.task, self.trace = load_model("pocket-llama", device="cpu"), load_task(TASK, LIMIT), trace

    def warm_up(self, folder: Path) -> None:
        """What is compiled and loaded at the first use is then there in every child."""
        self.trace(self.model, self.task.take(2), folder=folder, max_new_tokens=2, progress=False)

    def start(self, folder: Path, prepare: Callable[[], object] = lambda: None, told: bool = False) -> int:
        """Ask for the trace in a child process; its id. The child's status is 0 when the trace is finished.

        `told`: it shows its progress. Beside the folder it writes down which shards it made.
        """
        child = os.fork()
        if child:
            return child
        status = 3
        try:
            tqdm.set_lock(threading.RLock())  # the one that forked processes share stays locked if its holder is killed
            prepare()
            note_shards(self.making, folder.parent / f"{folder.name}.shards")
            with open(folder.parent / f"{folder.name}.log", "a") as log, redirect_stdout(log):
                self.trace(self.model, self.task, folder=folder, progress=told, **OPTIONS)
            status = 0
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            status = 4 if isinstance(error, OSError) else 3
        finally:
            os._exit(status)

    def finish(self, folder: Path) -> int:
        """Ask for the trace in a child and wait; its status."""
        return os.waitstatus_to_exitcode(os.waitpid(self.start(folder), 0)[1])


def note_shards(making: Any, log: Path) -> None:
    """Let this process write down each shard that it has made: its own number, and the shard's."""
    plain = making.make_shard

    def noted(job: Any, rows: list[int], index: int) -> None:
        plain(job, rows, index)
        with open(log, "a") as file:
            file.write(f"{os.getpid()} {index}\n")

    making.make_shard = noted


def content(folder: Path) -> dict[str, bytes]:
    """Bytes of every file of a trace, without its lock and its times."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name not in (".lock", "times.json")}


def only(runs: Path) -> Path:
    """The folder of the one trace in a runs folder."""
    (folder,) = runs.glob("*/*")
    return folder


def names(runs: Path) -> set[str]:
    """Names of the files of the trace in a runs folder, if there is any."""
    return {file.name for folder in runs.glob("*/*") for file in folder.glob("*.*") if file.name != ".lock"}


def killed(work: Traced, folder: Path, aim: str, delay: float) -> str:
    """Start, kill -9 after `delay` seconds, or later where `aim` waits for a file; the moment, told by what is left.

    "finished" where there was nothing left to kill.
    """
    child, began = work.start(folder), time.monotonic()
    known: set[str] | None = None
    while True:
        if os.waitpid(child, os.WNOHANG)[0]:
            return "finished"
        if time.monotonic() - began >= delay:
            there = names(folder)
            known = there if known is None else known
            if (
                aim == AIMS[0]
                or (aim == AIMS[1] and any(n.endswith(".partial") for n in there))
                or (aim == AIMS[2] and {n for n in there - known if not n.endswith(".partial")})
            ):
                break
        time.sleep(0.001 if aim == AIMS[0] else 0.0002)
    os.kill(child, signal.SIGKILL)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        return "finished"
    return moment(folder)


def moment(folder: Path) -> str:
    """Where in the work the process was killed."""
    there = names(folder)
    if not there:
        return MOMENTS[0]
    if any(name.endswith(".partial") for name in there):
        return MOMENTS[2]
    manifest = load_manifest(only(folder))
    entered = set(manifest.get("files", {}))
    entered |= {name for record in records(only(folder), manifest).values() for name in record["files"]}
    return MOMENTS[3] if {n[:-8] for n in there if n.endswith(".parquet")} - entered else MOMENTS[1]


def kill_round(work: Traced, scratch: Path, quiet: dict[str, bytes], seconds: float, kills: int, seed: int) -> dict:
    """Runs that are killed until they finish, until `kills` kills have happened; every one compared at its end."""
    draw = random.Random(seed)
    moments: Counter[str] = Counter()
    aims: Counter[str] = Counter()
    runs = identical = most = 0
    while sum(moments.values()) < kills:
        folder, mine = scratch / f"run-{runs}", 0
        while True:
            aim = draw.choice(AIMS)
            found = killed(work, folder, aim, draw.uniform(0, seconds / (1 if aim == AIMS[0] else 2)))
            if found == "finished":
                break
            moments[found], aims[aim], mine = moments[found] + 1, aims[aim] + 1, mine + 1
            if mine >= 12:  # so that several runs come to an end
                work.finish(folder)
                break
        runs, most = runs + 1, max(most, mine)
        identical += content(only(folder)) == quiet
        shutil.rmtree(folder)
    return {
        "kills": sum(moments.values()),
        "moments": {m: moments[m] for m in MOMENTS},
        "aims": {aim: aims[aim] for aim in AIMS},
        "most_kills_of_a_run": most,
        "runs": runs,
        "identical": identical,
    }


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "a bit flipped": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
    ),
    "cut in half": lambda data: data[: len(data) // 2],
    "all zeros": lambda data: bytes(len(data)),
    "deleted": lambda _data: None,
}


def damage_round(work: Traced, scratch: Path, quiet: dict[str, bytes]) -> list[dict]:
    """Every kind of damage to every kind of file; then the trace is asked for again."""
    folder, rows = scratch / "damaged", []
    work.finish(folder)
    made = only(folder)
    kinds = [
        "tokens-00002.parquet",
        "sequences-00002.parquet",
        "sites-2.parquet",
        "pairs-2.parquet",
        "manifest.json",
        "times.json",
    ]
    for name in kinds:
        for how, damage in DAMAGES.items():
            data = damage((made / name).read_bytes())
            (made / name).unlink() if data is None else (made / name).write_bytes(data)
            began = time.monotonic()
            work.finish(folder)
            rows.append(
                {
                    "file": name,
                    "damage": how,
                    "seconds": round(time.monotonic() - began, 2),
                    "identical": content(only(folder)) == quiet,
                }
            )
    return rows


def many_round(
    work: Traced, scratch: Path, quiet: dict[str, bytes], seconds: float, workers: int, kills: int, seed: int
) -> dict:
    """Several workers on one trace; one of them is killed at random moments, and another put in its place."""
    draw = random.Random(seed)
    done = runs = identical = again = 0
    moments: Counter[str] = Counter()
    while done < kills:
        folder, mine, finished = scratch / f"many-{runs}", 0, False
        children = [work.start(folder) for _ in range(workers)]
        while mine < 12 and not finished:
            time.sleep(draw.uniform(0, seconds / 3))
            victim = draw.choice(children)
            os.kill(victim, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1])
            children.remove(victim)
            finished = status == 0
            if not finished:
                moments[moment(folder)] += 1
                mine += 1
                children.append(work.start(folder))
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        identical += content(only(folder)) == quiet and not any(statuses)
        log = scratch / f"{folder.name}.shards"
        made = Counter(line.split()[1] for line in log.read_text().splitlines())
        again += sum(made.values()) - len(made)
        runs, done = runs + 1, done + mine
        shutil.rmtree(folder)
    return {
        "workers": workers,
        "kills": done,
        "moments_of_the_trace": {m: moments[m] for m in MOMENTS},
        "runs": runs,
        "identical": identical,
        "shards_made_again": again,  # its process was killed between making and recording it
    }


def two_round(work: Traced, scratch: Path, quiet: dict[str, bytes], times: int) -> dict:
    """Two processes ask for one trace and share it out. In every other round one of them is killed."""
    identical = shared = taken_over = 0
    for number in range(times):
        folder = scratch / f"two-{number}"
        children = [work.start(folder), work.start(folder)]
        if number % 2:
            time.sleep(0.6)
            os.kill(children[0], signal.SIGKILL)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        taken_over += statuses == [-signal.SIGKILL, 0]
        lines = [line.split() for line in (scratch / f"{folder.name}.shards").read_text().splitlines()]
        once = len({index for _, index in lines}) == len(lines)
        shared += once and (number % 2 == 1 or {process for process, _ in lines} == set(map(str, children)))
        identical += content(only(folder)) == quiet and statuses[1] == 0
    return {"rounds": times, "shared": shared, "first_killed_second_finished": taken_over, "identical": identical}


def full_round(work: Traced, scratch: Path, quiet: dict[str, bytes]) -> dict:
    """A file system with less room than the trace needs, then one with enough; needs the right to mount."""
    folder, size = scratch / "disk", sum(map(len, quiet.values()))
    folder.mkdir()
    small, large = (max(64, int(size * share) >> 10) for share in (0.5, 8))
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={small}k", "tmpfs", str(folder)], capture_output=True)
    if mount.returncode:
        return {"tested": False, "why": "no right to mount a small file system here"}
    try:
        reader, writer = os.pipe()
        status = os.waitstatus_to_exitcode(os.waitpid(work.start(folder, lambda: os.dup2(writer, 2)), 0)[1])
        os.close(writer)
        message = os.read(reader, 10_000).decode().strip()
        os.close(reader)
        half = sorted(n for n in names(folder) if n.endswith(".partial"))
        subprocess.run(["mount", "-o", f"remount,size={large}k", str(folder)], check=True)
        done = work.finish(folder) == 0
        return {
            "tested": True,
            "room_kib": small,
            "needed_kib": size >> 10,
            "half_files": half,
            "message": message.replace(str(scratch), "FOLDER"),
            "lines": len(message.splitlines()),
            "identical": status == 4 and not half and done and content(only(folder)) == quiet,
        }
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def all_well(found: dict[str, Any]) -> bool:
    """Whether every part was run and all came out as in an undisturbed run."""
    killed, many, damaged, two, disk = (found[part] for part in PARTS)
    return (
        0 < killed["runs"] == killed["identical"]
        and 0 < many["runs"] == many["identical"]
        and all(row["identical"] for row in damaged)
        and 0 < two["rounds"] == two["shared"] == two["identical"]
        and disk.get("identical", False)
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=150, help="kills of one process, and of workers (150)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (0)")
    parser.add_argument("--output", type=Path, default=RESULT, help=f"where the JSON goes ({RESULT})")
    asked = parser.parse_args()
    head, began, work = headed("crashes", "pyarrow"), time.monotonic(), Traced()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        work.warm_up(scratch / "small")
        work.finish(scratch / "first")
        started = time.monotonic()
        work.finish(scratch / "quiet")
        seconds = time.monotonic() - started
        quiet = content(only(scratch / "quiet"))
        if quiet != content(only(scratch / "first")):
            sys.exit("two undisturbed runs differ: there is nothing to compare with")
        print(f"undisturbed: {seconds:.1f} s")
        found: dict[str, Any] = {
            "files": len(quiet),
            "bytes": sum(map(len, quiet.values())),
            "seconds_undisturbed": round(seconds, 2),
            "killed": kill_round(work, scratch, quiet, seconds, asked.kills, asked.seed),
        }
        killed = found["killed"]
        print(f"{killed['kills']} kills; {killed['identical']} of {killed['runs']} runs identical")
        many = found["workers_killed"] = many_round(work, scratch, quiet, seconds, WORKERS, asked.kills, asked.seed)
        print(f"{many['kills']} kills among workers; {many['identical']} of {many['runs']} runs identical")
        found |= {
            "damaged": damage_round(work, scratch, quiet),
            "two_processes": two_round(work, scratch, quiet, 6),
            "full_disk": full_round(work, scratch, quiet),
        }
    ok = all_well(found)
    report = {
        "seed": asked.seed,
        "seconds": round(time.monotonic() - began, 1),
        "model": "pocket-llama",
        "task": TASK,
        "sequences": LIMIT,
        "options": OPTIONS,
        **found,
        "ok": ok,
    }
    write_report(asked.output, head, **report)
    print(
        json.dumps(
            {key: report[key] for key in ("killed", "workers_killed", "two_processes", "full_disk", "seconds", "ok")}
        )
    )
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
