"""Make a trace: decode a task once, or read its texts as given, read every layer, store the readouts in Parquet shards.

A shard is a pure function of the model, the task and its sequences, whichever process makes it; `store` has the files,
and shares the work among processes.
"""

import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from eelib.common.errors import InputError, SelfCheckError, StorageError
from eelib.common.files import exclusive, without_empty_folders
from eelib.common.machine import run_in_halves
from eelib.common.tolerances import tolerance
from eelib.common.values import check_whole
from eelib.lens.readout import Readout, ReadoutBuffer, check_finite, read
from eelib.lens.similarity import layer_pairs
from eelib.models.head import Head
from eelib.models.model import Model
from eelib.tasks.task import Task
from eelib.tracing import store
from eelib.tracing.columns import STORED, STORED_OF_SITES, describe_all
from eelib.tracing.decode import encode, read_given, read_outputs, split_given, states_of
from eelib.tracing.plan import Job, begin, kept_states, with_kept_states
from eelib.tracing.store import add_file, finished, intact, load_manifest, save_manifest, to_bytes
from eelib.tracing.trace import PAIR_TOKENS, Trace, extra_file

SUBSET = 24  # sequences for sites or pairs where the caller says only True


def trace(
    model: Model,
    task: Task,
    max_new_tokens: int = 64,
    folder: str | Path = "runs",
    batch_size: int | None = None,
    sites: bool | int = False,
    pairs: bool | int = False,
    progress: bool = True,
    given: bool = False,
) -> Trace:
    """Make a trace, or its missing parts; a finished trace is only read.

    Args:
        model: from `eelib.load_model`.
        task: from `eelib.load_task` or `Task.from_prompts`.
        max_new_tokens: longest output. Decoding is greedy, and every emitted token is read at layers 0..L.
        folder: where traces lie, each in a folder of its own. A trace also keeps the states of decoded tokens where all
            of them take at most 256 MB; gates, pairs and a tuned lens then read these, and nothing runs again.
        batch_size: most sequences in a shard; None for a power of two that fits half of the free memory. A half-made
            trace keeps its own.
        sites: True reads the sub-layers of the first 24 sequences, a number n those of the first n.
        pairs: likewise; all pairs of layers are compared at 4 tokens of each sequence, one in the middle of each
            quarter.
        progress: show a bar, and print that this process waits for another one.
        given: decode nothing; the prompts are texts, and one pass of a decoder-only model reads all positions of each
            up to the window's end. The last layer's top-1 is the final token of a position; "token_id",
            "reference_probability" and "reference_rank" are of the text's own next token.

    Raises:
        InputError: an argument is not allowed, or does not fit the model; one line.
        StorageError: the disk is at fault; one line.
        SelfCheckError: in float32, the last layer's top-1 is not the emitted token.
    """
    job = Job(model, task, max_new_tokens, folder, batch_size, progress, given)
    extras = {}
    for kind, wanted in (("sites", sites), ("pairs", pairs)):
        if not isinstance(wanted, bool):
            check_whole(kind, wanted, 0, "True, False or a number of sequences")
        if wanted:
            extras[kind] = SUBSET if wanted is True else int(wanted)
    if sites and not model.components:  # before hours of decoding, not after
        raise InputError(model.components_error)
    if store.is_clear(job.folder) and has_all(job, extras):
        return Trace(job.folder)  # without the lock: another process may be making what is not asked for
    try:
        while not make_shards(job):
            pass
        if extras:
            with exclusive(job.folder, verbose=progress):
                for kind, count in extras.items():
                    make_extra(job, kind, count)
    except StorageError:  # a folder that can only be read, as that of somebody else, may hold all of it
        if not has_all(job, extras):
            raise
    return Trace(job.folder)


def make_free_shards(
    model: Model, task: Task, max_new_tokens: int = 64, folder: str | Path = "runs", batch_size: int | None = None
) -> None:
    """Make the shards of a trace that no other process is making, and don't wait for the rest.

    Raises:
        InputError, StorageError: as `trace` does.
    """
    job = Job(model, task, max_new_tokens, folder, batch_size, progress=False)
    if not load_manifest(job.folder).get("finished"):
        make_shards(job, wait=False)


def has_all(job: Job, extras: dict[str, int]) -> bool:
    """Whether a trace is finished and unaltered, with the sites and pairs that `extras` asks for."""
    known = load_manifest(job.folder)
    if not known.get("finished"):
        return False
    whole = all(finished(job.folder, known, index) for index in range(len(known["plan"])))
    return whole and all(intact(job.folder, known, extra_file(kind, count)) for kind, count in extras.items())


# ---- shards


def make_shards(job: Job, wait: bool = True) -> bool:
    """Make the shards that are missing or damaged and that no other process makes.

    Returns:
        Whether the trace is finished. Without `wait`, other processes may still be making the rest.
    """
    folder, verbose = job.folder, job.progress
    with without_empty_folders(folder):
        with exclusive(folder, verbose=verbose):
            manifest = begin(job)
        missing = [index for index in range(len(manifest["plan"])) if not finished(folder, manifest, index)]
        try:
            bar = f"{job.model.name} {job.task.name}"
            claimed = store.claim_shards(folder, manifest, missing, wait, verbose)
            with closing(claimed):  # an error frees its lock at once
                for index in tqdm(claimed, desc=bar, total=len(missing), unit="batch", disable=not verbose):
                    make_shard(job, manifest["plan"][index], index)
        except BaseException:  # a task that is refused leaves nothing
            store.abandon(folder, verbose)
            raise
        return store.finish(folder, verbose)


def make_shard(job: Job, sequences: list[int], index: int) -> None:
    """Decode one shard's sequences, or read them as given; write both tables and the record."""
    began = time.monotonic()
    model, prompts = job.model, encode(job.model, job.task, sequences)
    if job.given:
        truncated = [len(ids) > model.context_length for ids in prompts]
        prompts, outputs = map(list, zip(*(split_given(model, ids) for ids in prompts)))
        finals, readout = read_what_fits(job, prompts, outputs)
    else:
        references = [reference_ids(model, job.task, i) for i in sequences]
        outputs, readout = (
            read_kept(job, sequences, references) if job.kept else read_what_fits(job, prompts, references)
        )
        finals, truncated = outputs, [model.adapter.writes and ids[-1] not in model.eos_ids for ids in outputs]
    final = torch.tensor([token for ids in finals for token in ids])
    counts = {"rows": len(final), "mismatches": count_mismatches(readout, final, model)}
    record: dict = {"sequences": sequences, "files": {}, "counts": counts}
    tokens, rows = describe_all(model, job.task, zip(sequences, prompts, outputs, truncated))
    frames: dict[str, Mapping[str, np.ndarray | list]] = {
        "tokens": tokens | {name: readout[name].numpy() for name in STORED},
        "sequences": rows,
    }
    if job.keeps_states:
        frames["states"] = {"state": readout["state"].numpy()}
    for part, frame in frames.items():
        add_file(job.folder, record, f"{part}-{index:05d}", to_bytes(frame))
    record |= {"seconds": round(time.monotonic() - began, 2), "date": time.strftime("%Y-%m-%d")}
    store.save_sealed(store.record_file(job.folder, index), record)


def read_what_fits(job: Job, prompts: list[list[int]], references: list[list[int]]) -> tuple[list[list[int]], Readout]:
    """`read_outputs` or `read_given` of one batch, in parts where memory runs out."""

    def read_some(pairs: list[tuple[list[int], list[int]]]) -> tuple[list[list[int]], Readout]:
        some, wanted = map(list, zip(*pairs))
        if job.given:
            return read_given(job.model, some, wanted)
        return read_outputs(job.model, some, wanted, job.max_new_tokens, job.keeps_states)

    parts = run_in_halves(read_some, list(zip(prompts, references)))
    if len(parts) == 1:
        return parts[0]
    values = {name: torch.cat([readout[name] for _, readout in parts]) for name in parts[0][1]}
    return [output for outputs, _ in parts for output in outputs], values


def read_kept(job: Job, sequences: list[int], references: list[list[int]]) -> tuple[list[list[int]], Readout]:
    """As `read_outputs`, through a lens, from the outputs and states of its own model's trace."""
    kept, reader, outputs = job.kept, ReadoutBuffer(job.model.unembed, references), []
    assert kept is not None
    rows, ids = kept.tokens.groupby("sequence").indices, kept.tokens["token_id"].to_numpy()
    for row, sequence in enumerate(sequences):
        own = rows[sequence]
        outputs.append(ids[own].tolist())
        reader.add(kept_states(job.model, kept, own), [row] * len(own), outputs[-1])
    return outputs, reader.finish()


def reference_ids(model: Model, task: Task, sequence: int) -> list[int]:
    """Token ids of the first reference and of the end; empty without a reference, or if the model writes no text."""
    references = task.references[sequence]
    if not references or not model.adapter.writes:
        return []
    wanted = model.tokenizer(text_target=references[0], add_special_tokens=False)["input_ids"]
    own = model.tokenizer.eos_token_id
    return wanted + ([own] if own in model.eos_ids else sorted(model.eos_ids)[:1])


def count_mismatches(readout: Readout, emitted: Tensor, model: Model) -> int:
    """Count the tokens whose top-1 at layer L is not the emitted id, int [n].

    SelfCheckError in float32, if the two logits are further apart than rounding explains.
    """
    ids, shares = readout["topk_ids"][:, -1], readout["topk_probability"][:, -1]
    top1 = ids[:, 0]
    wrong = top1 != emitted
    behind = (shares[:, 0] / readout["final_probability"][:, -1]).log()  # the difference of the two logits
    listed = (ids == emitted[:, None]).any(dim=1)  # right probabilities of wrong ids are no tie
    refused = wrong & ~(listed & (behind <= tolerance(behind).tie))
    if model.dtype == "float32" and bool(refused.any()):
        row = int(refused.nonzero()[0])
        raise SelfCheckError(
            f"{model.name}: last-layer top-1 of token row {row} is {int(top1[row])}, "
            f"decoding emitted {int(emitted[row])}"
        )
    return int(wrong.sum())


# ---- sub-layers and pairs of layers, read in one pass over the known outputs, or from the states that a trace keeps


def read_sites(model: Model, prompt: list[int], output: list[int], final: list[int]) -> dict[str, np.ndarray]:
    """Read each sub-layer of one sequence: "attention/entropy" [tokens, L], "attention/topk_ids" [tokens, L, k], ...

    "row" [tokens] numbers the sequence's tokens from 0. The trace itself has the outputs of whole blocks.
    """
    found, final_ids = states_of(model, [prompt], [output], sites=True)[1], torch.tensor(final)
    found.pop("block")
    for site, values in found.items():
        check_finite(values, f"{site} outputs", first=1)
    readouts = {site: read(model.unembed, values, final_ids) for site, values in found.items()}
    columns = {f"{site}/{name}": made[name].numpy() for site, made in readouts.items() for name in STORED_OF_SITES}
    return {"row": np.arange(len(output)), **columns}


def read_pairs(head: Head, states: Tensor) -> dict[str, np.ndarray]:
    """Compare all pairs of layers at some tokens: each measure [some, L+1, L+1], and "row" [some], the tokens' numbers.

    They are the tokens in the middle of PAIR_TOKENS equal parts of the output, or all tokens where there are fewer.
    `states`: [tokens, L+1, hidden_size] of one sequence.
    """
    count, parts = len(states), min(PAIR_TOKENS, len(states))
    rows = ((np.arange(parts) + 0.5) * count / parts).astype(int)
    return {"row": rows, **layer_pairs(head, states[rows])}


def make_extra(job: Job, kind: str, count: int) -> None:
    """Make the readouts `kind` of the first `count` sequences of a finished trace, unless they are there."""
    manifest, name = load_manifest(job.folder), extra_file(kind, count)
    if intact(job.folder, manifest, name):
        return
    made, kept = Trace(job.folder), with_kept_states(job.model, job.runs, job.identity) if kind == "pairs" else None
    chosen = made.sequences["sequence"].tolist()[:count]
    ids, finals, found = made.tokens["token_id"].to_numpy(), made.final_ids, []
    rows = made.tokens.groupby("sequence").indices
    prompts = encode(job.model, job.task, chosen)
    if job.given:
        prompts = [split_given(job.model, text)[0] for text in prompts]
    bar = tqdm(list(zip(chosen, prompts)), f"{job.task.name} {kind}", unit="seq", disable=not job.progress)
    for sequence, prompt in bar:
        own, model = rows[sequence], job.model
        output = ids[own].tolist()
        if kind == "sites":
            part = read_sites(model, prompt, output, finals[own].tolist())
        else:
            states = kept_states(model, kept, own) if kept else states_of(model, [prompt], [output])[0]
            part = read_pairs(model.unembed, states)
        found.append(part | {"row": own[part["row"]]})
    columns = {key: np.concatenate([part[key] for part in found]) for key in found[0]}
    add_file(job.folder, manifest, name, to_bytes(columns))
    save_manifest(job.folder, manifest)
