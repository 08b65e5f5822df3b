"""The gates by name; those with weights are in `eelib.exits.gates.trained`."""

from dataclasses import fields

from eelib.common.errors import InputError
from eelib.exits.gates.confidence import Confidence
from eelib.exits.gates.entropy import Entropy
from eelib.exits.gates.fixed import Fixed
from eelib.exits.gates.gate import Gate
from eelib.exits.gates.margin import Margin
from eelib.exits.gates.monotone import Monotone
from eelib.exits.gates.patience import Patience
from eelib.exits.gates.saturation import Saturation
from eelib.exits.gates.schedule import Schedule
from eelib.exits.gates.shortlist import Shortlist
from eelib.exits.gates.trained import TRAINED

GATES: dict[str, type[Gate]] = {
    gate.name: gate
    for gate in (Confidence, Margin, Entropy, Patience, Saturation, Monotone, Fixed, Schedule, Shortlist)
}


def gate_named(name: str, **parameters: object) -> Gate:
    """A gate with its published parameters, or those given. InputError for an unknown name or parameter."""
    if name in TRAINED:
        raise InputError(
            f"gate {name} has weights of its own for each model; "
            f"load it with eelib.exits.gates.trained.trained_gate(model, {name!r})"
        )
    if name not in GATES:
        raise InputError(f"gate {name!r} is not known; allowed: {', '.join(GATES)}")
    allowed = [parameter.name for parameter in fields(GATES[name])]  # type: ignore[arg-type]  # each is a dataclass
    if unknown := [parameter for parameter in parameters if parameter not in allowed]:
        raise InputError(f"gate {name} has no parameter {unknown[0]!r}; allowed: {', '.join(allowed) or 'none'}")
    return GATES[name](**parameters)
