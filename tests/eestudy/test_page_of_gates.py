"""Every claim of the page on gates tried both ways on planted traces."""

import families
import numpy as np
import pytest
from pages import run_page, verdicts
from planted import STEPS, asked, consistent, deep_model, exits, pairs, plant, write_task

import eelib
from eelib.exits.gates.state import TRAINED, save_gate


def early_at(layer, depth):
    """Every second token could exit at a layer, the others at the last only; no gate sees which but by its scores."""
    return lambda tokens: exits(np.where(tokens["position"] % 2, layer, depth), depth)


def scores_of(vocabulary, confident, patient):
    """Readouts of three layers: `confident`, sure just where they agree with the end, else equally sure everywhere.

    Where they disagree, layers have one best token in common, so patience stops too early or never; unless `patient`.
    """

    def of(tokens):
        agrees = early_at(1, 3)(tokens)
        columns = consistent(tokens["token_id"].to_numpy(), agrees, vocabulary)
        ids = columns["topk_ids"].reshape(*agrees.shape, -1).copy()
        sure = np.where(agrees, 0.9, 0.2) if confident else np.full(agrees.shape, 0.5)
        entropy = np.where(agrees, 0.1, 3.0) if confident else np.ones(agrees.shape)
        if patient:
            ids[:, 2, [0, 2]] = np.where(agrees[:, [2]], ids[:, 2, [0, 2]], ids[:, 2, [2, 0]])
        shares = sure[..., None] * 0.1 ** np.arange(ids.shape[-1])
        top = {"top1": ids[..., 0], "topk_ids": ids.reshape(len(ids), -1)}
        return top | {"probability": sure, "topk_probability": shares.reshape(len(ids), -1), "entropy": entropy}

    return of


# What scores tell before and after joint optimization (confident, patient); verdicts on P-G1 to P-G3. A gate saves
# layers just where its scores tell; so where confidence tells before, it saves a third of them.
PAIRS = {
    "confidence tells after": ((False, False), (True, False), ("holds", "holds", "holds")),
    "confidence told before": ((True, False), (False, False), ("does not hold", "not applicable", "does not hold")),
    "patience tells after": ((False, False), (False, True), ("holds", "does not hold", "holds")),
}


@pytest.mark.parametrize("name", PAIRS)
def test_gates(name, tmp_path):
    path = tmp_path / "tiny.de-en.jsonl"
    task = write_task(path, pairs(160))
    for seed, (role, tells) in enumerate(zip(("before", "after"), PAIRS[name])):
        model = eelib.load_model(str(families.save("gpt2", tmp_path / role, seed=seed)), device="cpu")
        plant(model, task, tmp_path / "runs", early_at(1, 3), STEPS, scores_of(model.vocab_size, *tells))
    space = run_page("gates", **asked(tmp_path, tmp_path / "before", str(path)), after=str(tmp_path / "after"))[0]
    found = verdicts(space)
    assert tuple(found[f"P-G{number}"] for number in (1, 2, 3)) == PAIRS[name][2]


DEEP, RISING, WAVERING = 6, (0.1, 0.2, 0.3, 0.6, 0.62, 0.64, 0.66), (0.5, 0.5, 0.4, 0.5, 0.4, 0.5, 0.66)


def rises(telling):
    """Rises, which monotone asks for, at the tokens that may exit at layer 3 (`telling`) or at the others; margins are
    wide at the others of the two, from layer 3 on, so that softmax difference does what monotone does not.
    """

    def of(tokens):
        early = (tokens["position"] % 2).to_numpy(dtype=bool)
        first = np.where((early == telling)[:, None], RISING, WAVERING)
        wide = (early != telling)[:, None] & (np.arange(DEEP + 1) >= 3)
        second = first * np.where(wide, 0.5, 0.99)
        shares = np.concatenate([first[..., None], second[..., None], np.full((*first.shape, 8), 0.0001)], axis=-1) / 2
        readouts = {"topk_probability": shares.reshape(len(tokens), -1), "probability": first / 2}
        return readouts | {"margin": (first - second) / 2}

    return of


def counting_gates(model, folder):
    """Trained gates that see nothing: the LSTM is surer with every layer, the others are as sure at all of them."""
    for name, kind in TRAINED.items():
        network = kind.build(model.hidden_size)
        for key, values in network.state_dict().items():
            values.zero_()
            if name == "lstm" and "bias_ih" in key:
                values += 1.0
            if key == "out.weight":
                values[1] = 1.0
        save_gate(kind.of(network, model.name), folder / model.name, model, {})


def families_page(folder, file, agrees, found, gates):
    """The page on two models of six blocks with the same planted traces, and with trained gates of the second."""
    models = [deep_model(folder / role, DEEP, seed) for seed, role in enumerate(("own", "m"))]
    for model in models:
        plant(model, eelib.load_task(file), folder / "runs", agrees, STEPS, found)
    gates(models[1])
    more = {"after": str(folder / "m"), "gates_folder": str(folder / "gates")}
    space = run_page("gates", **asked(folder, folder / "own", file), **more)[0]
    return verdicts(space)


@pytest.mark.parametrize("verdict", ["holds", "does not hold"])
def test_the_best_of_each_family(verdict, planted_tasks, tmp_path):
    found = families_page(tmp_path, planted_tasks[0], early_at(3, DEEP), rises(verdict == "holds"), lambda model: None)
    assert (found["M-E1"], found["M-E3"]) == (verdict, "not testable here")


@pytest.mark.parametrize("verdict", ["holds", "does not hold"])
def test_the_lstm_against_the_classifier(verdict, planted_tasks, tmp_path):
    """The LSTM amounts to a fixed layer, the classifier to a draw between the first and the last one."""
    layer = 2 if verdict == "holds" else DEEP
    found = families_page(
        tmp_path,
        planted_tasks[0],
        lambda tokens: exits(np.where((tokens["sequence"] % 7 == 0) & (tokens["position"] == 1), 4, layer), DEEP),
        rises(True),
        lambda model: counting_gates(model, tmp_path / "gates"),
    )
    assert found["M-E3"] == verdict
