"""Layers saved and time saved: a run that knows each token's optimal exit layer and stops there (P §5, Table 5).

The oracle is timed against the full run of the same tokens. Both go the same way in the same loop: one token at a time,
each fed with the trace's own output; a run ends after the block of the exit layer (the full one after block L), then
the state goes through the model's own norm and head. So the two differ in the blocks alone. Keys and values of earlier
tokens are there at all layers for free: P's ideal situation, which no real decoder has.
"""

import time

import numpy as np
import pandas as pd
import torch
from transformers import Cache

from eelib.common.errors import InputError, SelfCheckError
from eelib.common.files import exclusive
from eelib.common.machine import machine, synchronize
from eelib.common.tolerances import close, tolerance
from eelib.models.cache import GrowingLayer, growing_cache
from eelib.models.model import Model
from eelib.models.probe import Unsupported
from eelib.tasks.task import Task
from eelib.tracing.decode import encode, state_at
from eelib.tracing.store import load_sealed, save_sealed
from eelib.tracing.trace import Trace

FILE = "replay.json"  # seconds differ from run to run, so they are not in the manifest
COLUMNS = ("sequence", "group", "tokens", "layers", "full", "oracle", "before", "mismatches", "ideal")
ONE_TOKEN = 8  # texts of a classifier that are timed in place of one sequence: each is a single token


class Replay:
    """One sequence, to be run again token by token from its known output.

    `ideal`: each step finds the keys and values of all earlier tokens at all layers; else it runs the whole text.
    """

    @torch.no_grad()
    def __init__(self, model: Model, prompt: list[int], output: list[int], ideal: bool):
        self.model, self.ideal, self.prompt, self.output, adapter = model, ideal, prompt, output, model.adapter
        start = adapter.read_positions(prompt).start
        self.read = -1 if adapter.writes else start
        self.ids = adapter.row(adapter.input_ids_for(prompt, output))
        self.first = start if adapter.writes else len(prompt) - 1  # the last position that output token 0 needs
        self.same = adapter.context([prompt])  # arguments of every step
        self.cache: Cache | None = None
        self.layers: list[GrowingLayer] = []
        if ideal:
            self.cache, self.layers = self.filled(self.ids.shape[1])

    def filled(self, tokens: int) -> tuple[Cache, list[GrowingLayer]]:
        """(a cache that one run over the text has filled, the layers of it that each step takes back)."""
        cache = self.model.writer.new_cache(tokens)
        assert cache is not None  # steps are ideal only with a cache of ours
        if not all(isinstance(layer, GrowingLayer) for layer in own_layers(cache)):
            cache = growing_cache(limit=tokens)  # layers that forget what left their window can't be taken back
        state_at(self.model, self.model.layers, self.step_inputs(slice(0, tokens), cache))
        layers = [layer for layer in own_layers(cache) if isinstance(layer, GrowingLayer)]
        return cache, [layer for layer in layers if layer.buffers]

    def step_inputs(self, part: slice, cache: Cache | None) -> dict:
        """Arguments of a run over `part` of the text, with a cache that holds what stands before it."""
        ids = self.ids[:, part]
        mask = torch.ones(1, part.stop, dtype=torch.long, device=ids.device)
        return self.model.writer.step_inputs(ids, mask, self.same) | self.model.writer.cached(cache)

    def inputs(self, token: int) -> dict:
        """Arguments of the run that predicts output token `token`; its state is read at position `read`."""
        at = self.first + token
        if self.ideal:
            for layer in self.layers:
                layer.set_length(at)
            return self.step_inputs(slice(at, at + 1), self.cache)
        adapter = self.model.adapter
        return {**self.same, adapter.target: self.ids[:, : at + 1], **adapter.uncached(self.model.network)}

    @torch.no_grad()
    def before(self) -> None:
        """What a request runs before its first step: the encoder, or the prompt up to its last token."""
        self.model.adapter.context([self.prompt])
        if self.ideal and self.first:
            cache = growing_cache(limit=self.first)
            state_at(self.model, self.model.layers, self.step_inputs(slice(0, self.first), cache))


def own_layers(cache: Cache) -> list:
    """A cache's layers; of an encoder-decoder's those of the text that it writes."""
    return getattr(cache, "self_attention_cache", cache).layers


def is_ideal(model: Model, prompt: list[int], output: list[int]) -> bool:
    """Whether steps on a filled cache that is set back give the states of runs over the whole text."""
    if not model.adapter.writes or model.cache not in ("growing", "full"):
        return False
    try:
        step, whole = Replay(model, prompt, output, True), Replay(model, prompt, output, False)
        tokens = {0, len(output) // 2, len(output) - 1}
        return all(
            close(*(state_at(model, model.layers, way.inputs(t))[:, -1] for way in (step, whole)))
            for t in sorted(tokens, reverse=True)
        )
    except Unsupported:  # this cache is not for this network
        return False


@torch.no_grad()
def timed_step(replay: Replay, token: int, layer: int) -> tuple[float, bool]:
    """(seconds, whether it missed the trace's token) of predicting output token `token` after block `layer`.

    Arguments and cache are made ready outside the time. SelfCheckError where a float32 run misses by more.
    """
    model, inputs, wanted = replay.model, replay.inputs(token), replay.output[token]
    synchronize(model.device)
    began = time.perf_counter()
    state = state_at(model, layer, inputs)
    logits = model.unembed(model.read_through_at(layer, state[0, replay.read][None]))[0]
    top = int(logits.argmax())  # waits for the device
    seconds = time.perf_counter() - began
    wrong = top != wanted and float(logits[top] - logits[wanted]) > tolerance(logits).tie
    if wrong and model.dtype == "float32":
        raise SelfCheckError(
            f"{model.name}: stopped after block {layer}, output token {token} is {top}; the trace has {wanted}"
        )
    return seconds, wrong


def time_before(replay: Replay) -> float:
    """Seconds of what comes before the first step."""
    synchronize(replay.model.device)
    began = time.perf_counter()
    replay.before()
    synchronize(replay.model.device)
    return time.perf_counter() - began


def time_sequences(model: Model, trace: Trace, task: Task, sequences: int, repeats: int) -> list[dict]:
    """Time `sequences` of a trace, evenly spread: a row each with COLUMNS, as `load_replay` has them.

    Of each token the median of `repeats` counts. End tokens are left out.
    """
    rows = np.flatnonzero(trace.statistic_rows())
    tokens = trace.tokens.iloc[rows].assign(layer=trace.exit_layer("first")[rows])
    known = tokens["sequence"].unique()
    chosen = known[np.unique(np.linspace(0, len(known) - 1, min(sequences, len(known))).round().astype(int))]
    prompts = encode(model, task, chosen.tolist())
    outputs = trace.tokens.groupby("sequence")["token_id"].agg(list)
    if not len(chosen):
        return []
    ideal = is_ideal(model, prompts[0], outputs[chosen[0]])  # warms up, too
    return [
        time_sequence(Replay(model, prompt, outputs[sequence], ideal), tokens[tokens["sequence"] == sequence], repeats)
        for sequence, prompt in zip(chosen, prompts)
    ]


def time_sequence(replay: Replay, tokens: pd.DataFrame, repeats: int) -> dict:
    """One row of `time_sequences`: `tokens` are those of the sequence that count, with the exit layer of each."""
    taken = np.zeros((2, repeats, len(tokens)))  # of the full run, and of the one that stops
    before, wrong = [], 0
    for repeat in range(repeats):
        for index, (token, layer) in enumerate(zip(tokens["position"].tolist(), tokens["layer"].tolist())):
            for way in ((0, 1), (1, 0))[(repeat + index) % 2]:  # alternately, so that neither is always the second
                taken[way, repeat, index], missed = timed_step(replay, token, (replay.model.layers, layer)[way])
                wrong += missed and way == 1 and repeat == 0
        before.append(time_before(replay))
    full, oracle = np.median(taken, axis=1).sum(axis=1)
    first = tokens.iloc[0]
    values = (
        int(first["sequence"]),
        str(first["group"]),
        len(tokens),
        int(tokens["layer"].sum()),
        float(full),
        float(oracle),
        float(np.median(before)),
        int(wrong),
        replay.ideal,
    )
    return dict(zip(COLUMNS, values, strict=True))


def settings_of(model: Model, trace: Trace, sequences: int, repeats: int) -> dict[str, str | int]:
    """What the times of a replay depend on."""
    return {
        "trace": trace.folder.name,  # which holds a hash of what it is of
        "sequences": sequences,
        "repeats": repeats,
        "machine": machine(model.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def make_replay(model: Model, task: Task, trace: Trace, sequences: int, repeats: int) -> None:
    """Time sequences of a trace and keep the times in its folder, unless the same were kept on this machine.

    Args:
        model: the trace's model.
        task: the trace's task.
        trace: a finished trace of outputs that were decoded.
        sequences: how many, evenly spread; of a classifier, whose texts are one token each, ONE_TOKEN texts for each.
            Of a masked model nothing is timed, and that is kept.
        repeats: how many times each token is timed; the median counts.
    """
    settings = settings_of(model, trace, sequences, repeats)
    if load_sealed(trace.folder / FILE).get("settings") == settings:
        return
    with exclusive(trace.folder, verbose=False):
        if load_sealed(trace.folder / FILE).get("settings") == settings:
            return
        count = sequences * (ONE_TOKEN if model.labels else 1)
        rows = [] if model.kind == "masked" else time_sequences(model, trace, task, count, repeats)
        save_sealed(trace.folder / FILE, {"settings": settings, "date": time.strftime("%Y-%m-%d"), "rows": rows})


def load_replay(trace: Trace) -> pd.DataFrame:
    """Times of a trace that `make_replay` has kept.

    Returns:
        A row per timed sequence: sequence, group, tokens, layers (blocks that the stopping run used, summed over
        tokens), full and oracle (seconds of all tokens), before (seconds of encoder or prompt), mismatches, ideal
        (whether earlier tokens came from a cache). No rows for a masked model: one pass reads all its positions, each
        with an exit layer of its own. attrs: machine, threads, date.

    Raises:
        InputError: nothing was kept, or the file was altered.
    """
    record = load_sealed(trace.folder / FILE)
    if not record:
        raise InputError(f"{trace.folder} has no times; make them with eestudy.exits.replay.make_replay")
    frame = pd.DataFrame(record["rows"], columns=list(COLUMNS))
    frame.attrs = {name: record["settings"][name] for name in ("machine", "threads")} | {"date": record["date"]}
    return frame
