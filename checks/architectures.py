"""Every architecture that transformers can build from a tiny random configuration, checked against a float64 oracle.

eelib's numbers are compared with those of a float64 copy of the network, its last block patched; each architecture has
a process of its own. A row: architecture, model_type, kind; built; attention_based (every layer of one of its stacks
holds attention, softmax or linear); readout, sublayers and decoding: pass, refused, fail, or none where its kind has
none; padding: batched, equal lengths or fail; dtype: what it was last compared in, float32 where the network has no
float64, and no_float64: what it then raised; reason; seconds.
"""

import copy
import inspect
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from multiprocessing import TimeoutError, get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import eelib
from checks.report import TINY, TRACES, Goal, all_of, finish, goal, headed, options
from checks.tiny import KINDS, build
from checks.tiny_texts import PROMPTS, tokenizer_for
from eelib.common.errors import InputError
from eelib.common.files import PACKAGE
from eelib.common.tolerances import apart, close, same, tolerance
from eelib.models.components import site_states
from eelib.models.model import Model
from eelib.models.model_kinds import Seq2Seq
from eelib.models.probe import Unsupported, block_states, output_of, output_replaced, raised_in, state_of, with_tensor
from eelib.tracing.decode import greedy_decode

LIMIT = 120.0  # seconds for one architecture
SAMPLE = (("causal", "gemma2"), ("seq2seq", "marian"), ("masked", "distilbert"), ("classifier", "electra"))
LEAST = 0.9  # share of the attention-based causal architectures that pass everything
STEPS = 6
VERDICTS = ("readout", "sublayers", "padding", "decoding")
TEXTS = ("architecture", "model_type", "kind", *VERDICTS, "dtype", "no_float64", "reason")
OURS = (PACKAGE, Path(__file__).resolve().parent)
OUTPUT = [40, 9, 77, 200, 41]  # what a network is given as its own output so far


class Differs(Exception):
    """A number that is not the oracle's."""


class NotFinite(Differs):
    """A number that is not finite."""


def new_row(kind: str, model_type: str) -> dict:
    """The row of an architecture of which nothing is known yet."""
    known = {"architecture": KINDS[kind][model_type], "model_type": model_type, "kind": kind}
    return dict.fromkeys(TEXTS, "") | known | {"built": False, "attention_based": True}


def passes(row: dict) -> bool:
    """Whether an architecture passes everything that its kind has."""
    good = row["readout"] == row["sublayers"] == "pass" and row["decoding"] in ("pass", "none")
    return good and row["padding"] in ("batched", "equal lengths")


def check(kind: str, model_type: str) -> dict:
    """The row of one architecture: build, save, load, compare."""
    row = new_row(kind, model_type)
    with tempfile.TemporaryDirectory() as folder:
        try:
            network = build(kind, model_type)
            row["attention_based"] = attends(network)
            network.save_pretrained(folder)
            tokenizer_for("masked" if kind == "classifier" else kind).save_pretrained(folder)
        except Exception as error:
            return row | {"reason": "not built: " + short(error), "readout": "fail" if our_fault(error) else ""}
        row["built"] = True
        try:
            model = eelib.load_model(folder, device="cpu")
        except Exception as error:
            if isinstance(error, ValueError) and not our_fault(error):
                refused = dict.fromkeys(("readout", "sublayers", "decoding"), "refused")
                return row | refused | {"reason": short(error, folder)}
            return row | {"readout": "fail", "reason": f"load: {type(error).__name__} {short(error)}"}
        network = type(network).from_pretrained(folder).eval().requires_grad_(False)
    oracle = as_double(row, network, model)
    prompts = [ids[:40] for ids in model.tokenizer(PROMPTS)["input_ids"]]
    row["dtype"] = model.dtype
    for name, step in zip(VERDICTS, (readouts, sublayers, padding, decoding)):
        try:
            row[name] = verdict(row, step, model, oracle, prompts)
        except Exception as error:
            said = str(error) if isinstance(error, Differs) else f"{type(error).__name__} {short(error)}"
            row.update({name: "fail", "reason": row["reason"] or f"{name}: {said}"})
    if row["sublayers"] == "refused":
        row["reason"] = row["reason"] or short(model.components_error, model.name)
    return row


def verdict(row: dict, step: Callable, model: Model, oracle: nn.Module, prompts: list[list[int]]) -> str:
    """A step's verdict. In float64 some attention kernels give NaN for padding: then all goes on in float32."""
    try:
        return step(model, oracle, prompts)
    except NotFinite:
        if row["dtype"] != "float64":
            raise
    model.network.float()
    oracle.float()
    row["dtype"] = "float32"
    return step(model, oracle, prompts)


def attends(network: nn.Module) -> bool:
    """Whether every layer of some stack holds a module that is called attention, softmax or linear.

    False of state-space, recurrent and Fourier networks, and of hybrids that have layers without any.
    """

    def holds(name: str, layer: nn.Module) -> bool:
        named = [(f"{name}.{inner}".lower(), type(module).__name__.lower()) for inner, module in layer.named_modules()]
        return any("attn" in path or "attention" in path + kind for path, kind in named)

    lists = [(name, module) for name, module in network.named_modules() if isinstance(module, nn.ModuleList)]
    stacks = [(name, module) for name, module in lists if len(module) > 1] or lists  # ALBERT: one block for all layers
    return any(all(holds(name.rsplit(".", 1)[-1], layer) for layer in stack) for name, stack in stacks)


def as_double(row: dict, network: nn.Module, model: Model) -> nn.Module:
    """The oracle; it and eelib's network run in float64 where the architecture can, else the row says why not."""
    oracle = copy.deepcopy(network).double()
    given = arguments(model, oracle, [20, 30, 40], [5])
    try:
        oracle(**given)
    except Exception as error:
        row["no_float64"] = f"{type(error).__name__}: {short(error)}"
        return network
    model.network.double()
    return oracle


def our_fault(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, was raised in a line of ours, and is none that we raise on purpose."""
    while error is not None:
        if not isinstance(error, (InputError, Unsupported)) and any(raised_in(error, folder) for folder in OURS):
            return True
        error = error.__cause__
    return False


def short(error: object, folder: str = "") -> str:
    """One line of at most 240 characters, without the temporary folder's name."""
    text = " ".join(str(error).split()) or type(error).__name__
    if folder:
        own = folder.rsplit("/", 1)[-1]
        text = text.replace(f"{own}: ", "").replace(folder, own).replace(own, "tiny")
    return text[:240]


# ---- runs of a network, not by eelib


def arguments(model: Model, network: nn.Module, prompt: list[int], output: list[int]) -> dict:
    """What the plain forward takes: for a causal network prompt plus output, as one row. Not left to the adapter."""
    given: dict[str, Any] = {"input_ids": torch.tensor([prompt + output if model.kind == "causal" else prompt])}
    adapter = model.adapter
    if isinstance(adapter, Seq2Seq):
        given["decoder_input_ids"] = torch.tensor([[adapter.start_id, *output]])
    if "use_cache" in inspect.signature(network.forward).parameters and adapter.writes:
        given["use_cache"] = False
    return given


def logits_of(model: Model, network: nn.Module, prompt: list[int], output: list[int]) -> Tensor:
    """The network's own logits, [tokens, vocab_size], or [1, labels] of a classifier."""
    given = network(**arguments(model, network, prompt, output)).logits
    return given if given.ndim == 2 else given[0]


def captured(model: Model, network: nn.Module, prompt: list[int], output: list[int]) -> list[Tensor]:
    """States [1, tokens, hidden_size] at layers 0..L of the network's own run."""
    with block_states(model.blocks) as states:
        network(**arguments(model, network, prompt, output))
    return list(states)


def agree(got: Tensor, expected: Tensor, what: str) -> None:
    """Raise Differs unless the two are close in their dtype: both networks run in it, by two ways.

    The oracle is not more exact than its network lets it be: many work out norms in float32 whatever their dtype.
    """
    if got.shape != expected.shape:
        raise Differs(f"{what}: shape {tuple(got.shape)}, not {tuple(expected.shape)}")
    if not bool(torch.isfinite(got).all()):
        raise NotFinite(f"{what} is not finite")
    if not close(got.to(expected.dtype), expected):
        raise Differs(f"{what} differs by {apart(got, expected):.2g} of the largest value")


# ---- what is checked


@torch.no_grad()
def readouts(model: Model, oracle: nn.Module, prompts: list[list[int]]) -> str:
    """Every layer's readout is what the oracle's own logits are when that state leaves its last block."""
    prompt = prompts[1]
    states = captured(model, model.network, prompt, OUTPUT)
    block = model.blocks[-1]
    last = oracle.get_submodule(next(name for name, module in model.network.named_modules() if module is block))
    position = [model.read_at(prompt)] if model.labels else slice(None)
    for layer, state in enumerate(states):
        with output_replaced(last, state, model.blocks.count(block) - 1):
            expected = logits_of(model, oracle, prompt, OUTPUT)
        got = model.unembed(state.reshape(-1, state.shape[-1])[position])
        agree(got, expected, f"readout of layer {layer}")
    agree(got, logits_of(model, oracle, prompt, OUTPUT), "readout of the last layer")
    accepted = inspect.signature(oracle.forward).parameters
    if "output_hidden_states" in accepted or "kwargs" in accepted:
        given = oracle(**arguments(model, oracle, prompt, OUTPUT), output_hidden_states=True)
        hidden = getattr(given, "decoder_hidden_states", None) or getattr(given, "hidden_states", None)
        if hidden is not None and len(hidden) == len(states) and hidden[0].shape == states[0].shape:
            first_is_input = close(hidden[0], states[0])  # some lists leave the embeddings out
            for layer, own in enumerate(states[:-1] if first_is_input else states[1:-1]):
                agree(own, hidden[layer], f"state {layer} of the network's own list")
    return "pass"


@torch.no_grad()
def sublayers(model: Model, oracle: nn.Module, prompts: list[list[int]]) -> str:
    """Outputs plus the skip are the block's output on another text; attention is what mixes positions."""
    if not model.components:
        return "refused"
    given = arguments(model, model.network, prompts[1], OUTPUT)
    with block_states(model.blocks) as states, site_states(model.blocks, model.components) as sites:
        model.network(**given)
        states, sites = list(states), {k: list(v) for k, v in sites.items()}
    for index, own in enumerate(model.components):
        added = [sites[s][index] for s in ("attention", "cross_attention", "feed_forward") if s in own.sums]
        if own.post_norm is None:
            total = states[index] * own.skip + sum(added) + (0.0 if own.constant is None else own.constant)
        else:
            total = states[index]
            for norm, more in zip(own.post_norm, added):
                total = output_of(norm(total + more))
        agree(total, states[index + 1], f"skip plus sub-layers of block {index + 1}")
    if len(set(model.blocks)) == len(model.blocks):
        mixing(model, given, states)
    return "pass"


def mixing(model: Model, given: dict, states: list[Tensor]) -> None:
    """In a middle block: another last state but one reaches attention's last position, the feed-forward's only so."""
    index = len(model.blocks) // 2
    block, own = model.blocks[index], model.components[index]

    def run(bent_at: int | None, frozen: dict | None = None, inputs: dict = given) -> dict[nn.Module, Tensor]:
        """Outputs of the block's modules; its input is bent at a position, some outputs are `frozen` after that."""
        seen: dict[nn.Module, Tensor] = {}

        def bend(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            old = state_of(args, kwargs)
            new = old.clone()
            new[:, bent_at] = old[:, bent_at] * -0.5 + 1.0
            return with_tensor(args, old, new), with_tensor(kwargs, old, new)

        def note(module: nn.Module, _args: tuple, output: object) -> None:
            seen[module] = output_of(output).reshape(states[index].shape).clone()

        with ExitStack() as hooks:
            if bent_at is not None:
                hooks.enter_context(block.register_forward_pre_hook(bend, with_kwargs=True))
            for module, _ in chain.from_iterable(own.sums.values()):
                hooks.enter_context(module.register_forward_hook(note))
            for module, value in (frozen or {}).items():
                hooks.enter_context(output_replaced(module, value))
            model.network(**inputs)
        return seen

    plain, bent = run(None), run(-2)
    attention = {module: plain[module] for module, _ in own.sums["attention"]}
    # A short convolution on the feed-forward's output reaches its neighbours, but not the first position.
    held = [run(-2, attention), run(0, attention)]
    for module in attention:
        if same(plain[module][:, -1], bent[module][:, -1]):
            raise Differs(f"the attention site of block {index + 1} does not mix positions")
    for module, _ in own.sums["feed_forward"]:
        if not any(same(plain[module][:, -1], other[module][:, -1]) for other in held):
            raise Differs(f"the feed-forward site of block {index + 1} mixes positions")
    if "cross_attention" in own.sums:
        other = run(None, attention, {**given, "input_ids": given["input_ids"].flip(1)})
        module = own.sums["cross_attention"][0][0]
        if same(plain[module], other[module]):
            raise Differs(f"the cross-attention site of block {index + 1} does not read the source")


@torch.no_grad()
def padding(model: Model, oracle: nn.Module, prompts: list[list[int]]) -> str:
    """States of a padded batch are those of each row alone, else the model says equal lengths only."""
    if not model.pads:
        return "equal lengths"
    adapter, target = model.adapter, [40, 9] if model.kind == "seq2seq" else []
    ids, mask = adapter.pad(prompts)
    begun = torch.tensor([adapter.input_ids_for([], [*target, 0])] * len(prompts))  # of a decoder with a source only
    with block_states(model.blocks) as states:
        model.network(**adapter.padded_inputs(ids, mask, begun))
    together = torch.stack(list(states), 2)  # [rows, tokens, L+1, hidden_size]
    for row, prompt in enumerate(prompts):
        alone = torch.stack(captured(model, model.network, prompt, target), 2)
        size = alone.shape[1]
        agree(together[row, -size:] if adapter.left else together[row, :size], alone[0], f"state of padded row {row}")
    return "batched"


@torch.no_grad()
def decoding(model: Model, oracle: nn.Module, prompts: list[list[int]]) -> str:
    """Batched, cached, padded decoding is the oracle's argmax, one row at a time without a cache."""
    if not model.adapter.writes:
        return "none"
    batches = [prompts] if model.pads else [[p] for p in prompts]
    got = [ids for batch in batches for ids in greedy_decode(model, batch, STEPS)]
    for row, (prompt, ids) in enumerate(zip(prompts, got)):
        expected: list[int] = []
        while len(expected) < STEPS and not (expected and expected[-1] in model.eos_ids):
            logits = logits_of(model, oracle, prompt, expected)[-1]
            top, index = int(logits.argmax()), len(expected)
            emitted = ids[index] if index < len(ids) else top
            if emitted != top and float(logits[top] - logits[emitted]) <= tolerance(logits).tie:
                ids = ids[:index]  # a tie within rounding: from here on the two go different ways
                break
            expected.append(top)
        if ids != expected:
            raise Differs(f"row {row} gives {ids}, the plain loop {expected}")
    return "pass"


# ---- all architectures


def silence() -> None:
    """Send nowhere what the libraries print in this process."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)


def checked(kind: str, model_type: str) -> dict:
    """The row of an architecture from a process of its own; one whose process dies or takes too long has failed."""
    torch.set_num_threads(1)  # threads do not survive a fork
    began = time.monotonic()
    with get_context("fork").Pool(1, silence) as processes:
        try:
            row = processes.apply_async(check, (kind, model_type)).get(LIMIT)
        except TimeoutError:
            failed = {"built": True, "readout": "fail", "reason": f"took longer than {LIMIT:g} s, or its process died"}
            row = new_row(kind, model_type) | failed
    return row | {"seconds": round(time.monotonic() - began, 1)}


def goals(rows: list[dict]) -> list[Goal]:
    """Of no kind may one fail, and what is refused has a reason; of attention-based causal ones most have to pass."""
    found = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        wrong = [row["model_type"] for row in own if "fail" in [row[verdict] for verdict in VERDICTS]]
        good, built = sum(map(passes, own)), sum(row["built"] for row in own)
        said = f"{len(wrong)} of {len(own)}; {built} were built, and {good} of these pass everything"
        said += f"; wrong: {', '.join(wrong[:5])}" if wrong else ""
        found.append(goal(f"{kind} architectures with a wrong number", len(wrong), at_most=0, shown=said))
    if others := [row for row in rows if not passes(row)]:
        name = "architectures that do not pass everything and say why"
        found.append(all_of(name, sum(bool(row["reason"]) for row in others), len(others)))
    own = [row for row in rows if row["kind"] == "causal" and row["built"] and row["attention_based"]]
    share = sum(map(passes, own)) / max(len(own), 1)
    name = "share of attention-based causal architectures that pass everything"
    return [*found, goal(name, share, at_least=LEAST, shown=f"{share:.3f} of {len(own)}")]


def sample() -> dict[str, Any]:
    """A small part, computed again by the tests: the verdicts on one architecture of each kind."""
    rows = [check(*item) for item in SAMPLE]
    return {"values": {row["architecture"]: [row[verdict] for verdict in VERDICTS] for row in rows}, "near_ties": []}


def main() -> None:
    asked = options(__doc__, "architectures").parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    head, rows = headed("architectures", depends=(*TRACES, *TINY), seed=0), []
    for kind, model_type in ((kind, name) for kind, names in KINDS.items() for name in names):
        rows.append(row := checked(kind, model_type))
        verdicts = " ".join(f"{row[name] or '-':13s}" for name in VERDICTS)
        print(f"{kind:10s} {model_type:24s} {verdicts} {row['seconds']:5.1f}  {row['reason']}", flush=True)
    finish(asked.output, head, goals(rows), sample=sample(), rows=rows)
