"""The sub-layers of each block: the modules whose outputs, with the skip, add up to the block's, and their sites."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor, nn

from eelib.common.errors import CheckpointError
from eelib.common.tolerances import same, tolerance
from eelib.models.probe import NONE, Call, EndOfRun, Runs, output_of, output_replaced, state_of, with_tensor

Scale = float | Tensor  # one factor, or one for each dimension [hidden_size]
ONE: Scale = 1.0
MOST = 20  # candidates that are tried for one block


@dataclass
class BlockComponents:
    """The sub-layers of one block by site: attention, cross_attention, feed_forward.

    The output of a pre-norm block is `skip` times its input, plus the sites, plus the constant.

    Attributes:
        sums: from a site to its modules, each with a scale: the site adds the scaled sum of their outputs. More than
            one where, say, a shared expert stands beside the routed ones.
        post_norm: in post-norm blocks, for each sub-layer in order, the norm that follows its residual sum; else None.
        after: a module whose input is the state after attention; None in post-norm blocks, and in parallel ones, whose
            attention and feed-forward both read the block's input.
        skip: factor on the block's input.
        constant: a vector that the block adds at every position, [hidden_size]; None if none.
    """

    sums: dict[str, list[tuple[nn.Module, Scale]]]
    post_norm: list[nn.Module] | None
    after: nn.Module | None
    skip: Scale = 1.0
    constant: Tensor | None = None


def find_components(network: nn.Module, blocks: list[Call], runs: Runs, name: str) -> list[BlockComponents]:
    """The sub-layers of every block; CheckpointError if those of one, with its skip, do not add up to its output."""
    found: list[BlockComponents] = []
    roles: dict[tuple[str, ...], list[str]] = {}
    starts = {id(call): i for i, call in enumerate(runs.calls)}
    ends = [starts[id(block)] for block in blocks]
    for number, block in enumerate(blocks):
        begin = ends[number - 1] + 1 if number and blocks[number - 1].name == block.name else 0
        calls = [reshaped(c, block) for c in runs.calls[begin : ends[number]] if c.name.startswith(block.name + ".")]
        once = Counter(c.name for c in calls)  # a module that runs twice in a block is no site
        calls = [c for c in calls if c.output.numel() and once[c.name] == 1]
        chosen, scales, norms, skip = sum_of(block, calls, [*roles], name)
        constant = None if norms or not (isinstance(skip, float) and skip == 1.0) else constant_of(block, chosen)
        names = tuple(c.name.removeprefix(block.name) for c in chosen)
        if names not in roles:
            roles[names] = roles_of(network, block, chosen, runs)
        sums: dict[str, list[tuple[nn.Module, Scale]]] = {}
        for site, call, scale in zip(roles[names], chosen, scales):
            sums.setdefault(site, []).append((call.module, scale))
        missing = [site for site in ("attention", "feed_forward") if site not in sums]
        if missing:
            raise CheckpointError(
                f"{name}: block {block.name} adds up, of {', '.join(n[1:] for n in names)}, but none of "
                f"these is its {missing[0].replace('_', '-')}, so its sub-layers can't be read"
            )
        after = None if norms else after_attention(block, calls, chosen, scales, skip, roles[names])
        found.append(BlockComponents(sums, [n.module for n in norms] or None, after, skip, constant))
    return found


def reshaped(call: Call, block: Call) -> Call:
    """The call with a batch dimension added to tensors that lack it; an output of another shape becomes NONE."""
    shape = block.output.shape
    taken, given = (t.unsqueeze(0) if t.shape == shape[1:] else t for t in (call.input, call.output))
    return Call(call.name, call.module, taken, given if given.shape == shape else NONE)


def sum_of(
    block: Call, calls: list[Call], known: list[tuple[str, ...]], name: str
) -> tuple[list[Call], list[Scale], list[Call], Scale]:
    """(sub-layers in order, their scales, post-norms, the skip's scale) of a block; CheckpointError if none fit.

    The names of other blocks' sub-layers, `known`, are tried first.
    """
    candidates: list[Call] = []
    order = {id(c): i for i, c in enumerate(calls)}
    for call in sorted(calls, key=lambda c: c.name.count(".")):  # of modules with one output, the outermost
        if not any(torch.equal(call.output, other.output) for other in candidates):
            candidates.append(call)
    shallow = sorted(candidates[:12], key=lambda c: order[id(c)])
    candidates = sorted(candidates[:MOST], key=lambda c: order[id(c)])
    tries = [[c for c in candidates if c.name.removeprefix(block.name) in names] for names in known]
    tries = [chosen for chosen, names in zip(tries, known) if len(chosen) == len(names)]
    tries += [list(chosen) for size in (2, 3) for chosen in combinations(candidates, size)]
    more = [list(chosen) for size in (4, 5) for chosen in combinations(shallow, size)]

    def first_sum(tries: list[list[Call]]) -> list[Call] | None:
        return next((some for some in tries if adds_up(block.input + sum(c.output for c in some), block)), None)

    found = first_sum(tries)
    if found is None and (postnorm := postnorm_sum(candidates, calls, block)):
        return postnorm[0], [ONE] * len(postnorm[0]), postnorm[1], ONE
    found = found or first_sum(more) or next((c for c in tries if constant_of(block, c) is not None), None)
    if found:
        return found, [ONE] * len(found), [], ONE
    tries += [[c] for c in candidates] + [chosen for chosen in more if len(chosen) == 4]
    for fit in (scaled, scaled_by_dimension):
        for chosen in tries:
            factors = fit([block.input, *(c.output for c in chosen)], block)
            if factors is not None:
                return chosen, factors[1:], [], factors[0]
    raise CheckpointError(
        f"{name}: no two to five modules of {block.name} add up to its output, so its sub-layers can't be read"
    )


def adds_up(total: Tensor, block: Call) -> bool:
    """Whether `total` is the block's output, up to rounding of the block's terms and of the running state.

    The state's values may be a thousand times the terms', so its own rounding is allowed too, element by element.
    """
    taken, given = block.input.double(), block.output.double()
    rounding = 4 * torch.finfo(block.output.dtype).eps * given.abs()
    allowed = tolerance(block.output).same * (given - taken).abs().max() + rounding
    return bool(((total.double() - given).abs() <= allowed).all())


def constant_of(block: Call, chosen: list[Call]) -> Tensor | None:
    """The vector [hidden_size] that a block adds at every position to its input and sub-layers; None if none."""
    total = block.input + sum(c.output for c in chosen)
    rest = (block.output - total)[0].mean(0)
    return rest if adds_up(total + rest, block) and not adds_up(total, block) else None


def scaled(terms: list[Tensor], block: Call) -> list[Scale] | None:
    """Least-squares factors of the terms, if the weighted sum is the block's output and needs every term; else None."""
    columns = torch.stack([term.double().flatten() for term in terms], 1)
    gram, target = columns.T @ columns, columns.T @ block.output.double().flatten()
    factors = torch.linalg.lstsq(gram, target, driver=None if gram.is_cuda else "gelsd").solution
    one = (factors - 1).abs() < 10 * tolerance(block.output).factor  # a term may be small beside the sum
    factors[one] = 1.0
    if bool((factors.abs() < 1e-3).any()) or not adds_up((columns @ factors).reshape(block.output.shape), block):
        return None
    return [float(f) for f in factors]


def scaled_by_dimension(terms: list[Tensor], block: Call) -> list[Scale] | None:
    """As `scaled`, with a factor for each term and dimension, as learned residual weights and layer scales need."""
    factors = torch.empty(block.output.shape[-1], len(terms), dtype=torch.float64, device=block.output.device)
    for begin, end in ((0, 32), (32, None)):  # most choices fail within the first dimensions
        some = slice(begin, end)
        columns = torch.stack([term[0, :, some].double().T for term in terms], -1)  # [dimensions, tokens, terms]
        if not len(columns):
            break
        wanted = block.output[0, :, some].double().T.unsqueeze(-1)
        factors[some] = torch.linalg.lstsq(columns, wanted, driver=None if wanted.is_cuda else "gelsd").solution[..., 0]
        some_of_it = Call(block.name, block.module, block.input[..., some], block.output[..., some])
        if not adds_up((columns @ factors[some].unsqueeze(-1)).squeeze(-1).T.unsqueeze(0), some_of_it):
            return None
    return None if bool((factors.abs().amax(0) < 1e-3).any()) else [f.to(block.output.dtype) for f in factors.T]


def postnorm_sum(candidates: list[Call], calls: list[Call], block: Call) -> tuple[list[Call], list[Call]] | None:
    """Sub-layers and norms of a post-norm block, up to three of norm(state + sub-layer(state)); else None."""
    state = block.input
    chosen: list[Call] = []
    norms: list[Call] = []
    for _ in range(3):
        step = next(
            (
                (c, n)
                for n in calls
                for c in candidates
                if n.input.shape == state.shape
                and n.module is not c.module
                and not torch.equal(n.input, c.output)
                and same(n.input, state + c.output)
            ),
            None,
        )
        if step is None:
            return None
        chosen.append(step[0])
        norms.append(step[1])
        state = step[1].output
        if torch.equal(state, block.output):
            return (chosen, norms) if len({c.name for c in (*chosen, *norms)}) == 2 * len(chosen) else None
    return None


@torch.no_grad()
def roles_of(network: nn.Module, block: Call, chosen: list[Call], runs: Runs) -> list[str]:
    """The site of each sub-layer, by what changes its output: cross-attention depends on the source, attention on other
    positions, feed-forward on neither.

    The block runs again on its recorded input, with the recorded outputs of the sub-layers before the tested one.
    """
    plain = [c.output for c in chosen]
    source = getattr(network.config, "is_encoder_decoder", False)
    other = {**runs.inputs, "input_ids": runs.inputs["input_ids"].flip(1)}

    def reads(index: int, position: int) -> bool:
        """Whether the last position of a sub-layer's output changes with the block's input at another position."""
        bent = block.input.clone()
        bent[:, position] = bent[:, position].flip(-1) * 0.5 + bent[:, position].abs().mean()
        seen = run_block(network, block, chosen, index, plain, bent, runs.inputs)
        return not same(seen[:, -1], plain[index][:, -1])

    roles = []
    for index in range(len(chosen)):
        if source and not same(run_block(network, block, chosen, index, plain, block.input, other), plain[index]):
            roles.append("cross_attention")
        else:
            roles.append("attention" if reads(index, -2) else "feed_forward")
    if "attention" not in roles and roles.count("cross_attention") == 1:  # one module reads target and source together
        roles[roles.index("cross_attention")] = "attention"
    if "feed_forward" not in roles:  # a short convolution may follow it, which reaches only its neighbours
        roles = ["feed_forward" if r == "attention" and not reads(i, 0) else r for i, r in enumerate(roles)]
    return roles


def run_block(
    network: nn.Module, block: Call, chosen: list[Call], index: int, plain: list[Tensor], state: Tensor, inputs: dict
) -> Tensor:
    """Output of sub-layer `index` when the block reads `state` and the sub-layers before it give `plain`."""
    seen: list[Tensor] = []

    def enter(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        old = state_of(args, kwargs)
        return with_tensor(args, old, state), with_tensor(kwargs, old, state)

    def leave(_module: nn.Module, _args: tuple, output: object) -> None:
        seen.append(output_of(output).reshape(block.output.shape).clone().to(block.output.device))
        raise EndOfRun

    with ExitStack() as hooks, suppress(EndOfRun):
        hooks.enter_context(block.module.register_forward_pre_hook(enter, with_kwargs=True))
        for call, value in zip(chosen[:index], plain):
            hooks.enter_context(output_replaced(call.module, value))
        hooks.enter_context(chosen[index].module.register_forward_hook(leave))
        network(**inputs)
    return seen[0]


def after_attention(
    block: Call, calls: list[Call], chosen: list[Call], scales: list[Scale], skip: Scale, roles: list[str]
) -> nn.Module | None:
    """A module whose input is the state after attention; None if there is none, as in parallel blocks."""
    terms = [c.output.double() * scale for c, scale, role in zip(chosen, scales, roles) if role == "attention"]
    added = torch.stack(terms).sum(0)
    state = block.input.double() * skip + added
    readers = [c for c in calls if c.input.shape == block.output.shape]
    reader = next((c for c in readers if same(c.input, state.to(c.input.dtype))), None)
    if reader is None and constant_of(block, chosen) is not None:
        moved = [(c, state + (c.input.double() - state).mean(1, keepdim=True)) for c in readers]
        reader = next((c for c, total in moved if same(c.input, total.to(c.input.dtype))), None)
    if reader is None and (isinstance(skip, Tensor) or skip != 1.0):  # it may be scaled after attention only
        for_each = [(c, Call(c.name, c.module, block.input, c.input)) for c in readers]  # as if a block gave its input
        reader = next((c for c, given in for_each if scaled([block.input, added], given) is not None), None)
    return reader.module if reader is not None else None


@contextmanager
def site_states(blocks: list[nn.Module], components: list[BlockComponents]) -> Iterator[dict[str, list[Tensor]]]:
    """While open, each forward fills the yielded dict: site name -> one state [batch, tokens, hidden_size] per block.

    Sites: attention, after_attention (not in parallel blocks), cross_attention (where there is one), feed_forward,
    block. A sub-layer's state is the term that it adds to the block's output.
    """
    sites: dict[str, list[Tensor]] = {}
    begun: list[tuple[torch.Size, torch.device]] = []  # of the inputs of all blocks that have begun, in order

    def put(site: str, value: Tensor, more: bool = False) -> None:
        index, shape, home = (len(begun) - 1) % len(blocks), begun[-1][0], begun[0][1]
        values = sites.setdefault(site, [NONE] * len(blocks))
        value = value.reshape(shape).clone().to(home)  # some blocks add to a sub-layer's output in place
        values[index] = values[index] + value if more else value

    def enter(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        state = state_of(args, kwargs)
        begun.append((state.shape, state.device))

    def leave(site: str, scale: Scale = 1.0, more: bool = False) -> Callable[[nn.Module, tuple, object], None]:
        def hook(_module: nn.Module, _args: tuple, output: object) -> None:
            value = output_of(output)
            factor = scale.to(value.device) if isinstance(scale, Tensor) else scale
            put(site, value * factor, more)

        return hook

    def took(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        put("after_attention", state_of(args, kwargs))

    with ExitStack() as hooks:
        for block, own in dict(reversed(list(zip(blocks, components)))).items():
            hooks.enter_context(block.register_forward_pre_hook(enter, with_kwargs=True))
            for site, modules in own.sums.items():
                for number, (module, scale) in enumerate(modules):
                    hooks.enter_context(module.register_forward_hook(leave(site, scale, number > 0)))
            if own.post_norm is not None:
                hooks.enter_context(own.post_norm[0].register_forward_hook(leave("after_attention")))
            elif own.after is not None:
                hooks.enter_context(own.after.register_forward_pre_hook(took, with_kwargs=True))
            hooks.enter_context(block.register_forward_hook(leave("block")))
        yield sites
