"""What a trace is made of: its prompts' token ids, sorted by length and cut into shards that fit the memory."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from eelib.common.errors import InputError
from eelib.common.machine import free_memory, versions
from eelib.models.model import Model
from eelib.tasks.task import Task
from eelib.tracing.shards import intact, load_manifest, load_note, note_file, notes, save_manifest

SHARD = {"cpu": 32, "cuda": 128}  # most sequences in a batch, and so in a shard, where no batch size is given
PARTS = ("tokens", "sequences")  # files of a shard
CHUNK = 2000  # prompts that are encoded together


@dataclass
class Job:
    """A trace to be made: of which model and task, in which folder, and how. `identity` is what tells traces apart."""

    model: Model
    task: Task
    folder: Path
    identity: dict
    batch_size: int | None = None
    strict: bool = False
    progress: bool = True

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of every prompt. The ids are not kept: a shard encodes its own again, which costs less than memory.

        InputError where most of them, special ones aside, stand for text that the vocabulary does not have.
        """
        chunks = (range(len(self.task))[start : start + CHUNK] for start in range(0, len(self.task), CHUNK))
        unknown, special = self.model.unknown_ids, set(self.model.tokenizer.all_special_ids)
        lengths, lost, known = [], 0, 0
        for chunk in chunks:
            for ids in encode(self.model, self.task, chunk):
                lengths.append(len(ids))
                if unknown:
                    lost += sum(i in unknown for i in ids)
                    known += sum(i not in unknown and i not in special for i in ids)
        if lost > known:
            raise InputError(
                f"{self.task.name}: {self.model.name}'s tokenizer has no words for most of the text: "
                f"{lost:,} of {lost + known:,} tokens are its unknown one"
            )
        return lengths

    @property
    def given(self) -> bool:
        """Whether the prompts are texts to be read as they are, and nothing is decoded."""
        return self.identity["settings"].get("given", False)

    @property
    def max_new_tokens(self) -> int:
        """Longest output, in tokens; 0 where nothing is decoded."""
        return self.identity["settings"].get("max_new_tokens", 0)


def encode(model: Model, task: Task, chosen: Sequence[int] | None = None) -> list[list[int]]:
    """Prompt token ids, with the tokenizer's own special tokens, or in its chat template where the task asks."""
    rows = range(len(task)) if chosen is None else chosen
    seconds = [task.seconds[i] for i in rows if task.seconds]
    return model.encode([task.prompts[i] for i in rows], task.chat, seconds, numbers=rows)


def plan(job: Job, alone: bool = True) -> dict | None:
    """The manifest: as found, its rest cut anew where another batch size is asked for, or a new one, saved.

    Without a sound manifest nothing says which shards are sound, so all are made anew; so they are where files of
    another trace lie in this one's place. Unless its maker is `alone`, nothing is cut anew: the plan that others work
    by is taken, whatever its batch size; None where it can't be.
    """
    known, why = load_manifest(job.folder), "the manifest is damaged"
    if not is_of(job, known):
        known, why = {}, "its files are another trace's" if known else why
    if known and not is_refused(job, known):
        return cut_rest(job, known) if alone else known
    manifest = new_manifest(job)
    if not alone:
        return None
    if (job.folder / "manifest.json").exists():
        print(f"{job.folder.name}: {why}; the trace is made anew")
    for file in (*job.folder.glob("*.parquet"), *notes(job.folder).values()):
        file.unlink()
    save_manifest(job.folder, manifest)
    return manifest


def is_of(job: Job, manifest: dict) -> bool:
    """Whether a manifest is this trace's, not one that was put in its place."""
    return all(manifest.get(key) == value for key, value in job.identity.items())


def is_refused(job: Job, manifest: dict) -> bool:
    """Whether the caller is strict and some of the prompts are left out, or cut."""
    return job.strict and bool(manifest["skipped"] or manifest.get("cut"))


def new_manifest(job: Job) -> dict:
    """A manifest without files; InputError where a prompt is empty, or none fits (with `strict`: one does not fit).

    A given text longer than the window is cut there; one of a single token predicts nothing, and is left out.
    """
    model, lengths, window = job.model, job.lengths, job.model.context_length
    if 0 in lengths:
        raise InputError(f"{job.task.name}: prompt {lengths.index(0)} has no tokens in {model.name}'s vocabulary")
    fits = [i for i, n in enumerate(lengths) if (n > 1 if job.given else n < window)]
    left_out = {"skipped": len(lengths) - len(fits)}
    if job.given:
        left_out["cut"] = sum(n > window for n in lengths)
    if not fits or is_refused(job, left_out):
        what = "texts have a single token or" if job.given else "prompts"
        raise InputError(
            f"{job.task.name}: {sum(left_out.values())} of {len(lengths)} {what} do not fit {model.name}'s window "
            f"of {window} tokens (longest: {max(lengths)})"
        )
    longest = min(max(lengths[i] for i in fits) + job.max_new_tokens, window)
    size = job.batch_size or batch_that_fits(model, longest)
    return {
        **job.identity,
        "title": model.title or model.name,
        "chat": job.task.chat,
        "layers": model.layers,
        **({"remark": model.remark} if model.remark else {}),
        "kind": job.task.kind,
        "architecture": model.kind,
        "vocabulary": model.vocab_size,
        "special_ids": sorted(set(map(int, model.tokenizer.all_special_ids))),
        "prompts": len(lengths),
        **left_out,
        "batch_size": size,
        "plan": cut(job, sorted(fits, key=lambda i: (lengths[i], i)), size),
        "versions": versions(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "files": {},
        "counts": {},
    }


def cut(job: Job, order: list[int], size: int) -> list[list[int]]:
    """Shards of at most `size` sequences; where padding would change a row, all of one prompt length.

    The padding of given texts, which stands where a causal model does not read, changes none.
    """
    shards: list[list[int]] = []
    for i in order:
        same = job.model.pads or job.given or not shards or job.lengths[shards[-1][-1]] == job.lengths[i]
        if shards and same and len(shards[-1]) < size:
            shards[-1].append(i)
        else:
            shards.append([i])
    return shards


def cut_rest(job: Job, manifest: dict) -> dict:
    """A known manifest; asked for another batch size, what comes after its last sound shard is cut anew, and saved."""
    shards, size = manifest["plan"], job.batch_size
    if manifest.get("finished") or size in (None, manifest["batch_size"]):
        return manifest
    first = max((index + 1 for index in range(len(shards)) if is_made(job.folder, manifest, index)), default=0)
    for index in range(first, len(shards)):
        note_file(job.folder, index).unlink(missing_ok=True)
        for name in (f"{part}-{index:05d}" for part in PARTS):
            manifest["files"].pop(name, None)
            (job.folder / f"{name}.parquet").unlink(missing_ok=True)
    manifest["counts"] = {index: n for index, n in manifest["counts"].items() if int(index) < first}
    manifest["plan"] = shards[:first] + cut(job, [i for rows in shards[first:] for i in rows], size)
    manifest["batch_size"] = size
    save_manifest(job.folder, manifest)
    return manifest


def is_made(folder: Path, manifest: dict, index: int) -> bool:
    """Whether both files of a shard are there, as its note says, or the manifest."""
    known = load_note(folder, index) or manifest
    return all(intact(folder, known, f"{part}-{index:05d}") for part in PARTS)


def batch_that_fits(model: Model, tokens: int) -> int:
    """The largest power of two of rows, each `tokens` long, whose caches and activations fill half the free memory."""
    size = next(model.network.parameters()).element_size()
    row = tokens * model.hidden_size * size * (2 * model.layers + 16)
    fits = max(1, free_memory(model.device) // 2 // row)
    return min(2 ** (fits.bit_length() - 1), SHARD.get(model.device.type, 32))
