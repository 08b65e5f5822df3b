"""The check on Slurm: what it asks for, what it compares, and what it says where there is no Slurm."""

import json
import os
import shutil
import subprocess
import sys

import psutil
import pytest
import yaml

from checks import cluster, one_node
from eestudy.book.study_file import StudyFile


def test_the_study_is_one_that_can_be_run(tmp_path):
    (tmp_path / "study.yml").write_text(cluster.study(workers=2, hours=1))
    study = StudyFile.load(tmp_path / "study.yml")
    assert len(study.runs) == len(cluster.FAMILIES) * len(cluster.NOTEBOOKS) == 6
    assert all(list(study.workers_of(model)) == [0, 1] and study.threads_of(model) == 1 for model in study.models)
    large = yaml.safe_load(cluster.study(threads=8))["models"]
    assert all(settings == {"memory_gb": 2, "threads": 8} for settings in large.values())


def test_the_tiny_models_load(tmp_path):
    from eelib import load_model

    cluster.save_models(tmp_path)
    assert [load_model(str(tmp_path / family), device="cpu").name for family in cluster.FAMILIES] == ["llama", "gpt2"]


def test_an_environment_has_the_packages_of_this_one_and_a_place_of_its_own(tmp_path):
    cluster.make_environment(tmp_path / "venv")
    for command in (["python", "-c", "import sys, snakemake; print(sys.prefix)"], ["papermill", "--version"]):
        done = subprocess.run([tmp_path / "venv/bin" / command[0], *command[1:]], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        if command[0] == "python":
            assert done.stdout.strip() == str(tmp_path / "venv") != sys.prefix


def test_a_call_is_ended_with_all_that_it_started_though_some_of_it_has_ended_already(tmp_path, monkeypatch):
    project = tmp_path / "project"
    project.mkdir()
    program = tmp_path / "venv/bin/python"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nsleep 600 & sleep 600\n")
    program.chmod(0o755)
    found = psutil.Process.children

    def and_one_that_has_ended(process, recursive):
        ended = subprocess.Popen(["sleep", "600"])
        below = [psutil.Process(ended.pid), *found(process, recursive=recursive)]
        ended.kill()
        ended.wait()
        return below

    monkeypatch.setattr(psutil.Process, "children", and_one_that_has_ended)
    with cluster.Made(project, dict(os.environ), "study.yml") as call:
        make = psutil.Process(call.process.pid)
        call.until(lambda: len(found(make, recursive=True)) > 1, "two that sleep")
        below = found(make, recursive=True)
    assert call.process.returncode and not psutil.wait_procs(below, timeout=60)[1]


def test_what_differs_is_counted_and_named():
    assert cluster.compared({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == {
        "compared": 3,
        "identical": 1,
        "differ": ["b", "c"],
    }


def test_cells_are_compared_by_what_they_show(tmp_path):
    page = tmp_path / "book/results/m/n.ipynb"
    page.parent.mkdir(parents=True)
    cells = [
        {"cell_type": "markdown", "source": "a"},
        {"outputs": [{"data": {"text/plain": "1"}}], "metadata": {"a": 1}},
        {"outputs": [{"text": "said"}]},
    ]
    page.write_text(json.dumps({"cells": cells}))
    assert dict(cluster.outputs(tmp_path)) == {
        "m/n, cell 0": "[]",
        "m/n, cell 1": '[{"text/plain": "1"}]',
        "m/n, cell 2": '["said"]',
    }


def found(**more) -> dict:
    same = {"compared": 9, "identical": 9, "differ": []}
    return {
        "files": same,
        "figures": same,
        "cells": same,
        "started_while_drained": 0,
        "held_by_the_drained_node": 2,
        "status_with_a_cancelled_job": 2,
        "status_when_called_again": 0,
        "too_large": [{"ok": True}],
    } | more


def test_only_what_happened_as_it_should_is_good():
    assert cluster.good(found())
    for wrong in (
        {"cells": {"compared": 9, "identical": 8}},
        {"files": {"compared": 0, "identical": 0}},
        {"started_while_drained": 1},
        {"held_by_the_drained_node": 0},
        {"status_with_a_cancelled_job": 0},
        {"status_when_called_again": 1},
        {"too_large": [{"ok": True}, {"ok": False}]},
    ):
        assert not cluster.good(found(**wrong)), wrong


def test_without_slurm_apt_or_root_a_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(one_node.NoSlurm, match="installing slurm-wlm and munge takes root and apt"):
        one_node.install()
    monkeypatch.setattr(one_node.os, "getuid", lambda: 1000)
    with pytest.raises(one_node.NoSlurm, match="take root"), one_node.OneNode(tmp_path, 1000):
        pass
    monkeypatch.setattr(sys, "argv", ["cluster", "--output", str(tmp_path / "found.json")])
    monkeypatch.setattr(cluster.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="^There is no Slurm here, and none can be had: .*$"):
        cluster.main()
    assert not (tmp_path / "found.json").exists()


def test_a_slurm_that_is_there_already_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(one_node, "install", lambda: None)
    monkeypatch.setattr(one_node.os, "getuid", lambda: 0)
    monkeypatch.setattr(one_node, "KNOWN", tmp_path / "slurm.conf")
    (tmp_path / "slurm.conf").write_text("theirs")
    with pytest.raises(one_node.NoSlurm, match="belongs to a Slurm already"), one_node.OneNode(tmp_path / "own", 1000):
        pass
    assert (tmp_path / "slurm.conf").read_text() == "theirs"


def test_the_configuration_has_its_ports_cores_and_memory(tmp_path):
    text = one_node.configuration(tmp_path, "box", (17, 18), 2, 1000)
    lines = dict(line.split("=", 1) for line in text.splitlines())
    assert lines["SlurmctldPort"] == "17" and lines["SlurmdPort"] == "18"
    assert lines["NodeName"] == "box NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN"
