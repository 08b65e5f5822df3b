"""What the papers print, table by table: from where layers count, what does not fit, what is damaged or missing."""

import json
from typing import Any

from eelib.common.files import data_folder
from eestudy.claims import published, tables
from eestudy.markup.markdown import text

BASES = {0: "from 0", 1: "from 1", "unknown": "in some places it is not said from where"}


def papers() -> str:
    """A part for each paper: its version, then what was noted of each of its tables and figures, and of its text."""
    sources = json.loads((data_folder("papers") / "sources.json").read_text(encoding="utf-8"))
    pieces = []
    for paper, record in sources.items():
        pieces += [f"## {text(paper)}: {text(record['title'])}\n", version(record)]
        for name in tables():
            frame = published(name)
            if frame.attrs["source"]["paper"] != paper:
                continue
            where, heading = frame.attrs["source"], f"{paper}: {name.partition('-')[2].replace('-', ' ').capitalize()}"
            part = "" if where["section"].startswith("see") else f", section {where['section']}"
            said = f"{text(frame.attrs['title'])} ({text(where['table'] + part)}). {counted(frame)}".strip()
            pieces += [f"### {text(heading)}\n", f"{said}\n"]
            pieces.append("\n".join(f"- {text(note)}" for note in frame.attrs["notes"]) + "\n")
    return "\n".join(pieces)


def version(record: dict[str, Any]) -> str:
    """By whom a paper is, which version of it was read, and what is said of it as a whole."""
    authors = record["authors"][:1].upper() + record["authors"][1:]
    year = f", {record['year']:d}" if "year" in record else ""
    return f"{text(authors)}{year}. {text(record['where'])}. {text(record['note'])}\n"


def counted(frame: Any) -> str:
    """From where a table's layers count, and how many of its rows can't be read whole."""
    bases = {column["layer_base"] for column in frame.attrs["columns"].values()}
    bases |= set(frame["layer_base"]) if "layer_base" in frame else set()
    found = [words for base, words in BASES.items() if base in bases]
    said = f"Layers count {', '.join(found)}." if found else ""
    said = "From where layers count is not said." if bases & set(BASES) == {"unknown"} else said
    damaged = int((~frame["complete"].astype(bool)).sum()) if "complete" in frame else 0
    return f"{said} {damaged} of {len(frame)} rows on record can't be read to their end.".strip() if damaged else said
