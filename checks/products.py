"""Products of few rows: how much faster a model decodes with them on this CPU.

The same prompts are decoded with transformers' generate in float32 and in bfloat16 and with ours, in turns, one prompt
at a time and 16 together. `checks.arithmetic` counts the tokens that change.
"""

import statistics
from itertools import product
from typing import Any

import torch

import eelib
from checks.race import ours, theirs
from checks.report import TRACES, Goal, finish, goal, headed, options
from eelib.models.model import Model
from eelib.tasks.task import Task

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


def loaded(name: str, **settings: Any) -> Model:
    """The model without end tokens, so that each way writes equally many tokens."""
    model = eelib.load_model(name, device="cpu", **settings)
    model.network.generation_config.eos_token_id = model.vocab_size  # no token has this number
    return model


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
    head, rows = headed("products", "numba", depends=(*TRACES, "eelib/exits", "checks/race.py")), []
    model = loaded(asked.model)
    plain = [loaded(asked.model, dtype=dtype, fast_products=False) for dtype in ("float32", "bfloat16")]
    ways = {one.dtype: theirs(one, NEW_TOKENS) for one in plain} | {"ours": ours(model, None, NEW_TOKENS)}
    for threads, batch in product(THREADS, (1, BATCH)):
        torch.set_num_threads(threads)
        task, seconds = task_of(model, batch), dict[str, list[float]]()
        for turn in range(REPEATS + 1):  # the first one is not counted
            for way, run in ways.items():
                took, _, _ = run(task, batch)
                seconds[way] = [*seconds[way], took] if turn else []
        rows.append({"threads": threads, "batch": batch, "seconds": seconds})
        print(rows[-1], flush=True)
    head["models"] = {model.name: model.hash}
    head["machine"] |= {"instructions": torch.backends.cpu.get_cpu_capability()}
    finish(asked.output, head, goals(rows), rows=rows)
