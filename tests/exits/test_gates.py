"""Each gate's score by hand, trained ones by their equations; their files; rules and thresholds of exits."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from exits_made import card_of
from families import identity_unembed
from scipy.stats import beta

from eelib.common.errors import InputError
from eelib.common.files import data_folder
from eelib.exits.exit_rule import GRID, Decaying, Estimated, ExitRule, by_moments
from eelib.exits.gates.gate import NO_EXIT, LayerOutput, gate_named, select_rows
from eelib.exits.gates.state import TRAINED, Lstm, save_gate, trained_gate
from eelib.exits.trace_scores import exits_by, name_of
from eelib.models.folder import weights_hash
from eelib.models.lora import hash_with_lora, lora_base
from eelib.models.packaged import place_of

LAYERS = 5


class Doubling:
    """A head whose logits are the state, whose norm doubles the first number of it."""

    vocab_size = 3

    def __call__(self, state):
        return state

    def normed(self, state):
        return state * torch.tensor([2.0, 1.0])

    def of_ids(self, state, ids):
        return state.gather(1, ids)


def asked(gate, **columns):
    """Scores [layers][tokens] of a gate asked at layer 1, 2, ...; columns: readouts or "state", [layers, tokens]."""
    first = next(iter(columns.values()))
    gate_state, found = gate.start(len(first[0])), []
    for layer in range(1, len(first) + 1):
        now = {name: torch.tensor(values[layer - 1]) for name, values in columns.items()}
        state = now.pop("state", None)
        output = LayerOutput(layer, LAYERS, torch.arange(len(first[0])), now, state, Doubling())
        found.append(gate.score(output, gate_state).tolist())
    return found


STATES = [[[1.0, 0.0]], [[1.0, 1.0]], [[2.0, 2.0]]]
RISING = [[0.9, 0.1], [0.8, 0.2], [0.85, 0.3], [0.9, 0.3], [0.95, 0.4]]
TWO_RISES = [[NO_EXIT, NO_EXIT], [NO_EXIT, NO_EXIT], [NO_EXIT, 0.3], [0.9, NO_EXIT], [0.95, NO_EXIT]]
UNDERFLOW = {"entropy": [[0.0, 0.5]], "probability": [[1.0, 0.5]]}  # the published entropy is NaN where one is 0
BY_HAND = [
    ("confidence", False, {"probability": [[0.5, 0.25]]}, [[0.5, 0.25]]),
    ("softmax_difference", False, {"margin": [[0.5, 0.25]]}, [[0.5, 0.25]]),
    ("entropy", False, UNDERFLOW, [[0.0, -0.5]]),
    ("entropy", True, UNDERFLOW, [[NO_EXIT, -0.5]]),
    ("state_saturation", False, {"state": STATES}, [[NO_EXIT], [math.sqrt(0.5)], [1.0]]),
    ("state_saturation", True, {"state": STATES}, [[NO_EXIT], [2 / math.sqrt(5)], [1.0]]),  # of (2, 0), (2, 1), (4, 2)
    ("monotone", False, {"probability": RISING}, TWO_RISES),
    ("monotone", True, {"state": [[[0.1, 0.0]], [[0.2, 0.0]], [[0.8, 0.0]]]}, [[NO_EXIT], [NO_EXIT], [0.8]]),
    ("patience", False, {"top1": [[1, 1], [1, 1], [2, 1], [2, 2]]}, [[0, 0], [1, 1], [0, 2], [1, 0]]),
    ("fixed", False, {"top1": [[1, 1], [1, 1]]}, [[1, 1], [2, 2]]),
]


@pytest.mark.parametrize("name, as_published, columns, wanted", BY_HAND, ids=str)
def test_a_gates_score_by_hand(name, as_published, columns, wanted):
    found = asked(gate_named(name, **{"as_published": True} if as_published else {}), **columns)
    assert [pytest.approx(row) for row in wanted] == found


def test_the_schedule_falls_along_the_output():
    found = asked(gate_named("schedule", least=2, longest=4), top1=[[0] * 6] * LAYERS)
    depths = [next(layer for layer in range(1, LAYERS + 1) if found[layer - 1][at] >= 0) for at in range(6)]
    assert depths == [5, 4, 3, 2, 2, 2]


def test_a_gates_own_token_is_of_the_logits_that_gave_its_score():
    """A shortlist of layer 2 has ids 2 and 0; at layer 3 id 0 leads them, though id 1 leads all."""
    states = [[[0.0, 9.0, 0.0]], [[1.0, 0.0, 3.0]], [[5.0, 9.0, 4.0]]]
    gate = gate_named("shortlist", layer=2, k=2)
    gate_state, found = gate.start(1), []
    for layer, state in enumerate(states, 1):
        output = LayerOutput(layer, LAYERS, torch.zeros(1, dtype=torch.long), {}, torch.tensor(state), Doubling())
        found.append((gate.score(output, gate_state).item(), gate.token(output, gate_state).item()))
    second, third = (1 / (1 + math.exp(-lead)) for lead in (2.0, 1.0))
    assert found == [(NO_EXIT, -1), (pytest.approx(2 * second - 1), 2), (pytest.approx(2 * third - 1), 0)]
    published = gate_named("monotone", as_published=True)
    published.score(output, gate_state := published.start(1))
    assert published.token(output, gate_state).tolist() == [1]


# Where a rule lets a token exit


def test_where_a_gate_is_asked_and_lets_exit():
    """A stateful one below the least layer, too, where no token exits; none outside its exit layers. Equal scores exit
    by inclusive gates only.
    """
    equal = torch.tensor([2.0]), torch.zeros(1, dtype=torch.long)
    assert ExitRule(gate_named("patience"), 2).exits(3, *equal).tolist() == [True]
    assert ExitRule(gate_named("confidence"), 2).exits(3, *equal).tolist() == [False]
    rule = ExitRule(gate_named("patience"), 0, minimum_layer=3)
    assert rule.asked(5) == [1, 2, 3, 4] and not rule.exits(2, torch.tensor([9.0]), torch.zeros(1)).any()
    confidence = gate_named("confidence")
    assert ExitRule(confidence, minimum_layer=3).asked(5) == [3, 4]
    rule = ExitRule(confidence, 0.5, exit_layers=(2, 4), full_depth_tokens=2)
    assert rule.asked(5) == [2, 4]
    assert rule.exits(2, torch.full((4,), 0.9), torch.arange(4)).tolist() == [False, False, True, True]
    assert ExitRule(confidence).threshold.at(torch.zeros(1)) == torch.tensor(0.9)  # its default
    any_score, one = ExitRule(gate_named("state_saturation"), -math.inf), torch.zeros(1)
    assert any_score.exits(2, one, one).item() and not any_score.exits(1, one + NO_EXIT, one).any()
    layers = exits_by(any_score, torch.tensor([[NO_EXIT, 0.1], [NO_EXIT, NO_EXIT]]), torch.zeros(2))
    assert layers.tolist() == [2, 3]  # where a gate gives NO_EXIT, no threshold lets a token exit
    same = [ExitRule(confidence, 0.5, layers) for layers in ((2, 4), [2, 4], tuple(np.array([2, 4])))]
    assert len(set(same)) == 1 and json.dumps(same[2].exit_layers) == "[2, 4]"


def test_bad_gates_rules_and_thresholds_are_one_line(one_line):
    gate = gate_named("confidence")
    one_line(InputError, ["gate 'hunch'", "patience", "lstm"], lambda: gate_named("hunch"))
    one_line(InputError, ["no parameter 'temperature'", "least"], lambda: gate_named("schedule", temperature=1))
    one_line(InputError, "k 1 is not allowed", lambda: gate_named("shortlist", k=1))
    one_line(InputError, "1 <= least <= most", lambda: gate_named("schedule", least=4, most=2))
    for wrong in ("4", 1.5, True):
        one_line(InputError, [f"most {wrong!r}", "a whole number"], lambda: gate_named("schedule", most=wrong))
    one_line(InputError, ["as_published 'no'", "True or False"], lambda: gate_named("entropy", as_published="no"))
    for wrong in ((3, 2), (), (True,), "2"):
        one_line(InputError, [f"exit_layers {wrong!r}", "rising order"], lambda: ExitRule(gate, exit_layers=wrong))
    for wrong in ("0.9", float("nan"), True):
        one_line(InputError, f"threshold {wrong!r}", lambda: ExitRule(gate, wrong))
    one_line(InputError, "minimum_layer", lambda: ExitRule(gate, minimum_layer=0))
    for beyond in ({"exit_layers": (0, 1)}, {"exit_layers": (2, 9)}, {"minimum_layer": 5}):
        one_line(InputError, "layers 1 to 4", lambda: ExitRule(gate, **beyond).check(4))
    one_line(InputError, "layers 1 to 4", lambda: ExitRule(gate_named("shortlist", layer=9)).check(4))
    for given in ((1.5,), ("a",), (0.5, math.inf), (0.5, 4.0, 0)):
        one_line(InputError, "decaying threshold", lambda: Decaying(*given))
    one_line(InputError, "exit_layers=(layer,)", lambda: ExitRule(gate, Estimated()))


# Thresholds that change


def test_both_forms_of_the_decay():
    at, fall = torch.tensor([0, 5, 10]), [1.0, math.exp(-2.0), math.exp(-4.0)]
    ours, theirs = (Decaying(0.5, tau=4, longest=10, as_published=published).at(at) for published in (False, True))
    assert ours.tolist() == pytest.approx([0.45 + 0.1 * f for f in fall])
    assert theirs.tolist() == pytest.approx([0.45 + 0.05 * f for f in fall])
    assert Decaying(1.0, longest=10).at(at).max() <= 1
    rule = ExitRule(gate_named("confidence"), Decaying(0.5, longest=10))
    assert exits_by(rule, torch.full((3, 2), 0.5), at).tolist() == [3, 1, 1]  # a threshold for each token


def test_free_finds_where_the_agreeing_are_enough():
    """Hard sides: the first grid point at which the true densities stand at 0.4. At most 300 fits."""
    draw = np.random.default_rng(1)
    wrong, right = draw.beta(2, 4, 20_000), draw.beta(6, 2, 20_000)
    limit = Estimated(as_published=True)
    limit.learn(right, [True] * len(right))
    limit.begin_sequence()
    assert limit.value == 0.9 and limit.fits == 0  # until both sides were seen
    limit.learn(wrong, [False] * len(wrong))
    limit.begin_sequence()
    against, favour = beta.pdf(GRID, 2, 4), beta.pdf(GRID, 6, 2)
    assert limit.value == GRID[(favour / (favour + against) > 0.4).argmax()] and limit.fits == 1
    limit.fits = 300
    limit.begin_sequence()
    assert limit.fits == 300


def test_the_published_estimator_does_not_look_back_and_ours_does():
    scores, agreed = [0.2, 0.3, 0.7, 0.9], [False, True, False, True]
    found = []
    for as_published in (False, True):
        limit = Estimated(as_published=as_published)
        limit.learn(scores, agreed)
        limit.begin_sequence()
        found.append(limit.shapes)
    hard = [by_moments(np.array(scores), np.where(agreed, *side)) for side in ((1e-4, 1), (1, 1e-4))]
    assert found[1][0] == pytest.approx(hard[0], rel=1e-3) and found[1][1] == pytest.approx(hard[1], rel=1e-3)
    first = [beta.pdf(scores, 1, 2) / 2, beta.pdf(scores, 2, 1) / 2]
    soft = 0.8 * np.array(first) + 0.2 * np.array([[1, 0, 1, 0], [0, 1, 0, 1]])
    for shape, side in zip(found[0], soft / soft.sum(axis=0)):
        assert shape == pytest.approx(by_moments(np.array(scores), side))


# Trained gates

SIZE, DEEP, TOKENS = 6, 7, 5
KINDS = {name: (gate, {}) for name, gate in TRAINED.items()} | {"lstm as published": (Lstm, {"as_published": True})}


@pytest.fixture
def states():
    """[layers, tokens, size], of layers 1 to L-1."""
    return 3 * torch.randn(DEEP - 1, TOKENS, SIZE, generator=torch.Generator().manual_seed(1))


def untrained(name, seed=0, **more):
    kind, parameters = KINDS[name]
    torch.manual_seed(seed)
    return kind.of(kind.build(SIZE, **parameters), "tiny", **parameters, **more)


def over_states(gate, states, unembed=None, rows=None):
    """Scores [layers, tokens]; `rows`: those that stay from the third layer on."""
    gate_state, found = gate.start(states.shape[1]), []
    for layer, state in enumerate(states, 1):
        if rows is not None and layer >= 3:
            gate_state, state = (select_rows(gate_state, rows) if layer == 3 else gate_state), state[rows]
        output = LayerOutput(layer, DEEP, torch.arange(len(state)), {}, state, unembed)
        found.append(gate.score(output, gate_state))
    return found


@pytest.mark.parametrize("name", KINDS)
def test_scores_layer_by_layer_are_those_on_all_layers_at_once(name, states):
    """As a gate is asked, and as it is trained; where rows leave the batch; before its first layer no token exits."""
    gate = untrained(name)
    found, first = torch.stack(over_states(gate, states)), gate.network.first
    assert (found[: first - 1] == NO_EXIT).all() and first == (3 if gate.name == "three_states" else 1)
    assert found.dtype == torch.float32 and not found.requires_grad
    stay, leave = gate.network(states.transpose(0, 1)).unbind(-1)
    torch.testing.assert_close(found[first - 1 :], torch.sigmoid(leave - stay).T, rtol=1e-5, atol=1e-6)
    rows = torch.tensor([3, 1])
    fewer = torch.stack(over_states(gate, states, rows=rows)[2:])
    torch.testing.assert_close(fewer, found[2:, rows], rtol=1e-5, atol=1e-6)


def test_states_after_the_norm_where_it_was_trained_on_them(states):
    unembed = identity_unembed(SIZE)
    unembed.input_scale = 2.0
    plain, normed = untrained("classifier"), untrained("classifier", normed=True)
    torch.testing.assert_close(over_states(normed, states, unembed), over_states(plain, 2 * states))
    torch.testing.assert_close(over_states(plain, states, unembed), over_states(plain, states))


def test_a_gate_is_its_weights():
    """Equal, hashed and named by them: scores of another network are not taken for its own."""
    one, same, other = untrained("classifier"), untrained("classifier"), untrained("classifier", seed=1)
    assert one == same != other and hash(one) == hash(same) and repr(one) == repr(same) != repr(other)
    names = {name_of(ExitRule(gate)) for gate in (one, other, untrained("classifier", normed=True), untrained("lstm"))}
    assert name_of(ExitRule(one)) == name_of(ExitRule(same)) and len(names) == 4


# Files


@pytest.fixture
def saved(model_of, tmp_path):
    """saved(name, ...): an untrained gate of llama in a folder, as it was before it was written, and its file."""

    def make(name, **parameters):
        model, kind = model_of("llama"), TRAINED[name]
        gate = kind.of(kind.build(model.hidden_size, **parameters), model.name, normed=True, **parameters)
        return gate, save_gate(gate, tmp_path, model, {"recipe": {"seed": 3}}, **parameters)

    return make


@pytest.mark.parametrize("name, parameters", [("three_states", {}), ("lstm", {"as_published": True})])
def test_what_is_written_is_read(name, parameters, saved, model_of, tmp_path, monkeypatch, one_line):
    """From a folder, and by name from the model's own; no name without its model."""
    (gate, file), model = saved(name, **parameters), model_of("llama")
    again = trained_gate(model, name, tmp_path, **parameters)
    assert again == gate and again.normed
    for one, two in zip(again.network.parameters(), gate.network.parameters()):
        assert torch.equal(one, two) and not one.requires_grad
    assert card_of(file)["recipe"] == {"seed": 3} and card_of(file)["layers"] == 3
    monkeypatch.setenv("EELIB_DATA", str(tmp_path))
    (tmp_path / "gates" / model.name).mkdir(parents=True)
    file.rename(tmp_path / "gates" / model.name / file.name)
    assert gate_named(name, model, **parameters) == gate
    one_line(ValueError, [f"gate {name}", "give the model"], lambda: gate_named(name))


def test_what_is_not_there_or_damaged_is_refused(saved, model_of, tmp_path, one_line):
    _, file = saved("classifier")
    for model, name, parameters, parts in (
        ("llama", "softmax", {}, ["'softmax' is not known", "classifier, three_states, lstm"]),
        ("llama", "lstm", {"width": 3}, ["lstm has no parameter 'width'", "as_published"]),
        ("llama", "lstm", {"as_published": "no"}, ["as_published 'no'", "True or False"]),
        ("llama", "lstm", {}, ["gate lstm of llama is not in", "python -m recipes gates --model llama"]),
        ("gpt2", "classifier", {}, ["gate classifier of gpt2", "for other weights (llama", "gates --model gpt2"]),
    ):
        one_line(InputError, parts, lambda: trained_gate(model_of(model), name, tmp_path, **parameters))
    content, card = file.read_bytes(), card_of(file)
    nameless = {key: value for key, value in card.items() if key != "model"}
    tensors, save = safetensors.torch.load(content), safetensors.torch.save
    for damaged in (
        content[: len(content) // 2],
        content[:-3] + bytes([content[-3] ^ 64]) + content[-2:],
        save(tensors, {"card": json.dumps(nameless)}),
        save({"x": torch.zeros(2)}, {"card": json.dumps(card)}),
        save(tensors, {"card": json.dumps(card | {"gate": "lstm"})}),
    ):
        file.write_bytes(damaged)
        one_line(
            InputError, ["is damaged", "train it"], lambda: trained_gate(model_of("llama"), "classifier", tmp_path)
        )


def hash_of(model):
    """The hash of a shipped model, which need not be loaded."""
    folder = data_folder("models", model)
    if not folder.exists():
        return weights_hash(place_of(model))
    base = lora_base(folder)
    return hash_with_lora(folder, hash_of(base)) if base else weights_hash(folder)


@pytest.mark.parametrize("name", sorted(folder.name for folder in data_folder("gates").iterdir()))
def test_shipped_gates_are_of_the_shipped_models(name):
    """Each file's weights are those that its card names, and it was trained for the weights of the model."""
    model = SimpleNamespace(name=name, hash=hash_of(name))
    files = sorted(data_folder("gates", name).iterdir())
    assert len(files) == len(TRAINED)
    for file in files:
        kind, shape = file.stem.removesuffix("-as-published"), {}
        if kind != file.stem:
            shape = {"as_published": True}
        gate, card = trained_gate(model, kind, **shape), card_of(file)
        assert gate.name == card["gate"] == kind and file.stat().st_size < 2_200_000
        assert gate.normed is card["normed"] and card["held out"]["area"] > 70 and card["texts"]
