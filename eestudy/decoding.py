"""Decode outputs in several setups, compare them with full depth's outputs, and time them.

All setups decode a batch one after the other, and the one that begins changes from batch to batch, so that a slower
minute of the machine affects all of them. Times are of decoding alone, prompts included; tokenizing is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from eelib.common.errors import InputError
from eelib.exits.decoding.generate import GenerateOutput, batches, encoded, generate
from eelib.exits.exit_rule import ExitRule
from eelib.models.model import Model
from eelib.models.probe import in_turn
from eelib.tasks.metrics import chrf
from eelib.tasks.task import Task
from eestudy.resampling import NOTHING, Interval
from eestudy.statistics import interval_of
from eestudy.study import Study, item_stats

WHERE = ["model", "task", "setup", "group", "sequence"]
TOKENS = [*WHERE, "position", "token_id", "agrees", "agreed_before", "exit_layer", "layers_run"]
OUTPUTS = [*WHERE, "output", "full", "same", "drafted", "accepted", "token_ids", "exit_layers"]
TIMED = ["model", "task", "setup", "batch", "group", "seconds", "tokens", "exit_layers", "layers"]
TIMED += ["drafted", "accepted", "agrees", "of"]


@dataclass(frozen=True)
class DecodingSetup:
    """One way to decode.

    Attributes:
        name: of the setup, in frames.
        rule: when tokens exit; None for full depth.
        kv_policy: what later tokens find at skipped layers, as `eelib.generate` takes it.
        draft_length: of verified decoding.
        draft: a draft in place of a rule, as `eelib.generate` takes it.
    """

    name: str
    rule: ExitRule | None = None
    kv_policy: str = "full"
    draft_length: int | None = None
    draft: str | None = None


class Decoded(NamedTuple):
    """What `decode` returns.

    Attributes:
        tokens: a row for each token that full depth gives, end tokens included: TOKENS. `agrees`: the setup's output
            has this token at this place; `agreed_before`: it has all tokens before.
        outputs: a row for each output: OUTPUTS. `full` is full depth's output, `same` whether all tokens agree;
            `token_ids` and `exit_layers` are lists, of all of the output's tokens.
        timed: a row for each batch: TIMED. Sums over its tokens: exit layers, layers run by the end; `agrees` of the
            `of` tokens of full depth agree. `group` is that of one of its outputs.
    """

    tokens: pd.DataFrame
    outputs: pd.DataFrame
    timed: pd.DataFrame


def evenly_spaced(layers: int, count: int) -> tuple[int, ...]:
    """`count` evenly spaced layers below L, each once; fewer where L is small."""
    return tuple(sorted({round(layers * i / (count + 1)) for i in range(1, count + 1)} - {0, layers}))


def in_batches(study: Study, task: str, numbers: Sequence[int], batch_size: int) -> list[list[int]]:
    """Batches of a task's outputs, by number, those with the shortest prompts first."""
    prompts = encoded(study.model, study.tasks[task].pick(list(numbers)))
    return [[numbers[i] for i in batch] for batch in batches(study.model, prompts, batch_size)]


def decode(
    study: Study,
    task: str,
    setups: Sequence[DecodingSetup],
    chosen: Sequence[Sequence[int]],
    longest: int = 0,
    warm_up: bool = False,
) -> Decoded:
    """Decode some outputs of a task in each setup.

    Args:
        study: its trace of the task has full depth's outputs.
        task: its name.
        setups: the ways to decode.
        chosen: batches of outputs, by number.
        longest: most tokens of an output; 0 for as many as in the trace.
        warm_up: decode the first batch once in advance, since a first call is slower.

    Raises:
        InputError: no setup or batch; as in `eelib.generate`.
    """
    most = min(longest or study.parameters.max_new_tokens, study.parameters.max_new_tokens)
    asked = study.tasks[task]
    if not len(setups) or not len(chosen):
        raise InputError("there is nothing to decode; give at least one setup and one batch of outputs")
    for setup in setups if warm_up else ():
        run(study.model, asked.pick(list(chosen[0])), setup, most)
    parts: list[tuple[pd.DataFrame, pd.DataFrame, dict]] = []
    for number, batch in enumerate(chosen):
        shift = number % len(setups)
        ordered = (*setups[shift:], *setups[:shift])
        found = {setup.name: run(study.model, asked.pick(list(batch)), setup, most) for setup in ordered}
        for setup in setups:
            made = found[setup.name]
            tokens, outputs, row = against_full_depth(study, task, list(batch), made, most)
            about = {"model": study.model.name, "task": task, "setup": setup.name}
            row |= about | {"batch": number, "seconds": made.seconds}
            parts.append((tokens.assign(**about), outputs.assign(**about), row))
    tokens, outputs = (pd.concat([part[at] for part in parts], ignore_index=True) for at in (0, 1))
    return Decoded(tokens[TOKENS], outputs[OUTPUTS], pd.DataFrame([part[2] for part in parts])[TIMED])


def run(model: Model, task: Task, setup: DecodingSetup, longest: int) -> GenerateOutput:
    """Decode one batch; a gate drafts even where that costs more than it saves."""
    gated: dict[str, Any] = {"gate": setup.rule, "kv_policy": setup.kv_policy, "always_draft": True}
    way: dict[str, Any] = {"draft": setup.draft} if setup.draft else gated
    size: dict[str, Any] = {"draft_length": setup.draft_length, "batch_size": len(task), "max_new_tokens": longest}
    return generate(model, task, **way, **size)


def against_full_depth(
    study: Study, task: str, batch: list[int], made: GenerateOutput, longest: int
) -> tuple[pd.DataFrame, pd.DataFrame, dict]:
    """(tokens, outputs, sums over the batch) of one decoding, compared with the same positions of the trace."""
    trace, names = study.traces[task], dict(enumerate(batch))
    full = trace.tokens[trace.tokens["sequence"].isin(batch) & (trace.tokens["position"] < longest)]
    at = made.tokens.assign(sequence=made.tokens["sequence"].map(names)).set_index(["sequence", "position"])
    there = at.reindex(pd.MultiIndex.from_frame(full[["sequence", "position"]]))
    tokens = full[["group", "sequence", "position", "token_id"]].assign(
        agrees=there["token_id"].to_numpy(float) == full["token_id"].to_numpy(),
        exit_layer=there["exit_layer"].to_numpy(float),
        layers_run=there["layers_run"].to_numpy(float),
    )
    wrong_so_far = (~tokens["agrees"]).groupby(tokens["sequence"]).cumsum()
    tokens["agreed_before"] = wrong_so_far == ~tokens["agrees"]
    written = trace.sequences.set_index("sequence").loc[batch, ["group", "output"]].rename(columns={"output": "full"})
    outputs = made.sequences.assign(sequence=batch).merge(written.reset_index(), on="sequence")
    lists = at.groupby(level="sequence").agg({"token_id": list, "exit_layer": list}).loc[batch]
    outputs["token_ids"], outputs["exit_layers"] = lists["token_id"].tolist(), lists["exit_layer"].tolist()
    outputs["same"] = outputs["sequence"].map(tokens.groupby("sequence")["agrees"].all())
    sums = {"tokens": len(at), "exit_layers": at["exit_layer"].sum(), "layers": at["layers_run"].sum()}
    sums |= {name: outputs[name].sum() for name in ("drafted", "accepted")}
    return tokens, outputs, sums | {"agrees": tokens["agrees"].sum(), "of": len(full), "group": full["group"].iloc[0]}


def score_change(task: Task, before: list[str], after: list[str]) -> tuple[str, float, float, Interval]:
    """(name, score before, score after, their difference paired by group) of a task's first score, 0-100.

    `before` and `after`: one output for each item; items without a reference are left out. ("", NaN, NaN, NOTHING) for
    a task without references.
    """
    groups, stats = item_stats(task, before, after)
    if not stats[0]:
        return "", np.nan, np.nan, NOTHING
    name = next(iter(stats[0]))
    (old, score), (new, _) = (found[name] for found in stats)
    width, sums = old.shape[1], pd.DataFrame(np.hstack([old, new])).assign(group=groups)
    gain = interval_of(sums, lambda t: score(t.to_numpy()[:, width:]) - score(t.to_numpy()[:, :width]))
    old_score, new_score = (float(score(one.sum(axis=0)[None])[0]) for one in (old, new))
    return name, old_score, new_score, gain


@torch.no_grad()
def nats(model: Model, prompt: list[int], output: list[int]) -> float:
    """The sum of -ln p over an output's tokens, each by the full model given the prompt and the tokens before it."""
    if not output:
        return 0.0
    with in_turn(model.blocks):
        inputs = model.adapter.whole_inputs(prompt, output) | model.adapter.last_logits(len(output))
        logits = model.network(**inputs).logits[0, -len(output) :].double()
    own = logits.gather(1, torch.tensor(output, device=logits.device)[:, None])[:, 0]
    return float((logits.logsumexp(-1) - own).sum())


def without_references(study: Study, task: str, outputs: pd.DataFrame) -> dict[str, Any]:
    """The quality of outputs by the full model and its outputs, without references.

    Args:
        study: its model, and its trace of the task, are full depth's.
        task: its name.
        outputs: of one setup, as in `Decoded.outputs`.

    Returns:
        `nats`: -ln p per token of these outputs, and `more`, that less full depth's, as Intervals; `perplexity`, the
        ratio of the two perplexities, e to the power of `more`; `same`, the share of outputs that are full depth's,
        token by token; `chrF` of these texts against full depth's, 0-100.
    """
    prompts = encoded(study.model, study.tasks[task].pick(list(outputs["sequence"])))
    full = study.traces[task].tokens.groupby("sequence")["token_id"].agg(list)
    rows = []
    for prompt, (_, one) in zip(prompts, outputs.iterrows()):
        row = {"group": one["group"]}
        for name, ids in (("own", one["token_ids"]), ("full", full[one["sequence"]])):
            row |= {name: nats(study.model, prompt, ids), f"{name}_tokens": len(ids)}
        rows.append(row)
    sums = pd.DataFrame(rows)
    more = interval_of(sums, lambda t: t["own"] / t["own_tokens"] - t["full"] / t["full_tokens"])
    return {
        "nats": interval_of(sums, lambda t: t["own"] / t["own_tokens"]),
        "more": more,
        "perplexity": float(np.exp(more.estimate)),
        "same": float(outputs["same"].mean()),
    } | chrf(list(outputs["output"]), [[text] for text in outputs["full"]])
