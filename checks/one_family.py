"""All checks of one architecture: eelib's numbers against a float64 copy of the network with its last block patched."""

import copy
import inspect
import tempfile
import time
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import eelib
from checks.tiny import KINDS, build
from checks.tiny_texts import PROMPTS, tokenizer_for
from eelib.models.components import site_states
from eelib.models.forward import causal_inputs
from eelib.models.probe import block_states
from eelib.tracing.decode import decode

STEPS = 6
TOLERANCE = 1e-4  # relative; both sides run in float64, but some networks compute their norms in float32


class Differs(Exception):
    """A number that is not the oracle's."""


class NotFinite(Differs):
    """A number that is not finite."""


def check(kind: str, model_type: str) -> dict:
    """The row of one architecture (see `checks.families`)."""
    row = {
        "architecture": KINDS[kind][model_type],
        "model_type": model_type,
        "kind": kind,
        "built": False,
        "attention_based": True,
        "readout": "",
        "sublayers": "",
        "padding": "",
        "decoding": "",
        "reason": "",
    }
    began = time.monotonic()
    try:
        fill(row, kind, model_type)
    finally:
        row["seconds"] = round(time.monotonic() - began, 1)
    return row


def fill(row: dict, kind: str, model_type: str) -> None:
    """Build, save, load, compare; each step's verdict goes into the row."""
    try:
        network = build(kind, model_type)
    except Exception as error:
        row["reason"] = "not built: " + short(error)
        return
    row.update(built=True, attention_based=attends(network))
    with tempfile.TemporaryDirectory() as folder:
        try:
            network.save_pretrained(folder)
            tokenizer_for("masked" if kind == "classifier" else kind).save_pretrained(folder)
        except Exception as error:
            row.update(built=False, reason="not saved: " + short(error))
            return
        try:
            model = eelib.load_model(folder, device="cpu")
        except ValueError as error:
            row.update(readout="refused", sublayers="refused", decoding="refused", reason=short(error, folder))
            return
        except Exception as error:
            row.update(readout="fail", reason=f"load crashed: {type(error).__name__} {short(error)}")
            return
        network = type(network).from_pretrained(folder).eval().requires_grad_(False)
    oracle = as_double(network, model)
    prompts = [ids[:40] for ids in model.tokenizer(PROMPTS)["input_ids"]]
    steps = {"readout": readouts, "sublayers": sublayers, "padding": padding, "decoding": decoding}
    for name, step in steps.items():
        try:
            row[name] = step(model, oracle, prompts)
            continue
        except NotFinite:  # in float64 some attention kernels give NaN for padding; real work is in float32
            model.network.float()
            oracle.float()
        except Exception:
            pass
        try:
            row[name] = step(model, oracle, prompts)
        except Differs as error:
            row[name] = "fail"
            row["reason"] = row["reason"] or f"{name}: {error}"
        except Exception as error:
            row[name] = "fail"
            row["reason"] = row["reason"] or f"{name} crashed: {type(error).__name__} {short(error)}"
    if row["sublayers"] == "refused":
        row["reason"] = row["reason"] or short(model.components_error, model.name)


def attends(network: nn.Module) -> bool:
    """Whether every layer of some stack holds a module that is called attention, softmax or linear.

    False of state-space, recurrent and Fourier networks, and of hybrids that have layers without any.
    """

    def holds(name: str, layer: nn.Module) -> bool:
        return any(
            "attn" in f"{name}.{inner}".lower() or "attention" in f"{name}.{inner} {type(m).__name__}".lower()
            for inner, m in layer.named_modules()
        )

    lists = [(name, module) for name, module in network.named_modules() if isinstance(module, nn.ModuleList)]
    stacks = [(name, module) for name, module in lists if len(module) > 1] or lists  # ALBERT: one block for all layers
    return any(all(holds(name.rsplit(".", 1)[-1], layer) for layer in stack) for name, stack in stacks)


def as_double(network: nn.Module, model) -> nn.Module:
    """The oracle; it and eelib's network run in float64 where the architecture can."""
    oracle = copy.deepcopy(network).double()
    ids = torch.tensor([[20, 30, 40]])
    try:
        oracle(**arguments(model, oracle, ids[0].tolist(), [5]))
    except Exception:
        return network
    model.network.double()
    return oracle


def short(error, folder: str = "") -> str:
    """One line of at most 240 characters, without the temporary folder's name."""
    text = " ".join(str(error).split()) or type(error).__name__
    if folder:
        own = folder.rsplit("/", 1)[-1]
        text = text.replace(f"{own}: ", "").replace(folder, own).replace(own, "tiny")
    return text[:240]


def arguments(model, network: nn.Module, prompt: list[int], output: list[int]) -> dict:
    """What the plain forward takes: for a causal network prompt plus output, as one row."""
    accepted = inspect.signature(network.forward).parameters
    given = {"input_ids": torch.tensor([prompt + output if model.kind == "causal" else prompt])}
    if model.kind == "seq2seq":
        from eelib.tracing.decode import start_id

        given["decoder_input_ids"] = torch.tensor([[start_id(model), *output]])
    if "use_cache" in accepted and model.kind in ("causal", "seq2seq"):
        given["use_cache"] = False
    return given


@torch.no_grad()
def logits_of(model, network: nn.Module, prompt: list[int], output: list[int]) -> Tensor:
    """The network's own logits, [tokens, vocabulary], or [1, labels] of a classifier."""
    given = network(**arguments(model, network, prompt, output)).logits
    return given if model.kind == "classifier" else given[0]


def swap(value, new: Tensor):
    """A module's output with its first floating tensor replaced."""
    if isinstance(value, Tensor):
        return new if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        place = next(i for i, v in enumerate(value) if isinstance(v, Tensor) and v.is_floating_point())
        return type(value)([*value[:place], new, *value[place + 1 :]])
    value = copy.copy(value)
    key = next(k for k, v in value.items() if isinstance(v, Tensor))
    value[key] = new
    return value


@contextmanager
def output_is(module: nn.Module, new: Tensor, turn: int = 1):
    """While open, what the module gives at call number `turn` of a forward is `new`."""
    calls = []

    def hook(_module, _args, output):
        calls.append(1)
        return swap(output, new.reshape(first(output).shape)) if len(calls) == turn else None

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def first(value) -> Tensor:
    """First floating tensor of an output."""
    from eelib.models.probe import first_tensor

    return first_tensor(value)


def same(got: Tensor, expected: Tensor, what: str) -> None:
    """Raise Differs unless equal up to the tolerance."""
    if got.shape != expected.shape:
        raise Differs(f"{what}: shape {tuple(got.shape)}, not {tuple(expected.shape)}")
    if not bool(torch.isfinite(got).all()):
        raise NotFinite(f"{what} is not finite")
    worst = float((got.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-9))
    if not worst <= (TOLERANCE if got.dtype == torch.float64 else 10 * TOLERANCE):
        raise Differs(f"{what} differs by {worst:.2g} of the largest value")


def twin(model, oracle: nn.Module, module: nn.Module) -> nn.Module:
    """The oracle's module of the same name."""
    name = next(n for n, m in model.network.named_modules() if m is module)
    return oracle.get_submodule(name)


@torch.no_grad()
def captured(model, network: nn.Module, prompt: list[int], output: list[int]) -> list[Tensor]:
    """States [1, tokens, width] at layers 0..L of the network's own run."""
    with block_states(model.blocks) as states:
        network(**arguments(model, network, prompt, output))
    return list(states)


@torch.no_grad()
def readouts(model, oracle: nn.Module, prompts: list[list[int]]) -> str:
    """Every layer's readout is what the oracle's own logits are when that state leaves its last block."""
    prompt, output = prompts[1], [40, 9, 77, 200, 41]
    states = captured(model, model.network, prompt, output)
    last, turns = twin(model, oracle, model.blocks[-1]), model.blocks.count(model.blocks[-1])
    position = [model.read_at(prompt)] if model.kind == "classifier" else slice(None)
    for layer, state in enumerate(states):
        with output_is(last, state, turns):
            expected = logits_of(model, oracle, prompt, output)
        same(model.unembed(state.reshape(-1, state.shape[-1])[position]), expected, f"readout of layer {layer}")
    same(
        model.unembed(states[-1].reshape(-1, state.shape[-1])[position]),
        logits_of(model, oracle, prompt, output),
        "readout of the last layer",
    )
    accepted = inspect.signature(oracle.forward).parameters
    if "output_hidden_states" in accepted or "kwargs" in accepted:
        given = oracle(**arguments(model, oracle, prompt, output), output_hidden_states=True)
        hidden = getattr(given, "decoder_hidden_states", None) or getattr(given, "hidden_states", None)
        if hidden is not None and len(hidden) == len(states) and hidden[0].shape == states[0].shape:
            first_is_input = torch.allclose(hidden[0], states[0], rtol=1e-3)  # some lists leave the embeddings out
            for layer, own in enumerate(states[:-1] if first_is_input else states[1:-1]):
                same(own, hidden[layer], f"state {layer} of the network's own list")
    return "pass"


@torch.no_grad()
def sublayers(model, oracle: nn.Module, prompts: list[list[int]]) -> str:
    """Outputs plus the skip are the block's output on another text; attention is what mixes positions."""
    if not model.components:
        return "refused"
    prompt, output = prompts[1], [40, 9, 77, 200, 41]
    given = arguments(model, model.network, prompt, output)
    with block_states(model.blocks) as states, site_states(model.blocks, model.components) as sites:
        model.network(**given)
        states, sites = list(states), {k: list(v) for k, v in sites.items()}
    for index, (block, part) in enumerate(zip(model.blocks, model.components)):
        parts = [sites[s][index] for s in ("attention", "cross_attention", "feed_forward") if s in part.sums]
        if part.post_norm is None:
            constant = 0.0 if part.constant is None else part.constant
            total = states[index] * part.skip + sum(parts) + constant
            same(total, states[index + 1], f"skip plus sub-layers of block {index + 1}")
        else:
            state = states[index]
            for norm, added in zip(part.post_norm, parts):
                state = first(norm(state + added))
            same(state, states[index + 1], f"normed skip plus sub-layers of block {index + 1}")
    if len(set(model.blocks)) == len(model.blocks):
        mixing(model, given, states)
    return "pass"


@torch.no_grad()
def mixing(model, given: dict, states: list[Tensor]) -> None:
    """In a middle block: another last state but one reaches attention's last position, the feed-forward's only so."""
    index = len(model.blocks) // 2
    block, part = model.blocks[index], model.components[index]

    place = -2

    def bend(_module, args, kwargs):
        state = (args[0] if args else kwargs["hidden_states"]).clone()
        state[:, place] = state[:, place] * -0.5 + 1.0
        return (state, *args[1:]) if args else (), kwargs if args else {**kwargs, "hidden_states": state}

    def run(bent: bool, frozen: dict | None = None, inputs: dict = given) -> dict[nn.Module, Tensor]:
        seen: dict[nn.Module, Tensor] = {}

        def leave(module, _args, output):
            seen[module] = first(output).reshape(states[index].shape).clone()
            return swap(output, frozen[module].reshape(first(output).shape)) if frozen and module in frozen else None

        handles = [block.register_forward_pre_hook(bend, with_kwargs=True)] if bent else []
        handles += [module.register_forward_hook(leave) for modules in part.sums.values() for module, _ in modules]
        try:
            model.network(**inputs)
        finally:
            for handle in handles:
                handle.remove()
        return seen

    plain, bent = run(False), run(True)
    attention = {module: plain[module] for module, _ in part.sums["attention"]}
    held = run(True, attention)
    place = 0  # a short convolution on the feed-forward's output reaches its neighbours, not this far
    far = run(True, attention)
    for module in attention:
        if torch.allclose(plain[module][:, -1], bent[module][:, -1], atol=1e-9, rtol=0):
            raise Differs(f"the attention site of block {index + 1} does not mix positions")
    for module, _ in part.sums["feed_forward"]:
        if not any(
            torch.allclose(plain[module][:, -1], other[module][:, -1], atol=1e-5, rtol=1e-5) for other in (held, far)
        ):
            raise Differs(f"the feed-forward site of block {index + 1} mixes positions")
    if "cross_attention" in part.sums:
        other = run(False, attention, {**given, "input_ids": given["input_ids"].flip(1)})
        module = part.cross_attention
        if torch.allclose(plain[module], other[module], atol=1e-9, rtol=0):
            raise Differs(f"the cross-attention site of block {index + 1} does not read the source")


@torch.no_grad()
def padding(model, oracle: nn.Module, prompts: list[list[int]]) -> str:
    """States of a padded batch are those of each row alone, else the model says equal lengths only."""
    if not model.pads:
        return "equal lengths"
    left = model.kind == "causal"
    width = max(map(len, prompts))
    fill_up = [[model.pad_id] * (width - len(p)) for p in prompts]
    ids = torch.tensor([q + p if left else p + q for p, q in zip(prompts, fill_up)])
    mask = torch.tensor(
        [[0] * len(q) + [1] * len(p) if left else [1] * len(p) + [0] * len(q) for p, q in zip(prompts, fill_up)]
    )
    given = causal_inputs(model, ids, mask) if left else {"input_ids": ids, "attention_mask": mask}
    if model.kind == "seq2seq":
        from eelib.tracing.decode import start_id

        given["decoder_input_ids"] = torch.tensor([[start_id(model), 40, 9]] * len(prompts))
    with block_states(model.blocks) as states:
        model.network(**given)
    together = torch.stack(list(states), 2)  # [rows, tokens, L+1, width]
    for row, prompt in enumerate(prompts):
        alone = torch.stack(captured(model, model.network, prompt, [40, 9] if model.kind == "seq2seq" else []), 2)
        size = alone.shape[1]
        same(together[row, -size:] if left else together[row, :size], alone[0], f"state of padded row {row}")
    return "batched"


@torch.no_grad()
def decoding(model, oracle: nn.Module, prompts: list[list[int]]) -> str:
    """Batched, cached, padded decoding is the oracle's argmax, one row at a time without a cache."""
    if model.kind not in ("causal", "seq2seq"):
        return "none"
    batches = [prompts] if model.pads else [[p] for p in prompts]
    got = [ids for batch in batches for ids in decode(model, batch, STEPS)]
    for row, (prompt, ids) in enumerate(zip(prompts, got)):
        expected: list[int] = []
        while len(expected) < STEPS and not (expected and expected[-1] in model.eos_ids):
            top = logits_of(model, oracle, prompt, expected)[-1].topk(2)
            place = len(expected)
            if place < len(ids) and ids[place] != int(top.indices[0]) and float(top.values[0] - top.values[1]) < 1e-5:
                break  # a tie within rounding
            expected.append(int(top.indices[0]))
        if ids[: len(expected)] != expected:
            raise Differs(f"row {row} gives {ids}, the plain loop {expected}")
    return "pass"
