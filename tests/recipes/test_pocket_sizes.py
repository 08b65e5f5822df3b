"""pocket-llama's recipe at other depths: the same batches for all, and a whole run at a tiny size."""

import json
from functools import partial

import pytest

import eelib
from recipes import kept_figures, pocket_llama, pocket_sizes
from recipes.batches import Phase, read_batches
from recipes.loop import Schedule
from recipes.pocket_sizes import BLOCKS_4, BLOCKS_6, BLOCKS_12, BLOCKS_24, PHASES, SCHEDULE, Deep

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}


def test_phases_and_schedule_go_together():
    assert SCHEDULE.steps == sum(phase.steps for phase in PHASES) and SCHEDULE.decay == PHASES[-1].steps
    assert [one.blocks for one in (BLOCKS_4, BLOCKS_6, BLOCKS_12, BLOCKS_24)] == [4, 6, 12, 24]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Few steps, few texts to measure on; figures are kept in a folder of the test's."""
    monkeypatch.setattr(pocket_llama, "build", partial(pocket_llama.build, **TINY))
    monkeypatch.setattr(pocket_sizes, "SCHEDULE", Schedule(steps=4, peak=1e-2, warmup=1, decay=2))
    monkeypatch.setattr(pocket_sizes, "PHASES", [Phase(4, {"captions": 1.0})])
    monkeypatch.setattr(pocket_sizes, "TRANSLATIONS", ["translation/de-en"])
    monkeypatch.setattr(pocket_sizes, "translations", lambda *_: {"made up": {"BLEU": 1.0}})
    monkeypatch.setattr("recipes.quality.LONGEST_TRANSLATION", 3)
    monkeypatch.setattr(kept_figures, "data_folder", lambda *parts: tmp_path.joinpath("data", *parts))
    (tmp_path / "data").mkdir()


def test_recipe_ends_in_models_of_their_depth_and_keeps_their_exit_layers(folder, tmp_path, few_stories, small):
    seen = []
    for blocks in (1, 3):
        out, work = tmp_path / f"out-{blocks}", tmp_path / f"work-{blocks}"
        card = Deep(blocks).run(folder, out, work, "cpu")
        assert card["name"] == f"pocket-llama-{blocks}-blocks" and f"{blocks} blocks" in card["kind"]
        assert eelib.load_model(str(out), device="cpu").layers == blocks
        kept = json.loads((tmp_path / "data/scale" / f"{card['name']}.json").read_text())
        assert (kept["blocks"], kept["steps"], kept["tokens"]) == (blocks, 4, card["tokens"])
        texts = kept["texts"]["translation/de-en"]
        assert all(len(texts[column]) == 156 for column in ("outputs", "first", "stable", "swapped"))
        assert all(len(row) == blocks and sum(row) <= 3 for row in texts["stable"])
        seen.append([[text.ids.tolist() for text in batch] for _, batch in read_batches(work / "batches.npz", 0)])
    assert seen[0] == seen[1]
