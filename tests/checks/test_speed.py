"""The benchmark's own arithmetic: top-1s compared until a tie parts two outputs, rows, what a stopped run kept."""

import json

import numpy as np
import pytest

from checks import speed
from checks.speed_rows import cell_rows, compared, file_of
from checks.speed_shapes import QUICK, checkpoint, prompts
from checks.speed_workers import PEERS, RUNNERS


def save(path, tokens, top1, gap=None):
    """One way's results, as a measuring process keeps them."""
    np.savez(path, tokens=np.array(tokens), top1=np.array(top1), **({} if gap is None else {"gap": np.array(gap)}))
    return path


def test_a_difference_counts_unless_it_is_a_tie_and_nothing_after_a_parting_counts(tmp_path):
    expected = save(
        tmp_path / "a.npz",
        [[5, 6, 7], [1, 2, 3]],
        [[[0, 5], [0, 6], [0, 7]], [[4, 1], [4, 2], [4, 3]]],
        [[[1.0, 1.0], [1.0, 1e-5], [1.0, 1.0]], [[1.0, 1.0]] * 3],
    )
    # Row 0 parts at position 1 by a tie: position 2 is not compared. Row 1: one real difference at layer 0.
    other = save(tmp_path / "b.npz", [[5, 9, 8], [1, 2, 3]], [[[0, 5], [0, 9], [3, 8]], [[4, 1], [9, 2], [4, 3]]])
    assert compared(expected, other) == {"top1_differences": 1, "ties": 1, "not_compared": 1}
    assert compared(expected, expected) == {"top1_differences": 0, "ties": 0, "not_compared": 0}
    assert compared(expected, tmp_path / "missing.npz") == {}


def test_floor_is_decoding_plus_head_products_and_the_best_of_each(tmp_path):
    def answers(*seconds, peak=10.0):
        return [{"seconds": s, "peak_mb": peak, "loaded_mb": 100.0} for s in seconds]

    measured = {
        "trace": answers(4.0, 3.3, peak=50.0),
        "decode": answers(1.0, 2.0, peak=20.0),
        "head": answers(3.0, 2.0),
        "nnsight": [{"error": "no such thing"}] * 2,
    }
    found = {row["way"]: row for row in cell_rows(QUICK, 1, measured, tmp_path)}
    assert found["floor"]["seconds"] == [4.0, 4.0]
    assert found["trace"]["ratio_to_floor"] == 1.1
    assert found["trace"]["tokens_per_second"] == round(12 / 3.3, 2)
    assert found["trace"]["peak_above_decode_mb"] == 30.0
    assert found["nnsight"]["note"] == "no such thing" and found["nnsight"]["ratio_to_floor"] is None


def test_a_stopped_run_goes_on_and_a_half_written_line_is_made_again(tmp_path):
    class Counting:
        """Stands for the processes; counts what it is asked."""

        shape, asked = QUICK, 0

        def measure(self, way, request):
            self.asked += 1
            return {"seconds": 1.0, "peak_mb": 1.0, "loaded_mb": 1.0}

    request = {"prompts": "p.json", "sequences": 2, "batch": 1, "new_tokens": 3, "out": None}
    path, workers = tmp_path / "kept.jsonl", Counting()
    for way in ("decode", "head"):
        speed.Measurements(path, 1).get(workers, way, request, 0)
    assert speed.Measurements(path, 1).get(workers, "head", request, 0)["seconds"] == 1.0 and workers.asked == 2
    path.write_text(path.read_text()[:-20])
    speed.Measurements(path, 1).get(workers, "head", request, 0)
    assert workers.asked == 3
    assert len(speed.Measurements(path, 1).known) == 2
    speed.Measurements(path, 2).get(workers, "head", request, 0)
    assert workers.asked == 4, "another number of threads is another measurement"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, None),
        ({"ties": 3, "not_compared": 4}, None),
        ({"top1_differences": 2}, "tiny, batch 1, trace: 2 top-1s are not the plain way's"),
        (
            {"top1_differences": None, "note": "no room"},
            "tiny, batch 1, trace: not compared with the plain way (no room)",
        ),
    ],
)
def test_a_top_1_that_differs_or_is_not_compared_is_an_error(changes, words, tmp_path, monkeypatch):
    same = {
        "shape": "tiny",
        "batch": 1,
        "way": "trace",
        "note": "",
        "top1_differences": 0,
        "ties": 0,
        "not_compared": 0,
    }
    floor = same | {"way": "floor", "top1_differences": None}
    monkeypatch.setattr(speed, "CACHE", tmp_path)
    monkeypatch.setattr(speed, "measure_cell", lambda _, batch, *__: [floor, same | changes] if batch == 1 else [])
    if words:
        with pytest.raises(SystemExit) as ended:
            speed.main(["--quick"])
        assert ended.value.code == words
    else:
        speed.main(["--quick"])
    assert json.loads((tmp_path / "quick.json").read_text())["rows"] == [floor, same | changes]


@pytest.mark.parametrize(
    "command, named",
    [
        ("--shapes huge", "shape 'huge' is not known"),
        ("--peers lens", "peer 'lens' is not known"),
        ("--batches 2", "batch 2 is not one of"),
        ("--batches one", "not a list of numbers"),
        ("--repeats 0", "repeats 0"),
    ],
)
def test_a_wrong_argument_is_named(command, named, capsys):
    with pytest.raises(SystemExit):
        speed.arguments(command.split())
    assert named in capsys.readouterr().err


def test_the_size_of_a_shape_is_that_of_its_checkpoint(tmp_path):
    from safetensors.torch import load_file

    weights = load_file(checkpoint(QUICK, tmp_path) / "model.safetensors").values()
    measured = sum(weight.numel() * 4 for weight in weights) / 2**20
    assert QUICK.size_mb == pytest.approx(measured, rel=0.01)  # the norms are left out


def test_prompts_are_the_same_ids_for_text_and_for_peers(tmp_path):
    from transformers import AutoTokenizer

    known = json.loads(prompts(QUICK, tmp_path, 4).read_text())
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(QUICK, tmp_path))
    assert [tokenizer(text)["input_ids"] for text in known["texts"]] == known["ids"]
    assert {len(ids) for ids in known["ids"]} == {QUICK.prompt_tokens}
    varied = json.loads(prompts(QUICK, tmp_path, 40, varied=True).read_text())
    assert {len(ids) for ids in varied["ids"]} >= {4, 32}


def test_every_peer_is_pinned_and_has_its_runner():
    for peer in PEERS:
        pins = (RUNNERS / f"{peer}.txt").read_text().splitlines()
        assert all("==" in line for line in pins if not line.startswith("#"))
        assert any(line.startswith(f"{peer}==") for line in pins) and "torch==2.13.0" in pins
        assert (RUNNERS / f"run_{peer.replace('-', '_')}.py").exists()


def test_results_of_ways_have_files_of_their_own(tmp_path):
    assert len({file_of(tmp_path, QUICK, 1, way) for way in ("plain, stacked", "plain, step by step", "trace")}) == 3
