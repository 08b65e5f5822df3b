"""Wrong parameters of a study, noticed before anything is loaded or decoded; each is refused in one line."""

import os
from collections.abc import Mapping
from pathlib import Path

from transformers import AutoConfig

from eelib.common.errors import InputError
from eelib.common.files import data_folder, model_folder
from eelib.models.checkpoint import hub_answers, not_loaded, path_of
from eelib.models.lens_adapters import base_of
from eelib.tasks.task import Task, kind_named, task_names
from eestudy.parameters import ParameterError, Parameters, in_project


def check_beforehand(parameters: Parameters, tasks: Mapping[str, Task]) -> None:
    """InputError for wrong parameters that would otherwise be noticed only after everything has been decoded."""
    if not data_folder("papers").is_dir():
        raise InputError(f"there is no folder {data_folder('papers')}; EELIB_DATA is {os.environ.get('EELIB_DATA')!r}")
    folder = in_project(parameters.results_folder)
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise InputError(f"results_folder {str(folder)!r} can't be written: {there} is no folder that allows it")
    models_beside(parameters)
    check_lens(parameters)
    first, wording = next(iter(tasks)), parameters.get("wording", "auto")
    wanted, most = parameters.get("example_sequence", -1), len(tasks[first])
    if not -1 <= wanted < most:
        raise InputError(f"example_sequence {wanted} is not in {first}, the first task; allowed: -1 to {most - 1}")
    if wording != "auto" and not any(kind_named(task.kind).wordings for task in tasks.values()):
        raise InputError(f"wording {wording!r} is used by none of {', '.join(tasks)}; allowed: auto")


def check_lens(parameters: Parameters) -> None:
    """InputError, one line, where the parameter `lens` names no tuned lens."""
    lens = parameters.get("lens")
    try:
        found = not lens or base_of(path_of(lens))
    except InputError as error:
        raise InputError(f"parameter lens: {error}") from error
    if not found:
        raise InputError(f"parameter lens is {lens!r}; allowed is a folder with a tuned lens of {parameters.model!r}")


def models_beside(p: Parameters) -> list[tuple[str, str]]:
    """(model, tasks) of each entry of `beside`, as in "pocket-llama on translation/*; A on B,C"; not the page's own.

    Raises:
        ParameterError: one line, for an entry of another form, a model or a task that is not there, and two models
            that would have one name.
    """
    found: list[tuple[str, str]] = []
    for model, tasks in entries(p, "beside"):
        try:
            task_names(tasks)
        except InputError as error:
            raise ParameterError(f"parameter beside, {model}: {error}") from error
        check_model("beside", model)
        name = model_folder(model)
        if name in [model_folder(other) for other, _ in found]:
            raise ParameterError(f"parameter beside names {name} twice; give its tasks with commas")
        if name == model_folder(p.model) and Path(path_of(model)).resolve() != Path(path_of(p.model)).resolve():
            raise ParameterError(
                f"parameter beside: {model} has the name of {p.model}; give either folder another name, or leave it out"
            )
        found.append((model, tasks))
    return [(model, tasks) for model, tasks in found if model_folder(model) != model_folder(p.model)]


def check_model(parameter: str, name: str) -> None:
    """ParameterError, one line, for a parameter that names a model which is not found; no model is loaded."""
    try:
        path = path_of(name)
        if not Path(path).exists():  # a hub id
            AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=not hub_answers())
    except InputError as error:
        raise ParameterError(f"parameter {parameter}: {error}") from error
    except Exception as error:  # transformers raises many kinds; the reader needs one line
        raise ParameterError(f"parameter {parameter}: model {name!r}: {not_loaded(name, error)}") from error


def entries(p: Parameters, parameter: str, such: str = "MODEL on translation/*") -> list[tuple[str, str]]:
    """(what stands before "on", tasks) of each entry of a parameter, several with semicolons.

    Raises:
        ParameterError: one line, for an entry of another form than `such`.
    """
    found = []
    for entry in filter(None, (part.strip() for part in p.get(parameter, "").split(";"))):
        models, _, tasks = (part.strip() for part in entry.rpartition(" on "))
        if not models or (">" in such) != (">" in models):
            raise ParameterError(
                f"parameter {parameter} holds {entry!r}; allowed are entries such as {such!r}, several with "
                "semicolons, or nothing"
            )
        found.append((models, tasks))
    return found
