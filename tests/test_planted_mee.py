"""M's confidence measures on planted traces: monotone tells or misleads; an LSTM beats a classifier, or does not."""

from pathlib import Path

import families
import numpy as np
import pytest
import torch
from planted import STEPS, exits, plant, verdicts

import eelib
from eelib.exits.gates.state import TRAINED, save_gate, trained_gate

DEPTH, EARLY = 6, 3  # half of the tokens could leave at layer 3, the other half at the last only
HOLDS, FAILS, UNTESTABLE = "holds", "does not hold", "not testable here"
RISING, WAVERING = (0.1, 0.2, 0.3, 0.6, 0.62, 0.64, 0.66), (0.5, 0.5, 0.4, 0.5, 0.4, 0.5, 0.66)
CLEAR, CLOSE = 0.5, 0.99  # the second probability, as a share of the first


def saved(folder: Path, seed: int) -> Path:
    """A checkpoint of six layers."""
    small = families.build("gpt2", seed)
    config = small.config
    config.n_layer = DEPTH
    type(small)(config).save_pretrained(folder)
    families.tokenizer_for("causal").save_pretrained(folder)
    return folder


def readouts(telling: bool):
    """Rises, which monotone asks for, at the tokens that may leave early (`telling`) or at the others.

    Margins are wide at the others of the two, from layer 3 on, so that softmax difference does what monotone does not.
    """

    def of(tokens):
        early = (tokens["position"] % 2).to_numpy(dtype=bool)
        first = np.where((early == telling)[:, None], RISING, WAVERING)
        wide = (early != telling)[:, None] & (np.arange(DEPTH + 1) >= EARLY)
        second = first * np.where(wide, CLEAR, CLOSE)
        rest = np.full((*first.shape, 8), 0.0001)
        shares = np.concatenate([first[..., None], second[..., None], rest], axis=-1) / 2
        return {
            "topk_probability": shares.reshape(len(tokens), -1),
            "probability": first / 2,
            "margin": (first - second) / 2,
        }

    return of


def planted(folder: Path, agrees, found):
    """The page's own model and the one with M's objective, with the same planted traces of the task in `folder`."""
    models = [eelib.load_model(str(saved(folder / role, seed)), device="cpu") for seed, role in enumerate(("own", "m"))]
    task = eelib.load_task(str(folder / "tiny.de-en.jsonl"))
    for model in models:
        plant(model, task, folder / "runs", agrees, STEPS, found)
    return models


@pytest.mark.slow
@pytest.mark.parametrize("verdict", [HOLDS, FAILS])
def test_monotone_against_the_two_of_calm_without_training(verdict, planted_tasks, tmp_path):
    own, _ = planted(
        tmp_path, lambda t: exits(np.where(t["position"] % 2, EARLY, DEPTH), DEPTH), readouts(verdict == HOLDS)
    )
    found = verdicts(
        "mee", tmp_path, own, planted_tasks[:1], after=tmp_path / "m", gates_folder=tmp_path / "none", sequences=2
    )
    assert found == {"M-E1": verdict, "M-E2": found["M-E2"], "M-E3": UNTESTABLE}  # times can't be planted


def counting_gates(model, folder: Path) -> None:
    """Trained gates that see nothing: the LSTM is surer with every layer, the others are as sure at all of them."""
    for name, kind in TRAINED.items():
        network = kind.build(model.hidden_size)
        for key, values in network.state_dict().items():
            values.zero_()
            if name == "lstm" and "bias_ih" in key:
                values += 1.0
            if key == "out.weight":
                values[1] = 1.0
        save_gate(kind.of(network, model.name), folder, model, {})


@pytest.mark.slow
@pytest.mark.parametrize("verdict", [HOLDS, FAILS])
def test_the_lstm_against_the_classifier(verdict, planted_tasks, tmp_path):
    """The LSTM amounts to a fixed layer, the classifier to a coin between the first and the last one."""
    layer = 2 if verdict == HOLDS else DEPTH
    own, judged = planted(tmp_path, lambda t: exits(np.full(len(t), layer), DEPTH), readouts(True))
    counting_gates(judged, tmp_path / "gates" / judged.name)
    found = verdicts(
        "mee", tmp_path, own, planted_tasks[:1], after=tmp_path / "m", gates_folder=tmp_path / "gates", sequences=2
    )
    assert found["M-E3"] == verdict


def test_planted_gates_count_layers(model_of, tmp_path):
    """Or the test above would say nothing."""
    model = model_of("gpt2")
    counting_gates(model, tmp_path)
    states = torch.randn(2, DEPTH, model.hidden_size)
    lstm, classifier = (trained_gate(model, name, tmp_path).network(states) for name in ("lstm", "classifier"))
    assert (lstm[..., 1].diff(dim=1) > 0).all() and torch.equal(lstm[0], lstm[1])
    assert (classifier == classifier[0, 0]).all()
