"""What is kept in data/measured says where it is from, is of today's models, and a part of it is computed again."""

import importlib
import json
import re
import subprocess
from pathlib import Path

import pytest

from checks.__main__ import ENTRIES, GROUPS
from checks.report import TINY, differing
from eelib.common.errors import InputError
from eelib.common.files import PACKAGE, data_folder
from eelib.models.checkpoint import folder_of, path_of
from eelib.models.folder import weights_hash
from eelib.models.lora import hash_with_lora, lora_base
from eestudy.measured import measured, provenance

KEPT = {file.stem: json.loads(file.read_text()) for file in sorted(data_folder("measured").glob("*.json"))}
CHECKS = {name: report for name, report in KEPT.items() if "trainings" not in report}
OLD = {"architectures", "cluster", "crashes", "lens", "many_prompts"}  # to be measured again
MODELS = [(name, *pair) for name, report in CHECKS.items() for pair in report["models"].items()]


def git(*words):
    """What git answers in the project."""
    return subprocess.run(["git", *words], cwd=PACKAGE.parent, capture_output=True, text=True)


SHALLOW = git("rev-parse", "--is-shallow-repository").stdout.strip() != "false"  # a clone without earlier commits


def hash_of(name):
    """Today's hash of a model by its name."""
    base = lora_base(path_of(name))
    return hash_with_lora(Path(path_of(name)), hash_of(base)) if base else weights_hash(folder_of(path_of(name), None))


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_result_names_its_command_commit_day_and_machine(name):
    report = KEPT[name]
    assert re.fullmatch(r"[0-9a-f]{7,40}", report["commit"]) and "seed" in report
    assert SHALLOW or not git("merge-base", "--is-ancestor", report["commit"], "HEAD").returncode
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", report["date"]) and report["machine"]["cpu"]
    assert report["date"] in provenance(report) and report["machine"]["cpu"] in provenance(report)
    assert report["goals"] or report.get("trainings") or {"rows", "costs"} <= report.keys()  # of what is expected


def test_old_results_are_of_checks_that_had_other_names_or_options():
    assert {name for name, report in CHECKS.items() if "code" not in report} == OLD


@pytest.mark.parametrize("name", sorted(CHECKS.keys() - OLD))
def test_a_kept_result_is_made_by_make_measure_and_names_the_models_that_it_ran(name):
    report = CHECKS[name]
    asked = report["command"].removeprefix("python -m checks ")
    assert asked.split()[0] in ENTRIES and any(f"{asked} ".startswith(f"{own} ") for own in GROUPS["measure"])
    assert report["models"] or "eelib/models" not in report["depends"] or set(TINY) <= set(report["depends"])


@pytest.mark.parametrize("name", sorted(KEPT.keys() - CHECKS.keys()))
def test_a_training_that_was_never_shipped_names_the_commit_of_its_recipe(name):
    recipes = git("show", f"{KEPT[name]['commit']}:recipes/__main__.py").stdout
    named = [words.split()[3] for words in KEPT[name]["command"].split("; ")]
    assert named and (SHALLOW or all(f'"{recipe}"' in recipes for recipe in named))


@pytest.mark.slow  # a model of another project is fetched
@pytest.mark.parametrize("result, model, known", MODELS)
def test_a_kept_result_is_of_the_weights_that_the_model_has_today(result, model, known):
    assert hash_of(model) == known, f"{result}.json is of other weights of {model}: run {KEPT[result]['command']}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, report in CHECKS.items() if "sample" in report])
def test_a_part_is_computed_again(name):
    check = CHECKS[name]["command"].split()[3]
    assert not differing(CHECKS[name]["sample"], importlib.import_module(f"checks.{check}").sample())


def test_near_ties_may_differ_and_what_follows_them_but_nothing_else():
    kept = {"values": {"tokens": [4, 5, 6], "share": [0.25]}, "near_ties": [1]}
    for tokens, share, lines in (
        ([4, 5, 6], 0.25, []),
        ([4, 7, 9], 0.25 + 1e-9, []),
        ([3, 5, 6], 0.25, ["tokens, place 0: 4, now 3"]),
        ([4, 5, 9], 0.2, ["tokens, place 2: 6, now 9", "share, place 0: 0.25, now 0.2"]),
        ([4, 5], 0.25, ["tokens: 3 values, now 2"]),
    ):
        assert differing(kept, {"values": {"tokens": tokens, "share": [share]}}) == lines


def test_a_result_that_is_not_kept_is_named_in_one_line(one_line):
    one_line(InputError, ("no result 'none'", "statistics"), lambda: measured("none"))
