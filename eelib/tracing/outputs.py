"""Decode a task's shards, or take its texts as given, and read every layer of every token; what is missing is made."""

import time
from collections.abc import Mapping
from contextlib import closing

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from eelib.common.errors import SelfCheckError
from eelib.common.machine import run_in_halves
from eelib.common.tolerances import tolerance
from eelib.lens.readout import Readout, ReadoutBuffer, top_ids
from eelib.models.model import Model
from eelib.tasks.task import Task
from eelib.tracing.decode import greedy_decode, states_of
from eelib.tracing.given import in_two, read_given
from eelib.tracing.makers import joined
from eelib.tracing.plan import Job, encode, is_made, is_of, is_refused
from eelib.tracing.shards import STORED, add_file, load_manifest, save_note, to_bytes
from eelib.tracing.tables import tables


def is_finished(job: Job) -> bool:
    """Whether all shards are there, unaltered, and nothing of them is to be refused."""
    known = load_manifest(job.folder)
    if not known.get("finished") or not is_of(job, known):
        return False
    return not is_refused(job, known) and all(is_made(job.folder, known, index) for index in range(len(known["plan"])))


def make_outputs(job: Job, wait: bool = True) -> bool:
    """Decode and read whatever shards are missing or damaged and nobody else makes, then seal the manifest.

    Whether the trace is finished then. Without `wait` it may not be: others still make the rest of it.
    """
    with joined(job) as shards:
        bar, missing = f"{job.model.name} {job.task.name}", len(shards.missing)
        with closing(shards.claimed(wait)) as mine:  # an error lets its lease go at once
            for index in tqdm(mine, desc=bar, total=missing, unit="batch", disable=not job.progress):
                make_shard(job, shards.manifest["plan"][index], index)
        return shards.seal()


def make_shard(job: Job, rows: list[int], index: int) -> None:
    """Decode one shard's sequences `rows` or take them as given, read their states, write both tables, and note that
    it is made.

    A shard is a pure function of the model, the task and its list of sequences.
    """
    began = time.monotonic()
    prompts = encode(job.model, job.task, rows)
    if job.given:
        cut = [len(ids) > job.model.context_length for ids in prompts]
        prompts, outputs = map(list, zip(*(in_two(job.model, ids) for ids in prompts)))
        finals, readout = read_what_fits(job, prompts, outputs)
    else:
        outputs, readout = read_what_fits(job, prompts, [reference_ids(job.model, job.task, i) for i in rows])
        finals, cut = outputs, [is_cut(job.model, ids) for ids in outputs]
    final = torch.tensor([token for ids in finals for token in ids])
    mismatches = count_mismatches(readout, final, job.model)
    note: dict = {"files": {}, "counts": {"rows": len(final), "mismatches": mismatches}}
    tokens, sequences = tables(job.model, job.task, rows, prompts, outputs, cut)
    frames: dict[str, Mapping[str, np.ndarray | list]] = {
        f"tokens-{index:05d}": tokens | {name: readout[name].numpy() for name in STORED},
        f"sequences-{index:05d}": sequences,
    }
    for name, frame in frames.items():
        add_file(job.folder, note, name, to_bytes(frame), shared=True)
    note |= {"seconds": round(time.monotonic() - began, 2), "date": time.strftime("%Y-%m-%d")}
    save_note(job.folder, index, note)


def read_what_fits(job: Job, prompts: list[list[int]], references: list[list[int]]) -> tuple[list[list[int]], Readout]:
    """`read_outputs` or `read_given` of one batch, in as many parts as the memory asks for."""

    def read_some(pairs: list[tuple[list[int], list[int]]]) -> tuple[list[list[int]], Readout]:
        some, wanted = map(list, zip(*pairs))
        if job.given:
            return read_given(job.model, some, wanted)
        return read_outputs(job.model, some, wanted, job.max_new_tokens)

    parts = run_in_halves(read_some, list(zip(prompts, references)))
    if len(parts) == 1:
        return parts[0]
    values = {name: torch.cat([readout.values[name] for _, readout in parts]) for name in parts[0][1].values}
    return [output for outputs, _ in parts for output in outputs], Readout(values)


def read_outputs(
    model: Model, prompts: list[list[int]], references: list[list[int]], max_new_tokens: int
) -> tuple[list[list[int]], Readout]:
    """Decode prompts and read every layer of every token.

    Of a masked model each position of the prompts is read in place; of a classifier, the one that it judges by.
    """
    reader = ReadoutBuffer(model.unembed, references)
    if model.adapter.writes:
        return greedy_decode(model, prompts, max_new_tokens, reader), reader.finish()
    outputs = []
    for row, prompt in enumerate(prompts):
        states, _ = states_of(model, [prompt], [prompt])
        outputs.append(top_ids(model.unembed, states[:, -1]))
        reader.add(states, [row] * len(states), outputs[-1])
    return outputs, reader.finish()


def is_cut(model: Model, output: list[int]) -> bool:
    """Whether a decoding stopped before its end token."""
    return model.adapter.writes and output[-1] not in model.eos_ids


def reference_ids(model: Model, task: Task, sequence: int) -> list[int]:
    """Token ids of the first reference and of the end, or none."""
    references = task.references[sequence]
    if not references or not model.adapter.writes:
        return []
    wanted = model.tokenizer(text_target=references[0], add_special_tokens=False)["input_ids"]
    return wanted + sorted(model.eos_ids)[:1]


def count_mismatches(readout: Readout, emitted: Tensor, model: Model) -> int:
    """Tokens whose top-1 at layer L is not the emitted one; SelfCheckError in float32, unless rounding explains it.

    The readout stays as it was read. `emitted` is int [n].
    """
    top1 = readout["top1"][:, -1]
    wrong = top1 != emitted
    behind = (readout["probability"][:, -1] / readout["final_probability"][:, -1]).log()  # difference of the two logits
    listed = (readout["topk_ids"][:, -1] == emitted[:, None]).any(dim=1)  # right probabilities of wrong ids are no tie
    refused = wrong & ~(listed & (behind <= tolerance(behind).tie))
    if model.dtype == "float32" and bool(refused.any()):
        row = int(refused.nonzero()[0])
        raise SelfCheckError(
            f"{model.name}: last-layer top-1 of token row {row} is {int(top1[row])}, "
            f"decoding emitted {int(emitted[row])}"
        )
    return int(wrong.sum())
