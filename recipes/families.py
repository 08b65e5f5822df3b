"""What recipes that train a shipped model further know of its family: its batches, and states where targets are."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from eelib.models.model import Model
from recipes import attention, pocket_llama, pocket_t5
from recipes.batches import Text
from recipes.losses import states_at

States = tuple[list[Tensor], Tensor, int]  # of layers 1..L at the targets, the targets, number of padded tokens


def llama_states(model: Model, texts: list[Text]) -> States:
    """States of layers 1..L where a target is predicted."""
    ids, wanted, _ = pocket_llama.inputs_of(texts, model.device)
    # The network's own logits are not used: one position's are the fewest that it can be asked for.
    inputs = {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}
    return states_at(model, inputs, wanted - 1), ids.flatten()[wanted], ids.numel()


def t5_states(model: Model, texts: list[Text]) -> States:
    """The same of the decoder; padded tokens of both sides."""
    inputs, labels = pocket_t5.inputs_of(model.network, texts)
    rows = (labels != pocket_t5.IGNORED).flatten().nonzero().squeeze(1)
    return states_at(model, inputs, rows), labels.flatten()[rows], inputs["input_ids"].numel() + labels.numel()


@dataclass(frozen=True)
class Family:
    """How models of one family are trained further: `attention(device)` the fastest that their batches allow."""

    states: Callable[[Model, list[Text]], States]
    part_batches: Callable[..., list[list[Text]]]
    in_batches: Callable[[list[Text], int, int], list[list[Text]]]
    attention: Callable[[str], str]


LLAMA = Family(llama_states, pocket_llama.part_batches, pocket_llama.in_batches, attention=attention.fastest)
T5 = Family(t5_states, pocket_t5.part_batches, pocket_t5.in_batches, attention=lambda _device: "eager")
