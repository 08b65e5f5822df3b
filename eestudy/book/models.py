"""The models of a study file, switched on or not: what each needs, and how long it took or may take."""

import math
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from eestudy.book.notebooks import executed
from eestudy.book.study_file import StudyFile
from eestudy.book.study_schema import read_study
from eestudy.book.verdicts import Written
from eestudy.markup.markdown import table, text

GB_PER_SECOND = 2000  # of a GPU's memory: an A100 with 80 GB, by its data sheet
RESERVED_GB = 4  # of memory_gb, for what no step reads whole
BATCH = 16  # rows decoded together, where a model does not say


def models(study: StudyFile, results: Written) -> str:
    """A row for each model of the study file: notebooks, number format, memory, time."""
    content = read_study(study.path)
    shared, rows = content.get("parameters") or {}, []
    tasks = sorted({task for result in results.values() for task in result.get("traces", {})})
    for name, settings in content["models"].items():
        settings = settings or {}
        parameters = shared | (settings.get("parameters") or {})
        ran = measured(results, name.rpartition("/")[2]) if settings.get("enabled", True) else ""
        memory = f"{settings['memory_gb']} GB" if "memory_gb" in settings else "–"
        rows.append(
            [
                name,
                len(settings.get("notebooks", content["notebooks"])),
                parameters.get("dtype", "float32"),
                memory + (" of a GPU" if settings.get("gpu") else ""),
                ran or estimated(settings, parameters, tasks),
            ]
        )
    shown = table(
        ["Model", "Notebooks", "Number format", "Memory", "Time"],
        rows,
        "The models of the study file: what each needs.",
    )
    return f"{shown}\n{basis()}\n"


def clone(config: Path = Path("_config.yml")) -> str:
    """The commands that build the book, in a clone of the repository that the book's settings name, if they do."""
    url = (yaml.safe_load(config.read_text(encoding="utf-8")).get("repository") or {}).get("url")
    fetch = f"git clone --depth 1 {url} early-exit\ncd early-exit\n" if url else ""
    return f"In a clone of the repository:\n\n```bash\n{fetch}make book\n```\n"


def measured(results: Written, model: str) -> str:
    """How long a model's runs took: its traces, wherever they were made, and its notebooks."""
    found = {notebook: result for (name, notebook), result in results.items() if name == model}
    traces: dict[tuple, float] = {}
    for result in found.values():
        for part in (result, *result.get("beside", {}).values()):
            for made in part.get("traces", {}).values():
                key = (made["weights"], made["task_hash"], str(made["settings"]))
                traces[key] = max(traces.get(key, 0.0), made.get("seconds") or 0.0)
    times = [executed(model, notebook).get("metadata", {}).get("papermill", {}).get("duration") for notebook in found]
    if not found or None in times:
        return ""
    devices = ", ".join(sorted({result["manifest"]["device"] for result in found.values() if result.get("manifest")}))
    return (
        f"measured: {minutes(sum(times))} for notebooks on {devices}; their traces took {minutes(sum(traces.values()))}"
    )


def estimated(settings: dict[str, Any], parameters: dict[str, Any], tasks: list[str]) -> str:
    """How long decoding may take on a GPU: steps of the largest size, each reading weights, keys and values once.

    Nothing for a model whose number of sequences is not known here.
    """
    asked = [pattern.strip() for pattern in str(parameters.get("tasks", "")).split(",")]
    count = sum(fnmatchcase(task, pattern) for pattern in asked for task in tasks)
    limit, longest = parameters.get("limit", 0), parameters.get("max_new_tokens", 0)
    if not (settings.get("gpu") and count and limit and longest):
        return "–"
    steps = count * math.ceil(limit / (parameters.get("batch_size") or BATCH)) * longest
    seconds = steps * max(settings.get("memory_gb", RESERVED_GB) - RESERVED_GB, 0) / GB_PER_SECOND
    return f"estimated: from {minutes(seconds)} for traces"


def minutes(seconds: float) -> str:
    """A time in whole minutes, one at least."""
    return f"{max(math.ceil(seconds / 60), 1)} min"


def basis() -> str:
    """What the estimates rest on, in words."""
    return text(
        f"Estimated: the time to read weights, keys and values once for each step at {GB_PER_SECOND:,} GB/s, with full "
        "batches and every output as long as allowed. No run was timed for it; what the code around the model costs, "
        "and the notebooks, come on top."
    )
