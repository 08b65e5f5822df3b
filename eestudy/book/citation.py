"""How to cite the study: CITATION.cff as BibTeX, and what the foot of each page says of where it comes from."""

import subprocess
from pathlib import Path
from typing import Any

import yaml


def read_citation(folder: Path) -> dict[str, Any]:
    """CITATION.cff of a project; empty where it has none."""
    path = folder / "CITATION.cff"
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}


def bibtex(citation: dict[str, Any], year: str, url: str = "", commit: str = "") -> str:
    """An entry of BibTeX. A DOI that there is not yet has its place in a comment above."""
    authors = " and ".join(name_of(author) for author in citation.get("authors", []))
    values = {
        "title": f"{{{citation.get('title', '')}}}",
        "author": authors,
        "year": year,
        "version": citation.get("version"),
        "note": f"commit {commit}" if commit else "",
        "doi": citation.get("doi"),
        "url": url,
    }
    lines = [f"  {key} = {{{value}}}" for key, value in values.items() if value]
    comment = "" if citation.get("doi") else "% no DOI yet: one in CITATION.cff is written here as doi = {...}\n"
    return "\n".join([f"{comment}@software{{early_exit_study,", *(f"{line}," for line in lines), "}\n"])


def name_of(author: dict[str, str]) -> str:
    """An author as BibTeX has it: a group's name is not taken apart."""
    if "family-names" in author:
        return f"{author['family-names']}, {author.get('given-names', '')}".removesuffix(", ")
    return f"{{{author['name']}}}"


def commit_of(folder: Path) -> str:
    """The commit that a working tree is at, with "+" where tracked files differ from it; "" where there is none."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
