"""transformer-lens: generate through its bridge with hooks on the residual stream, then ln_final and unembed."""

import torch
from serve import batches, serve, top_readout
from transformer_lens.model_bridge import TransformerBridge


def load(folder: str) -> TransformerBridge:
    """The checkpoint behind the bridge, with its own weights (nothing folded)."""
    return TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)


def run(model: TransformerBridge, request: dict) -> dict:
    """Tokens [sequences, new] and top-1s [sequences, new, L+1]."""
    steps, tokens, top1 = request["new_tokens"], [], []
    names = ["blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(model.cfg.n_layers))]
    for ids in batches(request):
        kept = []
        keep = [(name, lambda state, hook: kept.append(state[:, -1].clone())) for name in names]
        with model.hooks(fwd_hooks=keep):
            made = model.generate(
                ids, max_new_tokens=steps, do_sample=False, stop_at_eos=False, return_type="tokens", verbose=False
            )
        states = torch.stack(kept).unflatten(0, (steps, -1))  # [steps, L+1, batch, width]
        flat = states.permute(2, 0, 1, 3).flatten(0, 2)
        # ln_final and unembed take [batch, position, width].
        best = top_readout(lambda h: model.unembed(model.ln_final(h[None]))[0], flat, model.cfg.d_vocab)
        top1.append(torch.tensor(best).view(len(ids), steps, -1))
        tokens.append(made[:, ids.shape[1] :])
    return {"tokens": torch.cat(tokens), "top1": torch.cat(top1)}


if __name__ == "__main__":
    serve(load, run)
