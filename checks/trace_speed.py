"""How fast is a trace? Timed beside its floor, the plain way and tuned-lens, on the same checkpoints and prompts.

The floor is bare greedy decoding and bare products of all states with the head. Texts are also read as they are, beside
a plain loop and tuned-lens's own evaluation of batches. Each way runs in a process of its own (`checks/peers/run.py`)
with the same number of threads, the ways taking turns; the best of the repeats counts.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

import eelib
from checks.given import texts_of
from checks.report import TRACES, Goal, finish, goal, headed, options
from eelib.common.tolerances import TOLERANCES
from eelib.models.checkpoint import path_of
from eelib.models.folder import weights_hash

PEER = "tuned-lens"
WAYS, READERS = ("trace", "decode", "head", "plain", PEER), ("trace", "plain", PEER)  # of prompts and of given texts
RUNNER, CACHE = Path(__file__).parent / "peers" / "run.py", Path(__file__).parent / ".cache"
CELLS = {  # batch -> (sequences, new tokens of each), so that each takes seconds
    "pocket-llama": {1: (2, 48), 16: (16, 32), 64: (64, 16)},
    "smollm2-135m-instruct": {1: (1, 24), 16: (16, 8)},
}
GIVEN = {"smollm2-135m-instruct": 300}  # positions of texts that are read, in cells that are called batch 0
REPEATS, THREADS = 2, os.cpu_count() or 1
PROMPT = 16  # tokens: the longer, the more of the time goes into reading it, which is the same for every way
TIE = TOLERANCES[torch.float32].tie
MOST_OF_FLOOR, MOST_MB = 1.2, 256.0
REAL, MOST_OF_REAL = ("smollm2-135m-instruct", 16), 0.8
Row = dict[str, Any]


# ---- processes


def environment(peer: str) -> str:
    """The Python of a peer's own environment, made on demand from pinned requirements; RuntimeError if it fails."""
    pins = RUNNER.with_name(f"{peer}.txt")
    folder = CACHE / "envs" / f"{peer}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:8]}"
    python = str(folder / "bin" / "python")
    if (folder / "done").exists():
        return python
    print(f"{peer}: making its environment, some minutes", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]  # all are pinned
    for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, "-r", str(pins)]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["failed"])[-1][:300])
    (folder / "done").touch()
    return python


def started(way: str, model: str) -> subprocess.Popen[str]:
    """The process of a way on a model; its errors are in checks/.cache."""
    python = environment(way) if way == PEER else sys.executable
    settings = {name: str(THREADS) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")}
    settings |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / f"{way}.log", "w") as log:
        return subprocess.Popen(
            [python, str(RUNNER), way, path_of(model)],
            env=os.environ | settings | {"PYTHONPATH": str(RUNNER.parents[2])},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )


def asked_of(process: subprocess.Popen[str], request: Row) -> Row:
    """What a process answers, {seconds, peak_mb} or {error}."""
    assert process.stdin and process.stdout
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    return json.loads(line) if line else {"error": "its process ended; checks/.cache has what it wrote"}


# ---- measurements


def prompts(tokenizer: Any, count: int) -> Row:
    """{ids, texts} of prompts of PROMPT tokens, which every way encodes alike."""
    ids, texts = list[list[int]](), list[str]()
    for source in texts_of(tokenizer, 100_000):
        text = str(tokenizer.decode(tokenizer(source)["input_ids"][:PROMPT], skip_special_tokens=True))
        if len(again := tokenizer(text)["input_ids"]) == PROMPT and len(ids) < count:
            ids.append(again)
            texts.append(text)
    return {"ids": ids, "texts": texts}


def cell(processes: dict[str, subprocess.Popen[str]], common: Row, request: Row) -> list[Row]:
    """A row for each way on one model and batch, the ways taking turns, and one for the floor where it is known."""
    answers: dict[str, list[Row]] = {way: [] for way in processes}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(REPEATS + 1):  # the first is not counted
            for way, process in processes.items():
                out = None if repeat else f"{folder}/{way}.npz"
                answers[way].append(asked_of(process, request | {"out": out}))
                print(common, way, answers[way][-1], flush=True)
        outputs = {way: dict(np.load(file)) for way in processes if (file := Path(folder, f"{way}.npz")).exists()}
    return rows_of(common, {way: found[1:] for way, found in answers.items()}, outputs)


def rows_of(common: Row, answers: dict[str, list[Row]], outputs: dict[str, dict[str, np.ndarray]]) -> list[Row]:
    """The rows of what was answered."""
    good = {way: found for way, found in answers.items() if all("seconds" in answer for answer in found)}
    seconds = {way: min(answer["seconds"] for answer in found) for way, found in good.items()}
    peaks = {way: max(answer["peak_mb"] for answer in found) for way, found in good.items()}
    if {"decode", "head"} <= set(seconds):
        seconds["floor"] = seconds["decode"] + seconds["head"]
    rows = []
    for way in [*answers, *(["floor"] if "floor" in seconds else [])]:
        row = common | {"way": way, "seconds": seconds.get(way), "peak_mb": peaks.get(way), "note": ""}
        if way in seconds:
            row |= {"tokens_per_second": common["tokens"] / seconds[way]} | compared(outputs, way)
        else:
            row["note"] = next(answer["error"] for answer in answers[way] if "error" in answer)
        rows.append(row)
    return rows


def compared(outputs: dict[str, dict[str, np.ndarray]], way: str) -> dict[str, int]:
    """Differences of top-1s from the plain way's, position by position until an output takes another path.

    `top1_differences` counts those that no tie explains, `ties` those where the two top logits are within `TIE`, and
    `not_compared` the positions after a tie sent an output on another path. Nothing for ways without top-1s.
    """
    expected, found = outputs.get("plain", {}), outputs.get(way, {})
    if "top1" not in found or "gap" not in expected:
        return {}
    before = np.ones(expected["top1"].shape[:-1], bool)
    if "tokens" in found:
        same = expected["tokens"] == found["tokens"]  # [sequences, new]
        before[:, 1:] = np.cumprod(same[:, :-1], axis=1)
    wrong, close = (expected["top1"] != found["top1"]) & before[..., None], expected["gap"] < TIE
    counts = {"top1_differences": wrong & ~close, "ties": wrong & close, "not_compared": ~before}
    return {name: int(count.sum()) for name, count in counts.items()}


# ---- goals


def worst(name: str, values: dict[tuple[str, int], float], unit: str, **bounds: Any) -> list[Goal]:
    """A goal over cells, judged on the worst of them; where nothing was measured, it is not met."""
    if not values:
        return [goal(name, np.nan, shown="not measured", **bounds)]
    where = (max if "at_most" in bounds else min)(values, key=values.__getitem__)
    met = sum(goal("", value, **bounds)["met"] for value in values.values())
    shown = f"{values[where]:.3g}{unit} ({where[0]}, batch {where[1]}); {met} of {len(values)} cells meet it"
    return [goal(name, values[where], shown=shown, **bounds)]


def goals(rows: list[Row]) -> list[Goal]:
    """Every goal of the benchmark that what was measured can be held against."""
    cells: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        if row["seconds"]:
            cells.setdefault((row["model"], row["batch"]), {})[row["way"]] = row
    traced = {at: ways for at, ways in cells.items() if "trace" in ways}

    def times(way: str, given: bool = False) -> dict[tuple[str, int], float]:
        own = {at: ways for at, ways in traced.items() if way in ways and (at[1] == 0) == given}
        return {at: ways["trace"]["seconds"] / ways[way]["seconds"] for at, ways in own.items()}

    ratio = times("floor")
    found = worst("time of a trace, as a multiple of the floor", ratio, " times", at_most=MOST_OF_FLOOR)
    name = f"time of a trace of {REAL[0]} at batch {REAL[1]}, as a multiple of the floor"
    found += worst(name, {at: value for at, value in ratio.items() if at == REAL}, " times", at_most=MOST_OF_REAL)
    for way in READERS[1:]:
        faster = {at: 1 / value for at, value in times(way).items()}
        found += worst(f"speed of a trace, as a multiple of {way}", faster, " times", at_least=1)
    for way in READERS[1:]:
        for (model, _), value in times(way, given=True).items():
            own = traced[model, 0]["trace"]["tokens_per_second"]
            shown = f"{1 / value:.3g} times; {own:,.0f} positions a second are read"
            name = f"speed of reading given texts, {model}, as a multiple of {way}"
            found.append(goal(name, 1 / value, at_least=1, shown=shown))
    memory = {
        at: ways["trace"]["peak_mb"] - ways["decode"]["peak_mb"] for at, ways in traced.items() if "decode" in ways
    }
    found += worst("peak memory of a trace above plain decoding, MB", memory, " MB", at_most=MOST_MB)
    held = [row for row in rows if "top1_differences" in row]
    wrong, ties = (sum(row[key] for row in held) for key in ("top1_differences", "ties"))
    missing = sum("top1_differences" not in row for row in rows if row["way"] == "trace")
    shown = f"{wrong:,}; {ties:,} ties" + (f"; {missing} cells of traces were not compared" if missing else "")
    name = "top-1 tokens that differ from the plain way's, ties within rounding apart"
    return [*found, goal(name, wrong if held and not missing else np.inf, at_most=0, shown=shown)]


def main() -> None:
    """The command line."""
    asked = options(__doc__, "trace_speed").parse_args()
    if sys.platform != "linux":
        sys.exit("memory is measured through /proc, so this check runs on Linux only")
    head, rows = headed("trace_speed", "numpy", depends=(*TRACES, "checks/peers", "checks/given.py")), list[Row]()
    pins = RUNNER.with_name(f"{PEER}.txt").read_text().split()
    head["versions"] |= {PEER: next(pin.split("==")[1] for pin in pins if pin.startswith(f"{PEER}=="))}
    head["machine"]["threads"] = THREADS
    for model, cells in CELLS.items():
        tokenizer = eelib.load_model(model, device="cpu").tokenizer
        head["models"][model] = weights_hash(Path(path_of(model)))
        with ExitStack() as stack:
            processes = dict[str, subprocess.Popen[str]]()
            for way in WAYS:
                try:
                    processes[way] = stack.enter_context(started(way, model))
                except RuntimeError as error:  # its environment could not be made
                    print(f"{way} is left out: {error}", flush=True)
            requests = [
                prompts(tokenizer, number) | {"given": False, "batch": batch, "new_tokens": new}
                for batch, (number, new) in cells.items()
            ]
            if texts := texts_of(tokenizer, GIVEN[model]) if model in GIVEN else []:
                read = {"ids": tokenizer(texts)["input_ids"], "texts": texts}
                requests.append(read | {"given": True, "batch": 0, "new_tokens": 0})
            for request in requests:
                tokens = sum(len(ids) - 1 if request["given"] else request["new_tokens"] for ids in request["ids"])
                common = {"model": model, "batch": request["batch"], "tokens": tokens}
                ways = {way: one for way, one in processes.items() if way in READERS or not request["given"]}
                rows += cell(ways, common, request)
    finish(asked.output, head, goals(rows), repeats=REPEATS, rows=rows)
