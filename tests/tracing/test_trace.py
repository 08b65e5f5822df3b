"""A trace holds what the oracle gives: outputs, given texts, readouts, exit layers, sub-layers; what stops a run; which
trace is asked for, what it is refused for, which prompts it takes, which share a batch.
"""

import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from families import CORE, FAMILIES, oracle_of, plain_of
from oracle import (
    allowed_error,
    assert_as_near,
    assert_close,
    assert_ranks,
    assert_same,
    assert_top_ids,
    clear_tops,
    oracle_run,
    plain_greedy,
    readouts,
)
from traces import STEPS, TASK, make

import eelib
from checks.tiny_texts import PROMPTS, WINDOW
from eelib.common import files
from eelib.common.errors import InputError, SelfCheckError, StorageError
from eelib.common.machine import report_halving
from eelib.lens.readout import ReadoutBuffer
from eelib.tracing import decode, plan
from eelib.tracing import make as making
from eelib.tracing.columns import READOUTS
from eelib.tracing.trace import PAIR_TOKENS, exit_layer

LONG = "over the hill and the hills, " * 20  # beyond the window
TEXTS = eelib.Task.from_prompts([*PROMPTS, LONG, "Hügel 😀", "test of words"])  # to be read; "a" is a single token
READ = [0, 1, 3, 4, 5, 6, 7]


@pytest.fixture(scope="module")
def read_of(model_of, tmp_path_factory):
    """read_of(family): a finished trace of the texts in batches of three; not to be changed."""
    folder = tmp_path_factory.mktemp("given")
    return lambda name, **more: make(model_of(name), folder, TEXTS, given=True, **more)


@pytest.mark.parametrize("name, given", [*((name, False) for name in [*CORE, "bert"]), ("llama", True), ("gpt2", True)])
def test_against_the_oracle(name, given, made, read_of, model_of):
    """Every token and readout of a batched trace, decoded or of given texts, against one row at a time in float64."""
    model, oracle, family = model_of(name), oracle_of(name), FAMILIES[name]
    trace = read_of(name) if given else made(name)
    prompts = model.tokenizer((TEXTS if given else TASK).prompts)["input_ids"]
    if given:
        texts = [(ids[:1], ids[1:WINDOW]) for ids in prompts if len(ids) > 1]
    elif model.kind == "masked":
        texts = [(ids, oracle_run(oracle, family, ids, ids)["logits"].argmax(-1).tolist()) for ids in prompts]
    else:
        texts = [(ids, plain_greedy(oracle, family, ids, STEPS, model.eos_ids)) for ids in prompts]
    tokens = trace.tokens
    assert [g["token_id"].tolist() for _, g in tokens.groupby("sequence")] == [output for _, output in texts]
    own, final = (torch.tensor(np.asarray(ids)).long() for ids in (tokens["token_id"], trace.final_ids))
    known = own if given else torch.full_like(own, -1)  # of an output's reference there is a test below
    found = []
    for network in (plain_of(name), oracle):
        states = torch.cat([oracle_run(network, family, *text)["states"] for text in texts])
        logits = family.unembed(network, states)
        found.append((logits, readouts(logits, states, final, known)))
    (plain_logits, plain), (logits, exact) = found
    for readout, values in exact.items():
        if readout in READOUTS and (given or readout != "reference_probability"):
            assert_as_near(torch.tensor(trace[readout]), plain[readout], values, readout)
    near = 2 * allowed_error(plain_logits, logits)  # two logits may each be off by so much
    ids, largest = torch.tensor(trace["topk_ids"]).long(), logits.sort(-1, descending=True).values[..., :10]
    assert ((logits.gather(-1, ids) - largest).abs() <= near).all() and (ids.sort(-1).values.diff(dim=-1) > 0).all()
    assert_top_ids(torch.tensor(trace["top1"]), plain_logits, logits)
    for readout, ranked in (("final_rank", final), ("reference_rank", known)):
        ranks = torch.tensor(trace[readout])
        assert_ranks(ranks, logits, ranked[:, None].expand(-1, trace.layers + 1), near)
    assert (trace["final_rank"][:, -1] == 1).all() and trace.manifest["mismatches"] == 0
    np.testing.assert_array_equal(trace["top1"][:, -1], final)  # nothing is put right afterwards
    assert (own != final).double().mean() > 0.5 if given else torch.equal(own, final)
    clear = clear_tops(plain_logits, logits).all(-1).numpy()
    for definition in ("first", "stable"):
        expected = exit_layer(logits.argmax(-1).numpy(), final.numpy(), definition)
        np.testing.assert_array_equal(trace.exit_layer(definition)[clear], expected[clear])


@pytest.mark.parametrize("name", ["llama", "gptj", "t5"])  # gptj has parallel blocks, t5 reads its encoder
def test_sites(name, made, model_of):
    """Sub-layers of the first two sequences through the unembed, against the family's own modules in float64."""
    trace, family = made(name), FAMILIES[name]
    sites, prompts = trace.sites, model_of(name).tokenizer(TASK.prompts[:2])["input_ids"]
    assert set(sites.tokens["sequence"]) == {0, 1}
    assert {*sites.names} == {*family.sites, "block"} | (set() if family.parallel else {"after_attention"})
    outputs = [g["token_id"].tolist() for _, g in sites.tokens.groupby("sequence")]
    networks = (plain_of(name), oracle_of(name))
    runs = [[oracle_run(n, family, p, o) for p, o in zip(prompts, outputs)] for n in networks]
    for number, site in enumerate(sites.names):
        plain, exact = (family.unembed(n, torch.cat([run[site] for run in own])) for n, own in zip(networks, runs))
        tops = [logits.softmax(-1).amax(-1) for logits in (plain, exact)]
        assert_as_near(torch.tensor(sites["probability"][:, :, number]), *tops, site)
        assert_top_ids(torch.tensor(sites["top1"][:, :, number]), plain, exact)
        assert sites["topk_ids"].shape == (len(sites.tokens), trace.layers, len(sites.names), 10)


def test_sites_and_pairs_later(model_of, tmp_path, one_line):
    """A larger number of sequences replaces a smaller one; the tokens stay. Given texts have them, too.

    Pairs end in the trace's own readouts.
    """
    again = partial(make, model_of("llama"), tmp_path, given=True)
    bare = again()
    for kind in ("sites", "pairs"):
        one_line(ValueError, f"{kind}=True", lambda: getattr(bare, kind))
    few, more = again(sites=1).sites, again(sites=3, pairs=2)
    sites, pairs = more.sites, more.pairs
    assert sites.names == ("attention", "after_attention", "feed_forward", "block")
    assert set(few.tokens["sequence"]) == {0} and sites.tokens["sequence"].nunique() == 3
    assert_same(more, bare)
    of_pairs = bare.tokens.loc[pairs["row"], "sequence"]
    lengths = bare.tokens["sequence"].value_counts()
    assert of_pairs.tolist() == sum(([i] * min(lengths[i], PAIR_TOKENS) for i in (0, 1)), [])
    assert_close(pairs["js"][:, :, -1], bare["js_final"][pairs["row"]])
    assert_close(pairs["cosine"][:, :, -1], bare["cosine"][pairs["row"]])
    one_line(KeyError, ("'entropie'", "entropy"), lambda: bare["entropie"])


def test_exit_layers_against_loops(one_line):
    """Few ids, so that tokens agree early and change again; some do not agree at layer L, as in low precision."""
    rng, layers = np.random.default_rng(0), 6
    top1, final = rng.integers(0, 2, (300, layers + 1)), rng.integers(0, 2, 300)
    assert (top1[:, -1] != final).any()
    for row, token, *found in zip(top1, final, *(exit_layer(top1, final, name) for name in ("first", "stable"))):
        agrees = [layer == layers or row[layer] == token for layer in range(layers + 1)]  # at L each has its answer
        first = min(layer for layer in range(1, layers + 1) if agrees[layer])
        assert found == [first, min(layer for layer in range(1, layers + 1) if all(agrees[layer:]))]
    one_line(ValueError, "'last'", lambda: exit_layer(top1, final, "last"))


def test_outputs_that_end_at_once_or_later(made, model_of, tmp_path, eos):
    """An end token is kept and marked, with an empty place at the end of its text."""
    model, free = model_of("llama"), made("llama").tokens
    eos(model, set(free.query("position == 0")["token_id"]))
    none = make(model, tmp_path / "none", sites=2, pairs=2)
    assert none.sequences["length"].eq(0).all() and none.sequences["output"].eq("").all()
    assert none.tokens["is_eos"].all() and not none.tokens["truncated"].any() and not none.statistic_rows().any()
    end = int(free.query("sequence == 0 and position == 2")["token_id"].iloc[0])
    eos(model, {end})
    some = make(model, tmp_path / "some")
    rows, first = some.tokens.query("sequence == 0"), some.sequences.iloc[0]
    assert rows["is_eos"].tolist() == [False] * first["length"] + [True] and rows["token_id"].iloc[-1] == end
    assert rows["start"].iloc[-1] == rows["end"].iloc[-1] == len(first["output"]) > 0
    assert some.sequences["truncated"].sum() == some.sequences["length"].eq(STEPS).sum() > 0 == first["truncated"]


def test_reference_probability(model_of, tmp_path, monkeypatch):
    """The reference's next token while the output follows it, once more where both differ, then NaN."""
    model, family, oracle = model_of("llama"), FAMILIES["llama"], oracle_of("llama")
    prompt = model.tokenizer(PROMPTS[0])["input_ids"]
    output = plain_greedy(oracle, family, prompt, STEPS, model.eos_ids)
    logs = family.unembed(oracle, oracle_run(oracle, family, prompt, output)["states"]).log_softmax(-1)
    assert making.reference_ids(model, TASK, 0) == [*model.tokenizer("of the")["input_ids"], *model.eos_ids]
    for agree in (0, 2, STEPS):
        wanted = output[:agree] + [(output[agree] + 1) % 256 + 4 if agree < STEPS else 9] + [9] * 9
        monkeypatch.setattr(making, "reference_ids", lambda *_args, wanted=wanted: wanted)
        task = eelib.Task.from_prompts([PROMPTS[0]], name=f"agree-{agree}")
        got = make(model, tmp_path, task)["reference_probability"]
        known = min(agree + 1, STEPS)
        assert np.isnan(got[known:]).all() and not np.isnan(got[:known]).any()
        expected = logs[torch.arange(known), :, torch.tensor(wanted[:known])].exp()
        np.testing.assert_allclose(got[:known], expected, rtol=2e-3, atol=1e-5)


def test_states_that_are_not_finite_leave_nothing_and_stop_nobody(folder_of, tmp_path, one_line):
    """In the first shard: the layer is named. No folder stays, nor a lock, though a bar is shown and the error kept.

    Of a sub-layer, its name and its block are named.
    """
    model = eelib.load_model(str(folder_of("llama")), device="cpu")
    weights = model.blocks[1].mlp.down_proj.weight.data
    sound = weights.clone()
    weights[0, 0] = np.inf
    with pytest.raises(ValueError, match="^the states of layer 2 of 3 hold values that are not finite.*$") as kept:
        make(model, tmp_path / "runs", progress=True)
    assert kept and not (tmp_path / "runs").exists()
    weights.copy_(sound)
    assert make(model, tmp_path / "runs").manifest["finished"]
    weights = model.blocks[2].self_attn.o_proj.weight.data
    weights[0, 0] = np.inf
    one_line(InputError, "the attention outputs of layer 3 of 3", lambda: make(model, tmp_path / "runs", sites=1))


def test_a_trace_is_made_in_inference_mode_too(model_of, made, tmp_path):
    with torch.inference_mode():
        assert_same(make(model_of("llama"), tmp_path / "runs", sites=2, pairs=2), made("llama"))


def test_states_that_are_not_there_are_named_in_one_line(made, tmp_path, one_line):
    trace = made("llama")
    place = shutil.copytree(trace.folder, tmp_path / trace.folder.name)
    (place / "states-00000.parquet").unlink()
    one_line(InputError, "keeps no states, or they were altered", lambda: eelib.Trace(place).states)


def test_a_reader_that_is_off_by_one_is_found(folder_of, model_of, tmp_path, monkeypatch, one_line):
    """What is compared is what was read: in float32 the run stops, in bfloat16 every such token is counted."""
    add = ReadoutBuffer.add

    def late(reader, states, rows, ids):  # each token's states one step late
        add(reader, getattr(reader, "before", states), rows, ids)
        reader.before = states

    monkeypatch.setattr(ReadoutBuffer, "add", late)
    task = eelib.Task.from_prompts(PROMPTS[:1])
    one_line(SelfCheckError, ("top-1", "emitted"), lambda: make(model_of("llama"), tmp_path / "float32", task))
    low = eelib.load_model(str(folder_of("llama")), device="cpu", dtype="bfloat16")
    trace = make(low, tmp_path / "bfloat16", task)
    assert trace.manifest["mismatches"] == (trace["top1"][:, -1] != trace.tokens["token_id"]).sum() > 0


def test_out_of_memory_halves_the_batch(made, model_of, tmp_path, monkeypatch, capsys):
    """Only batches of two fit: the result is the same, and one line says so."""
    plain, whole = making.read_outputs, made("llama")

    def limited(model, prompts, *more):
        if len(prompts) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return plain(model, prompts, *more)

    monkeypatch.setattr(making, "read_outputs", limited)
    report_halving.cache_clear()
    assert_same(make(model_of("llama"), tmp_path), whole, exact=False)
    assert capsys.readouterr().out.count("out of memory") == 1


@pytest.mark.parametrize("name", ["t5", "bert"])
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


# Texts that are read as they are


def test_what_is_stored_of_texts(read_of, model_of):
    """The window's end cuts a text, and is counted; a single token predicts nothing; no text was decoded."""
    trace, model = read_of("llama"), model_of("llama")
    assert trace.given and trace.manifest["settings"] == {"given": True, "dtype": "float32", "device": "cpu"}
    assert (trace.manifest["skipped"], trace.manifest["cut"], trace.manifest["mismatches"]) == (1, 1, 0)
    sequences = trace.sequences
    assert sequences["sequence"].tolist() == READ
    assert sequences["truncated"].tolist() == [row == 5 for row in READ]
    assert sequences["length"].max() == WINDOW - 1 and sequences["prompt_tokens"].eq(1).all()
    firsts = [model.tokenizer.decode(model.tokenizer(TEXTS.prompts[i])["input_ids"][:1]) for i in READ]
    for first, row in zip(firsts, sequences.itertuples()):
        assert row.prompt.startswith(first + row.output)
        assert row.truncated or row.prompt == first + row.output
    assert trace.statistic_rows().all() and not np.isnan(trace["reference_rank"]).any()


def test_what_makes_another_trace(model_of, monkeypatch):
    model = model_of("llama")

    def folder(task=TASK, steps=STEPS, given=False):
        return plan.Job(model, task, steps, "runs", given=given).folder

    found = [folder(), folder(steps=5), folder(eelib.Task.from_prompts(PROMPTS)), folder(replace(TASK, chat=True))]
    for part, name, value in (
        (model, "hash", "other weights"),
        (plan, "TRACE_VERSION", plan.TRACE_VERSION + 1),
        (torch, "__version__", "0.1"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(part, name, value)
            found.append(folder())
    assert folder(steps=1, given=True) == folder(steps=99, given=True) not in found and folder() == found[0]
    assert len(set(found)) == len(found) == 7


def test_a_finished_trace_in_a_folder_that_can_not_be_written_is_read(made, model_of, monkeypatch, one_line, tmp_path):
    """All that is asked for is there; what is not is refused for the folder's sake, before the model runs."""

    def denied(path, *_more):
        raise PermissionError(13, "Permission denied", str(path))

    trace = made("llama")
    monkeypatch.setattr(files, "acquire", denied)  # no lock can be taken
    monkeypatch.setattr(decode, "greedy_decode", None)
    assert_same(made("llama"), trace)
    call = partial(make, model_of("llama"), trace.folder.parents[1], max_new_tokens=STEPS + 1)
    one_line(StorageError, ("can't be made or written to", "Permission denied"), call)


@pytest.mark.parametrize(
    "options, part",
    [
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"sites": "yes"}, "sites 'yes'"),
        ({"task": "translation/de-en"}, "eelib.load_task"),
        ({"task": eelib.Task.from_prompts(["word " * 200])}, "each prompt does not fit llama's window"),
        ({"task": eelib.Task.from_prompts(["a"], chat=True)}, "chat template"),
        ({"task": eelib.Task.from_prompts(["a"]).pick([])}, "has no texts"),
        ({"sites": 1}, "no sub-layers"),
        ({"given": True, "model": "t5"}, ("decoder-only", "seq2seq")),
    ],
)
def test_bad_arguments_write_nothing(options, part, model_of, tmp_path, monkeypatch, one_line):
    """Before anything is decoded."""
    more = {"model": "llama"} | options
    model = model_of(more.pop("model"))
    if "sites" in more:
        monkeypatch.setattr(model, "components", [])
        monkeypatch.setattr(model, "components_error", "no sub-layers were found")
    monkeypatch.setattr(making, "make_shard", None)
    one_line(ValueError, part, lambda: make(model, tmp_path / "runs", **more))
    assert not (tmp_path / "runs").exists()


def test_a_tokenizer_that_knows_less_than_half_of_a_text_is_refused(model_of, tmp_path, monkeypatch, one_line):
    ids = model_of("llama").tokenizer("abc")["input_ids"]
    monkeypatch.setattr(type(model_of("llama")), "unknown_ids", set(ids[1:]))
    call = partial(make, model_of("llama"), tmp_path / "runs", eelib.Task.from_prompts(["abc"]))
    one_line(ValueError, ("does not know most of the text", "2 of 3 tokens"), call)
    assert not (tmp_path / "runs").exists()


WEIRD = [
    "👩‍👩‍👧 🏳️‍🌈",
    "שלום \u202eabc",
    "a\u2028b\x07\x1b[31m",
    "\u200b\u200d",
    "<b>$x$ `y` | z",
    "x" * 100_000,
]


def test_weird_texts_pass(model_of, tmp_path):
    """Each is put to the model as it is; only the line of 100,000 characters is beyond the window, and counted."""
    task = eelib.Task.from_prompts(WEIRD, name="../weird/ $n$ " + "n" * 300)
    trace = make(model_of("llama"), tmp_path, task)
    assert trace.manifest["skipped"] == 1 and trace.sequences["prompt"].tolist() == WEIRD[:-1]
    assert trace.folder.parent.parent == tmp_path and np.isfinite(trace["entropy"]).all()
    assert [*tmp_path.iterdir()] == [trace.folder.parent]


def test_rows_that_may_not_be_padded_share_a_batch_with_their_equals_only(model_of, tmp_path, monkeypatch):
    """Given texts are padded on the right, which harms no model."""
    model = model_of("llama")
    monkeypatch.setattr(model, "pads", False)
    alike, mixed = (make(model, tmp_path, given=given) for given in (False, True))
    lengths = [len(ids) for ids in model.encode(TASK.prompts)]
    assert all(len({lengths[row] for row in rows}) == 1 for rows in alike.manifest["plan"])
    assert max(map(len, alike.manifest["plan"])) > 1 and len(mixed.manifest["plan"]) == 3
