"""Trained gates: what they learn from, losses by hand, what fitting learns and never sees, and the command."""

import families
import oracle
import pytest
import torch
from exits_made import card_of
from planted import write
from torch.nn import functional as F

from eelib.common.files import data_folder
from eelib.exits.gates.state import TRAINED, trained_gate
from recipes import gates
from recipes.__main__ import main
from recipes.gates import (
    Fitting,
    States,
    accuracy,
    batches_of,
    fit,
    known_outputs,
    loss_of,
    own_outputs,
    prompts_of,
    take_states,
    train_gate,
)
from recipes.own_outputs import OwnText, write_texts

SIZE = 8
QUICK = Fitting(rate=1e-2, epochs=1)


def some_states(tokens=600, layers=5):
    """States whose first number says whether the layer agrees."""
    states = torch.randn(tokens, layers, SIZE, generator=torch.Generator().manual_seed(0))
    outputs = torch.arange(tokens) // 10
    return States(states, states[..., 0] > 0.8, torch.arange(tokens) % 10 == 9, outputs)


def untrained(name):
    torch.manual_seed(0)
    return TRAINED[name].build(SIZE)


def test_classes_weigh_the_same():
    logits, agrees, frequency = torch.randn(8, 2), torch.tensor([0, 1, 1, 0, 1, 1, 1, 1]), torch.tensor([0.25, 0.75])
    losses = F.cross_entropy(logits.double(), agrees, reduction="none")
    wanted = (losses[agrees == 0].mean() + losses[agrees == 1].mean()) / 2
    assert loss_of(logits, agrees.bool(), frequency).item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("name", TRAINED)
def test_what_states_say_is_learned(name):
    """And neither class is favoured, though one is four times as frequent."""
    network, (training, held) = untrained(name), some_states().split()
    before = accuracy(network, held)["balanced"]
    curve = fit(network, training, Fitting(rate=1e-2, epochs=8))
    found = accuracy(network, held)
    assert before < 70 and found["balanced"] > 88 and found["area"] > 95 and curve[-1] < curve[0] / 2


def test_end_tokens_are_left_out_of_the_accuracy_only():
    taken, network = some_states(), untrained("classifier")
    other = taken._replace(agrees=torch.where(taken.ends[:, None], ~taken.agrees, taken.agrees))
    assert accuracy(network, taken) == accuracy(network, other)
    assert accuracy(network, taken)["tokens"] == 540
    assert fit(untrained("classifier"), taken, QUICK) != fit(untrained("classifier"), other, QUICK)


def test_texts_held_out_are_never_trained_on(model_of, tmp_path):
    """Whole outputs; a gate is the same whatever they hold."""
    taken, model = some_states(), model_of("llama")
    assert set(taken.split()[1].output.tolist()) == set(range(4, 60, 5))
    wide = taken._replace(states=torch.cat([taken.states] * 4, dim=-1))
    noise = torch.where((wide.output % 5 == 4)[:, None, None], torch.randn(wide.states.shape), wide.states)
    parts = {"one": wide, "other": wide._replace(states=noise)}
    found = {run: train_gate(model, "classifier", part, QUICK, tmp_path / run, {}) for run, part in parts.items()}
    gates_of = [trained_gate(model, "classifier", tmp_path / run) for run in found]
    assert gates_of[0] == gates_of[1] and found["one"] != found["other"]


def test_labels_that_are_all_alike_are_refused(one_line):
    taken = some_states()
    taken = taken._replace(agrees=taken.agrees | True)
    one_line(ValueError, "a share of 1 agree", lambda: fit(untrained("classifier"), taken, QUICK))
    one_line(ValueError, "of 0 layers", lambda: fit(untrained("three_states"), some_states(20, 2), QUICK))


@pytest.fixture
def own_texts(tmp_path, monkeypatch):
    """A task file of our own, and short outputs."""
    monkeypatch.setattr(gates, "LONGEST", 6)
    file = tmp_path / "de-en.jsonl"
    rows = [{"source": f"{word} {i}", "references": ["a"]} for i in range(12) for word in ("Hund", "the dog")]
    return write(file, rows)


def command(folder, texts, out, *more):
    main(["gates", "--model", str(folder), "--tasks", str(texts), "--out", str(out), *more])


def test_one_command_trains_gates_for_any_model(folder_of, model_of, own_texts, tmp_path, capsys):
    command(folder_of("t5"), own_texts, tmp_path / "out", "--tokens", "100", "--gates", "classifier,lstm-as-published")
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
        (["--tasks", "translation/de-en"], "training texts 'translation/de-en' are not known"),
        (["--tasks", "captions"], "need the corpora"),
        (["--gates", "patience"], "trained gate 'patience' is not known"),
        (["--tokens", "0"], "must be positive"),
        (["--corpora", "nowhere"], "nowhere is not a folder"),
        (["--tasks", "text", "--corpora", "{empty}"], "No such file"),
        (["--model", "{bert_labels}"], "writes no tokens"),
        (["--tasks", "{judged}"], "on which gates are judged"),
        (["--outputs", "{empty}"], "has no outputs of a model to training prompts"),
    ],
)
def test_the_command_refuses_in_one_line(more, part, folder_of, own_texts, tmp_path, capsys):
    judged = data_folder("texts", "translation", "de-en.jsonl").read_text().splitlines()[:1]  # one row is enough
    (tmp_path / "judged.en-de.jsonl").write_text("\n".join([*own_texts.read_text().splitlines(), *judged]))
    places = {"judged": tmp_path / "judged.en-de.jsonl", "empty": tmp_path, "bert_labels": folder_of("bert_labels")}
    more = [word.format(**places) for word in more]
    with pytest.raises(SystemExit):
        command(folder_of("llama"), own_texts, tmp_path / "out", *more)
    errors = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(errors) == 1 and part in errors[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_states_and_labels_are_those_of_a_plain_loop(family, model_of, plain_of, monkeypatch):
    """One output at a time, no cache: whether a layer's top-1 is the token that was emitted."""
    monkeypatch.setattr(gates, "LONGEST", 5)
    monkeypatch.setattr(gates, "AT_ONCE", 2)
    model, network, kind, last = model_of(family), plain_of(family), families.FAMILIES[family], 0
    prompts = model.encode(families.PROMPTS[:4])
    order = [prompt for batch in batches_of(prompts, 2) for prompt in batch]
    outputs = [oracle.plain_greedy(network, kind, prompt, 5, model.eos_ids) for prompt in order]
    taken = take_states(model, own_outputs(model, prompts), 10**6)
    assert take_states(model, own_outputs(model, prompts), 1).output.unique().tolist() == [0, 1]  # one batch is enough
    for number, (prompt, output) in enumerate(zip(order, outputs)):
        run = oracle.oracle_run(network, kind, prompt, output)
        mine = (taken.output == number).nonzero()[:, 0]
        assert len(mine) == len(output)
        for position, row in enumerate(mine.tolist()):
            assert bool(taken.ends[row]) == (output[position] in model.eos_ids)
            for layer in range(1, model.layers):
                state = run["states"][position, layer]
                torch.testing.assert_close(taken.states[row, layer - 1], state, rtol=1e-3, atol=1e-3)
                top = kind.unembed(network, state[None])[0].argmax().item()
                assert bool(taken.agrees[row, layer - 1]) == (top == output[position])
        last += len(output)
    assert last == len(taken.ends) and 0 < taken.agrees.float().mean() < 1


def test_known_outputs_are_read_in_a_random_order(tmp_path):
    texts = [
        OwnText(number, "story", torch.arange(number, number + 5), 2, torch.zeros(4, 1), torch.zeros(4, 1))
        for number in range(9)
    ]
    write_texts(texts, tmp_path / "training-00000.safetensors")
    found = [(prompts[0], outputs[0]) for prompts, outputs in known_outputs(tmp_path)]
    assert sorted(found) == [([n, n + 1], [n + 2, n + 3, n + 4]) for n in range(9)] != found


def test_prompts_are_of_all_parts_in_turn(made, corpora, tmp_path):
    pocket = made("pocket-llama")
    found = prompts_of(pocket, "captions,reading", corpora, tmp_path, 40)
    texts = [pocket.tokenizer.decode(ids, skip_special_tokens=True) for ids in found]
    asks = ["### Question" in text for text in texts]
    assert 10 <= len(texts) <= 40 and 10 < sum(asks) < 30
    assert found == prompts_of(pocket, "captions,reading", corpora, tmp_path, 40)
    assert all(len(ids) <= pocket.context_length - gates.LONGEST for ids in found)
