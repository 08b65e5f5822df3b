"""Structured output on the page on production: failures and token accuracy, by hand, and what is not run."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest

from eelib.common.errors import NotEstimable
from eelib.tasks.task import Task, load_task
from eestudy.old.analysis import production_structured as structured
from eestudy.old.analysis import production_tables as tables
from eestudy.parameters import Parameters

ORDERS = "structured/orders"


def right(task: Task) -> list[str]:
    return [known for (known, *_) in task.references]


def found(early, wrong_tokens=0, tokens_each=10):
    """Forty outputs, right at full depth, `early` at the other traffic's threshold; some of their tokens wrong."""
    task = load_task(ORDERS, limit=40)
    numbers = list(range(len(task)))
    frame = pd.DataFrame(
        {"sequence": number, "wrong": number * tokens_each + place < wrong_tokens}
        for number in numbers
        for place in range(tokens_each)
    )
    study = SimpleNamespace(
        tasks={ORDERS: task}, parameters=SimpleNamespace(kept=0.98, seed=0), model=SimpleNamespace(name="m")
    )
    served = SimpleNamespace(study=study, seed=0, name="m", depth=4)
    ways = (structured.FULL, structured.CARRIED, structured.TOKENS, structured.VALIDATOR)
    failed = {
        way: structured.failing(
            served, ORDERS, numbers, early(right(task)) if way == structured.CARRIED else right(task)
        )
        for way in ways
    }
    thresholds = dict(zip(ways, (None, 0.5, 0.7, 0.9)))
    layers = dict(zip(ways, (4.0, 2.0, 3.0, 3.5)))
    return structured.Structured(served, "translation/de-en", ORDERS, numbers, thresholds, failed, layers, frame)


def broken(outputs):
    """Every other one without its end; of the others each second has another identifier."""

    def other(output):
        record = json.loads(output)
        return json.dumps(record | {"id": "AA-0000-a" if record["id"] != "AA-0000-a" else "BB-0000-b"})

    return [o[:-1] if i % 2 else other(o) if i % 4 else o for i, o in enumerate(outputs)]


def test_failures_beside_layers():
    table = structured.ways_table(found(broken)).set_index("threshold")
    assert table.loc[structured.FULL, "fails"].estimate == 0 and table.loc[structured.FULL, "layers"] == 4
    assert table.loc[structured.CARRIED, "fails"].estimate == 0.5
    assert table.loc[structured.CARRIED, "identifier"].estimate == 0.75
    page = SimpleNamespace(structured=found(broken), why={})
    said = tables.structured_in_words(page)
    assert "With all layers, 0% of the outputs fail the schema and 0% have a wrong identifier." in said
    assert "With this threshold, 50% and 75% do." in said
    assert "3.5 layers run per token in place of 2.0" in said
    page.structured.thresholds[structured.VALIDATOR] = None
    assert "The validator accepts none of the thresholds" in tables.structured_in_words(page)


def test_rise_less_the_fall_of_tokens():
    """Half of the outputs fail, 12 of 400 tokens are wrong where 2% were allowed: 0.5 less 0.01."""
    assert structured.rise_beyond_tokens(found(broken, wrong_tokens=12)).estimate == pytest.approx(0.49)
    same = found(list, wrong_tokens=12)
    assert structured.rise_beyond_tokens(same).estimate == pytest.approx(-0.01)
    empty = replace(same, tokens=same.tokens[same.tokens["sequence"] < 39])  # the last output is nothing but its end
    assert structured.rise_beyond_tokens(empty).estimate == pytest.approx(0.02 - 12 / 390)


def test_without_a_model_it_is_not_run():
    with pytest.raises(NotEstimable, match="no model that writes structured output is named"):
        structured.open_structured(Parameters({"structured": " "}), None, "translation/de-en")
    assert structured.verdict(None, "why not").verdict == "not testable here"
