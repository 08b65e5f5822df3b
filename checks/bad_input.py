"""Everything wrong that can be asked for: each is refused in one clear line, and nothing of it is left on the disk.

`python -m checks.bad_input [--no-papermill]` puts every case to the library, and a few to a notebook through papermill;
then what is odd and allowed, which has to pass. It writes data/checks/bad_input.json and ends with status 1 where a bad
case passes, says more than a line or leaves a file, or an odd one does not pass.
"""

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checks.bad_setups import FOLDERS, NAMES, bad_studies, filled
from eelib.common.errors import InputError, NotEstimable, StorageError
from eelib.common.files import data_folder

if TYPE_CHECKING:
    from eelib.tasks.task import Task

os.environ["HF_HUB_OFFLINE"] = "1"
RESULT = data_folder("checks", "bad_input.json")
MODEL = data_folder("models", "pocket-llama")
PAIR = {"source": "Der Hund schläft.", "references": ["The dog sleeps."]}


@dataclass
class Case:
    """What is wrong, what was given, and a call that must be refused with a line that holds every one of `parts`."""

    case: str
    given: str
    parts: tuple[str, ...]
    call: Callable[[], object]


def parameter_cases() -> Iterator[Case]:
    """Arguments of the three functions of the library."""
    import eelib

    model, task = eelib.load_model("pocket-llama", device="cpu"), eelib.load_task("translation/de-en", 2)
    for name in ("pocket-lama", "./no/such/folder", "no-one/no-such-model"):
        yield Case("unknown model", name, (name,), partial(eelib.load_model, name, device="cpu"))
    for name in ("two words", "a\U0001f415"):
        yield Case("a model name that can't name a folder", name, ("letters",), partial(eelib.load_model, name))
    for name in ("int3", "float64"):
        yield Case("unknown dtype", name, (name, "bfloat16"), partial(eelib.load_model, "pocket-llama", dtype=name))
    for name in ("gpu", "cuda:77", "tpu:0"):
        yield Case("unknown device", name, (name, "cpu"), partial(eelib.load_model, "pocket-llama", device=name))
    for name in ("translation/xx-yy", "translations", "", "x" * 300):
        shown = name if len(name) < 50 else f"{name[:5]}… ({len(name)} characters)"
        yield Case(
            "unknown task", shown or "(empty)", ("not known", "translation/de-en"), partial(eelib.load_task, name)
        )
    yield Case("unknown direction", "wmt22/de-pl", ("de-pl", "wmt22/de-en"), partial(eelib.load_task, "wmt22/de-pl"))
    value: Any  # of whatever type
    for value in (-1, "5", 2.5, True):
        yield Case("limit", repr(value), ("limit", repr(value)), partial(eelib.load_task, "translation/de-en", value))
    whole, none = (0, -3, "8", 2.5, True), (-1, "all")
    counted = {"max_new_tokens": whole, "batch_size": whole, "repeats": whole}
    for name, values in (counted | {"sites": none, "pairs": none, "timed": none}).items():
        for value in values:
            yield Case(name, repr(value), (name, repr(value)), partial(eelib.trace, model, task, **{name: value}))
    name_of_task: Any = "translation/de-en"
    yield Case(
        "a name where a task belongs",
        '"translation/de-en"',
        ("eelib.load_task",),
        partial(eelib.trace, model, name_of_task),
    )
    long = eelib.Task.from_prompts(["A dog.", "word " * 2000])
    yield Case(
        "a prompt beyond the window, strict",
        "2,000 words",
        ("1 of 2 prompts", "window"),
        lambda: eelib.trace(model, long, strict=True, progress=False),
    )
    yield Case(
        "no prompt within the window",
        "2,000 words",
        ("1 of 1 prompts", "window"),
        lambda: eelib.trace(model, long.pick([1]), progress=False),
    )
    for block in (1, 7):
        yield Case(
            "states that are not finite",
            f"a NaN in block {block}'s weights",
            (str(block), "finite"),
            partial(trace_broken, block, task),
        )
    yield Case(
        "a runs folder that is a file",
        "folder=FILE",
        ("can't be made",),
        lambda: eelib.trace(model, task, folder=file_at("FILE"), progress=False),
    )


def trace_broken(block: int, task: "Task") -> object:
    """A trace of pocket-llama with a NaN in the feed-forward output of one block, counted from 1."""
    import eelib

    model = eelib.load_model("pocket-llama", device="cpu")
    model.blocks[block - 1].get_submodule("mlp.down_proj").get_parameter("weight").data[0, 0] = float("nan")
    return eelib.trace(model, task, max_new_tokens=2, progress=False)


def file_at(name: str) -> Path:
    """A file outside of the folder that is looked at for leftovers."""
    path = Path("..") / name
    path.write_text("x")
    return path


def text_cases() -> Iterator[Case]:
    """Prompts and files of tasks."""
    import eelib

    prompt: Any  # not always a text
    for prompt, shown, part in (
        ("", "(empty)", "empty"),
        (" \n", "white space", "empty"),
        ("a\0b", "a, NUL, b", "NUL"),
        ("a\ud83d", "half of an emoji", "U+D83D"),
        (7, "7", "not a string"),
    ):
        yield Case("a prompt", shown, ("prompt 1", part), partial(eelib.Task.from_prompts, ["ok", prompt]))
    whole = json.dumps(PAIR)
    lines: dict[str, tuple[str | bytes, str]] = {
        "broken JSON": ("{broken", "line 2: not a JSON object"),
        "an empty line": ("", "line 2: not a JSON object"),
        "a row that is no object": ("[1]", "line 2: not a JSON object"),
        "a row nested too deeply": ("[" * 100_000, "line 2: not a JSON object"),
        "a missing field": (json.dumps({"source": "Ja."}), "line 2: field references is missing"),
        "an empty text": (json.dumps(PAIR | {"source": " "}), "line 2: field source is empty"),
        "a NUL in a text": (json.dumps(PAIR | {"source": "a\0b"}), "line 2: field source holds a NUL"),
        "half a character in a text": (json.dumps(PAIR | {"source": "a\ud83d"}), "line 2: field source holds half a"),
        "a text that is a number": (json.dumps(PAIR | {"source": 7}), "line 2: field source is not a string"),
        "references that are a string": (json.dumps(PAIR | {"references": "x"}), "line 2: field references is not a"),
        "bytes that are not UTF-8": (whole.encode().replace(b"dog", b"d\xffg"), "line 2: not UTF-8"),
    }
    for case, (line, part) in lines.items():
        line = line.encode() if isinstance(line, str) else line
        given = line.decode("utf-8", "replace") or "(empty)"
        given = given if len(given) < 100 else f"{given[:5]}… ({len(given):,} characters)"
        data = whole.encode() + b"\n" + line + b"\n"
        yield Case(
            case,
            given,
            ("bad.de-en.jsonl", part),
            partial(load_rows, "bad.de-en.jsonl", data),
        )
    packed = gzip.compress((whole + "\n").encode() * 200)
    for case, data in (
        ("a truncated gzip file", packed[:-20]),
        ("a file that is not gzip", b"plain text\n"),
        ("a damaged gzip file", packed[:40] + b"\0\0\0\0" + packed[44:]),
    ):
        yield Case(
            case,
            "bad.de-en.jsonl.gz",
            ("bad.de-en.jsonl.gz, after line", "read"),
            partial(load_rows, "bad.de-en.jsonl.gz", data),
        )
    yield Case(
        "a file without rows",
        "bad.de-en.jsonl",
        ("no rows",),
        partial(load_rows, "bad.de-en.jsonl", b""),
    )
    yield Case(
        "a file whose name has no direction",
        "bad.jsonl",
        ("direction", "de-en"),
        partial(load_rows, "bad.jsonl", whole.encode()),
    )
    yield Case(
        "fields that fit no task",
        '{"text": "x"}',
        ("fields text fit no task",),
        partial(load_rows, "bad.de-en.jsonl", b'{"text": "x"}'),
    )
    yield Case("a folder without tasks", "an empty folder", ("no .jsonl",), lambda: eelib.load_task(folder_at("empty")))


def load_rows(name: str, data: bytes) -> object:
    """A task from a file that holds `data`, outside of the folder that is looked at."""
    import eelib

    path = Path("..") / name
    path.write_bytes(data)
    return eelib.load_task(str(path))


def folder_at(name: str) -> str:
    """An empty folder, outside of the folder that is looked at."""
    path = Path("..") / name
    path.mkdir(exist_ok=True)
    return str(path)


def checkpoint_cases(source: Path) -> Iterator[Case]:
    """Copies of the model folder `source` in which something is missing or wrong."""
    import eelib

    def load(name: str, change: Callable[[Path], None]) -> Callable[[], object]:
        def call() -> object:
            folder = Path("..") / name
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(source, folder)
            change(folder)
            return eelib.load_model(str(folder), device="cpu")

        return call

    def config(**values: object) -> Callable[[Path], None]:
        def change(folder: Path) -> None:
            path = folder / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | values))

        return change

    def pickled(folder: Path) -> None:
        import torch
        from safetensors.torch import load_file

        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()

    def cut(file: str) -> Callable[[Path], None]:
        def change(folder: Path) -> None:
            data = (folder / file).read_bytes()
            (folder / file).write_bytes(data[: len(data) // 2])

        return change

    def lacking(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        weights.pop("model.layers.3.mlp.down_proj.weight")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    def without(*files: str) -> Callable[[Path], None]:
        def change(folder: Path) -> None:
            for file in files:
                (folder / file).unlink()

        return change

    remote = {
        "auto_map": {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"},
        "model_type": "own",
    }
    for case, given, parts, change in (
        ("weights that are not safetensors", "pytorch_model.bin", ("safetensors",), pickled),
        ("no weights", "a folder without model.safetensors", ("safetensors",), without("model.safetensors")),
        ("weights cut in half", "half of model.safetensors", ("could not be loaded",), cut("model.safetensors")),
        ("a weight is missing", "no model.layers.3.mlp.down_proj.weight", ("layers.3.mlp.down_proj",), lacking),
        ("no tokenizer", "no tokenizer files", ("tokenizer",), without("tokenizer.json", "tokenizer_config.json")),
        ("a damaged tokenizer", "half of tokenizer.json", ("tokenizer",), cut("tokenizer.json")),
        ("no config", "a folder without config.json", ("could not be loaded",), without("config.json")),
        ("a damaged config", "half of config.json", ("could not be loaded",), cut("config.json")),
        (
            "an unknown architecture",
            'model_type "unheard-of"',
            ("could not be loaded", "unheard-of"),
            config(model_type="unheard-of"),
        ),
        ("a folder that needs remote code", "auto_map in config.json", ("code",), config(**remote)),
        ("sizes that do not fit", "hidden_size 128", ("could not be loaded",), config(hidden_size=128)),
    ):
        yield Case(case, given, parts, load("checkpoint", change))


def hostile_cases(source: Path) -> Iterator[Case]:
    """Copies of the model folder `source` as nobody should make them; loaded, and asked for a trace in chat form."""
    import eelib

    def load(change: Callable[[Path], object]) -> object:
        folder = Path("..", "hostile")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        change(folder)
        model = eelib.load_model(str(folder), device="cpu")
        return eelib.trace(model, eelib.Task.from_prompts(["A dog."], chat=True), 1, progress=False)

    for case, given, parts, change in FOLDERS:
        yield Case(case, given, parts, partial(load, change))
    for name in NAMES:

        def named(name: str = name) -> object:
            folder = Path("..", "named", name)
            shutil.copytree(source, folder, dirs_exist_ok=True)
            return eelib.load_model(str(folder), device="cpu")

        yield Case("a model folder's name", ascii(name), ("the last part of its name",), named)


def study_cases() -> Iterator[Case]:
    """Study files; in a project with a few notebooks, outside of the folder that is looked at."""
    from eestudy.book.study_file import StudyFile

    def load(text: str) -> object:
        here, project = Path.cwd(), Path("..", "project")
        (project / "notebooks").mkdir(parents=True, exist_ok=True)
        for name in ("a", "architectures", "b", "n"):
            (project / "notebooks" / f"{name}.ipynb").touch()
        (project / "study.yml").write_text(text, encoding="utf-8")
        os.chdir(project)
        try:
            return StudyFile.load("study.yml")
        finally:
            os.chdir(here)

    for text, part in bad_studies():
        shown = " / ".join(text.splitlines()) or "(empty)"
        shown = shown if len(shown) < 100 else f"{shown[:40]}… ({len(text):,} characters)"
        yield Case("a study file", shown, ("study.yml: ", part), partial(load, text))


def told_rows(source: Path, scratch: Path) -> Iterator[dict]:
    """Weights that know nothing are allowed, and told of in the manifest."""
    import eelib

    for value in (0.0, 1e30):
        folder = scratch / "told"
        shutil.copytree(source, folder, dirs_exist_ok=True)
        filled(value)(folder)
        model, task = eelib.load_model(str(folder), device="cpu"), eelib.Task.from_prompts(["A dog."])
        began = time.monotonic()
        message = eelib.trace(model, task, 1, scratch / "told-runs", progress=False).manifest.get("remark", "")
        yield {
            "case": "weights that know nothing",
            "given": f"all {value:g}",
            "message": message,
            "lines": 1,
            "seconds": round(time.monotonic() - began, 2),
            "left behind": [],
            "ok": "know nothing" in message,
        }


def odd_rows(runs: Path) -> Iterator[dict]:
    """What is odd and allowed: every text is traced as it is, or counted where it is beyond the window."""
    import eelib

    model = eelib.load_model("pocket-llama", device="cpu")
    texts = {
        "emoji": "\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f",
        "right to left": "\u05e9\u05dc\u05d5\u05dd",
        "text turned round": "\u202eabc",
        "combining marks": "Z\u0338\u0330a\u0335\u0353",
        "control characters": "a\x07\x1b[31m\u2028b",
        "joiners only": "\u200b\u200d",
        "markup": "<script>alert(1)</script>",
        "a formula and a table": "$x$ `y` | z",
        "a line of 100,000 characters": "x" * 100_000,
    }
    task = eelib.Task.from_prompts(list(texts.values()), name="odd")
    made = eelib.trace(model, task, 4, runs, 4, 1, 1, progress=False)
    kept = dict(zip(made.sequences["prompt"], made.sequences["sequence"]))
    for case, prompt in texts.items():
        read = int((made.tokens["sequence"] == kept.get(prompt, -1)).sum())
        beyond = len(prompt) > 1000
        message = f"tokens read: {read}" if read else f"skipped, and counted: {made.manifest['skipped']}"
        yield {
            "case": f"odd text: {case}",
            "given": case if beyond else ascii(prompt)[1:-1],
            "message": message,
            "lines": 1,
            "left behind": [],
            "ok": made.manifest["skipped"] == 1 if beyond else read > 0,
        }
    few = eelib.load_task("translation/de-en", 4)
    one = eelib.trace(model, few, 1, runs, 4, 1, 1, progress=False)
    lengths = one.sequences["length"].tolist()
    generation: Any = model.network.generation_config
    generation.eos_token_id = sorted(set(map(int, one.tokens["token_id"])))
    none = eelib.trace(model, few, 8, runs, 4, 1, 1, progress=False)
    for case, found, wanted in (
        ("outputs of one token", lengths, [1] * 4),
        ("outputs that end at once", none.sequences["length"].tolist(), [0] * 4),
    ):
        yield {
            "case": case,
            "given": "4 prompts",
            "message": f"lengths {found}",
            "lines": 1,
            "left behind": [],
            "ok": found == wanted,
        }


def run(case: Case, here: Path) -> dict:
    """Put one case to the library, in an empty working folder."""
    message, began = "", time.monotonic()
    try:
        case.call()
    except (InputError, NotEstimable, StorageError) as error:
        message = str(error)
    except Exception as error:  # not one of the kinds that the library promises
        message = f"{type(error).__name__} escaped:\n{error}"
    seconds = time.monotonic() - began
    return judge(case, message, sorted(str(file.relative_to(here)) for file in here.rglob("*")), seconds)


def judge(case: Case, message: str, left: list[str], seconds: float) -> dict:
    """The row of one case. Whether its message is one line, says what was wrong, and nothing was left."""
    lines = len(message.splitlines())
    message = re.sub(r"\.\./|/?(?:[\w.+-]+/)*tmp[\w.-]*/", "", message)
    return {
        "case": case.case,
        "given": case.given,
        "message": message[:600],
        "lines": lines,
        "seconds": round(seconds, 2),
        "left behind": left,
        "ok": lines == 1 and not left and all(part in message for part in case.parts),
    }


def papermill_rows(root: Path, scratch: Path) -> Iterator[dict]:
    """Bad parameters of a notebook, as the one who runs papermill sees them: the last line of its log."""
    for case, name, value, parts in (
        ("notebook: unknown parameter", "limt", "5", ("limt", "allowed", "limit")),
        ("notebook: unknown model", "model", "pocket-lama", ("pocket-lama", "pocket-llama")),
        ("notebook: unknown task", "tasks", "translation/xx", ("translation/xx", "de-en")),
        ("notebook: wrong type", "limit", "many", ("limit", "many", "int")),
    ):
        here = scratch / "notebook"
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir()
        began = time.monotonic()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "papermill",
                "notebooks/saturation.ipynb",
                str(scratch / "out.ipynb"),
                "-p",
                name,
                value,
                "-p",
                "runs_folder",
                str(here / "runs"),
                "-p",
                "results_folder",
                str(here / "results"),
                "--no-progress-bar",
            ],
            cwd=root,
            capture_output=True,
            text=True,
        )
        text = re.sub(r"\x1b\[[0-9;]*m", "", done.stderr)
        said = re.findall(r"^(?:[\w.]+\.)?ParameterError: (.*(?:\n.+)*)", text, re.MULTILINE)
        message = said[-1].strip() if said and done.returncode else text
        shown = Case(case, f"-p {name} {value}", parts, lambda: None)
        left = sorted(str(file.relative_to(here)) for file in here.rglob("*"))
        yield judge(shown, message, left, time.monotonic() - began)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-papermill", action="store_true", help="leave the notebook out")
    parser.add_argument("--output", type=Path, default=RESULT, help=f"where the JSON goes ({RESULT})")
    asked = parser.parse_args()
    began, root, rows = time.monotonic(), Path.cwd(), []
    sys.path.insert(0, str(root))
    import torch

    from checks.report import headed, write_report

    head = headed("bad_input")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        ours = (
            parameter_cases,
            text_cases,
            partial(checkpoint_cases, MODEL),
            partial(hostile_cases, MODEL),
            study_cases,
        )
        for cases in ours:
            (scratch / "here").mkdir(exist_ok=True)
            os.chdir(scratch / "here")
            for case in cases():
                rows.append(run(case, scratch / "here"))
                shutil.rmtree(scratch / "here")
                (scratch / "here").mkdir()
                os.chdir(scratch / "here")
        os.chdir(root)
        rows += odd_rows(scratch / "runs")
        rows += told_rows(MODEL, scratch)
        rows += [] if asked.no_papermill else papermill_rows(root, scratch)
    write_report(asked.output, head, seconds=round(time.monotonic() - began, 1), rows=rows)
    for row in rows:
        mark = "ok  " if row["ok"] else "FAIL"
        print(mark, f"{row['case']} ({row['given']}): {row['message']}", row["left behind"] or "")
    bad = sum(not row["ok"] for row in rows)
    print(f"{len(rows) - bad} of {len(rows)} went as they should")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
