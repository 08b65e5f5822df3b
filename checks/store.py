"""Traces that are killed, shared out and made again: the files have to be those that an undisturbed run makes.

`crashes` kills one maker of a trace again and again with -9, then one of several. `many_prompts` gives very many
prompts to several workers and kills them all on the way. `reproducible` asks for the same trace again, and with other
batch sizes.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

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
from eelib.tracing.trace import Trace

WORKERS, MOST_KILLS, KILLS = 3, 12, 300  # the most kills of one trace, so that several come to an end; in all
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "batch_size": 4, "sites": 2, "pairs": 2}
PROMPTS, PROCESSES = 100_000, 4  # of `many_prompts`; a process has one thread
SHIPPED, SEED, LONGEST = "pocket-llama", 0, 3600  # LONGEST: seconds until a third of the shards are made
Found = dict[str, Any]
Maker = Callable[[Path], int]  # starts a process that makes a trace in a folder


def start(model: Model, task: Task, options: dict[str, Any], folder: Path) -> int:
    """Ask for a trace in a process forked from this one; its id. Its exit status is 0 where it finished the trace."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(1)  # threads do not survive a fork
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        tqdm.set_lock(threading.RLock())  # the one that forked processes share stays locked if its holder is killed
        with open(os.devnull, "w") as silent, redirect_stdout(silent):
            eelib.trace(model, task, folder=folder, progress=False, **options)
        status = 0
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(status)


def tiny_model(folder: Path) -> Model:
    """Of random weights."""
    build("causal", "llama").save_pretrained(folder)
    tokenizer_for("causal").save_pretrained(folder)
    return eelib.load_model(str(folder), device="cpu")


def status_of(child: int) -> int:
    """Wait for a process; its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def content(runs: Path) -> dict[str, bytes]:
    """{FOLDER/FILE: bytes} of the traces in a runs folder, without their locks and times."""
    files = (file for file in runs.glob("*/*/*") if file.name not in (".lock", "times.json"))
    return {f"{file.parent.name}/{file.name}": file.read_bytes() for file in files}


# ---- crashes


def kill_round(maker: Maker, scratch: Path, quiet: dict[str, bytes], seconds: float, workers: int, least: int) -> Found:
    """Traces by several workers, of which one is killed and another put in its place, until `least` were killed."""
    draw, kills, runs, identical = random.Random(SEED), 0, 0, 0
    while kills < least:
        folder, mine = scratch / f"{workers}-workers-{runs}", 0
        children = [maker(folder) for _ in range(workers)]
        while mine < MOST_KILLS:
            victim = children.pop(draw.randrange(workers))
            time.sleep(draw.uniform(0, seconds / workers))
            os.kill(victim, signal.SIGKILL)
            if status_of(victim) != -signal.SIGKILL:
                break  # it had come to its end
            kills, mine = kills + 1, mine + 1
            children.append(maker(folder))
        statuses = [status_of(child) for child in [*children, maker(folder)]]
        runs, identical = runs + 1, identical + (not any(statuses) and content(folder) == quiet)
        shutil.rmtree(folder)
    return {"workers": workers, "kills": kills, "runs": runs, "identical": identical}


def crashes(scratch: Path) -> Found:
    maker = partial(start, tiny_model(scratch / "tiny"), eelib.load_task("translation/de-en", 24), OPTIONS)
    began = time.monotonic()
    status_of(maker(scratch / "quiet"))
    seconds, quiet = time.monotonic() - began, content(scratch / "quiet")
    return {
        name: kill_round(maker, scratch, quiet, seconds, workers, KILLS // 2)
        for name, workers in (("killed", 1), ("workers_killed", WORKERS))
    }


def crash_goals(found: Found) -> list[Goal]:
    """All came out as in an undisturbed run."""
    alone, many = found["killed"], found["workers_killed"]
    kills = alone["kills"] + many["kills"]
    by_one = "traces by one process with kills that equal an undisturbed run byte for byte"
    by_many = f"the same by {many['workers']} workers, one of which is killed at a time"
    return [
        goal("kills at random moments", kills, at_least=KILLS, shown=f"{kills}, {many['kills']} with several workers"),
        all_of(by_one, alone["identical"], alone["runs"]),
        all_of(by_many, many["identical"], many["runs"]),
    ]


# ---- many prompts


def many_prompts(scratch: Path) -> Found:
    """Run, kill all workers a third of the way, run on."""
    task = Task.from_prompts([f"The {number} small dogs" for number in range(PROMPTS)])
    maker = partial(start, tiny_model(scratch / "tiny"), task, {"max_new_tokens": 4, "batch_size": 64})
    folder, number = scratch / "runs", -(-PROMPTS // 64)

    def made() -> dict[str, int]:
        return {file.name: file.stat().st_mtime_ns for file in folder.glob("*/*/tokens-*.parquet")}

    began = time.monotonic()
    children = [maker(folder) for _ in range(PROCESSES)]
    end = began + LONGEST
    while len(made()) < number // 3:
        if time.monotonic() > end:
            sys.exit(f"{len(made()):,} of {number:,} shards after {LONGEST} seconds: the workers make nothing")
        time.sleep(0.2)
    for child in children:
        os.kill(child, signal.SIGKILL)
        status_of(child)
    before = made()
    ended = [os.wait4(child, 0) for child in [maker(folder) for _ in range(PROCESSES)]]
    after = made()
    return {
        "prompts": PROMPTS,
        "workers": PROCESSES,
        "failed_workers": sum(status != 0 for _, status, _ in ended),
        "shards": number,
        "shards_made": len(after),
        "shards_made_twice": sum(after.get(name) != when for name, when in before.items()),
        "prompts_per_second": round(PROMPTS / (time.monotonic() - began), 1),
        "peak_memory_mb": max(usage.ru_maxrss for _, _, usage in ended) >> 10,
    }


def prompt_goals(found: Found) -> list[Goal]:
    """Shards are shared out; those in hand at the kill are made again."""
    twice, rate = found["shards_made_twice"], found["prompts_per_second"]
    shown = (
        f"{twice} of {found['shards']:,} ({found['prompts']:,} prompts, {found['workers']} workers, {rate:,.0f} "
        f"prompts a second, {found['peak_memory_mb']:,} MB in the largest worker)"
    )
    name = "shards that were made twice after all workers had been killed once"
    made = all_of("shards that were made", found["shards_made"], found["shards"])
    failed = goal("workers that failed when they went on", found["failed_workers"], at_most=0)
    return [made, failed, goal(name, twice, at_most=found["workers"], shown=shown)]


# ---- the same again


def same_again(scratch: Path, limit: int, new_tokens: int, dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> Found:
    """Each number format: the same trace again, then with other batch sizes; each with one thread."""
    found: dict[str, list[Found]] = {"equal_runs": [], "batch_sizes": []}
    task = eelib.load_task("translation/de-en", limit)
    for dtype in dtypes:
        model = eelib.load_model(SHIPPED, dtype=dtype, device="cpu")
        torch.set_num_threads(1)

        def made(name: str, size: int, model: Model = model, dtype: str = dtype) -> Trace:
            return eelib.trace(model, task, new_tokens, scratch / dtype / name, size, 2, 2, progress=False)

        first, _ = made("first", 1), made("again", 1)
        files, again = (content(scratch / dtype / name) for name in ("first", "again"))
        found["equal_runs"].append({"dtype": dtype, "files": len(files), "same_bytes": bool(files) and files == again})
        for size in (4, 16):
            row = between(first, made(f"batch-{size}", size))
            found["batch_sizes"].append({"dtype": dtype, "batch_size": size, "against": 1} | row)
    return found


def reproducible(scratch: Path) -> Found:
    return same_again(scratch, 48, 32) | {"sample": sample()}


def sample() -> Found:
    """A small part, computed again by the tests: whether equal runs are, and tokens and top-1s that batches change."""
    with tempfile.TemporaryDirectory() as folder:
        found = same_again(Path(folder), 4, 8, ("float32",))
    rows = found["batch_sizes"]
    values = {"same_bytes": [row["same_bytes"] for row in found["equal_runs"]]}
    return {
        "values": values | {name: [row[name] for row in rows] for name in ("tokens", "other_top1s")},
        "near_ties": [],
    }


def same_goals(found: Found) -> list[Goal]:
    """The same bytes from equal runs, in float32 the same top-1s from batches of any size."""
    equal, exact = found["equal_runs"], [row for row in found["batch_sizes"] if row["dtype"] == "float32"]
    outputs, wrong = (sum(row[key] for row in exact) for key in ("other_outputs", "other_top1s"))
    of = sum(row["top1s"] for row in exact)
    name = "top-1 tokens, at any layer, that change with the batch size in float32"
    return [
        all_of("repeated runs that wrote the same bytes", sum(row["same_bytes"] for row in equal), len(equal)),
        goal(name, wrong, at_most=0, shown=f"{wrong:,} of {of:,}"),
        goal("outputs that change with the batch size in float32", outputs, at_most=0),
    ]


PARTS = {
    "crashes": (crashes, crash_goals),
    "many_prompts": (many_prompts, prompt_goals),
    "reproducible": (reproducible, same_goals),
}


def main() -> None:
    parser = options(__doc__, "PART")
    parser.add_argument("part", choices=PARTS)
    asked = parser.parse_args()
    output = asked.output.with_stem(asked.part) if asked.output.stem == "PART" else asked.output
    head = headed("store", "pyarrow", depends=(*TRACES, *TINY, "checks/dtypes.py"), seed=SEED)
    measure, goals = PARTS[asked.part]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    if asked.part == "reproducible":
        head["models"] = {SHIPPED: weights_hash(data_folder("models", SHIPPED))}
    finish(output, head, goals(found), **found)
