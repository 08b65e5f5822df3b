"""Gates that look at the readouts of a layer and of earlier layers."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eelib.common.values import check_whole
from eelib.exits.gates.gate import NO_EXIT, Gate, GateState, LayerOutput

# DeeBERT's sum is NaN where a probability underflows to 0; a largest one this close to 1 often leaves another at 0.
NEAR_ONE = 2.0**-24


@dataclass(frozen=True)
class Confidence(Gate):
    """p1, the largest probability: exit where it is above the threshold.

    P 3.2, after Liao et al. (2021); EE-LLM compares its logarithm.
    """

    name: ClassVar[str] = "confidence"
    default: ClassVar[float] = 0.9

    def score(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        """p1, in [0, 1]."""
        return output.readout["probability"]


@dataclass(frozen=True)
class Margin(Gate):
    """p1 - p2, the softmax difference: exit where it is above the threshold (CALM, Schuster et al. 2022, 3.5).

    CALM's eq. 4 exits at the threshold, too. FREE's default threshold is 0.9 with exits from layer 4 on. M's text has
    the same, decaying over positions (temperature 4); its scripts have 0.7 from layer 1.
    """

    name: ClassVar[str] = "softmax_difference"
    default: ClassVar[float] = 0.9

    def score(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        """p1 - p2, in [0, 1]."""
        return output.readout["margin"]


@dataclass(frozen=True)
class Entropy(Gate):
    """-H in nats: exit where H is below a bound, which is minus the threshold.

    DeeBERT (Xin et al. 2020); P 3.2 prints the sign the other way round. 0 log 0 is 0 here. `as_published`: it is NaN,
    as in DeeBERT's code, so that a token with a probability that underflows to 0 never exits.
    """

    as_published: bool = False
    name: ClassVar[str] = "entropy"
    default: ClassVar[float] = -0.4  # ours; DeeBERT tunes one per task

    def score(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        """-H, in [-ln V, 0]."""
        score = -output.readout["entropy"]
        return score.masked_fill(output.readout["probability"] >= 1 - NEAR_ONE, NO_EXIT) if self.as_published else score


@dataclass(frozen=True)
class Patience(Gate):
    """Number of successive layers, up to this one, whose top-1 is that of the layer before: exit where it reaches the
    threshold, a whole number.

    PABEE (Zhou et al. 2020); P 3.2. A threshold of t asks for t + 1 layers that agree. The count starts again where the
    top-1 changes. Layers are those at which the gate is asked.
    """

    name: ClassVar[str] = "patience"
    stateful: ClassVar[bool] = True
    inclusive: ClassVar[bool] = True
    default: ClassVar[float] = 6  # PABEE's for ALBERT-base's 12 layers

    def start(self, count: int, device: torch.device | str = "cpu") -> GateState:
        return {"top1": torch.full((count,), -1, device=device), "equal": torch.zeros(count, device=device)}

    def score(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        """The count, 0..L-1."""
        top1 = output.readout["top1"].long()
        gate_state["equal"] = torch.where(top1 == gate_state["top1"], gate_state["equal"] + 1, 0.0)
        gate_state["top1"] = top1
        return gate_state["equal"]


@dataclass(frozen=True)
class Monotone(Gate):
    """p1 where it rose from layer l-2 to l-1 and from l-1 to l: exit where it is above the threshold (M, section 5).

    `as_published`: M's code compares the largest logit in place of p1, with 0.7 for a threshold.
    """

    as_published: bool = False
    name: ClassVar[str] = "monotone"
    stateful: ClassVar[bool] = True
    default: ClassVar[float] = 0.9

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]  # the published one reads the head itself
        """With `as_published` also states and the head, since no trace holds logits."""
        return ("readout", "state", "head") if self.as_published else ("readout",)

    def start(self, count: int, device: torch.device | str = "cpu") -> GateState:
        return {"value": torch.full((count,), torch.inf, device=device), "rises": torch.zeros(count, device=device)}

    def score(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        """p1 (or the logit) after two rises, else NO_EXIT."""
        if self.as_published:
            assert output.state is not None and output.unembed is not None
            value, gate_state["token"] = output.unembed(output.state).max(-1)
        else:
            value = output.readout["probability"]
        gate_state["rises"] = torch.where(value > gate_state["value"], gate_state["rises"] + 1, 0.0)
        gate_state["value"] = value
        return value.masked_fill(gate_state["rises"] < 2, NO_EXIT)

    def token(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        """The top-1 of the logits that gave the score."""
        return gate_state["token"] if self.as_published else super().token(output, gate_state)


@dataclass(frozen=True)
class Shortlist(Gate):
    """p1 - p2 among the `k` best tokens of layer `layer`: exit where it is above the threshold, from that layer on.

    Ours. The whole head is read once, at that layer; later layers score its best tokens alone, which costs k / V of a
    full read, so that a gate may look at every layer. Other tokens can't be emitted before layer L.
    """

    layer: int = 1
    k: int = 10
    name: ClassVar[str] = "shortlist"
    needs: ClassVar[tuple[str, ...]] = ("state", "head")
    stateful: ClassVar[bool] = True
    default: ClassVar[float] = 0.9

    def __post_init__(self) -> None:
        check_whole("layer", self.layer, 1)
        check_whole("k", self.k, 2)

    def score(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        """The margin, in [0, 1]; NO_EXIT below `layer`."""
        assert output.state is not None and output.unembed is not None
        if output.layer < self.layer:
            return torch.full((len(output.state),), NO_EXIT, device=output.state.device)
        if "ids" in gate_state:
            logits = output.unembed.of_ids(output.state, gate_state["ids"])
        else:
            logits = output.unembed(output.state)
            logits, gate_state["ids"] = logits.topk(min(self.k, output.unembed.vocab_size), dim=-1)
        top, best = torch.softmax(logits, dim=-1).topk(2, dim=-1)
        gate_state["token"] = gate_state["ids"].gather(1, best[:, :1])[:, 0]
        return top[:, 0] - top[:, 1]

    def token(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        """The best token of the list; -1 before there is a list."""
        return gate_state["token"] if "token" in gate_state else torch.full_like(output.positions, -1)
