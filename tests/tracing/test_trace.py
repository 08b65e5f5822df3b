"""Traces on disk: made once, whole or not at all, found again, and told apart by what made them."""

import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from traces import STEPS, TASK, assert_same, make

import eelib
from checks.tiny_texts import PROMPTS
from eelib.common import files
from eelib.tracing import make as tracing
from eelib.tracing import shards


def test_manifest(made, model_of):
    trace, model = made("llama"), model_of("llama")
    manifest = trace.manifest
    assert manifest["finished"] and manifest["weights"] == model.hash and manifest["task_hash"] == TASK.hash
    assert manifest["settings"] == {"max_new_tokens": STEPS, "dtype": "float32", "device": "cpu"}
    assert manifest["rows"] == len(trace.tokens) and manifest["mismatches"] == 0 and manifest["skipped"] == 0
    assert set(manifest["versions"]) >= {"python", "torch", "transformers"} and len(manifest["code"]) == 16
    assert sorted(i for rows in manifest["plan"] for i in rows) == list(range(len(TASK)))
    assert {"seconds", "date", "batch_size", "vocabulary", "layers", "special_ids"} <= set(manifest)
    assert (trace.layers, trace.model_name, trace.task_name) == (3, "llama", "prompts")
    assert not list(trace.place.glob("*.partial"))


@pytest.mark.parametrize(
    "change",
    [
        {"max_new_tokens": 5},
        {"task": eelib.Task.from_prompts(PROMPTS)},
        {"task": eelib.Task.from_prompts(TASK.prompts, references=[["other"]] * 8)},
    ],
)
def test_what_makes_another_trace(change, made, model_of):
    trace = made("llama")
    assert make(model_of("llama"), trace.place.parent.parent, **change).place != trace.place


def test_weights_and_code_make_another_trace(made, model_of, monkeypatch):
    trace, model = made("llama"), model_of("llama")
    monkeypatch.setattr(model, "hash", "other weights")
    assert make(model, trace.place.parent.parent).place != trace.place
    monkeypatch.undo()
    monkeypatch.setattr(tracing, "code_hash", lambda: "other code")
    assert make(model, trace.place.parent.parent).place != trace.place


def no_decoding(*_args):
    raise AssertionError("the model was asked to decode")


def test_finished_trace_is_only_read(made, model_of, monkeypatch):
    trace = made("llama")
    before = {f.name: f.stat().st_mtime_ns for f in trace.place.glob("[!.]*")}
    monkeypatch.setattr(tracing, "greedy_decode", no_decoding)
    monkeypatch.setattr(tracing, "states_of", no_decoding)
    assert_same(made("llama"), trace)
    assert {f.name: f.stat().st_mtime_ns for f in trace.place.glob("[!.]*")} == before


class Killed(BaseException):
    """What a kill looks like from inside."""


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("survive", [1, 2])
def test_killed_while_decoding(name, survive, made, model_of, tmp_path, monkeypatch):
    """Killed in shard `survive` + 1 of three, then asked again: only the rest is made; all is as if never killed."""
    calls, model = [], model_of(name)

    def decode(*args):
        calls.append(args)
        if len(calls) == survive + 1:
            raise Killed
        return plain(*args)

    plain = tracing.greedy_decode
    monkeypatch.setattr(tracing, "greedy_decode", decode)
    with pytest.raises(Killed):
        make(model, tmp_path)
    trace = make(model, tmp_path)
    assert len(calls) == 4  # three shards, one of them begun twice
    assert_same(trace, made(name))
    assert trace.manifest["rows"] == len(trace.tokens)


def delete_shard(place):
    (place / "tokens-00001.parquet").unlink()


def delete_sequences(place):
    (place / "sequences-00000.parquet").unlink()


def cut_shard(place):
    content = (place / "tokens-00000.parquet").read_bytes()
    (place / "tokens-00000.parquet").write_bytes(content[: len(content) // 2])


def flip_byte(place):
    content = bytearray((place / "sequences-00002.parquet").read_bytes())
    content[40] ^= 1
    (place / "sequences-00002.parquet").write_bytes(content)


def killed_before_the_manifest(place):
    manifest = shards.load_manifest(place)
    manifest["files"] = {k: v for k, v in manifest["files"].items() if not k.endswith("2")}
    manifest["counts"].pop("2")
    for key in ("finished", "rows", "mismatches"):
        manifest.pop(key)
    shards.save_manifest(place, manifest)
    (place / "tokens-00002.parquet.partial").write_bytes(b"half")


def killed_before_the_first_shard(place):
    for file in place.glob("*.*"):
        file.unlink()


@pytest.mark.parametrize(
    "damage",
    [delete_shard, delete_sequences, cut_shard, flip_byte, killed_before_the_manifest, killed_before_the_first_shard],
)
def test_damage_is_found_and_redone(damage, made, model_of, tmp_path):
    model, whole = model_of("llama"), made("llama")
    place = shutil.copytree(whole.place, tmp_path / whole.place.parent.name / whole.place.name)
    damage(place)
    again = make(model, tmp_path)
    assert again.place == place
    assert_same(again, whole)
    assert again.manifest["rows"] == whole.manifest["rows"] and again.manifest["finished"]
    for name in ("tokens-00001", "sequences-00002"):
        assert shards.intact(place, again.manifest, name)


def ask(folder, runs):
    """One of two processes that want the same trace: (shards it decoded, a sum that stands for the content)."""
    decodings = []
    plain = tracing.greedy_decode
    tracing.greedy_decode = lambda *args: decodings.append(1) or plain(*args)
    trace = make(eelib.load_model(folder, device="cpu"), runs)
    return len(decodings), trace["entropy"].sum()


def test_two_asking_at_once_make_it_once(folder_of, tmp_path, made):
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        asked = [pool.submit(ask, str(folder_of("llama")), tmp_path) for _ in range(2)]
        answers = sorted(future.result(timeout=120) for future in asked)
    assert [count for count, _ in answers] == [0, 3]
    assert answers[0][1] == answers[1][1] == made("llama")["entropy"].sum()


def test_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="needs 1,000 bytes.*No space left"):
        files.write_atomically(tmp_path / "a.parquet", b"x" * 1000)
    assert not list(tmp_path.iterdir())


def test_more_sites_later(model_of, tmp_path, made):
    """A larger number replaces a smaller one; the tokens stay."""
    model = model_of("llama")
    few = make(model, tmp_path, sites=1).sites
    more = make(model, tmp_path, sites=3)
    assert set(few.tokens["sequence"]) == {0} and set(more.sites.tokens["sequence"]) == {0, 1, 2}
    count = len(few.tokens)
    np.testing.assert_array_equal(more.sites["probability"][:count], few["probability"])
    assert_same(more, made("llama"))
