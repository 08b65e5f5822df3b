"""What changes when sums are rounded otherwise: products of few rows beside torch's, bfloat16 beside float32.

Outputs that were decoded with our products are read once more with torch's, each in one pass: where torch's own best
token is another one, the two are a near tie, and by how much is noted. Then a task is traced in float32 and in
bfloat16, and exit layers are compared, token by token, as far as the two outputs are the same.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import eelib
from checks.products import BATCH, prompts_of
from checks.report import TRACES, Goal, finish, goal, headed, options
from eelib.common.tolerances import TOLERANCES
from eelib.models.model import Model
from eelib.tracing.decode import greedy_decode
from eelib.tracing.trace import Trace

MODEL, TASK, NEW_TOKENS = "smollm2-135m-instruct", "instructions/requests", 96
TIE = TOLERANCES[torch.float32].tie  # of logits, in nats
TOKENS, COMPARED = 20_000, 2000
SAMPLE = 2, 16  # texts and new tokens that are traced again by `make test-all`
NEAR = 1e-3  # of the two largest probabilities, below which a layer's best token may change


@torch.no_grad()
def other_tokens(ours: Model, plain: Model, tokens: int) -> dict[str, Any]:
    """How many tokens of ours are not torch's best after the same text, and torch's margins there."""
    prompts, read, outputs, margins = prompts_of(ours, 4 * BATCH * tokens // 1000), 0, 0, list[float]()
    for start in range(0, len(prompts), BATCH):
        some = prompts[start : start + BATCH]
        for prompt, ids in zip(some, greedy_decode(ours, some, NEW_TOKENS)):
            logits = plain.network(**plain.adapter.whole_inputs(prompt, ids)).logits[0, -len(ids) :].double()
            own = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
            less = logits.amax(-1) - own
            margins += less[less > 0].tolist()
            read, outputs = read + len(ids), outputs + 1
        print(f"{read:,} tokens, {len(margins)} others", flush=True)
        if read >= tokens:
            break
    return {"tokens": read, "outputs": outputs, "margins": sorted(margins)}


def between(one: Trace, other: Trace) -> dict[str, int]:
    """Outputs, tokens and exit layers of two traces of a task, as far as the outputs are the same."""
    same = dict.fromkeys(("outputs", "other_outputs", "tokens", "first", "stable", "top1s", "other_top1s"), 0)
    for sequence, rows in one.tokens.groupby("sequence").indices.items():
        others = other.tokens.groupby("sequence").indices[sequence]
        ids, found = (made.tokens["token_id"].to_numpy()[at] for made, at in ((one, rows), (other, others)))
        shared = min(len(ids), len(found))
        count = int(np.cumprod(ids[:shared] == found[:shared]).sum())
        same["outputs"] += 1
        same["other_outputs"] += not (count == len(ids) == len(found))
        same["tokens"] += count
        for name in ("first", "stable"):
            layers = one.exit_layer(name)[rows[:count]], other.exit_layer(name)[others[:count]]
            same[name] += int((layers[0] != layers[1]).sum())
        top1 = one["top1"][rows[:count]], other["top1"][others[:count]]
        same["top1s"] += top1[0].size
        same["other_top1s"] += int((top1[0] != top1[1]).sum())
    return same


def sample(model: Model | None = None) -> dict[str, Any]:
    """A small part, computed again by the tests: tokens and first exit layers, and places of near ties."""
    model, (texts, new) = model or eelib.load_model(MODEL, dtype="float32", device="cpu"), SAMPLE
    with tempfile.TemporaryDirectory() as folder:
        made = eelib.trace(model, eelib.load_task(TASK, limit=texts), new, folder, progress=False)
        values = {"tokens": made.tokens["token_id"].tolist(), "first": made.exit_layer("first").tolist()}
        near = np.flatnonzero((np.asarray(made["margin"]) < NEAR).any(axis=1)).tolist()
    return {"values": values, "near_ties": near}


def goals(products: dict[str, Any], dtypes: dict[str, int]) -> list[Goal]:
    """Enough tokens, and of our products none but near ties; what bfloat16 changes has no bound."""
    far = sum(margin > TIE for margin in products["margins"])
    worst = max(products["margins"], default=0.0)
    others = f"{len(products['margins'])} of {products['tokens']:,} tokens are others"
    shown = f"{far}; {others}, by {worst:.2g} nats at most"
    return [
        goal("tokens that were decoded with our products and read with torch's", products["tokens"], at_least=TOKENS),
        goal(f"tokens of ours that are over {TIE:g} nats below torch's best", far, at_most=0, shown=shown),
        goal("tokens that were compared in float32 and bfloat16", dtypes["tokens"], at_least=COMPARED),
    ]


def main() -> None:
    """The command line."""
    parser = options(__doc__, "arithmetic")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens that are decoded with our products (20,000)")
    parser.add_argument("--texts", type=int, default=60, help="texts that are traced in both dtypes (60)")
    asked = parser.parse_args()
    head = headed("arithmetic", depends=(*TRACES, "checks/products.py"))
    models = {dtype: eelib.load_model(MODEL, dtype=dtype, device="cpu") for dtype in ("float32", "bfloat16")}
    head["models"] = {MODEL: models["float32"].hash}
    products = other_tokens(
        models["float32"], eelib.load_model(MODEL, dtype="float32", device="cpu", fast_products=False), asked.tokens
    )
    with tempfile.TemporaryDirectory() as folder:
        task = eelib.load_task(TASK, limit=asked.texts)
        made = [eelib.trace(one, task, NEW_TOKENS, Path(folder) / dtype) for dtype, one in models.items()]
        dtypes = between(*made)
    part = sample(models["float32"])
    finish(asked.output, head, goals(products, dtypes), sample=part, products=products, dtypes=dtypes)
