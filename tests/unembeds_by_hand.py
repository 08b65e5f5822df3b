"""The way from a state to the logits of each family, written out: plain arithmetic on a network's own weights."""

import math

import torch
from torch import Tensor, nn


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


def gptj_unembed(n, h):
    return layer_norm(h, n.transformer.ln_f) @ n.lm_head.weight.T + n.lm_head.bias


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


def bert_labels(n, h):
    pooled = torch.tanh(h @ n.bert.pooler.dense.weight.T + n.bert.pooler.dense.bias)
    return pooled @ n.classifier.weight.T + n.classifier.bias


def gpt2_labels(n, h):
    return layer_norm(h, n.transformer.ln_f) @ n.score.weight.T
