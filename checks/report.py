"""What a check writes: when, where, on which code and with what it was run, then what it found."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from eelib.common.files import PACKAGE, write_atomically
from eelib.common.machine import host, versions
from eestudy.book.measured import code_of, places

Head = dict[str, Any]


def write_report(path: Path, head: Head, **found: Any) -> None:
    """Write `found` as JSON below a head."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(head | found, indent=1, ensure_ascii=False) + "\n").encode())


def write_part(path: Path, name: str, head: Head, **found: Any) -> None:
    """Put `found` into the report that is there, as its part `name`, below a head of its own; all else stays."""
    write_report(path, json.loads(path.read_text(encoding="utf-8")), **{name: head | found})


def headed(check: str, *packages: str, command: str = "") -> Head:
    """When, where, on which code and with what a check is run; to be called before it runs."""
    return {
        "command": command or f"python -m checks.{check}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": host(),
        "versions": versions(*packages),
        "commit": commit(check),
        "code": code_of(check),
    }


def commit(check: str) -> str:
    """The commit at which a check is run, with "+changes" where its code is another; "unknown" without a repository."""
    root = PACKAGE.parent
    asked = (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", *places(check)])
    try:
        head, changed = (
            subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()
            for words in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+changes" if changed else head
