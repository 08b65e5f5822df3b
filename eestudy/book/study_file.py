"""The study file: which notebooks run on which models, with which parameters, and what each page depends on."""

import ast
import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eelib.common.errors import InputError
from eelib.common.files import PACKAGE, VERSIONS, data_folder, model_folder, read_json, shipped_versions
from eelib.common.values import check_name, first_line
from eestudy.book.study_schema import WHOLE, read_study
from eestudy.measured import files_in

BOOK, RESULTS, NOTEBOOKS = Path("book"), Path("results"), Path("notebooks")
GENERATED = BOOK / "generated"
LENS = "pocket-llama"  # the model that runs in the page `lens`
APPENDIX = ("scoreboard", "glossary", "methods", "papers", "cards", "engine", "api", "runs", "references")
HOST_GB = 16  # of a job on a GPU: weights of 7 billion parameters in 16 bits pass through it
OF_TRACES = (  # parameters that decide on traces, and where these lie
    "model",
    "tasks",
    "limit",
    "max_new_tokens",
    "batch_size",
    "dtype",
    "device",
    "chat",
    "wording",
    "runs_folder",
    "results_folder",
)
FOLDERS = {"runs_folder": "runs", "results_folder": str(RESULTS)}  # what notebooks write
LORA_CONFIG = "adapter_config.json"  # names the model that adapters are of
DRAFTS = ("block", "features")  # kinds of trained blocks that draft for a model
MEASURED = ("Snakefile", "checks", "eelib", "eestudy", "notebooks", "workflow")  # results of checks depend on it
APART = ("eestudy/book/", "eestudy/browser/")  # code that no page of results depends on


@dataclass(frozen=True)
class StudyFile:
    """The content of `study.yml`. A model is a shipped name, a local folder or file, or a hub id."""

    path: str
    models: dict[str, dict[str, Any]]  # by folder; enabled ones only
    notebooks: dict[str, dict[str, Any]]
    shared: dict[str, Any]
    threads: int  # of a job of a model that names none
    first: tuple[str, ...]  # notebooks that are started before the others

    @classmethod
    def load(cls, path: str | Path) -> "StudyFile":
        """Read and check a study; InputError names the key that is wrong."""
        study = read_study(path)
        models: dict[str, dict[str, Any]] = {}
        notebooks = {name: values or {} for name, values in study["notebooks"].items()}
        for name in notebooks:
            check_name(f"{path}: the name of notebook", name)
        known = ", ".join(notebooks)
        for name, settings in study["models"].items():
            folder = model_folder(name)
            check_name(f"{path}: model {name!r}: the last part of its name,", folder)
            settings = settings or {}
            wanted = settings.get("notebooks", list(notebooks))
            if not set(wanted) <= set(notebooks):
                raise InputError(f"{path}: model {name}: notebooks is {wanted!r}; allowed is a list of some of {known}")
            if settings.get("enabled", True):
                if folder in models:
                    raise InputError(f"{path}: two models would share the folder results/{folder}")
                models[folder] = (
                    settings | {key: int(settings[key]) for key in WHOLE if key in settings} | {"model": name}
                )
        if not models:
            raise InputError(f"{path}: no model is enabled")
        first = study.get("first") or []
        if not set(first) <= set(notebooks):
            raise InputError(f"{path}: first is {first!r}; allowed is a list of some of {known}")
        if lacking := [name for name in notebooks if not notebook_file(name).is_file()]:
            known = ", ".join(sorted(file.stem for file in NOTEBOOKS.glob("*.ipynb")))
            raise InputError(f"{path}: notebook {lacking[0]} is not known; there are {known or 'none'}")
        shared = study.get("parameters") or {}
        found = cls(str(path), models, notebooks, shared, int(study.get("threads", 1)), tuple(first))
        for model, notebook in found.runs:
            check_types(f"{path}: notebook {notebook}", found.parameters(model, notebook), notebook_file(notebook))
        return found

    def notebooks_of(self, model: str) -> list[str]:
        """The notebooks that run on a model, in the order of the study: those in its settings, else all."""
        wanted = self.models[model].get("notebooks", self.notebooks)
        return [notebook for notebook in self.notebooks if notebook in wanted]

    def host_memory(self, model: str) -> int:
        """GB of the host's memory for a job: `host_memory_gb`; else HOST_GB with a GPU, `memory_gb` without."""
        settings = self.models[model]
        return settings.get("host_memory_gb") or (HOST_GB if settings.get("gpu") else settings.get("memory_gb", 4))

    def asked(self, model: str) -> list[dict[str, Any]]:
        """The parameters on which the traces of a model's notebooks depend, given or by default, each set once."""
        found: list[dict[str, Any]] = []
        for notebook in self.notebooks_of(model):
            given = self.parameters(model, notebook)
            values = defaults(notebook_file(notebook)) | given
            one = {key: value for key, value in values.items() if key in OF_TRACES}
            found += [one | {"model": name} for name in (given["model"], *map(given.get, VERSIONS)) if name]
        return [values for number, values in enumerate(found) if values not in found[:number]]

    @property
    def runs(self) -> list[tuple[str, str]]:
        """Every (model, notebook) that is run."""
        return [(model, notebook) for model in self.models for notebook in self.notebooks_of(model)]

    def parameters(self, model: str, notebook: str) -> dict[str, Any]:
        """The parameters that papermill gives a notebook, by name."""
        settings = self.models[model]
        own = settings.get("parameters") or {}
        given = {"model": settings["model"]} | self.shared | own | self.notebooks[notebook] | FOLDERS
        return given | shipped_versions(defaults(notebook_file(notebook)) | given)

    def notebook_sources(self, model: str, notebook: str) -> list[str]:
        """Files that the page of a notebook on a model depends on: code, data, weights of all models that it names, and
        of the gates that were trained for them.
        """
        source = notebook_file(notebook)
        said = source.read_text(encoding="utf-8") + str(self.parameters(model, notebook))
        named = set(re.findall(r'measured(?:_on)?\(\\"(\w+)\\"', said))
        kept = [str(file) for file in data_folder("measured").glob("*.json") if file.stem in named]
        return [str(source), *code(), *data_behind(model, said, "papers", "tagged", "models/pocket-tagger"), *kept]

    def worker_sources(self, model: str) -> list[str]:
        """Files that the traces of a model depend on, among them texts and weights."""
        return [*code("eestudy/book/worker.py"), *data_behind(model, str(self.asked(model)))]

    def arguments(self, model: str, notebook: str) -> str:
        """`parameters` as papermill's arguments, quoted for a shell; a text that looks like a number stays a text."""
        options = (
            ("-r" if isinstance(value, str) else "-p", str(name), str(value))
            for name, value in self.parameters(model, notebook).items()
        )
        return shlex.join(part for option in options for part in option)

    def local_files(self, model: str, notebook: str) -> list[str]:
        """Path, size and time of every file in the local folders that parameters name: models, tasks.

        They are not among `notebook_sources`, since an older file that is moved there is a change, too, and any path is
        allowed here.
        """
        values = self.parameters(model, notebook)
        named = {value for key, value in values.items() if isinstance(value, str) and key not in FOLDERS}
        named |= {part.strip() for value in named for part in re.split(r"\son\s|[;,>]", value)}
        files = {file for name in named if name for file in files_below(name)}
        bases = {str(read_json(file).get("base_model_name_or_path", "")) for file in files if file.name == LORA_CONFIG}
        files |= {file for base in bases if base for file in files_below(base)}
        stats = {file: file.stat() for file in files}
        return sorted(f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats.items())

    def contents(self) -> dict[str, Any]:
        """The table of contents, as Jupyter Book reads it: a page per model and notebook between the prose pages."""
        pages = {
            model: [f"results/{model}/{notebook}" for notebook in self.notebooks_of(model)] for model in self.models
        }
        first, *others = pages
        captions = {f"The study: {first}": pages[first], "Use it": ["lens", "run_on_your_model"]}
        captions |= {f"Appendix: {model}": pages[model] for model in others}
        captions["Appendix"] = [*APPENDIX]
        parts = [
            {"caption": caption, "chapters": [{"file": page} for page in pages]} for caption, pages in captions.items()
        ]
        return {"format": "jb-book", "root": "intro", "parts": parts}

    @property
    def pages(self) -> list[str]:
        """Every page of the book in the order of its contents, without a suffix."""
        contents = self.contents()
        return [contents["root"], *(chapter["file"] for part in contents["parts"] for chapter in part["chapters"])]

    def page_sources(self) -> list[str]:
        """Files that the rest of the book depends on."""
        found = [
            *BOOK.glob("*.md"),
            *BOOK.glob("*.bib"),
            *BOOK.glob("_static/*"),
            *BOOK.glob("_templates/*"),
            *BOOK.glob("scripts/*/*"),
            *data_folder().glob("papers/*"),
            *data_folder().glob("measured/*.json"),
            *data_folder().rglob("card.json"),
            *Path().glob("CITATION.cff"),
            *(place for place in relative(MEASURED) if Path(place).exists()),
        ]
        return sorted({self.path, "_config.yml", *map(str, found)})

    @staticmethod
    def lens_sources() -> list[str]:
        """Files on which the data of the page with the lens depend: code, weights, example texts."""
        data = [*data_folder("models", LENS).glob("*"), *data_folder("texts", "translation").glob("*")]
        return [*code("eestudy/browser"), *sorted(map(str, data))]


def notebook_file(name: str) -> Path:
    """The path of the notebook with this name."""
    return NOTEBOOKS / f"{name}.ipynb"


def defaults(notebook: Path) -> dict[str, Any]:
    """The values in a notebook's cell of parameters; empty without such a cell. InputError if they can't be read."""
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8")).get("cells", [])
        tagged = ("".join(cell["source"]) for cell in cells if "parameters" in cell.get("metadata", {}).get("tags", ()))
        return {
            node.target.id: ast.literal_eval(node.value)
            for node in ast.parse(next(tagged, "")).body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value
        }
    except (ValueError, SyntaxError) as error:
        raise InputError(f"{notebook}: its parameters can't be read ({first_line(error)})") from None


def check_types(where: str, given: dict[str, Any], notebook: Path) -> None:
    """InputError where a parameter is not of its default's type: YAML reads yes as true, for example."""
    known = defaults(notebook)
    for key, value in given.items():
        kind = type(known.get(key, value))
        if type(value) is not kind and (kind, type(value)) != (float, int):
            hint = ", so write it in quotes" if kind is str else ""
            raise InputError(f"{where}: {key} is {value!r}; it must be of type {kind.__name__}{hint}")


def files_below(name: str) -> list[Path]:
    """The file of this name, or the files in the folder of this name without hidden ones; empty if there is neither."""
    try:
        path = Path(name).expanduser()
        inside = path.rglob("*") if path.is_dir() else [path]
        return [f for f in inside if f.is_file() and not any(p.startswith(".") for p in f.relative_to(path).parts)]
    except (OSError, RuntimeError):  # a text that no path can be, or in the home of nobody
        return []


def data_behind(model: str, said: str, *more: str) -> list[str]:
    """Files of texts, of the folders `more`, and of weights, gates and drafts of a model and all named in `said`."""
    beside = {
        folder.name
        for folder in data_folder("models").glob("*")
        if re.search(rf"(?<![\w-]){re.escape(folder.name)}(?![\w-])", said)
    }
    named = sorted({model, *beside})
    own = [f"{kind}/{name}" for kind in ("models", "gates") for name in named]
    own += [f"models/{name}-{kind}" for kind in DRAFTS for name in named]
    files = (file for folder in ("texts", *more, *own) for file in data_folder(folder).rglob("*") if file.is_file())
    return sorted(map(str, files))


def code(*more: str) -> list[str]:
    """Files of eelib and eestudy, relative to the project, without those in APART unless `more` names their place."""
    return [file for file in relative(["eelib", "eestudy"]) if not file.startswith(APART)] + relative(more)


def relative(places: Iterable[str]) -> list[str]:
    """`files_in` the places, relative to the project."""
    return [str(file.relative_to(PACKAGE.parent)) for file in files_in(places)]
