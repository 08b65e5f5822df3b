"""A gate's scores over a finished trace: where its tokens would exit, and the curve of all thresholds.

Teacher-forced: every token follows the model's own full-depth output, so an error does not change later tokens.
Gates that look at states are scored by those that the trace keeps, or in one pass over the texts, and the scores are
stored beside the trace. A token exits at the first layer at which the running maximum of its scores passes. So its exit
layer only rises with the threshold, and all thresholds come from one pass over the scores.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from eelib.common.errors import InputError
from eelib.common.files import exclusive
from eelib.exits.exit_rule import Constant, Estimated, ExitRule
from eelib.exits.gates.gate import NO_EXIT, LayerOutput
from eelib.models.model import Model
from eelib.tasks.task import Task
from eelib.tracing.decode import encode, split_given, states_of
from eelib.tracing.plan import kept_states, with_kept_states
from eelib.tracing.store import add_file, intact, load_manifest, save_manifest, to_bytes
from eelib.tracing.trace import Trace

READOUT = ("top1", "probability", "margin", "entropy", "topk_ids", "topk_probability")
IN_A_TRACE = {"readout", "token before", "exit before"}  # of what gates need
SCORES_VERSION = 2  # of what a gate's code gives: another one makes stored scores anew
AT_ONCE = 512  # tokens whose states of all layers are held and scored at a time
ALL = slice(None)  # tokens
POINTS = 200  # most thresholds of a curve


class Scores(NamedTuple):
    """Scores of n tokens at layers 1..L.

    Attributes:
        score: float32 [n, L], the gate's scores, NO_EXIT where it was not asked.
        tokens: int64 [n, L], the token that an exit at a layer would emit; at layer L, the trace's own token.
    """

    score: Tensor
    tokens: Tensor

    def emitted(self, exits: Tensor) -> Tensor:
        """The tokens that exits at layers `exits` [n] emit, int64 [n]."""
        return self.tokens.gather(1, exits[:, None] - 1)[:, 0]


class Tokens:
    """The tokens of a trace as gates see them. `positions`, `final` (the last layer's ids): int64 [tokens].

    They are on `device`, and so is what `output` gives; the readouts, which are many, stay on the CPU.
    """

    def __init__(self, trace: Trace, device: torch.device | str = "cpu"):
        self.layers, self.device = trace.layers, device
        self.positions = positions_of(trace).to(device)
        self.final = torch.tensor(trace.final_ids, device=device).long()
        ids = torch.tensor(trace.tokens["token_id"].to_numpy(), device=device).long()
        self.before = ids.roll(1).masked_fill(self.positions == 0, -1)
        self.readouts = {name: torch.from_numpy(np.ascontiguousarray(trace[name].swapaxes(0, 1))) for name in READOUT}

    def output(self, layer: int, rows: Tensor | slice = ALL, exit_before: Tensor | None = None) -> LayerOutput:
        """The output of n tokens `rows` after block `layer`; `exit_before` [n]: exit layers of the tokens before."""
        readout = {name: values[layer][rows].to(self.device) for name, values in self.readouts.items()}
        before = torch.zeros_like(self.final[rows]) if exit_before is None else exit_before
        return LayerOutput(layer, self.layers, self.positions[rows], readout, None, None, self.before[rows], before)


def positions_of(trace: Trace) -> Tensor:
    """The positions of a trace's tokens in their outputs, int64 [tokens], 0 for the first."""
    return torch.tensor(trace.tokens["position"].to_numpy())


# ---- scores


def scores(rule: ExitRule, trace: Trace) -> Scores:
    """The scores of the rule's gate for each token of a trace at each layer at which the gate is asked.

    For a gate on states, the scores that `make_scores` stored; InputError if there are none. InputError also for a gate
    that looks at the exits of earlier tokens: use `decide`.
    """
    if "exit before" in rule.gate.needs:
        raise InputError(f"gate {rule.gate.name} looks at where the token before exited; use decide(rule, trace)")
    if needs_states(rule):
        return stored_scores(rule, trace)
    tokens = Tokens(trace)
    return score_layers(rule, trace.layers, tokens.final, tokens.output)


@torch.no_grad()
def score_layers(rule: ExitRule, layers: int, final: Tensor, output: Callable[[int], LayerOutput]) -> Scores:
    """Scores of n tokens whose last layer emits `final` [n]; `output(layer)` is their output after a block."""
    count, gate = len(final), rule.gate
    found = Scores(torch.full((count, layers), NO_EXIT, device=final.device), final[:, None].repeat(1, layers))
    rule.check(layers)
    gate_state = gate.start(count, final.device)
    for layer in rule.asked(layers):
        now = output(layer)
        found.score[:, layer - 1] = gate.score(now, gate_state).float()
        found.tokens[:, layer - 1] = gate.token(now, gate_state)
    return found


def needs_states(rule: ExitRule) -> bool:
    """Whether a rule's gate needs more than a trace holds, so that its scores have to be made and stored."""
    return not set(rule.gate.needs) <= IN_A_TRACE


def make_scores(model: Model, task: Task, trace: Trace, rules: Sequence[ExitRule]) -> None:
    """Score every token of a trace by the rules whose gates need states, and store the scores in the trace's folder.

    They are made from the states that the trace keeps, or in one pass over the known outputs. InputError where the
    trace is of another model, dtype or task.
    """
    if (trace.manifest["weights"], trace.manifest["task_hash"]) != (model.hash, task.hash):
        raise InputError(f"the trace in {trace.folder} is not of {model.name} and {task.name}")
    if (made_in := trace.manifest["settings"]["dtype"]) != model.dtype:
        raise InputError(
            f"the trace in {trace.folder} is in {made_in}; allowed is {model.dtype}, the dtype of the model"
        )
    for rule in rules:
        rule.check(model.layers)
    rules = [rule for rule in rules if needs_states(rule)]
    if all(intact(trace.folder, load_manifest(trace.folder), name_of(rule)) for rule in rules):
        return  # without the lock, which can't be had in a folder that can only be read
    with exclusive(trace.folder, verbose=False):  # a page has no place for it
        manifest = load_manifest(trace.folder)
        rules = [rule for rule in rules if not intact(trace.folder, manifest, name_of(rule))]
        if not rules:
            return
        outputs = trace.tokens.groupby("sequence", sort=True)["token_id"].agg(list).tolist()
        prompts = encode(model, task, trace.sequences["sequence"].tolist())
        if trace.given:
            prompts = [split_given(model, text)[0] for text in prompts]
        parts: list[list[Scores]] = [[] for _ in rules]
        tokens, start = Tokens(trace, model.device), 0
        kept = with_kept_states(model, trace.folder.parent.parent, manifest)
        for some in together([len(output) for output in outputs], AT_ONCE):
            rows = slice(start, start + sum(map(len, outputs[some])))
            start = rows.stop
            states = kept_states(model, kept, rows) if kept else states_of(model, prompts[some], outputs[some])[0]
            now = partial(with_states, model, tokens, rows, states)
            for part, rule in zip(parts, rules):
                found = score_layers(rule, model.layers, tokens.final[rows], now)
                part.append(Scores(*(each.cpu() for each in found)))
        for rule, part in zip(rules, parts):
            score, ids = (torch.cat(each).numpy() for each in zip(*part))
            columns = {"score": score.astype(np.float32), "token": ids.astype(np.int32)}
            add_file(trace.folder, manifest, name_of(rule), to_bytes(columns))
        save_manifest(trace.folder, manifest)


def with_states(model: Model, tokens: Tokens, rows: slice, states: Tensor, layer: int) -> LayerOutput:
    """The output of the tokens `rows` with their states [n, L+1, hidden_size]."""
    return replace(tokens.output(layer, rows), state=states[:, layer], unembed=model.unembed)


def together(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Slices of neighbouring sequences with at most `most` tokens together; a longer sequence is alone."""
    start = held = 0
    for end, length in enumerate(lengths):
        if held + length > most and end > start:
            yield slice(start, end)
            start, held = end, 0
        held += length
    if start < len(lengths):
        yield slice(start, len(lengths))


def stored_scores(rule: ExitRule, trace: Trace) -> Scores:
    """The scores that `make_scores` stored. InputError where there are none."""
    name = name_of(rule)
    if not intact(trace.folder, load_manifest(trace.folder), name):
        raise InputError(
            f"gate {rule.gate.name} looks at states, and this trace has no scores of it; make them with "
            "eelib.exits.trace_scores.make_scores(model, task, trace, rules)"
        )
    table = Trace(trace.folder).file(name)  # a new one: the manifest may have changed since this one was opened
    score, tokens = (
        torch.tensor(table[key].combine_chunks().flatten().to_numpy().reshape(-1, trace.layers))
        for key in ("score", "token")
    )
    return Scores(score, tokens.long())


def name_of(rule: ExitRule) -> str:
    """Name of the file with a rule's scores: the gate's name, and a hash of everything that the scores depend on."""
    least = 0 if rule.gate.stateful else rule.minimum_layer
    identity = f"{rule.gate!r} {rule.exit_layers} {least} {SCORES_VERSION}"
    return f"scores-{rule.gate.name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


# ---- exits


def exits_of(rule: ExitRule, found: Scores, positions: Tensor) -> Tensor:
    """Exit layers 1..L, int64 [..., n], of tokens at `positions` [n] by their gate's scores [..., n, L]."""
    return exits_by(rule, running_maxima(rule, found.score, positions), positions)


def exits_by(rule: ExitRule, highest: Tensor, positions: Tensor) -> Tensor:
    """As `exits_of`, from the running maxima of the scores, float32 [..., n, L-1]."""
    return highest.shape[-1] + 1 - rule.passes(highest, positions).sum(dim=-1)


def running_maxima(rule: ExitRule, score: Tensor, positions: Tensor) -> Tensor:
    """The highest score up to each layer at which a token may exit, float32 [..., n, L-1]; NO_EXIT before the first.

    `score`: float32 [..., n, L].
    """
    layers = score.shape[-1]
    may = [rule.asks(layer, layers) and layer >= rule.minimum_layer for layer in range(1, layers)]
    closed = ~torch.tensor(may, dtype=torch.bool) | (positions < rule.full_depth_tokens)[:, None]
    return score[..., :-1].nan_to_num(NO_EXIT, torch.inf, NO_EXIT).masked_fill(closed, NO_EXIT).cummax(dim=-1).values


def decide(rule: ExitRule, trace: Trace) -> tuple[Tensor, Scores]:
    """(exit layers int64 [tokens], scores) of a rule over a trace, decided token after token.

    This serves gates that look at the exit of the token before, and thresholds that are fitted on the way (`Estimated`,
    one sequence after another as in FREE). For all other rules `scores` and `exits_of` give the same.
    """
    positions, learns = positions_of(trace), isinstance(rule.threshold, Estimated)
    if "exit before" not in rule.gate.needs:
        found = scores(rule, trace)
        return estimated_exits(rule, found, trace) if learns else exits_of(rule, found, positions), found
    if learns:
        raise InputError(
            f"gate {rule.gate.name} looks at earlier exits; allowed for it is a threshold that is a number"
        )
    found = scores_by_exit_before(rule, trace)
    exits = in_order(exits_of(rule, found, positions), positions)
    before = exits.roll(1).masked_fill(positions == 0, 0)
    return exits, Scores(found.score[before, torch.arange(len(before))], found.tokens)


def scores_by_exit_before(rule: ExitRule, trace: Trace) -> Scores:
    """Scores for each layer 0..L at which the token before may have exited (0: there is none): score [L+1, n, L].

    For gates that need "exit before" and no states, and whose tokens [n, L] do not depend on it.
    """
    tokens = Tokens(trace)
    befores = [torch.full_like(tokens.final, before) for before in range(trace.layers + 1)]
    found = [
        score_layers(rule, trace.layers, tokens.final, partial(tokens.output, exit_before=before)) for before in befores
    ]
    return Scores(torch.stack([one.score for one in found]), found[0].tokens)


def in_order(exits: Tensor, positions: Tensor) -> Tensor:
    """Exit layers int64 [..., n], decided one position after the other.

    `exits` [..., L+1, n]: those for each exit layer of the token before.
    """
    taken = torch.zeros_like(exits[..., 0, :])
    for position in positions.unique().tolist():
        rows = (positions == position).nonzero()[:, 0]
        before = taken[..., rows - 1] if position else taken[..., rows]
        taken[..., rows] = exits[..., rows].gather(-2, before[..., None, :])[..., 0, :]
    return taken


def estimated_exits(rule: ExitRule, found: Scores, trace: Trace) -> Tensor:
    """Exit layers int64 [tokens] under FREE's threshold, which is fitted to the tokens that ran all blocks."""
    limit = deepcopy(rule.threshold)  # the rule stays as it was
    assert isinstance(limit, Estimated) and rule.exit_layers is not None
    now, (shallow,) = replace(rule, threshold=limit), rule.exit_layers
    positions, exits = positions_of(trace), torch.zeros_like(found.tokens[:, 0])
    for rows in map(torch.from_numpy, trace.tokens.groupby("sequence").indices.values()):
        limit.begin_sequence()
        exits[rows] = exits_of(now, Scores(found.score[rows], found.tokens[rows]), positions[rows])
        deep = rows[exits[rows] > shallow]
        agreed = found.tokens[deep, shallow - 1] == found.tokens[deep, -1]
        limit.learn(found.score[deep, shallow - 1].tolist(), agreed.tolist())
    return exits


# ---- all thresholds


@dataclass(frozen=True)
class Curve:
    """A rule at K rising `values` of its threshold: numbers of tokens in G `groups`.

    `tokens` [G]: all; `exited` [G, K, L]: those that exit at layers 1..L; `agreed` [G, K]: those that emit full depth's
    token.
    """

    values: np.ndarray
    groups: Sequence[str]
    tokens: np.ndarray
    exited: np.ndarray
    agreed: np.ndarray

    @property
    def mean_layers(self) -> np.ndarray:
        """Mean exit layer [K], rising."""
        return self.exited.sum(axis=0) @ np.arange(1, self.exited.shape[2] + 1) / self.tokens.sum()

    @property
    def agreement(self) -> np.ndarray:
        """Share of tokens that are full depth's, [K]."""
        return self.agreed.sum(axis=0) / self.tokens.sum()


def rule_at(rule: ExitRule, value: float) -> ExitRule:
    """The same rule with another threshold. InputError for a threshold that changes while decoding."""
    if not isinstance(rule.threshold, Constant):
        raise InputError(
            f"{rule.gate.name}: a {type(rule.threshold).__name__} threshold changes while decoding and has no curve"
        )
    return replace(rule, threshold=Constant(float(value)))


def curve(
    rule: ExitRule,
    found: Scores,
    trace: Trace,
    rows: np.ndarray | None = None,
    values: Sequence[float] | None = None,
    points: int = POINTS,
    ends: bool = False,
) -> Curve:
    """The curve of a rule with a constant threshold, from its scores over a trace.

    Counted are the trace's statistic rows among `rows` (bool [tokens]; None: all); with `ends`, end tokens, too.
    `values` of the threshold, rising; None: all at which a counted token's exit layer changes, thinned to `points`
    values in even steps of mean layers.
    """
    rule.check(trace.layers)
    counted = counted_rows(trace, rows, ends)
    positions = positions_of(trace)[counted]
    tokens = found.tokens[counted]
    highest = running_maxima(rule, found.score[counted], positions)
    if values is None:
        values = turning_values(rule, highest, points)
    right = (tokens == tokens[:, -1:]).numpy()  # where an exit emits full depth's token
    codes, groups = pd.factorize(pd.Series(trace.tokens["group"].to_numpy()[counted]), sort=True)
    layers, size, row = right.shape[1], len(groups), np.arange(len(right))
    exited, agreed = [], []
    for value in values:
        layer = exits_by(rule_at(rule, value), highest, positions).numpy()
        exited.append(np.bincount(codes * layers + layer - 1, minlength=size * layers).reshape(size, layers))
        agreed.append(np.bincount(codes, right[row, layer - 1], size))
    of_groups = np.bincount(codes, minlength=size)
    sums = of_groups, np.stack(exited, 1), np.stack(agreed, 1)
    return Curve(np.array(values, float), list(groups), *sums)


def counted_rows(trace: Trace, rows: np.ndarray | None, ends: bool = False) -> np.ndarray:
    """Indices of the statistic rows among `rows`; `ends`: end tokens, too. InputError where there is none."""
    counts = trace.statistic_rows() | (ends & trace.tokens["is_eos"].to_numpy())
    counted = np.flatnonzero(counts if rows is None else counts & rows)
    if not len(counted):
        raise InputError(f"{trace.task_name}: there is no token to count")
    return counted


def turning_values(rule: ExitRule, highest: Tensor, points: int) -> list[float]:
    """Values of the threshold, rising, one for each set of exit layers that it can give, thinned to `points`."""
    count, width = highest.shape
    before = torch.cat([torch.full((count, 1), NO_EXIT), highest[:, :-1]], dim=1)
    risen = highest > before
    layer = torch.arange(1, width + 1).expand_as(risen).where(risen, torch.tensor(width + 1))
    after = torch.cat([layer[:, 1:], torch.full((count, 1), width + 1)], dim=1)
    gained = (after.flip(1).cummin(dim=1).values.flip(1) - layer)[risen].numpy()  # layers more once this one is closed
    changes, which = np.unique(highest[risen].double().numpy(), return_inverse=True)
    layers = np.concatenate([[0], np.bincount(which, gained, len(changes)).cumsum()])  # above the least
    chosen = np.unique(np.searchsorted(layers, np.linspace(0, layers[-1], max(2, points))))
    if rule.gate.inclusive:  # at j the changes from j on pass
        return np.append(changes, np.inf)[chosen].tolist()
    return np.concatenate([[-np.inf], changes[:-1], [np.inf]] if len(changes) else [[np.inf]])[chosen].tolist()
