"""Where the data that ship with the project lie: models, texts, the papers' figures, results of the checks."""

import os
from pathlib import Path


def data_folder(*parts: str) -> Path:
    """A folder of the project's data; the environment's EELIB_DATA puts all of them elsewhere."""
    own = Path(__file__).resolve().parents[2] / "data"
    return Path(os.environ.get("EELIB_DATA") or own).joinpath(*parts)
