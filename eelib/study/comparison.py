"""Several models on one page: which ones a parameter names, read before anything is decoded."""

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from eelib.common.errors import InputError
from eelib.models.checkpoint import not_loaded, path_of
from eelib.study.parameters import ParameterError, Parameters
from eelib.study.study import Study
from eelib.tasks.task import task_names


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
        return AutoConfig.from_pretrained(path_of(name))
    except Exception as error:  # transformers raises many kinds; the reader needs one line
        raise ParameterError(f"parameter {parameter}: {not_loaded(name, error)}") from error


def models_beside(text: str) -> list[tuple[str, str]]:
    """(checkpoint, tasks) pairs of the parameter `beside`. ParameterError, one line, for what is none."""
    pairs = models_on_tasks("beside", text, "pocket-t5 on translation/*")
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ParameterError(f"parameter beside names {twice} twice; give all of its tasks in one pair, with commas")
    return pairs


def timed_studies(p: Parameters) -> list[Study]:
    """The main model's study, then one for each checkpoint of `beside` but the main one itself; all of them timed.

    Checkpoints that are not there are refused before anything is decoded.
    """
    try:
        main, pairs = location(p.model), models_beside(p.beside)
        pairs = [(name, tasks) for name, tasks in pairs if location(name) != main]
    except InputError as error:
        raise ParameterError(str(error)) from error
    for name, _ in pairs:
        config_of("beside", name)
    names = [Path(name).name for name in (p.model, *(name for name, _ in pairs))]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ParameterError(f"parameter beside names two models that would both be shown as {twice}")
    asked = {"timed": p.timed_sequences, "repeats": p.repeats}
    beside = (Study(p, **asked, model=name, tasks=tasks, template="") for name, tasks in pairs)  # after the main one
    return [Study(p, **asked), *beside]


def location(name: str) -> str:
    """Where a checkpoint lies: the same for all names of one folder. InputError as in `path_of`."""
    path = Path(path_of(name))
    return str(path.resolve()) if path.exists() else str(path)
