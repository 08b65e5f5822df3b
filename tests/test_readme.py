"""The README's layout has a line for each file of eelib, and no other."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def listed() -> list[str]:
    """Files in the README's layout, relative to eelib, in its order."""
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("```\neelib/\n")[1].split("```")[0]
    room, found = "", []
    for line in tree.splitlines():
        indent, name = re.match(r"( +)(\S+) +\S", line).groups()
        if name.endswith("/"):
            room = name
        else:
            found.append(name if indent == "  " else room + name)
    return found


def present() -> dict[str, Path]:
    """Files of eelib that are not empty packages, relative to eelib."""
    files = {str(file.relative_to(ROOT / "eelib")): file for file in (ROOT / "eelib").rglob("*.py")}
    return {name: file for name, file in files.items() if not name.endswith("/__init__.py")}


def test_every_file_has_its_line():
    missing = {name: file for name, file in present().items() if name not in listed()}
    first = {n: ast.get_docstring(ast.parse(f.read_text(encoding="utf-8"))).split("\n")[0] for n, f in missing.items()}
    lines = [f"    {name.split('/', 1)[-1]:28}{text}" for name, text in sorted(first.items())]
    assert not missing, "add to README.md:\n" + "\n".join(lines)


def test_no_other_file_has_a_line_and_none_has_two():
    assert not set(listed()) - set(present())
    assert len(listed()) == len(set(listed()))


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "README.md", "CHANGELOG.md"])
def test_links_inside_the_project_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert not [target for target in targets if not (ROOT / target).exists()]
