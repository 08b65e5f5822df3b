"""Exit layers by depth: from kept counts and outputs, against sums by hand."""

import json

import numpy as np
import pytest

from eelib.common.files import data_folder
from eelib.tasks.task import load_task
from eestudy.old.analysis import scale, trainings
from eestudy.old.figures.scale import scale_figure
from recipes.quality import TRANSLATIONS


def counts(blocks, layer, i):
    """8 tokens of text i: 6 leave at `layer`, one of them at the layer after in every second text, 2 at the last."""
    row = [0] * blocks
    row[layer - 1] += 6 - i % 2
    row[layer] += i % 2
    row[-1] += 2
    return row


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Made-up figures of depths 4 and 10, whose tokens leave at layers 2 and 4; outputs are the references."""
    for blocks, layer in ((10, 4), (4, 2)):
        texts = {}
        for name in TRANSLATIONS:
            outputs = [references[0] for references in load_task(name).references]
            rows = [counts(blocks, layer, i) for i in range(len(outputs))]
            never = [[0] * (blocks - 1) + [8]] * len(outputs)
            texts[name] = {"outputs": outputs, "first": rows, "stable": rows, "swapped": never}
        file = tmp_path / "scale" / f"pocket-llama-{blocks}-blocks.json"
        file.parent.mkdir(exist_ok=True)
        about = {"blocks": blocks, "tokens": 10**6, "machine": "a machine"}
        quality = {"one": {"BLEU": 10.0}, "other": {"BLEU": 20.0}}
        file.write_text(json.dumps(about | {"quality": quality, "texts": texts}))
    monkeypatch.setattr(trainings, "data_folder", lambda *parts: tmp_path.joinpath(*parts))
    return scale.models()


def test_the_shallowest_comes_first(kept):
    assert [one.blocks for one in kept] == [4, 10] and kept[0].captions == 15.0


def test_rows_by_hand(kept):
    table = scale.rows(kept)
    means = [(6 * 2 + 0.5 + 2 * 4) / 8, (6 * 4 + 0.5 + 2 * 10) / 8]
    assert [row.estimate for row in table["avg stable"]] == pytest.approx(means)
    assert [row.estimate for row in table["depth first"]] == pytest.approx([100 * means[0] / 4, 100 * means[1] / 10])
    assert [row.estimate for row in table["perc stable"]] == pytest.approx([75.0, 75.0])
    assert table["chance"].tolist() == [0.0, 0.0]
    assert [row.estimate for row in table["bleu"]] == pytest.approx([100.0, 100.0])
    settled = [interval.estimate for interval in table["settled"].iloc[1]]
    assert settled == pytest.approx([1, *[6 / 8] * 5, 5.5 / 8, 0, 0, 0])  # m = 0..9
    assert len(table["settled"].iloc[0]) == 4
    shares = [6 / 8, 5.5 / 8]  # at m = 1 and 2 of 4 layers; of 10, both m = 3 and m = 4 are before any token leaves
    assert table["third"].iloc[0].estimate == pytest.approx(100 * (shares[0] + (4 / 3 - 1) * (shares[1] - shares[0])))
    assert table["third"].iloc[1].estimate == pytest.approx(75)


def test_changes_are_paired(kept):
    """Texts vary likewise in both depths, so a difference in layers does not vary."""
    shallow, deep = (one.exits["stable"] for one in kept)
    found = trainings.change(scale.mean_layer, deep, shallow)
    assert found[:3] == pytest.approx([(6 * 2 + 2 * 6) / 8] * 3)
    assert trainings.change(scale.before_last, deep, shallow)[:3] == pytest.approx([0, 0, 0], abs=1e-9)


def test_statements_are_of_both_ends(kept):
    found = scale.statements(scale.rows(kept))
    assert (found["scale_shallow_blocks"], found["scale_deep_blocks"], found["scale_tokens"]) == (4, 10, 1)
    assert found["scale_shallow_depth"].estimate == pytest.approx(100 * (6 * 2 + 0.5 + 2 * 4) / 32)


def test_words_say_which_side(kept):
    words = scale.in_words(kept)
    assert words.startswith("From 4 blocks to 10") and "the mean exit layer goes from 2.6 to 5.6" in words
    assert "from 64.1% to 55.6%: down (-8.4" in words
    assert "left over go from 1.4 to 4.4: up (+3.0" in words
    assert "from 75.0% to 75.0%: neither clearly up nor down" in words
    assert words.endswith("BLEU on the shipped texts goes neither clearly up nor down (+0.0 [+0.0, +0.0]).")


def test_the_table_and_the_figure_have_every_depth(kept):
    table = scale.rows(kept)
    shown = scale.shown(table)
    assert list(shown["L"]) == [4, 4, 10, 10] and list(shown["exit layer"]) == ["first", "stable"] * 2
    left, right = scale_figure(table, scale.published_depths()).axes
    assert len(left.containers) == 5 and len(right.lines) == 2


def test_published_depths_have_both_readings():
    """P's Table 2: 23.49 of 32 layers on WMT22, or 24.49 where layers count from 0."""
    row = scale.published_depths().iloc[0]
    assert (row["model"], row["layers"]) == ("7B", 32)
    assert (row["low"], row["high"]) == (pytest.approx(100 * 23.49 / 32), pytest.approx(100 * 24.49 / 32))


def test_ps_two_sizes_in_words():
    """23.49 of 32 and 25.5 of 40 on WMT22, 21.11 and 24.29 on CNN/DM, 20.67 and 23.47 on NarrativeQA."""
    falls = [100 * (a / 32 - b / 40) for a, b in ((23.49, 25.5), (21.11, 24.29), (20.67, 23.47))]
    words = scale.published_in_words(scale.published_depths())
    assert f"on 3 of 3 tasks, by {min(falls):.1f} to {max(falls):.1f} points" in words


def test_what_is_kept_is_of_equal_trainings():
    """The same steps and the same tokens; every token of a text has one exit layer, "first" never above "stable"."""
    found = [json.loads(file.read_text()) for file in data_folder("scale").glob("*.json")]
    assert sorted(one["blocks"] for one in found) == [4, 6, 12, 24]
    assert len({(one["steps"], one["tokens"], one["seed"]) for one in found}) == 1
    for one in found:
        for name in TRANSLATIONS:
            texts = one["texts"][name]
            first, stable, swapped = (np.array(texts[count]) for count in ("first", "stable", "swapped"))
            assert first.shape == stable.shape == (len(load_task(name)), one["blocks"])
            assert (first.sum(1) == stable.sum(1)).all() and (first.sum(1) == swapped.sum(1)).all()
            assert (first.cumsum(1) >= stable.cumsum(1)).all()
