"""The one loop: a batch is decoded token by token, each as deep as its gate says and its policy of keys asks.

A step runs the newest token of every row. It begins at the embeddings and is cut where rows part: those that leave
stay behind, those that go on take along what waits for them, in one call of the network from layer to layer. Where
parting costs more than it saves (`decoding.parting`), rows that leave are taken along. A row's output does not depend
on the rows beside it, nor on that, but for rounding. The prompt always runs all blocks.
"""

import torch
from torch import Tensor

from eelib.exits.decoding.again import TIED, Again, tie_of, top_or_tied
from eelib.exits.decoding.asker import Asker, Said
from eelib.exits.decoding.batch import Batch, stored_states
from eelib.exits.decoding.blocks import Blocks
from eelib.exits.decoding.clock import Clock
from eelib.exits.decoding.keys import Keys
from eelib.exits.decoding.oracle import Oracle
from eelib.exits.decoding.parting import ALWAYS, Parting
from eelib.exits.decoding.row import Gone, Row, Token, Waiting, places_of
from eelib.exits.decoding.sampling import Sampler
from eelib.exits.gates.gate import NO_EXIT
from eelib.models.model import Model

NEW = Waiting(0, torch.empty(0))


class Decoding:
    """Decode batches of one model under one policy. `asker` None: no token leaves. `draft`: most that are verified at
    once. `sampler` None: greedily. `parting`: when rows part.
    """

    def __init__(
        self,
        model: Model,
        keys: Keys,
        asker: Asker | None,
        draft: int,
        clock: Clock,
        sampler: Sampler | None = None,
        parting: Parting = ALWAYS,
    ):
        self.model, self.keys, self.asker, self.draft, self.clock = model, keys, asker, draft, clock
        self.sampler, self.parting = sampler, parting
        self.ends, self.tie = model.eos_ids, tie_of(model)
        self.batch: Batch
        self.blocks: Blocks
        self.prompts: list[list[int]] = []
        self.again: dict[int, Again] = {}  # by the row's number, of rows that had a tie

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], max_new_tokens: int) -> list[Row]:
        """The rows of one batch, in the order of their prompts (lists of token ids)."""
        if self.asker:
            self.asker.begin_batch()
        with self.clock.on("blocks"):
            self.batch = Batch(self.model, prompts, max_new_tokens, self.clock)
        self.blocks = Blocks(self.model, self.batch.slots.frame, self.asker.asked if self.asker else frozenset())
        self.prompts, self.again = prompts, {}
        finished: list[Row] = []
        with self.blocks.open():
            for group in self.batch.groups():
                self.step(group, prompt=True)
            finished += self.batch.drop_finished()
            while self.batch.rows:
                for group in self.batch.groups():
                    self.step(group)
                with self.clock.on("cache"):
                    gone = self.batch.drop_finished()
                for row in gone:
                    self.again.pop(row.number, None)  # its keys and values are of no more use
                finished += gone
        return sorted(finished, key=lambda row: row.number)

    def forget(self) -> None:
        """Let go of a batch that did not fit."""
        self.again = {}
        for name in ("batch", "blocks"):
            self.__dict__.pop(name, None)
        if self.asker:
            self.asker.forget_batch()

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
            layer, states, gone = self.run(active, counts, layer, min(joins), asking, noted, prompt)
            self.note_depth(active, counts, layer, states, prompt)
            self.settle(gone, layer)
            left = {one.row.number for one in gone}
            if layer == self.model.layers:
                self.finish(active, counts, states, asking, noted, prompt, left)
                active = []
            else:
                active = [row for row in active if row.number not in left]

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
    ) -> tuple[int, Tensor, list[Gone]]:
        """One call from `layer` to where rows part, others join, or layer L: (that layer, states, rows that left).

        These are no longer in `asking` then.
        """
        asker, gone, left = self.asker, list[Gone](), set[int]()
        index = places_of(asking, active)
        stops = self.keys.stops and not prompt

        def watch(at: int, states: Tensor) -> bool:
            nonlocal index
            if asker and at in asker.asked and index and (stops or len(noted) < len(index)):
                rows = slice(None) if len(index) == len(active) else index
                newest = states[rows, -1]
                said = asker.ask(at, newest, self.blocks.read(at, rows, newest))
                if any(said.leaves) and stops:
                    gone.extend(self.leave(asking, said))
                    left.update(one.row.number for one in gone)
                    index = places_of(asking, active)
                    staying = [count for row, count in zip(active, counts) if row.number not in left]
                    blocks, later = self.model.layers - at, self.keys.verifies
                    return at == join or not staying or self.parting.pays(counts, staying, blocks, later)
                if any(said.leaves):
                    self.note(asking, said, noted)
            return at == join

        watched = frozenset({join, self.model.layers}) | (asker.asked if asker and index else frozenset())
        inputs = self.batch.frame(active, counts)
        with self.clock.on("blocks"):
            if layer:
                at, states = self.blocks.go_on(inputs, layer, stored_states(active, counts), watched, watch)
            else:
                at, states = self.blocks.run(inputs, watched, watch)
        return at, states, gone

    def note(self, asking: list[Row], said: Said, noted: dict[int, Token]) -> None:
        """Keep what rows emit that leave here, while their blocks go on running."""
        assert self.asker
        new = [i for i, row in enumerate(asking) if said.leaves[i] and row.number not in noted]
        if not new:
            return
        (tokens, heads), scores = self.asker.tokens(said, new), said.score.tolist()
        for i, token in zip(new, tokens):
            noted[asking[i].number] = Token(token, said.layer, self.model.layers, heads, scores[i])

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

    def leave(self, asking: list[Row], said: Said) -> list[Gone]:
        """Rows that leave, with what they emit; `asking` keeps those that are asked further."""
        assert self.asker
        gone, going = ([i for i, leaves in enumerate(said.leaves) if leaves is wanted] for wanted in (True, False))
        rows, states = [asking[i] for i in gone], said.states[gone]  # a copy: blocks may go on with theirs
        if self.sampler:
            logits, heads = self.asker.logits(said, gone)
            drawn_from = list(self.sampler.chances(logits))
            tokens = [self.sampler.draw(row, own) for row, own in zip(rows, drawn_from)]
        else:
            drawn_from, (tokens, heads) = [None] * len(gone), self.asker.tokens(said, gone)
        scores, found = said.score.tolist(), []
        for i, row, state, token, own in zip(gone, rows, states, tokens, drawn_from):
            emitted = Token(token, said.layer, said.layer, heads, scores[i], drafted=self.keys.verifies)
            found.append(Gone(row, emitted, state, own))
        if going:
            self.asker.keep(going)
        asking[:] = [asking[i] for i in going]
        return found

    def settle(self, gone: list[Gone], layer: int) -> None:
        """Rows that left in a call, which has ended after `layer`, emit their tokens, and their keys are seen to."""
        by_exit: dict[int, list[Gone]] = {}
        for one in gone:
            by_exit.setdefault(one.token.exit_layer, []).append(one)
        for exit_layer, those in by_exit.items():
            rows, states = [one.row for one in those], torch.stack([one.state for one in those])
            made = self.keys.left(self, rows, exit_layer, states)
            for one in those:
                one.token.layers_run, one.token.keys_made = layer, made
        for one in gone:
            if not self.keys.waits:
                one.row.waiting.clear()
            if one.drawn_from is not None:
                one.row.proposed.append(one.drawn_from)
            one.row.emit(one.token, self.ends)

    def finish(
        self,
        rows: list[Row],
        counts: list[int],
        states: Tensor,
        asking: list[Row],
        noted: dict[int, Token],
        prompt: bool,
        left: set[int],
    ) -> None:
        """Rows have been through all blocks: what the last layer says is emitted, or held against the drafts.

        `left`: by number, those that emitted their token before and were taken along; their drafts are verified.
        """
        if left and not self.keys.verifies:
            staying = places_of([row for row in rows if row.number not in left], rows)
            rows, states = [rows[i] for i in staying], states[staying]
        wide = 1 if prompt else max(counts) if self.keys.verifies else 1
        last = states[:, -wide:]
        with self.clock.on("head"):
            logits = self.model.unembed(last.reshape(-1, last.shape[-1]))
            said: list[list[int]] | list[Tensor]
            if self.sampler:
                said = list(self.sampler.chances(logits).reshape(len(rows), wide, -1))
            else:
                found = top_or_tied(logits, self.tie) if self.keys.verifies else logits.argmax(dim=-1)
                said = found.reshape(len(rows), wide).tolist()
        if self.keys.verifies:
            heads, scores = self.told(asking)
            for row, own in zip(rows, said):
                row.flush |= row.number in left
                looks, layers = heads if row.number in scores else 0, self.model.layers
                self.verify(row, own, Token(TIED, layers, layers, looks + 1, scores.get(row.number, NO_EXIT)))
            return
        final = [self.decided(row, own[-1]) for row, own in zip(rows, said)]
        if isinstance(self.asker, Oracle):
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
            full = Token(token, layers, layers, heads + 1, scores.get(row.number, NO_EXIT))
            row.emit(noted.get(row.number, full), self.ends)

    def leave_by_oracle(self, oracle: Oracle, rows: list[Row], final: list[int], prompt: bool) -> None:
        """Rows emit the last layer's tokens, with the first layer that says the same as their exit."""
        exits = oracle.exits(final)
        for layer in [] if prompt else sorted({*exits} - {self.model.layers}):
            those = [i for i, at in enumerate(exits) if at == layer]
            self.keys.left(self, [rows[i] for i in those], layer, torch.stack([oracle.state(layer, i) for i in those]))
        for row, token, layer in zip(rows, final, exits):
            row.emit(Token(token, layer, self.model.layers, oracle.heads + 1, NO_EXIT), self.ends)

    def verify(self, row: Row, said: list[int] | Tensor, full: Token) -> None:
        """Hold a row's drafts against what the last layer says, of which `said` is the last; the first that differs is
        replaced and ends the round. `full`: what comes after the drafts if all are right.
        """
        count = row.drafts
        drafts, proposed = row.tokens[len(row.tokens) - count :], row.proposed
        said = said[len(said) - count - (not row.flush) :]
        del row.tokens[len(row.tokens) - count :], row.ids[len(row.ids) - count :]
        row.deep_runs, row.drafted, row.drafts, row.flush = row.deep_runs + 1, row.drafted + count, 0, False
        row.proposed = []
        layers = self.model.layers
        for i, draft in enumerate(drafts):
            token = self.decided(row, said[i], draft.token_id, proposed[i] if self.sampler else None)
            right = draft.token_id == token
            row.accepted += right
            draft.heads, draft.accepted, draft.layers_run = draft.heads + 1, right, layers
            if not right:
                draft.token_id, draft.exit_layer = token, layers
            row.emit(draft, self.ends, verified=True)
            if row.done or not right:
                return
        if len(said) > count:
            full.token_id = self.decided(row, said[count])
            row.emit(full, self.ends, verified=True)

    def decided(self, row: Row, said: int | Tensor, draft: int = TIED, proposed: Tensor | None = None) -> int:
        """The token after a row's text by what the last layer says: its top-1, or TIED, or its chances [V].

        Where tokens are sampled, a `draft` is kept as often as may be; `proposed`: what it was drawn from.
        """
        if isinstance(said, Tensor):
            assert self.sampler
            if proposed is None:
                return self.sampler.draw(row, said)
            return self.sampler.checked(row, draft, proposed, said)
        if said != TIED:
            return said
        if row.number not in self.again:
            limit = row.base + row.room  # as plain decoding of this row alone has it
            self.again[row.number] = Again(self.model, self.prompts[row.number], limit)
        with self.clock.on("blocks"), self.blocks.aside():
            return self.again[row.number].after([token.token_id for token in row.tokens])

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
