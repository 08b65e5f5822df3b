"""What a trace must hold, worked out plainly: whole runs, one token at a time, every readout by its definition."""

import math

import torch
from families import Family
from torch import Tensor, nn


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
        "kl_final": (q * (q / p).log()).sum(-1),
        "cosine": (states * last).sum(-1) / states.norm(dim=-1) / last.norm(dim=-1),
    }


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
