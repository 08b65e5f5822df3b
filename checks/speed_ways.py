"""The ways of this environment, one per process: `python -m checks.speed_ways WAY CHECKPOINT` (see peers/serve.py)."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from .peers.serve import batches, serve

if TYPE_CHECKING:  # the other ways run without it
    from eelib.models.model import Model
    from eelib.tracing.trace import Trace

CHUNKS = (16, 32, 64, 128, 256, 512, 1024)  # rows per head GEMM that the floor tries
STACKED_LOGITS = 4 << 20  # logits of one chunk of the stacked plain way, in elements: the fastest of 1 to 128 rows


def load_network(folder: str) -> LlamaForCausalLM:
    """The checkpoint as transformers loads it, float32."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


# The trace


def load_trace(folder: str) -> "Model":
    """The checkpoint as this library loads it, its check at load included (not timed)."""
    import eelib

    return eelib.load_model(folder, dtype="float32", device="cpu")


def run_trace(model: "Model", request: dict) -> Callable[[], dict[str, np.ndarray]]:
    """`eelib.trace`, whole: encoding, decoding, all readouts, writing into a new folder."""
    import eelib

    runs = tempfile.TemporaryDirectory()
    task = eelib.Task.from_prompts(request["texts"])
    made = eelib.trace(
        model,
        task,
        max_new_tokens=request["new_tokens"],
        folder=runs.name,
        batch_size=request["batch"],
        progress=False,
    )

    def fetch() -> dict[str, np.ndarray]:
        arrays = arrays_of(made, request) if request["out"] else {}
        runs.cleanup()
        return arrays

    return fetch


def arrays_of(made: "Trace", request: dict) -> dict[str, np.ndarray]:
    """Tokens [sequences, new] and top-1s [sequences, new, L+1] of a trace."""
    rows = made.tokens.reset_index(drop=True)
    order = rows.sort_values(["sequence", "position"]).index.to_numpy()
    shape = (request["sequences"], request["new_tokens"])
    return {
        "tokens": rows["token_id"].to_numpy()[order].reshape(shape),
        "top1": np.asarray(made["top1"])[order].reshape(*shape, -1),
    }


# The floor


def run_decode(network: LlamaForCausalLM, request: dict) -> dict:
    """Plain greedy decoding and nothing else."""
    made = []
    with torch.inference_mode():
        for ids in batches(request):
            cache, steps = DynamicCache(config=network.config), []
            for _ in range(request["new_tokens"]):
                logits = network(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                ids = logits[:, -1].argmax(-1, keepdim=True)
                steps.append(ids)
            made.append(torch.cat(steps, dim=1))
    return {"tokens": torch.cat(made)}


RATES: dict[int, float] = {}  # seconds per row by rows per GEMM, found once per process


def run_head(network: LlamaForCausalLM, request: dict) -> dict:
    """The bare head GEMMs of all tokens and L+1 states, in the row count that is fastest here; trying is not timed."""
    weight = network.get_output_embeddings().weight.detach().t()
    rows = request["sequences"] * request["new_tokens"] * (network.config.num_hidden_layers + 1)
    sizes = [size for size in CHUNKS if size <= rows] or [rows]
    for size in sizes:
        if size not in RATES:
            RATES[size] = min(gemms(weight, size, size) for _ in range(2)) / size
    best = min(sizes, key=RATES.__getitem__)
    return {"chunk": np.array(best), "seconds": np.array(gemms(weight, rows, best))}


def gemms(weight: Tensor, rows: int, chunk: int) -> float:
    """Seconds for [rows, width] x [width, vocabulary] in chunks, buffers made and touched beforehand."""
    state = torch.ones(chunk, weight.shape[0])
    out = torch.zeros(chunk, weight.shape[1])
    began = time.perf_counter()
    for start in range(0, rows, chunk):
        size = min(chunk, rows - start)
        torch.mm(state[:size], weight, out=out[:size])
    return time.perf_counter() - began


def run_generate(network: LlamaForCausalLM, request: dict) -> dict:
    """transformers' own greedy generation, no hidden states."""
    made = [generate(network, ids, request["new_tokens"])[:, ids.shape[1] :] for ids in batches(request)]
    return {"tokens": torch.cat(made)}


def generate(network: Any, ids: Tensor, new_tokens: int, **options: Any) -> Any:
    """`network.generate`, greedy, of a fixed length."""
    return network.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )


# The plain way: generate with hidden states, then the head layer by layer, all readouts of a trace


def hidden_states(network: LlamaForCausalLM, request: dict) -> Iterator[tuple[Tensor, Tensor]]:
    """Per batch: new tokens [batch, steps], and states before the final norm [steps, L+1, batch, width].

    transformers norms the last of its hidden states, so that one is taken at the door of the final norm instead.
    """
    for ids in batches(request):
        last: list[Tensor] = []
        hook = network.model.norm.register_forward_pre_hook(lambda _module, inputs: last.append(inputs[0][:, -1]))
        made = generate(network, ids, request["new_tokens"], output_hidden_states=True, return_dict_in_generate=True)
        hook.remove()
        states = torch.stack(
            [torch.stack([*(h[:, -1] for h in step[:-1]), final]) for step, final in zip(made.hidden_states, last)]
        )
        yield made.sequences[:, ids.shape[1] :], states


def readouts(logits: Tensor, chosen: Tensor, target: Tensor, state: Tensor, last: Tensor) -> dict[str, Tensor]:
    """What a trace keeps of a state, written out plainly; `target` are log-probabilities of the last layer."""
    logs = logits.log_softmax(-1)
    probabilities = logs.exp()
    top, ids = logs.topk(10)
    own = logs.gather(1, chosen[:, None])
    goal = target.exp()
    middle = ((probabilities + goal) / 2).log()
    divergence = (probabilities * (logs - middle)).sum(-1) / 2 + (goal * (target - middle)).sum(-1) / 2
    return {
        "top1": ids[:, 0],
        "topk_ids": ids,
        "topk_probability": top.exp(),
        "probability": top[:, 0].exp(),
        "margin": top[:, 0].exp() - top[:, 1].exp(),
        "entropy": -(probabilities * logs).sum(-1),
        "final_rank": (logs > own).sum(-1) + 1,
        "final_probability": own[:, 0].exp(),
        "cosine": F.cosine_similarity(state, last, dim=-1),
        "js_final": divergence,
        "gap": top[:, 0] - top[:, 1],
    }


def run_plain_steps(network: LlamaForCausalLM, request: dict) -> dict:
    """Each step's states through the head, layer by layer."""
    head = torch.nn.Sequential(network.model.norm, network.lm_head)
    tokens, found = [], []
    for new, states in hidden_states(network, request):
        tokens.append(new)
        steps = []
        for step in range(states.shape[0]):
            last = states[step, -1]
            target = head(last).log_softmax(-1)
            steps.append([readouts(head(state), new[:, step], target, state, last) for state in states[step]])
        found.append(
            {
                name: torch.stack([torch.stack([layer[name] for layer in step], dim=1) for step in steps], dim=1)
                for name in steps[0][0]
            }
        )
    return {
        "tokens": torch.cat(tokens),
        "top1": torch.cat([part["top1"] for part in found]),
        "gap": torch.cat([part["gap"] for part in found]),
    }


def run_plain_stacked(network: LlamaForCausalLM, request: dict) -> dict:
    """All steps of a layer stacked, then the head layer by layer, in chunks that fit into memory."""
    head = torch.nn.Sequential(network.model.norm, network.lm_head)
    rows = max(1, STACKED_LOGITS // network.config.vocab_size)
    tokens, top1 = [], []
    for new, states in hidden_states(network, request):
        tokens.append(new)
        steps, layers, count, width = states.shape
        flat = states.permute(2, 0, 1, 3).reshape(count * steps, layers, width)
        parts = []
        for start in range(0, len(flat), rows):
            part, chosen = flat[start : start + rows], new.reshape(-1)[start : start + rows]
            last = part[:, -1]
            target = head(last).log_softmax(-1)
            parts.append(
                [readouts(head(part[:, layer]), chosen, target, part[:, layer], last) for layer in range(layers)]
            )
        found = {
            name: torch.cat([torch.stack([layer[name] for layer in part], dim=1) for part in parts])
            for name in parts[0][0]
        }
        top1.append(found["top1"].view(count, steps, layers))
    return {"tokens": torch.cat(tokens), "top1": torch.cat(top1)}


WAYS: dict[str, tuple[Callable[[str], Any], Callable[[Any, dict], Any]]] = {
    "trace": (load_trace, run_trace),
    "decode": (load_network, run_decode),
    "head": (load_network, run_head),
    "generate": (load_network, run_generate),
    "plain, step by step": (load_network, run_plain_steps),
    "plain, stacked": (load_network, run_plain_stacked),
}

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in WAYS or not Path(sys.argv[2]).is_dir():
        sys.exit(f"usage: python -m checks.speed_ways WAY CHECKPOINT; WAY is one of {', '.join(map(repr, WAYS))}")
    serve(*WAYS[sys.argv[1]])
