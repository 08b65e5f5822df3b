"""The benchmark of early exit, on a tiny model: every way is timed, lossless ones give plain decoding's tokens."""

import json
import sys

import numpy as np
import pytest
import torch

import eelib
from checks import exits
from checks.exits_shapes import Pattern, Shape, replayed
from eelib.exits.forecast import Planned
from eelib.models.lens_adapters import AdapterBlock, Translators, save_lens_adapter

TINY = Shape(4, 32, 64, 4, 2, 300, 25)


def test_ways_are_timed(folder_of, tmp_path, monkeypatch):
    out = tmp_path / "exits.json"
    given = ["exits", "--models", str(folder_of("llama")), "--sequences", "3", "--repeats", "1", "--output", str(out)]
    given += ["--shapes", "tiny", "--readings"]
    monkeypatch.setattr(sys, "argv", given)
    monkeypatch.setattr(exits, "SIZES", (1, 2))
    monkeypatch.setitem(exits.SHAPES, "tiny", TINY)
    exits.main()
    content = json.loads(out.read_text())
    rows = content["rows"]
    for row in content["crossover"]:
        assert row["rows"] in (1, 2, 4, 8, 16, 32, 64) and min(row[way] for way in ("ruled", "parted", "together")) > 0
    assert {row["batch"] for row in rows} == {1, 2}
    exact = [row for row in rows if row["kind"] in ("plain", "lossless") or row["way"] == "transformers"]
    assert all(row["agrees"] == row["of"] and row["seconds"] > 0 for row in exact) and len(exact) >= 5
    loops = [row["tokens"] for row in rows if row["kind"] == "loop" and row["seconds"] > 0]
    assert len(loops) == 4 and len(set(loops)) == 1
    early = [row for row in rows if row["kind"] in ("lossless", "lossy")]
    assert all(min(row["forecast"], row["bound"], *row["if_free"].values()) > 0 for row in early)
    assert {row["kind"] for row in early} == {"lossless", "lossy"} and all(row["score"] >= 0 for row in early)
    assert all(0 <= row["accepted"] <= row["drafted"] for row in early)
    (shape,) = content["shapes"]
    assert shape["layers"] == TINY.layers and shape["speed_up"] > 0 and shape["ceiling"] > 0
    (assisted,) = [row for row in rows if "assistant_early_exit" in row["way"]]
    assert assisted["seconds"] is None or assisted["tokens"] > 0


@pytest.mark.parametrize("changes, wrong", [({}, False), ({"agrees": 8.0}, True), ({"tokens": 10.0}, True)])
def test_a_lossless_way_with_other_tokens_is_an_error(changes, wrong, tmp_path, monkeypatch):
    """One token that differs, or one too many; a lossy way may have either."""
    row = {"model": "made", "batch": 1, "way": "drafts", "kind": "lossless", "agrees": 9.0, "of": 9.0, "tokens": 9.0}
    rows = [row | changes, row | {"way": "gate", "kind": "lossy", "agrees": 1.0}]
    monkeypatch.setattr(exits, "measured", lambda *_: exits.Found(rows, [], {}))
    monkeypatch.setattr(exits, "best_pattern", lambda _: None)
    out = tmp_path / "exits.json"
    monkeypatch.setattr(sys, "argv", ["exits", "--models", "made", "--shapes", "--readings", "--output", str(out)])
    if wrong:
        with pytest.raises(SystemExit, match="^made, batch 1, drafts: . of its .* plain decoding, which has 9$"):
            exits.main()
    else:
        exits.main()
    assert json.loads(out.read_text())["rows"] == rows


@pytest.mark.parametrize("right, per_round", [(True, 3.0), (False, 1.0)])
def test_a_pattern_is_replayed_on_another_shape(right, per_round):
    """Drafts of two through half of the layers, all right or all wrong: 24 tokens after the prompt's."""
    pattern = Pattern("made", 2, 1, 2, [Planned(np.array([2, 1, 1]), np.array([True, right, right]))])
    found = replayed(TINY, pattern, 1)
    assert (
        found["layer"] == 2
        and found["accepted"] == right
        and found["per_round"] == found["per_round_formula"] == per_round
    )
    assert found["ceiling"] == pytest.approx(per_round * (4 + found["head"]) / (4 + 2 * 2 + 3 * found["head"]))
    assert found["wide"] > 0 and found["plain_tokens_per_second"] > 0


def test_a_pattern_goes_round():
    plans = [
        Planned(np.array([4, 2, 2]), np.array([True, False, True])),
        Planned(np.array([4, 2]), np.array([False, True])),
    ]
    assert Pattern("made", 4, 2, 3, plans).right(7) == [False, True, True, False, True, True, False]


def test_readings_are_timed_and_put_into_the_report(folder_of, tmp_path, monkeypatch, capsys):
    """An adapter block and translators of a tiny model: all else in the report stays, and outputs are plain's."""
    base = eelib.load_model(str(folder_of("llama")), device="cpu")
    torch.manual_seed(3)
    for name, made in (
        ("block", AdapterBlock(base.layers, 1, base.hidden_size, 2)),
        ("translators", Translators(base.layers, base.hidden_size)),
    ):
        for values in made.parameters():
            torch.nn.init.normal_(values, 0.0, 0.3)
        save_lens_adapter(made, tmp_path / name, str(folder_of("llama")), base.hash)
    out = tmp_path / "exits.json"
    folders = [str(tmp_path / name) for name in ("block", "translators")]
    given = ["exits", "--only", "readings", "--sequences", "3", "--repeats", "1", "--output", str(out), "--readings"]
    monkeypatch.setattr(sys, "argv", given + folders)
    with pytest.raises(SystemExit):
        exits.main()
    assert "is no report that it could be put into" in capsys.readouterr().err
    out.write_text(json.dumps({"date": "before", "rows": [1], "readings": {"rows": []}}))
    exits.main()
    content = json.loads(out.read_text())
    part = content["readings"]
    assert content["date"] == "before" and content["rows"] == [1] and part["machine"]["threads"] >= 1
    assert (
        part["load"] >= 0 and part["date"] > "2026" and "--only readings" in part["command"] and part["sequences"] == 3
    )
    early = [row for row in part["rows"] if row["kind"] == "lossless"]
    assert {row["batch"] for row in part["rows"]} == {1, 8} and all(row["agrees"] == row["of"] for row in part["rows"])
    assert {row["way"].split(":")[0] for row in early} == {base.name, "block", "translators"}
    assert all(row["drafted"] >= row["accepted"] and row["forecast"] > 0 for row in early)
    drafted = {tuple(row["way"].split(": ")): row["accepted"] for row in early if row["batch"] == 1}
    assert len({right for (_, way), right in drafted.items() if way.startswith("layer 1, ")}) > 1  # each reads its own
    assert all("layer 1" in way for reading, way in drafted if reading == "block")
