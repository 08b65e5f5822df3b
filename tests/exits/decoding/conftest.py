"""What a pass costs while decoding is tested, prompts of many lengths, and trained blocks of the tiny llama."""

from functools import cache
from weakref import WeakKeyDictionary

import pytest
import torch
from oracle import two_ends

from checks.tiny_texts import PROMPTS
from eelib.exits.decoding import drafters, loop
from eelib.exits.decoding.pass_costs import ROWS, PassCosts
from eelib.models import products
from eelib.models.lens_adapters import DraftBlock, save_draft
from eelib.tracing.decode import greedy_decode

STEPS = 14


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


@pytest.fixture(scope="module")
def blocks(model_of, tmp_path_factory):
    """A data folder with blocks of both kinds for the tiny llama, whose drafts are sometimes right."""
    folder, model = tmp_path_factory.mktemp("data"), model_of("llama")
    for kind, layer in (("block", 2), ("features", model.layers)):
        torch.manual_seed(1)
        found = DraftBlock(model, kind, layer, torch.arange(0, model.vocab_size, 2))
        save_draft(found, folder / "models" / f"llama-{kind}", "llama", {"leg": {}})
    return folder


@pytest.fixture
def shipped(blocks, monkeypatch):
    """Where the blocks of models are found; weights of 8 bits are for layers of any size; drafts go on, however few are
    accepted.
    """
    monkeypatch.setattr(products, "LEAST", 0)
    monkeypatch.setattr(drafters, "INT8_MODELS", WeakKeyDictionary())
    monkeypatch.setattr(drafters, "data_folder", lambda *parts: blocks.joinpath(*parts))
    monkeypatch.setattr(loop, "ENOUGH_DRAFTS", 10**9)


@pytest.fixture(scope="module")
def plain(model_of, many):
    """plain(family): (plain greedy decoding without end tokens, two tokens that end it at many lengths)."""

    @cache
    def run(name):
        model = model_of(name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.network.generation_config, "eos_token_id", [model.vocab_size + 1])
            outputs = greedy_decode(model, model.tokenizer(many)["input_ids"], STEPS)
        return outputs, two_ends(outputs)

    return run
