"""How far a trace depends on what should not matter: the run, the batch size, the number of threads.

`python -m checks.reproducible [--limit 48]` traces the shipped pocket-llama in float32 and bfloat16 at several batch
sizes and writes data/checks/reproducible.json. It ends with status 1 where two equal runs differ in a byte, or where in
float32 a batch size changes a top-1 of any layer.
"""

import argparse
import json
import sys
import tempfile
import time
from itertools import takewhile
from pathlib import Path

import numpy as np

from checks.crashes import content
from checks.report import headed, write_report
from eelib.common.files import data_folder
from eelib.models.model import Model
from eelib.tracing.trace import Trace

RESULT = data_folder("checks", "reproducible.json")
TASK, NEW_TOKENS, SIZES = "translation/de-en", 32, (1, 4, 16)


def compared(one: Trace, other: Trace) -> dict:
    """Two traces of one task: outputs, top-1s of all layers and scalar readouts, as far as the outputs agree.

    After the first token that differs, two outputs answer different questions; nothing is compared from there on.
    """
    ids = [list(map(list, (g["token_id"] for _, g in t.tokens.groupby("sequence")))) for t in (one, other)]
    shared = [len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))) for a, b in zip(*ids)]
    rows = []
    for texts in ids:
        starts = np.cumsum([0, *map(len, texts)])[:-1]
        rows.append(np.concatenate([start + np.arange(n) for start, n in zip(starts, shared)]).astype(int))
    a, b = rows
    differs = one["top1"][a] != other["top1"][b]
    found = {
        "sequences": len(shared),
        "sequences_with_another_output": sum(x != y for x, y in zip(*ids)),
        "tokens_compared": len(a),
        "top1_compared": int(differs.size),
        "top1_differs": int(differs.sum()),
        "top1_differs_by_layer": differs.sum(0).tolist(),
        "largest_margin_of_a_top1_that_differs": float(one["margin"][a][differs].max()) if differs.any() else None,
    }
    scalars = [name for name in one.READOUTS if name not in ("top1", "topk_ids", "topk_probability")]
    gaps = {name: np.abs(one[name][a].astype(float) - other[name][b].astype(float)) for name in scalars}
    found["largest_difference"] = {n: float(np.nanmax(gap)) for n, gap in gaps.items() if np.isfinite(gap).any()}
    found["mean_difference"] = {n: float(np.nanmean(gap)) for n, gap in gaps.items() if np.isfinite(gap).any()}
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=48, help="sequences (48)")
    parser.add_argument("--output", type=Path, default=RESULT, help=f"where the JSON goes ({RESULT})")
    asked = parser.parse_args()
    import torch

    import eelib

    head = headed("reproducible", "pyarrow")
    began, task, batches, equal, threads = time.monotonic(), eelib.load_task(TASK, asked.limit), [], [], []
    with tempfile.TemporaryDirectory() as name:
        for dtype in ("float32", "bfloat16"):
            model, made = eelib.load_model("pocket-llama", dtype=dtype, device="cpu"), {}
            torch.set_num_threads(1)

            def make(folder: str, size: int, model: Model = model, dtype: str = dtype) -> Trace:
                return eelib.trace(model, task, NEW_TOKENS, Path(name, dtype, folder), size, 2, 2, progress=False)

            for size in SIZES:
                made[size] = make(f"batch-{size}", size)
                if size != SIZES[0]:
                    row = {"dtype": dtype, "batch_size": size, "against": SIZES[0]}
                    batches.append(row | compared(made[SIZES[0]], made[size]))
            last = content(made[SIZES[-1]].folder)
            again = content(make("again", SIZES[-1]).folder)
            equal.append({"dtype": dtype, "files": len(again), "same_bytes": again == last})
            torch.set_num_threads(2)
            two = make("threads", SIZES[-1])
            other = {n for n, data in content(two.folder).items() if n.endswith(".parquet") and data != last[n]}
            threads.append(
                {
                    "dtype": dtype,
                    "threads": 2,
                    "against": 1,
                    "files_that_differ": sorted(other),
                    **compared(made[SIZES[-1]], two),
                }
            )
    ok = all(row["same_bytes"] for row in equal) and not any(
        row["top1_differs"] or row["sequences_with_another_output"] for row in batches if row["dtype"] == "float32"
    )
    write_report(
        asked.output,
        head,
        seconds=round(time.monotonic() - began, 1),
        model="pocket-llama",
        task=TASK,
        max_new_tokens=NEW_TOKENS,
        equal_runs=equal,
        batch_sizes=batches,
        threads=threads,
        ok=ok,
    )
    for row in equal + batches + threads:
        print(json.dumps({k: v for k, v in row.items() if k not in ("mean_difference", "top1_differs_by_layer")}))
    sys.exit(not ok)


if __name__ == "__main__":
    main()
