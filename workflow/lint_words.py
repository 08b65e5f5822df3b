"""Hold the repository's words: `python workflow/lint_words.py`.

Lists every identifier with an old name, and every sentence in Markdown, docstrings and comments with a word that is
always wrong there, both from `words.toml`, and ends with status 1 where there is one. Files that are exempt must need
it, so the list of exemptions only gets shorter.
"""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python_words(code: str) -> Iterator[tuple[int, str, bool]]:
    """(line, text, whether it is an identifier) of names, docstrings and comments."""
    for node in ast.walk(ast.parse(code)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
            yield line, ast.get_docstring(node) or "", False
        for field in ("name", "id", "attr", "arg"):
            if isinstance(name := getattr(node, field, None), str):
                yield line, name, True
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def words_in(path: Path) -> Iterator[tuple[int, str, bool]]:
    """The same of any file; a notebook's lines are counted from its first cell."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from python_words(text)
    elif path.suffix == ".md":
        yield from ((number, line, False) for number, line in enumerate(text.splitlines(), 1))
    else:
        for cell in json.loads(text)["cells"]:
            source = "".join(cell["source"])
            yield from python_words(source) if cell["cell_type"] == "code" else [(0, source, False)]


def faults(path: Path, names: re.Pattern[str], words: re.Pattern[str]) -> list[str]:
    """One line for each old name or wrong word in a file."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match.group()!r}"
        for line, text, identifier in words_in(path)
        if (match := (names.fullmatch if identifier else words.search)(text))
    ]
    return list(dict.fromkeys(found))


def main() -> None:
    """Print what is wrong."""
    rules = tomllib.loads((ROOT / "workflow" / "words.toml").read_text(encoding="utf-8"))
    names = re.compile("|".join(map(re.escape, rules["names"])))
    words = re.compile(rf"\b({'|'.join(rules['words'])})\b", re.IGNORECASE)
    listed = subprocess.check_output(["git", "ls-files", "*.py", "*.md", "*.ipynb"], cwd=ROOT, text=True)
    exempt, wrong = set(rules["exempt"]), list[str]()
    for name in listed.split():
        if name.startswith("data/") or name == "CHANGELOG.md" or not (ROOT / name).exists():
            continue
        found = faults(ROOT / name, names, words)
        if name in exempt:
            exempt.discard(name)
            wrong += [] if found else [f"{name} has no old word any more: take it off the list in workflow/words.toml"]
        else:
            wrong += found
    wrong += [f"{name} is exempt in workflow/words.toml, but is not there" for name in sorted(exempt)]
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
