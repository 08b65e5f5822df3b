"""How fast is a trace? Measured beside its floor, the plain way and the peers; `make bench` runs it.

Every way runs on the same checkpoints and prompts, in a process of its own with the same number of threads, the ways
taking turns; the best of the repeats counts and all of them are kept. Weights are random float32 numbers; the shipped
model has its own, which are bfloat16 numbers, and a trace multiplies those faster on CPUs that can.

Each measurement is kept when it is made, so a run that was stopped goes on where it was. It ends with status 1 where a
way's top-1s are not the plain way's, or a trace's could not be compared.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from eelib.common.files import data_folder
from eestudy.book.measured import code_of

from .report import headed, write_report
from .speed_rows import cell_rows, file_of
from .speed_shapes import QUICK, ROOT, SHAPES, Shape, checkpoint, prompts
from .speed_ways import WAYS
from .speed_workers import PEERS, Workers

CACHE = ROOT / "checks" / ".cache"
OUT = data_folder("checks", "speed.json")
LINEAR = "pocket-llama"
# (series, ways, sequences, new tokens of each, repeats); batch 64
LINEAR_RUNS = (
    ("more sequences", ("trace",), 64, 16, 3),
    ("more sequences", ("trace",), 640, 16, 3),
    ("more sequences", ("trace",), 6400, 16, 1),
    ("longer outputs", ("trace", "decode"), 64, 16, 2),
    ("longer outputs", ("trace", "decode"), 64, 64, 2),
    ("longer outputs", ("trace", "decode"), 64, 256, 1),
)


class Measurements:
    """Single measurements, one JSON line each; those of other code or settings stay in the file, unused."""

    def __init__(self, path: Path, threads: int) -> None:
        self.path, self.threads, self.code = path, threads, code_of("speed")
        self.known: dict[str, dict] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                    self.known[row["key"]] = row["answer"]
                except ValueError:
                    continue  # an empty line, or one that a killed run did not finish

    def get(self, workers: Workers, way: str, request: dict, repeat: int) -> dict:
        """The measurement, from the file or made now."""
        asked = {name: request[name] for name in ("sequences", "batch", "new_tokens")}
        key = json.dumps(
            [
                self.code,
                self.threads,
                workers.shape.name,
                workers.shape.prompt_tokens,
                Path(request["prompts"]).name,
                way,
                asked,
                repeat,
            ]
        )
        if key not in self.known or (
            request["out"] and not Path(request["out"]).exists() and "seconds" in self.known[key]
        ):
            began = time.monotonic()
            answer = workers.measure(way, request)
            taken = answer.get("error") or f"{answer['seconds']:8.2f} s, {answer['peak_mb']:7.0f} MB"
            print(
                f"{time.strftime('%H:%M:%S')} {workers.shape.name}, batch {request['batch']}, "
                f"{request['sequences']} x {request['new_tokens']} tokens, {way}, repeat {repeat + 1}: {taken} "
                f"({time.monotonic() - began:.0f} s in all)",
                flush=True,
            )
            self.known[key] = answer
            if "seconds" in answer:  # what failed is tried again next time
                with open(self.path, "a", encoding="utf-8") as file:
                    # A line of its own, whatever a killed run left at the end.
                    file.write("\n" + json.dumps({"key": key, "answer": answer}) + "\n")
        return self.known[key]


def measure_cell(
    shape: Shape, batch: int, ways: list[str], repeats: int, workers: Workers, kept: Measurements
) -> list[dict]:
    """All ways of one cell, taking turns."""
    sequences, new_tokens = shape.plan[batch]
    request = {
        "prompts": str(prompts(shape, CACHE, max(2, *(count for count, _ in shape.plan.values())))),
        "sequences": sequences,
        "batch": batch,
        "new_tokens": new_tokens,
        "out": None,
    }
    results = CACHE / "results" / kept.code
    results.mkdir(parents=True, exist_ok=True)
    measured: dict[str, list[dict]] = {way: [] for way in ways}
    for repeat in range(repeats):
        for way in ways:
            out = str(file_of(results, shape, batch, way)) if repeat == 0 else None
            measured[way].append(kept.get(workers, way, request | {"out": out}, repeat))
    return cell_rows(shape, batch, measured, results)


def measure_linearity(shape: Shape, batch: int, repeats: int, workers: Workers, kept: Measurements) -> list[dict]:
    """Time and memory as tokens grow: more sequences (prompts of 4 to 32 tokens), then longer outputs."""
    rows = []
    for series, ways, sequences, new_tokens, most in LINEAR_RUNS:
        varied = series == "more sequences"
        request = {
            "prompts": str(prompts(shape, CACHE, sequences, varied)),
            "sequences": sequences,
            "batch": batch,
            "new_tokens": new_tokens,
            "out": None,
        }
        measured = {
            way: [kept.get(workers, way, request, repeat) for repeat in range(min(most, repeats))] for way in ways
        }
        for way, answers in measured.items():
            seconds = [round(answer["seconds"], 6) for answer in answers if "seconds" in answer]
            tokens = sequences * new_tokens
            rows.append(
                {
                    "series": series,
                    "shape": shape.name,
                    "way": way,
                    "batch": batch,
                    "sequences": sequences,
                    "prompt_tokens": "4 to 32" if varied else shape.prompt_tokens,
                    "tokens": tokens,
                    "seconds": seconds,
                    "tokens_per_second": round(tokens / min(seconds), 2) if seconds else None,
                    "peak_mb": max((answer["peak_mb"] for answer in answers if "seconds" in answer), default=None),
                    "note": "" if seconds else answers[-1]["error"],
                }
            )
    return rows


def differing(rows: list[dict]) -> list[str]:
    """Ways whose top-1s differ from the plain way's, ties aside, and traces that were not compared with it."""
    found = []
    for row in rows:
        where = f"{row['shape']}, batch {row['batch']}, {row['way']}"
        if row["top1_differences"]:
            found.append(f"{where}: {row['top1_differences']} top-1s are not the plain way's")
        elif row["way"] == "trace" and row["top1_differences"] is None:
            found.append(f"{where}: not compared with the plain way" + (f" ({row['note']})" if row["note"] else ""))
    return found


def surroundings(threads: int, peers: list[str]) -> dict:
    """A report's head, with the threads and the peers' versions."""
    of_peers = {}
    for peer in peers:
        pins = (ROOT / "checks" / "peers" / f"{peer}.txt").read_text().splitlines()
        of_peers[peer] = next(line.split("==")[1] for line in pins if line.startswith(f"{peer}=="))
    head = headed("speed", "numpy", command=" ".join(["python -m checks.speed", *sys.argv[1:]]))
    return head | {"machine": head["machine"] | {"threads": threads}, "versions": head["versions"] | of_peers}


def arguments(command: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="python -m checks.speed", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"some of {', '.join(SHAPES)}; 'none' (all)")
    parser.add_argument("--batches", default="1,16,64", help="batch sizes (1,16,64)")
    parser.add_argument("--tokens", type=int, help="new tokens of each output, instead of each shape's own")
    parser.add_argument("--peers", default="all", help=f"all, none, or some of {', '.join(PEERS)} (all)")
    parser.add_argument("--repeats", type=int, default=3, help="how often each cell is measured (3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of every way (all cores)")
    parser.add_argument("--no-linearity", action="store_true", help="leave out 1 thousand to 100 thousand tokens")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, one repeat, to see that it runs")
    parser.add_argument("--out", type=Path, help=f"where the rows go ({OUT}; --quick: the cache)")
    asked = parser.parse_args(command)
    asked.shapes = [] if asked.shapes == "none" else [name for name in asked.shapes.split(",") if name]
    asked.peers = {"all": list(PEERS), "none": []}.get(asked.peers, asked.peers.split(","))
    for kind, names, allowed in (("shape", asked.shapes, SHAPES), ("peer", asked.peers, PEERS)):
        if unknown := [name for name in names if name not in allowed]:
            parser.error(f"{kind} {unknown[0]!r} is not known; allowed: {', '.join(allowed)}")
    try:
        asked.batches = [int(batch) for batch in asked.batches.split(",")]
    except ValueError:
        parser.error(f"batches {asked.batches!r} is not a list of numbers such as 1,16,64")
    known = sorted({batch for shape in SHAPES.values() for batch in shape.plan})
    if unknown := [batch for batch in asked.batches if batch not in known]:
        parser.error(f"batch {unknown[0]} is not one of {', '.join(map(str, known))}")
    for name in ("repeats", "threads", "tokens"):
        if (value := getattr(asked, name)) is not None and value < 1:
            parser.error(f"{name} {value} is not allowed; it must be at least 1")
    return asked


def planned(asked: argparse.Namespace) -> list[Shape]:
    """The shapes with the part of their plan that is asked for."""
    if asked.quick:
        return [QUICK]
    return [
        Shape(
            **vars(shape)
            | {
                "plan": {
                    batch: (count, asked.tokens or new)
                    for batch, (count, new) in shape.plan.items()
                    if batch in asked.batches
                }
            }
        )
        for name, shape in SHAPES.items()
        if name in asked.shapes
    ]


def main(command: list[str] | None = None) -> None:
    """Measure what is asked for."""
    if sys.platform != "linux":
        sys.exit("memory is measured through /proc, so this check runs on Linux only")
    asked = arguments(command)
    CACHE.mkdir(parents=True, exist_ok=True)
    repeats = 1 if asked.quick else asked.repeats
    out = asked.out or (CACHE / "quick.json" if asked.quick else OUT)
    kept = Measurements(CACHE / "speed.jsonl", asked.threads)
    ways = [*WAYS, *asked.peers]
    content = surroundings(asked.threads, asked.peers) | {
        "repeats": repeats,
        "finished": False,
        "rows": [],
        "linearity": [],
    }
    for shape in planned(asked):
        print(f"{shape.name}: {shape.size_mb:,.0f} MB of float32 weights", flush=True)
        workers = Workers(shape, checkpoint(shape, CACHE), CACHE, asked.threads)
        try:
            for batch in shape.plan:
                content["rows"] += measure_cell(shape, batch, ways, repeats, workers, kept)
                write_report(out, content)
            if shape.name == LINEAR and not asked.no_linearity:
                content["linearity"] = measure_linearity(shape, 64, repeats, workers, kept)
                write_report(out, content)
        finally:
            workers.close()
    whole = planned(asked) == list(SHAPES.values()) and asked.peers == list(PEERS) and not asked.no_linearity
    write_report(out, content | {"finished": whole})
    print(f"written to {out}")
    if wrong := differing(content["rows"]):
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    main()
