"""Which prompts a trace takes, and how large its batches are."""

import pytest
from traces import make

import eelib
from eelib.tracing import plan


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


ROW = 50_000 * 32 * 4 * (2 * 3 + 16)  # bytes: tokens, hidden size, float32, caches and activations of three blocks


@pytest.mark.parametrize(
    "memory, size", [(1 << 40, 32), (2 * ROW * 20, 16), (2 * ROW * 16, 16), (2 * ROW * 16 - 1, 8), (1 << 20, 1)]
)
def test_batch_size_from_free_memory(memory, size, model_of, monkeypatch):
    """A power of two whose rows fill half of it, one at least, a shard at most."""
    monkeypatch.setattr(plan, "free_memory", lambda _device: memory)
    assert plan.batch_that_fits(model_of("llama"), 50_000) == size
