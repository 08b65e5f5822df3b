"""Ask for a trace: decode a task once, or take its texts as given, read every layer, keep it as Parquet shards;
resumable, by any number of makers.

Makers of one trace, here or on machines that share its folder, each make shards that no other makes; see `makers`.
"""

import hashlib
import json
import re
from pathlib import Path

import torch
import transformers

from eelib.common.errors import InputError, StorageError
from eelib.common.files import only_one
from eelib.common.machine import machine
from eelib.common.values import check_whole
from eelib.models.model import Model
from eelib.tasks.classification import named
from eelib.tasks.task import Task
from eelib.tracing.extras import has_extra, make_extra
from eelib.tracing.given import check_given
from eelib.tracing.makers import is_clear
from eelib.tracing.outputs import is_finished, make_outputs
from eelib.tracing.plan import Job
from eelib.tracing.shards import load_manifest
from eelib.tracing.trace import Trace

TRACE_VERSION = 3  # to be raised by a change of the code that changes what a trace holds: it is then made again
SUBSET = 24  # sequences for sites or pairs where the caller says only True


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
    given: bool = False,
) -> Trace:
    """The trace of `task` under `model`: made if it does not exist, finished if it is half made, else returned.

    Greedy decoding up to `max_new_tokens`; every emitted token is read at layers 0..L. `sites` and `pairs` (True, or a
    number of sequences) add sub-layer readouts and layer-by-layer similarities for the first so many sequences.
    With `given` nothing is decoded: the prompts are texts, and one pass of a decoder-only model reads all positions of
    each up to the window's end. The last layer's top-1 is the final token of a position; "token_id",
    "reference_probability" and "reference_rank" are of the text's own next token.
    Prompts beyond the model's window are counted and skipped (given texts: cut), or refused with `strict`. A
    `batch_size` other than the one that a half made trace was begun with holds for the rest of it. Raises InputError,
    or StorageError where the disk is at fault: one line.
    """
    job = job_of(model, task, max_new_tokens, folder, batch_size, strict, progress, given)
    for kind, wanted in (("sites", sites), ("pairs", pairs)):
        if not isinstance(wanted, bool):
            check_whole(kind, wanted, 0, "True, False or a number of sequences")
    if sites and not model.components:  # said before hours of decoding, not after
        raise InputError(model.components_error)
    extras = {kind: count(wanted) for kind, wanted in (("sites", sites), ("pairs", pairs)) if wanted}
    if (job.folder / "manifest.json").exists() and is_clear(job.folder) and has_all(job, extras):
        return Trace(job.folder)  # without the lock: another maker may be at work on what is not asked for
    try:
        while not make_outputs(job):
            pass
        if extras:
            with only_one(job.folder, told=progress):  # a page has no place for it
                for kind, wanted in extras.items():
                    make_extra(job, kind, wanted)
    except StorageError:  # a folder that can only be read, as that of somebody else, may hold all of it
        if not has_all(job, extras):
            raise
    return Trace(job.folder)


def make_free_shards(
    model: Model, task: Task, max_new_tokens: int = 64, folder: str | Path = "runs", batch_size: int | None = None
) -> None:
    """Make those shards of a trace that no other process makes, and don't wait for the others: for who has more to do.

    The same errors as `trace`.
    """
    job = job_of(model, task, max_new_tokens, folder, batch_size, progress=False)
    if not load_manifest(job.folder).get("finished"):
        make_outputs(job, wait=False)


def job_of(
    model: Model,
    task: Task,
    max_new_tokens: int,
    folder: str | Path,
    batch_size: int | None,
    strict: bool = False,
    progress: bool = True,
    given: bool = False,
) -> Job:
    """What is to be made, once it is known to be possible; InputError."""
    if not isinstance(model, Model) or not isinstance(task, Task):
        raise InputError(
            f"a trace needs a model from eelib.load_model and a task from eelib.load_task; got "
            f"{type(model).__name__} and {type(task).__name__}"
        )
    check_model(model, task)
    if not isinstance(given, bool):
        raise InputError(f"given {given!r} is not allowed; it must be True or False")
    if given:
        check_given(model, task)
    check_whole("max_new_tokens", max_new_tokens, 1)
    if batch_size is not None:
        check_whole("batch_size", batch_size, 1)
    identity = identity_of(model, task, int(max_new_tokens), given)
    return Job(model, task, Path(folder) / folder_name(identity), identity, batch_size, strict, progress)


def has_all(job: Job, extras: dict[str, int]) -> bool:
    """Whether a trace is finished, and what is asked for beside it there."""
    return is_finished(job) and all(has_extra(job, *extra) for extra in extras.items())


def count(wanted: bool | int) -> int:
    """The number of sequences that a caller asked for."""
    return SUBSET if wanted is True else int(wanted)


def identity_of(model: Model, task: Task, max_new_tokens: int, given: bool = False) -> dict:
    """What a trace depends on; another value of anything in it makes another trace."""
    settings: dict = {"given": True} if given else {"max_new_tokens": max_new_tokens}
    settings |= {"dtype": model.dtype, "device": model.device.type}
    if model.device.type == "cuda":  # shards of two kinds of GPU do not mix
        settings["card"] = machine(model.device)
    return {
        "model": model.name,
        "weights": model.hash,
        "task": task.name,
        "task_hash": task.hash,
        "settings": settings,
        "version": TRACE_VERSION,
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
