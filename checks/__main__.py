"""Run several checks, one after the other: `python -m checks bench` or `measure`; one: `python -m checks.NAME`."""

import argparse
import subprocess
import sys

BENCH = ("speed", "exits", "lens")
MEASURE = ("families", "crashes", "many_prompts", "bad_input", "reproducible", "joint_memory", "coverage", "statistics")


def main() -> None:
    """Go on after a check that fails; end with status 1 where one did, and list what changed in data/checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=["bench", "measure"])
    failed = []
    for name in {"bench": BENCH, "measure": MEASURE}[parser.parse_args().which]:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"checks.{name}"], check=False).returncode:
            failed.append(name)
    subprocess.run(["git", "status", "--short", "--", "data/checks"], check=False)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
