"""The page on the engine: the goals of every check whose result is kept in data/checks, as fragments of the book."""

import json
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment

from eestudy.book.html import raw
from eestudy.book.sources import code_hash
from eestudy.book.study_file import BOOK

TEMPLATE = """
<div class="tex2jax_ignore mathjax_ignore">
<p>{% if goals %}<strong>{{ goals | selectattr("met") | list | length }} of {{ goals | length }} goals are met.</strong>
{% else %}The kept result is older than its goals. {% endif %}
 Measured {% if date %}on {{ date }} {% endif %}at commit {{ commit or recorded_in or "unknown" }}
on {{ machine.cpu or "a machine" }}
{%- if machine.cores %}, {{ machine.cores }} cores{% endif %}
{%- if machine.memory_gib %}, {{ machine.memory_gib }} GiB of memory{% endif %}
{%- if machine.gpu %}, {{ machine.gpu }}{% endif %}, by <code>{{ command }}</code>.
{% if unchanged %}The code that it depends on is still the same.
{%- else %}The code that it depends on has changed since.{% endif %}</p>
{% if goals %}
<table>
<caption>What <code>{{ check }}</code> was to reach, and what was measured.</caption>
<thead><tr><th>Goal</th><th>Measured</th><th>Bound</th><th>Verdict</th></tr></thead>
<tbody>
{% for goal in goals %}
<tr><td>{{ goal.goal }}</td><td>{{ goal.measured | number }}</td><td>{{ goal.bound | number }}</td>
<td>{{ "met" if goal.met else "not met" }}</td></tr>
{% endfor %}
</tbody>
</table>
{% endif %}
</div>"""
PAGE = BOOK / "engine.md"
PARTS_OF_STORE = ("crashes", "many_prompts", "reproducible")  # of the check `store`, each with a result of its own


def number(value: Any) -> str:
    """A number in at most four digits, or with commas where it is whole; a text as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def engine(folder: Path, page: Path = PAGE) -> dict[str, str]:
    """{name: Markdown} of the fragments that the page includes, from the results in a folder."""
    checks = re.findall(r"generated/engine_(\w+)\.md", page.read_text(encoding="utf-8"))
    return {f"engine_{check}": fragment(check, folder / f"{check}.json") for check in checks}


def fragment(check: str, kept: Path) -> str:
    """One check's goals with what was measured, when, where, and whether the code has changed since."""
    if not kept.exists():
        name = f"store {check}" if check in PARTS_OF_STORE else check
        return f"No result of this check is in `data/checks` yet: `python -m checks {name}` makes it.\n"
    report = json.loads(kept.read_text(encoding="utf-8"))
    unchanged = "code" in report and report["code"] == code_hash(report["depends"])
    environment = Environment(autoescape=True, trim_blocks=True)
    environment.filters["number"] = number
    given = {"goals": [], "machine": {}} | report | {"check": check, "unchanged": unchanged}
    return raw(environment.from_string(TEMPLATE).render(given))
