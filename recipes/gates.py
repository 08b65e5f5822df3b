"""The recipe of the trained gates of one model, which stays as it is: python -m recipes gates --model NAME."""

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import functional as F

from eelib.common.errors import InputError
from eelib.common.files import data_folder
from eelib.exits.gates.state import TRAINED, Network, checked, save_gate
from eelib.models.model import Model, load_model
from recipes.corpora import SEED
from recipes.gate_states import PARTS_ASKED, States, prompts_of, take_states


@dataclass(frozen=True)
class Fitting:
    """How a gate is fitted: AdamW, `batch` tokens a step, each at all its layers, for so many epochs.

    `loss`: "balanced", cross-entropy with classes weighted to the same sum (CALM's; M's text says so, too), or
    "adjusted", on logits that have the logarithm of their class's frequency added (M's code). Of the `tokens` that are
    decoded a fifth is held out, so 8,000 are learned from: 7 to 10 thousand are published, as are epochs and rate. The
    size of a batch is ours. `normed`: on states after the final norm; published are the states themselves. On the
    pocket models normed states learn more, and with them a rate of 1e-3 again; the published ones are the defaults.
    """

    loss: str = "balanced"
    tokens: int = 10_000
    epochs: int = 5
    rate: float = 1e-4
    batch: int = 32
    normed: bool = False
    seed: int = SEED

    def __post_init__(self) -> None:
        if self.loss not in ("balanced", "adjusted"):
            raise InputError(f"loss {self.loss!r} is not known; allowed: balanced, adjusted")
        if min(self.tokens, self.epochs, self.batch) < 1 or not self.rate > 0:
            raise InputError(
                f"{self.tokens} tokens, {self.epochs} epochs, batches of {self.batch}, rate {self.rate} are not "
                "allowed; they must be positive"
            )


def loss_of(logits: Tensor, agrees: Tensor, frequency: Tensor, kind: str) -> Tensor:
    """Of logits [n, 2] and labels bool [n]; `frequency` [2] is that of each class in all of the training."""
    if kind == "balanced":
        return F.cross_entropy(logits, agrees.long(), weight=0.5 / frequency)
    return F.cross_entropy(logits + frequency.log(), agrees.long())


def fit(network: Network, taken: States, how: Fitting) -> list[float]:
    """Train a network in place; returns the mean loss of each epoch. InputError where the labels are all alike."""
    labels = taken.agrees[:, network.first - 1 :]
    share = float(labels.float().mean()) if labels.numel() else 0.0
    if not 0 < share < 1:
        raise InputError(
            f"of {labels.numel()} layers of tokens from layer {network.first} on a share of {share:g} agree with the "
            "last; a gate can be trained where some do and some do not"
        )
    device = next(network.parameters()).device
    frequency = torch.tensor([1 - share, share], device=device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=how.rate)
    generator = torch.Generator().manual_seed(how.seed)
    curve = []
    for _ in range(how.epochs):
        total = 0.0
        for rows in torch.randperm(len(labels), generator=generator).split(how.batch):
            logits = network(taken.states[rows].to(device).float())
            loss = loss_of(logits.flatten(0, 1), labels[rows].to(device).flatten(), frequency, how.loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(rows)
        curve.append(total / len(labels))
    return curve


@torch.no_grad()
def accuracy(network: Network, held: States) -> dict[str, Any]:
    """On held-out tokens, end tokens left out: mean share (0-100) of both classes that is told right at 0.5, area
    under the ROC curve (0-100), of all layers and of each; None where there is one class only, or no answer.
    """
    real, device = ~held.ends, next(network.parameters()).device
    logits = torch.cat([network(part.to(device).float()).cpu() for part in held.states[real].split(1024)])
    scores, agrees = logits.softmax(-1)[..., 1], held.agrees[real]
    answered = agrees[:, network.first - 1 :]
    pairs = list(zip(scores.T, answered.T))
    nothing = [None] * (network.first - 1)
    return {
        "tokens": int(real.sum()),
        "agree by layer": [round(100 * share, 1) for share in agrees.float().mean(0).tolist()],
        "balanced": balanced(scores.flatten(), answered.flatten()),
        "balanced by layer": nothing + [balanced(*pair) for pair in pairs],
        "area": area(scores.flatten(), answered.flatten()),
        "area by layer": nothing + [area(*pair) for pair in pairs],
    }


def balanced(scores: Tensor, agrees: Tensor) -> float | None:
    """Mean of the shares of either class that lie on their side of 0.5, 0-100."""
    if agrees.all() or not agrees.any():
        return None
    right = (scores > 0.5) == agrees
    return round(50 * float(right[agrees].float().mean() + right[~agrees].float().mean()), 1)


def area(scores: Tensor, agrees: Tensor) -> float | None:
    """Area under the ROC curve, 0-100."""
    return None if agrees.all() or not agrees.any() else round(100 * float(roc_auc_score(agrees, scores)), 1)


@torch.no_grad()
def normed(model: Model, taken: States) -> States:
    """The same with the states after the final norm."""
    parts = [model.unembed.normed(part.to(model.device).flatten(0, 1)).cpu() for part in taken.states.split(1024)]
    return taken._replace(states=torch.cat(parts).view(taken.states.shape))


def train_gate(
    model: Model, name: str, taken: States, how: Fitting, out: Path, origin: dict[str, Any], **parameters: bool
) -> dict[str, Any]:
    """Fit one gate, measure it on the texts held out, and write it to `out`; returns its accuracy."""
    kind = checked(name, parameters)
    training, held = (normed(model, part) if how.normed else part for part in taken.split())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(how.seed)
        network = kind.build(model.hidden_size, **parameters).to(model.device)
    curve = fit(network, training, how)
    network.half().float()  # so the file is half as large, and holds what was measured
    found = accuracy(network, held)
    gate = kind.of(network, model.name, normed=how.normed, **parameters)
    card = {
        **origin,
        "recipe": asdict(how),
        "tokens": len(training.ends),
        "loss by epoch": [round(loss, 4) for loss in curve],
        "held out": found,
        "date": time.strftime("%Y-%m-%d"),
    }
    save_gate(gate, out, model, card, **parameters)
    return found


def run(
    model: Model, tasks: str, corpora: Path | None, out: Path, work: Path, how: Fitting, names: list[str]
) -> dict[str, dict]:
    """Train the named gates ("lstm as-published" is M's code's) for a model and write them; returns their accuracy."""
    _ = model.writer  # a model that only reads is refused in one line
    wanted = [gate_asked(name) for name in names]
    taken = take_states(model, prompts_of(model, tasks, corpora, work, how.tokens), how.tokens)
    found = {}
    for asked, (name, parameters) in zip(names, wanted):
        found[asked] = train_gate(model, name, taken, how, out, {"texts": tasks}, **parameters)
        print(f"{model.name} {asked}: balanced accuracy {found[asked]['balanced']}, area {found[asked]['area']}")
    return found


def gate_asked(name: str) -> tuple[str, dict[str, bool]]:
    """A gate's name and its parameters, of the name that its file has."""
    bare, _, more = name.strip().partition("-")
    parameters = {more.replace("-", "_"): True} if more else {}
    checked(bare, parameters)
    return bare, parameters


def main(arguments: list[str]) -> None:
    """Train gates for a model, which stays as it is, on what it says to training texts, and write them with cards."""
    usual = Fitting()
    parser = argparse.ArgumentParser(prog="python -m recipes gates", description=main.__doc__)
    parser.add_argument("--model", required=True, help="a shipped name, a local folder or a hub id")
    parser.add_argument("--corpora", type=Path, help="folder of the public corpora, where --tasks names parts of them")
    parser.add_argument(
        "--tasks",
        default=PARTS_ASKED,
        help=f"training texts: parts of the corpora, or local task files (default: {PARTS_ASKED})",
    )
    parser.add_argument("--out", type=Path, help="where the gates go (default: data/gates/MODEL)")
    parser.add_argument("--work", type=Path, help="texts that take long to make (default: checkpoints/gates)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--gates", default=",".join(TRAINED), help="which, several with commas; lstm-as-published is M's code's LSTM"
    )
    parser.add_argument("--loss", default=usual.loss, choices=("balanced", "adjusted"), help="CALM's or M's code's")
    parser.add_argument("--normed", action="store_true", help="on states after the final norm")
    parser.add_argument("--tokens", type=int, default=usual.tokens, help=f"to decode (default: {usual.tokens})")
    parser.add_argument("--epochs", type=int, default=usual.epochs, help=f"default: {usual.epochs}")
    parser.add_argument("--rate", type=float, default=usual.rate, help=f"learning rate (default: {usual.rate})")
    given = parser.parse_args(arguments)
    if given.corpora is not None and not given.corpora.is_dir():
        parser.error(f"--corpora {given.corpora} is not a folder")
    try:
        how = Fitting(given.loss, given.tokens, given.epochs, given.rate, normed=given.normed)
        model = load_model(given.model, device=given.device)
        out, work = given.out or data_folder("gates", model.name), given.work or Path("checkpoints/gates")
        run(model, given.tasks, given.corpora, out, work, how, given.gates.split(","))
    except InputError as error:
        parser.error(str(error))
