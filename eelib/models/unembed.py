"""The way from the last block's state to the logits: found in the probe run, rebuilt, and proven on other states."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eelib.common.errors import CheckpointError
from eelib.common.tolerances import SMALLEST, close, factor_between, same_direction, tolerance
from eelib.models.probe import Call, Runs, output_of, output_replaced
from eelib.models.trail import calls_after, find_trail, without_holders


class Unembed(nn.Module):
    """From a state of any layer to logits: final norm (or transform), head, and the model's scaling of its logits.

    Readout at layer l is `unembed(h_l)` (design: head(final_norm(h_l)), with scaling and soft-capping). `reads` is what
    a classifier reads of a text: the state of its "first", "last" or "eos" position; "each" position of the others.
    """

    def __init__(
        self,
        steps: list[nn.Module],
        head: nn.Module,
        before: float,
        after: float,
        cap: float,
        bias: Tensor | None,
        hidden_size: int,
        vocab_size: int,
        reads: str = "each",
    ):
        super().__init__()
        self.steps, self.head = nn.ModuleList(steps), head
        self.before, self.after, self.cap, self.bias = before, after, cap, bias
        self.hidden_size, self.vocab_size, self.reads = hidden_size, vocab_size, reads

    def normed(self, states: Tensor) -> Tensor:
        """What the head sees: states [n, hidden_size] after the final norm and any scaling."""
        device = next(self.head.parameters()).device
        out = states.to(device) if states.device != device else states
        out = out.unsqueeze(0) if self.reads == "each" else out.unsqueeze(1)  # a pooler picks one of a row's positions
        for step in self.steps:
            out = output_of(step(out))
        out = out.reshape(len(states), -1)
        return out * self.before if self.before != 1.0 else out

    def forward(self, states: Tensor) -> Tensor:
        """Logits [n, vocab_size] of states [n, hidden_size]: float32, on the states' device, wherever the head is."""
        logits = self.head(self.normed(states)).float().to(states.device)
        if self.after != 1.0:
            logits = logits * self.after
        if self.cap:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits if self.bias is None else logits + self.bias.to(logits.device)

    def of_ids(self, states: Tensor, ids: Tensor) -> Tensor:
        """The logits [n, k] of the tokens `ids` [n, k] alone, for states [n, hidden_size]: k rows of a linear head."""
        if type(self.head) is not nn.Linear:
            return self(states).gather(1, ids)
        normed, at = self.normed(states), ids.to(self.head.weight.device)
        logits = torch.einsum("nd,nkd->nk", normed, self.head.weight[at]).float()
        if self.head.bias is not None:
            logits = logits + self.head.bias[at].float()
        logits = logits.to(states.device) * self.after
        if self.cap:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits if self.bias is None else logits + self.bias.to(logits.device)[ids]


def find_unembed(network: PreTrainedModel, last: Call, runs: Runs, name: str) -> Unembed:
    """The modules between the last block and the logits, checked against the logits of the probe run.

    Raises CheckpointError naming the module where the trail is lost.
    """
    if not bool(torch.isfinite(runs.logits).all()):
        raise CheckpointError(f"{name}: the logits hold values that are not finite")
    head = network.get_output_embeddings()
    if head is None:
        raise CheckpointError(f"{name}: the network names no output embeddings, so no layer can be read out")
    after = calls_after(last, runs)
    into = next((c for c in after if c.module is head), None)
    if into is None:
        raise CheckpointError(f"{name}: the head {type(head).__name__} was not called after block {last.name}")
    trail = find_trail(last, into.taken, without_holders(after, network, head), name, f"the head {into.name}")
    scored, target = into.given.float(), runs.logits.float()
    if scored.shape != target.shape:
        raise CheckpointError(
            f"{name}: the head {into.name} gives {tuple(scored.shape)}, the network's logits are {tuple(target.shape)}"
        )
    bias = bias_of(network, target - scored) if not same_direction(scored, target) else None
    within = tolerance(into.given, runs.logits).factor
    scale, cap = (1.0, 0.0) if bias is not None else scaling_of(network, scored, target, within)
    before, hidden_size = factor_between(into.taken, trail.state), last.given.shape[-1]
    unembed = Unembed(trail.steps, head, before, scale, cap, bias, hidden_size, target.shape[-1])
    got = unembed(last.given[0])
    if not close(got.to(runs.logits.dtype), runs.logits[0]):
        worst = float((got - target[0]).abs().max())
        raise CheckpointError(
            f"{name}: {' > '.join([*trail.names, type(head).__name__])} on the last state differs from the "
            f"model's own logits by {worst:.3g}, so its layers can't be read out"
        )
    return unembed


def bias_of(network: PreTrainedModel, rest: Tensor) -> Tensor | None:
    """The vector [vocab_size] that is added to the head's scores, if what is added is the same at every position."""
    kept = [*network.named_parameters(), *network.named_buffers()]
    vectors = [
        v.flatten().float() for n, v in kept if "bias" in n and v.numel() == rest.shape[-1] and v.is_floating_point()
    ]
    allowed = tolerance(next(network.parameters())).close * rest.abs().max().clamp(min=SMALLEST)
    return next((v.detach() for v in vectors if bool(((rest - v.to(rest.device)).abs() <= allowed).all())), None)


def scaling_of(network: PreTrainedModel, scored: Tensor, target: Tensor, within: float) -> tuple[float, float]:
    """(after, cap) of logits = cap tanh(after * scored / cap), or (after, 0) of logits = after * scored.

    The cap is one of the config's numbers that are called so; whichever of these fits best. `within`: see
    `factor_between`.
    """
    config = network.config.get_text_config(decoder=True).to_dict()
    caps = {
        float(v)
        for k, v in config.items()
        if "cap" in k and not k.startswith("att") and isinstance(v, (int, float)) and v > 0
    }
    tried = [(factor_between(target, scored, within), 0.0)]
    for cap in sorted(caps):
        clear = target.abs() < 0.9 * cap
        if bool(clear.any()):
            tried.append((factor_between(torch.atanh(target[clear] / cap) * cap, scored[clear], within), cap))

    def miss(pair: tuple[float, float]) -> float:
        after, cap = pair
        return float(((torch.tanh(after * scored / cap) * cap if cap else after * scored) - target).abs().max())

    return min(tried, key=miss)


@torch.no_grad()
def prove_unembed(
    network: PreTrainedModel, unembed: Unembed, blocks: list[Call], runs: Runs, name: str, position: int | None
) -> None:
    """Let the last block give a middle layer's state: the network's own logits must be the unembed's of that state.

    An unembed that fits the final state by luck does not pass. Raises CheckpointError.
    """
    state = blocks[(len(blocks) - 1) // 2].given
    with output_replaced(blocks[-1].module, state, [c.module for c in blocks[:-1]].count(blocks[-1].module)):
        logits = network(**runs.inputs).logits
        expected = logits.float().to(state.device)
    got = unembed(state[0] if position is None else state[0, position : position + 1])
    expected = expected[0] if position is None else expected
    if not close(got.to(logits.dtype), expected.to(logits.dtype)):
        worst = float((got - expected).abs().max()) if got.shape == expected.shape else float("nan")
        raise CheckpointError(
            f"{name}: with a middle layer's state in place of {blocks[-1].name}'s output the network's "
            f"logits differ from its head's by {worst:.3g}, so its layers can't be read out"
        )
