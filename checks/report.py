"""What a check writes: when, where and with what it was run, then what it found."""

import json
import time
from pathlib import Path
from typing import Any

from eelib.common.machine import host, versions


def write_report(path: Path, command: str, packages: tuple[str, ...], **found: Any) -> None:
    """Write `found` as JSON below command, date, machine and versions, those of `packages` among them."""
    head = {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "machine": host(),
        "versions": versions(*packages),
    }
    path.write_text(json.dumps(head | found, indent=1) + "\n")
