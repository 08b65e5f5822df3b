"""Two folders of results: what differs is printed, dates, seconds and hashes aside."""

import json

import pytest

from checks import compare_results

RESULT = {
    "date": "2026-01-02",
    "parameters": {"limit": 4},
    "traces": {"a": {"seconds": 1.5, "code": "abc", "rows": 7}},
    "tasks": {"a": {"perc": {"estimate": 0.5, "low": None}}},
    "claims": [{"id": "P1", "verdict": "holds"}, {"id": "P2", "verdict": "undecided"}],
}


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """compare(before, after, *options): (status, what was said); each is {file: content}."""

    def run(before, after, *options):
        for side, files in (("before", before), ("after", after)):
            for name, content in files.items():
                path = tmp_path / side / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(content))
        command = ["compare_results", str(tmp_path / "before"), str(tmp_path / "after"), *options]
        monkeypatch.setattr("sys.argv", command)
        with pytest.raises(SystemExit) as ended:
            compare_results.main()
        return ended.value.code, capsys.readouterr().out

    return run


def changed(**values):
    return json.loads(json.dumps(RESULT)) | values


def test_dates_seconds_and_hashes_do_not_count_unless_asked_for(compare):
    other = changed(date="2027-01-01", traces={"a": {"seconds": 9, "code": "def", "rows": 7}})
    assert compare({"m/a.json": RESULT}, {"m/a.json": other})[0] == 0
    status, said = compare({"m/a.json": RESULT}, {"m/a.json": other}, "--all")
    assert status == 1 and "3 of" in said and "m/a.json: traces, a, code\n    'abc'\n    'def'" in said


@pytest.mark.parametrize(
    "values, said",
    [
        ({"parameters": {"limit": 5}}, "parameters, limit\n    4\n    5"),
        ({"parameters": {"limit": 4.0}}, None),
        ({"parameters": {"limit": True}}, "parameters, limit\n    4\n    True"),
        ({"parameters": {}}, "parameters, limit\n    4\n    '(nothing)'"),
        ({"tasks": {"a": {"perc": {"estimate": 0.5, "low": 0.1}}}}, "tasks, a, perc, low\n    None\n    0.1"),
        # In another order: the claims go by their ids.
        ({"claims": [{"id": "P2", "verdict": "undecided"}, {"id": "P1", "verdict": "holds"}]}, None),
        (
            {"claims": [{"id": "P1", "verdict": "undecided"}, {"id": "P2", "verdict": "undecided"}]},
            "claims, P1, verdict",
        ),
    ],
)
def test_each_value_that_differs_is_said_with_its_key(compare, values, said):
    status, printed = compare({"a.json": RESULT}, {"a.json": changed(**values)})
    assert status == (said is not None)
    assert said is None or f"a.json: {said}" in printed


def test_numbers_may_differ_by_a_tolerance_that_is_asked_for(compare):
    other = changed(tasks={"a": {"perc": {"estimate": 0.5000001, "low": None}}})
    assert compare({"a.json": RESULT}, {"a.json": other})[0] == 1
    assert compare({"a.json": RESULT}, {"a.json": other}, "--tolerance", "1e-6")[0] == 0


def test_a_file_on_one_side_only_is_said_once(compare):
    status, printed = compare({"a.json": RESULT}, {"a.json": RESULT, "b.json": RESULT})
    assert status == 1 and printed.count("b.json") == 1 and "1 of" in printed


def test_a_folder_without_results_is_refused(compare):
    assert "holds no results" in compare({}, {"a.json": RESULT})[0]
