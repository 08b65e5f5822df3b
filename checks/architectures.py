"""Every architecture that transformers can build from a tiny random configuration, checked against a float64 oracle.

Each is checked in a process of its own by `checks.one_architecture`, which says what a row holds.
"""

import os
import time
import warnings
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers

from checks.one_architecture import VERDICTS, check, new_row, passes
from checks.report import TINY, TRACES, Goal, all_of, finish, goal, headed, options
from checks.tiny import KINDS

LIMIT = 120.0  # seconds for one architecture
SAMPLE = (("causal", "gemma2"), ("seq2seq", "marian"), ("masked", "distilbert"), ("classifier", "electra"))
LEAST = 0.9  # share of the attention-based causal architectures that pass everything


def send_row(sender: Connection, kind: str, model_type: str) -> None:
    """Check one architecture, without what the libraries print."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    sender.send(check(kind, model_type))


def checked(kind: str, model_type: str) -> dict:
    """The row of an architecture from a process of its own; one whose process dies or takes too long has failed."""
    torch.set_num_threads(1)  # threads do not survive a fork
    context, began = get_context("fork"), time.monotonic()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_row, args=(sender, kind, model_type))
    process.start()
    sender.close()
    failed = new_row(kind, model_type) | {"built": True, "readout": "fail", "reason": f"took longer than {LIMIT:g} s"}
    try:
        row = receiver.recv() if receiver.poll(LIMIT) else failed
    except EOFError:
        row = failed | {"reason": "the check's process died"}
    process.kill()
    process.join()
    return row | {"seconds": round(time.monotonic() - began, 1)}


def line_of(row: dict) -> str:
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


def sample() -> dict[str, Any]:
    """A small part, computed again by the tests: the verdicts on one architecture of each kind."""
    rows = [check(*item) for item in SAMPLE]
    return {"values": {row["architecture"]: [row[verdict] for verdict in VERDICTS] for row in rows}, "near_ties": []}


def main() -> None:
    parser = options(__doc__, "architectures")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="model types to check (default: all)")
    asked = parser.parse_args()
    wanted = [(kind, name) for kind, names in KINDS.items() for name in names if not asked.only or name in asked.only]
    if not wanted:
        parser.error("no architecture of that name; allowed are transformers' model types, such as llama or bert")
    if asked.only and asked.output == parser.get_default("output"):
        parser.error("a part of the architectures needs an --output of its own")
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    head, rows = headed("architectures", depends=(*TRACES, *TINY, "checks/one_architecture.py"), seed=0), []
    for item in wanted:
        rows.append(checked(*item))
        print(line_of(rows[-1]), flush=True)
    finish(asked.output, head, goals(rows), sample=sample(), rows=rows)
