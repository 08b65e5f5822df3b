"""Parameters of a page on a tiny decoder with two tiny models beside it, for tests of what compares models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eestudy.parameters import ParameterError, Parameters

PAIRS = [{"source": f"Satz {i}.", "references": [f"Sentence {i}."]} for i in range(6)]
LABELLED = [
    {"premise": f"The dog {i} ran", "hypothesis": "a green dog " * (i % 4 + 1), "label": i % 3} for i in range(40)
]


def values_in(folder: Path, folder_of: Callable[[str], Path]) -> dict:
    """The parameters; texts, traces and results lie in `folder`."""
    for name, rows in (("tiny.de-en", PAIRS), ("tiny.mnli", LABELLED)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "model": str(folder_of("gpt2")),
        "tasks": str(folder / "tiny.de-en.jsonl"),
        "limit": 0,
        "max_new_tokens": 5,
        "batch_size": 0,
        "dtype": "float32",
        "device": "cpu",
        "seed": 0,
        "runs_folder": str(folder / "runs"),
        "results_folder": str(folder / "results"),
        "timed_sequences": 1,
        "repeats": 1,
        "beside": f"{folder_of('t5')} on {folder / 'tiny.de-en.jsonl'}; "
        f"{folder_of('bert_labels')} on {folder / 'tiny.mnli.jsonl'}",
    }


def check_refused(
    open_page: Callable[[Parameters], Any],
    parameters: Callable[..., Parameters],
    folder_of: Callable[[str], Path],
    given: dict[str, Any],
    message: str,
) -> None:
    """A page with these parameters is refused in one line; a model in `given` is named by its tiny family."""
    given = given | {name: str(folder_of(given[name])) for name in ("model",) if name in given}
    with pytest.raises(ParameterError, match=message) as error:
        open_page(parameters(**given))
    assert "\n" not in str(error.value)
