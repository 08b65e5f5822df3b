"""What is kept in data/measured says where it is from, is of today's models, and meets the goals that it says; a part
of it is computed again. The wordings of prompts are those that were chosen by what is kept of them.
"""

import copy
import hashlib
import importlib
import json
import re
import subprocess
import sys

import pytest
import transformers
from exits_made import hash_of

from checks import __main__ as entry
from checks import cluster, lens, report, store
from checks.report import differing
from checks.tiny import KINDS
from eelib.common.files import PACKAGE, data_folder
from eelib.tasks.metrics import normalised
from eelib.tasks.task import KINDS as TASK_KINDS
from eestudy import measured

KEPT = {file.stem: json.loads(file.read_text()) for file in sorted(data_folder("measured").glob("*.json"))}
CHECKS = {name: kept for name, kept in KEPT.items() if "trainings" not in kept}
LOG = data_folder("prompts", "log.json")
JUDGED = dict.fromkeys(("architectures", "coverage", "products", "race", "statistics", "trace_speed"), "rows")
JUDGED |= {"arithmetic": "found", "dtypes": "dtypes", "given": "found"}  # what goals are judged by
WHOLE = {name: goals for name, (_, goals) in store.PARTS.items()} | {"cluster": cluster.goals}
WHOLE |= {"lens": lambda kept: lens.goals(kept["rows"], kept["machine"]["load"])}


def goals_of(name, kept):
    """The goals of a result by what it holds."""
    return WHOLE[name](kept) if name in WHOLE else importlib.import_module(f"checks.{name}").goals(kept[JUDGED[name]])


WRONG = [  # a result, where it is changed, and to what
    ("arithmetic", ("found", "margins"), [0.1]),
    ("arithmetic", ("found", "drafts", 1, "texts_equal"), 2),
    ("cluster", ("figures", "identical"), 8),
    ("crashes", ("killed", "identical"), 2),
    ("given", ("found", "pocket-llama", "differ"), 1),
    ("lens", ("rows", 0, "seconds"), 1e4),
    ("many_prompts", ("shards_made",), 9),
    ("products", ("rows", 0, "seconds", "float32"), [0.1, 9.0, 0.1]),  # by medians
    ("race", ("rows", 2, "texts_equal"), 1),
    ("reproducible", ("batch_sizes", 0, "other_top1s"), 1),  # in float32, which has to be exact
    ("trace_speed", ("rows", 0, "top1_differences"), 1),
]


def git(*words, cwd=PACKAGE.parent, **options):
    """What git answers in the project."""
    own = ["-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *own, *words], cwd=cwd, capture_output=True, text=True, **options)


SHALLOW = git("rev-parse", "--is-shallow-repository").stdout.strip() != "false"  # a clone without earlier commits


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_result_names_its_command_commit_day_machine_and_code(name):
    kept = KEPT[name]
    assert re.fullmatch(r"[0-9a-f]{7,40}", kept["commit"]) and "seed" in kept
    assert SHALLOW or not git("merge-base", "--is-ancestor", kept["commit"], "HEAD").returncode
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", kept["date"]) and kept["machine"]["cpu"]
    if name in CHECKS:  # all others are of trainings that were never shipped
        asked = kept["command"].removeprefix("python -m checks ")
        assert any(f"{asked} ".startswith(f"{own} ") for own in [*entry.GROUPS["measure"], "kernel"])
        assert re.fullmatch(r"[0-9a-f]{16}", kept["code"]) and (kept["goals"] or "costs" in kept)


def test_commits_that_claims_name_are_in_the_history():
    named = set(re.findall(r'"commit": "([0-9a-f]+)"', data_folder("papers", "claims.json").read_text("utf-8")))
    assert len(named) > 3
    assert SHALLOW or not {name for name in named if git("merge-base", "--is-ancestor", name, "HEAD").returncode}


@pytest.mark.parametrize("name", [*JUDGED, *WHOLE])
def test_the_goals_of_a_kept_result_follow_from_what_it_holds(name):
    assert json.loads(json.dumps(goals_of(name, KEPT[name]))) == KEPT[name]["goals"] != []


@pytest.mark.parametrize("name, where, value", WRONG)
def test_a_part_that_is_wrong_misses_one_goal_more(name, where, value):
    wrong = part = copy.deepcopy(KEPT[name])
    for key in where[:-1]:
        part = part[key]
    part[where[-1]] = value
    met = [sum(row["met"] for row in goals) for goals in (KEPT[name]["goals"], goals_of(name, wrong))]
    assert met[1] == met[0] - 1


@pytest.mark.slow  # a model of another project is fetched
def test_a_kept_result_is_of_the_weights_that_the_model_has_today():
    for model, known in sorted({pair for kept in CHECKS.values() for pair in kept["models"].items()}):
        assert hash_of(model) == known, f"a result is of other weights of {model}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, kept in CHECKS.items() if "sample" in kept])
def test_a_part_is_computed_again(name):
    check = CHECKS[name]["command"].split()[3]
    assert not differing(CHECKS[name]["sample"], importlib.import_module(f"checks.{check}").sample())


def test_the_kept_result_covers_every_architecture():
    """Of this version of transformers, as the sample that is computed again can not show."""
    kept = KEPT["architectures"]
    assert kept["versions"]["transformers"] == transformers.__version__, f"run {kept['command']} again"
    named = [(row["kind"], row["model_type"]) for row in kept["rows"]]
    assert named == [(kind, name) for kind, names in KINDS.items() for name in names]
    assert all(row["met"] for row in kept["goals"])


def test_a_head_names_the_commit_and_the_code_with_what_was_not_committed(tmp_path, monkeypatch):
    for module in (measured, report):
        monkeypatch.setattr(module, "PACKAGE", tmp_path / "eelib")
    (tmp_path / "eelib").mkdir()
    (tmp_path / "eelib/a.py").write_text("a = 1")
    for words in (("init", "-q"), ("add", "eelib"), ("commit", "-qm", "made")):
        git(*words, cwd=tmp_path, check=True)
    before = report.headed("made", depends=["eelib"])
    (tmp_path / "eelib/a.py").write_text("a = 2")
    after = report.headed("made", depends=["eelib"])
    assert before["commit"] + "+changes" == after["commit"] and before["code"] != after["code"]
    assert "checks/made.py" in before["depends"] and before["machine"]["threads"] >= 1


def test_an_unknown_check_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["checks", "none"])
    with pytest.raises(SystemExit, match="^none: allowed are bench, measure, architectures.*take no options$"):
        entry.main()


# ---- prompts were chosen on texts that no report uses

RUN = 8  # words in a row that no text of a report shares with one that prompts were chosen on


def test_the_short_wordings_are_those_that_the_log_says_were_chosen():
    kinds = json.loads(LOG.read_text())["kinds"]
    assert {name for name, kind in TASK_KINDS.items() if "short" in kind.wordings} == set(kinds)
    for kind, log in kinds.items():
        file = data_folder("prompts", "development", f"{kind}.jsonl")
        assert log["texts"] == 20 and log["texts_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
        assert TASK_KINDS[kind].wordings["short"] == log["wordings"][log["chosen"]]["template"]


def runs(files):
    """Every run of RUN words in the strings of JSON files, in lower case and without punctuation."""
    strings = (json.loads(text) for file in files for text in re.findall(r'"(?:[^"\\]|\\.)*"', file.read_text()))
    words = [normalised(text) for text in strings]
    return {tuple(one[i : i + RUN]) for one in words for i in range(len(one) - RUN + 1)}


def test_texts_of_reports_share_no_run_of_words_with_those_that_prompts_were_chosen_on():
    seen = runs([*data_folder("prompts", "development").glob("*.jsonl"), LOG])
    assert len(seen) > 3000 and not seen & runs(data_folder("texts").rglob("*.jsonl"))
