"""What a pass costs while decoding is tested, and prompts of many lengths."""

import pytest

from checks.tiny_texts import PROMPTS
from eelib.exits.decoding import drafters
from eelib.exits.decoding.pass_costs import ROWS, PassCosts


@pytest.fixture(autouse=True)
def costs(monkeypatch):
    """costs(more): let each further token of a pass cost so much of a pass of one; a fifth unless a test says more.

    A pass with weights of 8 bits costs `of_8_bits` of a pass.
    """

    def set_costs(more, of_8_bits=1.0):
        def of(model, sequences=1):
            share = of_8_bits if model.hash.endswith("-int8") else 1.0
            passes = tuple(share * (1 + more * (rows - 1)) for rows in ROWS)
            return PassCosts(model.layers, ROWS, (0.0,) * len(ROWS), passes, (0.0,) * len(ROWS))

        monkeypatch.setattr(drafters, "pass_costs", of)

    set_costs(0.2)
    return set_costs


@pytest.fixture(scope="session")
def many():
    """16 prompts."""
    return [*PROMPTS, *(f"{prompt} {extra}" for prompt in PROMPTS for extra in ("dog", "ist das über?")), "over"]
