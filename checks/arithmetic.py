"""Which tokens change when sums are rounded otherwise: products of few rows beside torch's.

Outputs that were decoded with our products are read once more with torch's, each in one pass: where torch's own best
token is another one, the two are a near tie, and by how much is noted.
"""

from typing import Any

import torch

import eelib
from checks.products import BATCH, prompts_of
from checks.report import TRACES, Goal, finish, goal, headed, options
from eelib.common.tolerances import TOLERANCES
from eelib.models.model import Model
from eelib.tracing.decode import greedy_decode

MODEL, NEW_TOKENS = "smollm2-135m-instruct", 96
TIE = TOLERANCES[torch.float32].tie  # of logits, in nats
TOKENS = 20_000


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


def goals(products: dict[str, Any]) -> list[Goal]:
    """Enough tokens, and none of ours is another but in a near tie."""
    far = sum(margin > TIE for margin in products["margins"])
    worst = max(products["margins"], default=0.0)
    others = f"{len(products['margins'])} of {products['tokens']:,} tokens are others"
    shown = f"{far}; {others}, by {worst:.2g} nats at most"
    return [
        goal("tokens that were decoded with our products and read with torch's", products["tokens"], at_least=TOKENS),
        goal(f"tokens of ours that are over {TIE:g} nats below torch's best", far, at_most=0, shown=shown),
    ]


def main() -> None:
    """The command line."""
    parser = options(__doc__, "arithmetic")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens that are decoded with our products (20,000)")
    asked = parser.parse_args()
    head = headed("arithmetic", depends=(*TRACES, "checks/products.py"))
    ours, plain = (eelib.load_model(MODEL, dtype="float32", device="cpu", fast_products=fast) for fast in (True, False))
    head["models"] = {MODEL: ours.hash}
    products = other_tokens(ours, plain, asked.tokens)
    finish(asked.output, head, goals(products), products=products)
