"""Drafts of one model through other ways to read its layers, a part of `checks.exits` (`--only readings`).

An adapter block (Kangaroo) and translators (the tuned lens) leave the network as it is: what they draft is held against
the same last layer, so that the outputs are the same, and only which drafts are right and what they cost differs. All
are timed in turns on the same prompts, beside plain decoding, and beside drafts that the head alone reads.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import eelib
from checks.exits_ways import NEW_TOKENS, Known, Rows, doubting_drafts, fixed_drafts, totals
from eelib.exits.exit_rule import ExitRule
from eelib.exits.forecast import measure
from eelib.exits.gates.gate import gate_named
from eelib.models.checkpoint import path_of
from eelib.models.lens_adapters import base_of, with_lens_adapter
from eelib.models.model import Model
from eelib.tasks.task import Task
from eestudy.old.analysis.speed import PLAIN, Way, timed

READINGS = ("pocket-llama-kangaroo", "pocket-llama-lens")  # the adapter block first: all are timed at its layer
READ_SIZES = (1, 8)


def read(names: Sequence[str], task: Task, sequences: int, repeats: int, max_new_tokens: int = NEW_TOKENS) -> Rows:
    """Rows of the ways of each reading of one model, in batches of each size, on the first texts of the task.

    Each reading drafts through the adapter block's layer, with a fixed length and until a gate doubts, as the forecast
    has it best; those of all layers, the head's own among them, through the layer that the forecast puts first, too.
    """
    base = eelib.load_model(base_of(path_of(names[0])), device="cpu")
    models = [base, *(with_lens_adapter(base, Path(path_of(name))) for name in names)]
    layer = next(model.adapter_block.layer for model in models if model.adapter_block)
    known = [Known(Way(PLAIN, None, "full"), "plain", 1.0)]
    for model in models:
        known += drafts(model, task, sequences, layer, max_new_tokens)
    rows, asked = [], task.take(sequences)
    for size in READ_SIZES:
        times, texts = timed(base, asked, [one.way for one in known], size, max_new_tokens, repeats)
        found = totals(asked, known, size, times, texts)
        rows += [{"model": base.name, "batch": size} | row for row in found.values()]
    return rows


def drafts(model: Model, task: Task, sequences: int, layer: int, max_new_tokens: int) -> list[Known]:
    """One reading's ways, named by it."""
    asked = task.take(sequences)
    costs = measure(model, asked, ExitRule(gate_named("softmax_difference"), exit_layers=(layer,)))
    with tempfile.TemporaryDirectory() as folder:
        made = eelib.trace(model, asked, max_new_tokens=max_new_tokens, folder=folder, progress=False)
        own = made.sequences["sequence"].tolist()
        found = [*fixed_drafts(costs, made, own, [layer], 1), doubting_drafts(costs, made, own, [layer])]
        if not model.adapter_block:  # which reads one layer alone
            found += fixed_drafts(costs, made, own, range(1, model.layers), 1)
    by_name = {one.way.name: one for one in found}  # the best layer may be this one
    return [
        replace(one, way=replace(one.way, name=f"{model.name}: {way}", model=model)) for way, one in by_name.items()
    ]
