"""Whether a result in `data/checks` was measured on today's code."""

import re
from pathlib import Path
from typing import Any

from eestudy.book import sources
from eestudy.markup.markdown import text

TRACES = ("eelib/common", "eelib/models", "eelib/tasks", "eelib/lens", "eelib/tracing")
TINY = ("checks/tiny.py", "checks/tiny_texts.py")
# Check -> what it measures, and what measures it beside its own files, from the project's folder.
MEASURED = {
    "bad_input": ("eelib", "notebooks/saturation.ipynb", "checks/bad_setups.py"),
    "cluster": ("eelib", "notebooks", "workflow", "Snakefile", "Makefile", "checks/one_node.py", *TINY),
    "coverage": ("eelib/common", "eelib/exits/calibration.py"),
    "crashes": TRACES,
    "exits": (*TRACES, "eelib/exits", "eestudy/old/analysis/speed.py", "checks/speed_shapes.py"),
    "families": (*TRACES, "checks/one_family.py", *TINY),
    "given": TRACES,
    "joint_memory": ("eelib/common", "eelib/models", "recipes/training.py", "recipes/losses.py"),
    "kernel": ("eelib/lens",),
    "lens": ("eestudy/browser", "book/scripts/lens", "book/lens.md"),
    "many_prompts": (*TRACES, *TINY),
    "products": ("eelib/common", "eelib/models", "eelib/tracing"),
    "prompts": ("eelib/common", "eelib/models", "eelib/tasks", "data/prompts/development"),
    "reproducible": (*TRACES, "checks/crashes.py"),
    "speed": (*TRACES, "checks/peers"),
    "statistics": ("eelib/common", "eestudy/statistics.py"),
}


def places(check: str) -> tuple[str, ...]:
    """Patterns of the folders and files that a check measures, and of those that measure it."""
    return (*MEASURED[check], f"checks/{check}*.py")


def code_files(check: str) -> list[Path]:
    """All files of these places, but for what Python and Jupyter keep beside them."""
    root = sources.PACKAGE.parent
    found = [path for place in places(check) for path in root.glob(place)]
    files = {file for path in found for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()}
    return sorted(file for file in files if not re.search(r"/\.|/__pycache__/", f"/{file.relative_to(root)}"))


def code_of(check: str) -> str:
    """Hash of `code_files` as they are now."""
    return sources.hash_of(code_files(check))


def since(check: str, content: dict[str, Any]) -> str:
    """What a verdict on a check's kept result must add, in Markdown: nothing where the code is still the same.

    Older results have no hash of the code; `recorded_in` is the commit that put them into the repository.
    """
    if content.get("code") == code_of(check):
        return ""
    commit = content.get("commit") or content.get("recorded_in") or "unknown"
    return f" at commit {text(commit)} ({text(content.get('date') or 'no date')}); the code has changed since"
