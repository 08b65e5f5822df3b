"""The page on the engine: the goals of every check whose result is kept in data/measured, as fragments of the book."""

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment

from eelib.common.errors import InputError
from eestudy.book.sources import code_hash
from eestudy.book.study_file import BOOK
from eestudy.markup.markdown import raw
from eestudy.measured import FOLDER, measured, provenance

TEMPLATE = """
<div class="tex2jax_ignore mathjax_ignore">
<p><strong>{{ goals | selectattr("met") | list | length }} of {{ goals | length }} goals are met.</strong>
 Measured {{ where }} by <code>{{ command }}</code>.
{% if unchanged %}The code that it depends on is still the same.
{%- else %}The code that it depends on has changed since.{% endif %}{% if remark %} {{ remark }}{% endif %}</p>
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
</div>"""
PAGE = BOOK / "engine.md"
PARTS_OF_STORE = ("crashes", "many_prompts", "reproducible")  # of the check `store`, each with a result of its own


def number(value: Any) -> str:
    """A number in at most four digits, or with commas where it is whole; a text as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def engine(page: Path = PAGE) -> dict[str, str]:
    """{name: Markdown} of the fragments that the page includes, from the results in data/measured."""
    checks = re.findall(r"generated/engine_(\w+)\.md", page.read_text(encoding="utf-8"))
    return {f"engine_{check}": fragment(check) for check in checks}


def fragment(check: str) -> str:
    """One check's goals with what was measured, when, where, and whether the code has changed since."""
    try:
        report = measured(check)
    except InputError:
        name = f"store {check}" if check in PARTS_OF_STORE else check
        return f"No result of this check is in `data/{FOLDER}` yet: `python -m checks {name}` makes it.\n"
    unchanged = "code" in report and report["code"] == code_hash(report["depends"])
    environment = Environment(autoescape=True, trim_blocks=True)
    environment.filters["number"] = number
    given = report | {"check": check, "unchanged": unchanged, "where": provenance(report)}
    return raw(environment.from_string(TEMPLATE).render(given))
