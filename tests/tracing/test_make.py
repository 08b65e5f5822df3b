"""Traces: right against the oracle, in their tables, and for every size of batch."""

import families
import numpy as np
import pytest
import torch
from families import FAMILIES
from traces import STEPS, TASK, assert_same, make

import eelib
from checks.tiny_texts import PROMPTS
from eelib.tracing import make as tracing
from eelib.tracing.exit_layers import exit_layer
from eelib.tracing.trace import Sites


@pytest.mark.parametrize("name", FAMILIES)
def test_against_the_oracle(name, made, model_of, oracle_of):
    """Every token and readout of a batched trace, against one row at a time in float64."""
    model, oracle, family, trace = model_of(name), oracle_of(name), FAMILIES[name], made(name)
    prompts = model.tokenizer(TASK.prompts)["input_ids"]
    if model.kind == "masked":
        outputs = [families.oracle_run(oracle, family, p, p)["logits"].argmax(-1).tolist() for p in prompts]
    else:
        outputs = [families.plain_greedy(oracle, family, p, STEPS, model.eos_ids) for p in prompts]
    tokens = trace.tokens
    assert [g["token_id"].tolist() for _, g in tokens.groupby("sequence")] == outputs
    states = torch.cat([families.oracle_run(oracle, family, p, o)["states"] for p, o in zip(prompts, outputs)])
    logits = family.unembed(oracle, states)
    logs = logits - logits.logsumexp(-1, keepdim=True)
    emitted = torch.tensor(tokens["token_id"].to_numpy())
    close = dict(rtol=3e-3, atol=3e-4)
    np.testing.assert_allclose(trace["entropy"], -(logs.exp() * logs).sum(-1), **close)
    np.testing.assert_allclose(trace["probability"], logs.exp().max(-1).values, **close)
    np.testing.assert_allclose(trace["final_probability"], logs.exp()[torch.arange(len(emitted)), :, emitted], **close)
    assert (trace["top1"] == logits.argmax(-1).numpy()).mean() > 0.98
    np.testing.assert_array_equal(trace["top1"][:, -1], emitted)
    assert trace["top1"].shape == (len(tokens), trace.layers + 1)
    assert trace["topk_ids"].shape == trace["topk_probability"].shape == (len(tokens), trace.layers + 1, 10)
    for definition in ("first", "stable"):
        layers = trace.exit_layer(definition)
        assert layers.min() >= 1 and layers.max() <= trace.layers
        np.testing.assert_array_equal(layers, exit_layer(trace["top1"], tokens["token_id"].to_numpy(), definition))


@pytest.mark.parametrize("name", ["llama", "t5", "bert"])
def test_tables(name, made, model_of):
    trace, model = made(name), model_of(name)
    tokens, sequences = trace.tokens, trace.sequences
    assert sequences["sequence"].tolist() == list(range(len(TASK))) and sequences["prompt"].tolist() == TASK.prompts
    assert sequences["reference"].tolist() == ["of the"] * len(TASK) and sequences["group"].tolist() == TASK.groups
    assert sequences["prompt_tokens"].tolist() == [len(ids) for ids in model.tokenizer(TASK.prompts)["input_ids"]]
    assert len(trace) == len(tokens) and tokens.index.tolist() == list(range(len(tokens)))
    for (_, rows), row in zip(tokens.groupby("sequence"), sequences.itertuples()):
        assert rows["position"].tolist() == list(range(len(rows)))
        body = rows[~rows["is_eos"]]
        assert row.length == len(body)
        assert "".join(body["text"]) == row.output == model.tokenizer.decode(body["token_id"])
        assert all(row.output[s:e] == t for s, e, t in zip(body["start"], body["end"], body["text"]))
        assert row.truncated == (name != "bert" and not rows["is_eos"].any())
        assert set(rows["truncated"]) == {row.truncated} and set(rows["group"]) == {row.group}
    special = set(model.tokenizer.all_special_ids)
    read = sum(model.tokenizer(TASK.prompts)["input_ids"], []) if name == "bert" else tokens["token_id"]
    assert tokens["is_special"].tolist() == [t in special for t in read]
    counted = ~tokens["is_special"] if name == "bert" else ~tokens["is_eos"]
    np.testing.assert_array_equal(trace.statistic_rows(), counted)


def test_ends_are_marked(model_of, tmp_path, eos):
    """A row that stops at an end token keeps that token, marked, with an empty place at the end of the text."""
    model = model_of("llama")
    free = make(model, tmp_path / "free").tokens
    end = int(free[(free["sequence"] == 0) & (free["position"] == 2)]["token_id"].iloc[0])
    eos(model, {end})
    trace = make(model, tmp_path / "ends")
    rows = trace.tokens[trace.tokens["sequence"] == 0]
    assert rows["token_id"].iloc[-1] == end and rows["is_eos"].tolist() == [False] * (len(rows) - 1) + [True]
    assert not trace.sequences["truncated"][0] and trace.sequences["length"][0] == len(rows) - 1
    last = rows.iloc[-1]
    assert last["start"] == last["end"] == len(trace.sequences["output"][0])
    assert trace.sequences["truncated"].sum() == trace.sequences["length"].eq(STEPS).sum() > 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "marian", "bert"])
@pytest.mark.parametrize("size", [1, 8])
def test_batch_size_changes_nothing(name, size, made, model_of, tmp_path):
    trace, other = made(name), make(model_of(name), tmp_path, batch_size=size)
    np.testing.assert_array_equal(trace["top1"], other["top1"])
    assert_same(trace, other, exact=False)


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
    """The reference's next token while the output follows it, once more at the parting, then NaN."""
    model, family, oracle = model_of("llama"), FAMILIES["llama"], oracle_of("llama")
    prompt = model.tokenizer(PROMPTS[0])["input_ids"]
    output = families.plain_greedy(oracle, family, prompt, STEPS, model.eos_ids)
    logs = family.unembed(oracle, families.oracle_run(oracle, family, prompt, output)["states"]).log_softmax(-1)
    for agree in (0, 2, STEPS):
        wanted = output[:agree] + [(output[agree] + 1) % 256 + 4 if agree < STEPS else 9] + [9] * 9
        task = eelib.Task.from_prompts([PROMPTS[0]], name=f"agree-{agree}", references=[["its ids are given below"]])
        model.tokenizer, plain = Given(model.tokenizer, wanted), model.tokenizer
        try:
            got = make(model, tmp_path, task)["reference_probability"]
        finally:
            model.tokenizer = plain
        known = min(agree + 1, STEPS)
        assert np.isnan(got[known:]).all() and not np.isnan(got[:known]).any()
        expected = logs[torch.arange(known), :, torch.tensor(wanted[:known])].exp()
        np.testing.assert_allclose(got[:known], expected, rtol=2e-3, atol=1e-5)


class Given:
    """A tokenizer that gives one reference chosen ids."""

    def __init__(self, plain, ids):
        self.plain, self.ids = plain, ids

    def __call__(self, texts=None, text_target=None, **options):
        return {"input_ids": self.ids} if text_target is not None else self.plain(texts, **options)

    def __getattr__(self, name):
        return getattr(self.plain, name)


def test_reference_ends_with_the_end_token(model_of, made):
    """Where the output has said the whole reference, the next reference token is the end."""
    model = model_of("llama")
    maker = tracing.Maker(model, eelib.Task.from_prompts(["a"], references=[["of"]]), None, {}, 1, False, False)
    assert maker.reference_ids(0) == [*model.tokenizer("of")["input_ids"], 1]
    maker = tracing.Maker(model, eelib.Task.from_prompts(["a"]), None, {}, 1, False, False)
    assert maker.reference_ids(0) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_sites(name, made, model_of, oracle_of):
    """Sub-layers of the first two sequences through the unembed, against the family's own modules in float64."""
    trace, oracle, family = made(name), oracle_of(name), FAMILIES[name]
    sites, prompts = trace.sites, model_of(name).tokenizer(TASK.prompts[:2])["input_ids"]
    assert set(sites.tokens["sequence"]) == {0, 1}
    outputs = [g["token_id"].tolist() for _, g in sites.tokens.groupby("sequence")]
    runs = [families.oracle_run(oracle, family, p, o) for p, o in zip(prompts, outputs)]
    for number, site in enumerate(sites.names):
        p = family.unembed(oracle, torch.cat([run[site] for run in runs])).softmax(-1)
        np.testing.assert_allclose(sites["probability"][:, :, number], p.max(-1).values, rtol=3e-3, atol=3e-4)
        assert (sites["top1"][:, :, number] == p.argmax(-1).numpy()).mean() > 0.98
        assert sites["topk_ids"].shape == (len(sites.tokens), trace.layers, len(sites.names), 10)
    block = sites.names.index("block")
    for readout in Sites.READOUTS:  # the block site is the block's readout of the trace
        if "topk_ids" not in readout and "rank" not in readout:
            whole = trace[readout][sites.rows][:, 1:]
            np.testing.assert_allclose(sites[readout][:, :, block], whole, rtol=3e-3, atol=3e-4)


def test_pairs_are_the_last_layers_readouts(made):
    trace = made("gpt2")
    rows = trace.pairs["row"]
    np.testing.assert_allclose(trace.pairs["js"][:, :, -1], trace["js_final"][rows], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(trace.pairs["cosine"][:, :, -1], trace["cosine"][rows], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", families.CLASSIFIERS)
def test_classifier(name, tmp_path):
    """One row for each text: the label, read at the position that the network judges by, layer by layer."""
    family, position = families.CLASSIFIERS[name]
    written = [0] if family.kind == "causal" else None  # the oracle runs a prompt and what it wrote but the last
    model = eelib.load_model(str(families.save(name, tmp_path / name)))
    task = eelib.Task.from_prompts(PROMPTS)
    trace = eelib.trace(model, task, folder=tmp_path, batch_size=2, sites=True, progress=False)
    oracle, prompts = families.build(name).double(), model.tokenizer(PROMPTS)["input_ids"]
    runs = [families.oracle_run(oracle, family, p, written or p) for p in prompts]
    logits = family.unembed(oracle, torch.stack([run["states"][position] for run in runs])).detach()
    assert trace["top1"].tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(trace["probability"], logits.softmax(-1).amax(-1), rtol=1e-3, atol=1e-5)
    assert trace["topk_ids"].shape == (len(PROMPTS), 4, 3)
    assert trace.sequences["output"].tolist() == [f"LABEL_{i}" for i in trace["top1"][:, -1]]
    assert trace.statistic_rows().all() and not trace.tokens["truncated"].any()
    assert trace.sites["top1"].shape[:2] == (len(PROMPTS), 3)


def test_chat_template_where_the_task_asks(folder_of, tmp_path, one_line):
    model = eelib.load_model(str(folder_of("llama")))
    task = eelib.Task.from_prompts(["The small dog"], chat=True)
    one_line(ValueError, ["chat template"], lambda: make(model, tmp_path, task))
    model.tokenizer.chat_template = "{% for m in messages %}User: {{ m['content'] }}\n{% endfor %}Answer:"
    trace = make(model, tmp_path, task)
    prompt = model.tokenizer("User: The small dog\nAnswer:")["input_ids"]
    assert trace.sequences["prompt_tokens"].tolist() == [len(prompt)]
    assert trace.folder != make(model, tmp_path, eelib.Task.from_prompts(["The small dog"])).folder
