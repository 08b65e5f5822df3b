"""The way from the last block's state to the logits: found in the probe run, rebuilt, and proven on other states."""

import torch
from torch import Tensor, nn

from eelib.common.errors import CheckpointError
from eelib.common.tolerances import close
from eelib.models.probe import Call, Runs, first_tensor, output_replaced

LONGEST = 8  # modules between the last block and the head
ACTIVATIONS = (nn.GELU(), nn.GELU("tanh"), nn.ReLU(), nn.Tanh(), nn.SiLU())


class Unembed(nn.Module):
    """From a state of any layer to logits: final norm (or transform), head, and the model's scaling of its logits.

    Readout at layer l is `unembed(h_l)` (design: head(final_norm(h_l)), with scaling and soft-capping). `reads` is what a
    classifier reads of a text: the state of its "first", "last" or "eos" position; "each" position of the others.
    """

    def __init__(
        self,
        steps: list[nn.Module],
        head: nn.Module,
        before: float,
        after: float,
        cap: float,
        bias: Tensor | None,
        width: int,
        vocabulary: int,
        reads: str = "each",
    ):
        super().__init__()
        self.steps, self.head = nn.ModuleList(steps), head
        self.before, self.after, self.cap, self.bias = before, after, cap, bias
        self.hidden_size, self.vocab_size, self.reads = width, vocabulary, reads

    def normed(self, states: Tensor) -> Tensor:
        """What the head sees: states [n, hidden_size] after the final norm and any scaling."""
        place = next(self.head.parameters()).device
        out = states.to(place) if states.device != place else states
        out = out.unsqueeze(0) if self.reads == "each" else out.unsqueeze(1)  # a pooler picks one of a row's positions
        for step in self.steps:
            out = first_tensor(step(out))
        out = out.reshape(len(states), -1)
        return out * self.before if self.before != 1.0 else out

    def forward(self, states: Tensor) -> Tensor:
        """Logits [n, vocab_size] of states [n, hidden_size], in float32 and on the states' device, wherever the head is."""
        logits = self.head(self.normed(states)).float().to(states.device)
        if self.after != 1.0:
            logits = logits * self.after
        if self.cap:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits if self.bias is None else logits + self.bias.to(logits.device)


def find_unembed(network: nn.Module, last: Call, runs: Runs, name: str) -> Unembed:
    """The modules between the last block and the logits, checked against the logits of the probe run.

    Raises ValueError naming the module where the trail is lost.
    """
    if not bool(torch.isfinite(runs.logits).all()):
        raise CheckpointError(f"{name}: the logits hold values that are not finite")
    head = network.get_output_embeddings()
    if head is None:
        raise CheckpointError(f"{name}: the network names no output embeddings, so no layer can be read out")
    after = runs.calls[place_of(last, runs) + 1 :]
    into = next((c for c in after if c.module is head), None)
    if into is None:
        raise CheckpointError(f"{name}: the head {type(head).__name__} was not called after block {last.name}")
    steps, trail, state = follow(network, last, into, after, name)
    scored, target = into.given.float(), runs.logits.float()
    if scored.shape != target.shape:
        raise CheckpointError(
            f"{name}: the head {into.name} gives {tuple(scored.shape)}, the network's logits are {tuple(target.shape)}"
        )
    bias = bias_of(network, target - scored) if not same_direction(scored, target) else None
    scale, cap = (1.0, 0.0) if bias is not None else scaling_of(network, scored, target)
    unembed = Unembed(steps, head, ratio(into.taken, state), scale, cap, bias, last.given.shape[-1], target.shape[-1])
    got = unembed(last.given[0])
    if not close(got.to(runs.logits.dtype), runs.logits[0]):
        worst = float((got - target[0]).abs().max())
        raise CheckpointError(
            f"{name}: {' > '.join([*trail, type(head).__name__])} on the last state differs from the "
            f"model's own logits by {worst:.3g}, so its layers can't be read out"
        )
    return unembed


def place_of(call: Call, runs: Runs) -> int:
    """Index of a call among the run's."""
    return next(i for i, c in enumerate(runs.calls) if c is call)


def follow(
    network: nn.Module, last: Call, into: Call, after: list[Call], name: str
) -> tuple[list[nn.Module], list[str], Tensor]:
    """Modules that take the last block's state on until the head `into`: (modules, their names, the final state).

    Where several modules take a state, each is tried, outermost first: poolers and other heads lead nowhere.
    """
    holders = {n for n, m in network.named_modules() if any(child is into.module for child in m.modules())}
    free = [c for c in after if c.name not in holders and c.taken is not None and c.given is not None]
    lost = [last.name]

    def on(state: Tensor, steps: list[tuple[nn.Module, str]]) -> tuple[list, Tensor] | None:
        if same_direction(state, into.taken):
            return steps, state
        if len(steps) == LONGEST:
            return None
        takers = [
            c
            for c in free
            if c.taken.shape == state.shape
            and torch.equal(c.taken, state)
            and not (c.given.shape == state.shape and torch.equal(c.given, state))
        ]
        for call in sorted(takers, key=lambda c: c.name.count(".")):
            found = on(call.given, [*steps, (call.module, call.name)])
            if found is not None:
                return found
        for act in ACTIVATIONS if steps else ():  # some families call it as a function, which leaves no module behind
            reader = next((c for c in [*free, into] if close(c.taken, act(state))), None)
            if reader is not None:
                return on(reader.taken, [*steps, (act, type(act).__name__)])
        lost.append(steps[-1][1] if steps else last.name)
        return None

    found = on(last.given, [])
    if found is None:
        raise CheckpointError(
            f"{name}: the way from {lost[-1]} to the head {into.name} was not found: no module takes that state on"
        )
    return [module for module, _ in found[0]], [step for _, step in found[0]], found[1]


def bias_of(network: nn.Module, rest: Tensor) -> Tensor | None:
    """The vector [vocab_size] that is added to the head's scores, if what is added is the same at every position."""
    kept = [*network.named_parameters(), *network.named_buffers()]
    vectors = [
        v.flatten().float() for n, v in kept if "bias" in n and v.numel() == rest.shape[-1] and v.is_floating_point()
    ]
    size = rest.abs().max().clamp(min=1e-6)
    share = 1e-4 if next(network.parameters()).dtype in (torch.float32, torch.float64) else 3e-2
    return next((v.detach() for v in vectors if bool(((rest - v.to(rest.device)).abs() <= share * size).all())), None)


def scaling_of(network: nn.Module, scored: Tensor, target: Tensor) -> tuple[float, float]:
    """(after, cap) of logits = cap tanh(after * scored / cap), or (after, 0) of logits = after * scored.

    The cap is one of the config's numbers that are called so; whichever of these fits best.
    """
    config = network.config.get_text_config(decoder=True).to_dict()
    caps = {
        float(v)
        for k, v in config.items()
        if "cap" in k and not k.startswith("att") and isinstance(v, (int, float)) and v > 0
    }
    tried = [(ratio(target, scored), 0.0)]
    for cap in sorted(caps):
        clear = target.abs() < 0.9 * cap
        if bool(clear.any()):
            tried.append((ratio(torch.atanh(target[clear] / cap) * cap, scored[clear]), cap))

    def miss(pair: tuple[float, float]) -> float:
        after, cap = pair
        return float(((torch.tanh(after * scored / cap) * cap if cap else after * scored) - target).abs().max())

    return min(tried, key=miss)


@torch.no_grad()
def prove_unembed(
    network: nn.Module, unembed: Unembed, blocks: list[Call], runs: Runs, name: str, position: int | None
) -> None:
    """Let the last block give a middle layer's state: the network's own logits must be the unembed's of that state.

    A unembed that fits the final state by luck does not pass. Raises ValueError.
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


def ratio(a: Tensor, b: Tensor) -> float:
    """The factor c of a = c b by least squares; exactly 1.0 where a equals b up to rounding."""
    factor = float((a.double() * b.double()).sum() / (b.double() ** 2).sum().clamp(min=1e-30))
    return 1.0 if abs(factor - 1.0) < 1e-3 else factor


def same_direction(a: Tensor, b: Tensor) -> bool:
    """Whether b is a times a constant, up to rounding at their precision."""
    return a.shape == b.shape and close((a.double() * ratio(b, a)).to(a.dtype), b)
