"""Whether texts that are read as they are (`given=True`) are read right, and how fast.

English texts of data/texts are traced, and read once more by transformers alone: one text after another, the hidden
states of all layers, the final norm and the head written out here. At every position and layer both must have the same
best token, but where the two best of the independent run are within a thousandth of a nat, which rounding explains.
Then positions a second are measured beside plain loops of the same readouts.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import eelib
from checks.report import TRACES, Goal, finish, goal, headed, options
from eelib.common.files import data_folder
from eelib.models.checkpoint import path_of
from eelib.models.model import Model
from eelib.tasks.sources import read_rows
from eelib.tasks.task import Task
from eelib.tracing.trace import Trace

FIELDS = {  # of the English texts, by file; those that are texts in themselves come first
    "prose/english": ("text",),
    "summarization/articles": ("article",),
    "summarization/news": ("article",),
    "question_answering/passages": ("context",),
    "question_answering/rooms": ("context",),
    "translation/de-en": ("references",),
    "translation/fr-en": ("references",),
    "translation/en-de": ("source",),
    "translation/en-fr": ("source",),
    "structured/orders": ("note",),
    "classification/sst2": ("sentence",),
    "classification/cola": ("sentence",),
    "classification/mrpc": ("sentence1", "sentence2"),
    "classification/rte": ("sentence1", "sentence2"),
    "classification/questions": ("sentence",),
}
MARGIN = 1e-3  # nats between the two best tokens, above which rounding explains no other best one
NEAR = 1e-4  # of probabilities
BATCH, TIMED = 16, 1000  # texts of the plain loop's batches; positions that are timed


@dataclass
class Plain:
    """A llama-like network, read without eelib."""

    network: Any
    tokenizer: Any

    @staticmethod
    def load(folder: str) -> "Plain":
        """The checkpoint in a folder, in float32."""
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
        return Plain(network, AutoTokenizer.from_pretrained(folder))

    def states(self, ids: list[list[int]]) -> Iterator[list[Tensor]]:
        """Of each text, the normed states of layers 0 to L, [tokens, hidden_size] each; one run for all of them."""
        width = max(map(len, ids))
        rows = torch.tensor([text + [0] * (width - len(text)) for text in ids])
        mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in ids])
        found = self.network.model(
            input_ids=rows, attention_mask=mask, output_hidden_states=True, use_cache=False
        ).hidden_states
        for row, text in enumerate(ids):
            *inner, last = (state[row, : len(text)] for state in found)
            yield [*map(self.normed, inner), last]  # transformers gives the last one normed

    def normed(self, state: Tensor) -> Tensor:
        """The root-mean-square norm before the head."""
        spread = state.pow(2).mean(-1, keepdim=True) + self.network.config.rms_norm_eps
        return self.network.model.norm.weight * state * spread.rsqrt()

    def logits(self, normed: Tensor) -> Tensor:
        """[tokens, vocab_size]."""
        return normed @ self.network.lm_head.weight.T


def english() -> list[str]:
    """The English texts of data/texts, each once."""
    texts: dict[str, None] = {}
    for name, fields in FIELDS.items():
        for _, row in read_rows(data_folder("texts", f"{name}.jsonl")):
            values = [row[field] for field in fields]
            texts |= dict.fromkeys(value[0] if isinstance(value, list) else value for value in values)
    return list(texts)


def enough(texts: list[str], tokenizer: Any, positions: int) -> list[str]:
    """The first texts that together have so many positions which predict a token; all, where they have fewer."""
    counts = accumulate(max(0, len(ids) - 1) for ids in tokenizer(texts)["input_ids"])
    return texts[: next((number for number, count in enumerate(counts, 1) if count >= positions), len(texts))]


@torch.no_grad()
def compared(plain: Plain, trace: Trace, task: Task) -> dict[str, Any]:
    """How a trace differs from the independent run of the same texts."""
    found = {"positions": 0, "other_tokens": 0, "top1": 0, "differ": 0, "near_ties": 0, "near_ties_differ": 0}
    top1, share, worst = trace["top1"], trace["reference_probability"], 0.0
    tokens = trace.tokens
    for sequence, rows in tokens.groupby("sequence").indices.items():
        ids = plain.tokenizer(task.prompts[int(sequence)])["input_ids"]
        following = torch.tensor(ids[1:])
        found["positions"] += len(rows)
        found["other_tokens"] += int((tokens["token_id"].to_numpy()[rows] != following.numpy()).sum())
        for layer, state in enumerate(next(plain.states([ids[:-1]]))):
            logits = plain.logits(state)
            best = logits.topk(2)
            other = best.indices[:, 0].numpy() != top1[rows, layer]
            close = (best.values[:, 0] - best.values[:, 1]).numpy() <= MARGIN
            own = (logits.gather(1, following[:, None])[:, 0] - logits.logsumexp(-1)).exp().numpy()
            worst = max(worst, float(np.abs(own - share[rows, layer]).max()))
            found["top1"] += len(other)
            for name, count in (("differ", other & ~close), ("near_ties", close)):
                found[name] += int(count.sum())
            found["near_ties_differ"] += int((other & close).sum())
    return found | {"largest_difference_of_probability": worst}


@torch.no_grad()
def read_plainly(plain: Plain, texts: list[str], batch: int) -> int:
    """The trace's readouts of all texts by plain operations, not kept; the number of positions."""
    ids = sorted((text for text in plain.tokenizer(texts)["input_ids"] if len(text) > 1), key=len)
    for start in range(0, len(ids), batch):
        some = ids[start : start + batch]
        for text, states in zip(some, plain.states([text[:-1] for text in some])):
            last = plain.logits(states[-1]).log_softmax(-1)
            final, following = last.argmax(-1, keepdim=True), torch.tensor(text[1:])[:, None]
            for state in states:
                readouts(plain.logits(state).log_softmax(-1), last, final, following)
    return sum(len(text) - 1 for text in ids)


def readouts(logs: Tensor, last: Tensor, final: Tensor, following: Tensor) -> list[Tensor]:
    """What a trace keeps of log-probabilities [tokens, vocab_size]; `last` are the last layer's."""
    shares = logs.exp()
    found = list(logs.topk(10))
    for ids in (final, following):
        own = logs.gather(1, ids)
        found += [own.exp(), (logs > own).sum(-1) + 1]
    other = last.exp()
    middle = ((shares + other) / 2).log()
    js = (shares * (logs - middle) + other * (last - middle)).sum(-1) / 2
    return [*found, -(shares * logs).sum(-1), js, (other * (last - logs)).sum(-1)]


def rates(model: Model, plain: Plain, texts: list[str], repeats: int) -> dict[str, float]:
    """Positions a second of each way, the best of the repeats, the ways in turn."""
    task = Task.from_prompts(texts, name="timed")

    def given() -> int:
        with tempfile.TemporaryDirectory() as folder:
            return len(eelib.trace(model, task, folder=folder, given=True, progress=False))

    ways: dict[str, Callable[[], int]] = {
        "given": given,
        "plain, one text": lambda: read_plainly(plain, texts, 1),
        f"plain, {BATCH} texts": lambda: read_plainly(plain, texts, BATCH),
    }
    best = dict.fromkeys(ways, 0.0)
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.perf_counter()
            best[name] = max(best[name], way() / (time.perf_counter() - began))
    return best


def goals(found: dict[str, Any], rate: dict[str, float], positions: int) -> list[Goal]:
    """What is read is right and enough, and read faster than by plain loops."""
    own, *others = rate.items()
    differ = f"best tokens that differ, where the two best are over {MARGIN:g} nats apart"
    shown = (
        f"{found['differ']:,} of {found['top1']:,}; of {found['near_ties']:,} near ties {found['near_ties_differ']:,}"
    )
    share = "largest difference of the next token's probability"
    return [
        goal("positions that were read", found["positions"], at_least=positions),
        goal("next tokens that are not the tokenizer's", found["other_tokens"], at_most=0),
        goal(differ, found["differ"], at_most=0, shown=shown),
        goal(share, found["largest_difference_of_probability"], at_most=NEAR),
        *(
            goal(f"positions a second, as a multiple of the loop of {name}", own[1] / other, at_least=1)
            for name, other in others
        ),
    ]


def main() -> None:
    """The command line."""
    parser = options(__doc__, "given")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a llama-like checkpoint: a name or a folder")
    parser.add_argument("--positions", type=int, default=100_000, help="positions that are read (100,000)")
    parser.add_argument("--repeats", type=int, default=2, help="timings of each way (2)")
    parser.add_argument("--runs", default="runs", help="where the trace lies, which is finished if it is half made")
    asked = parser.parse_args()
    head = headed("given", depends=TRACES)
    model, plain = eelib.load_model(asked.model, device="cpu"), Plain.load(path_of(asked.model))
    texts = enough(english(), plain.tokenizer, asked.positions)
    task = Task.from_prompts(texts, name="english")
    trace = eelib.trace(model, task, folder=asked.runs, given=True)
    found = compared(plain, trace, task)
    rate = rates(model, plain, enough(texts, plain.tokenizer, TIMED), asked.repeats)
    head["models"] = {model.name: model.hash}
    finish(asked.output, head, goals(found, rate, asked.positions), found=found, rate=rate)
