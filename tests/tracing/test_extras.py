"""Sub-layers and layer pairs of a trace, against float64 and against the trace's own readouts."""

import numpy as np
import plain_runs
import pytest
import torch
from families import FAMILIES
from near import assert_as_near
from traces import TASK, assert_close, assert_same, assert_top_ids, make

from eelib.tracing.trace import Sites


@pytest.mark.parametrize("name", FAMILIES)
def test_sites(name, made, model_of, plain_of, oracle_of):
    """Sub-layers of the first two sequences through the unembed, against the family's own modules in float64."""
    trace, family = made(name), FAMILIES[name]
    sites, prompts = trace.sites, model_of(name).tokenizer(TASK.prompts[:2])["input_ids"]
    assert set(sites.tokens["sequence"]) == {0, 1}
    outputs = [g["token_id"].tolist() for _, g in sites.tokens.groupby("sequence")]
    networks = (plain_of(name), oracle_of(name))
    runs = [[plain_runs.oracle_run(n, family, p, o) for p, o in zip(prompts, outputs)] for n in networks]
    for number, site in enumerate(sites.names):
        plain, exact = (family.unembed(n, torch.cat([run[site] for run in own])) for n, own in zip(networks, runs))
        tops = [logits.softmax(-1).amax(-1) for logits in (plain, exact)]
        assert_as_near(torch.tensor(sites["probability"][:, :, number]), *tops, site)
        assert_top_ids(torch.tensor(sites["top1"][:, :, number]), plain, exact)
        assert sites["topk_ids"].shape == (len(sites.tokens), trace.layers, len(sites.names), 10)
    block = sites.names.index("block")
    for readout in Sites.READOUTS:  # the block site is the block's readout of the trace
        if "topk_ids" not in readout and "rank" not in readout:
            whole = trace[readout][sites.rows][:, 1:]
            assert_close(sites[readout][:, :, block], whole, readout)


def test_pairs_are_the_last_layers_readouts(made):
    trace = made("gpt2")
    rows = trace.pairs["row"]
    assert_close(trace.pairs["js"][:, :, -1], trace["js_final"][rows])
    assert_close(trace.pairs["cosine"][:, :, -1], trace["cosine"][rows])


def test_more_sites_later(model_of, tmp_path, made):
    """A larger number replaces a smaller one; the tokens stay."""
    model = model_of("llama")
    few = make(model, tmp_path, sites=1).sites
    more = make(model, tmp_path, sites=3)
    assert set(few.tokens["sequence"]) == {0} and set(more.sites.tokens["sequence"]) == {0, 1, 2}
    count = len(few.tokens)
    np.testing.assert_array_equal(more.sites["probability"][:count], few["probability"])
    assert_same(more, made("llama"))
