"""The command line of the recipes: every name has a recipe that can be run and measured."""

import pkgutil

import pytest

from eelib.recipes.__main__ import RECIPES


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_can_be_run_and_measured(name):
    recipe = pkgutil.resolve_name(f"eelib.recipes.{RECIPES[name]}")
    assert callable(recipe.run) and callable(recipe.measure)
    assert getattr(recipe, "name", getattr(recipe, "NAME", None)) == name
