"""Readouts that are made when they are asked for: sub-layers and layer pairs, in one pass over the known outputs."""

from collections.abc import Callable

import numpy as np
import torch
from tqdm import tqdm

from eelib.lens.readout import read
from eelib.lens.similarity import layer_pairs
from eelib.models.model import Model
from eelib.tracing.decode import states_of
from eelib.tracing.given import in_two
from eelib.tracing.plan import Job, encode
from eelib.tracing.shards import STORED_OF_SITES, add_file, intact, load_manifest, save_manifest, to_bytes
from eelib.tracing.trace import Trace

Columns = dict[str, np.ndarray]


def sites(model: Model, prompt: list[int], output: list[int], final: list[int]) -> Columns:
    """Readouts of each sub-layer of one sequence, as "attention/entropy": [tokens, L] and [tokens, L, k]."""
    states, found = states_of(model, [prompt], [output], sites=True)
    last, final_ids = states[:, -1], torch.tensor(final)
    readouts = {site: read(model.unembed, values, final_ids, last=last) for site, values in found.items()}
    return {f"{site}/{name}": made[name].numpy() for site, made in readouts.items() for name in STORED_OF_SITES}


def pairs(model: Model, prompt: list[int], output: list[int], final: list[int]) -> Columns:
    """Similarities of all pairs of layers, [tokens, L+1, L+1] each."""
    return layer_pairs(model.unembed, states_of(model, [prompt], [output])[0])


KINDS: dict[str, Callable[[Model, list[int], list[int], list[int]], Columns]] = {"sites": sites, "pairs": pairs}


def has_extra(job: Job, kind: str, count: int) -> bool:
    """Whether the readouts `kind` of the first `count` sequences are there, unaltered."""
    return intact(job.folder, load_manifest(job.folder), f"{kind}-{count}")


def make_extra(job: Job, kind: str, count: int) -> None:
    """Make the readouts `kind` of the first `count` sequences of a finished trace, unless they are there."""
    if has_extra(job, kind, count):
        return
    manifest, name = load_manifest(job.folder), f"{kind}-{count}"
    trace = Trace(job.folder)
    chosen = trace.sequences["sequence"].to_numpy()[:count]
    tokens = trace.tokens.assign(final=trace.final_ids)[trace.tokens["sequence"].isin(chosen)]
    outputs, finals = (
        [list(map(int, ids)) for _, ids in tokens.groupby("sequence", sort=True)[name]]
        for name in ("token_id", "final")
    )
    prompts = encode(job.model, job.task, chosen.tolist())
    if job.given:
        prompts = [in_two(job.model, ids)[0] for ids in prompts]
    sequences = list(zip(prompts, outputs, finals))
    found = [
        KINDS[kind](job.model, *sequence)
        for sequence in tqdm(sequences, desc=f"{job.task.name} {kind}", unit="seq", disable=not job.progress)
    ]
    columns = {key: np.concatenate([part[key] for part in found]) for key in (found[0] if found else ())}
    add_file(job.folder, manifest, name, to_bytes({"row": tokens.index.to_numpy(), **columns}))
    save_manifest(job.folder, manifest)
