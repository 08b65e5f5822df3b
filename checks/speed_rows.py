"""From single measurements of `checks.speed` to the rows that are kept: floor, ratios, memory, top-1s compared."""

from pathlib import Path

import numpy as np
import torch

from eelib.common.tolerances import TOLERANCES

from .speed_shapes import Shape

REFERENCE = "plain, step by step"
TIE = TOLERANCES[torch.float32].tie


def file_of(results: Path, shape: Shape, batch: int, way: str) -> Path:
    """Where a way's tokens and top-1s of a cell are kept."""
    return results / f"{shape.name}-{batch}-{way.replace(', ', '-').replace(' ', '-')}.npz"


def cell_rows(shape: Shape, batch: int, measured: dict[str, list[dict]], results: Path) -> list[dict]:
    """The rows of one cell: one per way, and the floor. `measured` is way -> one answer per repeat."""
    sequences, new_tokens = shape.plan[batch]
    tokens = sequences * new_tokens
    common = {
        "shape": shape.name,
        "layers": shape.layers,
        "width": shape.width,
        "vocabulary": shape.vocabulary,
        "batch": batch,
        "sequences": sequences,
        "prompt_tokens": shape.prompt_tokens,
        "tokens": tokens,
    }
    good = {way: [answer for answer in answers if "seconds" in answer] for way, answers in measured.items()}
    seconds = {way: [round(answer["seconds"], 6) for answer in answers] for way, answers in good.items() if answers}
    if "decode" in seconds and "head" in seconds:
        seconds["floor"] = [round(a + b, 6) for a, b in zip(seconds["decode"], seconds["head"])]
    peaks = {way: max(answer["peak_mb"] for answer in answers) for way, answers in good.items() if answers}
    rows = []
    for way in ("floor", *measured):
        if way == "floor" and way not in seconds:
            continue
        row = common | {
            "way": way,
            "seconds": seconds.get(way, []),
            "tokens_per_second": None,
            "peak_mb": peaks.get(way),
            "loaded_mb": None,
            "peak_above_decode_mb": None,
            "ratio_to_floor": None,
            "top1_differences": None,
            "ties": None,
            "not_compared": None,
            "note": "",
        }
        if way not in seconds:
            row["note"] = measured[way][-1]["error"]
        else:
            best = best_seconds(seconds, way)
            row["tokens_per_second"] = round(tokens / best, 2)
            if "floor" in seconds:
                row["ratio_to_floor"] = round(best / best_seconds(seconds, "floor"), 4)
            if way != "floor":
                row["loaded_mb"] = good[way][0]["loaded_mb"]
                if "decode" in peaks:
                    row["peak_above_decode_mb"] = round(peaks[way] - peaks["decode"], 1)
            row |= compared(file_of(results, shape, batch, REFERENCE), file_of(results, shape, batch, way))
        rows.append(row)
    return rows


def best_seconds(seconds: dict[str, list[float]], way: str) -> float:
    """The best of the repeats; the floor is the best of each of its two parts."""
    return min(seconds["decode"]) + min(seconds["head"]) if way == "floor" else min(seconds[way])


def compared(reference: Path, other: Path) -> dict[str, int | None]:
    """Differences of top-1s from the reference, position by position until an output takes another path.

    `top1_differences` counts those that no tie explains, `ties` those where the two top logits are within `TIE`, and
    `not_compared` the positions after a tie sent an output on another path. Ways without top-1s compare their tokens.
    """
    if not reference.exists() or not other.exists():
        return {}
    with np.load(reference) as expected, np.load(other) as found:
        if "tokens" not in found:
            return {}
        same = expected["tokens"] == found["tokens"]  # [sequences, new]
        before = np.cumprod(np.concatenate([np.ones_like(same[:, :1]), same[:, :-1]], axis=1), axis=1).astype(bool)
        if "top1" in found:
            wrong = (expected["top1"] != found["top1"]) & before[..., None]
            close = expected["gap"] < TIE
        else:
            wrong, close = ~same & before, expected["gap"][..., -1] < TIE
        return {
            "top1_differences": int((wrong & ~close).sum()),
            "ties": int((wrong & close).sum()),
            "not_compared": int((~before).sum()),
        }
