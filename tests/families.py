"""Tiny random networks of several families, each with its unembed written out by hand.

In float64 they are the tests' oracle; in float32 the same plain arithmetic says how far rounding alone leads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers as hf
from torch import Tensor, nn

from checks.tiny_texts import PROMPTS, WINDOW, tokenizer_for
from eelib.models.model import Model
from eelib.models.unembed import Unembed


def rms(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm."""
    return states / (states.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def layer_norm(states: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Layer norm, written out."""
    centred = states - states.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def gelu(states: Tensor) -> Tensor:
    """Exact GELU."""
    return states * (1 + torch.erf(states / math.sqrt(2))) / 2


def llama_unembed(n, h):
    return rms(h, n.model.norm.weight, n.config.rms_norm_eps) @ n.lm_head.weight.T


def granite_unembed(n, h):
    return llama_unembed(n, h) / n.config.logits_scaling


def gemma_unembed(n, h):
    logits = rms(h, 1 + n.model.norm.weight, n.config.rms_norm_eps) @ n.model.embed_tokens.weight.T
    cap = n.config.final_logit_softcapping
    return torch.tanh(logits / cap) * cap if cap else logits


def gpt2_unembed(n, h):
    return layer_norm(h, n.transformer.ln_f) @ n.transformer.wte.weight.T


def opt_unembed(n, h):
    return layer_norm(h, n.model.decoder.final_layer_norm) @ n.model.decoder.embed_tokens.weight.T


def falcon_unembed(n, h):
    return layer_norm(h, n.transformer.ln_f) @ n.lm_head.weight.T


def gptj_unembed(n, h):
    return falcon_unembed(n, h) + n.lm_head.bias


def neox_unembed(n, h):
    return layer_norm(h, n.gpt_neox.final_layer_norm) @ n.get_output_embeddings().weight.T


def t5_unembed(n, h):
    return rms(h, n.decoder.final_layer_norm.weight, n.config.layer_norm_epsilon) @ n.lm_head.weight.T


def t5_tied_unembed(n, h):
    normed = rms(h, n.decoder.final_layer_norm.weight, n.config.layer_norm_epsilon)
    return (normed * n.config.d_model**-0.5) @ n.shared.weight.T


def marian_unembed(n, h):
    return h @ n.model.shared.weight.T + n.final_logits_bias[0]


def bert_unembed(n, h):
    head = n.cls.predictions
    dense = h @ head.transform.dense.weight.T + head.transform.dense.bias
    return layer_norm(gelu(dense), head.transform.LayerNorm) @ n.bert.embeddings.word_embeddings.weight.T + head.bias


def roberta_unembed(n, h):
    dense = h @ n.lm_head.dense.weight.T + n.lm_head.dense.bias
    normed = layer_norm(gelu(dense), n.lm_head.layer_norm)
    return normed @ n.roberta.embeddings.word_embeddings.weight.T + n.lm_head.bias


def distilbert_unembed(n, h):
    dense = h @ n.vocab_transform.weight.T + n.vocab_transform.bias
    return layer_norm(gelu(dense), n.vocab_layer_norm) @ n.vocab_projector.weight.T + n.vocab_projector.bias


def bert_labels(n, h):
    pooled = torch.tanh(h @ n.bert.pooler.dense.weight.T + n.bert.pooler.dense.bias)
    return pooled @ n.classifier.weight.T + n.classifier.bias


def gpt2_labels(n, h):
    return layer_norm(h, n.transformer.ln_f) @ n.score.weight.T


@dataclass(frozen=True)
class Family:
    """How a tiny network is made, and where its blocks and sub-layers are: `sites` maps a site to a path in a block."""

    kind: str
    config: Callable[..., hf.PretrainedConfig]
    network: type
    unembed: Callable[[nn.Module, Tensor], Tensor]
    blocks: str
    sites: dict[str, str]
    normed_last: bool = True  # transformers' hidden_states[-1] already went through the final norm
    parallel: bool = False  # attention and feed-forward both read the block's input
    scale: float = 1.0  # of what a sub-layer gives, when it is added to the skip


PRE = {"attention": "self_attn", "feed_forward": "mlp"}
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


def llama_like(config: type, **more) -> Callable[..., hf.PretrainedConfig]:
    """A configuration with the field names that most families share."""
    return lambda **ids: config(**WIDE, **more, **ids)


def gpt_like(config: type, **more) -> Callable[..., hf.PretrainedConfig]:
    """The same in GPT-2's field names."""
    return lambda **ids: config(n_embd=32, n_layer=3, n_head=4, n_positions=WINDOW, **more, **ids)


def bart_like(config: type, **more) -> Callable[..., hf.PretrainedConfig]:
    """An encoder-decoder in BART's field names."""
    return lambda **ids: config(
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=WINDOW,
        decoder_start_token_id=0,
        **more,
        **ids,
    )


def t5_config(**more) -> Callable[..., hf.PretrainedConfig]:
    """A configuration of T5's own field names."""
    return lambda **ids: hf.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
        **more,
        **ids,
    )


FAMILIES = {
    "llama": Family(
        "causal",
        llama_like(hf.LlamaConfig, num_key_value_heads=2),
        hf.LlamaForCausalLM,
        llama_unembed,
        "model.layers",
        PRE,
    ),
    "qwen3": Family(
        "causal",
        llama_like(hf.Qwen3Config, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True),
        hf.Qwen3ForCausalLM,
        llama_unembed,
        "model.layers",
        PRE,
    ),
    "gemma2": Family(
        "causal",
        llama_like(
            hf.Gemma2Config,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=8,
            final_logit_softcapping=3.0,
            query_pre_attn_scalar=8,
        ),
        hf.Gemma2ForCausalLM,
        gemma_unembed,
        "model.layers",
        SANDWICH,
    ),
    "gpt2": Family(
        "causal",
        gpt_like(hf.GPT2Config),
        hf.GPT2LMHeadModel,
        gpt2_unembed,
        "transformer.h",
        {"attention": "attn", "feed_forward": "mlp"},
    ),
    "gpt_neox": Family(
        "causal",
        llama_like(hf.GPTNeoXConfig, use_parallel_residual=True),
        hf.GPTNeoXForCausalLM,
        neox_unembed,
        "gpt_neox.layers",
        {"attention": "attention", "feed_forward": "mlp"},
        parallel=True,
    ),
    "granite": Family(
        "causal",
        llama_like(
            hf.GraniteConfig,
            num_key_value_heads=2,
            logits_scaling=4.0,
            embedding_multiplier=3.0,
            residual_multiplier=0.6,
        ),
        hf.GraniteForCausalLM,
        granite_unembed,
        "model.layers",
        PRE,
        scale=0.6,
    ),
    "opt": Family(
        "causal",
        lambda **ids: hf.OPTConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            ffn_dim=48,
            word_embed_proj_dim=32,
            max_position_embeddings=WINDOW,
            **ids,
        ),
        hf.OPTForCausalLM,
        opt_unembed,
        "model.decoder.layers",
        {"attention": "self_attn", "feed_forward": "fc2"},
    ),
    "gptj": Family(
        "causal",
        gpt_like(hf.GPTJConfig, rotary_dim=4),
        hf.GPTJForCausalLM,
        gptj_unembed,
        "transformer.h",
        {"attention": "attn", "feed_forward": "mlp"},
        parallel=True,
    ),
    "falcon": Family(
        "causal",
        lambda **ids: hf.FalconConfig(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=WINDOW, **ids
        ),
        hf.FalconForCausalLM,
        falcon_unembed,
        "transformer.h",
        {"attention": "self_attention", "feed_forward": "mlp"},
        parallel=True,
    ),
    "olmo2": Family(
        "causal",
        llama_like(hf.Olmo2Config, num_key_value_heads=2),
        hf.Olmo2ForCausalLM,
        llama_unembed,
        "model.layers",
        SANDWICH,
    ),
    "gemma3": Family(
        "causal",
        llama_like(hf.Gemma3TextConfig, num_key_value_heads=2, head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
        hf.Gemma3ForCausalLM,
        gemma_unembed,
        "model.layers",
        SANDWICH,
    ),
    "mixtral": Family(
        "causal",
        llama_like(hf.MixtralConfig, num_key_value_heads=2, num_local_experts=4),
        hf.MixtralForCausalLM,
        llama_unembed,
        "model.layers",
        PRE,
    ),
    "t5": Family(
        "seq2seq",
        t5_config(tie_word_embeddings=False, feed_forward_proj="gated-gelu"),
        hf.T5ForConditionalGeneration,
        t5_unembed,
        "decoder.block",
        T5,
    ),
    "t5_tied": Family("seq2seq", t5_config(), hf.T5ForConditionalGeneration, t5_tied_unembed, "decoder.block", T5),
    "marian": Family(
        "seq2seq",
        lambda **ids: bart_like(hf.MarianConfig, scale_embedding=True, decoder_vocab_size=ids["vocab_size"])(**ids),
        hf.MarianMTModel,
        marian_unembed,
        "model.decoder.layers",
        MARIAN,
        normed_last=False,
    ),
    "bart": Family(
        "seq2seq",
        bart_like(hf.BartConfig),
        hf.BartForConditionalGeneration,
        marian_unembed,
        "model.decoder.layers",
        MARIAN,
        normed_last=False,
    ),
    "bert": Family(
        "masked",
        llama_like(hf.BertConfig),
        hf.BertForMaskedLM,
        bert_unembed,
        "bert.encoder.layer",
        BERT,
        normed_last=False,
    ),
    "roberta": Family(
        "masked",
        llama_like(hf.RobertaConfig),
        hf.RobertaForMaskedLM,
        roberta_unembed,
        "roberta.encoder.layer",
        BERT,
        normed_last=False,
    ),
    "distilbert": Family(
        "masked",
        lambda **ids: hf.DistilBertConfig(
            dim=32, n_layers=3, n_heads=4, hidden_dim=48, max_position_embeddings=WINDOW, **ids
        ),
        hf.DistilBertForMaskedLM,
        distilbert_unembed,
        "distilbert.transformer.layer",
        {"attention": "attention", "after_attention": "sa_layer_norm", "feed_forward": "ffn"},
        normed_last=False,
    ),
}
# Sequence classifiers with three labels, and where a text is read: at its first or last position.
CLASSIFIERS = {
    "bert_labels": (
        Family(
            "masked",
            llama_like(hf.BertConfig, num_labels=3),
            hf.BertForSequenceClassification,
            bert_labels,
            "bert.encoder.layer",
            BERT,
            normed_last=False,
        ),
        0,
    ),
    "gpt2_labels": (
        Family(
            "causal",
            gpt_like(hf.GPT2Config, num_labels=3),
            hf.GPT2ForSequenceClassification,
            gpt2_labels,
            "transformer.h",
            {"attention": "attn", "feed_forward": "mlp"},
        ),
        -1,
    ),
}
CAUSAL = [name for name, family in FAMILIES.items() if family.kind == "causal"]
SEQ2SEQ = [name for name, family in FAMILIES.items() if family.kind == "seq2seq"]
GENERATING = CAUSAL + SEQ2SEQ


def build(name: str, seed: int = 0) -> nn.Module:
    """The family's network with weights that leave nothing at its default: matrices, norms, biases, logit bias."""
    family = CLASSIFIERS[name][0] if name in CLASSIFIERS else FAMILIES[name]
    tokenizer = tokenizer_for(family.kind)
    torch.manual_seed(seed)
    network = family.network(
        family.config(
            vocab_size=len(tokenizer) + 4,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )
    )
    network.config._experts_implementation = "eager"  # the other ways of running experts have no float64
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.requires_grad:  # Marian's sinusoidal positions are not in a checkpoint
                continue
            if parameter.ndim == 1:
                parameter += 0.4 * torch.randn_like(parameter)
            else:
                parameter.copy_(torch.randn_like(parameter) * 1.6 / parameter.shape[-1] ** 0.5)
        if hasattr(network, "final_logits_bias"):
            network.final_logits_bias.normal_(0.0, 0.5)
    return network.eval().requires_grad_(False)


def save(name: str, folder: Path, seed: int = 0) -> Path:
    """A checkpoint folder of the family, as `load_model` expects one."""
    build(name, seed).save_pretrained(folder)
    family = CLASSIFIERS[name][0] if name in CLASSIFIERS else FAMILIES[name]
    tokenizer_for(family.kind).save_pretrained(folder)
    return folder


@torch.no_grad()
def oracle_run(network: nn.Module, family: Family, prompt: list[int], output: list[int]) -> dict:
    """One sequence through a network as it is, no cache, no padding: what every position saw, layer by layer.

    Returns "states" [tokens, L+1, hidden_size], the model's own "logits" and transformers' last of the "hidden_states"
    [tokens, ...], and for every site a tensor [tokens, L, hidden_size].
    """
    blocks, seen, handles = network.get_submodule(family.blocks), {}, []

    def keep(key):
        def hook(_module, _args, result):
            state = result[0] if isinstance(result, tuple) else result
            state = state[0] if state.ndim == 3 else state  # OPT's feed-forward drops the batch
            seen[key] = state * (1.0 if key[0] in ("block", "after_attention") else family.scale)

        return hook

    for number, block in enumerate(blocks):
        for site, path in {**family.sites, "block": ""}.items():
            handles.append(block.get_submodule(path).register_forward_hook(keep((site, number))))
    if family.kind == "causal":
        inputs, first = {"input_ids": torch.tensor([prompt + output[:-1]]), "use_cache": False}, len(prompt) - 1
    elif family.kind == "seq2seq":
        inputs, first = (
            {
                "input_ids": torch.tensor([prompt]),
                "use_cache": False,
                "decoder_input_ids": torch.tensor([[network.config.decoder_start_token_id, *output[:-1]]]),
            },
            0,
        )
    else:
        inputs, first = {"input_ids": torch.tensor([prompt])}, 0
    result = network(**inputs, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    hidden = result.decoder_hidden_states if family.kind == "seq2seq" else result.hidden_states
    layers = [*(h[0] for h in hidden[:-1]), seen["block", len(blocks) - 1]]
    found = {
        "states": torch.stack(layers, 1)[first:],
        "logits": result.logits[0, first:],
        "hidden_states": hidden[-1][0, first:],
    }
    for site in (*family.sites, "block"):
        found[site] = torch.stack([seen[site, i] for i in range(len(blocks))], 1)[first:]
    if "after_attention" not in found:
        found["after_attention"] = found["states"][:, :-1] + found["attention"]
    return found


@torch.no_grad()
def readouts(logits: Tensor, states: Tensor, final: Tensor, known: Tensor) -> dict[str, Tensor]:
    """Every readout [n, S] by its definition, in the dtype of logits [n, S, V] and states [n, S, hidden_size]."""
    rows = torch.arange(len(logits))
    logs = logits - logits.logsumexp(-1, keepdim=True)
    p = logs.exp()
    top = p.sort(-1, descending=True).values
    reference = p[rows, :, known.clamp(min=0)]
    reference[known < 0] = math.nan
    q, middle = p[:, -1:], (p + p[:, -1:]) / 2
    last = states[:, -1:]
    return {
        "probability": top[..., 0],
        "margin": top[..., 0] - top[..., 1],
        "topk_probability": top[..., :10],
        "final_probability": p[rows, :, final],
        "reference_probability": reference,
        "entropy": -(p * logs).sum(-1),
        "js_final": ((p * (p / middle).log()).sum(-1) + (q * (q / middle).log()).sum(-1)) / 2,
        "cosine": (states * last).sum(-1) / states.norm(dim=-1) / last.norm(dim=-1),
    }


def sample(model: Model) -> tuple[list[int], list[int]]:
    """(prompt, output) for one run; of a text that is read in place the two are one."""
    prompt = model.tokenizer(PROMPTS[1])["input_ids"]
    return prompt, [40, 9, 77, 200, 40] if model.adapter.writes else prompt


def identity_unembed(size: int) -> Unembed:
    """An unembed whose logits are the states themselves."""
    head = nn.Linear(size, size, bias=False).requires_grad_(False)
    head.weight.copy_(torch.eye(size))
    return Unembed([], head, 1.0, 1.0, 0.0, None, size, size)


@torch.no_grad()
def plain_greedy(network: nn.Module, family: Family, prompt: list[int], steps: int, ends: set[int]) -> list[int]:
    """Argmax one token at a time, one row, no cache, no padding."""
    output: list[int] = []
    while len(output) < steps and not (output and output[-1] in ends):
        if family.kind == "causal":
            inputs = {"input_ids": torch.tensor([prompt + output])}
        else:
            inputs = {
                "input_ids": torch.tensor([prompt]),
                "decoder_input_ids": torch.tensor([[network.config.decoder_start_token_id, *output]]),
            }
        output.append(int(network(**inputs, use_cache=False).logits[0, -1].argmax()))
    return output
