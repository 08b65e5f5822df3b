"""pocket-llama's recipe at other depths: its shares and its rates, and a whole run at a tiny size."""

import json
from functools import partial

import pytest

import eelib
from eelib.recipes import pocket_llama, pocket_sizes
from eelib.recipes.batches import Phase
from eelib.recipes.loop import Schedule
from eelib.recipes.pocket_sizes import PHASES, SCHEDULE, Deep
from eelib.recipes.texts import WHOLE

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}


def test_a_quarter_of_the_steps_in_the_same_shares():
    assert [phase.shares for phase in PHASES] == [phase.shares for phase in pocket_llama.PHASES]
    assert SCHEDULE.steps == sum(phase.steps for phase in PHASES) == pocket_llama.SCHEDULE.steps // 4
    assert SCHEDULE.peak == pocket_llama.SCHEDULE.peak and SCHEDULE.decay == PHASES[-1].steps


@pytest.mark.parametrize("blocks", [1, 3])
def test_recipe_ends_in_a_model_of_its_depth_and_its_exit_layers(folder, tmp_path, monkeypatch, few_stories, blocks):
    build = partial(pocket_llama.build, **TINY)
    monkeypatch.setattr(pocket_llama, "build", build)
    monkeypatch.setattr(pocket_sizes, "SCHEDULE", Schedule(steps=4, peak=1e-2, warmup=1, decay=2))
    monkeypatch.setattr(pocket_sizes, "PHASES", [Phase(4, dict.fromkeys(WHOLE, 1.0))])
    monkeypatch.setattr(pocket_sizes, "TRANSLATIONS", ["translation/de-en"])
    monkeypatch.setattr(pocket_sizes, "translations", lambda *_: {"made up": {"BLEU": 1.0}})
    monkeypatch.setattr("eelib.recipes.quality.LONGEST_TRANSLATION", 3)
    out = tmp_path / "out"
    card = Deep(blocks).run(folder, out, tmp_path / "work", "cpu")
    assert card["name"] == f"pocket-llama-{blocks}-blocks" and f"{blocks} blocks" in card["kind"]
    assert eelib.load_model(str(out), device="cpu").layers == blocks
    exits = json.loads((out / "exit_layers.json").read_text())["translation/de-en"]
    assert len(exits) == 156 and all(len(row) == blocks and sum(row) <= 3 for row in exits)
