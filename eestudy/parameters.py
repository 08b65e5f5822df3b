"""The parameters of a notebook, checked before anything is loaded or decoded; a bad one is refused in one line."""

import ast
import json
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import IPython
from jinja2 import TemplateError
from transformers import AutoConfig

from eelib.common.errors import InputError, StorageError
from eelib.common.files import data_folder, model_folder, shipped_versions
from eelib.models.checkpoint import DTYPES, hub_answers, not_loaded, path_of, resolve_device
from eelib.models.lens_adapters import base_of
from eelib.models.lora import lora_base
from eelib.tasks.task import Task, kind_named, task_names

SAID = (OSError, json.JSONDecodeError, TemplateError)
KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}


class ParameterError(InputError):
    """A parameter that can't be used; shown as one line, in Jupyter and in papermill's log.

    The traceback of an unexpected cause, such as an error of transformers with a checkpoint, is shown before the line.
    For a missing or malformed file, or a template that fails, the line alone is shown, and gives the reason.
    """

    def _render_traceback_(self) -> list[str]:
        lines, cause = [], self.__cause__
        while isinstance(cause, (InputError, StorageError)):
            cause = cause.__cause__
        if cause is not None and not isinstance(cause, SAID):
            lines = "".join(traceback.format_exception(cause)).splitlines()
        return [*lines, f"ParameterError: {self}"]


@contextmanager
def as_parameter_error() -> Iterator[None]:
    """Turn an InputError or StorageError raised inside into a ParameterError with the same line."""
    try:
        yield
    except (InputError, StorageError) as error:
        raise ParameterError(str(error)) from error


class Parameters(dict[str, Any]):
    """The checked parameters of one run, by name: `p["limit"]` or `p.limit`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def check_parameters(
    choices: dict[str, tuple] | None = None, least: dict[str, int] | None = None, shares: tuple[str, ...] = ()
) -> Parameters:
    """Check the notebook's parameters and return them; ParameterError names the bad one and what is allowed.

    Declared are the annotated assignments of the notebook's cells; injected are the plain assignments of papermill's
    cell, which starts with `# Parameters`. `choices` has a tuple of allowed values for a parameter, `least` its
    smallest value: check_parameters(least={"repeats": 1}). `shares` names parameters that must lie between 0 and 1.
    """
    namespace = IPython.get_ipython().user_ns
    declared: dict[str, str] = {}
    injected: list[str] = []
    for cell in namespace["In"]:
        try:
            body = ast.parse(cell).body
        except SyntaxError:  # cells with magics hold no parameters
            continue
        given = cell.lstrip().startswith("# Parameters")
        for node in body:
            match node:
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()) if not given:
                    declared.setdefault(name, ast.unparse(node.annotation))
                case ast.Assign() if given:
                    injected += [target.id for target in node.targets if isinstance(target, ast.Name)]
    unknown = sorted(set(injected) - set(declared))
    if unknown:
        raise ParameterError(f"parameter {unknown[0]!r} is not known; allowed: {', '.join(declared)}")
    values = {name: namespace[name] for name in declared}
    for name, kind in declared.items():
        value = values[name]
        if kind not in KINDS:
            raise ParameterError(f"parameter {name} is declared as {kind}; allowed: {', '.join(KINDS)}")
        if not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise ParameterError(f"parameter {name} is {value!r}; it must be of type {kind}")
    check_values(values, choices or {}, least or {})
    for name in shares:
        if not 0 < values[name] < 1:
            raise ParameterError(f"parameter {name} is {values[name]}; it must lie between 0 and 1")
    return Parameters(values | trained_from(values.get("model", ""), shipped_versions(values)))


def trained_from(model: str, shipped: dict[str, str]) -> dict[str, str]:
    """Shipped versions without one `after` whose adapters are of another model that has this one's name only."""
    after = shipped.get("after")
    base = lora_base(data_folder("models", after)) if after else ""
    if not base or base == model or model_folder(base) != model_folder(model):
        return shipped
    print(f"{after} was trained from {base}, not from {model}; it is left out.")
    return shipped | {"after": ""}


def check_values(values: dict, choices: dict[str, tuple], least: dict[str, int]) -> None:
    """Check the parameters that all notebooks share, and a notebook's own `choices` and `least` values."""
    shared = {"dtype": ("auto", *DTYPES), "chat": ("auto", "yes", "no")}
    for name, options in (shared | choices).items():
        if name in values and values[name] not in options:
            raise ParameterError(f"parameter {name} is {values[name]!r}; allowed: {', '.join(map(repr, options))}")
    smallest_of = dict.fromkeys(("limit", "batch_size", "seed", "beside_limit"), 0)
    smallest_of |= dict.fromkeys(("max_new_tokens", "beside_new_tokens"), 1)
    for name, smallest in (smallest_of | least).items():
        if name in values and values[name] < smallest:
            raise ParameterError(f"parameter {name} is {values[name]}; it must be {smallest} or more")
    if not values.get("model", "x").strip():
        raise ParameterError("parameter model is empty; give a name, a local folder, a .gguf file or a hub id")
    with as_parameter_error():
        task_names(values.get("tasks", "*"))
        resolve_device(values.get("device", "auto"))


def in_project(folder: str) -> Path:
    """A folder's path. papermill runs at the project's root, JupyterLab in notebooks/: both mean the same folders."""
    return Path("..", folder) if Path.cwd().name == "notebooks" else Path(folder)


# ---- parameters of a study


def check_beforehand(parameters: Parameters, tasks: Mapping[str, Task]) -> None:
    """InputError for wrong parameters that would otherwise be noticed only after everything has been decoded."""
    if not data_folder("papers").is_dir():
        raise InputError(f"there is no folder {data_folder('papers')}; EELIB_DATA is {os.environ.get('EELIB_DATA')!r}")
    folder = in_project(parameters.results_folder)
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise InputError(f"results_folder {str(folder)!r} can't be written: {there} is no folder that allows it")
    models_beside(parameters)
    lens = parameters.get("lens")
    try:
        is_lens = not lens or base_of(path_of(lens))
    except InputError as error:
        raise InputError(f"parameter lens: {error}") from error
    if not is_lens:
        raise InputError(f"parameter lens is {lens!r}; allowed is a folder with a tuned lens of {parameters.model!r}")
    first, wording = next(iter(tasks)), parameters.get("wording", "auto")
    wanted, most = parameters.get("example_sequence", -1), len(tasks[first])
    if not -1 <= wanted < most:
        raise InputError(f"example_sequence {wanted} is not in {first}, the first task; allowed: -1 to {most - 1}")
    if wording != "auto" and not any(kind_named(task.kind).wordings for task in tasks.values()):
        raise InputError(f"wording {wording!r} is used by none of {', '.join(tasks)}; allowed: auto")


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
