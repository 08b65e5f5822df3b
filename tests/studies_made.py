"""Parameters of a page on a tiny decoder, for tests of what compares models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eestudy.parameters import ParameterError, Parameters

PAIRS = [{"source": f"Satz {i}.", "references": [f"Sentence {i}."]} for i in range(6)]


def values_in(folder: Path, folder_of: Callable[[str], Path]) -> dict:
    """The parameters; texts, traces and results lie in `folder`."""
    (folder / "tiny.de-en.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
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
