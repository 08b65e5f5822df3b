"""The one loop: a batch is decoded token by token, each as deep as its gate says and its policy of keys asks.

A step runs the newest token of every row. It begins at the embeddings and is cut where rows part: those that leave
stay behind, those that go on take along what waits for them, in one call of the network from layer to layer. A row's
output does not depend on the rows beside it, but for rounding. The prompt always runs all blocks.
"""

import torch
from torch import Tensor

from eelib.exits.decoding.asker import Asker, Said
from eelib.exits.decoding.batch import Batch, stored_states
from eelib.exits.decoding.blocks import Blocks
from eelib.exits.decoding.clock import Clock
from eelib.exits.decoding.keys import Keys
from eelib.exits.decoding.oracle import Oracle
from eelib.exits.decoding.row import Row, Token, Waiting
from eelib.exits.gates.gate import NEVER
from eelib.models.model import Model

NEW = Waiting(0, torch.empty(0))


class Decoding:
    """Decode batches of one model under one policy. `asker` None: no token leaves. `draft`: most that are verified at
    once.
    """

    def __init__(self, model: Model, keys: Keys, asker: Asker | None, draft: int, clock: Clock):
        self.model, self.keys, self.asker, self.draft, self.clock = model, keys, asker, draft, clock
        self.ends = model.eos_ids
        self.batch: Batch
        self.blocks: Blocks

    @torch.no_grad()
    def decode(self, prompts: list[list[int]], max_new_tokens: int) -> list[Row]:
        """The rows of one batch, in the order of their prompts (lists of token ids)."""
        with self.clock.on("blocks"):
            self.batch = Batch(self.model, prompts, max_new_tokens, self.clock)
        self.blocks = Blocks(self.model, self.batch.slots.frame)
        if self.asker:
            self.asker.begin_batch()
        finished: list[Row] = []
        with self.blocks.open():
            for group in self.batch.groups():
                self.step(group, prompt=True)
            finished += self.batch.drop_finished()
            while self.batch.rows:
                for group in self.batch.groups():
                    self.step(group)
                with self.clock.on("cache"):
                    finished += self.batch.drop_finished()
        return sorted(finished, key=lambda row: row.number)

    def step(self, rows: list[Row], prompt: bool = False) -> None:
        """Run the newest token of each row; of one that only flushes, what waits."""
        for row in rows:
            row.waiting += [NEW] * (row.base if prompt else int(not row.flush))
        with self.clock.on("cache"):
            self.batch.align(rows)
        entering: dict[int, list[Row]] = {}
        for row in rows:
            entering.setdefault(row.waiting[-1].depth, []).append(row)
        asking = self.begin(rows, prompt)
        active: list[Row] = []
        noted: dict[int, Token] = {}
        layer = 0
        while entering or active:
            layer = layer if active else min(entering)
            active = sorted(active + entering.pop(layer, []), key=lambda row: row.place)
            counts = [row.joining(layer) for row in active]
            joins = [*entering, *(row.next_depth(layer) or self.model.layers for row in active)]
            layer, states, said = self.run(active, counts, layer, min(joins), asking, noted, prompt)
            self.note_depth(active, counts, layer, states, prompt)
            if layer == self.model.layers:
                self.finish(active, counts, states, asking, noted, prompt)
                active = []
            elif said and said.layer == layer and any(said.leaves):
                going = self.leave(active, states, asking, said)
                gone = {row.number for row in asking} - {row.number for row in going}
                active, asking = [row for row in active if row.number not in gone], going

    def begin(self, rows: list[Row], prompt: bool) -> list[Row]:
        """The rows whose gate is to be asked in this step, and the gate told of them."""
        if self.asker is None or (prompt and self.keys.verifies):
            return []
        asking = [row for row in rows if not row.flush and not (self.keys.verifies and row.drafts >= self.draft)]
        asking.sort(key=lambda row: row.place)
        if asking:
            last = [row.tokens[-1] if row.tokens else None for row in asking]
            self.asker.begin(
                [len(row.tokens) for row in asking],
                [token.token_id if token else -1 for token in last],
                [token.exit_layer if token else 0 for token in last],
            )
        return asking

    def run(
        self,
        active: list[Row],
        counts: list[int],
        layer: int,
        join: int,
        asking: list[Row],
        noted: dict[int, Token],
        prompt: bool,
    ) -> tuple[int, Tensor, Said | None]:
        """One call from `layer` to where rows part, others join, or layer L: (that layer, states, what was said)."""
        asker, said = self.asker, None
        places = {row.number for row in asking}
        index = [i for i, row in enumerate(active) if row.number in places]
        stops = self.keys.stops and not prompt

        def watch(at: int, states: Tensor) -> bool:
            nonlocal said
            if asker and at in asker.asked and index and (stops or len(noted) < len(index)):
                said = asker.ask(at, states[:, -1] if len(index) == len(active) else states[index, -1])
                if any(said.leaves):
                    if stops:
                        return True
                    self.note(asking, said, noted)
            return at == join

        watched = frozenset({join, self.model.layers}) | (asker.asked if asker and index else frozenset())
        inputs = self.batch.frame(active, counts)
        with self.clock.on("blocks"):
            if layer:
                at, states = self.blocks.go_on(inputs, layer, stored_states(active, counts), watched, watch)
            else:
                at, states = self.blocks.run(inputs, watched, watch)
        return at, states, said

    def note(self, asking: list[Row], said: Said, noted: dict[int, Token]) -> None:
        """Keep what rows emit that leave here, while their blocks go on running."""
        assert self.asker
        tokens = self.asker.tokens(said)
        for row, leaves, token, score in zip(asking, said.leaves, tokens, said.scores):
            if leaves and row.number not in noted:
                noted[row.number] = Token(token, said.layer, self.model.layers, self.asker.heads, score)

    def note_depth(self, rows: list[Row], counts: list[int], layer: int, states: Tensor, prompt: bool) -> None:
        """Keep how far each row's tokens have come, with their states where they may have to go on."""
        for i, (row, count) in enumerate(zip(rows, counts)):
            if layer < self.model.layers:
                row.waiting[-count:] = [Waiting(layer, state) for state in states[i, -count:]]
            else:
                del row.waiting[-count:]
            first = row.run - count + 1 - row.base  # the output token that the first of them predicts
            for token in [] if prompt else row.tokens[max(0, first) :]:
                token.layers_run = layer

    def leave(self, active: list[Row], states: Tensor, asking: list[Row], said: Said) -> list[Row]:
        """Rows that leave emit their token, and their keys are seen to; returns those that go on asking."""
        assert self.asker
        tokens = self.asker.tokens(said)
        gone = [i for i, leaves in enumerate(said.leaves) if leaves]
        going = [i for i, leaves in enumerate(said.leaves) if not leaves]
        rows = [asking[i] for i in gone]
        made = self.keys.left(self, rows, said.layer, said.seen.state[gone])  # type: ignore[index]
        for i, row in zip(gone, rows):
            heads, score = self.asker.heads, said.scores[i]
            token = Token(tokens[i], said.layer, said.layer, heads, score, made, drafted=self.keys.verifies)
            if not self.keys.waits:
                row.waiting.clear()
            row.emit(token, self.ends)
        if going:
            self.asker.keep(going)
        return [asking[i] for i in going]

    def finish(
        self,
        rows: list[Row],
        counts: list[int],
        states: Tensor,
        asking: list[Row],
        noted: dict[int, Token],
        prompt: bool,
    ) -> None:
        """Rows have been through all blocks: what the last layer says is emitted, or held against the drafts."""
        wide = 1 if prompt else max(counts) if self.keys.verifies else 1
        last = states[:, -wide:]
        with self.clock.on("head"):
            found = self.model.unembed(last.reshape(-1, last.shape[-1])).argmax(dim=-1)
            tops: list[list[int]] = found.reshape(len(rows), wide).tolist()
        final = [top[-1] for top in tops]
        if self.keys.verifies:
            heads, scores = self.told(asking)
            for row, top in zip(rows, tops):
                looks, layers = heads if row.number in scores else 0, self.model.layers
                self.verify(row, top, Token(top[-1], layers, layers, looks + 1, scores.get(row.number, NEVER)))
        elif isinstance(self.asker, Oracle):
            self.leave_by_oracle(self.asker, rows, final, prompt)
        else:
            self.emit_full(rows, final, asking, noted)

    def told(self, asking: list[Row]) -> tuple[int, dict[int, float]]:
        """(readouts of each asked row's token, scores by the row's number)."""
        if self.asker is None or not asking:
            return 0, {}
        return self.asker.heads, dict(zip((row.number for row in asking), self.asker.scores))

    def emit_full(self, rows: list[Row], final: list[int], asking: list[Row], noted: dict[int, Token]) -> None:
        """Rows emit the last layer's tokens, or what they would have left with; a threshold learns from the former."""
        heads, scores = self.told(asking)
        if self.asker and asking:
            last = dict(zip((row.number for row in rows), final))
            self.asker.learn([None if row.number in noted else last[row.number] for row in asking])
        layers = self.model.layers
        for row, token in zip(rows, final):
            full = Token(token, layers, layers, heads + 1, scores.get(row.number, NEVER))
            row.emit(noted.get(row.number, full), self.ends)

    def leave_by_oracle(self, oracle: Oracle, rows: list[Row], final: list[int], prompt: bool) -> None:
        """Rows emit the last layer's tokens, with the first layer that says the same as their exit."""
        exits = oracle.exits(final)
        for layer in [] if prompt else sorted({*exits} - {self.model.layers}):
            those = [i for i, at in enumerate(exits) if at == layer]
            self.keys.left(self, [rows[i] for i in those], layer, torch.stack([oracle.state(layer, i) for i in those]))
        for row, token, layer in zip(rows, final, exits):
            row.emit(Token(token, layer, self.model.layers, oracle.heads + 1, NEVER), self.ends)

    def verify(self, row: Row, truth: list[int], full: Token) -> None:
        """Hold a row's drafts against the last layer's tokens, of which `truth` are the last; the first that differs
        is replaced and ends the round. `full`: what comes after the drafts if all are right.
        """
        count = row.drafts
        drafts = row.tokens[len(row.tokens) - count :]
        truth = truth[len(truth) - count - (not row.flush) :]
        del row.tokens[len(row.tokens) - count :], row.ids[len(row.ids) - count :]
        row.deep_runs, row.drafted, row.drafts, row.flush = row.deep_runs + 1, row.drafted + count, 0, False
        layers = self.model.layers
        for draft, token in zip(drafts, truth):
            right = draft.token_id == token
            row.accepted += right
            draft.heads, draft.accepted, draft.layers_run = draft.heads + 1, right, layers
            if not right:
                draft.token_id, draft.exit_layer = token, layers
            row.emit(draft, self.ends, verified=True)
            if row.done or not right:
                return
        if len(truth) > count:
            row.emit(full, self.ends, verified=True)

    def copy_up(self, rows: list[Row], layer: int) -> None:
        """Copy the keys and values of the newest token of rows from `layer` to all layers above."""
        with self.clock.on("cache"):
            slots, slot = self.batch.slots, rows[0].shift + rows[0].run - 1
            every = len(rows) == len(self.batch.rows)
            places = None if every else torch.tensor([row.place for row in rows], device=self.model.device)
            slots.copy_up(places, layer, slot)

    def write_keys(self, rows: list[Row], layer: int, states: Tensor) -> None:
        """Let the blocks above `layer` write the keys and values that they make of rows' states [n, hidden_size]."""
        inputs = self.batch.frame(rows, [1] * len(rows))
        with self.clock.on("blocks"):
            self.blocks.write_keys(inputs, layer, states[:, None])
