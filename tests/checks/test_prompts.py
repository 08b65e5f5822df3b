"""Prompts were chosen by their rule, on texts that no report uses."""

import hashlib
import json
import re

from check_runs import missed

from checks import prompts
from eelib.common.files import data_folder
from eelib.tasks.task import KINDS as TASK_KINDS

RUN = 8  # words in a row that no text of a report shares with one that prompts were chosen on
LOGGED = json.loads((prompts.FOLDER / "log.json").read_text())


def test_the_short_wordings_are_those_that_the_rule_takes_from_the_log():
    kinds = LOGGED["kinds"]
    assert {name for name, kind in TASK_KINDS.items() if "short" in kind.wordings} == set(kinds) == set(prompts.TRIALS)
    assert prompts.goals(kinds) == LOGGED["goals"] and not missed(LOGGED["goals"])
    for kind, log in kinds.items():
        file, rows = data_folder("prompts", "development", f"{kind}.jsonl"), log["wordings"]
        wordings = {name: {"template": row["template"], "chat": row["chat"]} for name, row in rows.items()}
        assert log["texts"] == 20 and log["texts_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
        assert log["rule"] == prompts.rule(kind) and wordings == prompts.TRIALS[kind]["wordings"]
        assert log["chosen"] == prompts.choice(kind, {name: row["scores"] for name, row in rows.items()})


def test_the_rule_takes_the_score_or_the_least_repetition_never_a_wording_outside_the_template():
    def row(repeated, ended=100.0, topic=100.0, **scores):
        return {"repeated": repeated, "ended": ended, "on topic": topic} | scores

    scores = {"paper, raw": row(0, F1=90.0), "paper": row(50, F1=70.0), "question last": row(0, F1=60.0)}
    assert prompts.choice("question_answering", scores) == "paper"
    scores = {"plain": row(9), "continue": row(1, 49.0, 79.0), "plain, raw": row(0)}
    assert prompts.choice("continuation", scores) == "plain"  # the second neither ends nor stays on topic
    assert prompts.choice("continuation", scores | {"continue": row(1, 49.0, 80.0)}) == "continue"
    scores = {"plain": row(15.0), "briefly": row(10.0), "plain, raw": row(0)}
    assert prompts.choice("instructions", scores) == "plain"
    assert prompts.choice("instructions", scores | {"plain": row(15.1)}) == "briefly"


def runs(files):
    """Every run of RUN words in the strings of JSON files, in lower case and without punctuation."""
    strings = (json.loads(text) for file in files for text in re.findall(r'"(?:[^"\\]|\\.)*"', file.read_text()))
    words = [prompts.normalised(text) for text in strings]
    return {tuple(one[i : i + RUN]) for one in words for i in range(len(one) - RUN + 1)}


def test_texts_of_reports_share_no_run_of_words_with_those_that_prompts_were_chosen_on(tmp_path):
    development = [*data_folder("prompts", "development").glob("*.jsonl"), prompts.FOLDER / "wordings.json"]
    seen = runs(development)
    assert len(seen) > 3000 and not seen & runs(data_folder("texts").rglob("*.jsonl"))
    (tmp_path / "shared.jsonl").write_text(f'{{"text": "and {" ".join(next(iter(seen)))}"}}')
    assert runs([tmp_path / "shared.jsonl"]) & seen  # a shared run would be seen
