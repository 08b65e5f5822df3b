"""The schema of a study file, and a reader that refuses a key that is there twice."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import fastjsonschema
import yaml

from eelib.common.errors import InputError
from eelib.common.values import first_line

LARGEST = 100_000  # workers, gigabytes, hours
OWN = ("model", "runs_folder", "results_folder")  # parameters that the study sets itself
WHOLE = ("memory_gb", "host_memory_gb", "gpu", "threads", "workers", "hours")  # settings of a model


def whole(least: int) -> dict[str, Any]:
    """The schema of a whole number; each `description` here says what is allowed, for messages."""
    allowed = f"a whole number, at least {least}, at most {LARGEST:,}"
    return {"type": "integer", "minimum": least, "maximum": LARGEST, "description": allowed}


NAMES = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
PARAMETERS = {
    "type": ["object", "null"],
    "description": f"a mapping of parameters, whose names are of letters, digits and _, and none of {', '.join(OWN)}",
    "propertyNames": {"pattern": rf"^(?!({'|'.join(OWN)})$)[A-Za-z_][A-Za-z0-9_]*$"},
    "additionalProperties": {
        "type": ["string", "number", "boolean"],
        "description": "a text, a number, true or false",
    },
}
REQUIRED = ["notebooks", "models"]
MODEL = {
    "type": ["object", "null"],
    "description": "a mapping of settings",
    "additionalProperties": False,
    "properties": {
        "enabled": {"type": "boolean", "description": "true or false"},
        **{key: whole(0 if key in ("gpu", "workers") else 1) for key in WHOLE},
        "partition": {
            "type": "string",
            "pattern": r"^[A-Za-z0-9_.,-]+$",
            "description": "a name of letters, digits and _ . -",
        },
        "notebooks": NAMES | {"minItems": 1, "description": "a list of names of notebooks, each once"},
        "parameters": PARAMETERS,
    },
}
SCHEMA = {
    "type": "object",
    "description": "a mapping with notebooks and models",
    "additionalProperties": False,
    "required": REQUIRED,
    "properties": {
        "threads": whole(1),
        "first": NAMES | {"type": ["array", "null"], "description": "a list of names of notebooks, each once"},
        "parameters": PARAMETERS,
        "notebooks": {
            "type": "object",
            "minProperties": 1,
            "description": "a mapping of at least one notebook to its parameters",
            "additionalProperties": PARAMETERS,
        },
        "models": {
            "type": "object",
            "minProperties": 1,
            "description": "a mapping of at least one model to its settings",
            "additionalProperties": MODEL,
        },
    },
}


class Loader(yaml.SafeLoader):
    """Loads YAML whose keys are texts, each there once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping; InputError where a key is not a text, or is there twice."""
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:merge":
                    continue
                at = f"line {key.start_mark.line + 1}: the key {short(key.value)}"
                if key.tag != "tag:yaml.org,2002:str":
                    raise InputError(f"{at} is not a text; a name such as a number stands in quotes")
                if key.value in seen:
                    raise InputError(f"{at} is there for the second time")
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """A number; InputError for one that YAML reads in base 8 or 60."""
        if re.match(r"[-+]?0[0-7_]|.*:", node.value):
            at = f"line {node.start_mark.line + 1}: {short(node.value)} has a leading 0 or a colon"
            raise InputError(f"{at}; allowed is a plain number, or a text in quotes")
        whole = node.tag == "tag:yaml.org,2002:int"
        return int(super().construct_yaml_int(node)) if whole else float(super().construct_yaml_float(node))


for kind in ("int", "float"):
    Loader.add_constructor(f"tag:yaml.org,2002:{kind}", Loader.construct_number)


def read_study(path: str | Path) -> dict[str, Any]:
    """The content of a study file, checked against the schema; InputError, one line, names the key that is wrong."""
    try:
        if not Path(path).is_file():
            raise InputError("there is no such file")
        study = yaml.load(Path(path).read_bytes(), Loader)  # made of yaml's safe one
        fastjsonschema.compile(SCHEMA, use_default=False)(study)
        return study
    except fastjsonschema.JsonSchemaValueException as problem:
        raise InputError(f"{path}: {message(problem, study)}") from None
    except OSError as problem:
        raise InputError(f"{path}: can't be read ({first_line(problem)})") from None
    except InputError as problem:
        raise InputError(f"{path}: {problem}") from None
    except yaml.MarkedYAMLError as problem:
        line = f"line {problem.problem_mark.line + 1}: " if problem.problem_mark else ""
        raise InputError(f"{path}: {line}{problem.problem or 'not YAML'}") from None
    except (yaml.YAMLError, ValueError) as problem:
        raise InputError(f"{path}: not YAML ({first_line(problem)})") from None
    except RecursionError:
        raise InputError(f"{path}: nested too deeply") from None


def message(error: fastjsonschema.JsonSchemaValueException, study: dict[str, Any]) -> str:
    """The error of a schema in words: where it is, the value there, and what is allowed."""
    value: Any = error.value
    where = (error.name or "").removeprefix("data").removeprefix(".")
    for group, kind in (("models", "model"), ("notebooks", "notebook")):
        inside = where.removeprefix(f"{group}.")
        if inside != where:  # a name may hold dots, so what is inside it is found by the names there are
            names = (name for name in study[group] if inside == name or inside.startswith(f"{name}."))
            name = max(names, key=len, default=inside)
            where = f"{kind} {name}{inside.removeprefix(name).replace('.', ': ', 1)}"
    where = where if where.isprintable() else repr(where)
    known = error.definition.get("properties")
    if error.rule == "additionalProperties" and known:
        unknown = sorted(set(value) - set(known))
        return f"{where + ': ' if where else ''}unknown {short(unknown)}; known are {', '.join(known)}"
    if error.rule == "required":
        return f"it has no {' and no '.join(key for key in REQUIRED if key not in value)}"
    return f"{where or 'it'} is {short(value)}; allowed is {error.definition.get('description', 'a text')}"


def short(value: object) -> str:
    """A value on one line, cut where it is long."""
    said = repr(value)
    return said if len(said) <= 80 else f"{said[:77]}..."
