"""The recipe of the trained gates of one model, which stays as it is: python -m recipes gates --model NAME.

They learn from states of the model while it decodes training texts, and from where each layer knew the token.
"""

import argparse
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from eelib.common.errors import InputError
from eelib.common.files import data_folder
from eelib.exits.gates.state import TRAINED, Network, checked, save_gate
from eelib.models.model import Model, load_model
from eelib.tasks.task import load_task
from eelib.tracing.decode import greedy_decode, states_of
from recipes.own_outputs import read_texts
from recipes.texts import PARTS, SEED, SEEN, alone, shipped_texts

PARTS_ASKED = "translation,captions,reading,headlines"  # of the corpora, where no tasks are named
LONGEST, AT_ONCE, AHEAD = 128, 32, 8  # tokens of an output; prompts that are decoded together; batches made at once
HELD_OUT = 5  # one output in so many


class States(NamedTuple):
    """Of n tokens at layers 1..L-1, in the model's own greedy outputs.

    `states`: [n, L-1, hidden_size], before the final norm. `agrees`: bool [n, L-1], whether the layer's top-1 is the
    token that layer L emits. `ends`: bool [n], end tokens. `output`: int64 [n], which output a token is of.
    """

    states: Tensor
    agrees: Tensor
    ends: Tensor
    output: Tensor

    def split(self) -> tuple["States", "States"]:
        """(training, held out) by output."""
        held = self.output % HELD_OUT == HELD_OUT - 1
        return States(*(part[~held] for part in self)), States(*(part[held] for part in self))


def states_and_labels(model: Model, prompts: list[list[int]], outputs: list[list[int]], first: int) -> States:
    """Those of the model's own outputs, which are numbered from `first` on."""
    states = states_of(model, prompts, outputs)[0][:, 1:-1]
    ids = [token for output in outputs for token in output]
    top1 = torch.stack([model.unembed(states[:, layer]).argmax(-1) for layer in range(states.shape[1])], dim=1)
    numbers = [first + number for number, output in enumerate(outputs) for _ in output]
    ends = torch.tensor([token in model.eos_ids for token in ids])
    return States(states.cpu(), top1.cpu() == torch.tensor(ids)[:, None], ends, torch.tensor(numbers))


def own_outputs(model: Model, prompts: list[list[int]]) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """(prompts, the model's greedy outputs to them), batch after batch."""
    for batch in batches_of(prompts, AT_ONCE if model.pads else 1):
        yield batch, greedy_decode(model, batch, LONGEST)


def known_outputs(folder: Path) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """The same of outputs that the model gave before, which `recipes.own_outputs` keeps; InputError for none.

    Those of a file come in a random order: their tasks come in turn, and every fifth output is held out.
    """
    files = sorted(folder.glob("training-*.safetensors"))
    if not files:
        raise InputError(f"{folder} has no outputs of a model to training prompts: no file training-*.safetensors")
    for file in files:
        texts = read_texts(file)
        for text in random.Random(SEED).sample(texts, len(texts)):
            yield [text.ids[: text.start].tolist()], [text.output.tolist()]


def take_states(model: Model, batches: Iterable[tuple[list[list[int]], list[list[int]]]], tokens: int) -> States:
    """States of (prompts, outputs), one batch after the other until there are so many tokens."""
    taken: list[States] = []
    number = 0
    with tqdm(total=tokens, desc=model.name, unit="token") as bar:
        for prompts, outputs in batches:
            taken.append(states_and_labels(model, prompts, outputs, number))
            number += len(prompts)
            bar.update(len(taken[-1].ends))
            if bar.n >= tokens:
                break
    return States(*(torch.cat(parts) for parts in zip(*taken)))


def batches_of(prompts: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    """Batches of prompts of like lengths, in a random order among every AHEAD of them: all lengths come soon."""
    rng = random.Random(SEED)
    for start in range(0, len(prompts), size * AHEAD):
        some = sorted(prompts[start : start + size * AHEAD], key=len)
        batches = [some[index : index + size] for index in range(0, len(some), size)]
        yield from rng.sample(batches, len(batches))


def prompts_of(model: Model, tasks: str, corpora: Path | None, work: Path, most: int) -> list[list[int]]:
    """Token ids of up to `most` prompts of all tasks in turn, each task's in a random order.

    Those that leave no room for an output are left out. `tasks`: parts of the corpora, local task files or folders,
    several with commas. InputError for others, for parts without corpora, and for texts that gates are judged on:
    those of data/texts.
    """
    rng = random.Random(SEED)
    names = dict.fromkeys(name.strip() for name in tasks.split(","))
    every = [texts_of(name, corpora, work, rng) for name in names]
    for texts in every:
        rng.shuffle(texts)
    in_turn = (text for texts in zip_longest(*every) for text in texts if text is not None)
    encoded = model.encode(list(islice(in_turn, most)))
    fitting = [ids for ids in encoded if 0 < len(ids) <= model.context_length - LONGEST]
    if len(fitting) < HELD_OUT:
        raise InputError(
            f"{tasks}: {len(fitting)} prompts leave room for {LONGEST} tokens in {model.name}'s window of "
            f"{model.context_length}; at least {HELD_OUT} are needed"
        )
    return fitting


def texts_of(name: str, corpora: Path | None, work: Path, rng: random.Random) -> list[str]:
    """Prompts of a part of the corpora, one question of a passage at a time, or of a local task."""
    if name in PARTS:
        if corpora is None:
            raise InputError(f"training texts {name!r} need the corpora: --corpora DIR; allowed without: task files")
        work.mkdir(parents=True, exist_ok=True)
        return [text.prompt for text in alone(PARTS[name](corpora, work, SEEN), rng)]
    if not name or not Path(name).exists():
        raise InputError(
            f"training texts {name!r} are not known; allowed: {', '.join(PARTS)}, or a local task file or folder, "
            "several with commas"
        )
    task, judged = load_task(str(Path(name).resolve())), shipped_texts()
    inside = Path(name).resolve().is_relative_to(data_folder("texts").resolve())
    parts = [part for source in task.sources for part in (source, *source.split(" ||| "))]  # of pairs, either text
    if inside or any(part.strip().lower() in judged for part in parts):
        raise InputError(f"{name} holds texts of data/texts, on which gates are judged; allowed are other texts")
    return list(task.prompts)


@dataclass(frozen=True)
class Fitting:
    """How a gate is fitted: AdamW, `batch` tokens a step, each at all its layers, for so many epochs.

    The loss is cross-entropy with classes weighted to the same sum, as in CALM's code; CALM's paper (appendix D) does
    not weight them, and M's text says only that its loss is CALM's. Of the `tokens` that are decoded a fifth is held
    out, so 8,000 are learned from: 7 to 10 thousand are published, as are epochs and rate. The size of a batch is ours.
    `normed`: on states after the final norm; published are the states themselves. On the pocket models normed states
    learn more, and with them a rate of 1e-3 again; the published ones are the defaults.
    """

    tokens: int = 10_000
    epochs: int = 5
    rate: float = 1e-4
    batch: int = 32
    normed: bool = False
    seed: int = SEED

    def __post_init__(self) -> None:
        if min(self.tokens, self.epochs, self.batch) < 1 or not self.rate > 0:
            raise InputError(
                f"{self.tokens} tokens, {self.epochs} epochs, batches of {self.batch}, rate {self.rate} are not "
                "allowed; they must be positive"
            )


def loss_of(logits: Tensor, agrees: Tensor, frequency: Tensor) -> Tensor:
    """Of logits [n, 2] and labels bool [n]; `frequency` [2] is that of each class in all of the training."""
    return F.cross_entropy(logits, agrees.long(), weight=0.5 / frequency)


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
            loss = loss_of(logits.flatten(0, 1), labels[rows].to(device).flatten(), frequency)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(rows)
        curve.append(total / len(labels))
    return curve


@torch.no_grad()
def accuracy(network: Network, held: States) -> dict[str, Any]:
    """On held-out tokens, end tokens left out, at all layers that answer: mean share (0-100) of both classes that is
    classified right at 0.5, and the area under the ROC curve (0-100); None where there is one class only.
    """
    real, device = ~held.ends, next(network.parameters()).device
    logits = torch.cat([network(part.to(device).float()).cpu() for part in held.states[real].split(1024)])
    scores, agrees = logits.softmax(-1)[..., 1].flatten(), held.agrees[real][:, network.first - 1 :].flatten()
    found: dict[str, Any] = {"tokens": int(real.sum()), "balanced": None, "area": None}
    if agrees.any() and not agrees.all():
        found["balanced"] = round(100 * float(balanced_accuracy_score(agrees, scores > 0.5)), 1)
        found["area"] = round(100 * float(roc_auc_score(agrees, scores)), 1)
    return found


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
    parser.add_argument("--outputs", type=Path, help="in place of texts: a folder of the model's own outputs to them")
    parser.add_argument("--out", type=Path, help="where the gates go (default: data/gates/MODEL)")
    parser.add_argument("--work", type=Path, help="texts that take long to make (default: checkpoints/gates)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--gates", default=",".join(TRAINED), help="which, several with commas; lstm-as-published is M's code's LSTM"
    )
    parser.add_argument("--normed", action="store_true", help="on states after the final norm")
    parser.add_argument("--tokens", type=int, default=usual.tokens, help=f"to decode (default: {usual.tokens})")
    parser.add_argument("--epochs", type=int, default=usual.epochs, help=f"default: {usual.epochs}")
    parser.add_argument("--rate", type=float, default=usual.rate, help=f"learning rate (default: {usual.rate})")
    given = parser.parse_args(arguments)
    if given.corpora is not None and not given.corpora.is_dir():
        parser.error(f"--corpora {given.corpora} is not a folder")
    try:
        how = Fitting(given.tokens, given.epochs, given.rate, normed=given.normed)
        model = load_model(given.model, device=given.device)
        out, work = given.out or data_folder("gates", model.name), given.work or Path("checkpoints/gates")
        _ = model.writer  # a model that only reads is refused in one line
        if model.layers < 2:
            raise InputError(f"{model.name} has one block; gates are of two or more")
        wanted = {asked: gate_asked(asked) for asked in given.gates.split(",")}
        if given.outputs:
            texts, outputs = f"own outputs to training prompts ({given.outputs.name})", known_outputs(given.outputs)
        else:
            texts = given.tasks
            outputs = own_outputs(model, prompts_of(model, texts, given.corpora, work, how.tokens))
        taken = take_states(model, outputs, how.tokens)
        if (made := len(taken.output.unique())) < HELD_OUT:
            raise InputError(f"{how.tokens} tokens are {made} outputs; at least {HELD_OUT} are needed")
        for asked, (name, parameters) in wanted.items():
            found = train_gate(model, name, taken, how, out, {"texts": texts}, **parameters)
            print(f"{model.name} {asked}: balanced accuracy {found['balanced']}, area {found['area']}")
    except (InputError, FileNotFoundError) as error:  # such as a part of the corpora
        parser.error(str(error))
