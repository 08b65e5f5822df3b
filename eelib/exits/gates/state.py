"""Gates that look at hidden states: saturation, and small trained networks with their files.

A network predicts from a token's states whether layer l agrees with layer L. It takes float32 states [n, hidden_size],
one layer at a time in decoding, or all layers at once in training, with the same result. The second of its two outputs
stands for an exit.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Self

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from eelib.common.errors import InputError
from eelib.common.files import data_folder, write_atomically
from eelib.common.values import first_line
from eelib.exits.gates.gate import NO_EXIT, Gate, GateState, LayerOutput, check_parameters
from eelib.models.model import Model

PUBLISHED_WIDTH = 250  # of M's LSTM
WINDOW = 3  # states that the gate of three states looks at


@dataclass(frozen=True)
class Saturation(Gate):
    """Cosine of this layer's state and the one before: exit where it reaches the threshold; never at the first layer.

    CALM (Schuster et al. 2022), 3.5. `as_published`: of states after the final norm, as M's code has it; else of the
    states themselves.
    """

    as_published: bool = False
    name: ClassVar[str] = "state_saturation"
    needs: ClassVar[tuple[str, ...]] = ("state", "readout", "head")
    reads_head: ClassVar[bool] = False
    stateful: ClassVar[bool] = True
    inclusive: ClassVar[bool] = True
    default: ClassVar[float] = 0.9

    def score(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        """The cosine, in [-1, 1]."""
        assert output.state is not None
        state = output.state
        if self.as_published:
            assert output.unembed is not None
            state = output.unembed.normed(state)
        before = gate_state.get("state")
        gate_state["state"] = state
        if before is None:
            return torch.full((len(state),), NO_EXIT, device=state.device)
        return torch.cosine_similarity(state.float(), before.float(), dim=-1)


# ---- networks


class Network(nn.Module, ABC):
    """A network that gives two logits per token and layer, from the layer `first` on."""

    first: int = 1

    def start(self, count: int) -> GateState:
        """The state of `count` tokens before the first layer."""
        return {}

    @abstractmethod
    def step(self, state: Tensor, gate_state: GateState) -> Tensor | None:
        """Logits [n, 2] of one more layer's states [n, hidden_size]; None before `first`. Updates `gate_state`."""

    @abstractmethod
    def forward(self, states: Tensor) -> Tensor:
        """Logits [n, layers - first + 1, 2] of states [n, layers, hidden_size] of layers 1, 2, ..."""


class LastStates(Network):
    """W2 relu(W1 [.., h_(l-1), h_l]) of the last states, `window` of them: window * hidden_size -> hidden_size -> 2."""

    def __init__(self, hidden_size: int, window: int):
        super().__init__()
        self.first = window
        self.layers = nn.Sequential(nn.Linear(window * hidden_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, 2))

    def step(self, state: Tensor, gate_state: GateState) -> Tensor | None:
        size = self.first * state.shape[1]
        gate_state["last"] = torch.cat([gate_state.get("last", state[:, :0]), state], dim=1)[:, -size:]
        return self.layers(gate_state["last"]) if gate_state["last"].shape[1] == size else None

    def forward(self, states: Tensor) -> Tensor:
        count = states.shape[1] - self.first + 1
        return self.layers(torch.cat([states[:, start : start + count] for start in range(self.first)], dim=-1))


class OverLayers(Network):
    """An LSTM over the states of layers 1, 2, ..., and a linear map of its output to two logits."""

    def __init__(self, hidden_size: int, width: int, depth: int):
        super().__init__()
        self.lstm = nn.LSTM(hidden_size, width, depth, batch_first=True)
        self.out = nn.Linear(width, 2)

    def start(self, count: int) -> GateState:
        """Zeros: "h" and "c" [count, depth, width]."""
        zeros = self.out.weight.new_zeros(count, self.lstm.num_layers, self.lstm.hidden_size)
        return {"h": zeros, "c": zeros.clone()}

    def step(self, state: Tensor, gate_state: GateState) -> Tensor:
        before = tuple(gate_state[name].transpose(0, 1).contiguous() for name in ("h", "c"))
        output, (h, c) = self.lstm(state[:, None], before)
        gate_state["h"], gate_state["c"] = h.transpose(0, 1), c.transpose(0, 1)
        return self.out(output[:, 0])

    def forward(self, states: Tensor) -> Tensor:
        outputs: Tensor = self.lstm(states)[0]
        return self.out(outputs)


# ---- trained gates


@dataclass(frozen=True)
class TrainedGate(Gate):
    """Softmax probability of the exit: exit where it is above the threshold.

    Attributes:
        model: name of the model that the gate was trained for.
        weights_hash: hash of the network's weights. Two gates are equal where model and weights are.
        network: gives the two logits.
        normed: whether the network takes states after the final norm; as published, it takes the states themselves.
        model_hash: hash of the model's weights, where it is known.
    """

    model: str
    weights_hash: str
    network: Network = field(repr=False, compare=False)
    normed: bool = False
    model_hash: str = field(default="", repr=False, compare=False)
    needs: ClassVar[tuple[str, ...]] = ("state", "readout", "head")
    reads_head: ClassVar[bool] = False
    default: ClassVar[float] = 0.9  # M's text, section 6, for CALM's measures; it names none for its own two networks

    @classmethod
    @abstractmethod
    def build(cls, hidden_size: int) -> Network:
        """The network, untrained."""

    @classmethod
    def of(cls, network: Network, model: str, model_hash: str = "", **parameters: bool) -> Self:
        """The gate of a trained network, which is set to evaluation without gradients."""
        network.eval().requires_grad_(False)
        return cls(
            model=model, weights_hash=hash_of_weights(network), network=network, model_hash=model_hash, **parameters
        )

    @classmethod
    def from_parameters(cls, model: Model | None, /, **parameters: Any) -> Gate:
        if model is None:
            raise InputError(f"gate {cls.name} has weights of its own for each model; give the model with its name")
        return trained_gate(model, cls.name, **parameters)

    def start(self, count: int, device: torch.device | str = "cpu") -> GateState:
        return self.network.to(device).start(count)

    @torch.no_grad()
    def score(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        """The probability, in [0, 1]; NO_EXIT before the network's `first` layer."""
        assert output.state is not None
        state = output.state
        if self.normed:
            assert output.unembed is not None
            state = output.unembed.normed(state).to(state.device)
        logits = self.network.to(state.device).step(state.float(), gate_state)
        if logits is None:
            return torch.full((len(state),), NO_EXIT, device=state.device)
        return logits.softmax(dim=-1)[:, 1]


@dataclass(frozen=True)
class StateClassifier(TrainedGate):
    """softmax(W2 relu(W1 h_l))[exit], one network for all layers, as in M's code. M begins at layer 4.

    CALM's own classifier (Schuster et al. 2022, 3.5) is linear.
    """

    name: ClassVar[str] = "classifier"

    @classmethod
    def build(cls, hidden_size: int) -> Network:
        return LastStates(hidden_size, 1)


@dataclass(frozen=True)
class ThreeStates(TrainedGate):
    """As `StateClassifier`, on h_(l-2), h_(l-1) and h_l (M, section 5); never before layer 3. M begins at layer 4.

    The three are the last layers at which the gate was asked; the network is trained on neighbouring layers.
    """

    name: ClassVar[str] = "three_states"
    stateful: ClassVar[bool] = True

    @classmethod
    def build(cls, hidden_size: int) -> Network:
        return LastStates(hidden_size, WINDOW)


@dataclass(frozen=True)
class Lstm(TrainedGate):
    """softmax(LSTM(h_1..h_l))[exit] (M, section 5): two LSTM layers, as in M's text, of width d. M begins at layer 4.

    M's text names no width. `as_published`: one LSTM layer of width 250, as in M's code. States are of the layers at
    which the gate is asked.
    """

    as_published: bool = False
    name: ClassVar[str] = "lstm"
    stateful: ClassVar[bool] = True

    @classmethod
    def build(cls, hidden_size: int, as_published: bool = False) -> Network:
        return OverLayers(hidden_size, PUBLISHED_WIDTH, 1) if as_published else OverLayers(hidden_size, hidden_size, 2)


TRAINED: dict[str, type[TrainedGate]] = {gate.name: gate for gate in (StateClassifier, ThreeStates, Lstm)}


# ---- their files: one per gate and model, refused for any other weights than it was trained on


def trained_gate(model: Model, name: str, /, folder: Path | str | None = None, **parameters: bool) -> TrainedGate:
    """A gate that was trained for this model.

    Args:
        name: of TRAINED.
        folder: where its file is; default: data/gates/ and the model's name.
        parameters: those of its shape: `as_published` of lstm.

    Raises:
        InputError: an unknown gate or parameter; no file, a damaged one, or one for other weights than the model's.
    """
    kind = checked(name, parameters)
    if not isinstance(folder, (Path, str, type(None))):
        raise InputError(f"folder {folder!r} of gate {name} is not allowed; it must be a path")
    place = data_folder("gates", model.name) if folder is None else Path(folder)
    file = place / file_name(name, parameters)
    what = f"gate {name} of {model.name}"
    again = f"train it with: python -m recipes gates --model {model.name} --corpora DIR --out {place}"
    if not file.exists():
        raise InputError(f"{what} is not in {place}; {again}")
    try:
        with safe_open(file, "pt") as content:
            card = json.loads(content.metadata()["card"])
            tensors = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118  # it is no dict
        network = kind.build(card["hidden_size"], **parameters)
        network.load_state_dict(tensors)
        if card["gate"] != name or hash_of_weights(network) != card["weights"]:
            raise ValueError("its weights are not those that its card names")
        made_for, trained_for, normed = card["model"], str(card["model_hash"]), bool(card["normed"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(f"{what}: {file} is damaged ({first_line(error)}); {again}") from error
    if trained_for != model.hash:
        raise InputError(
            f"{what}: {file} was trained for other weights ({made_for}, hash {trained_for[:12]}) than these "
            f"(hash {model.hash[:12]}); {again}"
        )
    return kind.of(network, model.name, model.hash, normed=normed, **parameters)


def checked(name: str, parameters: dict[str, bool]) -> type[TrainedGate]:
    """The class of a trained gate. InputError for an unknown name or parameter."""
    if name not in TRAINED:
        raise InputError(f"trained gate {name!r} is not known; allowed: {', '.join(TRAINED)}")
    allowed = {key: one.annotation for key, one in signature(TRAINED[name].build).parameters.items()}
    del allowed["hidden_size"]
    check_parameters(name, parameters, allowed)
    return TRAINED[name]


def file_name(name: str, parameters: dict[str, bool]) -> str:
    """File name of a gate with its parameters: lstm.safetensors, lstm-as-published.safetensors."""
    return "-".join([name, *(key.replace("_", "-") for key, on in parameters.items() if on)]) + ".safetensors"


def save_gate(gate: TrainedGate, folder: Path, model: Model, card: dict[str, Any], **parameters: bool) -> Path:
    """Write a gate's weights with its card, completely or not at all; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {
        "gate": gate.name,
        "weights": gate.weights_hash,
        "normed": gate.normed,
        "model": model.name,
        "model_hash": model.hash,
        "layers": model.layers,
        "hidden_size": model.hidden_size,
    }
    tensors = {key: as_stored(tensor.cpu().contiguous()) for key, tensor in gate.network.state_dict().items()}
    file = folder / file_name(gate.name, parameters)
    metadata = {"card": json.dumps(known | parameters | card, ensure_ascii=False)}
    write_atomically(file, safetensors.torch.save(tensors, metadata))
    return file


def as_stored(tensor: Tensor) -> Tensor:
    """A tensor in float16 where that is exact, which halves the file."""
    half = tensor.half()
    return half if torch.equal(half.to(tensor.dtype), tensor) else tensor


def hash_of_weights(network: nn.Module) -> str:
    """SHA-256 over names, shapes and values of a network's tensors, its first 16 digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} ".encode() + tensor.cpu().float().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
