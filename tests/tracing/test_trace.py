"""A trace holds what the oracle gives: outputs, readouts, exit layers, sub-layers; what stops a run."""

import numpy as np
import plain_runs
import pyarrow.parquet as pq
import pytest
import torch
from families import FAMILIES
from near import assert_as_near
from traces import STEPS, TASK, assert_close, assert_same, assert_top_ids, clear_tops, make

import eelib
from checks.tiny_texts import PROMPTS
from eelib.common.errors import SelfCheckError
from eelib.common.machine import report_halving
from eelib.lens.readout import Readout, ReadoutBuffer
from eelib.tracing import make as making
from eelib.tracing.columns import READOUTS
from eelib.tracing.trace import Sites, exit_layer

FIRST = "tokens-00000.parquet"


@pytest.mark.parametrize("name", FAMILIES)
def test_against_the_oracle(name, made, model_of, plain_of, oracle_of):
    """Every token and readout of a batched trace, against one row at a time in float64."""
    model, oracle, family, trace = model_of(name), oracle_of(name), FAMILIES[name], made(name)
    prompts = model.tokenizer(TASK.prompts)["input_ids"]
    if model.kind == "masked":
        outputs = [plain_runs.oracle_run(oracle, family, p, p)["logits"].argmax(-1).tolist() for p in prompts]
    else:
        outputs = [plain_runs.plain_greedy(oracle, family, p, STEPS, model.eos_ids) for p in prompts]
    tokens = trace.tokens
    assert [g["token_id"].tolist() for _, g in tokens.groupby("sequence")] == outputs
    emitted = torch.tensor(tokens["token_id"].to_numpy())
    found = []
    for network in (plain_of(name), oracle):
        runs = [plain_runs.oracle_run(network, family, p, o) for p, o in zip(prompts, outputs)]
        states = torch.cat([run["states"] for run in runs])
        logits = family.unembed(network, states)
        found.append((logits, plain_runs.readouts(logits, states, emitted, torch.full_like(emitted, -1))))
    (plain_logits, plain), (logits, exact) = found
    for readout, values in exact.items():
        if readout in READOUTS and readout != "reference_probability":  # it has a test of its own
            assert_as_near(torch.tensor(trace[readout]), plain[readout], values, readout)
    assert_top_ids(torch.tensor(trace["top1"]), plain_logits, logits)
    np.testing.assert_array_equal(trace["top1"][:, -1], emitted)  # nothing is put right afterwards
    assert trace.manifest["mismatches"] == 0
    assert trace["top1"].shape == (len(tokens), trace.layers + 1)
    assert trace["topk_ids"].shape == trace["topk_probability"].shape == (len(tokens), trace.layers + 1, 10)
    clear = clear_tops(plain_logits, logits).all(-1).numpy()
    for definition in ("first", "stable"):
        layers = trace.exit_layer(definition)
        assert layers.min() >= 1 and layers.max() <= trace.layers
        expected = exit_layer(logits.argmax(-1).numpy(), tokens["token_id"].to_numpy(), definition)
        np.testing.assert_array_equal(layers[clear], expected[clear])


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
            assert_close(sites[readout][:, :, block], trace[readout][sites.rows][:, 1:], readout)


def test_sites_and_pairs_later(model_of, tmp_path, made, one_line):
    """A larger number of sequences replaces a smaller one; the tokens stay. Pairs end in the trace's own readouts."""
    model = model_of("llama")
    bare = make(model, tmp_path)
    one_line(ValueError, "sites=True", lambda: bare.sites)
    one_line(ValueError, "pairs=True", lambda: bare.pairs)
    few = make(model, tmp_path, sites=1).sites
    more = make(model, tmp_path, sites=3, pairs=2)
    assert set(few.tokens["sequence"]) == {0} and set(more.sites.tokens["sequence"]) == {0, 1, 2}
    np.testing.assert_array_equal(more.sites["probability"][: len(few.tokens)], few["probability"])
    assert_same(more, made("llama"))
    pairs = more.pairs
    assert_close(pairs["js"][:, :, -1], more["js_final"][pairs["row"]])
    assert_close(pairs["cosine"][:, :, -1], more["cosine"][pairs["row"]])


@pytest.mark.parametrize("name, size", [("llama", 1), ("gpt2", 8), ("t5", 1), ("marian", 8), ("bert", 1)])
def test_batch_size_changes_nothing(name, size, made, model_of, tmp_path):
    trace, other = made(name), make(model_of(name), tmp_path, batch_size=size)
    np.testing.assert_array_equal(trace["top1"], other["top1"])
    assert_same(trace, other, exact=False)


def test_what_the_top_k_tells_is_not_stored_and_there_all_the_same(made, one_line):
    trace = made("llama")
    assert {"top1", "probability", "margin"} == set(READOUTS) - set(pq.read_schema(trace.folder / FIRST).names)
    ids, shares = trace["topk_ids"], trace["topk_probability"]
    for name, expected in (("top1", ids[..., 0]), ("probability", shares[..., 0])):
        np.testing.assert_array_equal(trace[name], expected)
        np.testing.assert_array_equal(trace.sites[name], trace.sites[f"topk_{name.replace('top1', 'ids')}"][..., 0])
    np.testing.assert_array_equal(trace["margin"], shares[..., 0] - shares[..., 1])
    assert (trace["top1"].dtype, trace["margin"].dtype) == (np.int32, np.float32)
    one_line(KeyError, ("'entropie'", "entropy"), lambda: trace["entropie"])
    one_line(KeyError, ("'cosine'", "final_rank"), lambda: trace.sites["cosine"])


def by_loop(top1, final, definition):
    """The definitions, word for word; at layer L every token has its answer."""
    layers = len(top1) - 1
    agrees = [layer == layers or top1[layer] == final for layer in range(layers + 1)]
    if definition == "first":
        return min(layer for layer in range(1, layers + 1) if agrees[layer])
    return min(layer for layer in range(1, layers + 1) if all(agrees[layer:]))


@pytest.mark.parametrize("definition", ["first", "stable"])
@pytest.mark.parametrize("layers", [1, 6])
def test_exit_layers_against_loops(definition, layers, one_line):
    """Few ids, so that tokens agree early and change again; some do not agree at layer L, as in low precision."""
    rng = np.random.default_rng(0)
    top1, final = rng.integers(0, 2, (300, layers + 1)), rng.integers(0, 2, 300)
    expected = [by_loop(row, token, definition) for row, token in zip(top1, final)]
    assert exit_layer(top1, final, definition).tolist() == expected and (top1[:, -1] != final).any()
    one_line(ValueError, "'last'", lambda: exit_layer(top1, final, "last"))


def test_outputs_of_one_token_and_outputs_that_end_at_once(model_of, tmp_path, eos):
    model = model_of("llama")
    one = make(model, tmp_path / "one", max_new_tokens=1, sites=2, pairs=2)
    assert one.sequences["length"].tolist() == [1] * len(TASK) and len(one) == len(TASK)
    eos(model, set(one.tokens["token_id"]))
    none = make(model, tmp_path / "none", sites=2, pairs=2)
    assert none.sequences["length"].tolist() == [0] * len(TASK) and none.sequences["output"].eq("").all()
    assert none.tokens["is_eos"].all() and not none.tokens["truncated"].any() and not none.statistic_rows().any()
    np.testing.assert_array_equal(none["top1"], one["top1"])


def test_reference_probability(model_of, oracle_of, tmp_path):
    """The reference's next token while the output follows it, once more where both differ, then NaN."""
    model, family, oracle = model_of("llama"), FAMILIES["llama"], oracle_of("llama")
    prompt = model.tokenizer(PROMPTS[0])["input_ids"]
    output = plain_runs.plain_greedy(oracle, family, prompt, STEPS, model.eos_ids)
    logs = family.unembed(oracle, plain_runs.oracle_run(oracle, family, prompt, output)["states"]).log_softmax(-1)
    for agree in (0, 2, 3, STEPS):
        wanted = output[:agree] + [(output[agree] + 1) % 256 + 4 if agree < STEPS else 9] + [9] * 9
        wanted = output[:3] if agree == 3 else wanted  # where the output has given it all, the end token comes next
        task = eelib.Task.from_prompts([PROMPTS[0]], name=f"agree-{agree}", references=[["its ids are given below"]])
        model.tokenizer, plain = Given(model.tokenizer, wanted), model.tokenizer
        try:
            got = make(model, tmp_path, task)["reference_probability"]
        finally:
            model.tokenizer = plain
        known = min(agree + 1, STEPS)
        assert np.isnan(got[known:]).all() and not np.isnan(got[:known]).any()
        expected = logs[torch.arange(known), :, torch.tensor([*wanted, min(model.eos_ids)][:known])].exp()
        np.testing.assert_allclose(got[:known], expected, rtol=2e-3, atol=1e-5)


class Given:
    """A tokenizer that gives one reference chosen ids."""

    def __init__(self, plain, ids):
        self.plain, self.ids = plain, ids

    def __call__(self, texts=None, text_target=None, **options):
        return {"input_ids": self.ids} if text_target is not None else self.plain(texts, **options)

    def __getattr__(self, name):
        return getattr(self.plain, name)


def test_states_that_are_not_finite_leave_nothing(folder_of, tmp_path, one_line):
    """Found in the first shard: the layer is named, no folder stays."""
    model = eelib.load_model(str(folder_of("llama")), device="cpu")
    model.blocks[1].mlp.down_proj.weight.data[0, 0] = float("nan")
    one_line(ValueError, ("2", "not finite"), lambda: make(model, tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_a_top_1_that_is_not_the_emitted_token(model_of, one_line):
    """Off by more than rounding stops a float32 run; a tie but for rounding is counted, and stays as it was read."""
    model = model_of("llama")

    def readout(of_emitted):
        ids = torch.tensor([[[5, 1], [9, 8]], [[5, 1], [7, 8]]], dtype=torch.int32)
        emitted = torch.tensor([[0.5, 0.5], [0.5, of_emitted]])
        return Readout({"topk_ids": ids, "topk_probability": torch.full((2, 2, 2), 0.5), "final_probability": emitted})

    emitted = torch.tensor([9, 8])
    far, near = readout(0.3), readout(0.49999)
    one_line(SelfCheckError, ("row 1", "is 7", "emitted 8"), lambda: making.count_mismatches(far, emitted, model))
    others = torch.tensor([9, 6])  # as probable as the top-1, but not among the ids: the readout's ids are wrong
    one_line(SelfCheckError, ("row 1", "emitted 6"), lambda: making.count_mismatches(near, others, model))
    assert making.count_mismatches(near, emitted, model) == 1
    assert near["top1"].tolist() == [[5, 9], [5, 7]]


@pytest.fixture
def off_by_one(monkeypatch):
    """A reader that is given each token's states one step late."""
    add = ReadoutBuffer.add

    def late(reader, states, rows, ids):
        add(reader, getattr(reader, "before", states), rows, ids)
        reader.before = states

    monkeypatch.setattr(ReadoutBuffer, "add", late)


def test_a_reader_that_is_off_by_one_is_found(folder_of, tmp_path, off_by_one, one_line):
    """What is compared is what was read: in float32 the run stops, in bfloat16 every such token is counted."""
    task = eelib.Task.from_prompts(PROMPTS[:1])
    model = eelib.load_model(str(folder_of("llama")), device="cpu")
    one_line(SelfCheckError, ("last-layer top-1", "emitted"), lambda: make(model, tmp_path / "float32", task))
    low = eelib.load_model(str(folder_of("llama")), device="cpu", dtype="bfloat16")
    trace = make(low, tmp_path / "bfloat16", task)
    read, emitted = trace["top1"][:, -1], trace.tokens["token_id"].to_numpy()
    assert trace.manifest["mismatches"] == (read != emitted).sum() > 0
    assert read[1:].tolist() == emitted[:-1].tolist()  # that of the step before
    assert trace.exit_layer("first").max() == trace.layers


@pytest.mark.parametrize(
    "given, error",
    [
        (False, torch.OutOfMemoryError("no room")),
        (True, RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")),
    ],
)
def test_out_of_memory_halves_the_batch(given, error, model_of, tmp_path, monkeypatch, capsys):
    """Only batches of two fit: the result is the same, and one line says so."""
    name = "read_given" if given else "read_outputs"
    plain, whole = getattr(making, name), make(model_of("llama"), tmp_path / "whole", given=given)

    def limited(model, prompts, *more):
        if len(prompts) > 2:
            raise error
        return plain(model, prompts, *more)

    monkeypatch.setattr(making, name, limited)
    report_halving.cache_clear()
    assert_same(make(model_of("llama"), tmp_path / "runs", given=given), whole, exact=False)
    assert capsys.readouterr().out.count("out of memory") == 1
