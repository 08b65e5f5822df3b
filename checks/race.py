"""Decoding that exits early, timed against the fastest plain decoding of the same model.

Of each model: drafts of a fixed length and drafts that end where a gate doubts, the ones that the forecast puts first,
verified by the last layer (lossless); and the exits and the threshold that keep 98% of the tokens and of the score on
other texts (lossy). All are timed in turns on the same prompts, one at a time and in batches, beside transformers'
`generate` and its `assistant_early_exit`; and the loop without a gate beside the network called token by token. Of each
batch the quickest of the repeats counts. Which drafts of the best lossless way were right is then replayed on larger
networks, whose weights are random: there only time is measured.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig

import eelib
from checks.report import TRACES, Goal, all_of, finish, goal, headed, options
from checks.shapes import Shape, number_tokenizer, random_llama
from eelib.common.files import data_folder
from eelib.exits.calibration import by_agreement
from eelib.exits.decoding.generate import GenerateOutput, batches, encoded, generate
from eelib.exits.exit_rule import ExitRule, fixed_exit
from eelib.exits.forecast import Costs, Forecast, Planned, by_sequence, measure, planned
from eelib.exits.gates.gate import GateState, LayerOutput, gate_named
from eelib.exits.gates.schedule import Fixed
from eelib.exits.trace_scores import curve, rule_at, scores
from eelib.models.model import Model, prepare
from eelib.tasks.task import Task
from eelib.tracing.decode import greedy_decode
from eelib.tracing.trace import Trace

MODELS = (  # of which those are raced that are there; the last two are other readings of pocket-llama
    *("pocket-llama-joint", "pocket-t5-weighted", "pocket-t5-skip", "pocket-llama-skip"),
    *("pocket-llama-kangaroo", "pocket-llama-lens"),
)
TASK, KEPT, SIZES, NEW_TOKENS = "translation/de-en", 0.98, (1, 8, 16), 64
LENGTHS, DOUBTS, LONGEST = (1, 2, 4, 8), (0.1, 0.3, 0.5, 0.7), 8  # of drafts; softmax differences below which they end
LEVELS = (KEPT, 0.985, 0.99, 0.995, 0.999)  # agreement by the trace, until what is decoded keeps enough, too
PLAIN, LIBRARY, LOOP, NETWORK = "plain", "transformers", "loop without a gate", "network, token by token"
ASSISTED = "transformers' assistant_early_exit"
GOALS = (("lossless", 1, 1.6), ("lossless", 8, 1.2), ("lossy", 1, 1.8), ("lossy", 16, 1.3))  # kind, batch, least
LEAST_ASSISTED, MOST_LOOP, LEAST_OF_CEILING = 1.3, 1.05, 0.85
SHAPES = {
    "12x256-8k": Shape(12, 256, 8192, 688, 4, 4, True, plan={1: (1, 192)}),
    "16x1024-32k": Shape(16, 1024, 32768, 2816, 16, 4, True, plan={1: (1, 64)}),
    "16x2048-32k": Shape(16, 2048, 32768, 5632, 32, 8, True, plan={1: (1, 24)}),
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """A way to decode, and what is expected of it; plain decoding has no forecast."""

    name: str
    kind: str
    kv_policy: str
    forecast: Forecast | None = None

    def run(self, model: Model, task: Task, size: int) -> GenerateOutput:
        """One decoding; drafts that cost more than they save are measured, too."""
        rule, length = (self.forecast.rule, self.forecast.draft) if self.forecast else (None, None)
        drafts = length if self.kv_policy == "verified" else None
        return generate(model, task, rule, None, self.kv_policy, drafts, size, NEW_TOKENS, always_draft=True)


# ---- what is raced


def setups(model: Model, task: Task, sequences: int) -> list[Setup]:
    """Plain decoding, and of each other kind what the forecast puts first, by a trace of twice the texts."""
    with tempfile.TemporaryDirectory() as folder:
        made = eelib.trace(model, task, max_new_tokens=NEW_TOKENS, folder=folder, progress=False)
        numbers = made.sequences["sequence"].tolist()  # of texts that fit the window
        own, others = numbers[:sequences], numbers[sequences:] or numbers
        spread = tuple(sorted({round(model.layers * i / 4) for i in (1, 2, 3)} - {0, model.layers}))
        costs = measure(model, task.pick(own), ExitRule(gate_named("softmax_difference"), exit_layers=spread))
        block = model.adapter_block
        fixed = best_fixed(costs, made, own, [block.layer] if block else range(1, model.layers))
        doubting = best_doubting(costs, made, own, fixed)
        return [Setup(PLAIN, "plain", "full"), fixed, doubting, lossy(costs, model, task, made, own, others)]


def best_fixed(costs: Costs, made: Trace, own: Sequence[int], layers: Sequence[int]) -> Setup:
    """Drafts through one layer, of one length."""
    found = []
    for layer in layers:
        agrees = made["final_rank"][:, layer] == 1
        plans = by_sequence(made, np.full(len(agrees), layer), agrees)
        chosen = [plans[number] for number in own]
        found += [Forecast(costs, chosen, fixed_exit(layer), "verified", draft=length) for length in LENGTHS]
    best = max(found, key=lambda one: one.speed_up)
    layer = best.rule.asked(costs.layers)[0]
    return Setup(f"layer {layer}, drafts of {best.draft}, verified", "lossless", "verified", best)


def best_doubting(costs: Costs, made: Trace, own: Sequence[int], fixed: Setup) -> Setup:
    """Drafts through the same layer that end where the gate doubts."""
    assert fixed.forecast
    layer, found = fixed.forecast.rule.asked(costs.layers)[0], []
    for doubt in DOUBTS:
        rule = ExitRule(gate_named("softmax_difference"), doubt, exit_layers=(layer,))
        found.append((Forecast(costs, plans_of(rule, made, own), rule, "verified", draft=LONGEST), doubt))
    best, doubt = max(found, key=lambda one: one[0].speed_up)
    return Setup(f"layer {layer} above {doubt:g}, drafts to {LONGEST}, verified", "lossless", "verified", best)


def plans_of(rule: ExitRule, made: Trace, numbers: Sequence[int]) -> list[Planned]:
    """Where a rule's tokens exit in some sequences, teacher-forced."""
    plans = planned(rule, made)
    return [plans[number] for number in numbers]


def lossy(costs: Costs, model: Model, task: Task, made: Trace, own: Sequence[int], others: Sequence[int]) -> Setup:
    """The exits that the forecast puts first at 98% agreement on the other texts, by the trace; then a threshold with
    which decoding them for real keeps as much of the tokens and of the score.
    """
    gate = ExitRule(gate_named("softmax_difference"))
    given, rows = scores(gate, made), made.tokens["sequence"].isin(others).to_numpy()

    def forecast(exits: tuple[int, ...], level: float) -> Forecast:
        rule = replace(gate, exit_layers=exits)
        choice = by_agreement(curve(rule, given, made, rows), level)
        rule = rule_at(rule, rule.gate.default if choice.threshold is None else choice.threshold)
        return Forecast(costs, plans_of(rule, made, own), rule, "deferred")

    layers = [model.adapter_block.layer] if model.adapter_block else range(1, model.layers)
    some: list[tuple[int, ...]] = [(layer,) for layer in layers]
    if not model.adapter_block:
        some += [tuple(round(model.layers * i / (n + 1)) for i in range(1, n + 1)) for n in (2, 3) if n < model.layers]
    exits = max(some, key=lambda one: forecast(one, KEPT).speed_up)
    for level in LEVELS:
        found = Setup(f"gate at {', '.join(map(str, exits))}, deferred", "lossy", "deferred", forecast(exits, level))
        plain, early = timed(model, task.pick(others), [Setup(PLAIN, "plain", "full"), found], SIZES[-1], 1)
        if keeps(early, plain) >= KEPT:
            break
    return found


def keeps(row: Row, plain: Row) -> float:
    """The share of plain decoding's tokens, place by place, or of its score if that is less."""
    agrees = row["agrees"] / row["of"] if row["of"] else 0.0
    return float(min(agrees, row["score"] / plain["score"]) if plain.get("score") and "score" in row else agrees)


# ---- the race


def timed(model: Model, task: Task, ways: Sequence[Setup], size: int, repeats: int) -> list[Row]:
    """A row for each way, in turns in batches of `size`; the first way is plain decoding."""
    prompts = encoded(model, task)
    names = [way.name for way in ways]
    found = {name: dict.fromkeys(("seconds", "tokens", "agrees", "of", "drafted", "accepted"), 0.0) for name in names}
    texts = {name: [""] * len(prompts) for name in names}
    for number, chunk in enumerate(batches(model, prompts, size)):
        part = task.pick(chunk)
        if not number:
            for way in ways:
                way.run(model, part, size)  # the first pays for what is made once
        made: dict[str, list[GenerateOutput]] = {name: [] for name in names}
        for turn in range(repeats):
            shift = (number + turn) % len(ways)
            for way in (*ways[shift:], *ways[:shift]):
                made[way.name].append(way.run(model, part, size))
        plain = made[names[0]][0].tokens.set_index(["sequence", "position"])["token_id"]
        for name, runs in made.items():
            ids = runs[0].tokens.set_index(["sequence", "position"])["token_id"]
            sums = {"seconds": min(sum(one.times.values()) for one in runs), "tokens": len(ids), "of": len(plain)}
            sums["agrees"] = int((ids.reindex(plain.index) == plain).sum())
            sums |= {key: int(runs[0].sequences[key].sum()) for key in ("drafted", "accepted")}
            for key, value in sums.items():
                found[name][key] += value
            for place, text in zip(chunk, runs[0].sequences["output"]):
                texts[name][place] = text
    rows = []
    for way in ways:
        known: Row = {"forecast": None, "bound": 1.0}
        if way.forecast:
            now = replace(way.forecast, batch=size)
            known = {"forecast": now.speed_up, "bound": now.bound, "if_free": now.if_free}
        score = next(iter(task.quality(texts[way.name]).values()), 0.0)
        rows.append({"way": way.name, "kind": way.kind} | known | found[way.name] | {"score": score})
    return rows


def baselines(model: Model, task: Task, size: int, repeats: int, layer: int) -> list[Row]:
    """The loop without a gate and the network called token by token; of single prompts transformers' own ways, too."""
    plain, prompts = Setup(PLAIN, "plain", "full"), encoded(model, task)

    def loop(chunk: list[int]) -> tuple[float, int]:
        made = plain.run(model, task.pick(chunk), size)
        return sum(made.times.values()), len(made.tokens)

    def network(chunk: list[int]) -> tuple[float, int]:
        began = time.perf_counter()
        outputs = greedy_decode(model, [prompts[i] for i in chunk], NEW_TOKENS)
        return time.perf_counter() - began, sum(map(len, outputs))

    ways: dict[tuple[str, str], Callable[[list[int]], tuple[float, int]]] = {
        ("loop", LOOP): loop,
        ("loop", NETWORK): network,
    }
    if size == 1:
        ways["library", LIBRARY] = lambda chunk: by_library(model, prompts[chunk[0]])
        ways["library", ASSISTED] = lambda chunk: by_library(model, prompts[chunk[0]], assistant_early_exit=layer)
    rows: dict[tuple[str, str], Row] = {
        key: {"kind": key[0], "way": key[1], "seconds": 0.0, "tokens": 0, "why": ""} for key in ways
    }
    for chunk in batches(model, prompts, size):
        for key, row in rows.items():
            if not row["why"]:
                try:
                    seconds, tokens = min(ways[key](chunk) for _ in range(repeats))
                    row.update(seconds=row["seconds"] + seconds, tokens=row["tokens"] + tokens)
                except (ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
                    row.update(seconds=None, tokens=None, why=str(error)[:200])  # transformers can't do it
    return [*rows.values()]


@torch.no_grad()
def by_library(model: Model, prompt: list[int], **more: int) -> tuple[float, int]:
    """(seconds, tokens) of transformers' own greedy `generate` on one prompt; `more`: assistant_early_exit."""
    network: Any = model.network
    ids, ends = torch.tensor([prompt], device=model.device), sorted(model.eos_ids)
    config = GenerationConfig(
        max_new_tokens=min(NEW_TOKENS, model.context_length - len(prompt)),
        do_sample=False,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        decoder_start_token_id=getattr(network.config, "decoder_start_token_id", None),
    )
    given: dict[str, Any] = {"attention_mask": torch.ones_like(ids)} | more
    whole = network.config.is_encoder_decoder
    if whole:  # its own cache has as many layers as the encoder
        given["past_key_values"] = EncoderDecoderCache(DynamicCache(), DynamicCache())
    began = time.perf_counter()
    out = network.generate(ids, generation_config=config, **given)
    return time.perf_counter() - began, out.shape[1] - (1 if whole else len(prompt))


# ---- right and wrong drafts, replayed on another network


@dataclass(frozen=True)
class Replayed(Fixed):
    """Exits at a layer with plain decoding's token where the pattern says that it is right, else with another."""

    plain: tuple[int, ...] = ()
    right: tuple[bool, ...] = ()

    def token(self, output: LayerOutput, gate_state: GateState) -> torch.Tensor:
        """The head is read, as for any draft."""
        read, positions = output.readout["top1"], output.positions.tolist()
        drafts = [self.plain[at] if self.right[at] else int(self.plain[at] == 0) for at in positions]
        return torch.tensor(drafts, device=read.device)


def replayed(name: str, shape: Shape, best: Forecast, repeats: int) -> Row:
    """The speed-up over plain decoding after the prompt, one prompt at a time, beside the formula's ceiling.

    The ceiling (Leviathan et al. 2023, the head paid for) supposes that a step costs as much for a draft as for one
    token. What drafts of `best` had right repeats where the network writes more.
    """
    network = random_llama(shape).eval().requires_grad_(False)
    model, tokens = prepare(network, number_tokenizer(shape.vocabulary), "random", "causal"), shape.plan[1][1]
    flat = np.concatenate([plan.agrees[1:] for plan in best.plans])
    right = np.resize(flat, tokens)
    layer = max(1, round(best.rule.asked(best.costs.layers)[0] * shape.layers / best.costs.layers))

    def run(count: int, rule: ExitRule | None = None) -> GenerateOutput:
        keys, length = ("verified", best.draft) if rule else ("full", None)
        return generate(model, ["1 2 3 4"], rule, None, keys, length, 1, count, always_draft=True)

    prompt = min(sum(run(1).times.values()) for _ in range(repeats + 1))  # the first pays for what is made once
    plain = min((run(tokens) for _ in range(repeats)), key=lambda one: sum(one.times.values()))
    ids = tuple(plain.tokens["token_id"])
    rule = ExitRule(Replayed(plain=ids, right=tuple(right.tolist())), float(layer), exit_layers=(layer,))
    early = min((run(tokens, rule) for _ in range(repeats)), key=lambda one: sum(one.times.values()))
    if tuple(early.tokens["token_id"]) != ids:
        raise AssertionError("verified drafts of a random network are not plain decoding's output")
    slow, quick = (sum(one.times.values()) - prompt for one in (plain, early))
    head = plain.times["head"] / plain.times["blocks"] * shape.layers  # a read of it, in blocks
    accepted = float(right[1:].mean())
    per_round = sum(accepted**number for number in range(best.draft + 1))
    paid = shape.layers + best.draft * layer + (best.draft + 1) * head
    ceiling = per_round * (shape.layers + head) / paid
    found = {"shape": name, "layers": shape.layers, "width": shape.width, "layer": layer, "draft": best.draft}
    return found | {"accepted": accepted, "head": head, "speed_up": slow / quick, "ceiling": ceiling}


# ---- goals


def goals(rows: list[Row], shapes: list[Row]) -> list[Goal]:
    """Each goal, judged on the best way of the best model; what lossless ways must give, on all of them."""
    rows = [row | {"rate": row["tokens"] / row["seconds"]} for row in rows if row["seconds"]]
    exact = [row for row in rows if row["kind"] == "lossless"]
    wrong = [
        f"{r['model']}, batch {r['batch']}, {r['way']}" for r in exact if not r["agrees"] == r["tokens"] == r["of"]
    ]
    found = [all_of("lossless ways whose tokens are plain decoding's", len(exact) - len(wrong), len(exact))]
    found[0]["measured"] += "".join(f"; not {way}" for way in wrong[:3])
    races: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        races.setdefault((row["model"], row["batch"]), {})[row["way"]] = row
    fastest = {at: max(w["rate"] for w in race.values() if is_plain(w)) for at, race in races.items() if PLAIN in race}

    def faster(row: Row) -> float:
        return float(row["rate"] / fastest[row["model"], row["batch"]])

    for kind, size, least in GOALS:
        own = [row for row in rows if row["kind"] == kind and row["batch"] == size]
        kept = {id(row): keeps(row, races[row["model"], size][PLAIN]) for row in own}
        good = [row for row in own if kind == "lossless" or kept[id(row)] >= KEPT]
        where = "one prompt at a time" if size == 1 else f"batch {size}"
        name = f"{kind} decoding, {where}, as a multiple of plain's speed"
        if own and not good:
            found.append(goal(name, np.nan, at_least=least, shown=f"none keeps {KEPT:.0%}"))
        elif own:
            best = max(good, key=faster)
            shown = f"{faster(best):.2f} times ({best['model']}, {best['way']}; the bound is {best['bound']:.2f})"
            found.append(goal(name, faster(best), at_least=least, shown=shown))
    ratios = []
    for (model, size), race in races.items():
        theirs = next((row for way, row in race.items() if ASSISTED in way), None)
        if size == 1 and theirs:
            ratios += [(row["rate"] / theirs["rate"], model) for row in race.values() if row["kind"] == "lossless"]
    if ratios:
        name, (ratio, model) = f"lossless decoding, as a multiple of {ASSISTED}", max(ratios)
        found.append(goal(name, ratio, at_least=LEAST_ASSISTED, shown=f"{ratio:.2f} times ({model})"))
    loops = [(race[NETWORK]["rate"] / race[LOOP]["rate"], *at) for at, race in races.items() if LOOP in race]
    if loops:
        ratio, model, size = max(loops)
        name, shown = (
            "time of the loop without a gate, over the network's",
            f"{ratio:.2f} times ({model}, batch {size})",
        )
        found.append(goal(name, ratio, at_most=MOST_LOOP, shown=shown))
    beside = [(race[PLAIN]["rate"] / race[LIBRARY]["rate"], at[0]) for at, race in races.items() if LIBRARY in race]
    if beside:
        name, (ratio, model) = "speed without a gate, as a multiple of transformers' generate", min(beside)
        found.append(goal(name, ratio, at_least=1, shown=f"{ratio:.2f} times ({model})"))
    if shapes:
        share, layers, width = min((one["speed_up"] / one["ceiling"], one["layers"], one["width"]) for one in shapes)
        name = "lossless decoding on other shapes, as a share of the formula's ceiling"
        shown = f"{share:.2f} ({layers} layers of width {width}; the lowest of {len(shapes)})"
        found.append(goal(name, share, at_least=LEAST_OF_CEILING, shown=shown))
    return found


def is_plain(row: Row) -> bool:
    """Whether a row is of decoding without exits."""
    return row["kind"] == "loop" or row["way"] in (PLAIN, LIBRARY)


def main() -> None:
    """The command line."""
    parser = options(__doc__, "race")
    there = [name for name in MODELS if data_folder("models", name).is_dir()]
    parser.add_argument("--models", nargs="+", default=there, help="shipped names, local folders or hub ids")
    parser.add_argument("--sequences", type=int, default=16, help="texts that are timed (16)")
    parser.add_argument("--repeats", type=int, default=2, help="timings of each way (2)")
    parser.add_argument("--sizes", nargs="+", type=int, default=[*SIZES], help="batch sizes (1 8 16)")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=[*SHAPES], help="what drafts are replayed on")
    asked = parser.parse_args()
    head = headed("race", depends=(*TRACES, "eelib/exits", "checks/shapes.py"))
    task, rows, best = eelib.load_task(TASK, limit=2 * asked.sequences), list[Row](), list[tuple[float, Forecast]]()
    for name in asked.models:
        model = eelib.load_model(name, device="cpu")
        head["models"][model.name] = model.hash
        ways = setups(model, task, asked.sequences)
        drafts = ways[1].forecast
        assert drafts
        for size in asked.sizes:
            timed_task = task.take(asked.sequences)
            found = timed(model, timed_task, ways, size, asked.repeats)
            if size == 1:
                best.append((found[0]["seconds"] / found[1]["seconds"], drafts))
            found += baselines(model, timed_task, size, asked.repeats, drafts.rule.asked(model.layers)[0])
            rows += [{"model": model.name, "batch": size} | row for row in found]
        print(f"{name} is done", flush=True)
    replays = (
        [replayed(name, SHAPES[name], max(best, key=lambda one: one[0])[1], asked.repeats) for name in asked.shapes]
        if best
        else []
    )
    finish(asked.output, head, goals(rows, replays), task=TASK, sequences=asked.sequences, rows=rows, shapes=replays)
