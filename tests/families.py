"""Tiny random networks of several families, each with its unembed written out by hand in `oracle`; and a GGUF file.

In float64 they are the tests' oracle; in float32 the same plain arithmetic says how far rounding alone leads.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path

import gguf
import numpy as np
import oracle
import torch
import transformers as hf
from torch import Tensor, nn

from checks.tiny import randomize
from checks.tiny_texts import END, WINDOW, tokenizer_for
from eelib.models.checkpoint import CLASSES
from eelib.models.head import Head


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
CLASSIFIERS = {"bert_labels": replace(FAMILIES["bert"], config=tiny(hf.BertConfig, num_labels=3))}
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
    family = (FAMILIES | CLASSIFIERS)[name]
    tokenizer = tokenizer_for(family.kind)
    torch.manual_seed(seed)
    ids = {key: getattr(tokenizer, key) for key in ("pad_token_id", "eos_token_id", "bos_token_id")}
    config = family.config(vocab_size=len(tokenizer) + 4, **ids, **more)
    network = CLASSES["classifier" if name in CLASSIFIERS else family.kind].from_config(config)
    network.config._experts_implementation = "eager"  # the other ways of running experts have no float64
    randomize(network)
    return network.eval().requires_grad_(False)


plain_of = cache(build)  # plain_of(family): the network in float32, run plainly: its error is what rounding explains
oracle_of = cache(lambda name: build(name).double())  # the same weights in float64, never touched by eelib


def save(name: str, folder: Path, seed: int = 0, **more: int) -> Path:
    """A checkpoint folder of the family, as `load_model` expects one."""
    build(name, seed, **more).save_pretrained(folder)
    family = (FAMILIES | CLASSIFIERS)[name]
    tokenizer_for(family.kind).save_pretrained(folder)
    return folder


def identity_unembed(size: int) -> Head:
    """An unembed whose logits are the states themselves."""
    head = nn.Linear(size, size, bias=False).requires_grad_(False)
    head.weight.copy_(torch.eye(size))
    return Head([], head, size, size)


TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} assistant: {% endif %}"
)


def save_gguf(
    path: Path, architecture: str = "qwen2", kind: str = "Q8_0", more: Callable[[gguf.GGUFWriter], None] | None = None
) -> hf.Qwen2ForCausalLM:
    """Write a tiny Qwen 2 model with a chat template as a GGUF file, its matrices in a type of gguf; returns the
    network with the weights that the file then holds.

    `more`: adds to what is written.
    """
    torch.manual_seed(5)
    tokenizer = tokenizer_for("causal")
    # each matrix has rows of 32 or 64 numbers, as Q8_0 needs
    sizes = WIDE | dict(intermediate_size=64, num_key_value_heads=2, vocab_size=len(tokenizer))
    network = hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes, eos_token_id=tokenizer.eos_token_id))
    network = network.eval().requires_grad_(False)
    for parameter in network.parameters():  # nowhere at a default
        parameter.copy_(0.3 * torch.randn_like(parameter) + (parameter.ndim == 1))
    config, state = network.config, network.state_dict()
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(WINDOW)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    model = tokenizer.backend_tokenizer.to_str()
    merges = [" ".join(pair) for pair in json.loads(model)["model"]["merges"]]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    special = set(tokenizer.all_special_ids)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokens.index(END))
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    packed_as = gguf.GGMLQuantizationType[kind]
    for key in list(state):
        name, values = names.get_name(key, (".weight", ".bias")), state[key].numpy().astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(name, values)
            continue
        packed = gguf.quants.quantize(values, packed_as)
        writer.add_tensor(name, packed, raw_dtype=packed_as)
        state[key] = torch.from_numpy(gguf.quants.dequantize(packed, packed_as))
    if more:
        more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    network.load_state_dict(state)
    return network
