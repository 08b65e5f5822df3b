"""A hundred thousand prompts through several workers: rows a second, peak memory, and how soon all go on when killed.

`python -m checks.many_prompts [--prompts 100000] [--workers 8]` traces short prompts with a tiny random model. A third
of the way all workers are killed with -9 and started again; the time until the first of them makes a shard is the time
to start again. It writes data/checks/many_prompts.json and ends with status 1 where a shard was made twice, but for
those that the killed had in hand, or one is missing.
"""

import argparse
import json
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

from checks.report import headed, write_report
from eelib.common.files import data_folder

RESULT = data_folder("checks", "many_prompts.json")
TOKENS = 4  # of each output


def work(folder: Path, prompts: int, log: Path) -> None:
    """One worker: load the model, make what shards are free, write down each, then the peak memory of the process."""
    import torch

    import eelib
    from eelib.tracing import make as making

    torch.set_num_threads(1)
    plain = making.make_shard

    def noted(job: making.Job, sequences: list[int], index: int) -> None:
        plain(job, sequences, index)
        with open(log, "a") as file:
            file.write(f"shard {os.getpid()} {time.time():.3f} {index}\n")

    making.make_shard = noted
    model = eelib.load_model(str(folder / "tiny"), device="cpu")
    task = eelib.Task.from_prompts([f"The {number} small dogs" for number in range(prompts)])
    with open(log, "a") as file:
        file.write(f"ready {os.getpid()} {time.time():.3f} 0\n")
    made = eelib.trace(model, task, TOKENS, folder / "runs", batch_size=64, progress=False)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    with open(log, "a") as file:
        file.write(f"rows {os.getpid()} {time.time():.3f} {made.manifest['rows']}\n")
        file.write(f"peak {os.getpid()} {time.time():.3f} {peak}\n")


def start(folder: Path, prompts: int, workers: int, log: Path) -> list[int]:
    """Ids of so many workers; each a process of its own, as Snakemake starts them."""
    command = [sys.executable, "-m", "checks.many_prompts", "--work", str(folder), "--log", str(log)]
    command += ["--prompts", str(prompts)]
    return [os.spawnv(os.P_NOWAIT, sys.executable, command) for _ in range(workers)]


def lines(log: Path, kind: str) -> list[tuple[int, float, int]]:
    """(process, time, number) of what workers wrote down of one kind."""
    found = (line.split() for line in log.read_text().splitlines()) if log.exists() else ()
    return [(int(process), float(when), int(number)) for what, process, when, number in found if what == kind]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=100_000, help="how many (100000)")
    parser.add_argument("--workers", type=int, default=8, help="processes, of one thread each (8)")
    parser.add_argument("--output", type=Path, default=RESULT, help=f"where the JSON goes ({RESULT})")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        work(asked.work, asked.prompts, asked.log)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        head, report = headed("many_prompts", "pyarrow"), measured(folder, asked.prompts, asked.workers)
    write_report(asked.output, head, **report)
    print(json.dumps(report))
    sys.exit(0 if report["ok"] else 1)


def measured(folder: Path, prompts: int, workers: int) -> dict:
    """Run, kill, run on."""
    from checks.tiny import build
    from checks.tiny_texts import tokenizer_for

    build("causal", "llama").save_pretrained(folder / "tiny")
    tokenizer_for("causal").save_pretrained(folder / "tiny")
    shards, began = -(-prompts // 64), time.time()
    log = folder / "log"
    children = start(folder, prompts, workers, log)
    while len(lines(log, "shard")) < shards // 3:
        time.sleep(0.2)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    killed, before = time.time(), lines(log, "shard")
    children = start(folder, prompts, workers, log)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    after = [line for line in lines(log, "shard") if line[1] > killed]
    indices = [index for _, _, index in lines(log, "shard")]
    first = min(when for _, when, _ in before)
    spent = (before[-1][1] - first) + (max(when for _, when, _ in after) - min(when for _, when, _ in after))
    rows = max(number for _, _, number in lines(log, "rows"))
    return {
        "prompts": prompts,
        "workers": workers,
        "tokens_of_each": TOKENS,
        "shards": shards,
        "seconds_until_the_first_shard": round(first - began, 1),
        "prompts_per_second": round(prompts / spent, 1),
        "rows_per_second": round(rows / spent, 1),
        "seconds_to_start_again": round(min(when for _, when, _ in after) - killed, 1),
        "of_them_loading": round(min(when for _, when, _ in lines(log, "ready") if when > killed) - killed, 1),
        "seconds_after_the_last_shard": round(
            max(w for _, w, _ in lines(log, "rows")) - max(w for _, w, _ in after), 1
        ),
        "peak_memory_mb": max(number for _, _, number in lines(log, "peak")),
        "shards_made_twice": len(indices) - len(set(indices)),
        "ok": not any(statuses) and len(set(indices)) == shards and len(indices) - shards <= workers,
    }


if __name__ == "__main__":
    main()
