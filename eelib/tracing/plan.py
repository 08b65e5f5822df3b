"""A trace's identity, which names its folder, and its plan: the sequences, sorted by length and cut into shards."""

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor

from eelib.common.errors import InputError
from eelib.common.machine import free_memory, machine, versions
from eelib.common.values import check_whole
from eelib.models.model import Model
from eelib.tasks.classification import named
from eelib.tasks.task import Task
from eelib.tracing.decode import encode
from eelib.tracing.store import intact, load_manifest, save_manifest
from eelib.tracing.trace import Trace

TRACE_VERSION = 6  # to be raised by a change of the code that changes what a trace holds: it is then made again
SHARD = {"cpu": 32, "cuda": 128}  # most sequences in a batch, and so in a shard, where no batch size is given
STATES = 2**28  # bytes: a trace whose states take no more keeps them
IDENTITY = ("model", "weights", "task", "task_hash", "settings", "version", "torch", "transformers")
CHUNK = 2000  # prompts that are encoded together


@dataclass
class Job:
    """A trace to be made, with the arguments of `trace` (`runs` is its `folder`). InputError if one is not allowed."""

    model: Model
    task: Task
    max_new_tokens: int
    runs: str | Path
    batch_size: int | None = None
    progress: bool = True
    given: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, Model) or not isinstance(self.task, Task):
            raise InputError(
                f"a trace needs a model from eelib.load_model and a task from eelib.load_task; got "
                f"{type(self.model).__name__} and {type(self.task).__name__}"
            )
        if not len(self.task):
            raise InputError(f"{self.task.name} has no texts; a trace needs one or more")
        check_labels(self.model, self.task)
        if not isinstance(self.given, bool):
            raise InputError(f"given {self.given!r} is not allowed; it must be True or False")
        if self.given:
            check_given(self.model, self.task)
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        self.max_new_tokens = int(self.max_new_tokens)  # numpy's numbers can't be written as JSON
        if self.batch_size is not None:
            check_whole("batch_size", self.batch_size, 1)
            self.batch_size = int(self.batch_size)

    @cached_property
    def identity(self) -> dict:
        """Everything that a trace depends on; a change of any value makes another trace."""
        model, task = self.model, self.task
        settings: dict = {"given": True} if self.given else {"max_new_tokens": self.max_new_tokens}
        settings |= {"dtype": model.dtype, "device": model.device.type}
        if model.device.type == "cuda":  # shards of two kinds of GPU do not mix
            settings["card"] = machine(model.device)
        about = model.name, model.hash, task.name, task.hash, settings, TRACE_VERSION
        return dict(zip(IDENTITY, (*about, torch.__version__, transformers.__version__)))

    @cached_property
    def folder(self) -> Path:
        return folder_of(self.runs, self.identity)

    @property
    def keeps_states(self) -> bool:
        """Whether the states of decoded tokens are stored, too: where they take little room, and not through a lens."""
        size = 4 * len(self.task) * self.max_new_tokens * (self.model.layers + 1) * self.model.hidden_size
        decodes = self.model.adapter.writes and not self.given
        return decodes and self.model.translators is None and size <= STATES

    @cached_property
    def kept(self) -> Trace | None:
        """Through a lens, the trace of its own model if that keeps its states, which are read in place of decoding."""
        return with_kept_states(self.model, self.runs, self.identity) if self.model.translators is not None else None


def folder_of(runs: str | Path, identity: dict) -> Path:
    """The folder of a trace with this identity: runs/model/task-key."""
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    task = re.sub(r"[^\w.+-]", ".", identity["task"]).encode()[:100].decode(errors="ignore")  # a name has 255 bytes
    return Path(runs) / identity["model"] / f"{task}-{key}"


def with_kept_states(model: Model, runs: str | Path, identity: dict) -> Trace | None:
    """The trace with this identity, or through a lens that of the lens's own model, if it keeps its states, unaltered.

    `identity`: as in `Job`, or a manifest, which has more.
    """
    own = {key: identity[key] for key in IDENTITY} | (model.translators.of if model.translators is not None else {})
    folder = folder_of(runs, own)
    manifest = load_manifest(folder)
    names = [f"states-{index:05d}" for index in range(len(manifest.get("plan", ())))]
    whole = manifest.get("finished") and all(intact(folder, manifest, name) for name in names)
    return Trace(folder) if whole else None


def kept_states(model: Model, kept: Trace, rows: np.ndarray | slice) -> Tensor:
    """The states [n, L+1, hidden_size] of some tokens of a trace that keeps them, as the model reads them."""
    return model.read_through(torch.from_numpy(kept.states[rows]).to(model.device, getattr(torch, model.dtype)))


def check_labels(model: Model, task: Task) -> None:
    """InputError where only one of task and model has labels, or where the labels differ."""
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
    same = {named(label, task.labels) for label in model.labels} == set(task.labels)
    if len(model.labels) != len(task.labels) or not same:
        allowed = "; allowed are the same names in any case and order, or numbers such as LABEL_0"
        raise InputError(
            f"{model.name} has {len(model.labels)} labels ({theirs}), {task.name} has {len(task.labels)} ({ours})"
            f"{allowed if len(model.labels) == len(task.labels) else ''}"
        )


def check_given(model: Model, task: Task) -> None:
    """InputError where the model is not decoder-only, or the task asks for a chat template."""
    if model.kind != "causal":
        raise InputError(f"given=True is for decoder-only models; {model.name} is {model.kind}")
    if task.chat:
        raise InputError(f"{task.name}: given texts are read as they are; allowed with given=True is chat=False")


def begin(job: Job) -> dict:
    """Return the trace's manifest, or write a new one; the caller holds the folder's lock.

    Without a manifest nothing says which shards are sound, so they are deleted.
    """
    if known := load_manifest(job.folder):
        return known
    manifest = new_manifest(job)
    if (job.folder / "manifest.json").exists():
        print(f"{job.folder.name}: the manifest is damaged; the trace is made anew")
    for file in job.folder.glob("*.parquet"):
        file.unlink()
    save_manifest(job.folder, manifest)
    return manifest


def new_manifest(job: Job) -> dict:
    """Plan a trace.

    Prompts that do not fit the model's window with one token of output are left out. A given text longer than the
    window is cut there; a given text of a single token predicts nothing, and is left out.

    Raises:
        InputError: a prompt is empty, or none fits.
    """
    model, lengths, window = job.model, prompt_lengths(job), job.model.context_length
    if 0 in lengths:
        raise InputError(f"{job.task.name}: prompt {lengths.index(0)} has no tokens in {model.name}'s vocabulary")
    fits = [i for i, n in enumerate(lengths) if (n > 1 if job.given else n <= model.longest_prompt)]
    left_out = {"skipped": len(lengths) - len(fits)}
    if job.given:
        left_out["cut"] = sum(n > window for n in lengths)
    if not fits:
        why = "has a single token" if job.given else f"does not fit {model.name}'s window of {window} tokens"
        what = "text" if job.given else "prompt"
        raise InputError(f"{job.task.name}: each {what} {why} (longest: {max(lengths)})")
    longest = min(max(lengths[i] for i in fits) + (0 if job.given else job.max_new_tokens), window)
    size = job.batch_size or batch_that_fits(model, longest)
    mixed = max(lengths) if job.given else longest_mixed(model, job.max_new_tokens)
    return {
        **job.identity,
        "title": model.title or model.name,
        "chat": job.task.chat,
        "layers": model.layers,
        **({"remark": model.remark} if model.remark else {}),
        "kind": job.task.kind,
        "architecture": model.kind,
        "vocabulary": model.vocab_size,
        "prompts": len(lengths),
        **left_out,
        "batch_size": size,
        "plan": cut(lengths, sorted(fits, key=lambda i: (lengths[i], i)), size, mixed),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "files": {},
        "counts": {},
    }


def prompt_lengths(job: Job) -> list[int]:
    """Count the tokens of every prompt. The ids are not stored: a shard encodes its own again, which saves memory.

    Raises:
        InputError: most tokens, special ones aside, are the tokenizer's unknown token.
    """
    unknown, special = job.model.unknown_ids, set(job.model.tokenizer.all_special_ids)
    lengths, lost, known = [], 0, 0
    for start in range(0, len(job.task), CHUNK):
        for ids in encode(job.model, job.task, range(len(job.task))[start : start + CHUNK]):
            lengths.append(len(ids))
            if unknown:
                lost += sum(i in unknown for i in ids)
                known += sum(i not in unknown and i not in special for i in ids)
    if lost > known:
        raise InputError(
            f"{job.task.name}: {job.model.name}'s tokenizer does not know most of the text: "
            f"{lost:,} of {lost + known:,} tokens are its unknown one"
        )
    return lengths


def longest_mixed(model: Model, new_tokens: int) -> int:
    """The longest prompt that may share a batch with prompts of other lengths; 0 if none may.

    With padding on the left, `new_tokens` must fit the window after the padded prompt: some networks end there.
    """
    if not model.pads:
        return 0
    return max(model.context_length - new_tokens, 0) if model.adapter.left else model.longest_prompt


def cut(lengths: list[int], order: list[int], size: int, mixed: int) -> list[list[int]]:
    """Cut sequences, the shortest first, into shards of at most `size`: of one prompt length, so without padding, or of
    several lengths where no prompt is longer than `mixed`.
    """
    shards: list[list[int]] = []
    for i in order:
        if shards and len(shards[-1]) < size and lengths[i] <= max(mixed, lengths[shards[-1][0]]):
            shards[-1].append(i)
        else:
            shards.append([i])
    return shards


def batch_that_fits(model: Model, tokens: int) -> int:
    """The largest power of two of rows, each `tokens` long, that fit half the free memory; at most `SHARD`."""
    size = next(model.network.parameters()).element_size()
    row = tokens * model.hidden_size * size * (2 * model.layers + 16)
    fits = max(1, free_memory(model.device) // 2 // row)
    return min(2 ** (fits.bit_length() - 1), SHARD.get(model.device.type, 32))
