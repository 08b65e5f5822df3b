"""Run a check, or several one after the other: `python -m checks NAME [options]`, `bench` or `measure`.

`python -m checks NAME --help` lists a check's options. `bench` is for a quiet machine; `measure` takes hours, and makes
all of data/measured but trainings, whose results name their recipes and the last commit that has them.
"""

import importlib
import subprocess
import sys
from pathlib import Path

SMALL = "checks/.cache/race.json"  # a part of the race, which does not replace the whole one
GROUPS = {
    "bench": [
        "lens",
        "trace_speed",
        "products",
        f"race --texts 6 --few 2 --repeats 1 --sizes 1 4 --dtypes float32 --output {SMALL}",
    ],
    "measure": [
        "lens",  # before anything else keeps the machine busy
        *("architectures", "store crashes", "store many_prompts", "store reproducible", "cluster", "coverage"),
        *("statistics", "arithmetic", "given", "dtypes", "trace_speed", "products"),
        *("race --predict --texts 8", "race --texts 8 --few 2 --repeats 5"),
    ],
}
ENTRIES = [
    file.stem
    for file in sorted(Path(__file__).parent.glob("*.py"))
    if not file.stem.startswith("__") and "\ndef main(" in file.read_text(encoding="utf-8")
]


def run_group(name: str) -> None:
    """Go on after a check that fails; end with status 1 where one did, and list what changed in data/measured."""
    failed = []
    for command in GROUPS[name]:
        print(f"== {command}", flush=True)
        if subprocess.run([sys.executable, "-m", "checks", *command.split()], check=False).returncode:
            failed.append(command)
    subprocess.run(["git", "status", "--short", "--", "data/measured"], check=False)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in GROUPS and not sys.argv[2:]:
        run_group(name)
    elif name in ENTRIES:
        sys.argv[:2] = [f"python -m checks {name}"]
        importlib.import_module(f"checks.{name}").main()
    else:
        words, allowed = " ".join(sys.argv[1:]) or "no name", ", ".join([*GROUPS, *ENTRIES])
        sys.exit(f"{words}: allowed are {allowed}; {' and '.join(GROUPS)} take no options")


if __name__ == "__main__":
    main()
