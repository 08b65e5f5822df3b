"""What the sub-layers of every block give while a network runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from eelib.models.components import BlockComponents, Scale
from eelib.models.probe import output_of, state_of

NOT_YET = torch.empty(0)  # in place of the state of a site that has not run


@contextmanager
def site_states(blocks: list[nn.Module], components: list[BlockComponents]) -> Iterator[dict[str, list[Tensor]]]:
    """While open, each forward fills the yielded dict: site name -> one state [batch, tokens, hidden_size] per block.

    Sites: attention, after_attention (not in parallel blocks), cross_attention (where there is one), feed_forward,
    block. A sub-layer's state is what it adds to the block's output.
    """
    sites: dict[str, list[Tensor]] = {}
    handles: list[RemovableHandle] = []
    counts: dict[nn.Module, int] = {}
    current: dict[nn.Module, tuple[int, torch.Size]] = {}
    home: list[torch.device] = []
    indexes = {block: [i for i, other in enumerate(blocks) if other is block] for block in blocks}

    def put(block: nn.Module, site: str, value: Tensor, more: bool = False) -> None:
        index, shape = current[block]
        values = sites.setdefault(site, [NOT_YET] * len(blocks))
        value = value.reshape(shape).clone().to(home[0])  # some blocks add to a sub-layer's output in place
        values[index] = values[index] + value if more else value

    def enter(block: nn.Module) -> Callable[[nn.Module, tuple, dict], None]:
        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            turn = counts[block] = counts.get(block, -1) + 1
            state = state_of(args, kwargs)
            current[block] = indexes[block][turn % len(indexes[block])], state.shape
            if not home:  # all sites end up where the first block's input is
                home.append(state.device)

        return hook

    def leave(
        block: nn.Module, site: str, scale: Scale = 1.0, more: bool = False
    ) -> Callable[[nn.Module, tuple, object], None]:
        plain = isinstance(scale, float | int) and scale == 1.0

        def hook(_module: nn.Module, _args: tuple, output: object) -> None:
            value = output_of(output)
            factor = scale.to(value.device) if isinstance(scale, Tensor) else scale
            put(block, site, value if plain else value * factor, more)

        return hook

    def took(block: nn.Module) -> Callable[[nn.Module, tuple, dict], None]:
        return lambda _m, args, kwargs: put(block, "after_attention", state_of(args, kwargs))

    for block, own in dict(reversed(list(zip(blocks, components)))).items():
        handles.append(block.register_forward_pre_hook(enter(block), with_kwargs=True))
        for site, modules in own.sums.items():
            for number, (module, scale) in enumerate(modules):
                handles.append(module.register_forward_hook(leave(block, site, scale, number > 0)))
        if own.post_norm is not None:
            handles.append(own.post_norm[0].register_forward_hook(leave(block, "after_attention")))
        elif own.after is not None:
            handles.append(own.after.register_forward_pre_hook(took(block), with_kwargs=True))
        handles.append(block.register_forward_hook(leave(block, "block")))
    try:
        yield sites
    finally:
        for handle in handles:
            handle.remove()
