"""The log of prompts: what was tried, what its rule chooses, and that the code holds what was chosen."""

import hashlib
import json

import pytest

from checks import prompts
from eelib.common.files import data_folder
from eelib.tasks.task import KINDS, Task

RUN = 8  # words in a row that no text of a report shares with one that prompts were chosen on
LOGGED = json.loads(prompts.LOG.read_text())["kinds"]


@pytest.mark.parametrize("kind", prompts.TRIALS)
def test_the_short_wording_is_the_one_that_the_rule_takes_from_the_log(kind):
    log, trial = LOGGED[kind], prompts.TRIALS[kind]
    rows = log["wordings"]
    assert 2 <= len(rows) <= prompts.MOST_WORDINGS and log["texts"] == 20
    file = data_folder("prompts", "development", f"{kind}.jsonl")
    assert log["texts_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert log["rule"] == prompts.rule(kind)
    assert {name: (row["template"], row["chat"]) for name, row in rows.items()} == trial.wordings
    assert KINDS[kind].wordings["paper"] in {row["template"] for row in rows.values()}
    assert log["chosen"] == prompts.choice(kind, {name: row["scores"] for name, row in rows.items()})
    assert rows[log["chosen"]]["template"] == KINDS[kind].wordings["short"]
    assert rows[log["chosen"]]["chat"]


def test_every_kind_with_a_short_wording_is_in_the_log():
    assert {name for name, kind in KINDS.items() if "short" in kind.wordings} == set(LOGGED) == set(prompts.TRIALS)


def row(repeated, ended=100.0, topic=100.0, **scores):
    return {"repeated": repeated, "ended": ended, "on topic": topic} | scores


def test_the_rule():
    """By the score, whatever is repeated; without one by repetition; never a wording outside the template."""
    scores = {"paper, raw": row(0, F1=90.0), "paper": row(50, F1=70.0), "question last": row(0, F1=60.0)}
    assert prompts.choice("question_answering", scores) == "paper"
    scores = {"plain": row(9), "continue": row(1, 49.0, 79.0), "plain, raw": row(0)}
    assert prompts.choice("continuation", scores) == "plain"  # the second neither ends nor stays on topic
    assert prompts.choice("continuation", scores | {"continue": row(1, 49.0, 80.0)}) == "continue"
    assert prompts.choice("continuation", scores | {"continue": row(1, 50.0, 0.0)}) == "continue"
    scores = {"plain": row(15.0), "briefly": row(10.0), "plain, raw": row(0)}
    assert prompts.choice("instructions", scores) == "plain"
    assert prompts.choice("instructions", scores | {"plain": row(15.1)}) == "briefly"


def test_lengths_and_repetition_leave_out_the_end_token(model_of, monkeypatch):
    model = model_of("llama")
    (end, *_) = model.eos_ids
    outputs = iter([[[5, 6, end], [7] * 12], [[end]]])
    monkeypatch.setattr(prompts, "BATCH", 2)
    monkeypatch.setattr(prompts, "greedy_decode", lambda *_: next(outputs))
    found = prompts.tried(model, Task.from_prompts(["one note", "two", "three"]), 12)
    assert found["mean length"] == pytest.approx(14 / 3, abs=1e-4)
    assert found["repeated"] == pytest.approx(100 * 12 / 14, abs=1e-4)
    assert found["ended"] == pytest.approx(200 / 3, abs=1e-4)


def runs(texts):
    """Every run of RUN words of the texts, in lower case and without punctuation."""
    words = [prompts.normalised(text) for text in texts]
    return {tuple(one[i : i + RUN]) for one in words for i in range(len(one) - RUN + 1)}


def strings(value):
    """All strings inside a JSON value."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for one in inner for text in strings(one)]


def of_files(folder):
    return [
        s
        for file in folder.rglob("*.jsonl")
        for line in file.read_text().splitlines()
        for s in strings(json.loads(line))
    ]


def test_texts_of_reports_share_no_run_of_words_with_those_that_prompts_were_chosen_on():
    development = of_files(data_folder("prompts", "development"))
    templates = [wording.template for trial in prompts.TRIALS.values() for wording in trial.wordings.values()]
    seen = runs(development) | runs(templates)
    assert len(seen) > 3000 and not seen & runs(of_files(data_folder("texts")))
    assert runs(["and " + max(development, key=len)]) & seen  # a shared run would be seen
