"""What the parts of a training are worth: from kept counts and outputs, against sums by hand."""

import json

import numpy as np
import pytest

from eelib.common.files import data_folder
from eelib.tasks.task import load_task
from eestudy.old.analysis import ablation, trainings
from eestudy.old.figures.ablation import ablation_figure
from recipes.quality import TRANSLATIONS

LAYERS = 3
KNOWN = {"pocket-llama": 2, "uniform": 3, "dropout": 1, "own": 5, "all": 4}  # of 8 tokens, at layers below the last


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Made-up figures of the five models; their outputs are the references, half of those of "uniform" empty."""
    for name, known in KNOWN.items():
        texts = {}
        for task_name in TRANSLATIONS:
            outputs = [
                r[0] if name != "uniform" or i % 2 else "" for i, r in enumerate(load_task(task_name).references)
            ]
            texts[task_name] = {
                "outputs": outputs,
                "tokens": [8] * len(outputs),
                "agreed": [[known + i % 2, known + i % 2, 8] for i in range(len(outputs))],
            }
        whole = name if name == "pocket-llama" else f"pocket-llama-{name}"
        file = tmp_path / "ablation" / f"{whole}.json"
        file.parent.mkdir(exist_ok=True)
        quality = {"one": {"BLEU": 10.0 + known}, "other": {"BLEU": 20.0}}
        file.write_text(json.dumps({"tokens": 10**6, "steps": 240, "quality": quality, "texts": texts}))
    monkeypatch.setattr(trainings, "data_folder", lambda *parts: tmp_path.joinpath(*parts))
    return ablation.models("pocket-llama")


def test_agreement_is_that_of_the_tokens(kept):
    for one, known in zip(kept, KNOWN.values()):
        curve = ablation.curve(one)
        assert [c.estimate for c in curve] == pytest.approx([(known + 0.5) / 8] * 2 + [1])
        assert all(c.low <= c.estimate <= c.high for c in curve)


def test_gains_are_paired(kept):
    """The texts vary likewise in all models, so a difference does not vary; BLEU of the references is 100."""
    plain, uniform, _, own, _ = kept
    gain = ablation.agreement_gain(own, plain)
    assert gain[:3] == pytest.approx([100 * 3 / 8] * 3)
    assert ablation.bleu_gain(own, plain)[:3] == pytest.approx([0, 0, 0], abs=1e-9)
    lost = ablation.bleu_gain(uniform, plain)
    assert lost.high < 0 and lost.estimate == pytest.approx(
        np.mean([score(name) for name in TRANSLATIONS]) - 100, abs=1e-6
    )


def score(name):
    """BLEU of the references with every second one empty, by sacreBLEU itself."""
    task = load_task(name)
    return task.quality([r[0] if i % 2 else "" for i, r in enumerate(task.references)])["BLEU"]


def test_the_table_and_the_words_say_which_side(kept):
    table = ablation.shown(ablation.rows(kept))
    assert list(table["trained on"]) == list(ablation.LABELS.values())
    assert table["agreement at layer 2 (%)"].map(lambda v: v.estimate).tolist() == pytest.approx(
        [100 * (known + 0.5) / 8 for known in KNOWN.values()]
    )
    assert not table["BLEU, change"].iloc[0].known
    lines = ablation.in_words(kept).split("]).")
    assert "is higher (+25.0 points [+25.0, +25.0" in lines[0] and "BLEU is higher" in lines[0]
    assert "is lower (-25.0 points" in lines[1]
    assert "is lower (-12.5 points" in lines[2] and "BLEU is neither clearly" in lines[2]
    assert "is higher (+12.5 points" in lines[3] and "BLEU is higher" in lines[3]


def test_another_model_has_none():
    assert ablation.models("gpt2") == []
    assert ablation.in_words([]) == "These trainings are of pocket-llama; of this page's model there are none."


def test_the_figure_has_a_curve_and_a_mark_of_each(kept):
    figure = ablation_figure(ablation.rows(kept))
    left, right = figure.axes
    assert len(left.lines) == len(KNOWN) and len(right.containers) == len(KNOWN) - 1


def test_what_is_kept_is_of_equal_trainings():
    """Equal steps, and tokens within a tenth: batches of prompts and outputs differ in padding."""
    found = [json.loads(data_folder("ablation", f"{name}.json").read_text()) for name in ablation.TRAINED]
    assert len({one["steps"] for one in found}) == 1
    tokens = [one["tokens"] for one in found]
    assert max(tokens) <= 1.1 * min(tokens)
    for one in found:
        for name, texts in one["texts"].items():
            assert len(texts["outputs"]) == len(load_task(name)) == len(texts["tokens"])
            agreed = np.array(texts["agreed"])
            assert (agreed <= np.array(texts["tokens"])[:, None]).all()
            assert (agreed[:, -1] == texts["tokens"]).mean() > 0.99  # but for ties
