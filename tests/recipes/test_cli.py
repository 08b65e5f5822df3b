"""The command line of the recipes: every name has a recipe that can be run and measured."""

import pkgutil

import pytest

from recipes.__main__ import RECIPES, main


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_can_be_run_and_measured(name):
    recipe = pkgutil.resolve_name(f"recipes.{RECIPES[name]}")
    assert callable(recipe.run) and callable(recipe.measure)
    assert getattr(recipe, "name", getattr(recipe, "NAME", None)) == name


def test_bad_input_is_one_line(tmp_path, capsys):
    """What a recipe lacks, in place of a traceback."""
    with pytest.raises(SystemExit, match="2"):
        main(
            ["pocket-t5", "--corpora", str(tmp_path), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
        )
    assert "error: " in (said := capsys.readouterr().err.splitlines()[-1])
    assert "no weights of the first edition" in said and not (tmp_path / "out").exists()


def test_only_trainings_in_legs_take_minutes(tmp_path, capsys):
    """In one line; and what is given reaches the recipe."""
    with pytest.raises(SystemExit, match="2"):
        main(["pocket-t5", "--corpora", str(tmp_path), "--minutes", "3"])
    assert "pocket-t5 is not trained in legs, so it takes no --minutes" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        name = "smollm2-135m-instruct-joint"
        main([name, "--corpora", str(tmp_path), "--minutes", "3", "--start", "no-such-model", "--work", str(tmp_path)])
    assert "model 'no-such-model' could not be loaded" in capsys.readouterr().err
