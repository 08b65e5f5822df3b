"""Whether texts that are read as they are (`given=True`) are read right, and how fast.

English texts of data/texts are traced, and read once more by transformers alone: one text after another, the hidden
states of all layers, the final norm and the head written out here. At every position and layer both must have the same
best token, but where the two best of the independent run are within a thousandth of a nat, which rounding explains.
Then positions a second are measured beside plain loops of the same readouts, and beside tuned-lens's own evaluation of
a text, which gives fewer of them, in an environment of its own.
"""

import json
import subprocess
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
from checks.trace_speed import RUNNER, environment
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
MODELS = {"pocket-llama": 100_000, "smollm2-135m-instruct": 5_000}  # positions that are read
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
        "the plain loop of one text": lambda: read_plainly(plain, texts, 1),
        f"the plain loop of {BATCH} texts": lambda: read_plainly(plain, texts, BATCH),
    }
    best = dict.fromkeys(ways, 0.0)
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.perf_counter()
            best[name] = max(best[name], way() / (time.perf_counter() - began))
    return best


def tuned_lens_rate(model: str, texts: list[str], repeats: int) -> float:
    """Positions a second of tuned-lens, the best of the repeats, in its own process and environment."""
    request = json.dumps({"texts": texts, "repeats": repeats})
    command = [environment("tuned-lens"), str(RUNNER), "given", path_of(model)]
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def goals(found: dict[str, dict[str, Any]], rate: dict[str, float]) -> list[Goal]:
    """What is read is right and enough, and read faster than by others."""
    rows = []
    for name, one in found.items():
        shown = f"{one['differ']:,} of {one['top1']:,}; of {one['near_ties']:,} near ties {one['near_ties_differ']:,}"
        differ = f"{name}: best tokens that differ, where the two best are over {MARGIN:g} nats apart"
        rows += [
            goal(f"{name}: positions that were read", one["positions"], at_least=MODELS.get(name, 1)),
            goal(f"{name}: next tokens that are not the tokenizer's", one["other_tokens"], at_most=0),
            goal(differ, one["differ"], at_most=0, shown=shown),
            goal(
                f"{name}: largest difference of the next token's probability",
                one["largest_difference_of_probability"],
                at_most=NEAR,
            ),
        ]
    own, *others = rate.items()
    multiple = "positions a second, as a multiple of"
    return rows + [goal(f"{multiple} {name}", own[1] / other, at_least=1) for name, other in others]


def sample() -> dict[str, Any]:
    """A small part, computed again by the tests: best tokens of a middle layer, and places of near ties."""
    model = eelib.load_model("pocket-llama", dtype="float32", device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        task = Task.from_prompts(english()[:8], name="sample")
        made = eelib.trace(model, task, folder=folder, given=True, progress=False)
        middle = model.layers // 2
        near = np.flatnonzero(np.asarray(made["margin"])[:, middle] < MARGIN).tolist()
        return {"values": {"top1": np.asarray(made["top1"])[:, middle].tolist()}, "near_ties": near}


def main() -> None:
    """The command line."""
    parser = options(__doc__, "given")
    parser.add_argument("--models", nargs="+", default=[*MODELS], help="llama-like checkpoints: names or folders")
    parser.add_argument("--positions", type=int, help="positions that are read (100,000 and 5,000)")
    parser.add_argument("--repeats", type=int, default=2, help="timings of each way (2)")
    parser.add_argument("--no-peer", action="store_true", help="leave tuned-lens out")
    parser.add_argument("--runs", default="runs", help="where the trace lies, which is finished if it is half made")
    asked = parser.parse_args()
    head, found = headed("given", depends=(*TRACES, "checks/peers")), dict[str, dict[str, Any]]()
    for name in asked.models:
        model = eelib.load_model(name, dtype="float32", device="cpu")
        plain = Plain.load(path_of(name))
        texts = enough(english(), plain.tokenizer, asked.positions or MODELS.get(name, TIMED))
        task = Task.from_prompts(texts, name="english")
        trace = eelib.trace(model, task, folder=asked.runs, given=True)
        found[model.name], head["models"][model.name] = compared(plain, trace, task), model.hash
    texts = enough(texts, plain.tokenizer, TIMED)
    rate = rates(model, plain, texts, asked.repeats)
    if not asked.no_peer:
        rate["tuned-lens"] = tuned_lens_rate(asked.models[-1], texts, asked.repeats)
    finish(asked.output, head, goals(found, rate), sample=sample(), found=found, timed=model.name, rate=rate)
