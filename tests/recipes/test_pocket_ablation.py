"""The four short trainings: equal steps, and a whole run at a tiny size that keeps its figures."""

import json
from dataclasses import replace

from recipes import kept_figures, pocket_ablation, pocket_skip
from recipes.loop import Schedule
from recipes.pocket_ablation import ALL, DROPOUT, OWN, UNIFORM, Short
from recipes.pocket_skip import Stage


def test_all_four_have_equal_steps_and_batches():
    for recipe in (UNIFORM, DROPOUT, OWN, ALL):
        assert sum(stage.schedule.steps for stage in recipe.stages) == pocket_ablation.STEPS
        assert {stage.tokens for stage in recipe.stages} == {pocket_ablation.TOKENS}
    assert [stage.own for recipe in (UNIFORM, DROPOUT, OWN) for stage in recipe.stages] == [False, False, True]
    assert [(stage.skips, stage.own) for stage in ALL.stages] == [(True, False), (False, True)]


def test_a_run_keeps_its_figures_and_those_of_its_start(made, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(pocket_skip, "load_model", lambda name, **_: made(UNIFORM))
    monkeypatch.setattr(pocket_ablation, "load_model", lambda name, **_: made(UNIFORM))
    monkeypatch.setattr(kept_figures, "data_folder", lambda *parts: tmp_path.joinpath("data", *parts))
    monkeypatch.setattr(pocket_ablation, "TRANSLATIONS", ["translation/de-en"])
    monkeypatch.setattr("recipes.quality.LONGEST_TRANSLATION", 3)
    (tmp_path / "data").mkdir()
    short = replace(UNIFORM, stages=(Stage(Schedule(2, peak=1e-2, warmup=1, decay=1)),), tasks={"captions": 1})
    assert isinstance(short, Short)
    card = short.run(folder, tmp_path / "out", tmp_path / "work", "cpu")
    kept = {
        name: json.loads((tmp_path / "data/ablation" / f"{name}.json").read_text())
        for name in ("pocket-llama", "pocket-llama-uniform")
    }
    assert kept["pocket-llama-uniform"]["steps"] == card["steps"] == 2 and kept["pocket-llama"]["steps"] == 0
    for figures in kept.values():
        texts = figures["texts"]["translation/de-en"]
        assert len(texts["outputs"]) == len(texts["agreed"]) == len(texts["tokens"]) == 156
        assert all(max(row) <= tokens <= 3 for row, tokens in zip(texts["agreed"], texts["tokens"]))
