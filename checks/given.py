"""Whether texts that are read as they are (`given=True`) are read right.

Texts of data/texts are traced, and read once more by transformers alone: one text after another, the hidden states of
all layers, the final norm and the head written out here. At every position and layer both must have the same best
token, but where the two best of the independent run are within a thousandth of a nat, which rounding explains.
`checks.trace_speed` times the reader.
"""

import tempfile
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import eelib
from checks.report import TRACES, Goal, finish, goal, headed, options
from eelib.common.files import data_folder
from eelib.models.checkpoint import path_of
from eelib.tasks.sources import read_rows
from eelib.tasks.task import Task

MODELS = {"pocket-llama": 100_000, "smollm2-135m-instruct": 5_000}  # positions that are read
MARGIN = 1e-3  # nats between the two best tokens, above which rounding explains no other best one
NEAR = 1e-4  # of probabilities


def texts_of(tokenizer: Any, positions: int) -> list[str]:
    """Texts of data/texts that together have so many positions which predict a token; all, where they have fewer."""
    rows = (row for file in sorted(data_folder("texts").rglob("*.jsonl")) for _, row in read_rows(file))
    texts = list(dict.fromkeys(text for row in rows for text in row.values() if isinstance(text, str) and " " in text))
    counts = accumulate(len(ids) - 1 for ids in tokenizer(texts)["input_ids"])
    return texts[: next((number for number, count in enumerate(counts, 1) if count >= positions), len(texts))]


def logits_of(network: Any, ids: list[int]) -> Iterator[Tensor]:
    """Of a llama-like network that reads a text: the logits of layers 0 to L, [tokens, vocab_size] each."""
    states = network.model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    for layer, state in enumerate(states):
        if layer < len(states) - 1:  # transformers gives the last one normed
            spread = state.pow(2).mean(-1, keepdim=True) + network.config.rms_norm_eps
            state = network.model.norm.weight * state * spread.rsqrt()
        yield state[0] @ network.lm_head.weight.T


@torch.no_grad()
def compared(
    network: Any, tokenizer: Any, task: Task, tokens: pd.DataFrame, top1: np.ndarray, share: np.ndarray
) -> dict[str, Any]:
    """How the tokens of a trace, its best tokens, and the next ones' probabilities differ from the independent run."""
    found = dict.fromkeys(("positions", "other_tokens", "top1", "differ", "near_ties", "near_ties_differ"), 0)
    worst = 0.0
    for sequence, rows in tokens.groupby("sequence").indices.items():
        ids = tokenizer(task.prompts[int(sequence)])["input_ids"]
        following = torch.tensor(ids[1:])
        found["positions"] += len(rows)
        found["other_tokens"] += int((tokens["token_id"].to_numpy()[rows] != following.numpy()).sum())
        for layer, logits in enumerate(logits_of(network, ids[:-1])):
            best = logits.topk(2)
            other = best.indices[:, 0].numpy() != top1[rows, layer]
            close = (best.values[:, 0] - best.values[:, 1]).numpy() <= MARGIN
            own = (logits.gather(1, following[:, None])[:, 0] - logits.logsumexp(-1)).exp().numpy()
            worst = float(np.maximum(worst, np.abs(own - share[rows, layer]).max()))  # NaN stays
            found["top1"] += len(close)
            for name, where in (("differ", other & ~close), ("near_ties", close), ("near_ties_differ", other & close)):
                found[name] += int(where.sum())
    return found | {"largest_difference_of_probability": worst}


def goals(found: dict[str, dict[str, Any]]) -> list[Goal]:
    rows = []
    for name, one in found.items():
        ties = f"{one['near_ties_differ']:,} of {one['near_ties']:,} near ties differ"
        shown = f"{one['differ']:,} of {one['top1']:,}; {ties}"
        differ = f"{name}: best tokens that differ where the two best are more than {MARGIN:g} nats apart"
        worst = one["largest_difference_of_probability"]
        rows += [
            goal(f"{name}: positions that were read", one["positions"], at_least=MODELS.get(name, 1)),
            goal(f"{name}: next tokens that differ from the tokenizer's", one["other_tokens"], at_most=0),
            goal(differ, one["differ"], at_most=0, shown=shown),
            goal(f"{name}: largest difference of the next token's probability", worst, at_most=NEAR),
        ]
    return rows


def sample() -> dict[str, Any]:
    """A small part, computed again by the tests: best tokens of a middle layer, and places of near ties."""
    model = eelib.load_model("pocket-llama", dtype="float32", device="cpu")
    task, middle = Task.from_prompts(texts_of(model.tokenizer, 100), name="sample"), model.layers // 2
    with tempfile.TemporaryDirectory() as folder:
        made = eelib.trace(model, task, folder=folder, given=True, progress=False)
        near = np.flatnonzero(np.asarray(made["margin"])[:, middle] < MARGIN).tolist()
        return {"values": {"top1": np.asarray(made["top1"])[:, middle].tolist()}, "near_ties": near}


def main() -> None:
    asked = options(__doc__, "given").parse_args()
    head, found = headed("given", depends=TRACES), dict[str, dict[str, Any]]()
    for name, positions in MODELS.items():
        model = eelib.load_model(name, dtype="float32", device="cpu")
        network = AutoModelForCausalLM.from_pretrained(path_of(name), dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(path_of(name))
        task = Task.from_prompts(texts_of(tokenizer, positions), name="texts")
        with tempfile.TemporaryDirectory() as folder:
            trace = eelib.trace(model, task, folder=folder, given=True)
            readouts = trace["top1"], trace["reference_probability"]
            found[model.name] = compared(network, tokenizer, task, trace.tokens, *readouts)
            head["models"][model.name] = model.hash
    finish(asked.output, head, goals(found), sample=sample(), found=found)
