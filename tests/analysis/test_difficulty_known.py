"""Known difficulty: levels of a task's column, their means and gaps by hand, and what is refused."""

import json

import families
import numpy as np
import pytest

from eestudy.old.analysis import difficulty_known as levels
from eestudy.old.analysis.earliness import token_layers
from eestudy.old.figures import difficulty as plots
from eestudy.old.study.study import Study
from eestudy.parameters import ParameterError, Parameters

WORDS = ("dog", "cat", "barn", "red")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A tiny model on a task of eight questions, four of which take two facts."""
    folder = tmp_path_factory.mktemp("known")
    rows = [{"source": f"Ein {w}.", "references": [f"A {w} ran."], "facts": 1 + i % 2} for i, w in enumerate(WORDS * 2)]
    (folder / "tiny.de-en.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = families.save("gpt2", folder / "gpt2")
    values = {
        "model": str(model),
        "tasks": str(folder / "tiny.de-en.jsonl"),
        "limit": 0,
        "max_new_tokens": 5,
        "batch_size": 0,
    }
    more = {"dtype": "float32", "device": "cpu", "seed": 0, "threshold": 0.9}
    places = {"runs_folder": str(folder / "runs"), "results_folder": str(folder / "results")}
    return Study(Parameters(values | more | places))


def asked(study, form):
    return form.format(study.parameters.tasks)


def test_levels_by_hand(study):
    """Means over answers of means over tokens, and the gap between two levels."""
    known, _ = levels.known_study(study, asked(study, "{} by facts: 1, 2"))
    assert known.levels == ["1", "2"] and len(known.units) > 2
    (made,) = study.traces.values()
    exits, _ = token_layers(made, "stable")
    sequences = made.tokens["sequence"].to_numpy()[made.statistic_rows()]
    means = {}
    for level in (0, 1):
        whole = [s for s in known.units["sequence"] if s % 2 == level]
        means[level] = np.mean([np.mean(exits[sequences == s]) for s in whole])
        assert known.look(str(level + 1), "exit_layer").estimate == pytest.approx(means[level])
    assert known.gap("2", "exit_layer").estimate == pytest.approx(means[1] - means[0])
    assert not known.gap("1", "exit_layer").known
    name, score = known.quality_of("2")
    assert name == "BLEU" and 0 <= score.estimate <= 100
    assert list(levels.known_table(known)["facts"]) == ["1", "2"] and len(levels.gap_table(known)) == 1
    assert set(levels.figures_of(known)) >= {"known_1_score", "known_2_exit_layer_gap"}
    assert "“2”" in levels.sentences(known)
    figure = plots.known_figure(levels.panels(known), known.column)
    assert figure.axes[0].get_title() == "BLEU (0–100)" and len(figure.axes) == 4


def test_limit_of_its_own(study):
    """A level has fewer answers than its task, so a page may ask for more of them than of the other tasks."""
    wanted = asked(study, "{} by facts: 1, 2")
    assert [len(levels.known_study(study, wanted, limit)[0].trace.sequences) for limit in (0, 5)] == [8, 5]


def test_model_is_not_loaded_again(study, monkeypatch):
    monkeypatch.setattr("eestudy.old.study.study.load_model", lambda *_, **__: pytest.fail("loaded twice"))
    known, _ = levels.known_study(study, asked(study, "{} by facts: 2"))
    assert known.trace.layers == study.model.layers


def test_nothing_asked_for(study):
    known, why_not = levels.known_study(study, "")
    assert known is None and "No task" in levels.sentences(known, why_not) and levels.figures_of(known) == {}


def test_a_window_too_short_for_the_stories_stops_nothing(study):
    known, why_not = levels.known_study(study, "question_answering/rooms by kind: one, two")
    assert known is None and "do not fit" in why_not and why_not.startswith("This model can't be asked")


@pytest.mark.parametrize(
    "form, message",
    [
        ("{}", "allowed are question_answering/rooms by kind: one"),
        ("{} by depth: 1", "has no column 'depth'; it has: facts"),
        ("{} by facts: 1, 7", "has no '7'; it has: 1, 2"),
        ("nowhere/none by facts: 1", "none"),
    ],
)
def test_bad_input_is_one_clear_line(study, form, message):
    with pytest.raises(ParameterError, match=message) as error:
        levels.known_study(study, asked(study, form))
    assert "\n" not in str(error.value)
