"""Texts read as they are: every readout against a whole float64 run of each text; batches, windows, what is refused."""

import numpy as np
import plain_runs
import pytest
import torch
from families import CAUSAL, FAMILIES
from near import allowed_error, assert_as_near
from traces import assert_same, assert_top_ids, clear_tops, make

import eelib
from checks.tiny_texts import PROMPTS, WINDOW
from eelib.tracing import make as making
from eelib.tracing.columns import READOUTS
from eelib.tracing.trace import PAIR_TOKENS, Sites, exit_layer

LONG = "over the hill and the hills, " * 20  # beyond the window
TEXTS = eelib.Task.from_prompts([*PROMPTS, LONG, "Hügel 😀", "test of words"])  # of which "a" is a single token
READ = [0, 1, 3, 4, 5, 6, 7]


def read(model, folder, task=TEXTS, **more):
    return make(model, folder, task, given=True, **more)


@pytest.fixture(scope="module")
def given(model_of, tmp_path_factory):
    """given(family): a finished trace of the texts in batches of three; not to be changed."""
    folder = tmp_path_factory.mktemp("given")
    return lambda name, **more: read(model_of(name), folder, **more)


@pytest.mark.parametrize("name", CAUSAL)
def test_against_the_oracle(name, given, model_of, plain_of, oracle_of):
    """Every position of a batched trace, against a run of the whole text alone."""
    model, family, trace = model_of(name), FAMILIES[name], given(name)
    texts = [model.tokenizer(TEXTS.prompts[row])["input_ids"][:WINDOW] for row in READ]
    tokens = trace.tokens
    assert [g["token_id"].tolist() for _, g in tokens.groupby("sequence")] == [ids[1:] for ids in texts]
    known, final = (torch.tensor(ids) for ids in (tokens["token_id"].to_numpy(), trace["top1"][:, -1]))
    found = []
    for network in (plain_of(name), oracle_of(name)):
        states = torch.cat([plain_runs.oracle_run(network, family, ids[:1], ids[1:])["states"] for ids in texts])
        logits = family.unembed(network, states)
        found.append((logits, plain_runs.readouts(logits, states, final.long(), known)))
    (plain_logits, plain), (logits, exact) = found
    for readout in {*exact} & {*READOUTS}:
        assert_as_near(torch.tensor(trace[readout]), plain[readout], exact[readout], readout)
    assert_top_ids(torch.tensor(trace["top1"]), plain_logits, logits)
    near = 2 * allowed_error(plain_logits, logits)
    for readout, ids in (("final_rank", final), ("reference_rank", known)):
        own = logits.gather(2, ids.long()[:, None, None].expand(-1, logits.shape[1], 1))
        low, high = ((logits > own + shift).sum(-1) + 1 for shift in (near, -near))
        assert ((low <= torch.tensor(trace[readout])) & (torch.tensor(trace[readout]) <= high)).all()
    assert (trace["final_rank"][:, -1] == 1).all()
    clear = clear_tops(plain_logits, logits).all(-1).numpy()
    assert clear.mean() > 0.9
    for definition in ("first", "stable"):
        expected = exit_layer(logits.argmax(-1).numpy(), logits[:, -1].argmax(-1).numpy(), definition)
        np.testing.assert_array_equal(trace.exit_layer(definition)[clear], expected[clear])
    assert (tokens["token_id"] != trace.final_ids).mean() > 0.5  # so the target is another than the text's own token


@pytest.mark.parametrize("name", CAUSAL)
def test_batches_are_what_single_texts_are(name, given, model_of, tmp_path, monkeypatch):
    """Also of a model whose rows may not be padded on the left, as decoding does it."""
    monkeypatch.setattr(model_of(name), "pads", False)
    whole, single = given(name), read(model_of(name), tmp_path, batch_size=1)
    assert [len(rows) for rows in whole.manifest["plan"]] == [3, 3, 1] and len(single.manifest["plan"]) == len(READ)
    np.testing.assert_array_equal(whole["top1"], single["top1"])
    assert_same(whole, single, exact=False)


def test_what_is_stored_of_texts(given, model_of):
    """The window's end cuts a text, and is counted; a single token predicts nothing; no text was decoded."""
    trace, model = given("llama"), model_of("llama")
    assert trace.given and trace.manifest["settings"] == {"given": True, "dtype": "float32", "device": "cpu"}
    assert (trace.manifest["skipped"], trace.manifest["cut"], trace.manifest["mismatches"]) == (1, 1, 0)
    sequences = trace.sequences
    assert sequences["sequence"].tolist() == READ and sequences["prompt"].tolist() == [TEXTS.prompts[i] for i in READ]
    assert sequences["truncated"].tolist() == [row == 5 for row in READ]
    assert sequences["length"].max() == WINDOW - 1 and sequences["prompt_tokens"].eq(1).all()
    firsts = [model.tokenizer.decode(model.tokenizer(TEXTS.prompts[i])["input_ids"][:1]) for i in READ]
    for first, (_, row) in zip(firsts, sequences.iterrows()):
        assert row["prompt"].startswith(first + row["output"]) and (
            row["truncated"] or row["prompt"] == first + row["output"]
        )
    assert trace.statistic_rows().all() and not np.isnan(trace["reference_rank"]).any()


def test_an_end_token_that_the_tokenizer_adds_is_predicted_and_no_statistic(folder_of, tmp_path):
    model = eelib.load_model(str(folder_of("llama")), device="cpu")
    plain = model.tokenizer
    model.tokenizer = type(
        "Ends",
        (),
        {
            "__call__": lambda self, *a, **k: {"input_ids": [[2, *ids, 1] for ids in plain(*a, **k)["input_ids"]]},
            "__getattr__": lambda self, name: getattr(plain, name),
        },
    )()
    trace = read(model, tmp_path, eelib.Task.from_prompts(["a", "The hill"]))
    assert trace.manifest["skipped"] == 0 and trace.tokens["is_eos"].sum() == 2
    assert trace.sequences["output"].tolist() == ["a", "The hill"]  # the start token is the first
    assert (~trace.statistic_rows() == trace.tokens["is_eos"]).all()


def test_found_again_whatever_does_not_matter_and_apart_from_a_decoding(given, made, model_of, monkeypatch):
    trace = given("llama")
    monkeypatch.setattr(making, "read_given", None)
    assert given("llama", max_new_tokens=99).folder == trace.folder
    assert made("llama").folder.name != trace.folder.name


def test_sites_and_pairs_of_given_texts(given):
    """The block's site is the block's readout in the trace, ranks of the last layer's top-1 included."""
    trace = given("llama", sites=2, pairs=1)
    sites = trace.sites
    at = sites.names.index("block")
    for readout in Sites.READOUTS:
        np.testing.assert_allclose(sites[readout][:, :, at], trace[readout][sites.rows, 1:], rtol=1e-4, atol=1e-6)
    rows = trace.pairs["row"]
    assert (trace.tokens.loc[rows, "sequence"] == 0).all()
    assert len(rows) == min(len(trace.tokens.query("sequence == 0")), PAIR_TOKENS)


@pytest.mark.parametrize(
    "options, part",
    [
        ({"model": "t5"}, ("decoder-only", "seq2seq")),
        ({"model": "bert"}, ("decoder-only", "masked")),
        ({"model": "bert_labels"}, ("decoder-only", "classifier")),
        ({"given": "yes"}, "given 'yes'"),
        ({"given": 1}, "given 1"),
        ({"task": eelib.Task.from_prompts(["The hill"], chat=True)}, "chat=False"),
        ({"task": eelib.Task.from_prompts(["a", "b"])}, "each text has a single token"),
    ],
)
def test_what_does_not_go_with_given_texts(options, part, model_of, tmp_path, one_line):
    options = {"given": True, "model": "llama", **options}
    one_line(ValueError, part, lambda: make(model_of(options.pop("model")), tmp_path / "runs", **options))
    assert not (tmp_path / "runs").exists()


def test_a_plain_text_file(model_of, tmp_path):
    """Paragraphs are texts; what was read of one is what is read of it alone."""
    (tmp_path / "tales.txt").write_text("The small dog\nran over the hill.\n\nWo ist das Buch?\n\n\na quick test\n")
    task = eelib.load_task(str(tmp_path / "tales.txt"), limit=2)
    trace = read(model_of("llama"), tmp_path, task)
    assert trace.manifest["kind"] == "texts" and trace.task_name == "tales"
    assert trace.sequences["source"].tolist() == ["The small dog\nran over the hill.", "Wo ist das Buch?"]
    alone = read(model_of("llama"), tmp_path, eelib.Task.from_prompts(task.prompts[1:]))
    np.testing.assert_allclose(trace["entropy"][-len(alone) :], alone["entropy"], rtol=1e-4)
