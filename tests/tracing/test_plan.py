"""Which prompts a trace takes, and how large its batches are."""

import json
import shutil

from traces import make

import eelib
from eelib.tracing import plan


def test_prompts_beyond_the_window(model_of, tmp_path, one_line):
    """They are skipped and counted, and the others have their own numbers; a task of them alone leaves nothing."""
    model = model_of("llama")
    task = eelib.Task.from_prompts(["a", "word " * 200, "the hill"])
    trace = make(model, tmp_path, task)
    assert trace.manifest["skipped"] == 1 and trace.sequences["sequence"].tolist() == [0, 2]
    long = eelib.Task.from_prompts(["word " * 200])
    one_line(ValueError, "each prompt does not fit llama's window", lambda: make(model, tmp_path / "no", long))
    assert not (tmp_path / "no").exists()


def knows_only(word, folder):
    """The folder's tokenizer, with a vocabulary of one word."""
    file = folder / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"<unk>": 0, word: 1}, "unk_token": "<unk>"}
    simple = {"pre_tokenizer": {"type": "Whitespace"}, "normalizer": None, "post_processor": None, "decoder": None}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": model, "added_tokens": []} | simple))


def test_a_tokenizer_that_knows_less_than_half_of_a_text_is_refused(folder_of, tmp_path, one_line):
    folder = shutil.copytree(folder_of("llama"), tmp_path / "few-words")
    knows_only("dog", folder)
    model = eelib.load_model(str(folder), device="cpu")
    half = eelib.Task.from_prompts(["dog dog", "a hill"])
    assert make(model, tmp_path / "runs", half).sequences["length"].size == 2
    less = eelib.Task.from_prompts(["dog dog", "on a hill"])
    said = ("no words for most of the text", "3 of 5 tokens")
    one_line(ValueError, said, lambda: make(model, tmp_path / "refused", less))
    assert not (tmp_path / "refused").exists()


ROW = 50_000 * 32 * 4 * (2 * 3 + 16)  # bytes: tokens, hidden size, float32, caches and activations of three blocks


def test_batch_size_from_free_memory(model_of, monkeypatch):
    """A power of two whose rows fill half of it, one at least, a shard at most."""
    for memory, size in ((1 << 40, 32), (2 * ROW * 20, 16), (2 * ROW * 16, 16), (2 * ROW * 16 - 1, 8), (1 << 20, 1)):
        monkeypatch.setattr(plan, "free_memory", lambda _device, memory=memory: memory)
        assert plan.batch_that_fits(model_of("llama"), 50_000) == size


def test_files_of_another_model_s_trace_are_not_taken_for_this_one_s(model_of, tmp_path, capsys):
    """Moved into its place whole, with a manifest that is as it was written."""
    made, other = make(model_of("llama"), tmp_path), make(model_of("granite"), tmp_path)
    wanted = {file.name: file.read_bytes() for file in made.folder.iterdir() if file.suffix == ".parquet"}
    for file in other.folder.iterdir():
        shutil.copy(file, made.folder / file.name)
    again = make(model_of("llama"), tmp_path)
    assert again.folder == made.folder and again.manifest["weights"] == model_of("llama").hash
    assert {name: (again.folder / name).read_bytes() for name in wanted} == wanted
    assert "another trace's" in capsys.readouterr().out


def test_a_prompt_s_number_is_that_in_the_task(model_of, tmp_path, monkeypatch, one_line):
    model = model_of("llama")
    monkeypatch.setattr(plan, "CHUNK", 2)
    monkeypatch.setattr(model.network.get_input_embeddings(), "num_embeddings", 300)
    prompts = ["a", "b", "c", "the small dog"]
    least = max(max(ids) for ids in model.tokenizer(prompts[:3])["input_ids"])
    monkeypatch.setattr(model.network.get_input_embeddings(), "num_embeddings", least + 1)
    task = eelib.Task.from_prompts(prompts)
    one_line(ValueError, "prompt 3 has token", lambda: make(model, tmp_path, task))
