"""Measuring processes of `checks.speed`: one per way and shape, kept while memory allows; peers in environments of
their own.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from .speed_shapes import ROOT, Shape
from .speed_ways import WAYS

PEERS = ("nnsight", "transformer-lens", "tuned-lens")
RUNNERS = Path(__file__).parent / "peers"
PROCESS_MB = 1500  # a process beside its weights, which are mapped from the file and shared


def environment(peer: str, cache: Path) -> str:
    """The Python of a peer's own environment, made on demand from its pinned requirements.

    Raises RuntimeError with pip's last line where it cannot be made.
    """
    pins = RUNNERS / f"{peer}.txt"
    folder = cache / "envs" / f"{peer}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:8]}"
    python = folder / "bin" / "python"
    if (folder / "done").exists():
        return str(python)
    print(f"{peer}: making its environment, a minute or two", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # torch goes first: the version is pinned, and on most machines it is most of the download.
    torch = next(line for line in pins.read_text().splitlines() if line.startswith("torch=="))
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, torch], [*pip, "-r", str(pins)]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["failed"])[-1][:300])
    (folder / "done").touch()
    return str(python)


class Workers:
    """The processes of one shape. Ask for a measurement by way; a process is started when it is first needed."""

    def __init__(self, shape: Shape, checkpoint: Path, cache: Path, threads: int) -> None:
        self.shape, self.checkpoint, self.cache = shape, checkpoint, cache
        self.variables = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TQDM_DISABLE": "1",
        }
        self.running: dict[str, subprocess.Popen] = {}
        self.loaded: dict[str, dict] = {}
        self.failed: dict[str, str] = {}

    def measure(self, way: str, request: dict) -> dict:
        """{seconds, peak_mb, loaded_mb}, or {error}."""
        if way not in self.running and way not in self.failed:
            self.start(way, request)
        if way in self.failed:
            return {"error": self.failed[way]}
        self.running[way] = self.running.pop(way)  # the least recently used comes first
        answer = self.ask(way, request)
        if "error" in answer and self.running[way].poll() is not None:
            self.running.pop(way)
        return answer | self.loaded[way]

    def start(self, way: str, request: dict) -> None:
        """Start a way's process, and let it run once with two prompts and two tokens, so that nothing is timed cold."""
        while self.running and psutil.virtual_memory().available / 2**20 < 2 * self.shape.size_mb + PROCESS_MB:
            self.stop(next(iter(self.running)))
        try:
            command = (
                [sys.executable, "-m", "checks.speed_ways", way]
                if way in WAYS
                else [environment(way, self.cache), str(RUNNERS / f"run_{way.replace('-', '_')}.py")]
            )
        except RuntimeError as error:
            self.failed[way] = f"its environment could not be made: {error}"
            return
        with open(self.cache / f"{self.shape.name}-{way.replace(', ', '-').replace(' ', '-')}.log", "w") as log:
            self.running[way] = subprocess.Popen(
                [*command, str(self.checkpoint)],
                cwd=ROOT,
                env=self.variables,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        answer = self.reply(way)
        if "error" not in answer:
            self.loaded[way] = answer
            answer = self.ask(way, request | {"sequences": 2, "batch": 2, "new_tokens": 2, "out": None})
        if "error" in answer:
            self.failed[way] = answer["error"]
            self.stop(way)

    def ask(self, way: str, request: dict) -> dict:
        """Send one request, wait for its answer."""
        pipe = self.running[way].stdin
        assert pipe
        try:
            pipe.write(json.dumps(request) + "\n")
            pipe.flush()
        except BrokenPipeError:
            return {"error": "its process ended"}
        return self.reply(way)

    def reply(self, way: str) -> dict:
        """One line from a process; what became of it where there is none."""
        pipe = self.running[way].stdout
        assert pipe
        line = pipe.readline()
        return json.loads(line) if line else {"error": f"its process ended with code {self.running[way].wait()}"}

    def stop(self, way: str) -> None:
        """End one process."""
        process = self.running.pop(way)
        assert process.stdin
        process.stdin.close()
        process.wait()

    def close(self) -> None:
        """End all of them."""
        for way in list(self.running):
            self.stop(way)
