"""The study file: which models run through which notebooks, with what, and what each page depends on."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eelib.common.data import data_folder
from eelib.common.errors import InputError
from eelib.common.sources import PACKAGE, modules_behind

BOOK, RESULTS = Path("book"), Path("results")


@dataclass(frozen=True)
class StudyFile:
    """What `study.yml` asks for. A model is a shipped name, a local folder or a hub id; its last part is its folder."""

    path: str
    models: dict[str, dict[str, Any]]  # by folder; enabled ones only
    notebooks: dict[str, dict[str, Any]]
    shared: dict[str, Any]
    threads: int

    @classmethod
    def load(cls, path: str | Path) -> "StudyFile":
        """Read and check a study; ValueError names the key that is wrong."""
        study = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        if unknown := set(study) - {"threads", "parameters", "notebooks", "models"}:
            raise InputError(f"{path}: unknown {sorted(unknown)}; known are threads, parameters, notebooks and models")
        models: dict[str, dict[str, Any]] = {}
        notebooks = {name: values or {} for name, values in study["notebooks"].items()}
        for name, settings in study["models"].items():
            settings = settings or {}
            if unknown := set(settings) - {"enabled", "memory_gb", "gpu", "notebooks", "parameters"}:
                known = "enabled, memory_gb, gpu, notebooks and parameters"
                raise InputError(f"{path}: model {name}: unknown {sorted(unknown)}; known are {known}")
            wanted = settings.get("notebooks", list(notebooks))
            if not isinstance(wanted, list) or not wanted or not set(wanted) <= set(notebooks):
                raise InputError(
                    f"{path}: model {name}: notebooks is {wanted!r}; allowed is a list of some of "
                    f"{', '.join(notebooks)}"
                )
            if settings.get("enabled", True):
                folder = Path(name).name
                if folder in models:
                    raise InputError(f"{path}: two models would share the folder results/{folder}")
                models[folder] = settings | {"model": name}
        for kind, entries in (("model", models), ("notebook", notebooks)):
            if not entries:
                raise InputError(f"{path}: no {kind} is enabled")
        return cls(str(path), models, notebooks, study.get("parameters") or {}, study.get("threads", 1))

    def notebooks_of(self, model: str) -> list[str]:
        """The notebooks that a model runs, in the order of the study: those that it names, or all."""
        wanted = self.models[model].get("notebooks", self.notebooks)
        return [notebook for notebook in self.notebooks if notebook in wanted]

    @property
    def runs(self) -> list[tuple[str, str]]:
        """Every (model, notebook) that is run."""
        return [(model, notebook) for model in self.models for notebook in self.notebooks_of(model)]

    def parameters(self, model: str, notebook: str) -> dict[str, Any]:
        """What papermill is told, by parameter name."""
        settings = self.models[model]
        own = settings.get("parameters") or {}
        folders = {"runs_folder": "runs", "results_folder": str(RESULTS)}
        return {"model": settings["model"]} | self.shared | own | self.notebooks[notebook] | folders

    def notebook_sources(self, model: str, notebook: str) -> list[str]:
        """Files that the page of a notebook on a model depends on: code, data, weights of all models that it names."""
        source = Path("notebooks") / f"{notebook}.ipynb"
        said = source.read_text(encoding="utf-8") + str(self.parameters(model, notebook))
        beside = {
            folder.name
            for folder in data_folder("models").glob("*")
            if re.search(rf"(?<![\w-]){re.escape(folder.name)}(?![\w-])", said)
        }
        folders = ("texts", "papers", "models/pocket-tagger", *(f"models/{name}" for name in sorted({model, *beside})))
        data = (file for folder in folders for file in data_folder(folder).rglob("*") if file.is_file())
        return [str(source), *modules(source), *sorted(map(str, data))]

    def page_sources(self) -> list[str]:
        """Files that the rest of the book depends on."""
        found = [
            *BOOK.glob("*.md"),
            *BOOK.glob("*.bib"),
            *BOOK.glob("_static/*"),
            *data_folder().glob("papers/*"),
            *data_folder().glob("checks/*.json"),
            *data_folder().rglob("card.json"),
            *modules(PACKAGE / "book" / "__main__.py"),
        ]
        return sorted({self.path, "_config.yml", *map(str, found)})


def modules(source: Path) -> list[str]:
    """Files of eelib behind a notebook or a module, relative to the project."""
    return [str(file.relative_to(PACKAGE.parent)) for file in modules_behind(source)]
