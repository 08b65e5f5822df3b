"""What a check writes: when, where and with what it was run, then what it found."""

import json
import time
from pathlib import Path
from typing import Any

from eelib.common.machine import host, versions


def write_report(path: Path, command: str, packages: tuple[str, ...], **found: Any) -> None:
    """Write `found` as JSON below command, date, machine and versions, those of `packages` among them."""
    path.write_text(json.dumps(headed(command, packages) | found, indent=1) + "\n")


def write_part(path: Path, name: str, command: str, packages: tuple[str, ...], **found: Any) -> None:
    """Put `found` into the report that is there, as its part `name`, below a head of its own; all else stays."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {name: headed(command, packages) | found}, indent=1) + "\n")


def headed(command: str, packages: tuple[str, ...]) -> dict[str, Any]:
    """When, where and with what a check is run."""
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "machine": host(),
        "versions": versions(*packages),
    }
