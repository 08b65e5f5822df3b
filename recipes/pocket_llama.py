"""The recipe of pocket-llama: a small Llama that translates, answers questions and writes headlines."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eelib.models.model import Model
from recipes.batches import TOKENS_PER_BATCH, Phase, Text, by_phases, encoded, packed, train_tokenizer
from recipes.card import write_card
from recipes.losses import states_at
from recipes.quality import measure as measure
from recipes.texts import PARTS, SEED, generator
from recipes.training import Loss, Schedule, by_step, train

NAME = "pocket-llama"
KIND = "LlamaForCausalLM, 12 blocks of width 256, byte-level BPE of 8,192 entries, bf16"
VOCABULARY, WINDOW = 8192, 512
SCHEDULE = Schedule(steps=4800, peak=2e-3, warmup=200, decay=1500)
# Broad texts while the rate is high; while it falls, most of all the texts of the tasks.
PHASES = (
    Phase(3300, {"translation": 0.44, "rooms": 0.20, "reading": 0.10, "headlines": 0.09, "text": 0.17}),
    Phase(1500, {"captions": 0.46, "rooms": 0.24, "reading": 0.11, "headlines": 0.13, "text": 0.06}),
)
# Weight of the loss on a text's other tokens, beside 1 for its targets: a story's or an article's own words teach, too.
CONTEXT = {"rooms": 0.2, "reading": 0.2, "headlines": 0.2}
FOR_TOKENIZER = {"translation": 3, "rooms": 40, "reading": 4, "headlines": 4, "text": 8}  # one text in so many
PLAIN = "plain_causal"  # kind of attention

Batch = tuple[str, list[Text]]  # the part, its texts
States = tuple[list[Tensor], Tensor, int]  # of layers 1..L at the targets, the targets, number of padded tokens


def plain_causal(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: None, scaling: float, **_options: object
) -> tuple[Tensor, None]:
    """Attention [texts, tokens, heads, size] of queries, keys and values, each [texts, heads, tokens, size].

    By plain products: on a CPU in bf16 its backward pass takes half as long as the fused kernel's. For whole texts
    without a cache whose padding, if any, is on the right. Several heads of queries may share keys.
    """
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    tokens = query.shape[2]
    future = torch.full((tokens, tokens), float("-inf"), dtype=query.dtype, device=query.device).triu(1)
    q, k, v = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    scores = torch.baddbmm(future.expand(len(q), -1, -1), q, k.transpose(1, 2), alpha=scaling)
    out = torch.bmm(torch.softmax(scores, -1), v)
    return out.view_as(query).transpose(1, 2).contiguous(), None


AttentionInterface.register(PLAIN, plain_causal)


def attention(device: str) -> str:
    """The name of the fastest kind for right-padded texts without a mask."""
    return PLAIN if torch.device(device).type == "cpu" else "sdpa"


def build(device: str = "cpu", **sizes: int) -> LlamaForCausalLM:
    """The untrained model, bf16; `sizes` replace those of LlamaConfig."""
    torch.manual_seed(SEED)
    shape = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 12, "num_attention_heads": 4} | sizes
    config = LlamaConfig(
        **shape,
        vocab_size=VOCABULARY,
        max_position_embeddings=WINDOW,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        initializer_range=0.02,
        attn_implementation=attention(device),
    )
    return LlamaForCausalLM(config).to(device=device, dtype=torch.bfloat16)


def tokenizer_for(corpora: Path, folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer, trained once on some texts of every part, and kept in `folder`."""
    if not (folder / "tokenizer.json").exists():
        texts = [text for name, every in FOR_TOKENIZER.items() for text in PARTS[name](corpora, folder, 0)[::every]]
        pieces = (piece for text in texts for pair in (text[:2], *text.more) for piece in pair)
        train_tokenizer(pieces, VOCABULARY, WINDOW).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def part_batches(
    corpora: Path,
    work: Path,
    tokenizer: PreTrainedTokenizerFast,
    part: str,
    epoch: int,
    most: int = TOKENS_PER_BATCH,
) -> list[list[Text]]:
    """The batches of one part's epoch, each of like lengths and about `most` padded tokens."""
    return packed(
        encoded(PARTS[part](corpora, work, epoch), tokenizer, WINDOW),
        bucket=lambda text: len(text.ids) // 8,
        widths=lambda text: (len(text.ids),),
        rng=generator(epoch),
        most=most,
    )


def inputs_of(texts: list[Text], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(token ids [texts, longest], flat positions of the targets' tokens, flat positions of the other tokens).

    A token is predicted at the position before its own; each text's first is predicted nowhere and in neither list.
    """
    ids = pad_sequence([torch.from_numpy(text.ids.astype("int64")) for text in texts], batch_first=True)
    kinds = pad_sequence([torch.from_numpy(1 + text.wanted) for text in texts], batch_first=True)
    kinds[:, 0] = 0  # 0: predicted nowhere, as padding is; 1: another token; 2: of a target
    wanted, others = ((kinds.flatten() == kind).nonzero().squeeze(1).to(device) for kind in (2, 1))
    return ids.to(device), wanted, others


def target_loss(model: LlamaForCausalLM, batch: Batch) -> Loss:
    """Mean cross-entropy of the target tokens, and `CONTEXT` times that of the others; the first is shown."""
    part, texts = batch
    ids, wanted, others = inputs_of(texts, model.device)
    # Right padding under a causal mask: no real token sees a padded one, so no mask is needed.
    states = model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)

    def of(positions: Tensor) -> Tensor:
        return F.cross_entropy(model.lm_head(states[positions - 1]).float(), ids.flatten()[positions])

    loss = shown = of(wanted)
    if share := CONTEXT.get(part):
        loss = loss + share * of(others)
    return Loss(loss, ids.numel(), part, shown)


def states(model: Model, texts: list[Text]) -> States:
    """States of layers 1..L where a target is predicted."""
    ids, wanted, _ = inputs_of(texts, model.device)
    return states_at(model, {"input_ids": ids, "use_cache": False}, wanted - 1), ids.flatten()[wanted], ids.numel()


def run(corpora: Path, out: Path, work: Path, device: str) -> dict:
    """Train, continuing from `work`, and write the finished model with its card to `out`; returns the card."""
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_for(corpora, work)
    model = build(device)
    for settings in (model.config, model.generation_config):
        settings.eos_token_id, settings.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        settings.bos_token_id = None
    plans = partial(part_batches, corpora, work, tokenizer)
    batches = by_step(by_phases(PHASES, plans))
    leg = train(model, batches, lambda batch, _step: target_loss(model, batch), SCHEDULE, work)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return write_card(corpora, out, leg, device, NAME, KIND)
