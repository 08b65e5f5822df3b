"""Scores of gates that look at states, which no trace holds: made in one pass, and kept beside the trace."""

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from eelib.common.errors import InputError
from eelib.common.files import only_one
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import LayerOutput
from eelib.exits.offline import IN_A_TRACE, Scores, Tokens, score_layers
from eelib.models.model import Model
from eelib.tasks.task import Task
from eelib.tracing.decode import states_of
from eelib.tracing.plan import encode
from eelib.tracing.shards import add_file, intact, load_manifest, save_manifest, to_bytes
from eelib.tracing.trace import Trace

AT_ONCE = 512  # tokens whose states of all layers are held and scored at a time


def needs_states(rule: ExitRule) -> bool:
    """Whether a rule's gate looks at what no trace holds, so that its scores have to be made and kept."""
    return not set(rule.gate.needs) <= IN_A_TRACE


def name_of(rule: ExitRule) -> str:
    """The file that holds a rule's scores: the gate's name, and a hash of what the scores depend on."""
    code = file_hash(inspect.getfile(type(rule.gate)))
    said = f"{rule.gate!r} {rule.exit_layers} {0 if rule.gate.stateful else rule.minimum_layer} {code}"
    return f"scores-{rule.gate.name}-{hashlib.sha256(said.encode()).hexdigest()[:12]}"


@cache
def file_hash(file: str) -> str:
    """Hash of a gate's own code, as it was when this process first asked."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]


def make_scores(model: Model, task: Task, trace: Trace, rules: Sequence[ExitRule], progress: bool = True) -> None:
    """Score every token of a trace by each rule's gate and keep that in the trace's folder, unless it is there.

    One pass over the known outputs for all of them. InputError where the trace is of another model or task.
    """
    if (trace.manifest["weights"], trace.manifest["task_hash"]) != (model.hash, task.hash):
        raise InputError(f"the trace in {trace.folder} is not of {model.name} and {task.name}")
    for rule in rules:
        rule.check(model.layers)
    if all(intact(trace.folder, load_manifest(trace.folder), name_of(rule)) for rule in rules):
        return  # without the lock, which can't be had in a folder that can only be read
    with only_one(trace.folder, told=progress):  # a page has no place for it
        manifest = load_manifest(trace.folder)
        wanted = [rule for rule in rules if not intact(trace.folder, manifest, name_of(rule))]
        if not wanted:
            return
        chosen = trace.sequences["sequence"].to_numpy()
        outputs = trace.tokens.groupby("sequence", sort=True)["token_id"].agg(list)
        found: list[list[Scores]] = [[] for _ in wanted]
        tokens, start = Tokens(trace), 0
        prompts, said = encode(model, task, chosen.tolist()), outputs.tolist()
        with tqdm(total=len(said), desc=f"{task.name} gates", unit="seq", disable=not progress) as bar:
            for some in together([len(output) for output in said], AT_ONCE):
                rows = torch.arange(start, start + sum(map(len, said[some])))
                start += len(rows)
                for parts, made in zip(found, score_sequences(model, prompts[some], said[some], wanted, tokens, rows)):
                    parts.append(made)
                bar.update(len(said[some]))
        for rule, parts in zip(wanted, found):
            values, emitted = (torch.cat(part).numpy() for part in zip(*parts))
            columns = {"score": values.astype(np.float32), "token": emitted.astype(np.int32)}
            add_file(trace.folder, manifest, name_of(rule), to_bytes(columns))
        save_manifest(trace.folder, manifest)


def together(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Runs of neighbouring sequences of `most` tokens or fewer; one that has more stands alone."""
    start = held = 0
    for end, length in enumerate(lengths):
        if held + length > most and end > start:
            yield slice(start, end)
            start, held = end, 0
        held += length
    if start < len(lengths):
        yield slice(start, len(lengths))


def score_sequences(
    model: Model,
    prompts: list[list[int]],
    outputs: list[list[int]],
    rules: Sequence[ExitRule],
    tokens: Tokens,
    rows: Tensor,
) -> list[Scores]:
    """Scores of some sequences by each rule's gate: states from one run over each, readouts from the trace's `rows`."""
    states, _ = states_of(model, prompts, outputs)
    final = tokens.final[rows].to(states.device)

    def seen(layer: int) -> LayerOutput:
        known = tokens.seen(layer, rows, 0 * rows)
        moved = {name: values.to(states.device) for name, values in known.readout.items()}
        place = (known.positions.to(states.device), moved, states[:, layer], model.unembed)
        assert known.token_before is not None
        return LayerOutput(layer, known.layers, *place, known.token_before.to(states.device))

    made = [score_layers(rule, model.layers, final, seen) for rule in rules]
    return [Scores(*(part.cpu() for part in scores)) for scores in made]


def kept_scores(rule: ExitRule, trace: Trace) -> Scores:
    """The scores that `make_scores` kept. InputError where it did not."""
    name = name_of(rule)
    if name not in load_manifest(trace.folder).get("files", {}):
        raise InputError(
            f"this trace has no scores of gate {rule.gate.name}; make them with "
            "eelib.exits.kept.make_scores(model, task, trace, rules)"
        )
    table = Trace(trace.folder).file(name)  # a new one: the manifest may have changed since this one was opened
    values, tokens = (
        torch.tensor(table[key].combine_chunks().flatten().to_numpy().reshape(-1, trace.layers))
        for key in ("score", "token")
    )
    return Scores(values, tokens.long())
