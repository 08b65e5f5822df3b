"""Made content of speed.json: one cell, and runs with more tokens."""

WAYS = {
    "decode": 4.0,
    "head": 6.0,
    "floor": 10.0,
    "trace": 11.0,
    "generate": 5.0,
    "plain, step by step": 60.0,
    "plain, stacked": 20.0,
    "nnsight": 30.0,
    "transformer-lens": 40.0,
    "tuned-lens": 25.0,
}


def rows(
    shape: str = "12x256-128k", batch: int = 1, vocabulary: int = 131072, tokens: int = 100, **seconds: float
) -> list[dict]:
    """The rows of one cell; `seconds` replaces some of the times."""
    times = WAYS | {key.replace("_", " "): value for key, value in seconds.items()}
    return [
        {
            "shape": shape,
            "layers": 12,
            "width": 256,
            "vocabulary": vocabulary,
            "batch": batch,
            "sequences": batch,
            "prompt_tokens": 16,
            "tokens": tokens,
            "way": way,
            "seconds": [time, time * 1.1],
            "tokens_per_second": tokens / time,
            "peak_mb": 120.0,
            "loaded_mb": 500.0,
            "peak_above_decode_mb": 100.0,
            "ratio_to_floor": time / times["floor"],
            "top1_differences": 0,
            "ties": 1,
            "not_compared": 0,
            "note": "",
        }
        for way, time in times.items()
    ]


def linear(tokens: int, rate: float, peak: float, series: str = "more sequences", way: str = "trace") -> dict:
    """One row of the runs with more tokens."""
    return {
        "series": series,
        "shape": "pocket-llama",
        "way": way,
        "batch": 64,
        "sequences": 64,
        "prompt_tokens": 16,
        "tokens": tokens,
        "seconds": [tokens / rate],
        "tokens_per_second": rate,
        "peak_mb": peak,
        "note": "",
    }


def speed(cells: list[dict], linearity: tuple = ()) -> dict:
    """The content of speed.json."""
    return {
        "machine": {"cpu": "made", "cores": 2},
        "versions": {"torch": "2"},
        "date": "2026-01-02",
        "finished": True,
        "repeats": 2,
        "rows": cells,
        "linearity": list(linearity),
    }
