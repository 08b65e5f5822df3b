"""Traces that are killed, damaged, shared out and made again: the files have to be those that an undisturbed run makes.

`crashes` kills one maker of a trace again and again with -9, then one of several, damages files of every kind, lets two
processes ask at once, and fills a disk. `many_prompts` gives very many prompts to several workers and kills them all on
the way. `reproducible` asks for the same trace again, and with other batch sizes and numbers of threads.
"""

import os
import random
import resource
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

import numpy as np
import torch
from tqdm import tqdm

import eelib
from checks.dtypes import between
from checks.report import TINY, TRACES, Goal, all_of, finish, goal, headed, options
from checks.tiny import build
from checks.tiny_texts import tokenizer_for
from eelib.common.files import data_folder
from eelib.models.folder import weights_hash
from eelib.models.model import Model
from eelib.tasks.task import Task
from eelib.tracing import make as making
from eelib.tracing.trace import Trace

WORKERS, MOST_KILLS, KILLS = 3, 12, 300  # the most kills of one trace, so that several come to an end; in all
AIMS = ("at random", "when a file is being written", "when a file is new")
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "batch_size": 4, "sites": 2, "pairs": 2}
SHIPPED = "pocket-llama"
Files = dict[str, bytes]


class Maker:
    """A loaded model and its task; processes forked from this one make the trace of them."""

    def __init__(self, model: Model, task: Task, **options: Any) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        torch.set_num_threads(1)  # threads do not survive a fork
        self.model, self.task, self.options = model, task, options

    def start(self, folder: Path, prepare: Callable[[], object] = lambda: None) -> int:
        """Ask for the trace in a new process; its id. Status 0: it is finished, 4: a file could not be written.

        Beside the folder, FOLDER.shards gets a line for each shard: process, number, time, peak memory in MB.
        """
        child = os.fork()
        if child:
            return child
        status = 3
        try:
            tqdm.set_lock(threading.RLock())  # the one that forked processes share stays locked if its holder is killed
            prepare()
            note_shards(folder.with_suffix(".shards"))
            with open(os.devnull, "w") as silent, redirect_stdout(silent):
                eelib.trace(self.model, self.task, folder=folder, progress=False, **self.options)
            status = 0
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            status = 4 if isinstance(error, OSError) else 3
        finally:
            os._exit(status)

    def finish(self, folder: Path) -> int:
        """Ask for the trace in a new process and wait; its status."""
        return status_of(self.start(folder))


def status_of(child: int) -> int:
    """Wait for a process; its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def note_shards(log: Path) -> None:
    """Let this process write down each shard that it has made."""
    plain = making.make_shard

    def noted(job: making.Job, sequences: list[int], index: int) -> None:
        plain(job, sequences, index)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        with open(log, "a") as file:
            file.write(f"{os.getpid()} {index} {time.time()} {peak}\n")

    making.make_shard = noted


def shards(folder: Path) -> np.ndarray:
    """[shards made, 4]: what FOLDER.shards holds."""
    log = folder.with_suffix(".shards")
    return np.loadtxt(log, ndmin=2) if log.exists() and log.stat().st_size else np.empty((0, 4))


def content(folder: Path) -> Files:
    """Bytes of every file of a trace, without its lock and its times."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name not in (".lock", "times.json")}


def only(runs: Path) -> Path:
    """The folder of the one trace in a runs folder."""
    (folder,) = runs.glob("*/*")
    return folder


def names(runs: Path) -> set[str]:
    """Names of the files of the trace in a runs folder, if there is any."""
    return {file.name for folder in runs.glob("*/*") for file in folder.glob("*.*") if file.name != ".lock"}


# ---- crashes


def kill(child: int, folder: Path, aim: str, delay: float) -> str:
    """Kill -9 a process after `delay` seconds, or later where `aim` waits for a file.

    Returns:
        the moment, by what is left; "finished" or "failed" where the process ended by itself.
    """
    began, known = time.monotonic(), None
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() - began >= delay:
            there = names(folder)
            known = there if known is None else known
            new, half = there - known, any(name.endswith(".partial") for name in there)
            if aim == AIMS[0] or (half if aim == AIMS[1] else any(not name.endswith(".partial") for name in new)):
                os.kill(child, signal.SIGKILL)
                ended = os.waitpid(child, 0)
                break
        time.sleep(0.0002)
    if os.WIFEXITED(ended[1]):
        return "failed" if os.WEXITSTATUS(ended[1]) else "finished"
    there = names(folder)
    half = any(name.endswith(".partial") for name in there)
    return "during a write" if half else "between writes" if there else "before the first file"


def kill_round(
    maker: Maker, scratch: Path, quiet: Files, seconds: float, workers: int, kills: int, seed: int
) -> dict[str, Any]:
    """Traces by several workers, of which one is killed and another put in its place, until `kills` have happened."""
    draw, moments = random.Random(seed), Counter[str]()
    runs = identical = 0
    while sum(moments.values()) < kills:
        folder, mine, ended = scratch / f"{workers}-workers-{runs}", 0, ""
        children = [maker.start(folder) for _ in range(workers)]
        while mine < MOST_KILLS and not ended:
            victim, aim = draw.choice(children), draw.choice(AIMS)
            found = kill(victim, folder, aim, draw.uniform(0, seconds / (1 if aim == AIMS[0] else 2) / workers))
            children.remove(victim)
            if found in ("finished", "failed"):
                ended = found
            else:
                moments[found] += 1
                mine += 1
                children.append(maker.start(folder))
        statuses = [status_of(child) for child in children]
        good = not any(statuses) and ended != "failed"
        runs, identical = runs + 1, identical + (good and content(only(folder)) == quiet)
        shutil.rmtree(folder)
    found_by = {"kills": sum(moments.values()), "moments": dict(moments)}
    return {"workers": workers, **found_by, "runs": runs, "identical": identical}


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "a bit flipped": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
    ),
    "cut in half": lambda data: data[: len(data) // 2],
    "all zeros": lambda data: bytes(len(data)),
    "deleted": lambda _data: None,
}


def damage_round(maker: Maker, folder: Path, quiet: Files) -> list[dict[str, Any]]:
    """Every kind of damage to every kind of file; then the trace is asked for again."""
    maker.finish(folder)
    made, rows = only(folder), []
    kinds = {kind_of(name): name for name in sorted(quiet)} | {"times": "times.json"}
    for name in kinds.values():
        for how, damage in DAMAGES.items():
            data = damage((made / name).read_bytes())
            (made / name).unlink() if data is None else (made / name).write_bytes(data)
            maker.finish(folder)
            rows.append({"file": name, "damage": how, "identical": content(only(folder)) == quiet})
    return rows


def kind_of(name: str) -> str:
    """The kind of a file: its name before the first hyphen or dot."""
    return name.replace(".", "-").split("-")[0]


def two_round(maker: Maker, scratch: Path, quiet: Files, rounds: int) -> dict[str, int]:
    """Two processes ask for one trace: they share it out, and each shard is made once."""
    identical = shared = 0
    for number in range(rounds):
        folder = scratch / f"two-{number}"
        children = [maker.start(folder), maker.start(folder)]
        statuses = [status_of(child) for child in children]
        made = shards(folder)
        shared += set(made[:, 0].astype(int)) == set(children) and len(set(made[:, 1])) == len(made)
        identical += content(only(folder)) == quiet and not any(statuses)
    return {"rounds": rounds, "shared": int(shared), "identical": identical}


def full_round(maker: Maker, folder: Path, quiet: Files) -> dict[str, Any]:
    """A file system with less room than the trace needs, then one with enough; needs the right to mount."""
    folder.mkdir()
    size = sum(map(len, quiet.values())) >> 10
    mount = ["mount", "-t", "tmpfs", "-o", f"size={max(64, size // 2)}k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        return {"tested": False, "why": "no right to mount a small file system here"}
    try:
        reader, writer = os.pipe()
        status = status_of(maker.start(folder, lambda: os.dup2(writer, 2)))
        os.close(writer)
        with open(reader) as said:
            message = said.read().strip().replace(str(folder), "FOLDER")
        half = sorted(name for name in names(folder) if name.endswith(".partial"))
        subprocess.run(["mount", "-o", f"remount,size={8 * size}k", str(folder)], check=True)
        whole = maker.finish(folder) == 0 and content(only(folder)) == quiet
        good = status == 4 and whole and len(message.splitlines()) == 1
        return {"tested": True, "half_files": half, "message": message, "identical": good}
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def crashes(scratch: Path, asked: Any) -> tuple[list[Goal], dict[str, Any]]:
    """The goals, and what was measured."""
    task = eelib.load_task("translation/de-en", 24)
    maker = Maker(eelib.load_model(SHIPPED, device="cpu"), task, **OPTIONS)
    Maker(maker.model, task.take(2), max_new_tokens=2).finish(scratch / "small")
    began = time.monotonic()
    maker.finish(scratch / "quiet")
    seconds, quiet = time.monotonic() - began, content(only(scratch / "quiet"))
    found = {
        "killed": kill_round(maker, scratch, quiet, seconds, 1, asked.kills, asked.seed),
        "workers_killed": kill_round(maker, scratch, quiet, seconds, WORKERS, asked.kills, asked.seed),
        "damaged": damage_round(maker, scratch / "damaged", quiet),
        "two_processes": two_round(maker, scratch, quiet, 6),
        "full_disk": full_round(maker, scratch / "disk", quiet),
    }
    return crash_goals(found), found


def crash_goals(found: dict[str, Any]) -> list[Goal]:
    """Every part was run, and all came out as in an undisturbed run."""
    alone, many, damaged, two, disk = (
        found[part] for part in ("killed", "workers_killed", "damaged", "two_processes", "full_disk")
    )
    kills, half = alone["kills"] + many["kills"], len(disk.get("half_files", ()))
    rows = [
        goal("kills at random moments", kills, at_least=KILLS, shown=f"{kills}, {many['kills']} of them among workers"),
        all_of("killed runs that ended with the bytes of an undisturbed one", alone["identical"], alone["runs"]),
        all_of(
            f"traces of {many['workers']} workers, killed among themselves, likewise", many["identical"], many["runs"]
        ),
        all_of("damaged files that were found and made again", sum(r["identical"] for r in damaged), len(damaged)),
        all_of("two processes at once that gave the same bytes", two["identical"], two["rounds"]),
        all_of("two processes at once that made each shard once", two["shared"], two["rounds"]),
    ]
    said = f"{half} half files; one line: {disk['message']}" if disk["tested"] else f"not run: {disk['why']}"
    full = {"goal": "half files on a full disk, and the trace after it had room again", "measured": said}
    return [
        *rows,
        full | {"bound": "none, and the same bytes", "met": disk["tested"] and disk["identical"] and not half},
    ]


# ---- many prompts


def many_prompts(scratch: Path, asked: Any) -> tuple[list[Goal], dict[str, Any]]:
    """Run, kill all workers a third of the way, run on."""
    build("causal", "llama").save_pretrained(scratch / "tiny")
    tokenizer_for("causal").save_pretrained(scratch / "tiny")
    task = Task.from_prompts([f"The {number} small dogs" for number in range(asked.prompts)])
    maker = Maker(eelib.load_model(str(scratch / "tiny"), device="cpu"), task, max_new_tokens=4, batch_size=64)
    folder, number = scratch / "runs", -(-asked.prompts // 64)
    children = [maker.start(folder) for _ in range(asked.workers)]
    while len(shards(folder)) < number // 3:
        time.sleep(0.2)
    for child in children:
        os.kill(child, signal.SIGKILL)
        status_of(child)
    killed, before = time.time(), shards(folder)
    statuses = [status_of(child) for child in [maker.start(folder) for _ in range(asked.workers)]]
    if any(statuses):
        sys.exit(f"workers ended with {statuses}")
    made = shards(folder)
    after = made[made[:, 2] > killed]
    spent = np.ptp(before[:, 2]) + np.ptp(after[:, 2])
    found = {
        "prompts": asked.prompts,
        "workers": asked.workers,
        "shards": number,
        "shards_made": len(set(made[:, 1])),
        "shards_made_twice": len(made) - len(set(made[:, 1])),
        "prompts_per_second": round(asked.prompts / spent, 1),
        "seconds_to_start_again": round(after[:, 2].min() - killed, 1),
        "peak_memory_mb": int(made[:, 3].max()),
    }
    return prompt_goals(found), found


def prompt_goals(found: dict[str, Any]) -> list[Goal]:
    """Shards are shared out; those in hand at the kill are made again."""
    twice, rate = found["shards_made_twice"], found["prompts_per_second"]
    shown = (
        f"{twice} of {found['shards']:,}, for {found['prompts']:,} prompts by {found['workers']} workers: {rate:,.0f} "
        f"prompts a second, {found['peak_memory_mb']:,} MB in the largest worker"
    )
    name = "shards that were made twice, though all workers were killed once, each with one in hand at most"
    made = all_of("shards that were made", found["shards_made"], found["shards"])
    return [made, goal(name, twice, at_most=found["workers"], shown=shown)]


# ---- the same again


def reproducible(scratch: Path, asked: Any) -> tuple[list[Goal], dict[str, Any]]:
    """Each number format: the same trace again, then with other batch sizes, then with another number of threads."""
    found: dict[str, list[dict[str, Any]]] = {"equal_runs": [], "batch_sizes": [], "threads": []}
    task = eelib.load_task("translation/de-en", asked.limit)
    for dtype in ("float32", "bfloat16"):
        model = eelib.load_model(SHIPPED, dtype=dtype, device="cpu")

        def made(name: str, size: int, threads: int = 1, model: Model = model, dtype: str = dtype) -> Trace:
            torch.set_num_threads(threads)
            return eelib.trace(model, task, 32, scratch / dtype / name, size, 2, 2, progress=False)

        first, again = made("first", 1), made("again", 1)
        same = content(first.folder) == content(again.folder)
        found["equal_runs"].append({"dtype": dtype, "files": len(content(first.folder)), "same_bytes": same})
        for size in (4, 16):
            row = between(first, made(f"batch-{size}", size))
            found["batch_sizes"].append({"dtype": dtype, "batch_size": size, "against": 1} | row)
        found["threads"].append({"dtype": dtype, "threads": 2, "against": 1} | between(first, made("threads", 1, 2)))
    return same_goals(found), found


def same_goals(found: dict[str, list[dict[str, Any]]]) -> list[Goal]:
    """The same bytes from equal runs, in float32 the same top-1s from batches of any size."""
    equal, exact = found["equal_runs"], [row for row in found["batch_sizes"] if row["dtype"] == "float32"]
    outputs, wrong = (sum(row[key] for row in exact) for key in ("other_outputs", "other_top1s"))
    of = sum(row["top1s"] for row in exact)
    name = "top-1s of any layer that another batch size changes in float32"
    return [
        all_of("equal runs with the same bytes", sum(row["same_bytes"] for row in equal), len(equal)),
        goal(name, wrong, at_most=0, shown=f"{wrong:,} of {of:,}"),
        goal("outputs that another batch size changes in float32", outputs, at_most=0),
    ]


PARTS = {"crashes": crashes, "many_prompts": many_prompts, "reproducible": reproducible}


def main() -> None:
    """The command line."""
    parser = options(__doc__, "PART")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--kills", type=int, default=150, help="crashes: of one process, and as many of workers (150)")
    parser.add_argument("--seed", type=int, default=0, help="crashes: of the random moments (0)")
    parser.add_argument("--prompts", type=int, default=100_000, help="many_prompts: how many (100000)")
    parser.add_argument("--workers", type=int, default=8, help="many_prompts: processes of one thread each (8)")
    parser.add_argument("--limit", type=int, default=48, help="reproducible: sequences (48)")
    asked = parser.parse_args()
    output = asked.output.with_stem(asked.part) if asked.output.stem == "PART" else asked.output
    head = headed("store", "pyarrow", depends=(*TRACES, *TINY), seed=asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        goals, found = PARTS[asked.part](Path(folder), asked)
    if asked.part != "many_prompts":
        head["models"] = {SHIPPED: weights_hash(data_folder("models", SHIPPED))}
    finish(output, head, goals, **found)
