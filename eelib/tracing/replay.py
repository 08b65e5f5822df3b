"""Layers saved and time saved: a run that knows each token's optimal exit layer and stops there (P §5, Table 5).

The oracle is timed against the full run of the same tokens. Both go the same way in the same loop: one token at a time,
each fed with the trace's own output; a run ends after the block of the exit layer (the full one after block L), then
the state goes through the model's own norm and head. So the two differ in the blocks alone. Keys and values of earlier
tokens are there at all layers for free: P's ideal situation, which no real decoder has.
"""

import json
import time

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from eelib.common.errors import InputError
from eelib.common.files import only_one, write_atomically
from eelib.common.interval import Interval
from eelib.common.machine import machine
from eelib.common.sources import code_hash
from eelib.common.stats import bootstrap_totals
from eelib.common.tolerances import close
from eelib.models.cache import GrowingLayer, growing_cache
from eelib.models.forward import cached, causal_inputs, new_cache
from eelib.models.model import Model
from eelib.models.probe import first_tensor
from eelib.tasks.task import Task
from eelib.tracing.decode import start_id
from eelib.tracing.make import encode
from eelib.tracing.trace import Trace

TIE = 1e-3  # difference of two logits that rounding may turn around in float32
FILE = "oracle.json"
ONE_TOKEN = 8  # texts of a classifier that are timed in place of one sequence: each is a single token


class Left(Exception):
    """Raised after the block at which a run ends; carries that block's state."""

    def __init__(self, state: Tensor):
        self.state = state


@torch.no_grad()
def state_at(model: Model, layer: int, inputs: dict) -> Tensor:
    """State [1, tokens, hidden_size] after block `layer` (1..L) of a run that goes no further."""
    block = model.blocks[layer - 1]
    calls = model.blocks[:layer].count(block)  # blocks that share weights are one module, called several times

    def leave(_module, _args, output):
        nonlocal calls
        calls -= 1
        if not calls:
            raise Left(first_tensor(output))

    handle = block.register_forward_hook(leave)
    try:
        model.network(**inputs)
    except Left as end:
        return end.state
    finally:
        handle.remove()
    raise InputError(f"{model.name}: block {layer} did not run")


class Replay:
    """One sequence, to be run again token by token from its known output.

    `ideal`: each step finds the keys and values of all earlier tokens at all layers; else it runs the whole text.
    """

    @torch.no_grad()
    def __init__(self, model: Model, prompt: list[int], output: list[int], ideal: bool):
        self.model, self.ideal, device = model, ideal, model.device
        self.read = model.read_at(prompt) if model.kind == "classifier" else -1
        self.prompt = torch.tensor([prompt], device=device)
        text = {"causal": [*prompt, *output[:-1]], "seq2seq": [start_id(model), *output[:-1]]}.get(model.kind, prompt)
        self.ids = torch.tensor([text], device=device)
        self.first = len(prompt) - 1 if model.kind == "causal" else 0  # where output token 0 is predicted
        self.same: dict = {}  # arguments of every step
        if model.kind == "classifier" and (types := getattr(prompt, "types", None)):
            self.same = {"token_type_ids": torch.tensor([types], device=device)}
        if model.kind == "seq2seq":
            self.same = {"encoder_outputs": self.encode(), "attention_mask": torch.ones_like(self.prompt)}
        self.cache, self.layers = self.filled(self.ids.shape[1]) if ideal else (None, [])

    def encode(self):
        """What the encoder makes of the prompt."""
        return self.model.network.get_encoder()(
            input_ids=self.prompt, attention_mask=torch.ones_like(self.prompt), return_dict=True
        )

    def filled(self, tokens: int):
        """(a cache that one run over the text has filled, the layers of it that each step takes back)."""
        cache = new_cache(self.model, tokens)
        if self.model.kind == "causal" and not all(isinstance(layer, GrowingLayer) for layer in cache.layers):
            cache = growing_cache(limit=tokens)  # layers that forget what left their window can't be taken back
        state_at(self.model, self.model.layers, self.step_inputs(slice(0, tokens), cache))
        layers = getattr(cache, "self_attention_cache", cache).layers
        return cache, [layer for layer in layers if layer.buffers is not None]

    def step_inputs(self, part: slice, cache) -> dict:
        """Arguments of a run over `part` of the text, with a cache that holds what stands before it."""
        ids = self.ids[:, part]
        if self.model.kind == "seq2seq":
            return {**self.same, "decoder_input_ids": ids, **cached(self.model, cache)}
        mask = torch.ones(1, part.stop, dtype=torch.long, device=ids.device)
        return causal_inputs(self.model, ids, mask) | cached(self.model, cache)

    def inputs(self, token: int) -> dict:
        """Arguments of the run that predicts output token `token`; its state is read at position `read`."""
        at = self.first + token
        if self.ideal:
            for layer in self.layers:
                layer.set_length(at)
            return self.step_inputs(slice(at, at + 1), self.cache)
        if self.model.kind == "classifier":
            return {"input_ids": self.ids, **self.same}
        name = "decoder_input_ids" if self.model.kind == "seq2seq" else "input_ids"
        extra = {"use_cache": False} if self.model.cache != "none" or self.model.accepts("use_cache") else {}
        return {**self.same, name: self.ids[:, : at + 1], **extra}

    @torch.no_grad()
    def before(self) -> None:
        """What a request runs before its first step: the encoder, or the prompt up to its last token."""
        if self.model.kind == "seq2seq":
            self.encode()
        elif self.ideal and self.first:
            cache = growing_cache(limit=self.first)
            state_at(self.model, self.model.layers, self.step_inputs(slice(0, self.first), cache))


def is_ideal(model: Model, prompt: list[int], output: list[int]) -> bool:
    """Whether steps on a filled cache that is set back give the states of runs over the whole text."""
    if model.kind not in ("causal", "seq2seq") or model.cache not in ("growing", "full"):
        return False
    try:
        step, whole = Replay(model, prompt, output, True), Replay(model, prompt, output, False)
        tokens = {0, len(output) // 2, len(output) - 1}
        return all(
            close(*(state_at(model, model.layers, way.inputs(t))[:, -1] for way in (step, whole)))
            for t in sorted(tokens, reverse=True)
        )
    except torch.OutOfMemoryError:  # says nothing about the cache
        raise
    except Exception:  # this cache is not for this network
        return False


@torch.no_grad()
def timed_step(replay: Replay, output: list[int], token: int, layer: int) -> tuple[float, bool]:
    """(seconds, whether it missed the trace's token) of predicting output token `token` after block `layer`.

    Arguments and cache are made ready outside the time. ValueError where a float32 run misses by more than rounding.
    """
    model, inputs, wanted = replay.model, replay.inputs(token), output[token]
    wait_for(model.device)
    began = time.perf_counter()
    state = state_at(model, layer, inputs)
    logits = model.unembed(state[0, replay.read][None])[0]
    top = int(logits.argmax())  # waits for the device
    seconds = time.perf_counter() - began
    wrong = top != wanted and float(logits[top] - logits[wanted]) > TIE
    if wrong and model.dtype == "float32":
        raise InputError(
            f"{model.name}: stopped after block {layer}, output token {token} is {top}; the trace has {wanted}"
        )
    return seconds, wrong


def wait_for(device: torch.device) -> None:
    """Let a GPU finish what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_before(replay: Replay) -> float:
    """Seconds of what comes before the first step."""
    wait_for(replay.model.device)
    began = time.perf_counter()
    replay.before()
    wait_for(replay.model.device)
    return time.perf_counter() - began


def measure(model: Model, trace: Trace, task: Task, sequences: int, repeats: int) -> pd.DataFrame:
    """Time `sequences` of a trace, evenly spread: one row each. Of each token the median of `repeats` counts.

    Columns: sequence, group, tokens, layers (blocks that the oracle runs, summed over tokens), full and oracle
    (seconds of all tokens), before (seconds of encoder or prompt), mismatches, ideal. End tokens are left out.
    """
    rows = np.flatnonzero(trace.statistic_rows())
    tokens = trace.tokens.iloc[rows].assign(layer=trace.exit_layer("first")[rows])
    known = tokens["sequence"].unique()
    chosen = known[np.unique(np.linspace(0, len(known) - 1, min(sequences, len(known))).round().astype(int))]
    prompts = encode(model, task, chosen.tolist())
    outputs = trace.tokens.groupby("sequence")["token_id"].agg(list)
    found, ideal = [], None
    for sequence, prompt in zip(chosen, prompts):
        part, output = tokens[tokens["sequence"] == sequence], outputs[sequence]
        if ideal is None:
            ideal = is_ideal(model, prompt, output)  # warms up, too
        replay, taken = Replay(model, prompt, output, ideal), np.zeros((2, repeats, len(part)))
        before, wrong = [], 0
        for repeat in range(repeats):
            for at, (token, layer) in enumerate(zip(part["position"].tolist(), part["layer"].tolist())):
                for way in ((0, 1), (1, 0))[(repeat + at) % 2]:  # in turns, so that neither is always the second
                    taken[way, repeat, at], missed = timed_step(replay, output, token, (model.layers, layer)[way])
                    wrong += missed and way == 1 and repeat == 0
            before.append(time_before(replay))
        full, oracle = np.median(taken, axis=1).sum(axis=1)
        found.append(
            {
                "sequence": int(sequence),
                "group": str(part["group"].iloc[0]),
                "tokens": len(part),
                "layers": int(part["layer"].sum()),
                "full": float(full),
                "oracle": float(oracle),
                "before": float(np.median(before)),
                "mismatches": int(wrong),
                "ideal": ideal,
            }
        )
    return pd.DataFrame(found)


def times(model: Model, trace: Trace, task: Task, sequences: int, repeats: int) -> pd.DataFrame:
    """`measure`, or what it found before on this machine with the same settings, kept in the trace's folder.

    attrs: machine, date. A file of its own: timings are no part of a trace, which is the same whenever it is made.
    """
    settings = {
        "sequences": sequences,
        "repeats": repeats,
        "machine": machine(model.device),
        "code": code_hash("models", "tracing"),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    path = trace.place / FILE
    with only_one(trace.place):
        try:
            record = json.loads(path.read_bytes())
        except (FileNotFoundError, ValueError):
            record = {}
        if record.get("settings") != settings:
            rows = measure(model, trace, task, sequences, repeats).to_dict("records")
            record = {"settings": settings, "date": time.strftime("%Y-%m-%d"), "rows": rows}
            write_atomically(path, json.dumps(record, indent=1).encode())
    frame = pd.DataFrame(record["rows"])
    frame.attrs |= {"machine": settings["machine"], "threads": settings["threads"], "date": record["date"]}
    return frame


def speed(frame: pd.DataFrame, layers: int, seed: int = 0) -> dict[str, Interval]:
    """Ratios of sums over sequences, groups resampled together.

    time: full over oracle. whole: the same with encoder or prompt added to both. layers: L over the oracle's mean
    exit layer. fixed: the share of a full token's time that no exit saves, if each block takes the same time.
    """
    frame = frame.assign(depth=layers * frame["tokens"])
    sums = frame.groupby("group")[["full", "oracle", "before", "depth", "layers"]].sum().to_numpy(float)

    def fixed(t: np.ndarray) -> np.ndarray:
        return 1 - (1 - t[:, 1] / t[:, 0]) / (1 - t[:, 4] / t[:, 3])

    statistics_ = {
        "time": lambda t: t[:, 0] / t[:, 1],
        "whole": lambda t: (t[:, 0] + t[:, 2]) / (t[:, 1] + t[:, 2]),
        "layers": lambda t: t[:, 3] / t[:, 4],
    }
    found = {name: bootstrap_totals(statistic, sums, seed=seed) for name, statistic in statistics_.items()}
    if (frame["layers"] < frame["depth"]).any():
        found["fixed"] = bootstrap_totals(fixed, sums, seed=seed)
    return found
