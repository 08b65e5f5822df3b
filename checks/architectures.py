"""Every architecture that transformers can build from a tiny random configuration, checked against a float64 oracle.

Each is checked in a process of its own by `checks.one_architecture`, which says what a row holds.
"""

import os
import time
import warnings
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
import transformers

from checks.one_architecture import VERDICTS, check, new_row, passes
from checks.report import TINY, TRACES, Goal, all_of, finish, goal, headed, options
from checks.tiny import KINDS

LIMIT = 120.0  # seconds for one architecture
LEAST = 0.9  # share of the attention-based causal architectures that pass everything
Item = tuple[str, str]  # kind, model type


def send_row(sender: Connection, kind: str, model_type: str) -> None:
    """Check one architecture, without what the libraries print."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    sender.send(check(kind, model_type))


def sweep(wanted: list[Item], processes: int) -> list[dict]:
    """Rows of architectures, in their order; one whose process dies or takes too long has failed."""
    torch.set_num_threads(1)  # threads do not survive a fork
    context, left = get_context("fork"), list(wanted)
    rows: dict[Item, dict] = {}
    running: dict[Item, tuple[BaseProcess, Connection, float]] = {}
    while left or running:
        while left and len(running) < processes:
            receiver, sender = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(target=send_row, args=(sender, *left[0]))
            process.start()
            sender.close()
            running[left.pop(0)] = process, receiver, time.monotonic()
        wait([receiver for _, receiver, _ in running.values()], timeout=0.5)
        for item, (process, receiver, began) in list(running.items()):
            seconds = time.monotonic() - began
            if not receiver.poll() and seconds <= LIMIT:
                continue
            try:
                reason = f"took longer than {LIMIT:g} s"
                row = receiver.recv() if receiver.poll() else None
            except EOFError:
                reason, row = "the check's process died", None
            failed = {"built": True, "readout": "fail", "reason": reason, "seconds": round(seconds, 1)}
            rows[item] = row or new_row(*item) | failed
            process.kill()
            process.join()
            del running[item]
            print(line_of(rows[item]), flush=True)
    return [rows[item] for item in wanted]


def line_of(row: dict) -> str:
    """A row as a line of text."""
    verdicts = " ".join(f"{row[k] or '-':13s}" for k in VERDICTS)
    return f"{row['kind']:10s} {row['model_type']:24s} {verdicts} {row['seconds']:5.1f}  {row['reason']}"


def goals(rows: list[dict]) -> list[Goal]:
    """Of no kind may one fail, and what is refused has a reason; of attention-based causal ones most have to pass."""
    found = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        wrong = [row["model_type"] for row in own if "fail" in [row[verdict] for verdict in VERDICTS]]
        good, built = sum(map(passes, own)), sum(row["built"] for row in own)
        said = f"{len(wrong)} of {len(own)}; {built} were built, and {good} of these pass everything"
        said += f"; wrong: {', '.join(wrong[:5])}" if wrong else ""
        found.append(goal(f"{kind} architectures of which a number is wrong", len(wrong), at_most=0, shown=said))
    if others := [row for row in rows if not passes(row)]:
        name = "architectures that were refused or not built, with the reason"
        found.append(all_of(name, sum(bool(row["reason"]) for row in others), len(others)))
    if any(row["kind"] == "causal" for row in rows):
        own = [row for row in rows if row["kind"] == "causal" and row["built"] and row["attention_based"]]
        share = sum(map(passes, own)) / max(len(own), 1)
        name = "attention-based causal architectures that pass everything, as a share"
        found.append(goal(name, share, at_least=LEAST, shown=f"{share:.3f} of {len(own)}"))
    return found


def main() -> None:
    """The command line."""
    parser = options(__doc__, "architectures")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="model types to check (default: all)")
    parser.add_argument("--kind", nargs="+", choices=[*KINDS], default=[*KINDS], help="kinds of networks (all)")
    parser.add_argument("--processes", type=int, default=2, help="architectures at a time (2)")
    asked = parser.parse_args()
    names = [(kind, name) for kind in asked.kind for name in KINDS[kind]]
    wanted = [(kind, name) for kind, name in names if not asked.only or name in asked.only]
    if not wanted:
        parser.error("no architecture of that name; allowed are transformers' model types, such as llama or bert")
    if len(wanted) < sum(map(len, KINDS.values())) and asked.output == parser.get_default("output"):
        parser.error("a part of the architectures needs an --output of its own")
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    head = headed("architectures", depends=(*TRACES, *TINY, "checks/one_architecture.py"), seed=0)
    rows = sweep(wanted, asked.processes)
    finish(asked.output, head, goals(rows), rows=rows)
