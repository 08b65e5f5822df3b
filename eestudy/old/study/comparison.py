"""Several models on one page: which ones a parameter names, read before anything is decoded."""

import json
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from eelib.common.errors import InputError
from eelib.models.checkpoint import not_loaded, path_of
from eelib.models.folder import check_files
from eelib.models.lens_adapters import base_of
from eelib.tasks.task import task_names
from eestudy.old.study.study import Study
from eestudy.parameters import ParameterError


def models_on_tasks(parameter: str, text: str, example: str) -> list[tuple[str, str]]:
    """(what stands before " on ", tasks) of each entry, several with semicolons; ParameterError for another form."""
    found = []
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        models, _, tasks = (piece.strip() for piece in part.rpartition(" on "))
        if not models:
            raise ParameterError(
                f"parameter {parameter} holds {part!r}; allowed are entries such as {example!r}, "
                "several with semicolons, or nothing"
            )
        try:
            task_names(tasks)
        except InputError as error:
            raise ParameterError(f"parameter {parameter}, {models}: {error}") from error
        found.append((models, tasks))
    return found


def config_of(parameter: str, name: str) -> PretrainedConfig:
    """A checkpoint's config, read before anything is decoded; ParameterError where there is none."""
    try:
        path = path_of(name)
        if Path(path).is_dir():
            check_files(Path(path), name)
        path = path_of(base_of(path) or name)
        return AutoConfig.from_pretrained(path)
    except InputError as error:
        raise ParameterError(f"parameter {parameter}: {error}") from error
    except Exception as error:  # transformers raises many kinds; the reader needs one line
        raise ParameterError(f"parameter {parameter}: {not_loaded(name, error)}") from error


def where(studies: list[Study]) -> str:
    """Models, dtype, device and the latest date, for captions."""
    if not studies:
        return "No model"
    _, made, date = max((study.where for study in studies), key=lambda w: w.rsplit(", ", 1)[1]).rsplit(", ", 2)
    return f"{', '.join(study.model.name for study in studies)}; {made}, {date}"


def location(name: str) -> str:
    """Where a checkpoint lies: the same for all names of one folder. InputError as in `path_of`."""
    path = Path(path_of(name))
    return str(path.resolve()) if path.exists() else str(path)


# ---- a model before and after training

SHAPE = (  # what two checkpoints of one architecture have in common
    "architectures",
    "model_type",
    "num_hidden_layers",
    "num_decoder_layers",
    "decoder_layers",
    "hidden_size",
    "vocab_size",
    "num_labels",
)


def pairs_on_tasks(parameter: str, text: str) -> list[tuple[str, str, str]]:
    """(before, after, tasks) of each "before > after on tasks"; ParameterError for another form."""
    example, found = "pocket-t5 > pocket-t5-weighted on translation/*", []
    for models, tasks in models_on_tasks(parameter, text, example):
        before, _, after = (name.strip() for name in models.partition(">"))
        if not (before and after):
            raise ParameterError(
                f"parameter {parameter} holds {models!r} on {tasks!r}; allowed are entries such as "
                f"{example!r}, several with semicolons, or nothing"
            )
        found.append((before, after, tasks))
    return found


def check_pairs(parameter: str, pairs: list[tuple[str, str]]) -> None:
    """ParameterError unless both checkpoints of each pair are there and of one architecture; nothing is decoded."""
    for before, after in pairs:
        configs = config_of("model" if parameter == "after" else parameter, before), config_of(parameter, after)
        one, two = (
            {name: getattr(config, name, getattr(config.get_text_config(decoder=True), name, None)) for name in SHAPE}
            for config in configs
        )
        if one != two:
            differs = "; ".join(f"{name} {one[name]} and {two[name]}" for name in SHAPE if one[name] != two[name])
            raise ParameterError(
                f"parameter {parameter}: {before} and {after} differ in {differs}; allowed are two "
                "checkpoints of one architecture"
            )


def objective(name: str) -> str:
    """What a model was trained for, as its card says; empty for a checkpoint without a card."""
    try:
        return json.loads((Path(path_of(name)) / "card.json").read_text(encoding="utf-8")).get("objective", "")
    except (OSError, json.JSONDecodeError):
        return ""


def objectives(names: list[str]) -> str:
    """What the models were trained for, in words: a sentence for each objective, with the models that share it."""
    shared: dict[str, list[str]] = {}
    for name in names:
        alike = shared.setdefault(objective(name) or "what its makers say, since there is no card", [])
        alike.append(Path(name).name)
    told = [f"{', '.join(alike)}: {said}." for said, alike in shared.items()] or ["None is part of this run."]
    if any("i / sum j" in said for said in shared):
        told.append("Weights i / sum j: a layer counts in proportion to its number.")
    return " ".join(told)


def check_there(parameter: str, name: str) -> None:
    """ParameterError unless a parameter names a checkpoint that is there, or nothing."""
    if name.strip():
        config_of(parameter, name)
