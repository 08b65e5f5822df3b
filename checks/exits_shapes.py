"""Drafts of a shipped model replayed on networks of other shapes, a part of `checks.exits`.

How long a step takes does not depend on what the weights say, so these are random. Which drafts are right does: that
comes from the shipped model, token by token. A gate leaves at the same share of the depth and drafts what plain
decoding of the random network says where the shipped model's draft was right, and another token where it was not. All
else is `eelib.generate` as it is; the head is read for each draft, too. One prompt at a time: the ceiling (Leviathan et
al. 2023, with the head paid for) supposes that a step costs the same for one token and for a whole draft. How far that
is so is measured, too.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from checks.speed_shapes import number_tokenizer, random_llama
from eelib.exits.decoding.generate import GenerateOutput, generate
from eelib.exits.exit_rule import ExitRule
from eelib.exits.forecast import Planned
from eelib.exits.gates.gate import GateState, LayerOutput
from eelib.exits.gates.schedule import Fixed
from eelib.models.model import Model, prepare

PROMPT, PASSES = "1 2 3 4", 5


@dataclass(frozen=True)
class Shape:
    """A Llama-type network, and how many tokens of it are decoded, so that a run takes seconds."""

    layers: int
    width: int
    intermediate: int
    heads: int
    key_value_heads: int
    vocabulary: int
    tokens: int


SHAPES = {
    "12x256-8k": Shape(12, 256, 688, 4, 4, 8192, 192),
    "16x1024-32k": Shape(16, 1024, 2816, 16, 4, 32768, 64),
    "16x2048-32k": Shape(16, 2048, 5632, 32, 8, 32768, 24),
}


@dataclass(frozen=True)
class Pattern:
    """Which drafts of a model with L `layers` were right: through `layer`, at most `draft` of them in a row."""

    model: str
    layers: int
    layer: int
    draft: int
    plans: Sequence[Planned]

    def right(self, tokens: int) -> list[bool]:
        """Of so many tokens, output after output; from the start again where they are too few."""
        found = [bool(agrees) for plan in self.plans for agrees in plan.agrees[1:]]
        return [found[i % len(found)] for i in range(tokens)]


@dataclass(frozen=True)
class Replayed(Fixed):
    """Leaves at a layer with plain decoding's token where the pattern says that it is right, else with another."""

    said: tuple[int, ...] = ()
    right: tuple[bool, ...] = ()

    def token(self, output: LayerOutput, gate_state: GateState) -> Tensor:
        """The head is read, as for any draft."""
        read, positions = output.readout["top1"], output.positions.tolist()
        drafts = [self.said[at] if self.right[at] else int(self.said[at] == 0) for at in positions]
        return torch.tensor(drafts, device=read.device)


def network_of(shape: Shape) -> Model:
    """Random weights."""
    network = random_llama(shape, tied=True).eval().requires_grad_(False)
    return prepare(network, number_tokenizer(shape.vocabulary), "random", "causal")


@torch.inference_mode()
def pass_seconds(model: Model, tokens: int) -> float:
    """Of so many tokens through all blocks, without the head; the quickest of a few."""
    ids, times = torch.arange(tokens)[None], []
    for _ in range(PASSES):
        began = time.perf_counter()
        model.network.base_model(input_ids=ids, use_cache=False)
        times.append(time.perf_counter() - began)
    return min(times)


def replayed(shape: Shape, pattern: Pattern, repeats: int) -> dict[str, Any]:
    """Speed-up over plain decoding of the same network after the prompt, beside the formula's ceiling.

    accepted: share of right drafts in the pattern; per_round: tokens of each deep pass; head: a read of it in blocks;
    wide: a pass of a whole draft through the blocks, in passes of one token; ceiling_wide: the ceiling if that is paid.
    """
    model, right = network_of(shape), pattern.right(shape.tokens)
    layer = max(1, round(pattern.layer * shape.layers / pattern.layers))

    def run(tokens: int, rule: ExitRule | None = None) -> GenerateOutput:
        keys, draft = ("verified", pattern.draft) if rule else ("full", None)
        return generate(model, [PROMPT], rule, None, keys, draft, 1, tokens, always_draft=True)

    prompt = min(sum(run(1).times.values()) for _ in range(repeats + 1))  # the first pays for what is made once
    plains, earlies = [run(shape.tokens)], list[GenerateOutput]()
    said = plains[0].tokens["token_id"].tolist()
    rule = ExitRule(Replayed(tuple(said), tuple(right)), float(layer), exit_layers=(layer,))
    for turn in range(repeats):
        if turn:
            plains.append(run(shape.tokens))
        earlies.append(run(shape.tokens, rule))
    plain, early = (min(made, key=lambda one: sum(one.times.values())) for made in (plains, earlies))
    if early.tokens["token_id"].tolist() != said:
        raise AssertionError("verified drafts of a random network are not plain decoding's output")
    seconds = [sum(one.times.values()) - prompt for one in (plain, early)]
    steps = shape.tokens - 1
    block = plain.times["blocks"] / shape.tokens / shape.layers
    head = plain.times["head"] / shape.tokens / block
    accepted = sum(right[1:]) / steps
    deep = int(early.sequences["passes"].iloc[0]) - 1  # without the prompt's
    wide = pass_seconds(model, pattern.draft + 1) / pass_seconds(model, 1)
    rounds = sum(accepted**number for number in range(pattern.draft + 1))
    paid = shape.layers + pattern.draft * layer + (pattern.draft + 1) * head
    paid_wide = paid + (wide - 1) * (shape.layers - layer)
    return {
        "layers": shape.layers,
        "width": shape.width,
        "vocabulary": shape.vocabulary,
        "pattern": f"{pattern.model}, layer {pattern.layer} of {pattern.layers}",
        "layer": layer,
        "draft": pattern.draft,
        "tokens": shape.tokens,
        "accepted": accepted,
        "per_round": steps / max(deep, 1),
        "per_round_formula": rounds,
        "head": head,
        "wide": wide,
        "plain_tokens_per_second": steps / seconds[0],
        "speed_up": seconds[0] / seconds[1],
        "ceiling": rounds * (shape.layers + head) / paid,
        "ceiling_wide": rounds * (shape.layers + head) / paid_wide,
    }
