"""Hold the repository's words: `python workflow/lint_words.py`.

Lists every identifier with an old name, and every line of Markdown, docstring and comment with a word that is always
wrong there, both from `words.toml`, and ends with status 1 where there is one.
"""

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
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string, True
        elif token.type == tokenize.COMMENT or token.string.startswith('"""'):
            yield token.start[0], token.string, False


def words_in(path: Path) -> Iterator[tuple[int, str, bool]]:
    """The same of any file; the lines of a notebook are counted in each cell."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from python_words(text)
    elif path.suffix == ".md":
        yield from ((number, line, False) for number, line in enumerate(text.splitlines(), 1))
    else:
        for cell in json.loads(text)["cells"]:
            source = "".join(cell["source"])
            yield from python_words(source) if cell["cell_type"] == "code" else [(0, source, False)]


def main() -> None:
    """Print what is wrong."""
    rules = tomllib.loads((ROOT / "workflow" / "words.toml").read_text(encoding="utf-8"))
    names = re.compile("|".join(map(re.escape, rules["names"])))
    words = re.compile(rf"\b({'|'.join(rules['words'])})\b", re.IGNORECASE)
    listed = subprocess.check_output(["git", "ls-files", "*.py", "*.md", "*.ipynb"], cwd=ROOT, text=True)
    wrong = []
    for name in listed.split():
        if name.startswith("data/") or name == "CHANGELOG.md" or not (ROOT / name).exists():
            continue
        for line, text, identifier in words_in(ROOT / name):
            if match := (names.fullmatch if identifier else words.search)(text):
                wrong.append(f"{name}:{line}: {match.group()!r}")
    sys.exit("\n".join(dict.fromkeys(wrong)) or None)


if __name__ == "__main__":
    main()
