"""The models of a study file, switched on or not, and what each needs."""

from pathlib import Path

import yaml

from eestudy.book.study_file import StudyFile
from eestudy.book.study_schema import read_study
from eestudy.markup.markdown import table


def models(study: StudyFile) -> str:
    """A row for each model of the study file: whether it is on, notebooks, number format, memory."""
    content = read_study(study.path)
    shared, rows = content.get("parameters") or {}, []
    for name, settings in content["models"].items():
        settings = settings or {}
        parameters = shared | (settings.get("parameters") or {})
        memory = f"{settings['memory_gb']} GB" if "memory_gb" in settings else "–"
        memory += " of a GPU" if settings.get("gpu") else ""
        count, on = len(settings.get("notebooks", content["notebooks"])), settings.get("enabled", True)
        rows.append([name, "yes" if on else "no", count, parameters.get("dtype", "float32"), memory])
    return table(["Model", "On", "Notebooks", "Number format", "Memory"], rows, "The models of the study file.")


def clone(config: Path = Path("_config.yml")) -> str:
    """The commands that build the book, in a clone of the repository that the book's settings name, if they do."""
    url = (yaml.safe_load(config.read_text(encoding="utf-8")).get("repository") or {}).get("url")
    fetch = f"git clone --depth 1 {url} early-exit\ncd early-exit\n" if url else ""
    return f"In a clone of the repository:\n\n```bash\n{fetch}make book\n```\n"
