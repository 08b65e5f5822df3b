"""Tiny random networks of several families, each with its unembed written out by hand in `oracle`.

In float64 they are the tests' oracle; in float32 the same plain arithmetic says how far rounding alone leads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

import oracle
import torch
import transformers as hf
from torch import Tensor, nn

from checks.tiny import randomize
from checks.tiny_texts import PROMPTS, WINDOW, tokenizer_for
from eelib.models.checkpoint import CLASSES
from eelib.models.head import Head
from eelib.models.model import Model


@dataclass(frozen=True)
class Family:
    """How a tiny network is made, and where its blocks and sub-layers are: `sites` maps a site to a path in a block."""

    kind: str
    config: Callable[..., hf.PretrainedConfig]
    unembed: Callable[[nn.Module, Tensor], Tensor]
    blocks: str
    sites: dict[str, str]
    parallel: bool = False  # attention and feed-forward both read the block's input
    scale: float = 1.0  # of what a sub-layer gives, when it is added to the skip


PRE = {"attention": "self_attn", "feed_forward": "mlp"}
GPT = {"attention": "attn", "feed_forward": "mlp"}
SANDWICH = {"attention": "post_attention_layernorm", "feed_forward": "post_feedforward_layernorm"}
BERT = {
    "attention": "attention.output.dense",
    "after_attention": "attention.output.LayerNorm",
    "feed_forward": "output.dense",
}
T5 = {
    "attention": "layer.0.SelfAttention",
    "cross_attention": "layer.1.EncDecAttention",
    "feed_forward": "layer.2.DenseReluDense",
}
MARIAN = {
    "attention": "self_attn",
    "after_attention": "self_attn_layer_norm",
    "cross_attention": "encoder_attn",
    "feed_forward": "fc2",
}
WIDE = dict(
    hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, max_position_embeddings=WINDOW
)
OF_GPT = dict(n_embd=32, n_layer=3, n_head=4, n_positions=WINDOW)
OF_T5 = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=4, decoder_start_token_id=0)
OF_BART = dict(
    d_model=32,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=WINDOW,
    decoder_start_token_id=0,
)


def tiny(config: type, sizes: dict = WIDE, **more) -> Callable[..., hf.PretrainedConfig]:
    """A configuration, but for the ids of special tokens and the size of the vocabulary."""
    return lambda **ids: config(**sizes, **more, **ids)


GEMMA = dict(head_dim=8, sliding_window=8, final_logit_softcapping=3.0, query_pre_attn_scalar=8)
GRANITE = dict(logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.6)
GATED = dict(tie_word_embeddings=False, feed_forward_proj="gated-gelu")
FAMILIES = {
    "llama": Family("causal", tiny(hf.LlamaConfig, num_key_value_heads=2), oracle.llama_unembed, "model.layers", PRE),
    "gemma2": Family(
        "causal", tiny(hf.Gemma2Config, num_key_value_heads=2, **GEMMA), oracle.gemma_unembed, "model.layers", SANDWICH
    ),
    "gpt2": Family("causal", tiny(hf.GPT2Config, OF_GPT), oracle.gpt2_unembed, "transformer.h", GPT),
    "granite": Family(
        "causal",
        tiny(hf.GraniteConfig, num_key_value_heads=2, **GRANITE),
        oracle.granite_unembed,
        "model.layers",
        PRE,
        scale=0.6,
    ),
    "gptj": Family(
        "causal",
        tiny(hf.GPTJConfig, OF_GPT, rotary_dim=4),
        oracle.gptj_unembed,
        "transformer.h",
        GPT,
        parallel=True,
    ),
    "t5": Family("seq2seq", tiny(hf.T5Config, OF_T5, **GATED), oracle.t5_unembed, "decoder.block", T5),
    "t5_tied": Family("seq2seq", tiny(hf.T5Config, OF_T5), oracle.t5_tied_unembed, "decoder.block", T5),
    "marian": Family(
        "seq2seq",
        tiny(hf.MarianConfig, OF_BART, scale_embedding=True),
        oracle.marian_unembed,
        "model.decoder.layers",
        MARIAN,
    ),
    "bert": Family("masked", tiny(hf.BertConfig), oracle.bert_unembed, "bert.encoder.layer", BERT),
}
# Sequence classifiers with three labels, and where a text is read: at its first or last position.
LABELS = dict(num_labels=3)
CLASSIFIERS = {
    "bert_labels": (
        Family("masked", tiny(hf.BertConfig, **LABELS), oracle.bert_labels, "bert.encoder.layer", BERT),
        0,
    ),
    "gpt2_labels": (
        Family("causal", tiny(hf.GPT2Config, OF_GPT, **LABELS), oracle.gpt2_labels, "transformer.h", GPT),
        -1,
    ),
}
CAUSAL = [name for name, family in FAMILIES.items() if family.kind == "causal"]
# Decoding is tested on these: grouped heads; a window, two caps and four norms a block; learned positions and biases;
# a position bias that one block makes for all; sinusoids and cross-attention. `checks.architectures` has them all.
CORE = ["llama", "gemma2", "gpt2", "t5", "marian"]


def in_pairs(*factors: list) -> list[tuple]:
    """Combinations of factors in which each value of one meets each value of every other at least once."""
    left = {
        ((i, a), (j, b))
        for (i, first), (j, second) in combinations(enumerate(factors), 2)
        for a, b in product(first, second)
    }
    chosen = []
    while left:
        best = max(product(*factors), key=lambda one: len(left & set(combinations(enumerate(one), 2))))
        chosen.append(best)
        left -= set(combinations(enumerate(best), 2))
    return chosen


def build(name: str, seed: int = 0, **more: int) -> nn.Module:
    """The family's network with weights that leave nothing at its default: matrices, norms, biases, logit bias.

    `more`: values of the configuration.
    """
    family = CLASSIFIERS[name][0] if name in CLASSIFIERS else FAMILIES[name]
    tokenizer = tokenizer_for(family.kind)
    torch.manual_seed(seed)
    ids = {key: getattr(tokenizer, key) for key in ("pad_token_id", "eos_token_id", "bos_token_id")}
    config = family.config(vocab_size=len(tokenizer) + 4, **ids, **more)
    network = CLASSES["classifier" if name in CLASSIFIERS else family.kind].from_config(config)
    network.config._experts_implementation = "eager"  # the other ways of running experts have no float64
    randomize(network)
    return network.eval().requires_grad_(False)


def save(name: str, folder: Path, seed: int = 0, **more: int) -> Path:
    """A checkpoint folder of the family, as `load_model` expects one."""
    build(name, seed, **more).save_pretrained(folder)
    family = CLASSIFIERS[name][0] if name in CLASSIFIERS else FAMILIES[name]
    tokenizer_for(family.kind).save_pretrained(folder)
    return folder


def sample(model: Model) -> tuple[list[int], list[int]]:
    """(prompt, output) for one run; of a text that is read in place the two are one."""
    prompt = model.tokenizer(PROMPTS[1])["input_ids"]
    return prompt, [40, 9, 77, 200, 40] if model.adapter.writes else prompt


def identity_unembed(size: int) -> Head:
    """An unembed whose logits are the states themselves."""
    head = nn.Linear(size, size, bias=False).requires_grad_(False)
    head.weight.copy_(torch.eye(size))
    return Head([], head, size, size)
