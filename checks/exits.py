"""Decoding that leaves early, timed against the fastest plain decoding: `python -m checks.exits`, part of `make bench`.

For each model: drafts of a fixed length and drafts that end where a gate doubts, the ones that the forecast puts first,
checked by the last layer (lossless); and the exits and the threshold that it puts first of those that keep 98% of the
tokens and of the score on other texts (lossy). All are timed one prompt at a time and in batches, in turns on the same
prompts, beside transformers' `generate` and its `assistant_early_exit`; and the loop without a gate beside the network
called token by token. The bound is what the formula gives where nothing but blocks and heads is paid, the forecast what
is expected with all else. Seconds are wall time, of each batch the quickest of the repeats, so that what else the
machine does counts least. What the best lossless drafts had right is then replayed on larger shapes
(`checks.exits_shapes`), and drafts through other readings of a model's layers are timed (`checks.exits_readings`; with
`--only readings` these alone, put into the report that is there). At its end it says how long it took, and ends with
status 1 where the tokens of a lossless way are not plain decoding's.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import eelib
from checks.exits_readings import READINGS, read
from checks.exits_shapes import SHAPES, Pattern, replayed
from checks.exits_ways import NEW_TOKENS, Known, Rows, doubting_drafts, fixed_drafts, score, totals
from checks.report import Head, headed, write_part, write_report
from eelib.common.files import data_folder
from eelib.exits.calibration import by_agreement
from eelib.exits.decoding.generate import DRAFT_LENGTH as DRAFT
from eelib.exits.decoding.generate import batches, encoded
from eelib.exits.exit_rule import ExitRule
from eelib.exits.forecast import Costs, Forecast, Planned, measure, seconds
from eelib.exits.gates.gate import gate_named
from eelib.exits.trace_scores import curve, rule_at, scores
from eelib.models.model import Model
from eelib.tasks.task import Task
from eelib.tracing.decode import greedy_decode
from eelib.tracing.trace import Trace
from eestudy.old.analysis.speed import PLAIN, Way, by_library, few_exits, plans_of, run, timed

RESULT = data_folder("checks", "exits.json")
MODELS = ("pocket-llama-joint", "pocket-t5-weighted", "pocket-t5-skip", "pocket-llama-skip")  # of these, what is there
TASK, KEPT = "translation/de-en", 0.98
SIZES = (1, 8, 16)
CROSSED = (1, 2, 4, 8, 16, 32, 64)  # rows of a batch that the forecast is made for
TOP = 1  # drafts of a fixed length that are timed
LEVELS = (KEPT, 0.985, 0.99, 0.995, 0.999)  # agreement by the trace, until what is decoded keeps enough, too
LOOP, NETWORK = "loop without a gate", "network, token by token"


@dataclass(frozen=True)
class Found:
    """Of one model: rows with model, batch, way, kind, sums, bound, forecast and what it would be if something cost
    nothing; what batches of 1 to 64 rows make of the lossy gate's gain; what each draft of a fixed length had right.
    """

    rows: Rows
    crossing: Rows
    patterns: dict[str, Pattern]


def measured(name: str, sequences: int, repeats: int, max_new_tokens: int = NEW_TOKENS) -> Found:
    """Ways chosen on a trace of twice the texts and timed on the first half of them."""
    model, task = eelib.load_model(name, device="cpu"), eelib.load_task(TASK, limit=2 * sequences)
    with tempfile.TemporaryDirectory() as folder:
        made = eelib.trace(model, task, max_new_tokens=max_new_tokens, folder=folder, progress=False)
        numbers = made.sequences["sequence"].tolist()  # of texts that fit the window
        own, others = numbers[:sequences], numbers[sequences:] or numbers
        asked = task.pick(own)
        costs = measure(
            model, asked, ExitRule(gate_named("softmax_difference"), exit_layers=few_exits(model.layers, 3))
        )
        known = [Known(Way(PLAIN, None, "full"), "plain", 1.0)]
        known += fixed_drafts(costs, made, own, range(1, model.layers), TOP)
        layers = [one.forecast.rule.exit_layers[0] for one in known if one.forecast and one.forecast.rule.exit_layers]
        known += [doubting_drafts(costs, made, own, layers), lossy(costs, model, task, made, own, others)]
    found, crossing = known[-1].forecast, []
    assert found is not None
    for keys in ("project", "deferred"):
        batched = crossover(costs, found.plans, keys, found.rule.asked(model.layers))
        crossing += [{"model": name, "keys": keys} | row for row in batched]
    rows = [
        {"model": name, "batch": size} | row
        for size in SIZES
        for row in raced(model, asked, known, size, max_new_tokens, repeats, layers[0])
    ]
    patterns = {
        one.way.name: Pattern(name, model.layers, layer, one.way.draft or DRAFT, one.forecast.plans)
        for one, layer in zip(known[1:], layers)
        if one.forecast
    }
    return Found(rows, crossing, patterns)


def crossover(costs: Costs, plans: Sequence[Planned], keys: str, asked: Sequence[int]) -> Rows:
    """What a batch makes of the gain: {rows, ruled, parted, together}, speed-ups over plain decoding of it.

    `parted`: rows that exit stay behind; `together`: all go on to the deepest; `ruled`: what is quicker.
    """
    found = []
    for size in CROSSED:
        plain = seconds(costs, plans, "full", batch=size)
        ways = {"ruled": None, "parted": True, "together": False}
        times = {name: seconds(costs, plans, keys, asked, size, split=way) for name, way in ways.items()}
        found.append({"rows": size} | {name: plain / value for name, value in times.items()})
    return found


def lossy(costs: Costs, model: Model, task: Task, made: Trace, own: Sequence[int], others: Sequence[int]) -> Known:
    """The exits that the forecast puts first at 98% agreement on the other texts, by the trace; then a threshold with
    which decoding them for real keeps as much of the tokens and of the score.
    """
    gate = ExitRule(gate_named("softmax_difference"))
    said, rows = scores(gate, made), made.tokens["sequence"].isin(others).to_numpy()

    def kept(exits: tuple[int, ...], level: float) -> Forecast:
        rule = replace(gate, exit_layers=exits)
        choice = by_agreement(curve(rule, said, made, rows), level)
        rule = rule_at(rule, rule.gate.default if choice.threshold is None else choice.threshold)
        return Forecast(costs, plans_of(rule, made, own), rule, "deferred")

    some = {few_exits(model.layers, count) for count in (2, 3)} | {(layer,) for layer in range(1, model.layers)}
    exits = max(sorted(some - {()}), key=lambda one: kept(one, KEPT).speed_up)
    for level in LEVELS:
        found = kept(exits, level)
        way = Way(f"gate at {', '.join(map(str, exits))}, deferred", found.rule, "deferred")
        if keeps(model, task.pick(others), way):
            break
    return Known(way, "lossy", found.bound, found)


def keeps(model: Model, task: Task, way: Way) -> bool:
    """Whether decoding for real keeps enough of plain decoding's tokens and score."""
    rows, texts = timed(model, task, [Way(PLAIN, None, "full"), way], SIZES[-1], NEW_TOKENS, 1)
    own = [row for row in rows if row["way"] == way.name]
    agrees = sum(row["agrees"] for row in own) / max(sum(row["of"] for row in own), 1)
    early, plain = (score(task, texts[one, SIZES[-1]]) for one in (way.name, PLAIN))
    return agrees >= KEPT and early >= KEPT * plain


def raced(
    model: Model, task: Task, known: Sequence[Known], size: int, max_new_tokens: int, repeats: int, layer: int
) -> Rows:
    """Every way in batches of `size`; `layer`: that transformers' own drafts through."""
    times, texts = timed(model, task, [one.way for one in known], size, max_new_tokens, repeats)
    found = [*totals(task, known, size, times, texts).values()]
    if size == 1:
        theirs = assisted(model, task, layer, max_new_tokens, repeats)
        found += [{"way": way, "kind": "library", "bound": None} | total for way, total in theirs.items()]
    loops = looped(model, task, size, max_new_tokens, repeats)
    return found + [{"way": way, "kind": "loop", "bound": None} | total for way, total in loops.items()]


def looped(model: Any, task: Any, size: int, max_new_tokens: int, repeats: int) -> dict[str, dict[str, Any]]:
    """The loop without a gate, and the network called token by token, in turns: {way: totals}."""
    prompts, way = encoded(model, task), Way(PLAIN, None, "full")
    found: dict[str, dict[str, Any]] = {
        name: {"seconds": 0.0, "tokens": 0, "agrees": None, "of": None} for name in (LOOP, NETWORK)
    }
    for chunk in batches(model, prompts, size):
        part, some = task.pick(chunk), [prompts[i] for i in chunk]
        times: dict[str, list[float]] = {LOOP: [], NETWORK: []}
        for turn in range(2 * repeats):
            if turn % 2:
                made = run(model, part, way, size, max_new_tokens)
                times[LOOP].append(sum(made.times.values()))
            else:
                began = time.perf_counter()
                outputs = greedy_decode(model, some, max_new_tokens)
                times[NETWORK].append(time.perf_counter() - began)
        for name, tokens in ((LOOP, len(made.tokens)), (NETWORK, sum(map(len, outputs)))):
            found[name]["seconds"] += min(times[name])
            found[name]["tokens"] += tokens
    return found


def assisted(model: Any, task: Any, layer: int, max_new_tokens: int, repeats: int) -> dict[str, dict[str, Any]]:
    """transformers' own self-speculation through a layer, where it runs: {way: totals}."""
    total: dict[str, Any] = {"seconds": 0.0, "tokens": 0, "agrees": None, "of": None}
    way = f"transformers' assistant_early_exit at {layer}"
    for prompt in encoded(model, task):
        try:
            runs = [by_library(model, prompt, max_new_tokens, assistant_early_exit=layer) for _ in range(repeats)]
        except (ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            return {way: {"seconds": None, "tokens": None, "agrees": None, "of": None, "why": str(error)[:200]}}
        seconds, ids = min(runs, key=lambda one: one[0])
        total["seconds"] += seconds
        total["tokens"] += len(ids)
    return {way: total}


def best_pattern(found: Sequence[Found]) -> Pattern:
    """What those drafts of a fixed length had right that gained most, one prompt at a time."""
    gains: dict[float, Pattern] = {}
    for one in found:
        seconds = {row["way"]: row["seconds"] for row in one.rows if row["batch"] == 1}
        gains |= {seconds[PLAIN] / seconds[way]: pattern for way, pattern in one.patterns.items()}
    return gains[max(gains)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    there = [name for name in MODELS if data_folder("models", name).is_dir()]
    parser.add_argument("--models", nargs="+", default=there, help="shipped names, local folders or hub ids")
    parser.add_argument("--sequences", type=int, default=16, help="texts that are timed")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES), help="what is replayed on")
    parser.add_argument("--readings", nargs="*", default=list(READINGS), help="of one model; an adapter block first")
    parser.add_argument("--only", choices=["readings"], help="this part alone, put into the report that is there")
    parser.add_argument("--output", type=Path, default=RESULT, help=f"where the JSON goes ({RESULT})")
    asked = parser.parse_args()
    if asked.only and not asked.output.is_file():
        parser.error(f"--only {asked.only}: {asked.output} is no report that it could be put into")
    command, began = " ".join(["python -m checks.exits", *sys.argv[1:]]), time.perf_counter()
    head = headed("exits", command=command)
    head["machine"] |= {"threads": torch.get_num_threads()}
    found = [] if asked.only else report(asked, head)
    if asked.readings:
        load = os.getloadavg()[0]  # of other work, which all ways share
        rows = read(asked.readings, eelib.load_task(TASK, limit=asked.sequences), asked.sequences, asked.repeats)
        write_part(asked.output, "readings", head, task=TASK, sequences=asked.sequences, load=load, rows=rows)
        for row in rows:
            print(json.dumps(row))
        found += rows
    print(f"{asked.output}: {command}, {(time.perf_counter() - began) / 60:.1f} minutes")
    if wrong := differing(found):
        sys.exit("; ".join(wrong))


def differing(rows: Rows) -> list[str]:
    """The lossless ways whose tokens are not plain decoding's, which decides near ties in both."""
    return [
        f"{row['model']}, batch {row['batch']}, {row['way']}: {row['agrees']:g} of its {row['tokens']:g} tokens are "
        f"those of plain decoding, which has {row['of']:g}"
        for row in rows
        if row["kind"] == "lossless" and not row["agrees"] == row["tokens"] == row["of"]
    ]


def report(asked: argparse.Namespace, head: Head) -> Rows:
    """All but the readings; the rows of the ways."""
    found, began = [], time.perf_counter()
    for name in asked.models:
        found.append(measured(name, asked.sequences, asked.repeats))
        print(f"{name}: after {(time.perf_counter() - began) / 60:.1f} minutes", file=sys.stderr)
    rows = [row for one in found for row in one.rows]
    pattern = best_pattern(found)
    write_report(
        asked.output,
        head,
        task=TASK,
        sequences=asked.sequences,
        kept=KEPT,
        rows=rows,
        crossover=[row for one in found for row in one.crossing],
        shapes=[replayed(SHAPES[name], pattern, asked.repeats) for name in asked.shapes],
    )
    for row in rows:
        print(json.dumps(row))
    return rows


if __name__ == "__main__":
    main()
