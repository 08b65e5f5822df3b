"""What bfloat16 changes: exit layers of a task that is traced in float32 and in bfloat16.

The two are compared token by token, as far as both outputs are the same.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import eelib
from checks.report import TRACES, Goal, finish, goal, headed, options
from eelib.models.model import Model
from eelib.tasks.task import Task
from eelib.tracing.trace import Trace

MODEL, NEW_TOKENS = "smollm2-135m-instruct", 64
TEXTS = 60  # of each kind
COMPARED = 2000  # tokens
SAMPLE = 2, 16  # texts and new tokens that are traced again by `make test-all`
NEAR = 1e-3  # of the two largest probabilities, below which a layer's best token may change


def task_of(texts: int) -> Task:
    """So many requests, and as many openings, as the study puts them: worded for a small model, in its template."""
    kinds = [eelib.load_task(name).worded("short") for name in ("instructions/requests", "continuation/openings")]
    return Task.from_prompts([text for kind in kinds for text in kind.prompts[:texts]], name="answers", chat=True)


def between(one: Trace, other: Trace) -> dict[str, int]:
    """Outputs, tokens and exit layers of two traces of a task, as far as the outputs are the same."""
    same = dict.fromkeys(("outputs", "other_outputs", "tokens", "first", "stable", "top1s", "other_top1s"), 0)
    for sequence, rows in one.tokens.groupby("sequence").indices.items():
        others = other.tokens.groupby("sequence").indices[sequence]
        ids, found = (made.tokens["token_id"].to_numpy()[at] for made, at in ((one, rows), (other, others)))
        shared = min(len(ids), len(found))
        count = int(np.cumprod(ids[:shared] == found[:shared]).sum())
        same["outputs"] += 1
        same["other_outputs"] += not (count == len(ids) == len(found))
        same["tokens"] += count
        for name in ("first", "stable"):
            layers = one.exit_layer(name)[rows[:count]], other.exit_layer(name)[others[:count]]
            same[name] += int((layers[0] != layers[1]).sum())
        top1 = one["top1"][rows[:count]], other["top1"][others[:count]]
        same["top1s"] += top1[0].size
        same["other_top1s"] += int((top1[0] != top1[1]).sum())
    return same


def sample(model: Model | None = None) -> dict[str, Any]:
    """A small part, computed again by the tests: tokens and first exit layers, and places of near ties."""
    model, (texts, new) = model or eelib.load_model(MODEL, dtype="float32", device="cpu"), SAMPLE
    with tempfile.TemporaryDirectory() as folder:
        made = eelib.trace(model, task_of(texts), new, folder, progress=False)
        values = {"tokens": made.tokens["token_id"].tolist(), "first": made.exit_layer("first").tolist()}
        near = np.flatnonzero((np.asarray(made["margin"]) < NEAR).any(axis=1)).tolist()
    return {"values": values, "near_ties": near}


def goals(dtypes: dict[str, int]) -> list[Goal]:
    """Enough tokens; how many exit layers change is stated, and has no bound."""
    shown = (
        f"{dtypes['tokens']:,}, in {dtypes['outputs']} outputs, {dtypes['other_outputs']} of which end otherwise; the "
        f"first exit layer changes at {dtypes['first']} tokens, the stable one at {dtypes['stable']}"
    )
    name = "tokens that were compared in float32 and bfloat16"
    return [goal(name, dtypes["tokens"], at_least=COMPARED, shown=shown)]


def main() -> None:
    asked = options(__doc__, "dtypes").parse_args()
    head = headed("dtypes", depends=TRACES)
    models = {dtype: eelib.load_model(MODEL, dtype=dtype, device="cpu") for dtype in ("float32", "bfloat16")}
    head["models"] = {MODEL: models["float32"].hash}
    with tempfile.TemporaryDirectory() as folder:
        task = task_of(TEXTS)
        made = [eelib.trace(one, task, NEW_TOKENS, Path(folder) / dtype) for dtype, one in models.items()]
        dtypes = between(*made)
    finish(asked.output, head, goals(dtypes), sample=sample(models["float32"]), dtypes=dtypes)
