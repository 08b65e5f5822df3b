"""The recipe of pocket-t5: a small encoder-decoder of T5's layout, trained on the texts and prompts of pocket-llama."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from eelib.common.errors import InputError
from eelib.models.model import Model
from recipes.batches import TOKENS_PER_BATCH, Phase, Text, by_phases, encoded, packed
from recipes.card import write_card
from recipes.losses import states_at
from recipes.pocket_llama import WINDOW, Batch, States
from recipes.quality import measure as measure
from recipes.texts import PARTS, SEED, asked_apart_or_together, generator
from recipes.training import Loss, Schedule, by_step, train

NAME = "pocket-t5"
KIND = "T5ForConditionalGeneration, 8 encoder and 8 decoder blocks of width 192, bf16"
EDITION = "574ee76"  # the commit with the first edition: 4 encoder blocks, 21.5 million tokens, translation
SCHEDULE = Schedule(steps=2400, peak=1.5e-3, warmup=50, decay=800)
# It translates, so most is of what it does not know yet: reading and headlines.
BROAD = {"translation": 0.20, "rooms": 0.38, "reading": 0.12, "headlines": 0.26, "text": 0.04}
PHASES = (
    Phase(1100, BROAD),
    Phase(500, BROAD),  # was added while the first ran
    Phase(800, {"captions": 0.32, "rooms": 0.34, "reading": 0.10, "headlines": 0.22, "text": 0.02}),
)
TOKENS = TOKENS_PER_BATCH // 2
IGNORED = -100  # a label that is padding
REMARKS = {
    "start": f"its first edition, commit {EDITION}",
    "earlier_run": "from random weights, with batches of 12,288 tokens and a peak rate of 2e-3; it was stopped after "
    "1,600 steps and 19.5 million tokens, since its losses, 3.6 in translation and 4.2 in headlines, fell slowly",
}


def attention(_device: str) -> str:
    """The name of the fastest kind with a position bias."""
    return "eager"


def build(tokenizer: PreTrainedTokenizerFast, device: str = "cpu", **sizes: int) -> T5ForConditionalGeneration:
    """The untrained model, bf16; `sizes` replace those of T5Config.

    One matrix serves both embeddings and the head. T5 divides by sqrt(width) before the head and draws the embeddings
    with deviation 1, which suits its own optimizer: at AdamW's rates logits would move too slowly. So the last norm
    begins at sqrt(width), which cancels the division, and the embeddings begin small.
    """
    torch.manual_seed(SEED)
    shape = {"d_model": 192, "d_kv": 32, "d_ff": 448, "num_heads": 6, "num_layers": 8, "num_decoder_layers": 8} | sizes
    config = T5Config(
        **shape,
        vocab_size=len(tokenizer),
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        attn_implementation=attention(device),
    )
    model = T5ForConditionalGeneration(config)
    nn.init.normal_(model.shared.weight, std=0.05)
    nn.init.constant_(model.decoder.final_layer_norm.weight, config.d_model**0.5)
    return model.to(device=device, dtype=torch.bfloat16)


def grow(deep: T5ForConditionalGeneration, shallow: T5ForConditionalGeneration) -> None:
    """Give a network the function of one with fewer encoder blocks, of whose number its own is a multiple.

    Each block is followed by copies of itself that add nothing yet: their last matrices are 0.
    """
    copies = len(deep.encoder.block) // len(shallow.encoder.block)
    weights = {name: value for name, value in shallow.state_dict().items() if not name.startswith("encoder.block.")}
    for number in range(len(deep.encoder.block)):
        for name, value in shallow.encoder.block[number // copies].state_dict().items():
            if number % copies and name.endswith((".o.weight", ".wo.weight")):
                value = torch.zeros_like(value)
            if number == 0 or "relative_attention_bias" not in name:  # only the first block has one
                weights[f"encoder.block.{number}.{name}"] = value
    deep.load_state_dict(weights)


def first_edition(folder: Path) -> Path:
    """The folder of the first edition's files. InputError, with what to do, where they are not there."""
    if not (folder / "model.safetensors").exists():
        raise InputError(
            f"{folder} has no weights of the first edition; in a clone of this project: mkdir -p {folder} && "
            f"git archive {EDITION} data/models/{NAME} | tar -x --strip-components=3 -C {folder}"
        )
    return folder


def part_batches(
    corpora: Path,
    work: Path,
    tokenizer: PreTrainedTokenizerFast,
    part: str,
    epoch: int,
    most: int = TOKENS_PER_BATCH,
) -> list[list[Text]]:
    """The batches of one part's epoch, alike in both lengths, each of about `most` padded tokens of both sides."""
    texts = asked_apart_or_together(PARTS[part](corpora, work, epoch), generator(epoch))
    return packed(
        encoded(texts, tokenizer, WINDOW),
        bucket=lambda text: (text.wanted.sum() // 8, (~text.wanted).sum()),
        widths=lambda text: (int((~text.wanted).sum()), int(text.wanted.sum())),
        rng=generator(epoch),
        most=most,
    )


def inputs_of(model: T5ForConditionalGeneration, texts: list[Text]) -> tuple[dict, Tensor]:
    """(arguments of the network, labels [texts, longest] with IGNORED for padding)."""
    ids, wanted = zip(*((torch.from_numpy(text.ids.astype("int64")), torch.from_numpy(text.wanted)) for text in texts))
    prompts = [one[~target] for one, target in zip(ids, wanted)]
    targets = [one[target] for one, target in zip(ids, wanted)]
    labels = pad_sequence(targets, True, IGNORED).to(model.device)
    return {
        "input_ids": pad_sequence(prompts, True, model.config.pad_token_id).to(model.device),
        "attention_mask": pad_sequence([torch.ones_like(p) for p in prompts], True).to(model.device),
        "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels),
        "use_cache": False,
    }, labels


def label_loss(model: T5ForConditionalGeneration, batch: Batch) -> Loss:
    """Mean cross-entropy of the target tokens, in float32, and the number of padded tokens of both sides."""
    part, texts = batch
    inputs, labels = inputs_of(model, texts)
    real = labels != IGNORED
    logits = model(**inputs).logits
    size = inputs["input_ids"].numel() + labels.numel()
    return Loss(F.cross_entropy(logits[real].float(), labels[real]), size, part)


def states(model: Model, texts: list[Text]) -> States:
    """States of the decoder's layers 1..L where a target is predicted; padded tokens of both sides."""
    inputs, labels = inputs_of(model.network, texts)
    rows = (labels != IGNORED).flatten().nonzero().squeeze(1)
    return states_at(model, inputs, rows), labels.flatten()[rows], inputs["input_ids"].numel() + labels.numel()


def run(corpora: Path, out: Path, work: Path, device: str) -> dict:
    """Train, continuing from `work`, and write the finished model with its card to `out`; returns the card."""
    start = first_edition(work / "first_edition")
    tokenizer = AutoTokenizer.from_pretrained(start)
    model = build(tokenizer, device)
    grow(model, T5ForConditionalGeneration.from_pretrained(start))
    plans = partial(part_batches, corpora, work, tokenizer, most=TOKENS)
    batches = by_step(by_phases(PHASES, plans))
    leg = train(model, batches, lambda batch, _step: label_loss(model, batch), SCHEDULE, work)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return write_card(corpora, out, leg, device, NAME, KIND, **REMARKS)
