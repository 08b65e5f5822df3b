"""Results that differ are named, and a byte that differs on the cluster is missed."""

import json

import pytest
from check_runs import missed, run

from checks import cluster, compare_results

BEFORE = {
    "date": "2026-01-02",
    "tasks": {"a": {"low": None}},
    "claims": [{"id": "P1"}, {"id": "P2", "verdict": "holds"}],
}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"date": "2027-01-01"}, None),
        ({"tasks": {"a": {"low": 0.1}}}, "tasks, a, low\n    None\n    0.1"),
        ({"tasks": {}}, "'(nothing)'"),
        ({"claims": [{"id": "P2", "verdict": "holds"}, {"id": "P1"}]}, None),  # the claims go by their ids
        ({"claims": [{"id": "P1"}, {"id": "P2", "verdict": "undecided"}]}, "claims, P2, verdict"),
    ],
)
def test_what_differs_between_results_is_named(changes, words, tmp_path, capsys):
    for side, content in (("before", BEFORE), ("after", BEFORE | changes)):
        (tmp_path / side).mkdir()
        (tmp_path / side / "a.json").write_text(json.dumps(content))
    status, _ = run("compare_results", str(tmp_path / "before"), str(tmp_path / "after"))
    assert bool(status) == (words is not None) and (words or "0 of") in capsys.readouterr().out
    assert compare_results.same(1.0, 1.0000001, 1e-6) and not compare_results.same(1, True, 1e-6)


def test_a_byte_that_differs_on_the_cluster_is_missed():
    same = {"compared": 9, "identical": 9}
    found = {"files": same, "figures": same, "workers_started_again": 1, "status": 0}
    assert not missed(cluster.goals(found))
    for wrong in (
        {"figures": {"compared": 9, "identical": 8}},
        {"files": {"compared": 0, "identical": 0}},
        {"workers_started_again": 0},
        {"status": 1},
    ):
        assert len(missed(cluster.goals(found | wrong))) == 1, wrong


def test_a_slurm_that_is_there_already_is_left_alone_and_without_one_a_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster.os, "getuid", lambda: 0)
    monkeypatch.setattr(cluster, "PROGRAMS", ())
    monkeypatch.setattr(cluster, "KNOWN", tmp_path / "slurm.conf")
    (tmp_path / "slurm.conf").write_text("theirs")
    with pytest.raises(cluster.NoSlurm, match="belongs to a Slurm already"), cluster.one_node(tmp_path / "own"):
        pass
    assert (tmp_path / "slurm.conf").read_text() == "theirs"
    monkeypatch.setattr(cluster.os, "getuid", lambda: 1000)
    monkeypatch.setattr(cluster.signal, "signal", lambda *_: None)
    status, content = run("cluster", "--output", str(tmp_path / "a.json"))
    assert status == "There is no Slurm here: the daemons of Slurm take root" and content is None
