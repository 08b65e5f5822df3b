"""nnsight: generate inside a tracing context, save each block's state at each step, then its head over all of them."""

import nnsight
import torch
from nnsight import TransformersModel
from serve import batches, serve, top_readout


def load(folder: str) -> TransformersModel:
    """The checkpoint, weights loaded at once."""
    return TransformersModel(folder, task="text-generation", dispatch=True, dtype=torch.float32)


def run(model: TransformersModel, request: dict) -> dict:
    """Tokens [sequences, new] and top-1s [sequences, new, L+1]."""
    steps, tokens, top1 = request["new_tokens"], [], []
    vocabulary = model.lm_head.weight.shape[0]
    for ids in batches(request):
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with model.generate(inputs, max_new_tokens=steps, do_sample=False) as tracer:
            kept = nnsight.save([])
            for _ in tracer.iter[:steps]:
                kept.append(model.model.layers[0].input[:, -1])
                for layer in model.model.layers:
                    kept.append(layer.output[:, -1])
            made = tracer.result.save()
        states = torch.stack(list(kept)).unflatten(0, (steps, -1))  # [steps, L+1, batch, width]
        flat = states.permute(2, 0, 1, 3).flatten(0, 2)
        module = model._module
        best = top_readout(lambda h: module.lm_head(module.model.norm(h)), flat, vocabulary)
        top1.append(torch.tensor(best).view(len(ids), steps, -1))
        tokens.append(made[:, ids.shape[1] :])
    return {"tokens": torch.cat(tokens), "top1": torch.cat(top1)}


if __name__ == "__main__":
    serve(load, run)
