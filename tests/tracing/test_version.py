"""What a trace holds, against a stored digest of a tiny model's trace: who changes it has to raise TRACE_VERSION.

Run as a program, it stores the digest anew.
"""

import hashlib
import json
import tempfile
from pathlib import Path

import families
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import eelib
from checks.tiny_texts import tokenizer_for
from eelib.models.model import Model, prepare
from eelib.tracing.plan import TRACE_VERSION

STORED = Path(__file__).with_name("trace_digest.json")
TASK = eelib.Task.from_prompts(["The small dog", "over the hill 😀"], references=[["ran over"], []])
CHANGED = (
    "what a trace holds has changed: raise TRACE_VERSION in eelib/tracing/plan.py, so that traces are made again, "
    f"and store the new digest: PYTHONPATH=.:tests python {STORED.parent.name}/{Path(__file__).name}"
)


def tiny() -> Model:
    """A llama whose weights no generator of random numbers decides on."""
    network = families.build("llama")
    with torch.no_grad():
        for number, weights in enumerate(network.parameters(), 1):
            drawn = torch.sin(number * torch.arange(weights.numel(), dtype=torch.float64) ** 2).view_as(weights) * 0.4
            weights.copy_(drawn + (weights.ndim == 1))
    return prepare(network, tokenizer_for("causal"), "tiny", "causal")


def column_digest(column: pa.ChunkedArray) -> list:
    """The type; then, of real numbers, their mean, weighted by place, NaN being 0; of others a hash."""
    flat = column.combine_chunks()
    flat = flat.flatten() if pa.types.is_fixed_size_list(flat.type) else flat
    if not pa.types.is_floating(flat.type):
        return [str(column.type), hashlib.sha256(json.dumps(flat.to_pylist()).encode()).hexdigest()[:16]]
    values = np.nan_to_num(flat.to_numpy(zero_copy_only=False).astype(np.float64))
    return [str(column.type), float(values @ np.linspace(0.5, 1.5, len(values))) / len(values)]


def digest(folder: Path) -> dict:
    """{"file column": its digest} of a decoded trace with sites and pairs, and of one of given texts."""
    found: dict = {}
    for kind in ("decoded", "given"):
        options = {"folder": folder, "progress": False, "sites": 1, "pairs": 1, "given": kind == "given"}
        made = eelib.trace(tiny(), TASK, 3, batch_size=2, **options)
        for file in sorted(made.folder.glob("*.parquet")):
            table = pq.read_table(file)
            found |= {f"{kind} {file.stem} {name}": column_digest(table[name]) for name in table.column_names}
    return found


def test_a_change_of_what_a_trace_holds_raises_the_version(tmp_path):
    """Whole numbers and texts exactly; real numbers but for rounding, which differs from machine to machine."""
    stored, found = json.loads(STORED.read_text()), digest(tmp_path)
    assert stored["version"] == TRACE_VERSION, "store the digest of the new version"
    assert found.keys() == stored["columns"].keys(), CHANGED
    for column, (kind, value) in stored["columns"].items():
        wanted = value if isinstance(value, str) else pytest.approx(value, 1e-3, 1e-5)
        assert found[column] == [kind, wanted], f"{column}: {CHANGED}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        columns = digest(Path(scratch))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(column)}" for name, column in columns.items())
    STORED.write_text(f'{{"version": {TRACE_VERSION}, "columns": {{\n{lines}\n}}}}\n')
