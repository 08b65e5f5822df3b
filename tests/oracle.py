"""The oracle: whole runs of a network, one token at a time, and every readout by its definition, all plainly.

In float64 it is what eelib's results are compared with; in float32 it says how far rounding alone leads, after
apple/ml-cross-entropy, whose tests compare so.
"""

import math
from collections.abc import Iterable
from itertools import combinations

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from eelib.common.tolerances import SMALLEST, close
from eelib.tracing.columns import READOUTS

SLACK = {torch.float64: 1e-12, torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the largest value

# How near a result has to be to the float64 one: as near as the plain way in its dtype, and a slack


def allowed_error(plain: Tensor, exact: Tensor) -> float:
    """How far a result may be from `exact` (float64): as far as the `plain` way in its dtype, and its slack.

    AssertionError where the plain way overflows, which would allow anything.
    """
    assert bool(plain.isfinite().all()), "the plain way is not finite, so it can't say how far ours may be off"
    worst = float((plain.double() - exact.double()).abs().max())
    return worst + SLACK[plain.dtype] * max(float(exact.double().abs().max()), SMALLEST)


def assert_as_near(ours: Tensor, plain: Tensor, exact: Tensor, what: str = "") -> None:
    """AssertionError, with both numbers, where `ours` is further from `exact` than `allowed_error`.

    The three have one shape, and NaN in the same places; `ours` and `plain` come in the same dtype, from two ways to
    what `exact` is in float64.
    """
    ours, plain, exact = (t.detach() for t in (ours, plain, exact))
    assert ours.shape == plain.shape == exact.shape, f"{what}: {ours.shape}, {plain.shape} and {exact.shape}"
    known = ~exact.isnan()
    assert torch.equal(known, ~ours.isnan()), f"{what}: NaN in other places"
    if bool(known.any()):
        ours, plain, exact = ours[known], plain[known], exact[known]
        error, allowed = float((ours.double() - exact.double()).abs().max()), allowed_error(plain, exact)
        assert error <= allowed, f"{what}: off by {error:.3g}, the plain way and the slack by {allowed:.3g}"


def assert_same(a, b, exact=True):
    """The same tokens, sequences and readouts, in the same order."""
    pd.testing.assert_frame_equal(a.tokens, b.tokens)
    pd.testing.assert_frame_equal(a.sequences, b.sequences)
    for name in READOUTS:
        if exact:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
        elif name not in ("topk_ids", "final_rank", "reference_rank"):
            assert_close(a[name], b[name], name)


def assert_close(a, b, what=""):
    """Readouts of one text, made in two ways: whole numbers equal, NaN in the same places, all else close."""
    known = ~np.isnan(b)
    np.testing.assert_array_equal(known, ~np.isnan(a), err_msg=what)
    if np.issubdtype(b.dtype, np.integer):
        np.testing.assert_array_equal(a, b, err_msg=what)
    elif known.any():
        assert close(torch.tensor(a[known]), torch.tensor(b[known])), what


def clear_tops(plain, exact):
    """Where the top-1 of float64 logits leads by more than twice what the plain float32 logits [..., V] may be off."""
    first, second = exact.topk(2).values.unbind(-1)
    return first - second > 2 * allowed_error(plain, exact)


def assert_top_ids(ours, plain, exact):
    """Top-1 ids [...] are those of the float64 logits [..., V], but where rounding explains another; nearly nowhere."""
    clear = clear_tops(plain, exact)
    assert torch.equal(ours.long()[clear], exact.argmax(-1)[clear])
    assert clear.double().mean() > 0.99


def assert_ranks(ranks: Tensor, logits: Tensor, ids: Tensor, near: float) -> None:
    """Ranks [...] of ids [...] among logits [..., V], each of which may be off by `near`; ids below 0 have no rank."""
    own = logits.gather(-1, ids.long().clamp(min=0)[..., None])
    low, high = (logits > own + near).sum(-1) + 1, (logits > own - near).sum(-1)  # the second counts the id itself
    assert ((low <= ranks) & (ranks <= high))[ids >= 0].all()
    assert (high - low).double().mean() < 1  # `near` is narrow enough to mean something


# Runs and readouts


@torch.no_grad()
def oracle_run(network: nn.Module, family, prompt: list[int], output: list[int]) -> dict:
    """One sequence through a network of a `families.Family` as it is: what every position saw, layer by layer.

    Returns "states" [tokens, L+1, hidden_size], the model's own "logits" [tokens, V], and for every site a tensor
    [tokens, L, hidden_size].
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
    text = prompt + output[:-1] if family.kind == "causal" else prompt
    first = len(prompt) - 1 if family.kind == "causal" else 0
    inputs = {"input_ids": torch.tensor([text])} | ({} if family.kind == "masked" else {"use_cache": False})
    if family.kind == "seq2seq":
        inputs["decoder_input_ids"] = torch.tensor([[network.config.decoder_start_token_id, *output[:-1]]])
    result = network(**inputs, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    hidden = result.decoder_hidden_states if family.kind == "seq2seq" else result.hidden_states
    layers = [*(h[0] for h in hidden[:-1]), seen["block", len(blocks) - 1]]
    found = {"states": torch.stack(layers, 1)[first:], "logits": result.logits[0, first:]}
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
    (js, kl), last = divergences(logs, logs[:, -1:]), states[:, -1:]
    return {
        "probability": top[..., 0],
        "margin": top[..., 0] - top[..., 1],
        "topk_probability": top[..., :10],
        "final_probability": p[rows, :, final],
        "reference_probability": reference,
        "entropy": -(p * logs).sum(-1),
        "js_final": js,
        "kl_final": kl,
        "cosine": (states * last).sum(-1) / states.norm(dim=-1) / last.norm(dim=-1),
    }


def divergences(logs: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """(JS, KL) of log-probabilities [..., V] and those of the last layer, in their dtype; a masked log is -10000."""
    p, q = logs.exp(), last.exp()
    middle = ((p + q) / 2).clamp(min=torch.finfo(torch.float32).tiny).log()
    js = ((p * (logs - middle)).nan_to_num(0.0) + (q * (last - middle)).nan_to_num(0.0)).sum(-1) / 2
    return js, (q * (last - logs.clamp(min=-1e4))).nan_to_num(0.0).sum(-1)


def plain_greedy(network: nn.Module, family, prompt: list[int], steps: int, ends: set[int]) -> list[int]:
    """Argmax one token at a time, one row, no cache, no padding."""
    output: list[int] = []
    while len(output) < steps and not (output and output[-1] in ends):
        output.append(int(oracle_run(network, family, prompt, [*output, 0])["logits"][-1].argmax()))
    return output


def cut(ids: list[int], ends: Iterable[int]) -> list[int]:
    """Ids up to and with the first end token."""
    return ids[: next((i + 1 for i, t in enumerate(ids) if t in ends), len(ids))]


def two_ends(outputs: list[list[int]]) -> tuple[int, int]:
    """Two tokens that end the outputs at many lengths."""
    tokens = sorted({token for ids in outputs for token in ids})[:30]
    return max(combinations(tokens, 2), key=lambda pair: len({len(cut(ids, pair)) for ids in outputs}))


# The way from a state to the logits of each family, on a network's own weights


def rms(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm in the states' dtype; the networks' own go through float32."""
    return states / (states.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def llama_unembed(n, h):
    return rms(h, n.model.norm.weight, n.config.rms_norm_eps) @ n.lm_head.weight.T


def granite_unembed(n, h):
    return llama_unembed(n, h) / n.config.logits_scaling


def gemma_unembed(n, h):
    logits = rms(h, 1 + n.model.norm.weight, n.config.rms_norm_eps) @ n.model.embed_tokens.weight.T
    cap = n.config.final_logit_softcapping
    return torch.tanh(logits / cap) * cap if cap else logits


def gpt2_unembed(n, h):
    return n.transformer.ln_f(h) @ n.transformer.wte.weight.T


def gptj_unembed(n, h):
    return n.lm_head(n.transformer.ln_f(h))


def t5_unembed(n, h):
    return rms(h, n.decoder.final_layer_norm.weight, n.config.layer_norm_epsilon) @ n.lm_head.weight.T


def t5_tied_unembed(n, h):
    normed = rms(h, n.decoder.final_layer_norm.weight, n.config.layer_norm_epsilon)
    return (normed * n.config.d_model**-0.5) @ n.shared.weight.T


def marian_unembed(n, h):
    return h @ n.model.shared.weight.T + n.final_logits_bias[0]


def bert_unembed(n, h):
    head = n.cls.predictions
    dense = nn.functional.gelu(head.transform.dense(h))
    return head.transform.LayerNorm(dense) @ n.bert.embeddings.word_embeddings.weight.T + head.bias


def bert_labels(n, h):
    return n.classifier(torch.tanh(n.bert.pooler.dense(h)))
