"""Products of few rows: how much faster a model decodes on this CPU, and which tokens change with them.

All prompts are decoded with and without our products, then some with transformers' generate in float32 and in bfloat16
and with ours, in turns, one prompt at a time and 16 together.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

import eelib
from checks.report import Goal, finish, goal, headed, options
from eelib.common.tolerances import TOLERANCES
from eelib.models.model import Model
from eelib.tracing.decode import greedy_decode

TIE = TOLERANCES[torch.float32].tie
BATCH = 16
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


def prompts_of(model: Model, count: int) -> list[list[int]]:
    """Token ids of so many prompts, in the chat template where the model has one."""
    texts = [question.format(subject) for question, subject in product(ASKED, ABOUT)]
    rounds = -(-count // len(texts))
    texts = [f"{text}{' Be brief.' * turn}" for turn in range(rounds) for text in texts][:count]
    return model.encode(texts, chat=bool(getattr(model.tokenizer, "chat_template", None)))


def endless(model: Model) -> Model:
    """The model without end tokens, so that each way writes equally many tokens."""
    model.network.generation_config.eos_token_id = model.vocab_size  # no token has this number
    return model


def generated(model: Model, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """What transformers' own greedy generate writes."""
    ids, mask = model.adapter.pad(prompts)
    options = {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": model.pad_id}
    network: Any = model.network
    written: list[list[int]] = network.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :].tolist()
    return written


def timed(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each way, in turns; one run before is not counted."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeats + 1):
        for way, run in ways.items():
            begin = time.perf_counter()
            run()
            if turn:
                seconds[way].append(time.perf_counter() - begin)
    return seconds


def speeds(models: dict[str, Model], prompts: list[list[int]], asked: argparse.Namespace) -> list[dict]:
    """Seconds of ours and of transformers' generate, for each number of threads and batch."""
    rows = []
    for threads, batch in product(asked.threads, (1, BATCH)):
        torch.set_num_threads(threads)
        some, new = prompts[:batch], asked.new_tokens
        ways: dict[str, Callable[[], object]] = {
            dtype: partial(generated, models[dtype], some, new) for dtype in ("float32", "bfloat16")
        }
        ways["ours"] = partial(greedy_decode, models["ours"], some, new)
        rows.append({"threads": threads, "batch": batch, "seconds": timed(ways, asked.repeats)})
        print(rows[-1], flush=True)
    return rows


def differences(ours: Model, plain: Model, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Where greedy decoding with and without our products first differs, and how near the two logits were there."""
    compared, margins = 0, []
    for start in range(0, len(prompts), BATCH):
        some = prompts[start : start + BATCH]
        pairs = zip(some, greedy_decode(ours, some, new_tokens), greedy_decode(plain, some, new_tokens))
        for prompt, mine, theirs in pairs:
            same = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), None)
            compared += len(mine) if same is None else same + 1
            if same is not None:
                margins.append(margin(plain, prompt, theirs[:same], mine[same], theirs[same]))
    return {"compared": compared, "margins": margins}


@torch.no_grad()
def margin(plain: Model, prompt: list[int], before: list[int], mine: int, theirs: int) -> float:
    """By how much torch's logit of its token is above that of ours, after the prompt and what both wrote."""
    logits = plain.network(**plain.adapter.whole_inputs(prompt, [*before, theirs])).logits[0, -1].double()
    return float(logits[theirs] - logits[mine])


def goals(tokens: dict[str, Any], rows: list[dict]) -> list[Goal]:
    """No token may differ but in a tie; how many times as fast ours has to be, by the medians."""
    far, compared = sum(abs(value) > TIE for value in tokens["margins"]), tokens["compared"]
    name = f"first differences in tokens whose logits are over {TIE:g} apart"
    shown = f"{far} of {len(tokens['margins'])} differences in {compared:,} tokens"
    found = [goal(name, far if compared else 1, at_most=0, shown=shown)]
    for row in rows:
        for (batch, dtype), least in LEAST.items():
            if batch == row["batch"]:
                ratio = statistics.median(row["seconds"][dtype]) / statistics.median(row["seconds"]["ours"])
                name = f"times as fast as generate in {dtype}, batch {batch}, {row['threads']} threads"
                found.append(goal(name, ratio, at_least=least))
    return found


def main() -> None:
    """The command line."""
    parser = options(__doc__, "products")
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct", help="name, folder or hub id of a decoder")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads (1 2)")
    parser.add_argument("--repeats", type=int, default=5, help="counted runs of each way (5); 0: tokens alone")
    parser.add_argument("--new-tokens", type=int, default=64, help="length of each output (64)")
    parser.add_argument("--prompts", type=int, default=64, help="prompts that are decoded with and without (64)")
    asked = parser.parse_args()
    if min(*asked.threads, asked.new_tokens, asked.prompts) < 1 or asked.repeats < 0:
        parser.error("threads, new tokens and prompts must be at least 1, repeats at least 0")
    head = headed("products", "numba", depends=("eelib/common", "eelib/models", "eelib/tracing"))
    models = {
        "ours": endless(eelib.load_model(asked.model, device="cpu")),
        "float32": endless(eelib.load_model(asked.model, device="cpu", fast_products=False)),
    }
    prompts = prompts_of(models["ours"], max(BATCH, asked.prompts))
    tokens = differences(models["ours"], models["float32"], prompts[: asked.prompts], asked.new_tokens)
    rows = []
    if asked.repeats:
        models["bfloat16"] = endless(eelib.load_model(asked.model, dtype="bfloat16", device="cpu"))
        rows = speeds(models, prompts, asked)
    head["models"] = {models["ours"].name: models["ours"].hash}
    head["machine"] |= {"instructions": torch.backends.cpu.get_cpu_capability()}
    finish(asked.output, head, goals(tokens, rows), tokens=tokens, rows=rows)
