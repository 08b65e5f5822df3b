"""Every architecture that transformers can build from a tiny random configuration, checked against a float64 oracle.

`python -m checks.families [--only NAME ...] [--kind KIND ...]` writes data/checks/families.json:
machine, versions and one row per architecture: {architecture, model_type, kind, built, attention_based, readout,
sublayers, padding, decoding, dtype, no_float64, reason, seconds}; readout, sublayers and decoding are pass, refused or
fail; dtype: what it was last compared in, float32 where the network has no float64, and no_float64: what it then
raised; attention_based: every layer holds attention, softmax or linear.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

from eelib.common.files import data_folder

RESULT = data_folder("checks", "families.json")
VERDICTS = ("readout", "sublayers", "padding", "decoding")
LIMIT = 120.0  # seconds for one architecture; the slowest takes 50 on a machine without other work


def worker() -> None:
    """Read "kind model_type" lines, answer each with one line of JSON; imports are paid once."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print goes to stderr
    import warnings

    import torch
    import transformers

    from checks.one_family import check

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for line in sys.stdin:
        kind, model_type = line.split()
        answers.write(json.dumps(check(kind, model_type)) + "\n")
        answers.flush()


class Worker:
    """A process that checks one architecture at a time; restarted when it crashes or takes too long."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def ask(self, kind: str, model_type: str) -> dict:
        """The row, or one that says that the check crashed or took too long."""
        process = self.process
        if process is None:
            process = self.process = subprocess.Popen(
                [sys.executable, "-m", "checks.families", "--worker"],
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            )
        asking, telling = process.stdin, process.stdout
        assert asking and telling
        asking.write(f"{kind} {model_type}\n")
        asking.flush()
        answer: list[str] = []
        began = time.monotonic()
        reader = threading.Thread(target=lambda: answer.append(telling.readline()))
        reader.start()
        reader.join(LIMIT)
        if answer and answer[0]:
            return json.loads(answer[0])
        seconds = round(time.monotonic() - began, 1)
        reason = "the check's process died" if not reader.is_alive() else f"took longer than {LIMIT:.0f} s"
        self.close()
        reader.join()
        from checks.one_family import begun

        return begun(kind, model_type) | {"built": True, "readout": "fail", "reason": reason, "seconds": seconds}

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def sweep(wanted: list[tuple[str, str]], processes: int) -> list[dict]:
    """Rows of the wanted (kind, model type) pairs, in their order."""
    waiting: queue.Queue = queue.Queue()
    for item in wanted:
        waiting.put(item)
    rows: dict[tuple[str, str], dict] = {}

    def work() -> None:
        own = Worker()
        while True:
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return own.close()
            rows[item] = own.ask(*item)
            print(line_of(rows[item]), flush=True)

    threads = [threading.Thread(target=work) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [rows[item] for item in wanted]


def line_of(row: dict) -> str:
    """A row as a line of text."""
    verdicts = " ".join(f"{row[k] or '-':13s}" for k in VERDICTS)
    return f"{row['kind']:10s} {row['model_type']:24s} {verdicts} {row['seconds']:5.1f}  {row['reason']}"


def passes(row: dict) -> bool:
    """Whether an architecture passes everything that its kind has."""
    return row["readout"] == "pass" and row["sublayers"] == "pass" and row["decoding"] in ("pass", "none")


def summary(rows: list[dict]) -> str:
    """Counts by kind, one line each."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        built = [row for row in own if row["built"]]
        attending = [row for row in built if row["attention_based"]]
        lines.append(
            f"{kind}: {len(own)} architectures, {len(built)} built; readout passes in "
            f"{sum(r['readout'] == 'pass' for r in built)}, everything in {sum(map(passes, built))}; of "
            f"{len(attending)} attention-based {sum(map(passes, attending))} pass everything; "
            f"{sum('fail' in [r[k] for k in VERDICTS] for r in own)} fail"
        )
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="model types to check (default: all)")
    parser.add_argument("--kind", nargs="+", choices=["causal", "seq2seq", "masked", "classifier"], help="heads")
    parser.add_argument("--processes", type=int, default=2, help="architectures at a time")
    parser.add_argument("--output", type=Path, help="the JSON (default, of a full run: data/checks/families.json)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker()
    from checks.tiny import KINDS

    wanted = [
        (kind, model_type)
        for kind, names in KINDS.items()
        if not options.kind or kind in options.kind
        for model_type in names
        if not options.only or model_type in options.only
    ]
    if not wanted:
        parser.error("no architecture of that name; allowed are transformers' model types, such as llama or bert")
    from checks.report import headed, write_report

    head, began = headed("families"), time.monotonic()
    rows = sweep(wanted, options.processes)
    print(summary(rows))
    output = options.output or (RESULT if not options.only and not options.kind else None)
    if output is not None:
        write_report(output, head, seconds=round(time.monotonic() - began, 1), rows=rows)


if __name__ == "__main__":
    main()
