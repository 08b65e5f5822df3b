"""The decoding loop: a batch is decoded step by step, each token as deep as its gate and its KV policy ask.

One token, from the prompt to its exit: `start` makes it pending at depth 0. At layer 1 it is `due`, so a call of the
network is prepared for it, and blocks run one by one. At a layer where the gate's score passes its threshold, `decide`
returns an `ExitDecision`; the sequence has stopped, the token's state is stored at this depth, and no deeper block runs
it. The KV policy fills in keys and values of the layers above; or the token stays pending, and runs these layers
together with a later token of the same sequence that goes deeper. The token is emitted.

A step of a group of sequences is cut into several calls where some stop, or where pending tokens join. A sequence's
output does not depend on the sequences beside it, but for rounding, and for a threshold that is learned while decoding.
The prompt always runs all blocks.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from eelib.exits.decoding.drafts import Drafting
from eelib.exits.decoding.gate_runner import Exits, GateRunner
from eelib.exits.decoding.kv_policies import KVPolicy
from eelib.exits.decoding.sequences import Batch, DecodedSequence, DecodedToken
from eelib.exits.decoding.verify import FULL_PRECISION, TIE, Verifier, top_or_undecided
from eelib.exits.gates.gate import NO_EXIT
from eelib.models.block_runner import BlockRunner, Call
from eelib.models.lens_adapters import DraftBlock
from eelib.models.model import Model

# Tokens times blocks that a smaller call has to save. One more call takes as long as 19 of them on pocket-llama, 7 on
# SmolLM2-135M (two cores of an AMD EPYC with AVX-512).
BATCH_SPLIT = 24
ENOUGH_DRAFTS = 64  # drafts before drafting is judged
Counts = dict[DecodedSequence, int]  # sequences that run in one call, with how many of their last tokens


@dataclass
class DraftRecord:
    """A gate's drafts so far: how many, how many were accepted, and their cost in passes of one token.

    `costs`: of a token that exits at layer 1, ..., L, in passes of one token, with all that its gate reads of the head.
    `ended`: why drafting ended.
    """

    costs: Sequence[float]
    drafted: int = 0
    accepted: int = 0
    cost: float = 0.0
    ended: str = ""

    def add(self, exit_layers: list[int], accepted: int, in_vain: bool) -> None:
        """Count the drafts of one verifying pass, by their exit layers. Drafting ends, with one printed line, where it
        costs more than it saves: an accepted draft saves at most a pass, and each draft costs its layers and the head's
        reads. `in_vain`: the gate was asked about the pass's newest token at every exit layer, and did not let it exit.
        """
        self.drafted, self.accepted = self.drafted + len(exit_layers), self.accepted + accepted
        self.cost += sum(self.costs[layer - 1] for layer in exit_layers) + in_vain * (self.costs[-1] - 1)
        if self.drafted >= ENOUGH_DRAFTS and not self.ended and self.accepted <= self.cost:
            self.ended = (
                f"{self.accepted} of {self.drafted} drafts were accepted, and a draft costs "
                f"{self.cost / self.drafted:.2f} of a pass: drafting costs more than it saves, so it ends here"
            )
            print(self.ended)


class Decoder:
    """Decodes one batch under one KV policy.

    Args:
        draft_length: most tokens that are drafted before they are verified.
        record: the drafts of a gate, of all batches, which end drafting; None where nothing ends it.
        drafting: drafts in place of a gate's exits; `gate` then asks at no layer.
    """

    def __init__(
        self,
        model: Model,
        kv: KVPolicy,
        gate: GateRunner,
        draft_length: int,
        record: DraftRecord | None = None,
        drafting: Drafting | None = None,
    ):
        self.model, self.kv, self.gate = model, kv, gate
        self.draft_length, self.record, self.drafting = draft_length, record, drafting
        self.plain = False  # nothing is drafted, so that ties are plain decoding's
        self.eos_ids, self.tie = model.eos_ids, TIE if model.dtype in FULL_PRECISION else -1.0

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], max_new_tokens: int) -> list[DecodedSequence]:
        """The sequences of the batch, in the order of their prompts (lists of token ids)."""
        self.gate.begin_batch()
        self.batch = Batch(self.model, prompts, max_new_tokens, bool(self.drafting and self.drafting.drafts))
        self.blocks = BlockRunner(self.model, self.batch.cache.view)
        self.verifier = Verifier(self.model, prompts)
        if self.drafting:
            self.drafting.begin(self.batch.sequences, prompts)
            self.plain = not (self.drafting.drafts or self.drafting.from_text)
        with ExitStack() as opened:
            opened.enter_context(self.blocks.open())
            if self.drafting and self.drafting.drafts:
                opened.enter_context(self.drafting.drafts.open(prompts, self.blocks))
            for group in self.batch.groups():
                self.step(group, prefill=True)
            finished = self.batch.drop_finished()
            while self.batch.sequences:
                if self.drafting:
                    self.draft(self.drafting)
                for group in self.batch.groups():
                    self.step(group)
                finished += self.batch.drop_finished()
        if self.drafting:
            self.drafting.finish([len(sequence.tokens) for sequence in finished])
        return sorted(finished, key=lambda sequence: sequence.index)

    def draft(self, drafting: Drafting) -> None:
        """Draft tokens of all sequences of the batch, to be verified by one pass."""
        drafting.start(self.batch.sequences)
        drafting.guess(self.batch.sequences, self.eos_ids)
        drafts = drafting.drafts
        while drafts and (some := drafting.wanted(self.batch.sequences)):
            for group in self.batch.groups(some):
                drafts.next(self.batch, group, self.eos_ids)
            drafting.drafted(some)

    def step(self, group: list[DecodedSequence], prefill: bool = False) -> None:
        """Run one step: each sequence's newest token, and the pending tokens of sequences that go deep.

        A sequence that is draining has no newest token; only its pending ones run.

        Args:
            group: sequences that share calls, aligned to one cache slot.
            prefill: run the whole prompt, through all layers.
        """
        model, kv = self.model, self.kv
        for sequence in group:
            sequence.start()
        self.batch.align(group)
        self.gate.begin([sequence for sequence in group if self.may_exit(sequence, prefill)])
        stops = kv.stops and not prefill
        exits: Exits = {}
        stopped: set[DecodedSequence] = set()
        running: Counts = {}
        call, states = Call(), torch.empty(0)
        ran = 0
        for layer in range(1, model.layers + 1):
            if layer > ran:
                # Who runs this block, and with how many tokens? A new answer means a new call of the network.
                due = {s: n for s in group if s not in stopped and (n := s.due(layer, running.get(s, 0)))}
                if due != running:
                    if running:
                        self.batch.store(running, layer - 1, states)
                    running = due
                    if running:
                        call = self.blocks.prepare(self.batch.inputs(running))
                        states = self.batch.load(running, call, layer)
                if not running:
                    continue  # all have stopped, or the rest join deeper
                ran = self.next_stop(layer, group)
                states = self.blocks.run(call, layer, states, ran)
            if layer < ran:
                continue  # it ran together with those above it
            if self.block and layer == self.block.layer:  # it stores keys and values of every token
                self.block.in_call(states, call.of_block(layer + 1))
            new: Exits = {}
            if layer in self.gate.layers and self.gate.sequences:
                rows = rows_of(self.gate.sequences, running)
                new = self.gate.decide(layer, states[rows, -1])
                exits |= new
            along = stops and layer < model.layers and exits.keys() - stopped
            if along and (self.ends(layer, group, running, stopped) or (new and self.saves(layer, running, exits))):
                stopped |= along
        if running:
            self.batch.store(running, model.layers, states)
        self.finish(group, running, states, exits, prefill)

    @property
    def block(self) -> DraftBlock | None:
        """The trained block that reads after a layer; None without one, or once drafting has ended."""
        return self.drafting.drafts.block if self.drafting and self.drafting.drafts else None

    def next_stop(self, layer: int, group: list[DecodedSequence]) -> int:
        """The first layer from `layer` on where the gate is asked, a trained block reads, or pending tokens join."""
        stops = set(self.gate.layers) if self.gate.sequences else set()
        stops |= {self.block.layer} if self.block else set()
        stops |= {token.depth for sequence in group for token in sequence.pending}
        return min((stop for stop in stops if stop >= layer), default=self.model.layers)

    def may_exit(self, sequence: DecodedSequence, prefill: bool) -> bool:
        """Whether the gate is asked about a sequence's newest token in this step."""
        if self.kv.verifies and (prefill or sequence.drafts >= self.draft_length):
            return False
        if self.record and self.record.ended:
            return False
        return not sequence.draining

    def ends(self, layer: int, group: list[DecodedSequence], running: Counts, stopped: set[DecodedSequence]) -> bool:
        """Whether a call ends after `layer`, because pending tokens join its sequences."""
        return any(s.due(layer + 1, running.get(s, 0)) != running.get(s, 0) for s in group if s not in stopped)

    def saves(self, layer: int, running: Counts, exits: Exits) -> bool:
        """Whether it saves enough that sequences which have exited stop after `layer`, while the others go on in a new
        call. Drafts that stop have to run later, so stopping them saves nothing.
        """
        staying = [count for sequence, count in running.items() if sequence not in exits]
        if not staying:
            return True
        saved = max(running.values()) * len(running) - max(staying) * len(staying)
        return (0 if self.kv.verifies else saved * (self.model.layers - layer)) >= BATCH_SPLIT

    def finish(
        self, group: list[DecodedSequence], running: Counts, states: Tensor, exits: Exits, prefill: bool
    ) -> None:
        """Emit the tokens of a step: of the sequences that exited, and of those that ran all blocks, `running`."""
        layers, kv, gate, reads = self.model.layers, self.kv, self.gate, self.gate.head.reads
        if running and self.drafting and self.drafting.drafts:
            self.drafting.drafts.observe(running, states)
        answers = self.read_head([s for s in running if kv.verifies or s not in exits], running, states, prefill)
        if not kv.verifies:
            exits = gate.after({sequence: own[-1] for sequence, own in answers.items()}, exits)
        if exits and not prefill:
            kv.fill(self.batch, self.blocks, exits)
        scores = gate.scores
        for sequence in group:
            beyond = not (sequence.draining or sequence in exits)  # its newest position is answered by the last layer
            if sequence in exits:
                found, ran = exits[sequence], sequence.pending[-1].depth if sequence.pending else layers
                kv_only = layers - found.layer if kv.name == "project" and not prefill else 0
                if not kv.defers:
                    sequence.pending.clear()
                read = (found.token_id, found.layer, ran, found.head_reads, found.score)
                token = DecodedToken(*read, kv_only, drafted=kv.verifies)
                sequence.emit(token, self.eos_ids, verified=not kv.verifies)
            if sequence not in answers:
                continue
            sequence.passes += 1
            head_reads = 1 + (reads if sequence in scores else 0)
            full = DecodedToken(answers[sequence][-1], layers, layers, head_reads, scores.get(sequence, NO_EXIT))
            if kv.verifies:
                drafts = sequence.tokens[len(sequence.tokens) - sequence.drafts :]
                exit_layers, before = [draft.exit_layer for draft in drafts], sequence.accepted
                known = len(sequence.tokens) - len(drafts)
                self.verifier.accept(sequence, answers[sequence], beyond, full)
                if self.drafting:
                    self.drafting.learn(sequence, drafts, len(sequence.tokens) - known)
                elif self.record:
                    self.record.add(exit_layers, sequence.accepted - before, in_vain=sequence in scores)
            elif beyond:
                sequence.emit(full, self.eos_ids)

    def read_head(
        self, deep: list[DecodedSequence], running: Counts, states: Tensor, prefill: bool
    ) -> dict[DecodedSequence, list[int]]:
        """The last layer's top-1 after the newest position of each sequence `deep`, and after its drafts where they are
        verified; negative where two tokens are tied.
        """
        if not deep:
            return {}
        if len(deep) < len(running):
            states = states[rows_of(deep, running)]
        verifies = self.kv.verifies
        wide = max(running.values()) if verifies and not prefill else 1
        logits = self.model.unembed(states[:, -wide:].reshape(-1, states.shape[-1]))
        found = top_or_undecided(logits, self.tie) if verifies and not self.plain else logits.argmax(dim=-1)
        return dict(zip(deep, found.reshape(len(deep), wide).tolist()))


def rows_of(some: list[DecodedSequence], running: Counts) -> list[int] | slice:
    """The rows of some sequences in a call; for all of them, a slice."""
    if len(some) == len(running):
        return slice(None)
    wanted = set(some)
    return [row for row, sequence in enumerate(running) if sequence in wanted]
