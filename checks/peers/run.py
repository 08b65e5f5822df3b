"""One way to get the readouts of a model, in a process of its own: `python run.py WAY CHECKPOINT`.

It loads a checkpoint once, then answers one request per line on stdin with one line of JSON. tuned-lens runs in an
environment of its own, so this needs torch, numpy and transformers only, and imports what a way needs inside of it.
A request is {ids, texts, given, batch, new_tokens, out}: prompts that are continued, or texts that are read (`given`).
"""

import ctypes
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

CHUNKS = (16, 32, 64, 128, 256, 512, 1024)  # rows per product with the head that the floor tries
LOGITS = 4 << 20  # logits that are held at once, in elements; about 16 MB in float32, a good size for a CPU's caches
TEXTS = 8  # given texts that are read at once
Request = dict[str, Any]


def batches(request: Request) -> list[Tensor]:
    """Prompt token ids, [batch, prompt] each."""
    size, ids = request["batch"], request["ids"]
    return [torch.tensor(ids[start : start + size]) for start in range(0, len(ids), size)]


def read_batches(request: Request) -> Iterator[tuple[list[int], Tensor]]:
    """Numbers of texts of about one length, and their token ids but the last, [texts, longest]. They are padded at the
    end, which no earlier token sees.
    """
    ids = [torch.tensor(one[:-1]) for one in request["ids"]]
    order = sorted(range(len(ids)), key=lambda text: len(ids[text]))
    for start in range(0, len(ids), TEXTS):
        texts = order[start : start + TEXTS]
        yield texts, torch.nn.utils.rnn.pad_sequence([ids[text] for text in texts], batch_first=True)


def of_texts(request: Request, found: dict[int, Tensor]) -> Tensor:
    """What was found of each text, in the order of the request, without its padding."""
    return torch.cat([found[text][: len(ids) - 1] for text, ids in enumerate(request["ids"])])


def load_network(folder: str) -> Any:
    """The checkpoint as transformers loads it, float32, without an end token: outputs have a fixed length."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    network.generation_config.eos_token_id = None
    return network


def generate(network: Any, ids: Tensor, new_tokens: int) -> Any:
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": new_tokens}
    options |= {"output_hidden_states": True, "return_dict_in_generate": True}
    return network.generate(ids, attention_mask=torch.ones_like(ids), **options)


# ---- the trace


def load_trace(folder: str) -> Any:
    """The checkpoint as eelib loads it, its check at load included (not timed)."""
    import eelib

    model = eelib.load_model(folder, dtype="float32", device="cpu")
    model.network.generation_config.eos_token_id = model.vocab_size  # no token has this number
    return model


def run_trace(model: Any, request: Request) -> Callable[[], dict]:
    """`eelib.trace`, whole: encoding, decoding, all readouts, writing into a new folder."""
    import eelib

    runs = tempfile.TemporaryDirectory()
    task, new = eelib.Task.from_prompts(request["texts"]), request["new_tokens"]
    given = {"given": True} if request["given"] else {"max_new_tokens": new, "batch_size": request["batch"]}
    made = eelib.trace(model, task, folder=runs.name, progress=False, **given)

    def fetch() -> dict:
        tokens, top1 = made.tokens["token_id"].to_numpy(), made["top1"]
        runs.cleanup()
        if request["given"]:
            return {"top1": top1}
        return {"tokens": tokens.reshape(-1, new), "top1": top1.reshape(-1, new, top1.shape[1])}

    return fetch


# ---- the floor


def run_decode(network: Any, request: Request) -> dict:
    """Plain greedy decoding and nothing else."""
    from transformers import DynamicCache

    made = []
    for ids in batches(request):
        cache, steps = DynamicCache(config=network.config), []
        for _ in range(request["new_tokens"]):
            logits = network(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            steps.append(ids)
        made.append(torch.cat(steps, dim=1))
    return {"tokens": torch.cat(made)}


def run_head(network: Any, request: Request) -> dict:
    """The bare products of all tokens' L+1 states with the head, in the row count that is fastest here."""
    weight = network.get_output_embeddings().weight.detach().t()
    rows = len(request["ids"]) * request["new_tokens"] * (network.config.num_hidden_layers + 1)
    sizes = [size for size in CHUNKS if size <= rows] or [rows]
    return {"seconds": np.array(min(product_seconds(weight, rows, size) for size in sizes))}


def product_seconds(weight: Tensor, rows: int, chunk: int) -> float:
    """Seconds for [rows, width] x [width, vocabulary] in chunks, buffers made and touched beforehand."""
    state = torch.ones(chunk, weight.shape[0])
    out = torch.zeros(chunk, weight.shape[1])
    began = time.perf_counter()
    for start in range(0, rows, chunk):
        size = min(chunk, rows - start)
        torch.mm(state[:size], weight, out=out[:size])
    return time.perf_counter() - began


# ---- the plain way: hidden states, then the head layer by layer, all readouts of a trace


@contextmanager
def last_states(network: Any) -> Iterator[list[Tensor]]:
    """What goes into the last norm, call by call: transformers norms the last of its hidden states."""
    found: list[Tensor] = []
    with network.model.norm.register_forward_pre_hook(lambda _module, inputs: found.append(inputs[0])):
        yield found


def run_plain(network: Any, request: Request) -> dict:
    """`generate` with all hidden states, then their readouts, all steps stacked."""
    tokens, found = [], []
    for ids in batches(request):
        with last_states(network) as last:
            made = generate(network, ids, request["new_tokens"])
        new = made.sequences[:, ids.shape[1] :]
        layers = [[*(h[:, -1] for h in step[:-1]), end[:, -1]] for step, end in zip(made.hidden_states, last)]
        states = torch.stack([torch.stack(step) for step in layers]).permute(2, 0, 1, 3)  # [batch, steps, L+1, width]
        parts = readouts_of(network, states.flatten(0, 1))
        found.append({name: value.unflatten(0, new.shape) for name, value in parts.items()})
        tokens.append(new)
    return {"tokens": torch.cat(tokens)} | {name: torch.cat([one[name] for one in found]) for name in ("top1", "gap")}


def read_plain(network: Any, request: Request) -> dict:
    """A run of the network with all hidden states for each batch of texts, then the readouts of all but padding."""
    found: dict[str, dict[int, Tensor]] = {"top1": {}, "gap": {}}
    for texts, ids in read_batches(request):
        with last_states(network) as last:
            out = network.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        states = torch.stack([*out.hidden_states[:-1], *last], dim=2)  # [texts, tokens, L+1, width]
        for row, text in enumerate(texts):
            own = slice(len(request["ids"][text]) - 1)
            parts = readouts_of(network, states[row, own])
            for name, one in found.items():
                one[text] = parts[name]
    return {name: of_texts(request, one) for name, one in found.items()}


def readouts_of(network: Any, states: Tensor) -> dict[str, Tensor]:
    """{readout: [tokens, L+1, ...]} of states [tokens, L+1, width], in chunks that fit into memory.

    The head runs once for each state.
    """
    head, found = torch.nn.Sequential(network.model.norm, network.lm_head), []
    for part in states.split(max(1, LOGITS // network.config.vocab_size)):
        *inner, last = part.unbind(1)
        target = head(last).log_softmax(-1)
        layers = [readouts(head(state).log_softmax(-1), target, state, last) for state in inner]
        layers.append(readouts(target, target, last, last))
        found.append({name: torch.stack([layer[name] for layer in layers], dim=1) for name in layers[0]})
    return {name: torch.cat([one[name] for one in found]) for name in found[0]}


def readouts(logs: Tensor, target: Tensor, state: Tensor, last: Tensor) -> dict[str, Tensor]:
    """What a trace keeps of a state, written out plainly; `logs` and `target`: log-probabilities, the last layer's."""
    probabilities, goal = logs.exp(), target.exp()
    top, ids = logs.topk(10)
    own = logs.gather(1, target.argmax(-1, keepdim=True))
    middle = ((probabilities + goal) / 2).log()
    divergence = (probabilities * (logs - middle)).sum(-1) / 2 + (goal * (target - middle)).sum(-1) / 2
    return {
        "top1": ids[:, 0],
        "topk_ids": ids,
        "topk_probability": top.exp(),
        "margin": top[:, 0].exp() - top[:, 1].exp(),
        "entropy": -(probabilities * logs).sum(-1),
        "final_rank": (logs > own).sum(-1) + 1,
        "final_probability": own[:, 0].exp(),
        "cosine": F.cosine_similarity(state, last, dim=-1),
        "js_final": divergence,
        "gap": top[:, 0] - top[:, 1],
    }


# ---- tuned-lens: it gives less than a trace, and does no needless work


def load_tuned_lens(folder: str) -> Any:
    """The network with tuned-lens's logit lens (a copy of its norm and head) beside it."""
    from tuned_lens.nn.lenses import LogitLens

    network = load_network(folder)
    network.logit_lens = [LogitLens.from_model(network)]  # in a list: its weights are not the network's
    return network


def run_tuned_lens(network: Any, request: Request) -> dict:
    """transformers' generate with hidden states, then the logit lens over all of them: top-10 and entropy."""
    tokens, top1 = [], []
    (lens,), head, rows = network.logit_lens, network.get_output_embeddings(), LOGITS // network.config.vocab_size
    for ids in batches(request):
        made, layers = generate(network, ids, request["new_tokens"]), []
        new = made.sequences[:, ids.shape[1] :]
        for layer in range(len(made.hidden_states[0])):
            states, found = torch.stack([step[layer][:, -1] for step in made.hidden_states], dim=1).flatten(0, 1), []
            for part in states.split(max(1, rows)):
                # The last hidden state of transformers is normed already; the lens would norm it again.
                logits = head(part) if layer + 1 == len(made.hidden_states[0]) else lens(part, layer)
                logs = logits.log_softmax(-1)
                top, best = logs.topk(10)
                found.append((best[:, 0], top.exp(), -(logs.exp() * logs).sum(-1)))
            layers.append(torch.cat([best for best, _, _ in found]).view(new.shape))
        top1.append(torch.stack(layers, dim=-1))
        tokens.append(new)
    return {"tokens": torch.cat(tokens), "top1": torch.cat(top1)}


def read_tuned_lens(network: Any, request: Request) -> dict:
    """tuned-lens's evaluation of texts: a run of the network for each batch, then of the lens's logits entropy, top-1,
    KL to the last layer and the next token's loss.
    """
    (lens,), top1 = network.logit_lens, dict[int, Tensor]()
    for texts, ids in read_batches(request):
        out = network(input_ids=ids, output_hidden_states=True, use_cache=False)
        for row, text in enumerate(texts):
            following = torch.tensor(request["ids"][text][1:])
            last, layers = out.logits[row, : len(following)].log_softmax(-1), []
            for layer, state in enumerate(out.hidden_states[:-1]):
                logs = lens(state[row, : len(following)], layer).log_softmax(-1)
                (logs.exp() * logs).sum(-1), F.nll_loss(logs, following)
                F.kl_div(logs, last, log_target=True, reduction="none").sum(-1)
                layers.append(logs.argmax(-1))
            top1[text] = torch.stack([*layers, last.argmax(-1)], dim=-1)
    return {"top1": of_texts(request, top1)}


WAYS: dict[str, tuple[Callable, Callable, Callable | None]] = {  # how to load, to continue prompts, to read texts
    "trace": (load_trace, run_trace, run_trace),
    "decode": (load_network, run_decode, None),
    "head": (load_network, run_head, None),
    "plain": (load_network, run_plain, read_plain),
    "tuned-lens": (load_tuned_lens, run_tuned_lens, read_tuned_lens),
}


# ---- the process


def serve(way: str, folder: str) -> None:
    """Load the checkpoint and answer requests until stdin ends, with {seconds, peak_mb} or {error}.

    A way returns arrays, or a function that fetches them after the clock has stopped; they are saved under `out`. An
    array `seconds` replaces the clock's figure, where part of the work is not to be counted. What libraries print goes
    to stderr.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_grad_enabled(False)
    load, *runs = WAYS[way]
    model = load(folder)
    for weight in getattr(model, "network", model).parameters():
        weight.detach().sum()  # read once, so that weights mapped from the file count as the model's own memory
    settle()
    loaded = memory("VmRSS")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = measured(model, runs[request["given"]], request, loaded)
        except Exception as error:  # a way that cannot do a cell is a result
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        answers.write(json.dumps(answer) + "\n")


def measured(model: Any, run: Callable[[Any, Request], Any], request: Request, loaded: float) -> dict:
    """One timed run and the peak of its memory above that of the loaded model."""
    settle()
    Path("/proc/self/clear_refs").write_text("5")  # Linux counts the peak of resident memory from here
    began = time.perf_counter()
    result = run(model, request)
    seconds = time.perf_counter() - began
    peak = memory("VmHWM") - loaded
    arrays = result() if callable(result) else result
    seconds = float(arrays.pop("seconds", seconds))
    if request["out"]:
        np.savez_compressed(request["out"], **{name: np.asarray(values) for name, values in arrays.items()})
    return {"seconds": seconds, "peak_mb": round(peak, 1)}


def settle() -> None:
    """Give freed memory back, so that a peak is this run's own."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def memory(field: str) -> float:
    """A memory figure of this process in MB: VmRSS is now, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field + ":")).split()[1]) / 1024


if __name__ == "__main__":
    serve(*sys.argv[1:])
