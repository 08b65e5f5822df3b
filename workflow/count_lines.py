"""Count the Python of each room: `python workflow/count_lines.py`. No docstring, comment or blank line is code."""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("eelib", "eestudy", "recipes", "checks", "workflow", "tests")
QUIET = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of(source: str) -> tuple[int, int]:
    """(lines of code, lines of docstrings)."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and ast.get_docstring(node) is not None:
            documented |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in QUIET
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - documented), len(documented)


def main() -> None:
    """Print code, docstrings, all lines and files of each room, and of each part."""
    print(f"{'room':26}{'code':>8}{'docs':>8}{'all':>8}{'files':>8}")
    for part in PARTS:
        rooms: dict[str, Counter[str]] = {}
        for path in sorted((ROOT / part).rglob("*.py")):
            if ".cache" in path.parts:  # environments of other programs
                continue
            source = path.read_text(encoding="utf-8")
            code, docs = lines_of(source)
            room = ".".join(path.relative_to(ROOT).parts[:-1][:2])
            for name in {room, part}:
                own = rooms.setdefault(name, Counter())
                own.update(code=code, docs=docs, all=source.count("\n"), files=1)
        for name, own in sorted(rooms.items()):
            print(f"{name:26}" + "".join(f"{own[what]:8,}" for what in ("code", "docs", "all", "files")))


if __name__ == "__main__":
    main()
