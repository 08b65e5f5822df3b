"""Which tokens change when sums are rounded otherwise: products of few rows beside torch's, and drafts beside none.

Outputs that were decoded with our products are read once more with torch's, each in one pass: where torch's own best
token is another one, the two are a near tie, and by how much is noted. Our products multiply as many rows at most as
was found to pay when the model was loaded; the check fails where a batch has more. The same prompts are decoded with
each way to draft, whether it pays or not. All tokens have to be plain decoding's.
"""

from typing import Any

import torch

import eelib
from checks.products import BATCH, task_of
from checks.race import drafts_of, first_difference, ours
from checks.report import TRACES, Goal, all_of, finish, goal, headed, options
from eelib.common.tolerances import TOLERANCES
from eelib.exits.decoding.generate import encoded
from eelib.models.model import Model
from eelib.models.products import FewRows
from eelib.tracing.decode import greedy_decode

MODEL, NEW_TOKENS, TOKENS = "smollm2-135m-instruct", 96, 20_000
TIE = TOLERANCES[torch.float32].tie  # of logits, in nats
LEAST_DRAFTED = 100  # tokens that each way has to draft, so that some are right and some are wrong
DRAFTED = 2  # tokens of each sequence that are drafted before they are verified
NEAR = 1e-3  # of the two best logits, below which a token of the sample may be another one elsewhere


def rows_limit(model: Model) -> int:
    """The largest number of rows that our products multiply in this model; 0 where it has none of ours."""
    ways = [vars(layer).get("forward") for layer in model.network.modules()]
    return max((way.limit for way in ways if isinstance(way, FewRows)), default=0)


@torch.no_grad()
def read_again(
    fast: Model, plain: Model, prompts: list[list[int]], new: int
) -> tuple[list[int], list[float], list[float]]:
    """Tokens that a batch decodes with our products, and of torch's logits after the same texts: how far each token is
    below the best one, and the second best one.
    """
    tokens, below, apart = list[int](), list[float](), list[float]()
    for prompt, ids in zip(prompts, greedy_decode(fast, prompts, new)):
        logits = plain.network(**plain.adapter.whole_inputs(prompt, ids)).logits[0, -len(ids) :].double()
        best, second = logits.topk(2).values.T
        tokens += ids
        below += (best - logits.gather(1, torch.tensor(ids)[:, None])[:, 0]).tolist()
        apart += (best - second).tolist()
    return tokens, below, apart


def other_tokens(fast: Model, plain: Model, tokens: int) -> dict[str, Any]:
    """How many tokens of ours are not torch's best after the same text, and by how much."""
    found: dict[str, Any] = {"batch": BATCH, "rows_limit": rows_limit(fast), "texts": 0, "tokens": 0, "margins": []}
    prompts = encoded(fast, task_of(fast, 4 * BATCH * tokens // 1000))
    for start in range(0, len(prompts), BATCH):
        ids, below, _ = read_again(fast, plain, prompts[start : start + BATCH], NEW_TOKENS)
        found["tokens"] += len(ids)
        found["texts"] = min(start + BATCH, len(prompts))
        found["margins"] += [margin for margin in below if margin > 0]
        print(f"{found['tokens']:,} tokens, {len(found['margins'])} others", flush=True)
        if found["tokens"] >= tokens:
            break
    return found | {"margins": sorted(found["margins"])}


def drafted(model: Model, texts: int) -> list[dict[str, Any]]:
    """Of each way to draft: tokens, drafts, and outputs that are plain decoding's; of others, the margin of the token
    in which they differ first.
    """
    task, rows = task_of(model, texts), list[dict[str, Any]]()
    prompts = encoded(model, task)
    _, expected, _ = ours(model, None, NEW_TOKENS)(task, BATCH)
    for draft in drafts_of(model, max(1, model.layers * 5 // 6))[1:]:  # "auto" is one of them
        _, outputs, known = ours(model, draft, NEW_TOKENS, DRAFTED)(task, BATCH)
        margins = [first_difference(model, *three) for three in zip(prompts, expected, outputs) if three[1] != three[2]]
        row = {"draft": draft, "tokens": sum(map(len, outputs)), "texts": texts, "texts_equal": texts - len(margins)}
        rows.append(row | {name: sum(known[name]) for name in ("drafted", "accepted")} | {"margins": margins})
        print(rows[-1], flush=True)
    return rows


def goals(found: dict[str, Any]) -> list[Goal]:
    """Our products multiplied the batches, enough tokens were read, and none is another but in a near tie; no draft
    changes an output.
    """
    far, drafts = sum(margin > TIE for margin in found["margins"]), found["drafts"]
    others = f"{len(found['margins'])} of {found['tokens']:,} tokens differ from torch's"
    shown = f"{far}; {others}, by {max(found['margins'], default=0.0):.2g} nats at most"
    less_likely = f"tokens of ours that are more than {TIE:g} nats less likely than torch's best token"
    fewest = min((row["drafted"] for row in drafts), default=0)
    rows = [
        goal(f"rows that our products multiply at once, for batches of {BATCH}", found["rows_limit"], at_least=BATCH),
        goal("tokens decoded with our products and compared with torch's", found["tokens"], at_least=TOKENS),
        goal(less_likely, far, at_most=0, shown=shown),
        goal("tokens that each way drafted", fewest, at_least=LEAST_DRAFTED),
    ]
    for row in drafts:
        accepted = f"{row['tokens']:,} tokens, {row['accepted']:,} of {row['drafted']:,} drafts accepted"
        name = f"outputs with draft={row['draft']!r} that equal those of plain decoding ({accepted})"
        rows.append(all_of(name, row["texts_equal"], row["texts"]))
    return rows


def both() -> tuple[Model, Model]:
    """The model with our products and with torch's."""
    fast, plain = (eelib.load_model(MODEL, dtype="float32", device="cpu", fast_products=own) for own in (True, False))
    return fast, plain


def sample(models: tuple[Model, Model] | None = None) -> dict[str, Any]:
    """A small part, computed again by the tests: tokens of two outputs, and places of near ties."""
    fast, plain = models or both()
    ids, _, apart = read_again(fast, plain, encoded(fast, task_of(fast, 2)), 24)
    return {"values": {"tokens": ids}, "near_ties": [place for place, by in enumerate(apart) if by < NEAR]}


def main() -> None:
    """The command line."""
    asked = options(__doc__, "arithmetic").parse_args()
    head = headed("arithmetic", "numba", depends=(*TRACES, "eelib/exits", "checks/products.py", "checks/race.py"))
    models = both()
    head["models"] = {MODEL: models[0].hash}
    found = other_tokens(*models, TOKENS)
    found["drafts"] = drafted(models[0], found["texts"])
    finish(asked.output, head, goals(found), sample=sample(models), found=found)
