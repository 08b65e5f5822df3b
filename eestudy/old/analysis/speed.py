"""What early exit buys in time: ways of decoding raced on the same prompts, beside what was forecast (P §6).

Every prompt (or batch of prompts) is decoded by all ways, one after the other and in turns, so that a slower minute of
the machine falls on all of them. Times are of decoding alone, prompts included, tokenizing and set-up left out.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig

from eelib.common.errors import NotEstimable
from eelib.exits.decoding.generate import DRAFT_LENGTH, GenerateOutput, batches, encoded, generate
from eelib.exits.exit_rule import ExitRule, fixed_exit
from eelib.exits.forecast import Costs, Forecast, Planned, by_sequence, measure, planned
from eelib.exits.gates.gate import gate_named
from eelib.models.model import Model
from eelib.tasks.task import Task
from eelib.tracing.trace import Trace
from eestudy.claims import Verdict
from eestudy.old.analysis.keys_values import writing_model
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.resampling import bootstrap_totals
from eestudy.old.study.claims import untestable
from eestudy.old.study.comparison import check_pairs
from eestudy.old.study.of_study import OfStudy
from eestudy.old.study.study import Study
from eestudy.parameters import Parameters, as_parameter_error

PLAIN, LIBRARY = "plain", "transformers"
LOSSY, EXACT = ("copy", "project", "deferred"), "verified"
RACED = ("project", EXACT)  # the others cost what these do, but for what is made of keys: see the forecast
DRAFTS = (1, 2, 4, 8)  # longest drafts that are forecast


@dataclass(frozen=True)
class Way:
    """A way to decode: a rule (None: no token leaves), a policy of keys and values, the longest draft.

    `model`: another reading of the model that is raced; None: that model.
    """

    name: str
    rule: ExitRule | None
    keys: str
    draft: int | None = None
    model: Model | None = None


@dataclass(frozen=True)
class Race(OfStudy):
    """One model on one task; `own` is the page's own model, the same or before training.

    runs: a row per way, batch size and batch, with batch (the size), chunk, group, seconds, tokens, layers (run, summed
    over tokens), heads, agrees (tokens that are plain decoding's at their place), of (tokens of plain decoding).
    outputs: {(way, batch size): texts}.
    """

    own: Study
    task: str
    rule: ExitRule
    ways: list[Way]
    costs: Costs
    plans: dict[str, list[Planned]]
    runs: pd.DataFrame
    outputs: dict[tuple[str, int], list[str]]
    numbers: list[int]

    @property
    def sizes(self) -> list[int]:
        """Batch sizes, rising."""
        return sorted(self.runs["batch"].unique())


# ---- the race


def open_race(p: Parameters) -> Race:
    """The model of the parameters, or the one trained further, on the first of its learnt tasks (else the first).

    ParameterError for one that writes nothing, two of different architectures, and what a rule can't have.
    """
    if p.after.strip():
        check_pairs("after", [(p.model, p.after)])
    with as_parameter_error():
        rule = ExitRule(gate_named(p.gate), p.threshold)
        name = p.after if p.after.strip() else p.model
        model = writing_model(p, name)
        study = Study(p, model=name, loaded=model)
        return race(Study(p) if p.after.strip() else study, study, rule)


def race(own: Study, study: Study, rule: ExitRule) -> Race:
    """The ways by a rule, and the best fixed draft by the forecast, timed on the first of the study's prompts."""
    p, model = study.parameters, study.model
    task = next(iter(study.learnt_tasks or study.traces))
    trace = study.traces[task]
    numbers = trace.sequences["sequence"].tolist()[: p.sequences]
    asked = study.tasks[task].pick(numbers)
    costs = measure(model, asked, rule, min(p.batch, len(asked)))
    plans = {"gate": plans_of(rule, trace, numbers), "best layer": best(trace, numbers)}
    drafts = draft_table(costs, trace, numbers)
    ways = [Way(PLAIN, None, "full"), *(Way(f"gate, {keys}", rule, keys) for keys in RACED)]
    few = few_exits(model.layers, p.few_exits)
    if few:
        ways.append(Way(f"gate at {' and '.join(map(str, few))}, deferred", replace(rule, exit_layers=few), "deferred"))
        plans[ways[-1].name] = plans_of(replace(rule, exit_layers=few), trace, numbers)
    if len(drafts):
        top = drafts.loc[drafts["forecast"].idxmax()]
        layer, length = int(top["layer"]), int(top["draft"])
        ways.append(Way(f"layer {layer}, drafts of {length}", fixed_exit(layer), EXACT, length))
        plans[ways[-1].name] = plans_of(fixed_exit(layer), trace, numbers)
    rows: list[dict] = []
    outputs: dict[tuple[str, int], list[str]] = {}
    for size in sorted({1, min(p.batch, len(asked))}):
        found, texts = timed(model, asked, ways, size, p.max_new_tokens, p.repeats)
        rows += found
        outputs |= texts
    return Race(study, own, task, rule, ways, costs, plans, pd.DataFrame(rows), outputs, numbers)


def few_exits(layers: int, count: int) -> tuple[int, ...]:
    """So many layers below L, evenly spaced; none for 0, and each once."""
    return tuple(sorted({round(layers * i / (count + 1)) for i in range(1, count + 1)} - {0, layers}))


def timed(
    model: Model, asked: Task, ways: Sequence[Way], size: int, max_new_tokens: int, repeats: int, library: bool = True
) -> tuple[list[dict], dict[tuple[str, int], list[str]]]:
    """(rows of `Race.runs`, outputs by way) in batches of `size`; each batch's quickest of the repeats counts.

    The first way is plain decoding. `library`: transformers' own, too, of single prompts.
    """
    prompts = encoded(model, asked)
    chunks = batches(model, prompts, size)
    rows: list[dict] = []
    outputs: dict[tuple[str, int], list[str]] = {(way.name, size): [""] * len(asked) for way in ways}
    for way in ways:
        run(model, asked.pick(chunks[0]), way, size, max_new_tokens)  # the first pays for what is made once
    for number, chunk in enumerate(chunks):
        part = asked.pick(chunk)
        found: dict[str, list] = {way.name: [] for way in ways}
        by_theirs = []
        for turn in range(repeats):
            shift = (number + turn) % len(ways)
            for way in (*ways[shift:], *ways[:shift]):
                found[way.name].append(run(model, part, way, size, max_new_tokens))
            if library and size == 1:
                by_theirs.append(by_library(model, prompts[chunk[0]], max_new_tokens))
        plain = found[PLAIN][0].tokens.set_index(["sequence", "position"])["token_id"]
        of = {"batch": size, "chunk": number, "group": part.groups[0], "of": len(plain)}
        for name, made in found.items():
            tokens = made[0].tokens
            same = tokens.set_index(["sequence", "position"])["token_id"].reindex(plain.index) == plain
            rows.append(
                of
                | {
                    "way": name,
                    "seconds": min(sum(one.times.values()) for one in made),
                    "tokens": len(tokens),
                    "layers": tokens["exit_layer"].sum(),
                    "heads": tokens["head_reads"].sum(),
                    "agrees": int(same.sum()),
                    "drafted": made[0].sequences["drafted"].sum(),
                    "accepted": made[0].sequences["accepted"].sum(),
                    "deep": made[0].sequences["passes"].sum(),
                }
            )
            for place, text in zip(chunk, made[0].sequences["output"]):
                outputs[name, size][place] = text
        if by_theirs:
            seconds, ids = min(by_theirs, key=lambda one: one[0])
            same_ids = sum(a == b for a, b in zip(ids, plain.tolist()))
            rows.append(of | {"way": LIBRARY, "seconds": seconds, "tokens": len(ids), "agrees": same_ids})
    return rows, outputs


def run(model: Model, part: Task, way: Way, size: int, max_new_tokens: int) -> GenerateOutput:
    """One decoding."""
    given = (way.rule, None, way.keys, way.draft, size, max_new_tokens)
    return generate(way.model or model, part, *given, always_draft=True)  # drafts that cost more are measured, too


@torch.no_grad()
def by_library(model: Model, prompt: list[int], max_new_tokens: int, **options: int) -> tuple[float, list[int]]:
    """(seconds, token ids) of transformers' own greedy `generate` on one prompt; `options`: assistant_early_exit."""
    network: Any = model.network
    inputs = torch.tensor([prompt], device=model.device)
    start = getattr(network.config, "decoder_start_token_id", None)
    ends = sorted(model.eos_ids)
    config = GenerationConfig(
        max_new_tokens=min(max_new_tokens, model.context_length - len(prompt)),
        do_sample=False,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        decoder_start_token_id=start,
    )
    given: dict[str, Any] = {"attention_mask": torch.ones_like(inputs)}
    if network.config.is_encoder_decoder:  # its own cache has as many layers as the encoder
        given["past_key_values"] = EncoderDecoderCache(DynamicCache(), DynamicCache())
    began = time.perf_counter()
    out = network.generate(inputs, generation_config=config, **given, **options)[0].tolist()
    seconds = time.perf_counter() - began
    return seconds, out[1:] if network.config.is_encoder_decoder else out[len(prompt) :]


# ---- what a trace says beforehand


def plans_of(rule: ExitRule, trace: Trace, numbers: Sequence[int]) -> list[Planned]:
    """Where a rule's tokens exit in some sequences, teacher-forced. InputError for a gate that looks at states."""
    return chosen(planned(rule, trace), numbers)


def chosen(plans: Mapping[int, Planned], numbers: Sequence[int]) -> list[Planned]:
    """The plans of some sequences."""
    return [plans[number] for number in numbers]


def best(trace: Trace, numbers: Sequence[int]) -> list[Planned]:
    """The first layer that gives what the last one gives."""
    exits = trace.exit_layer("first")
    return chosen(by_sequence(trace, exits, np.ones(len(exits), dtype=bool)), numbers)


def draft_table(costs: Costs, trace: Trace, numbers: Sequence[int]) -> pd.DataFrame:
    """Drafts through each fixed layer: columns layer, draft (its length), accepted (share), per_round (tokens, by the
    formula), ceiling (of the formula, nothing but blocks and heads paid), forecast; the best length of each layer.
    """
    rows = []
    for layer in range(1, trace.layers):
        agrees = trace["final_rank"][:, layer] == 1
        plan = chosen(by_sequence(trace, np.full(len(agrees), layer), agrees), numbers)
        share = float(np.concatenate([one.agrees for one in plan]).mean())
        options = []
        for length in DRAFTS:
            per_round = length + 1 if share == 1 else (1 - share ** (length + 1)) / (1 - share)
            head = costs.head_in_blocks
            ceiling = per_round * (trace.layers + head) / (trace.layers + length * layer + (length + 1) * head)
            expected = Forecast(costs, plan, fixed_exit(layer), EXACT, draft=length).speed_up
            options.append((expected, length, per_round, ceiling))
        expected, length, per_round, ceiling = max(options)
        rows.append(
            {
                "layer": layer,
                "draft": length,
                "accepted": share,
                "per_round": per_round,
                "ceiling": ceiling,
                "forecast": expected,
            }
        )
    return pd.DataFrame(rows)


def forecasts(found: Race, way: Way, size: int) -> float:
    """Speed-up over plain decoding that was to be expected."""
    if way.rule is None:
        return 1.0
    plans = found.plans.get(way.name, found.plans["gate"])
    return Forecast(found.costs, plans, way.rule, way.keys, size, way.draft or DRAFT_LENGTH).speed_up


def stages(found: Race) -> pd.DataFrame:
    """How a speed-up melts, by the forecast: columns stage, keys, speed_up.

    First the best layer, with blocks and the last head alone paid; then the gate's own layers, what it asks, calls and
    Python; then a row for each policy of keys and values, one prompt at a time and in the larger batch.
    """
    costs, size = found.costs, found.sizes[-1]

    def expected(costs: Costs, keys: str = "copy", batch: int = 1, plans: str = "gate") -> float:
        return Forecast(costs, found.plans[plans], found.rule, keys, batch).speed_up

    rows = [
        ("best layer", "", expected(costs.bare, plans="best layer")),
        ("the gate's layers", "", expected(costs.bare)),
        ("and its questions", "", expected(replace(costs.bare, ask=costs.ask))),
        ("and calls, Python", "", expected(replace(costs, key=0.0))),
    ]
    for batch, stage in ((1, "all, one prompt"), (size, f"all, batch of {size}")):
        rows += [(stage, keys, expected(costs, keys, batch)) for keys in (*LOSSY, EXACT)]
    return pd.DataFrame(rows, columns=["stage", "keys", "speed_up"])


# ---- figures of a way


def rows_of(found: Race, name: str, size: int) -> pd.DataFrame:
    """A way's rows beside plain decoding's (columns with _plain), one per batch."""
    runs = found.runs[found.runs["batch"] == size]
    plain = runs[runs["way"] == PLAIN].set_index("chunk")[["seconds", "tokens"]].add_suffix("_plain")
    return runs[runs["way"] == name].join(plain, on="chunk")


def faster(found: Race, name: str, size: int) -> Interval:
    """Seconds per token of plain decoding over those of a way; batches are resampled (single prompts: by group).

    NotEstimable for fewer than two.
    """
    rows = rows_of(found, name, size)
    units = rows["group"] if size == 1 else rows["chunk"]
    if units.nunique() < 2:
        raise NotEstimable("one batch alone has no interval")
    sums = rows.groupby(units)[["seconds", "tokens", "seconds_plain", "tokens_plain"]].sum().to_numpy(float)
    return bootstrap_totals(lambda t: (t[:, 2] / t[:, 3]) / (t[:, 0] / t[:, 1]), sums, seed=found.seed)


def short_of_layers(found: Race, name: str) -> Interval:
    """Speed-up at batch 1 less L over the mean exit layer: what of the layers saved is not time saved (P-T2)."""
    rows = rows_of(found, name, 1)
    sums = rows.groupby("group")[["seconds", "tokens", "seconds_plain", "tokens_plain", "layers"]].sum()

    def gap(t: np.ndarray) -> np.ndarray:
        return (t[:, 2] / t[:, 3]) / (t[:, 0] / t[:, 1]) - found.depth * t[:, 1] / t[:, 4]

    return bootstrap_totals(gap, sums.to_numpy(float), seed=found.seed)


# ---- verdicts


def verdicts(found: Race) -> list[Verdict]:
    """Verdicts on P-T1 and P-T2, the first for a model that was trained to answer from every layer."""
    name, study = "gate, project", found.study
    trained = study.model.hash != found.own.model.hash
    if found.task not in study.learnt_tasks:
        return [untestable(claim, "no task of this run is learnt") for claim in ("P-T1", "P-T2")]
    made = [
        study.judge("P-T1", lambda: faster(found, name, 1), requirement_met=trained),
        study.judge("P-T2", lambda: short_of_layers(found, name)),
    ]
    return [replace(verdict, models=study.model.name if trained else "") for verdict in made]
