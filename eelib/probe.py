"""Find a network's blocks, its way from the last block to the logits, and its sub-layers, from one recorded run."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor, nn


@dataclass
class Call:
    """One module call of the probe run: what went in and what came out (first tensors only)."""

    name: str
    module: nn.Module
    taken: Tensor | None
    given: Tensor | None


@dataclass
class Runs:
    """The calls of a probe run in order of completion, and the logits [1, tokens, vocabulary]."""

    calls: list[Call] = field(default_factory=list)
    logits: Tensor | None = None


def first_tensor(value) -> Tensor | None:
    """The first floating tensor of a module's output or input, however it is wrapped."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next((t for t in map(first_tensor, value) if t is not None), None)
    return None


def state_of(args: tuple, kwargs: dict) -> Tensor | None:
    """The hidden state among a module's arguments."""
    return first_tensor([*args, kwargs.get("hidden_states"), *kwargs.values()])


@torch.no_grad()
def record(network: nn.Module, kind: str, ids: Tensor) -> Runs:
    """Run `ids` [1, tokens] once and keep every module's input and output."""
    runs, handles = Runs(), []

    def hook(name):
        def keep(module, args, kwargs, output):
            taken, given = state_of(args, kwargs), first_tensor(output)
            runs.calls.append(Call(name, module, taken if taken is None else taken.detach().clone(),
                                   given if given is None else given.detach().clone()))
        return keep

    for name, module in network.named_modules():
        handles.append(module.register_forward_hook(hook(name), with_kwargs=True))
    try:
        inputs = {"input_ids": ids} if kind != "seq2seq" else {"input_ids": ids, "decoder_input_ids": ids}
        runs.logits = network(**inputs).logits.detach()
    finally:
        for handle in handles:
            handle.remove()
    return runs


def close(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding at the tensors' precision."""
    if a.shape != b.shape:
        return False
    share = 1e-4 if {a.dtype, b.dtype} <= {torch.float32, torch.float64} else 3e-2
    return bool((a.float() - b.float()).abs().max() <= share * b.float().abs().max().clamp(min=1e-6))


def find_blocks(network: nn.Module, kind: str, runs: Runs) -> list[tuple[str, nn.Module]]:
    """The blocks, in order: the longest list of modules that were each called once on [1, tokens, width] states."""
    called = {call.name: call for call in runs.calls}
    times = Counter(call.name for call in runs.calls)  # shared blocks (ALBERT) run several times: no list of layers
    prefix = next((n for n, m in network.named_modules() if kind == "seq2seq" and m is network.get_decoder()), "")
    best: list[tuple[str, nn.Module]] = []
    for name, module in network.named_modules():
        if not isinstance(module, nn.ModuleList) or not name.startswith(prefix):
            continue
        items = [(f"{name}.{i}", child) for i, child in enumerate(module)]
        states = [called[n].given for n, _ in items if times[n] == 1 and called[n].given is not None]
        if len(states) == len(items) > len(best) and all(s.shape == states[0].shape and s.ndim == 3 for s in states):
            best = items
    if not best:
        raise ValueError(f"{type(network).__name__}: no list of transformer blocks was found in the network")
    return best


class Tail(nn.Module):
    """From a state of any layer to logits: final norm (or transform), head, and the model's scaling of its logits.

    Readout at layer l is `tail(h_l)` (design: head(final_norm(h_l)), with scaling and soft-capping).
    """

    def __init__(self, steps: list[nn.Module], head: nn.Module, before: float, after: float, cap: float,
                 bias: Tensor | None, width: int, vocabulary: int):
        super().__init__()
        self.steps, self.head = nn.ModuleList(steps), head
        self.before, self.after, self.cap, self.bias = before, after, cap, bias
        self.width, self.vocabulary = width, vocabulary

    @torch.no_grad()
    def normed(self, states: Tensor) -> Tensor:
        """What the head sees: states [n, width] after the final norm and any scaling."""
        out = states.unsqueeze(0)
        for step in self.steps:
            out = first_tensor(step(out))
        return out.squeeze(0) * self.before if self.before != 1.0 else out.squeeze(0)

    @torch.no_grad()
    def forward(self, states: Tensor) -> Tensor:
        """Logits [n, vocabulary] of states [n, width], in float32."""
        logits = self.head(self.normed(states)).float()
        if self.after != 1.0:
            logits = logits * self.after
        if self.cap:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits if self.bias is None else logits + self.bias


def find_tail(network: nn.Module, blocks: list, runs: Runs, name: str) -> Tail:
    """The modules between the last block and the logits, checked against the logits of the probe run.

    Raises ValueError naming the module where the trail is lost.
    """
    head = network.get_output_embeddings()
    if head is None:
        raise ValueError(f"{name}: the network names no output embeddings, so no layer can be read out")
    last = blocks[-1][0]
    order = [call.name for call in runs.calls]
    after = runs.calls[order.index(last) + 1:]
    into = next((c for c in after if c.module is head), None)
    if into is None:
        raise ValueError(f"{name}: the head {type(head).__name__} was not called after block {last}")
    holders = {n for n, m in network.named_modules() if any(child is head for child in m.modules())}
    free = [c for c in after if c.name not in holders and c.taken is not None and c.given is not None]
    state, steps, trail = runs.calls[order.index(last)].given, [], []
    for _ in range(8):
        if same_direction(state, into.taken):
            break
        takers = [c for c in free if c.taken.shape == state.shape and torch.equal(c.taken, state)
                  and not (c.given.shape == state.shape and torch.equal(c.given, state))]
        if not takers:  # some families call their activation as a function, which leaves no module behind
            act = next((a for a in (nn.GELU(), nn.GELU("tanh"), nn.ReLU(), nn.Tanh(), nn.SiLU())
                        if steps and any(close(c.taken, a(state)) for c in free)), None)
            if act is None:
                raise ValueError(f"{name}: the way from {trail[-1] if trail else last} to the head was not found: no "
                                 "module takes that state on")
            steps.append(act)
            trail.append(type(act).__name__)
            state = next(c.taken for c in free if close(c.taken, act(state)))
            continue
        step = min(takers, key=lambda c: c.name.count("."))
        steps.append(step.module)
        trail.append(step.name)
        state = step.given
    before = ratio(into.taken, state)
    config = network.config.get_text_config(decoder=True)
    cap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
    scored = into.given.float()
    target = runs.logits.float()
    scale = 1.0 if cap else ratio(target, scored)
    bias = getattr(network, "final_logits_bias", None)
    bias = None if bias is None or not bool(bias.any()) else bias.float().flatten()
    if bias is not None:
        scale = 1.0
    final = runs.calls[order.index(last)].given
    tail = Tail(steps, head, before, scale, cap, bias, final.shape[-1], target.shape[-1])
    got = tail(final[0])
    if not close(got, target[0]):
        worst = float((got - target[0]).abs().max())
        raise ValueError(f"{name}: {' > '.join([*trail, type(head).__name__])} on the last state differs from the "
                         f"model's own logits by {worst:.3g}, so its layers can't be read out")
    return tail


def ratio(a: Tensor, b: Tensor) -> float:
    """The factor c of a = c b by least squares; exactly 1.0 where a equals b up to rounding."""
    factor = float((a.double() * b.double()).sum() / (b.double() ** 2).sum().clamp(min=1e-30))
    return 1.0 if abs(factor - 1.0) < 1e-3 else factor


def same_direction(a: Tensor, b: Tensor) -> bool:
    """Whether b is a times a constant."""
    return a.shape == b.shape and close(a.float() * ratio(b, a), b.float())


@dataclass
class BlockParts:
    """The sub-layers of one block. A site is read alone through norm and head.

    `post_norm` is None in pre-norm blocks (output = input + the sum of the sub-layers' outputs); in post-norm blocks it
    names, for each sub-layer in order, the norm that follows its residual sum. `parallel`: attention and feed-forward
    both read the block's input, so there is no state after attention.
    """

    attention: nn.Module
    feed_forward: nn.Module
    cross_attention: nn.Module | None
    post_norm: list[nn.Module] | None
    parallel: bool


def find_parts(blocks: list, runs: Runs, name: str) -> list[BlockParts]:
    """The sub-layers of every block, each checked: with the skip they add up to the block's output."""
    return [parts_of(block_name, runs, name) for block_name, _ in blocks]


def parts_of(block: str, runs: Runs, name: str) -> BlockParts:
    """Sub-layers of the block called `block`; ValueError names it if no set of its modules adds up."""
    whole = next(c for c in runs.calls if c.name == block)
    inside = [c for c in runs.calls if c.name.startswith(block + ".") and c.given is not None
              and c.given.shape == whole.given.shape]
    candidates: list[Call] = []
    for call in sorted(inside, key=lambda c: c.name.count(".")):  # of modules with one output, the outermost
        if not any(torch.equal(call.given, other.given) for other in candidates):
            candidates.append(call)
    order = {c.name: i for i, c in enumerate(runs.calls)}
    candidates.sort(key=lambda c: order[c.name])
    found = prenorm_sum(candidates, whole) or postnorm_sum(candidates, inside, whole)
    if found is None:
        raise ValueError(f"{name}: no two or three modules of {block} add up to its output, so its sub-layers "
                         "can't be read")
    chosen, norms = found
    chosen = sorted(chosen, key=lambda c: not is_attention(c.name, block)) if not norms else list(chosen)
    skip = whole.taken + chosen[0].given
    parallel = not norms and not any(c.taken is not None and close(c.taken, skip) for c in inside
                                     if c.taken is not None and c.taken.shape == skip.shape)
    cross = chosen[1].module if len(chosen) == 3 else None
    after = [norm.module for norm in norms] or None
    return BlockParts(chosen[0].module, chosen[-1].module, cross, after, parallel)


def is_attention(name: str, block: str) -> bool:
    """Whether a module's path inside its block speaks of attention."""
    inner = name[len(block):].lower()
    return any(word in inner for word in ("attn", "attention"))


def prenorm_sum(candidates: list[Call], whole: Call) -> tuple[tuple[Call, ...], list[Call]] | None:
    """Two or three candidates whose outputs and the block's input add up to the block's output."""
    for size in (2, 3):
        for chosen in combinations(candidates, size):
            if adds_up(sum(c.given for c in chosen), whole) and any(is_attention(c.name, "") for c in chosen):
                return chosen, []
    return None


def adds_up(parts: Tensor, whole: Call) -> bool:
    """Whether parts are what the block added to its input, up to rounding of the parts and of the running state.

    The state may hold values a thousand times those of the parts, so its own rounding is allowed for, place by place.
    """
    taken, given = whole.taken.double(), whole.given.double()
    rest = given - taken
    exact = {parts.dtype, whole.given.dtype} <= {torch.float32, torch.float64}
    allowed = (1e-4 if exact else 3e-2) * rest.abs().max() + 4 * torch.finfo(whole.given.dtype).eps * given.abs()
    return bool(((parts.double() - rest).abs() <= allowed).all())


def postnorm_sum(candidates: list[Call], inside: list[Call], whole: Call) -> tuple[tuple[Call, ...], list[Call]] | None:
    """Sub-layers and norms of a post-norm block: state -> norm(state + sub-layer(state)), twice or three times."""
    state, chosen, norms = whole.taken, [], []
    for _ in range(3):
        step = next(((c, n) for n in inside for c in candidates if n.taken is not None and n.taken.shape == state.shape
                     and n.module is not c.module and not torch.equal(n.taken, c.given)
                     and close(n.taken, state + c.given)), None)
        if step is None:
            return None
        chosen.append(step[0])
        norms.append(step[1])
        state = step[1].given
        if torch.equal(state, whole.given):
            return tuple(chosen), norms
    return None


@contextmanager
def block_states(blocks: list[nn.Module]) -> Iterator[list[Tensor]]:
    """While open, each forward fills the yielded list with L+1 states [batch, tokens, width], embeddings first."""
    states: list[Tensor] = []

    def enter(_module, args, kwargs):
        states.clear()
        states.append(state_of(args, kwargs))

    def leave(_module, _args, output):
        states.append(first_tensor(output))

    handles = [blocks[0].register_forward_pre_hook(enter, with_kwargs=True)]
    handles += [block.register_forward_hook(leave) for block in blocks]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def site_states(blocks: list[nn.Module], parts: list[BlockParts]) -> Iterator[dict[str, list[Tensor]]]:
    """While open, each forward fills the yielded dict: site name -> one state [batch, tokens, width] per block.

    Sites: attention, after_attention (not in parallel blocks), cross_attention (where there is one), feed_forward,
    block.
    """
    sites: dict[str, list[Tensor]] = {}
    inputs: dict[int, Tensor] = {}
    handles = []

    def put(site: str, index: int, value: Tensor) -> None:
        sites.setdefault(site, [None] * len(blocks))[index] = value

    for index, (block, part) in enumerate(zip(blocks, parts)):
        def enter(_m, args, kwargs, index=index):
            inputs[index] = state_of(args, kwargs)

        def attended(_m, _a, output, index=index, part=part):
            given = first_tensor(output)
            put("attention", index, given)
            if part.post_norm is None and not part.parallel:
                put("after_attention", index, inputs[index] + given)

        handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(part.attention.register_forward_hook(attended))
        if part.post_norm is not None:
            handles.append(part.post_norm[0].register_forward_hook(
                lambda _m, _a, o, index=index: put("after_attention", index, first_tensor(o))))
        for site, module in (("cross_attention", part.cross_attention), ("feed_forward", part.feed_forward),
                             ("block", block)):
            if module is not None:
                handles.append(module.register_forward_hook(
                    lambda _m, _a, o, index=index, site=site: put(site, index, first_tensor(o))))
    try:
        yield sites
    finally:
        for handle in handles:
            handle.remove()
