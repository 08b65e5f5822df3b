"""How fast is a trace? Timed beside its floor, the plain way and the peers, all on the same checkpoints and prompts.

The floor is bare greedy decoding and bare products of all states with the head. Each way runs in a process of its own
(`checks/peers/run.py`) with the same number of threads, the ways taking turns; the best of the repeats counts. Weights
are random; those of trained models are bfloat16 numbers, and some CPUs multiply those faster. Each measurement is kept
when it is made, in checks/.cache, so that a run that was stopped goes on where it was.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from checks.report import TRACES, Goal, finish, goal, headed, options
from checks.shapes import TRAINED, Shape, checkpoint, prompts
from eelib.common.files import write_atomically
from eelib.common.tolerances import TOLERANCES
from eelib.models.checkpoint import path_of
from eelib.models.folder import weights_hash

PEERS = ("nnsight", "transformer-lens", "tuned-lens")
OURS = ("trace", "decode", "head", "plain")
RUNNER, CACHE = Path(__file__).parent / "peers" / "run.py", Path(__file__).parent / ".cache"
SHAPES = {
    "pocket-llama": Shape(12, 256, 8192, 688, 4, 4, plan={1: (2, 64), 16: (16, 64), 64: (64, 32)}),
    "12x256-128k": Shape(12, 256, 131072, 688, 4, 4, plan={1: (2, 32), 16: (16, 16), 64: (64, 8)}),
    "smollm2-135m-instruct": Shape(30, 576, 49152, 1536, 9, 3, True, plan={1: (1, 32), 16: (16, 16)}),
    "16x2048-128k": Shape(16, 2048, 131072, 8192, 32, 8, True, 4, plan={1: (1, 12), 16: (16, 4), 64: (64, 3)}),
}
QUICK = {"tiny": Shape(2, 32, 500, 64, 4, 2, prompt_tokens=5, plan={1: (2, 6), 4: (8, 5)})}
LONG = "pocket-llama"  # of which ever more tokens are made: (series, ways, sequences, new tokens of each, repeats)
LONG_RUNS: tuple[tuple[str, tuple[str, ...], int, int, int], ...] = (
    ("more sequences", ("trace",), 64, 16, 3),
    ("more sequences", ("trace",), 640, 16, 3),
    ("more sequences", ("trace",), 6400, 16, 1),
    ("longer outputs", ("trace", "decode"), 64, 16, 2),
    ("longer outputs", ("trace", "decode"), 64, 64, 2),
    ("longer outputs", ("trace", "decode"), 64, 256, 1),
)
PROCESS_MB = 1500  # a process beside its weights, which are mapped from the file and shared
TIE = TOLERANCES[torch.float32].tie
MOST_OF_FLOOR, LINEAR, MOST_MB = 1.2, 1.2, 256.0
REAL, MOST_OF_REAL = ("smollm2-135m-instruct", 16), 0.8  # the same goal for a real model at one batch size
LARGE, FASTER = 128_000, 5.0  # from this vocabulary on a trace has to be so many times as fast as the plain way
Row = dict[str, Any]


# ---- processes


def environment(peer: str) -> str:
    """The Python of a peer's own environment, made on demand from its pinned requirements.

    Raises:
        RuntimeError: it can't be made; pip's last line.
    """
    pins = RUNNER.with_name(f"{peer}.txt")
    folder = CACHE / "envs" / f"{peer}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:8]}"
    python = str(folder / "bin" / "python")
    if (folder / "done").exists():
        return python
    print(f"{peer}: making its environment, a minute or two", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, "-r", str(pins)]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["failed"])[-1][:300])
    (folder / "done").touch()
    return python


class Workers:
    """The processes of one shape, one for each way, started when it is first needed; they end with their `with`."""

    def __init__(self, name: str, shape: Shape, threads: int) -> None:
        self.folder, self.shape, self.threads = checkpoint(name, shape, CACHE), shape, threads
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.failed: dict[str, str] = {}

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for way in list(self.running):
            self.stop(way)

    def measure(self, way: str, request: Row) -> Row:
        """{seconds, peak_mb}, or {error}."""
        if way not in self.running and way not in self.failed:
            self.start(way, request)
        return {"error": self.failed[way]} if way in self.failed else self.ask(way, request)

    def start(self, way: str, request: Row) -> None:
        """Start a way's process, and let it run once with two prompts and two tokens, so that nothing is timed cold."""
        while self.running and psutil.virtual_memory().available / 2**20 < 2 * self.shape.size_mb + PROCESS_MB:
            self.stop(next(iter(self.running)))
        try:
            python = sys.executable if way in OURS else environment(way)
        except RuntimeError as error:
            self.failed[way] = f"its environment could not be made: {error}"
            return
        threads = {name: str(self.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        with open(CACHE / f"{self.folder.name}-{way}.log", "w") as log:
            self.running[way] = subprocess.Popen(
                [python, str(RUNNER), way, str(self.folder)],
                env=os.environ | threads | quiet | {"PYTHONPATH": str(RUNNER.parents[2])},
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        answer = self.answer(way)
        if "error" not in answer:
            answer = self.ask(way, request | {"sequences": 2, "batch": 2, "new_tokens": 2, "out": None})
        if "error" in answer:
            self.failed[way] = answer["error"]
            self.stop(way)

    def ask(self, way: str, request: Row) -> Row:
        """Send one request, wait for its answer."""
        pipe = self.running[way].stdin
        assert pipe
        try:
            pipe.write(json.dumps(request) + "\n")
            pipe.flush()
        except BrokenPipeError:
            return {"error": "its process ended"}
        return self.answer(way)

    def answer(self, way: str) -> Row:
        """One line from a process; what became of it where there is none."""
        pipe = self.running[way].stdout
        assert pipe
        line = pipe.readline()
        return json.loads(line) if line else {"error": f"its process ended with code {self.running[way].wait()}"}

    def stop(self, way: str) -> None:
        """End one process."""
        process = self.running.pop(way)
        assert process.stdin
        process.stdin.close()
        process.wait()


# ---- measurements


def measured(workers: Workers, way: str, request: Row, repeat: int, kept: Path) -> Row:
    """One measurement: the one that is kept, or one made now; what failed is tried again next time."""
    name = "-".join(str(request[key]) for key in ("series", "batch", "sequences", "new_tokens"))
    path = kept / workers.folder.name / f"{name}-{way}-{repeat}.json"
    out = path.with_suffix(".npz")
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    path.parent.mkdir(parents=True, exist_ok=True)
    answer = workers.measure(way, request | {"out": None if repeat or request["series"] else str(out)})
    print(f"{workers.folder.name}, {name.strip('-')}, {way}, repeat {repeat + 1}: {answer}", flush=True)
    if "seconds" in answer:
        answer |= {"out": str(out) if out.exists() else None}
        write_atomically(path, json.dumps(answer).encode())
    return answer


def cell(workers: Workers, ways: list[str], request: Row, repeats: int, kept: Path) -> list[Row]:
    """A row for each way on one shape and batch, the ways taking turns, and one for the floor where it is known."""
    answers: dict[str, list[Row]] = {way: [] for way in ways}
    for repeat, way in product(range(repeats), ways):
        answers[way].append(measured(workers, way, request, repeat, kept))
    good = {way: [answer for answer in found if "seconds" in answer] for way, found in answers.items()}
    seconds = {way: min(answer["seconds"] for answer in found) for way, found in good.items() if found}
    peaks = {way: max(answer["peak_mb"] for answer in found) for way, found in good.items() if found}
    if {"decode", "head"} <= set(seconds):
        seconds["floor"] = seconds["decode"] + seconds["head"]
    tokens = request["sequences"] * request["new_tokens"]
    common = {"shape": workers.folder.name, "vocabulary": workers.shape.vocabulary, "batch": request["batch"]}
    common |= {"sequences": request["sequences"], "tokens": tokens}
    reference = outputs(good.get("plain"))
    rows = []
    for way in (*ways, "floor"):
        if way in seconds:
            above = peaks[way] - peaks["decode"] if way in peaks and "decode" in peaks else None
            rows.append(
                common
                | {"way": way, "seconds": [answer["seconds"] for answer in good.get(way, ())], "note": ""}
                | {"tokens_per_second": tokens / seconds[way], "peak_mb": peaks.get(way), "peak_above_decode_mb": above}
                | {"ratio_to_floor": seconds[way] / seconds["floor"] if "floor" in seconds else None}
                | compared(reference, outputs(good.get(way)))
            )
        elif way != "floor":
            rows.append(common | {"way": way, "tokens_per_second": None, "note": answers[way][-1]["error"]})
    return rows


def outputs(answers: list[Row] | None) -> dict[str, np.ndarray]:
    """Tokens, top-1s and gaps of a way's first run; nothing where there are none."""
    if not answers or not answers[0]["out"]:
        return {}
    with np.load(answers[0]["out"]) as found:
        return dict(found)


def compared(expected: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> dict[str, int | None]:
    """Differences of top-1s from the plain way's, position by position until an output takes another path.

    `top1_differences` counts those that no tie explains, `ties` those where the two top logits are within `TIE`, and
    `not_compared` the positions after a tie sent an output on another path. Ways without top-1s compare their tokens.
    """
    if "tokens" not in found or "gap" not in expected:
        return dict.fromkeys(("top1_differences", "ties", "not_compared"))
    same = expected["tokens"] == found["tokens"]  # [sequences, new]
    before = np.cumprod(np.concatenate([np.ones_like(same[:, :1]), same[:, :-1]], axis=1), axis=1).astype(bool)
    if "top1" in found:
        wrong, close = (expected["top1"] != found["top1"]) & before[..., None], expected["gap"] < TIE
    else:
        wrong, close = ~same & before, expected["gap"][..., -1] < TIE
    counts = {"top1_differences": wrong & ~close, "ties": wrong & close, "not_compared": ~before}
    return {name: int(count.sum()) for name, count in counts.items()}


def long_runs(workers: Workers, repeats: int, kept: Path) -> list[Row]:
    """Time and memory as tokens grow: more sequences (prompts of 4 to 32 tokens), then longer outputs."""
    rows = []
    for series, ways, sequences, new_tokens, most in LONG_RUNS:
        file = prompts(workers.folder.name, workers.shape, CACHE, sequences, series == "more sequences")
        request = {
            "prompts": str(file),
            "sequences": sequences,
            "batch": 64,
            "new_tokens": new_tokens,
            "series": series,
        }
        for way in ways:
            answers = [measured(workers, way, request, repeat, kept) for repeat in range(min(most, repeats))]
            good = [answer for answer in answers if "seconds" in answer]
            row = {"series": series, "shape": LONG, "way": way, "batch": 64, "tokens": sequences * new_tokens}
            row |= {"tokens_per_second": None, "peak_mb": None}
            if good:
                row["tokens_per_second"] = row["tokens"] / min(answer["seconds"] for answer in good)
                row["peak_mb"] = max(answer["peak_mb"] for answer in good)
            rows.append(row)
    return rows


# ---- goals


def worst(name: str, values: dict[tuple[str, int], float], unit: str, **bounds: Any) -> list[Goal]:
    """A goal over cells, judged on the worst of them; none where nothing was measured."""
    if not values:
        return []
    where = (max if "at_most" in bounds else min)(values, key=values.__getitem__)
    met = sum(goal("", value, **bounds)["met"] for value in values.values())
    shown = f"{values[where]:.3g}{unit} ({where[0]}, batch {where[1]}); {met} of {len(values)} cells meet it"
    return [goal(name, values[where], shown=shown, **bounds)]


def goals(rows: list[Row], series: list[Row]) -> list[Goal]:
    """Every goal of the benchmark that what was measured can be held against."""
    cells: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        if row["tokens_per_second"]:
            cells.setdefault((row["shape"], row["batch"]), {})[row["way"]] = row
    traced = {at: ways for at, ways in cells.items() if "trace" in ways}
    ratio = {at: ways["trace"]["ratio_to_floor"] for at, ways in traced.items() if ways["trace"]["ratio_to_floor"]}
    found = worst("time of a trace, as a multiple of the floor", ratio, " times", at_most=MOST_OF_FLOOR)
    real = {at: value for at, value in ratio.items() if at == REAL}
    name = f"the same, of {REAL[0]} at batch {REAL[1]}, whose products of few rows are faster"
    found += worst(name, real, " times", at_most=MOST_OF_REAL)
    large = {row["shape"] for row in rows if row["vocabulary"] >= LARGE}
    for way in dict.fromkeys(row["way"] for row in rows if row["way"] not in ("trace", "floor", "decode", "head")):
        rates = {at: {name: row["tokens_per_second"] for name, row in ways.items()} for at, ways in traced.items()}
        ahead = {at: rate["trace"] / rate[way] for at, rate in rates.items() if way in rate}
        if way != "generate":
            found += worst(f"speed of a trace, as a multiple of {way}", ahead, " times", at_least=1)
        if way.startswith("plain"):
            alone = {at: value for at, value in ahead.items() if at[0] in large and at[1] == 1}
            name = f"the same, of {way} one sequence at a time, {LARGE // 1000}k tokens in the vocabulary"
            found += worst(name, alone, " times", at_least=FASTER)
    memory = {at: ways["trace"]["peak_above_decode_mb"] for at, ways in traced.items() if "decode" in ways}
    long = {(row["tokens"], row["way"]): row["peak_mb"] for row in series if row["series"] == "longer outputs"}
    for (tokens, way), peak in long.items():
        if way == "trace" and None not in (peak, long.get((tokens, "decode"))):
            memory[f"{LONG}, {tokens:,} tokens", 64] = peak - long[tokens, "decode"]
    found += worst("peak memory of a trace above plain decoding, MB", memory, " MB", at_most=MOST_MB)
    runs = sorted((row for row in series if row["series"] == "more sequences"), key=lambda row: row["tokens"])
    if len(runs) > 1 and all(row["tokens_per_second"] for row in runs):
        short, longest = runs[0], runs[-1]
        slower = short["tokens_per_second"] / longest["tokens_per_second"]
        shown = f"{slower:.3g} times, {short['tokens']:,} to {longest['tokens']:,} tokens"
        name = "time of a token in the longest run, as a multiple of that in the shortest"
        found.append(goal(name, slower, at_most=LINEAR, shown=shown))
        shown = f"{longest['peak_mb']:,.0f} MB; {short['peak_mb']:,.0f} MB in the shortest"
        found.append(goal("peak memory of the longest run, MB", longest["peak_mb"], at_most=MOST_MB, shown=shown))
    held = [row for row in rows if row.get("top1_differences") is not None and row["way"] != "plain, step by step"]
    wrong, ties = (sum(row[key] for row in held) for key in ("top1_differences", "ties"))
    missing = sum(row.get("top1_differences") is None for row in rows if row["way"] == "trace")
    shown = f"{wrong:,}; {ties:,} ties" + (f"; {missing} cells of traces were not compared" if missing else "")
    name = "top-1s that are not the plain way's, ties within rounding aside"
    return [*found, goal(name, wrong if held and not missing else np.inf, at_most=0, shown=shown)]


# ---- the command line


def arguments(command: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = options(__doc__, "trace_speed")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=[*SHAPES], help="what is timed (all)")
    parser.add_argument("--batches", nargs="+", type=int, choices=(1, 16, 64), default=[1, 16, 64], help="sizes (all)")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[*PEERS], help="beside which peers (all)")
    parser.add_argument("--repeats", type=int, default=3, help="how often each cell is measured (3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of every way (all cores)")
    parser.add_argument("--no-long-runs", action="store_true", help="leave out 1 thousand to 100 thousand tokens")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, one repeat, to see that it runs")
    asked = parser.parse_args(command)
    if min(asked.repeats, asked.threads) < 1:
        parser.error("repeats and threads must be at least 1")
    whole = set(asked.shapes) == set(SHAPES) and len(asked.batches) == 3 and not asked.no_long_runs and not asked.quick
    if not whole and asked.output == parser.get_default("output"):
        parser.error("a part of the benchmark needs an --output of its own")
    return asked


def main() -> None:
    """Measure what is asked for."""
    if sys.platform != "linux":
        sys.exit("memory is measured through /proc, so this check runs on Linux only")
    asked = arguments()
    repeats, shapes = (1, QUICK) if asked.quick else (asked.repeats, {name: SHAPES[name] for name in asked.shapes})
    pins = [line.split("==") for peer in asked.peers for line in RUNNER.with_name(f"{peer}.txt").open()]
    head = headed("trace_speed", "numpy", depends=(*TRACES, "checks/peers", "checks/shapes.py"))
    head["versions"] |= {pin[0]: pin[1].strip() for pin in pins if pin[0] in asked.peers}
    head["machine"]["threads"] = asked.threads
    head["models"] = {name: weights_hash(Path(path_of(name))) for name in shapes if name in TRAINED}
    kept = CACHE / "measured" / f"{head['code']}-{asked.threads}"
    rows: list[Row] = []
    series: list[Row] = []
    for name, shape in shapes.items():
        if not asked.quick:
            shape = replace(shape, plan={batch: cell for batch, cell in shape.plan.items() if batch in asked.batches})
        with Workers(name, shape, asked.threads) as workers:
            most = max(2, *(count for count, _ in shape.plan.values()))
            request = {"prompts": str(prompts(name, shape, CACHE, most)), "series": ""}
            for batch, (sequences, new) in shape.plan.items():
                one = request | {"batch": batch, "sequences": sequences, "new_tokens": new}
                rows += cell(workers, [*OURS, *asked.peers], one, repeats, kept)
            if name == LONG and not asked.no_long_runs:
                series = long_runs(workers, repeats, kept)
    finish(asked.output, head, goals(rows, series), repeats=repeats, rows=rows, linearity=series)
