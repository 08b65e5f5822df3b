"""tuned-lens: transformers' generate with hidden states, then its logit lens over all of them."""

from dataclasses import dataclass

import torch
from serve import batches, serve, top_readout
from transformers import AutoModelForCausalLM
from tuned_lens.nn.lenses import LogitLens


@dataclass
class Loaded:
    """The network and its lens."""

    network: torch.nn.Module
    lens: LogitLens


def load(folder: str) -> Loaded:
    """The checkpoint and the logit lens made from it (a copy of its norm and head)."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Loaded(network, LogitLens.from_model(network))


def run(model: Loaded, request: dict) -> dict:
    """Tokens [sequences, new] and top-1s [sequences, new, L+1]."""
    steps, tokens, top1 = request["new_tokens"], [], []
    head, vocabulary = model.network.get_output_embeddings(), model.network.config.vocab_size
    for ids in batches(request):
        made = model.network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=steps,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_hidden_states=True,
            return_dict_in_generate=True,
        )
        layers = []
        for layer in range(len(made.hidden_states[0])):
            states = torch.stack([step[layer][:, -1] for step in made.hidden_states], dim=1).flatten(0, 1)
            # The last hidden state of transformers is normed already; the lens would norm it again.
            last = layer + 1 == len(made.hidden_states[0])
            best = top_readout(head if last else lambda h, at=layer: model.lens(h, at), states, vocabulary)
            layers.append(torch.tensor(best).view(len(ids), steps))
        top1.append(torch.stack(layers, dim=-1))
        tokens.append(made.sequences[:, ids.shape[1] :])
    return {"tokens": torch.cat(tokens), "top1": torch.cat(top1)}


if __name__ == "__main__":
    serve(load, run)
