"""The parameters of a notebook, checked before anything is loaded; a bad one is refused in one line."""

import ast
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from eelib.common.errors import InputError, StorageError
from eelib.models.checkpoint import DTYPES, resolve_device
from eelib.tasks.task import task_names

KINDS = {"int": int, "float": (int, float), "str": str, "bool": bool}


class ParameterError(InputError):
    """A parameter that can't be used; shown as one line, in Jupyter and in papermill's log.

    Where something unexpected is behind it, as in a checkpoint that transformers fails on, that comes first, whole.
    """

    def _render_traceback_(self) -> list[str]:
        lines, cause = [], self.__cause__
        while isinstance(cause, (InputError, StorageError)):
            cause = cause.__cause__
        if cause is not None:
            lines = "".join(traceback.format_exception(cause)).splitlines()
        return [*lines, f"ParameterError: {self}"]


@dataclass(frozen=True)
class Parameters(Mapping):
    """The checked parameters of one run, by name."""

    values: dict

    def __getitem__(self, name: str):
        return self.values[name]

    def __getattr__(self, name: str):
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    def __iter__(self):
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)


def check_parameters(
    choices: dict[str, tuple] | None = None, cells: list[str] | None = None, namespace: dict | None = None
) -> Parameters:
    """Check the notebook's parameters and return them; ParameterError names the bad one and what is allowed.

    Declared are the annotated assignments of the notebook's cells; injected are the plain assignments of papermill's
    cell, which starts with `# Parameters`. `choices` adds a tuple of allowed values for a parameter.
    """
    if cells is None:
        from IPython import get_ipython

        shell = get_ipython()
        cells, namespace = shell.user_ns["In"], shell.user_ns
    declared, injected = {}, []
    for cell in cells:
        try:
            body = ast.parse(cell).body
        except SyntaxError:  # cells with magics hold no parameters
            continue
        given = cell.lstrip().startswith("# Parameters")
        for node in body:
            if isinstance(node, ast.AnnAssign) and not given and node.value is not None:
                declared.setdefault(node.target.id, ast.unparse(node.annotation))
            elif isinstance(node, ast.Assign) and given:
                injected += [target.id for target in node.targets]
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
    check_values(values, choices or {})
    return Parameters(values)


def check_values(values: dict, choices: dict[str, tuple]) -> None:
    """The rules for the parameters that all notebooks share, and `choices`."""
    allowed = {"dtype": tuple(DTYPES)} | choices
    for name, options in allowed.items():
        if name in values and values[name] not in options:
            raise ParameterError(f"parameter {name} is {values[name]!r}; allowed: {', '.join(map(repr, options))}")
    for name, least in (("limit", 0), ("max_new_tokens", 1), ("batch_size", 0), ("seed", 0)):
        if name in values and values[name] < least:
            raise ParameterError(f"parameter {name} is {values[name]}; it must be {least} or more")
    if not values.get("model", "x").strip():
        raise ParameterError("parameter model is empty; give a shipped name, a local folder or a hub id")
    try:
        task_names(values.get("tasks", "*"))
        resolve_device(values.get("device", "auto"))
    except InputError as error:
        raise ParameterError(str(error)) from error
