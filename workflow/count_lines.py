"""Count lines of Python by folder: `python workflow/count_lines.py`. Docstrings, comments and blanks are no code."""

import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUIET = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of(source: str) -> Counter[str]:
    """Lines of code, of docstrings, and all."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(node) is not None:
            documented |= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    tokens = (token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in QUIET)
    code = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return Counter(code=len(code - documented), docstrings=len(documented), all=source.count("\n"), files=1)


def main() -> None:
    """Print each folder of each part, and the part itself."""
    rooms: dict[str, Counter[str]] = {}
    for name in subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split():
        if (ROOT / name).exists():
            counted = lines_of((ROOT / name).read_text(encoding="utf-8"))
            for room in {name.partition("/")[0], "/".join(name.split("/")[:-1][:2])}:
                rooms[room] = rooms.get(room, Counter()) + counted
    for room, counted in sorted(rooms.items()):
        print(f"{room:20}", *(f"{counted[what]:8,} {what}" for what in ("code", "docstrings", "all", "files")))


if __name__ == "__main__":
    main()
