"""Products of few rows: how much faster a model decodes with them on this CPU.

The same prompts are decoded with transformers' generate in float32 and in bfloat16 and with ours, in turns, one prompt
at a time and 16 together. `checks.arithmetic` counts the tokens that change.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch

import eelib
from checks.report import TRACES, Goal, finish, goal, headed, options
from eelib.exits.decoding.generate import encoded
from eelib.models.model import Model
from eelib.tasks.task import Task
from eelib.tracing.decode import greedy_decode

BATCH, THREADS, REPEATS, NEW_TOKENS = 16, (1, 2), 3, 64
LEAST = {  # (batch, what ours is compared with): how many times as fast ours has to be
    (1, "float32"): 2.5,
    (1, "bfloat16"): 2.0,
    (BATCH, "float32"): 1.5,
}
ASKED = (
    "Explain in two sentences what {} is.",
    "Write three lines about {} for a child of ten.",
    "Name one thing that most people get wrong about {}.",
    "Give me a short plan for a lesson on {}.",
    "Which question about {} would you ask an expert?",
    "Tell a very short story in which {} is important.",
    "How would you describe {} to somebody from another century?",
    "List four words that belong to {}, and say why.",
)
ABOUT = ("the tide", "a bicycle", "bread", "a library", "winter", "a bridge", "salt", "a market day")


def task_of(model: Model, count: int) -> Task:
    """So many prompts, in the chat template where the model has one."""
    texts = [question.format(subject) for question, subject in product(ASKED, ABOUT)]
    rounds = -(-count // len(texts))
    texts = [f"{text}{' Be brief.' * turn}" for turn in range(rounds) for text in texts][:count]
    return Task.from_prompts(texts, chat=bool(model.tokenizer.chat_template))


def prompts_of(model: Model, count: int) -> list[list[int]]:
    """Token ids of so many prompts."""
    return encoded(model, task_of(model, count))


def loaded(name: str, **settings: Any) -> Model:
    """The model without end tokens, so that each way writes equally many tokens."""
    model = eelib.load_model(name, device="cpu", **settings)
    model.network.generation_config.eos_token_id = model.vocab_size  # no token has this number
    return model


def generated(model: Model, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """What transformers' own greedy generate writes."""
    ids, mask = model.adapter.pad(prompts)
    options = {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": model.pad_id}
    network: Any = model.network
    written: list[list[int]] = network.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :].tolist()
    return written


def timed(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each way, in turns; one run before is not counted."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeats + 1):
        for way, run in ways.items():
            begin = time.perf_counter()
            run()
            if turn:
                seconds[way].append(time.perf_counter() - begin)
    return seconds


def goals(rows: list[dict]) -> list[Goal]:
    """How many times as fast ours has to be, by the medians."""
    found = []
    for row in rows:
        middle = {way: statistics.median(seconds) for way, seconds in row["seconds"].items()}
        for (batch, dtype), least in LEAST.items():
            if batch == row["batch"]:
                name = f"times as fast as generate in {dtype}, batch {batch}, {row['threads']} threads"
                found.append(goal(name, middle[dtype] / middle["ours"], at_least=least))
    return found


def main() -> None:
    """The command line."""
    parser = options(__doc__, "products")
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct", help="name, folder or hub id of a decoder")
    asked = parser.parse_args()
    head, rows = headed("products", "numba", depends=(*TRACES, "eelib/exits/decoding/generate.py")), []
    ours = loaded(asked.model)
    theirs = [loaded(asked.model, dtype=dtype, fast_products=False) for dtype in ("float32", "bfloat16")]
    prompts = prompts_of(ours, BATCH)
    for threads, batch in product(THREADS, (1, BATCH)):
        torch.set_num_threads(threads)
        ways = {model.dtype: partial(generated, model, prompts[:batch], NEW_TOKENS) for model in theirs}
        ways["ours"] = partial(greedy_decode, ours, prompts[:batch], NEW_TOKENS)
        rows.append({"threads": threads, "batch": batch, "seconds": timed(ways, REPEATS)})
        print(rows[-1], flush=True)
    head["models"] = {ours.name: ours.hash}
    head["machine"] |= {"instructions": torch.backends.cpu.get_cpu_capability()}
    finish(asked.output, head, goals(rows), rows=rows)
