"""What is kept in data/measured says where it is from, is of today's models, and a part of it is computed again."""

import importlib
import json
import re
from pathlib import Path

import pytest

from checks.report import differing
from eelib.common.errors import InputError
from eelib.common.files import data_folder
from eelib.models.checkpoint import folder_of, path_of
from eelib.models.folder import weights_hash
from eelib.models.lora import hash_with_lora, lora_base
from eestudy.measured import measured, provenance

FILES = sorted(data_folder("measured").glob("*.json"))
KEPT = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in FILES}
MODELS = [(name, *pair) for name, report in KEPT.items() for pair in report["models"].items()]


def hash_of(name):
    """Today's hash of a model by its name."""
    base = lora_base(path_of(name))
    return hash_with_lora(Path(path_of(name)), hash_of(base)) if base else weights_hash(folder_of(path_of(name), None))


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_result_names_its_command_commit_day_and_machine(name):
    report = KEPT[name]
    assert re.match(r"python -m (checks|recipes)[ .]", report["command"]) and "seed" in report
    assert re.fullmatch(r"[0-9a-f]{7,40}(\+changes)?", report["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", report["date"]) and report["machine"]["cpu"]
    assert report["date"] in provenance(report) and report["machine"]["cpu"] in provenance(report)
    assert report["goals"] or report["trainings"]


@pytest.mark.slow  # a model of another project is fetched
@pytest.mark.parametrize("result, model, known", MODELS)
def test_a_kept_result_is_of_the_weights_that_the_model_has_today(result, model, known):
    assert hash_of(model) == known, f"{result}.json is of other weights of {model}: run {KEPT[result]['command']}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, report in KEPT.items() if "sample" in report])
def test_a_part_is_computed_again(name):
    check = KEPT[name]["command"].split()[3]
    assert not differing(KEPT[name]["sample"], importlib.import_module(f"checks.{check}").sample())


def test_near_ties_may_differ_and_what_follows_them_but_nothing_else():
    kept = {"values": {"tokens": [4, 5, 6], "share": [0.25]}, "near_ties": [1]}
    assert not differing(kept, kept)
    assert not differing(kept, kept | {"values": {"tokens": [4, 7, 9], "share": [0.25 + 1e-9]}})
    assert differing(kept, kept | {"values": {"tokens": [3, 5, 6], "share": [0.25]}}) == ["tokens, place 0: 4, now 3"]
    assert differing(kept, kept | {"values": {"tokens": [4, 5, 9], "share": [0.2]}}) == [
        "tokens, place 2: 6, now 9",
        "share, place 0: 0.25, now 0.2",
    ]
    assert differing(kept, kept | {"values": {"tokens": [4, 5], "share": [0.25]}}) == ["tokens: 3 values, now 2"]


def test_a_result_that_is_not_kept_is_named_in_one_line(one_line):
    one_line(InputError, ("no result 'none'", "statistics"), lambda: measured("none"))
