"""A rule beside full-depth decoding: asked at every layer as the token is made, it says where it would leave.

Nothing is skipped, so that what a gate says can be held against what the same gate says of the finished trace.
"""

import pandas as pd
import torch
from torch import Tensor

from eelib.exits.decoding.gate_runner import read_logits
from eelib.exits.exit_rule import Estimated, ExitRule
from eelib.exits.gates.gate import LayerOutput
from eelib.exits.trace_scores import Scores, exits_of, score_layers
from eelib.models.model import Model

COLUMNS = ("sequence", "position", "exit_layer", "token_id")


class LiveRule:
    """A reader for `eelib.tracing.decode.greedy_decode` that asks a rule; rows are the sequences of one batch.

    A threshold that is learned goes on learning from batch to batch; FREE's are of one sequence.
    """

    def __init__(self, model: Model, rule: ExitRule, rows: int):
        rule.check(model.layers)
        if isinstance(rule.threshold, Estimated):
            rule.threshold.begin_sequence()
        self.model, self.rule = model, rule
        self.position = torch.zeros(rows, dtype=torch.long)
        self.token_before = torch.full((rows,), -1)
        self.exit_before = torch.zeros(rows, dtype=torch.long)
        self.said: list[tuple[Tensor, Tensor, Scores]] = []

    def add(self, states: Tensor, rows: list[int], ids: list[int]) -> None:
        """Ask about the states [n, L+1, hidden_size] behind tokens `ids` of the sequences `rows`."""
        at, layers = torch.tensor(rows), self.model.layers
        positions, device = self.position[at].to(states.device), states.device
        token_before, exit_before = self.token_before[at].to(device), self.exit_before[at].to(device)

        def seen(layer: int) -> LayerOutput:
            state, unembed = states[:, layer], self.model.unembed
            return LayerOutput(
                layer, layers, positions, read_logits(unembed(state)), state, unembed, token_before, exit_before
            )

        found = score_layers(self.rule, layers, torch.tensor(ids, device=device), seen)
        exits = exits_of(self.rule, found, positions)
        if isinstance(self.rule.threshold, Estimated):
            self.learn(found, exits, torch.tensor(ids, device=device))
        self.said.append((torch.stack([at, self.position[at]]), exits.cpu(), Scores(*(part.cpu() for part in found))))
        self.position[at] += 1
        self.token_before[at], self.exit_before[at] = torch.tensor(ids), exits.cpu()

    def learn(self, found: Scores, exits: Tensor, final: Tensor) -> None:
        """Tell the threshold of the tokens that ran all blocks."""
        limit, (shallow,) = self.rule.threshold, self.rule.exit_layers or ()
        assert isinstance(limit, Estimated)
        deep = exits > shallow
        agreed = found.tokens[deep, shallow - 1] == final[deep]
        limit.learn(found.score[deep, shallow - 1].tolist(), agreed.tolist())

    def finish(self) -> tuple[pd.DataFrame, Scores]:
        """(a row per token: sequence, position, exit_layer, and the token that leaving there emits; the scores)."""
        spots, exits = torch.cat([s for s, _, _ in self.said], dim=1), torch.cat([e for _, e, _ in self.said])
        found = Scores(*(torch.cat(parts) for parts in zip(*(scores for _, _, scores in self.said))))
        order = torch.argsort(spots[0] * (spots[1].max() + 1) + spots[1])
        found, exits = Scores(*(part[order] for part in found)), exits[order]
        token = found.tokens.gather(1, exits[:, None] - 1)[:, 0]
        table = torch.stack([*spots[:, order], exits, token], dim=1).numpy()
        return pd.DataFrame(table, columns=list(COLUMNS)), found
