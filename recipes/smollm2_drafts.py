"""The recipes of the blocks that draft for SmolLM2-135M-Instruct, trained in legs on its own outputs."""

import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eelib.models.draft_block import FILE, DraftBlock, load_draft, rollouts, save_draft
from eelib.models.lens_adapters import origin_of
from eelib.models.model import Model, load_model
from eelib.models.probe import block_states
from eelib.tracing.decode import state_at
from recipes.chat_outputs import OwnText, batches, packs, read_texts
from recipes.corpora import SEED
from recipes.legs import train
from recipes.loop import Loss
from recipes.smollm2 import FEW, START, Legs, padded, quicker, share

IN_A_ROW = 4  # drafts that are reported


@dataclass(frozen=True)
class Draft(Legs):
    """A draft block: of the kind "block" after one layer, or "features", which drafts from the last layer's states.

    It learns the model's own next tokens: cross-entropy, and cross-entropy from the probabilities that the model gave
    to its likeliest tokens, half each. `head`: how many of the tokens that the model writes most it can draft;
    `drafts`: how many in a row are trained, from what the block itself made, where it needs that.
    """

    kind: str = "block"
    layer: int = 4  # drafts of layer 8 are right a little more often, and cost so much more that they win less
    head: int = 5900
    tokens: int = 2048
    peak: float = 6e-4
    drafts: int = 1
    steps: int = 20_000
    show_every: int = 200

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> dict:
        """Train for one leg, and write the block as it is then to `out`; returns the leg's end."""
        del corpora
        until = time.monotonic() + 60 * self.minutes
        model = load_model(self.start, device=device)
        model.network.requires_grad_(False)
        found, leg = self.begun(model, self.outputs(work), out)
        weights, held = dict(found.named_parameters()), self.held_out(work)
        at_first = next(batches(self.outputs(work), self.tokens, (0, 0, 0)))[1]

        def attempt() -> None:
            self.loss_of(model, found, at_first).value.backward()
            found.zero_grad()

        way = quicker(attempt, model.device)

        def loss_of(batch: list[OwnText], _step: int) -> Loss:
            with way():
                return self.loss_of(model, found, batch)

        def shown() -> dict:
            return {"accepted by position": accepted(self.hits(model, found, held[:FEW]))}

        leg = train(
            weights,
            loss_of,
            self.outputs(work),
            self.tokens,
            self.peak,
            work,
            until,
            self.steps,
            leg,
            shown,
            self.show_every,
        )
        quality = self.quality(model, found, held)
        print(json.dumps(quality, indent=1), flush=True)
        save_draft(found, out, START, {"leg": leg})
        where = (
            f"after layer {self.layer} of {model.layers}" if self.kind == "block" else "of the last features (EAGLE)"
        )
        kind = f"a draft block {where}, of the model's own shape, bfloat16; its head has {len(found.ids)} tokens"
        self.card(out, work, device, kind, "the block drafts what the model says next", leg, quality)
        return leg

    def begun(self, model: Model, outputs: Path, out: Path) -> tuple[DraftBlock, dict]:
        """The block that `out` has and the leg that ended there; else a new one, a copy of the model's own."""
        counts: Counter[int] = Counter()
        for file in sorted(outputs.glob("training-*.safetensors")):
            counts.update(token for text in read_texts(file) for token in text.output.tolist())
        tokens = torch.tensor(sorted(token for token, _ in counts.most_common(self.head)))
        layer = self.layer if self.kind == "block" else model.layers
        found = DraftBlock(model, self.kind, layer, tokens).to(model.device)
        if not (out / FILE).exists():
            return found, {}
        kept = load_draft(model, out / FILE)
        kept.tokens = found.tokens  # the outputs may be more than when it was kept
        return kept, origin_of(out / FILE)["leg"]

    def said(self, model: Model, found: DraftBlock, batch: list[OwnText], drafts: int) -> list[Tensor]:
        """The logits [n, head] that the block gives to each token of the outputs: as the first of a row of drafts, as
        the second after a right one, and so on. A block after a layer drafts each like the first.
        """
        ids, rows, at = padded(batch, model.device)
        inputs = {"input_ids": ids, "use_cache": False}
        if self.kind == "block":
            with torch.no_grad():
                states = state_at(model, self.layer, inputs)
            return [found.logits(found.features(found(states)[rows, at]))] * drafts
        with torch.no_grad(), block_states(model.blocks) as all_states:
            model.network.base_model(**inputs)
            features, following = found.features(all_states[-1])[:, :-1], ids[:, 1:]
        places, seen = (one.to(model.device) for one in rollouts(following.shape[1], drafts))
        taken, length, said = [found.joined(features, following)], following.shape[1], []
        for step in range(1, drafts + 1):
            part = step * length
            made = found.at(torch.cat(taken, dim=1), places[None, :part], seen[None, None, :part, :part])[:, -length:]
            made = found.features(made)
            said.append(found.logits(made[rows, at - 1]))
            taken.append(found.joined(F.pad(made, (0, 0, 1, 0))[:, :-1], following))
        return said

    def loss_of(self, model: Model, found: DraftBlock, batch: list[OwnText]) -> Loss:
        """The loss of one step, on the tokens that the block can draft."""
        top = torch.cat([text.top for text in batch]).to(model.device)
        shares = torch.cat([text.likely for text in batch]).to(model.device).exp()
        numbers = numbers_of(found, model.vocab_size)[top]
        shares = shares * (numbers >= 0)
        able = numbers[:, 0] >= 0
        losses, shown = [], []
        for logits in self.said(model, found, batch, self.drafts):
            likely = logits[able].float().log_softmax(-1)
            each = likely.gather(1, numbers[able].clamp(min=0))
            hard = -each[:, 0].mean()
            soft = -((each * shares[able]).sum(1) / shares[able].sum(1)).mean()
            losses.append((hard + soft) / 2)
            shown.append(hard.detach())
        return Loss(torch.stack(losses).mean(), len(top), shown=shown[0])

    @torch.no_grad()
    def hits(self, model: Model, found: DraftBlock, texts: list[OwnText]) -> list[tuple[OwnText, Tensor]]:
        """Of each text, whether each token of its output is drafted right, as number 1 to 4 in a row: bool [4, n]."""
        hits = []
        for batch in packs(texts, self.tokens, random.Random(SEED)):
            drafted = torch.stack([found.ids[one.argmax(-1)] for one in self.said(model, found, batch, IN_A_ROW)])
            sizes = [len(text.output) for text in batch]
            for text, own in zip(batch, drafted.cpu().split(sizes, dim=1)):
                hits.append((text, own == text.output))
        return hits

    def quality(self, model: Model, found: DraftBlock, texts: list[OwnText]) -> dict[str, Any]:
        """Acceptance by position, with and without texts that repeat themselves, and of the first draft by task."""
        hits = self.hits(model, found, texts)
        tokens = torch.cat([text.output for text in texts])
        tasks = sorted({text.task for text in texts})
        plain = [(text, own) for text, own in hits if not text.repeated]
        return {
            "tokens": len(tokens),
            "of which it can draft": share(torch.isin(tokens, found.ids.cpu())),
            "accepted by position": accepted(hits),
            "accepted by position, texts that repeat themselves left out": accepted(plain),
            "texts that repeat themselves": share(torch.tensor([text.repeated > 0 for text in texts])),
            "first draft by task": {t: accepted([one for one in hits if one[0].task == t])[0] for t in tasks},
            "first draft by task, texts that repeat themselves left out": {
                t: accepted([one for one in plain if one[0].task == t])[0] for t in tasks
            },
        }

    def measure(self, corpora: Path, folder: Path, device: str) -> dict:
        """The quality of a folder's block on held-out outputs."""
        del corpora
        model = load_model(self.start, device=device)
        found = load_draft(model, folder / FILE)
        return self.quality(model, found, self.held_out(Path("checkpoints") / self.name))


def numbers_of(found: DraftBlock, vocabulary: int) -> Tensor:
    """The number that each token of the vocabulary has among those that a block can draft; -1: it can't."""
    numbers = torch.full((vocabulary,), -1, device=found.ids.device)
    numbers[found.ids] = torch.arange(len(found.ids), device=numbers.device)
    return numbers


def accepted(hits: list[tuple[OwnText, Tensor]]) -> list[float]:
    """The share of drafts that are right at each position of a row of drafts, where all before were right."""
    shares, rows = [], [torch.ones(own.shape[1], dtype=torch.bool) for _, own in hits]
    for position in range(IN_A_ROW):
        # rows: whether the drafts before this one, which is of the token `position` further, were right
        rows = [row[: own.shape[1] - position] for row, (_, own) in zip(rows, hits)]
        right = [own[position, position:] for _, own in hits]
        tried, good = sum(int(row.sum()) for row in rows), sum(int((row & r).sum()) for row, r in zip(rows, right))
        shares.append(round(good / max(tried, 1), 4))
        rows = [row & r for row, r in zip(rows, right)]
    return shares


BLOCK = Draft(f"{START}-block")
FEATURES = Draft(f"{START}-features", kind="features", drafts=2)
