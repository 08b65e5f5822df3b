"""Traces of what is odd or wrong: one clear line, or the right numbers; nothing half-written."""

import numpy as np
import pytest
import torch
from traces import make

import eelib
from eelib.tracing import make as tracing


@pytest.mark.parametrize(
    "options, part",
    [
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"max_new_tokens": -3}, "max_new_tokens -3"),
        ({"max_new_tokens": "8"}, "max_new_tokens '8'"),
        ({"max_new_tokens": 2.0}, "max_new_tokens 2.0"),
        ({"max_new_tokens": True}, "max_new_tokens True"),
        ({"max_new_tokens": None}, "max_new_tokens None"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"batch_size": "4"}, "batch_size '4'"),
        ({"sites": -1}, "sites -1"),
        ({"sites": "yes"}, "sites 'yes'"),
        ({"pairs": -2}, "pairs -2"),
        ({"pairs": 0.5}, "pairs 0.5"),
        ({"task": "translation/de-en"}, "eelib.load_task"),
    ],
)
def test_bad_arguments_write_nothing(options, part, model_of, tmp_path, one_line):
    one_line(ValueError, part, lambda: make(model_of("llama"), tmp_path / "runs", **options))
    assert not (tmp_path / "runs").exists()


def test_prompts_beyond_the_window(model_of, tmp_path, one_line):
    """Skipped and counted, or refused if the caller is strict; the others keep their numbers."""
    model = model_of("llama")
    task = eelib.Task.from_prompts(["a", "word " * 200, "the hill"])
    one_line(ValueError, "1 of 3 prompts do not fit", lambda: make(model, tmp_path / "strict", task, strict=True))
    trace = make(model, tmp_path, task)
    assert trace.manifest["skipped"] == 1 and trace.sequences["sequence"].tolist() == [0, 2]
    one_line(ValueError, "1 of 3 prompts do not fit", lambda: make(model, tmp_path, task, strict=True))
    one_line(ValueError, "1 of 1", lambda: make(model, tmp_path, eelib.Task.from_prompts(["word " * 200])))
    assert not (tmp_path / "strict").exists() and len(list(tmp_path.glob("*/*"))) == 1  # the refused left nothing


def test_states_that_are_not_finite_leave_nothing(folder_of, tmp_path, one_line):
    """Found in the first shard: the layer is named, no folder stays."""
    model = eelib.load_model(str(folder_of("llama")), device="cpu")
    model.blocks[1].mlp.down_proj.weight.data[0, 0] = float("nan")
    one_line(ValueError, ("2", "not finite"), lambda: make(model, tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_sites_that_cannot_be_read_are_refused_before_decoding(model_of, tmp_path, monkeypatch, one_line):
    model = model_of("llama")
    monkeypatch.setattr(model, "parts", [])
    monkeypatch.setattr(model, "components_error", "no sub-layers were found")
    one_line(ValueError, "no sub-layers", lambda: make(model, tmp_path / "runs", sites=1))
    assert not (tmp_path / "runs").exists()


WEIRD = [
    "👩‍👩‍👧 🏳️‍🌈",
    "שלום \u202eabc",
    "Z\u0338\u0330a\u0335",
    "<script>alert(1)</script>",
    "a\u2028b\x07\x1b[31m",
    "\u200b\u200d",
    "$x$ `y` | z",
    "x" * 100_000,
]


@pytest.mark.parametrize("name", ["llama", "t5", "bert"])
def test_weird_texts_pass(name, model_of, tmp_path):
    """Each is put to the model as it is; only the line of 100,000 characters is beyond the window, and counted."""
    task = eelib.Task.from_prompts(WEIRD, name="../weird/ $n$ " + "n" * 300)
    trace = make(model_of(name), tmp_path, task, sites=2)
    assert trace.manifest["skipped"] == 1 and trace.sequences["prompt"].tolist() == WEIRD[:-1]
    assert trace.folder.parent.parent == tmp_path and np.isfinite(trace["entropy"]).all()
    assert [*tmp_path.iterdir()] == [trace.folder.parent]


def test_unknown_readouts_and_what_was_not_made(made, model_of, tmp_path, one_line):
    trace = made("llama")
    one_line(KeyError, ("'entropie'", "entropy"), lambda: trace["entropie"])
    one_line(KeyError, ("'cosine'", "final_rank"), lambda: trace.sites["cosine"])
    one_line(ValueError, "'last'", lambda: trace.exit_layer("last"))
    bare = make(model_of("llama"), tmp_path)
    one_line(ValueError, "sites=True", lambda: bare.sites)
    one_line(ValueError, "pairs=True", lambda: bare.pairs)


def test_last_layer_must_be_the_emitted_token(model_of, one_line):
    """Off by more than rounding stops a float32 run; within rounding the emitted token stands and is counted."""
    model = model_of("llama")
    top1 = torch.tensor([[5, 9], [5, 7]], dtype=torch.int32)
    shares = {"probability": torch.tensor([[0.5, 0.5], [0.5, 0.5]]), "top1": top1.clone()}
    far = tracing.Readout(shares | {"final_probability": torch.tensor([[0.5, 0.5], [0.5, 0.3]])})
    one_line(
        ValueError, ("row 1", "is 7", "emitted 8"), lambda: tracing.settle_last_layer(far, torch.tensor([9, 8]), model)
    )
    near = tracing.Readout(shares | {"final_probability": torch.tensor([[0.5, 0.5], [0.5, 0.49999]])})
    assert tracing.settle_last_layer(near, torch.tensor([9, 8]), model) == 1
    assert near["top1"].tolist() == [[5, 9], [5, 8]]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_out_of_memory_halves_the_batch(error, made, model_of, tmp_path, monkeypatch, capsys):
    """Only batches of two fit: the result is the same, and it is said once."""
    plain = tracing.read_outputs

    def limited(model, prompts, references, most):
        if len(prompts) > 2:
            raise error
        return plain(model, prompts, references, most)

    monkeypatch.setattr(tracing, "read_outputs", limited)
    trace = make(model_of("llama"), tmp_path)
    assert capsys.readouterr().out.count("out of memory") == 1
    assert (trace.tokens == made("llama").tokens).all(axis=None)
    np.testing.assert_allclose(trace["entropy"], made("llama")["entropy"], rtol=1e-4, atol=1e-5)


def test_other_errors_are_not_out_of_memory(model_of, tmp_path, monkeypatch):
    def broken(*_args):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(tracing, "read_outputs", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        make(model_of("llama"), tmp_path)


@pytest.mark.parametrize("memory, size", [(1 << 40, 32), (1 << 26, 16), (1 << 20, 1)])
def test_batch_size_from_free_memory(memory, size, model_of, monkeypatch):
    monkeypatch.setattr(tracing, "free_memory", lambda _device: memory)
    chosen = tracing.batch_that_fits(model_of("llama"), 50000)
    assert chosen <= size and (chosen == size or memory == 1 << 26)
