"""How often the final token is outside an early layer's list, against what the lists of a real trace hold."""

from types import SimpleNamespace

import numpy as np
import pytest
import traces

from eestudy.old.analysis import gates_shortlist as shortlist
from eestudy.parameters import Parameters


@pytest.fixture
def asked(model_of, tmp_path):
    """Two tasks of a tiny model, the same trace twice."""
    trace = traces.make(model_of("llama"), tmp_path)
    study = SimpleNamespace(traces={"one": trace, "two": trace}, parameters=Parameters({"seed": 0}))
    return {"before": SimpleNamespace(study=study, tasks=["one", "two"])}


def test_ranks_say_what_the_lists_hold(asked):
    trace = asked["before"].study.traces["one"]
    rows = trace.statistic_rows()
    final, kept = trace.tokens["token_id"].to_numpy()[rows], trace["topk_ids"][rows]
    for layer in range(1, trace.layers + 1):
        for k in (1, 3, 10):
            expected = [token not in listed[:k] for token, listed in zip(final, kept[:, layer])]
            np.testing.assert_array_equal(shortlist.missed(trace, layer, k)[0], expected)


def test_the_table_has_each_task_and_their_mean(asked):
    trace = asked["before"].study.traces["one"]
    found = shortlist.table(asked, trace.layers)
    assert found["task"].tolist() == ["one", "two", shortlist.MEAN]
    for layer, k in shortlist.lists(trace.layers):
        share = (trace["final_rank"][trace.statistic_rows(), layer].astype(np.float64) > k).mean()
        assert [one.estimate for one in found[shortlist.named(layer, k)]] == pytest.approx([100 * share] * 3)
    own = found[shortlist.named(1, 10)].iloc[-1].estimate
    assert f"for {own:.1f}% (95% interval" in shortlist.in_words(found)
    assert f"right for at most {100 - own:.1f}%" in shortlist.in_words(found)


def test_lists_of_shallow_models_are_not_said_twice():
    assert shortlist.lists(12) == [(1, 10), (1, 100), (3, 10), (6, 10)]
    assert shortlist.lists(2) == [(1, 10), (1, 100)]


def test_nothing_learnt_is_said(asked):
    asked["before"].tasks = []
    assert "Nothing is learnt" in shortlist.in_words(shortlist.table(asked, 4))
