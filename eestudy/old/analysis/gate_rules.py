"""Names of gates in prose, and the trained gates that a model has."""

from pathlib import Path

from eelib.common.errors import InputError
from eelib.common.files import data_folder
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.state import TRAINED, file_name, trained_gate
from eelib.models.model import Model

FREE = "free"


def label(name: str) -> str:
    """A gate's or a kind's name as prose writes it."""
    return "FREE" if name == FREE else name.replace("_", " ").replace("lstm", "LSTM")


def learned_rules(model: Model, folder: str, minimum_layer: int) -> tuple[dict[str, ExitRule], dict[str, str]]:
    """(rules of a model's trained gates, {gate that it lacks: why}); they lie in `folder`/NAME or data/gates/NAME."""
    kept_in = (Path(folder) if folder else data_folder("gates")) / model.name
    found, missing = {}, {}
    for name in TRAINED:
        try:
            found[name] = ExitRule(trained_gate(model, name, kept_in), minimum_layer=minimum_layer)
        except InputError as error:
            there = (kept_in / file_name(name, {})).exists()
            missing[name] = str(error).partition("; train it")[0].replace(f"{kept_in}/", "") if there else ""
    return found, missing
