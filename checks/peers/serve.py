"""A measuring process: loads a checkpoint once, then answers one request per line on stdin with one line of JSON.

Shared by this project's ways and by the peers, each in an environment of its own: it needs torch and numpy only.
"""

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

STATUS = Path("/proc/self/status")
MB = 1024.0  # /proc counts in kB


def serve(load: Callable[[str], Any], run: Callable[[Any, dict], Any]) -> None:
    """Load the checkpoint named on the command line, say so, and answer requests until stdin ends.

    A request is {prompts: file, sequences, batch, new_tokens, out: file or null}. `run` does the timed work, and
    returns arrays or a function that fetches them after the clock has stopped; they are saved under `out`. An array
    `seconds` replaces the clock's figure, where part of the work is not to be counted.
    The answer is {seconds, peak_mb} or {error}. What libraries print goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_grad_enabled(False)
    try:
        model = load(sys.argv[-1])
        touch(model)
    except Exception as error:
        answers.write(json.dumps({"error": one_line(error)}) + "\n")
        return
    settle()
    loaded = memory("VmRSS")
    answers.write(json.dumps({"loaded_mb": round(loaded, 1), "threads": torch.get_num_threads()}) + "\n")
    for line in sys.stdin:
        try:
            answer = measured(model, run, json.loads(line), loaded)
        except Exception as error:  # a peer that cannot do a cell is a result
            answer = {"error": one_line(error)}
        answers.write(json.dumps(answer) + "\n")


def measured(model: Any, run: Callable[[Any, dict], Any], request: dict, loaded: float) -> dict:
    """One timed run and the peak of its memory above that of the loaded model."""
    known = json.loads(Path(request["prompts"]).read_text())
    count = request["sequences"]
    request |= {"ids": known["ids"][:count], "texts": known["texts"][:count]}
    settle()
    reset_peak()
    began = time.perf_counter()
    result = run(model, request)
    seconds = time.perf_counter() - began
    peak = memory("VmHWM") - loaded
    arrays = result() if callable(result) else result
    seconds = float(arrays.pop("seconds", seconds))
    if request["out"]:
        kept: dict[str, Any] = {name: np.asarray(values) for name, values in arrays.items()}
        np.savez_compressed(request["out"], **kept)
    return {"seconds": seconds, "peak_mb": round(peak, 1)}


def batches(request: dict) -> list[torch.Tensor]:
    """Prompt token ids, [batch, prompt] each."""
    size, ids = request["batch"], request["ids"]
    return [torch.tensor(ids[start : start + size]) for start in range(0, len(ids), size)]


def touch(model: Any) -> None:
    """Read every weight once, so that weights mapped from the file count as the model's own memory.

    The network is the model itself, or what it wraps: `network` here, `_module` in nnsight.
    """
    network = getattr(model, "network", None) or getattr(model, "_module", None) or model
    for weight in network.parameters():
        weight.detach().sum()


def settle() -> None:
    """Give freed memory back, so that a peak is this run's own."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> None:
    """Let Linux count the peak of resident memory from here."""
    Path("/proc/self/clear_refs").write_text("5")


def memory(field: str) -> float:
    """A memory figure of this process in MB: VmRSS is now, VmHWM the peak."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) / MB


def one_line(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


# The readout of the peers that have none of their own: less than a trace gives, so no peer does needless work.

LOGITS_AT_ONCE = 4 << 20  # elements; about 16 MB in float32, a good size for the caches of a CPU


def top_readout(logits_of: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor, vocabulary: int) -> np.ndarray:
    """Top-1 of states [n, width], with top-10 probabilities and entropy computed as well; [n]."""
    rows = max(1, LOGITS_AT_ONCE // vocabulary)
    kept = []
    for part in states.split(rows):
        logs = logits_of(part).log_softmax(-1)
        top, ids = logs.topk(min(10, vocabulary))
        entropy = -(logs.exp() * logs).sum(-1)
        kept.append((ids, top.exp(), entropy))
    return torch.cat([ids[:, 0] for ids, _, _ in kept]).numpy()
