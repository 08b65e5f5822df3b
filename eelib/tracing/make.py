"""Ask for a trace: decode a task once, read every layer, keep it as Parquet shards; resumable, one maker at a time."""

import hashlib
import json
import re
from pathlib import Path

import torch
import transformers

from eelib.common.errors import InputError, StorageError
from eelib.common.files import only_one
from eelib.common.sources import code_hash
from eelib.common.values import check_whole
from eelib.models.model import Model
from eelib.tasks.glue import named
from eelib.tasks.task import Task
from eelib.tracing.extras import has_extra, make_extra
from eelib.tracing.outputs import is_finished, make_outputs
from eelib.tracing.plan import Job
from eelib.tracing.replay import TOLERANCES, has_replay, make_replay
from eelib.tracing.trace import Trace

ROOMS = ("models", "lens", "tracing", TOLERANCES)  # a trace depends on their code
SUBSET = 24  # sequences for sites, pairs or times where the caller says only True


def trace(
    model: Model,
    task: Task,
    max_new_tokens: int = 64,
    folder: str | Path = "runs",
    batch_size: int | None = None,
    sites: bool | int = False,
    pairs: bool | int = False,
    strict: bool = False,
    progress: bool = True,
    timed: bool | int = False,
    repeats: int = 3,
) -> Trace:
    """The trace of `task` under `model`: made if it does not exist, finished if it is half made, else returned.

    Greedy decoding up to `max_new_tokens`; every emitted token is read at layers 0..L. `sites` and `pairs` (True, or a
    number of sequences) add sub-layer readouts and layer-by-layer similarities for the first so many sequences; `timed`
    adds the times of a run that stops at each token's exit layer, for so many sequences, `repeats` times each.
    Prompts beyond the model's window are counted and skipped, or refused with `strict`. A `batch_size` other than the
    one that a half made trace was begun with holds for the rest of it. Raises InputError, or StorageError where the
    disk is at fault: one line.
    """
    if not isinstance(model, Model) or not isinstance(task, Task):
        raise InputError(
            f"a trace needs a model from eelib.load_model and a task from eelib.load_task; got "
            f"{type(model).__name__} and {type(task).__name__}"
        )
    check_model(model, task)
    check_whole("max_new_tokens", max_new_tokens, 1)
    check_whole("repeats", repeats, 1)
    if batch_size is not None:
        check_whole("batch_size", batch_size, 1)
    for kind, wanted in (("sites", sites), ("pairs", pairs), ("timed", timed)):
        if not isinstance(wanted, bool):
            check_whole(kind, wanted, 0, "True, False or a number of sequences")
    if sites and not model.components:  # said before hours of decoding, not after
        raise InputError(model.components_error)
    identity = identity_of(model, task, int(max_new_tokens))
    job = Job(model, task, Path(folder) / folder_name(identity), identity, batch_size, strict, progress)
    extras = {kind: count(wanted) for kind, wanted in (("sites", sites), ("pairs", pairs)) if wanted}
    try:
        with only_one(job.folder, told=progress):  # a page has no place for it
            make_outputs(job)
            for kind, wanted in extras.items():
                make_extra(job, kind, wanted)
            if timed:
                make_replay(job, count(timed), int(repeats))
    except StorageError:  # a folder that can only be read, as that of somebody else, may hold all of it
        made = is_finished(job) and all(has_extra(job, *extra) for extra in extras.items())
        if not made or (timed and not has_replay(job, count(timed), int(repeats))):
            raise
    return Trace(job.folder)


def count(wanted: bool | int) -> int:
    """The number of sequences that a caller asked for."""
    return SUBSET if wanted is True else int(wanted)


def identity_of(model: Model, task: Task, max_new_tokens: int) -> dict:
    """What a trace depends on; another value of anything in it makes another trace."""
    return {
        "model": model.name,
        "weights": model.hash,
        "task": task.name,
        "task_hash": task.hash,
        "settings": {"max_new_tokens": max_new_tokens, "dtype": model.dtype, "device": model.device.type},
        "code": code_hash(*ROOMS),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def folder_name(identity: dict) -> str:
    """Where a trace lies in a runs folder: model/task-key."""
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    task = re.sub(r"[^\w.+-]", ".", identity["task"])[:100]
    return f"{identity['model']}/{task}-{key}"


def check_model(model: Model, task: Task) -> None:
    """InputError where a model can't do a task: labels asked of it or text, or labels of another task."""
    if task.kind != "classification":
        if model.labels and task.kind != "prompts":
            raise InputError(
                f"{task.name}: {model.name} is a sequence classifier, which gives labels, not text; "
                "allowed are classification tasks and free prompts"
            )
        return
    if not model.labels:
        raise InputError(f"{task.name} needs a sequence classifier; {model.name} is {model.kind}")
    theirs, ours = ", ".join(model.labels), ", ".join(task.labels)
    if len(model.labels) != len(task.labels):
        raise InputError(
            f"{model.name} has {len(model.labels)} labels ({theirs}), {task.name} has {len(task.labels)} ({ours})"
        )
    if {named(label, task.labels) for label in model.labels} != set(task.labels):
        raise InputError(
            f"{model.name} has the labels {theirs}, {task.name} has {ours}; allowed are the same names "
            "in any case and order, or numbers such as LABEL_0"
        )
