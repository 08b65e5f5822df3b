"""Trained gates: what they learn from, the loss by hand, what fitting learns and never sees, and the command."""

import families
import oracle
import pytest
import torch
from exits_made import card_of
from planted import write
from torch.nn import functional as F

from checks.tiny_texts import PROMPTS
from eelib.common.files import data_folder
from eelib.exits.gates.state import TRAINED, trained_gate
from recipes import gates
from recipes.__main__ import main
from recipes.gates import Fitting, States, accuracy, batches_of, fit, loss_of, own_outputs, take_states, train_gate

SIZE = 8


def some_states(tokens=600, layers=5):
    """States whose first number says whether the layer agrees."""
    states = torch.randn(tokens, layers, SIZE, generator=torch.Generator().manual_seed(0))
    outputs = torch.arange(tokens) // 10
    return States(states, states[..., 0] > 0.8, torch.arange(tokens) % 10 == 9, outputs)


def test_classes_weigh_the_same():
    logits, agrees, frequency = torch.randn(8, 2), torch.tensor([0, 1, 1, 0, 1, 1, 1, 1]), torch.tensor([0.25, 0.75])
    losses = F.cross_entropy(logits.double(), agrees, reduction="none")
    wanted = (losses[agrees == 0].mean() + losses[agrees == 1].mean()) / 2
    assert loss_of(logits, agrees.bool(), frequency).item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("name", TRAINED)
def test_what_states_say_is_learned(name):
    """And neither class is favoured, though one is four times as frequent."""
    network, (training, held) = TRAINED[name].build(SIZE), some_states().split()
    before = accuracy(network, held)["balanced"]
    curve = fit(network, training, Fitting(rate=1e-2, epochs=8))
    found = accuracy(network, held)
    assert before < 70 and found["balanced"] > 88 and found["area"] > 95 and curve[-1] < curve[0] / 2


def test_texts_held_out_are_never_trained_on(model_of, tmp_path):
    """Whole outputs; a gate is the same whatever they hold."""
    taken, model = some_states(), model_of("llama")
    assert set(taken.split()[1].output.tolist()) == set(range(4, 60, 5))
    wide = taken._replace(states=torch.cat([taken.states] * 4, dim=-1))
    noise = torch.where((wide.output % 5 == 4)[:, None, None], torch.randn(wide.states.shape), wide.states)
    parts = {"one": wide, "other": wide._replace(states=noise)}
    how = Fitting(rate=1e-2, epochs=1)
    found = {run: train_gate(model, "classifier", part, how, tmp_path / run, {}) for run, part in parts.items()}
    gates_of = [trained_gate(model, "classifier", tmp_path / run) for run in found]
    assert gates_of[0] == gates_of[1] and found["one"] != found["other"]


@pytest.fixture
def own_texts(tmp_path, monkeypatch):
    """A task file of our own, and short outputs."""
    monkeypatch.setattr(gates, "LONGEST", 6)
    rows = [{"source": f"{word} {i}", "references": ["a"]} for i in range(12) for word in ("Hund", "the dog")]
    return write(tmp_path / "de-en.jsonl", rows)


def test_one_command_trains_gates_for_any_model(folder_of, model_of, own_texts, tmp_path, capsys):
    given = ["--model", str(folder_of("t5")), "--tasks", str(own_texts), "--out", str(tmp_path / "out")]
    main(["gates", *given, "--tokens", "100", "--gates", "classifier,lstm-as-published"])
    assert "balanced accuracy" in capsys.readouterr().out
    for name, more in (("classifier", {}), ("lstm", {"as_published": True})):
        gate = trained_gate(model_of("t5"), name, tmp_path / "out", **more)
        assert gate.name == name and not gate.normed
    card = card_of(tmp_path / "out" / "classifier.safetensors")
    own = {"tokens": 100, "epochs": 5, "rate": Fitting().rate, "batch": 32, "normed": False, "seed": 20}
    assert card["recipe"] == own and len(card["loss by epoch"]) == 5 and card["held out"]["tokens"] > 0
    assert card["model_hash"] == model_of("t5").hash and card["texts"] == str(own_texts)


@pytest.mark.parametrize(
    "more, part",
    [
        (["--tasks", "captions"], "need the corpora"),
        (["--tokens", "0"], "must be positive"),
        (["--model", "{bert_labels}"], "writes no tokens"),
        (["--tasks", "{judged}"], "on which gates are judged"),
        (["--outputs", "{empty}"], "has no outputs of a model to training prompts"),
    ],
)
def test_the_command_refuses_in_one_line(more, part, folder_of, own_texts, tmp_path, capsys):
    judged = data_folder("texts", "translation", "de-en.jsonl").read_text().splitlines()[:1]  # one row is enough
    (tmp_path / "judged.en-de.jsonl").write_text("\n".join([*own_texts.read_text().splitlines(), *judged]))
    places = {"judged": tmp_path / "judged.en-de.jsonl", "empty": tmp_path, "bert_labels": folder_of("bert_labels")}
    given = ["--model", str(folder_of("llama")), "--tasks", str(own_texts), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        main(["gates", *given, *(word.format(**places) for word in more)])
    errors = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(errors) == 1 and part in errors[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_states_and_labels_are_those_of_a_plain_loop(family, model_of, monkeypatch):
    """One output at a time, no cache: whether a layer's top-1 is the token that was emitted."""
    monkeypatch.setattr(gates, "LONGEST", 5)
    monkeypatch.setattr(gates, "AT_ONCE", 2)
    model, network, kind = model_of(family), families.plain_of(family), families.FAMILIES[family]
    prompts = model.encode(PROMPTS[:4])
    order = [prompt for batch in batches_of(prompts, 2) for prompt in batch]
    outputs = [oracle.plain_greedy(network, kind, prompt, 5, model.eos_ids) for prompt in order]
    taken = take_states(model, own_outputs(model, prompts), 10**6)
    assert taken.output.tolist() == [number for number, output in enumerate(outputs) for _ in output]
    assert taken.ends.tolist() == [token in model.eos_ids for output in outputs for token in output]
    runs = [oracle.oracle_run(network, kind, prompt, output) for prompt, output in zip(order, outputs)]
    states = torch.cat([run["states"][:, 1:-1] for run in runs])
    torch.testing.assert_close(taken.states, states, rtol=1e-3, atol=1e-3)
    top1 = kind.unembed(network, states.flatten(0, 1)).argmax(-1).view(states.shape[:2])
    assert taken.agrees.equal(top1 == torch.tensor(sum(outputs, []))[:, None])
    assert 0 < taken.agrees.float().mean() < 1
