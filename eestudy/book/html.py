"""HTML of our own on a page that is written in Markdown."""

import re

from eestudy.markup.text import harmless


def raw(html: str) -> str:
    """HTML as Markdown keeps it untouched: in a fence that nothing in it ends, without what turns text around."""
    html = harmless(html)
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", html))])
    return f"{fence}{{raw}} html\n{html}\n{fence}\n"
