"""The rows of a batch and their cache: who runs together, in which slots, and what the network is given for it."""

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from eelib.exits.decoding.clock import Clock
from eelib.exits.decoding.row import Row
from eelib.exits.decoding.slots import Slots
from eelib.models.model import Model

SLACK = 32  # empty slots before the longest row at which all rows move to the left


class Batch:
    """Rows that are decoded together. Where padding changes a row, only rows of one length run in one call."""

    def __init__(self, model: Model, prompts: list[list[int]], max_new_tokens: int, clock: Clock):
        self.model, self.adapter = model, model.writer
        self.device, self.pad_id, window = model.device, model.pad_id, model.context_length  # asked for once: slow
        self.rows: list[Row] = []
        for number, prompt in enumerate(prompts):
            text = self.adapter.text(prompt, [])
            room = max(1, min(max_new_tokens, window - len(text)))
            self.rows.append(Row(number, list(text), len(text), room, number))
        self.padded = self.adapter.left and model.pads
        self.context = self.adapter.context(prompts)
        limit = max(row.base for row in self.rows) + max(row.room for row in self.rows) + SLACK
        self.slots = Slots(model.layers, len(prompts), limit, bool(self.context), bool(model.adapter_block), clock)

    def groups(self) -> list[list[Row]]:
        """Rows that may share a call."""
        if self.padded:
            return [self.rows]
        found: dict[int, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.run, []).append(row)
        return list(found.values())

    def align(self, rows: list[Row]) -> None:
        """Let all rows of a call end in one slot; the others move to where the furthest is."""
        end = max(row.shift + row.run for row in rows)
        spare = end - max(row.run for row in rows)
        if spare > SLACK:
            end -= spare
        for row in rows:
            by = end - row.shift - row.run
            if by:
                self.slots.move(row.place, by, end)
                row.shift += by

    def frame(self, rows: list[Row], counts: list[int]) -> dict[str, Any]:
        """Arguments of a call in which the last `counts` tokens of each row run, and the cache told of them."""
        device, width = self.device, max(counts)
        end = rows[0].shift + rows[0].run
        frame = self.slots.frame
        frame.past = end - width
        all_run = len(rows) == len(self.rows)
        frame.rows = None if all_run else torch.tensor([row.place for row in rows], device=device)
        frame.valid = None
        if min(counts) < width:
            frame.valid = torch.arange(width, 0, -1, device=device) <= torch.tensor(counts, device=device)[:, None]
        texts = [row.ids[max(0, row.run - width) : row.run] for row in rows]
        ids = torch.tensor([[self.pad_id] * (width - len(text)) + text for text in texts], device=device)
        mask = torch.ones(len(rows), end, dtype=torch.long, device=device)
        if any(row.shift for row in rows):
            shifts = torch.tensor([row.shift for row in rows], device=device)
            mask = (torch.arange(end, device=device) >= shifts[:, None]).long()
        context = self.context if all_run else self.context_of(frame.rows)
        return {**self.adapter.step_inputs(ids, mask, context), **self.adapter.cached(self.slots.cache)}

    def context_of(self, index: Tensor | None) -> dict[str, Any]:
        """The source of some of the rows."""
        if not self.context:
            return {}
        encoded = BaseModelOutput(last_hidden_state=self.context["encoder_outputs"][0][index])
        return {"encoder_outputs": encoded, "attention_mask": self.context["attention_mask"][index]}

    def drop_finished(self) -> list[Row]:
        """Rows that have ended leave the batch; returns them."""
        gone = [row for row in self.rows if row.done]
        if gone:
            going = [row for row in self.rows if not row.done]
            free = [row.place for row in gone if row.place < len(going)]
            before = {row.number: row.place for row in going}
            moved = {row.place: free.pop() for row in going if row.place >= len(going)}  # the last ones fill the gaps
            for row in going:
                row.place = moved.get(row.place, row.place)
            self.rows = sorted(going, key=lambda row: row.place)
            if going:
                self.slots.keep_rows(len(going), moved)
                self.context = self.context_of(
                    torch.tensor([before[row.number] for row in self.rows], device=self.device)
                )
        return gone


def stored_states(rows: list[Row], counts: list[int]) -> Tensor:
    """The states of the last `counts` tokens of each row [n, most, hidden_size]; zeros before those with fewer."""
    found = [torch.stack([token.state for token in row.waiting[-count:]]) for row, count in zip(rows, counts)]
    most = max(counts)
    padded = [torch.nn.functional.pad(states, (0, 0, most - len(states), 0)) for states in found]
    return torch.stack(padded)
