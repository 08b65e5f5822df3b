"""The head: the path from a layer's state to logits, found in a recorded run, rebuilt, and checked on other states.

A classifier's head reads the state of one position, a language model's head that of each position.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eelib.common.errors import CheckpointError
from eelib.common.tolerances import SMALLEST, close, factor_between, same, same_direction, tolerance
from eelib.models.probe import Call, Runs, Unsupported, first_tensor, foreign_code, output_of, output_replaced

LONGEST = 8  # modules between the last block and the projection
EACH = -1  # in place of a position: the states of all of them
ACTIVATIONS = (nn.GELU(), nn.GELU("tanh"), nn.ReLU(), nn.Tanh(), nn.SiLU())


class Head(nn.Module):
    """From a state of any layer to logits: final norm (or transform), projection, and the model's scaling of logits.

    Args:
        steps: modules between the state and the projection, such as the final norm.
        projection: the module that gives the scores.
        hidden_size: of the states.
        vocab_size: number of logits.
        input_scale: factor on the projection's input.
        logit_scale: factor on the scores.
        softcap: c of logits = c tanh(scores / c); 0 for none.
        bias: added to the logits, [vocab_size].
        reads: the position whose state a classifier reads, "first", "last" or "eos"; "each" for a language model.
    """

    def __init__(
        self,
        steps: list[nn.Module],
        projection: nn.Module,
        hidden_size: int,
        vocab_size: int,
        input_scale: float = 1.0,
        logit_scale: float = 1.0,
        softcap: float = 0.0,
        bias: Tensor | None = None,
        reads: str = "each",
    ):
        super().__init__()
        self.steps, self.projection = nn.ModuleList(steps), projection
        self.hidden_size, self.vocab_size, self.reads = hidden_size, vocab_size, reads
        self.input_scale, self.logit_scale, self.softcap, self.bias = input_scale, logit_scale, softcap, bias

    def normed(self, states: Tensor) -> Tensor:
        """The projection's input: states [n, hidden_size] after the final norm and any scaling."""
        device = next(self.projection.parameters()).device
        out = states.to(device) if states.device != device else states
        out = out.unsqueeze(0) if self.reads == "each" else out.unsqueeze(1)  # a pooler picks one of a row's positions
        for step in self.steps:
            out = output_of(step(out))
        out = out.reshape(len(states), out.shape[-1])
        return out * self.input_scale if self.input_scale != 1.0 else out

    def forward(self, states: Tensor) -> Tensor:
        """Logits [n, vocab_size] of states [n, hidden_size]: float32, on the states' device, wherever the head is."""
        return self.scaled(self.projection(self.normed(states)).float().to(states.device), self.bias)

    def scaled(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        """Scores of the projection after the model's scaling and soft-capping, and with a bias."""
        if self.logit_scale != 1.0:
            scores = scores * self.logit_scale
        if self.softcap:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return scores if bias is None else scores + bias.to(scores.device)

    def of_first(self, states: Tensor, count: int) -> Tensor:
        """The logits [n, count] of the tokens with the lowest ids for states [n, hidden_size]."""
        if type(self.projection) is not nn.Linear:
            return self(states)[:, :count]
        bias = None if self.projection.bias is None else self.projection.bias[:count]
        scores = nn.functional.linear(self.normed(states), self.projection.weight[:count], bias)
        return self.scaled(scores.float().to(states.device), None if self.bias is None else self.bias[:count])

    def of_ids(self, states: Tensor, ids: Tensor) -> Tensor:
        """The logits [n, k] of the tokens `ids` [n, k] for states [n, hidden_size], from k rows of the projection."""
        if type(self.projection) is not nn.Linear:
            return self(states).gather(1, ids)
        normed, at = self.normed(states), ids.to(self.projection.weight.device)
        scores = torch.einsum("nd,nkd->nk", normed, self.projection.weight[at]).float()
        if self.projection.bias is not None:
            scores = scores + self.projection.bias[at].float()
        return self.scaled(scores.to(states.device), None if self.bias is None else self.bias.to(ids.device)[ids])


# The path from the last block to the projection


HeadPath = tuple[list[nn.Module], Tensor, int]  # modules, the output of the last, the position they take (or EACH)


def find_head_path(last: Call, into: Call, calls: list[Call], name: str) -> HeadPath:
    """The modules among `calls` that turn the output of `last`, one after another, into the input of `into`, or into a
    multiple of it; none of them contains the module of `into`.

    Where several take a state, each is tried, outermost first, since poolers and other heads do not lead to `into`.
    CheckpointError names it and the module where the path was lost.
    """
    goal = into.input
    outside = [call for call in calls if all(module is not into.module for module in call.module.modules())]
    ready = [call for call in outside if call.input.numel() and call.output.numel()]
    ready.sort(key=lambda call: call.name.count("."))
    lost = [last.name]

    def on(state: Tensor, steps: list[tuple[nn.Module, str]], position: int) -> HeadPath | None:
        at = where(state, goal)
        if at is None and same_direction(state, goal):
            at = EACH
        if at is not None:
            return [module for module, _ in steps], state, position if at == EACH else at
        if len(steps) == LONGEST:
            return None
        for call in ready:
            at = where(state, call.input)
            if at is None or torch.equal(call.output.flatten(), state.flatten()):
                continue
            if at == EACH:
                at = picked(call, state) if state.ndim == 3 and call.output.ndim == 2 else position
            found = on(call.output, [*steps, (call.module, call.name)], at)
            if found is not None:
                return found
        for act in ACTIVATIONS:  # some families call it as a function, which leaves no module behind
            after = act(state)
            for taken in (*(call.input for call in ready), goal):
                at = where(after, taken, same)
                if at is not None:
                    found = on(taken, [*steps, (act, type(act).__name__)], position if at == EACH else at)
                    if found is not None:
                        return found
                    break
        lost.append(steps[-1][1] if steps else last.name)
        return None

    found = on(last.output, [], EACH)
    if found is None:
        raise CheckpointError(
            f"{name}: the way from {lost[-1]} to the head {into.name} was not found: no module takes that state on"
        )
    return found


def where(state: Tensor, part: Tensor, equal: Callable[[Tensor, Tensor], bool] = torch.equal) -> int | None:
    """The position of `state` [1, tokens, hidden_size] that `part` holds, `EACH` where it holds all, else None."""
    if part.shape == state.shape and equal(part, state):
        return EACH
    if state.ndim == 3 and part.shape[-1] == state.shape[-1] and part.numel() == state.shape[-1]:
        row = part.reshape(-1)
        return next((i for i in range(state.shape[1]) if equal(row, state[0, i])), None)
    return None


def picked(call: Call, state: Tensor) -> int:
    """The position whose state alone gives the output of a pooler's call on all positions; `EACH` where none does."""
    for i in range(state.shape[1]):
        try:
            with foreign_code():
                alone = first_tensor(call.module(state[:, i : i + 1]))
        except Unsupported:
            return EACH
        if alone is not None and same(alone, call.output):
            return i
    return EACH


def calls_after(call: Call, runs: Runs) -> list[Call]:
    return runs.calls[next(i for i, other in enumerate(runs.calls) if other is call) + 1 :]


# Language models: logits at each position


def find_head(network: PreTrainedModel, last: Call, runs: Runs, name: str) -> tuple[Head, int | None]:
    """(the head of a language model, None, since all positions have logits). CheckpointError names the module where the
    path from the last block is lost.
    """
    projection = network.get_output_embeddings()
    if projection is None:
        raise CheckpointError(f"{name}: the network names no output embeddings, so no layer can be read out")
    after = calls_after(last, runs)
    into = next((c for c in after if c.module is projection), None)
    if into is None:
        raise CheckpointError(f"{name}: the head {type(projection).__name__} was not called after block {last.name}")
    steps, state, _ = find_head_path(last, into, after, name)
    scores, logits = into.output.float(), runs.logits.float()
    if scores.shape != logits.shape:
        raise CheckpointError(
            f"{name}: the head {into.name} gives {tuple(scores.shape)}, the network's logits are {tuple(logits.shape)}"
        )
    bias = bias_of(network, logits - scores) if not same_direction(scores, logits) else None
    within = tolerance(into.output, runs.logits).factor
    scale, softcap = (1.0, 0.0) if bias is not None else scaling_of(network, scores, logits, within)
    input_scale = factor_between(into.input, state)
    return Head(steps, projection, last.output.shape[-1], logits.shape[-1], input_scale, scale, softcap, bias), None


def bias_of(network: PreTrainedModel, rest: Tensor) -> Tensor | None:
    """The bias [vocab_size] of the network that equals `rest` (logits less scores) at every position; None if none."""
    held = [*network.named_parameters(), *network.named_buffers()]
    vectors = [
        v.flatten().float() for n, v in held if "bias" in n and v.numel() == rest.shape[-1] and v.is_floating_point()
    ]
    allowed = tolerance(next(network.parameters())).close * rest.abs().max().clamp(min=SMALLEST)
    return next((v.detach() for v in vectors if bool(((rest - v.to(rest.device)).abs() <= allowed).all())), None)


def scaling_of(network: PreTrainedModel, scores: Tensor, logits: Tensor, within: float) -> tuple[float, float]:
    """(scale, c) of logits = c tanh(scale * scores / c), or (scale, 0) of logits = scale * scores.

    The pair that fits best; c is a number of the config with "cap" in its name. `within`: see `factor_between`.
    """
    config = network.config.get_text_config(decoder=True).to_dict()
    caps = {
        float(v)
        for k, v in config.items()
        if "cap" in k and not k.startswith("att") and isinstance(v, (int, float)) and v > 0
    }
    tried = [(factor_between(logits, scores, within), 0.0)]
    for cap in sorted(caps):
        clear = logits.abs() < 0.9 * cap
        if bool(clear.any()):
            tried.append((factor_between(torch.atanh(logits[clear] / cap) * cap, scores[clear], within), cap))

    def miss(pair: tuple[float, float]) -> float:
        scale, cap = pair
        return float(((torch.tanh(scale * scores / cap) * cap if cap else scale * scores) - logits).abs().max())

    return min(tried, key=miss)


@torch.no_grad()
def prove_head(
    network: PreTrainedModel, head: Head, blocks: list[Call], runs: Runs, name: str, position: int | None
) -> None:
    """The network's logits must be its head's: of the last block's output, and of a middle layer's state in its place.

    A head that fits the final state by luck does not pass. CheckpointError where the logits differ.
    """
    last, middle = blocks[-1], blocks[(len(blocks) - 1) // 2].output
    with output_replaced(last.module, middle, [c.module for c in blocks[:-1]].count(last.module)):
        swapped = network(**runs.inputs).logits.to(middle.device)
    path = " > ".join(type(step).__name__ for step in (*head.steps, head.projection))
    read = slice(None) if position is None else slice(position, position + 1)
    for state, logits, which in (
        (last.output, runs.logits, "the last state"),
        (middle, swapped, f"a middle layer's state, in place of {last.name}'s output,"),
    ):
        got, wanted = head(state[0, read]), logits[0] if position is None else logits
        if not close(got.to(wanted.dtype), wanted):
            raise CheckpointError(
                f"{name}: {path} on {which} differs from the model's own logits by "
                f"{float((got - wanted.float()).abs().max()):.3g}, so its layers can't be read out"
            )


# Classifiers: label scores of one position


@torch.no_grad()
def find_classifier_head(network: PreTrainedModel, last: Call, runs: Runs, name: str) -> tuple[Head, int]:
    """(head, position that it reads in the probe run). CheckpointError where no single position's state is read."""
    labels = runs.logits.shape[-1]
    if labels < 2 or getattr(network.config, "problem_type", None) == "regression":
        raise CheckpointError(
            f"{name}: a regression head has no labels to choose from; allowed are classifiers of 2 or more"
        )
    after = calls_after(last, runs)
    linear = [c for c in reversed(after) if isinstance(c.module, nn.Linear) and c.output.shape[-1] == labels]
    into = next((c for c in linear if rows_with(c.output, runs.logits)), None)
    if into is None:
        raise CheckpointError(f"{name}: no linear head gives the network's label scores")
    steps, _, position = find_head_path(last, into, after, name)
    if position == EACH:
        rows = rows_with(into.output, runs.logits)
        if len(rows) != 1 or into.output.ndim != 3:
            raise CheckpointError(
                f"{name}: the label scores are not those of one position's state, so no layer can be read out"
            )
        position = rows[0]
    count, ids, end = last.output.shape[1], runs.inputs["input_ids"][0].tolist(), end_token(network)
    reads = {ids.index(end) if end in ids else None: "eos", 0: "first", count - 1: "last"}.get(position)
    if reads is None:
        raise CheckpointError(
            f"{name}: the label scores are read at position {position} of {count}, which is neither the "
            "first, the last nor the end token's"
        )
    return Head(steps, into.module, last.output.shape[-1], labels, reads=reads), position


def rows_with(scores: Tensor, logits: Tensor) -> list[int]:
    """Positions at which scores [1, tokens, labels] or [1, labels] equal the logits."""
    rows = scores.reshape(-1, scores.shape[-1])
    return [i for i, row in enumerate(rows) if torch.equal(row.float(), logits[0].float())]


def end_token(network: PreTrainedModel) -> int | None:
    """The end token in a network's configuration, the first where it lists several; None where it has none."""
    ends = getattr(network.config, "eos_token_id", None)
    return next(iter(ends), None) if isinstance(ends, list) else ends
