"""What sub-layers give is what the family's own modules give, and nothing stays behind."""

import pytest
import torch
from families import FAMILIES

from eelib.common.tolerances import assert_as_near
from eelib.models.probe import block_states
from eelib.models.sites import site_states


@pytest.mark.parametrize("name", FAMILIES)
def test_sites(name, runs_of):
    """Every sub-layer's output is the family's own module's; parallel blocks have no state after attention."""
    states, sites, plain, exact = runs_of(name)
    after = set() if FAMILIES[name].parallel else {"after_attention"}
    assert set(sites) == {*FAMILIES[name].sites, "block"} | after
    for site, values in sites.items():
        assert_as_near(values, plain[site], exact[site], site)
    assert torch.equal(sites["block"], states[:, 1:])


def test_hooks_are_gone_afterwards(model_of):
    model = model_of("llama")
    ids = torch.tensor([[5, 6, 7]])
    with block_states(model.blocks) as states, site_states(model.blocks, model.components) as sites:
        model.network(input_ids=ids)
    before = [s.clone() for s in states], {k: [v.clone() for v in vs] for k, vs in sites.items()}
    model.network(input_ids=ids + 1)
    assert all(torch.equal(a, b) for a, b in zip(before[0], states, strict=True))
    assert all(torch.equal(a, b) for k in sites for a, b in zip(before[1][k], sites[k], strict=True))
