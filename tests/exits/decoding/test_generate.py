"""What is asked of `generate`, what it returns and refuses, and how often a step waits for the device."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import eelib
from checks.tiny_texts import PROMPTS, WINDOW
from eelib.common.errors import InputError
from eelib.common.machine import report_halving
from eelib.exits.decoding import self_test
from eelib.exits.exit_rule import Estimated, ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.exits.gates.state import StateClassifier
from eelib.models.block_runner import BlockRunner


def test_tables(model_of):
    """A row per token and per sequence, in the order of the prompts; texts add up to the outputs."""
    model, given = model_of("llama"), dict(exit_layers=(2,), kv_policy="project", max_new_tokens=6)
    made = eelib.generate(model, PROMPTS, batch_size=2, **given)
    tokens, sequences = made.tokens, made.sequences
    assert tokens[["sequence", "position"]].apply(tuple, axis=1).is_monotonic_increasing
    assert tokens.groupby("sequence").size().tolist() == sequences["length"].tolist()
    for _, part in tokens.groupby("sequence"):
        assert model.tokenizer.decode(part["token_id"].tolist()) == "".join(part["text"])
    assert eelib.generate(model, eelib.Task.from_prompts(PROMPTS), **given).sequences.equals(sequences)
    assert (tokens["head_reads"] == 1).all() and (tokens["score"] == 2).all() and made.seconds > 0


def test_threads_that_share_a_model_wait_for_each_other(model_of, tmp_path):
    model, plain = model_of("llama"), eelib.generate(model_of("llama"), PROMPTS, max_new_tokens=12).sequences["output"]

    def decoded(number):
        if number % 3 == 0:
            made = eelib.trace(model, eelib.Task.from_prompts(PROMPTS), 12, tmp_path / str(number), progress=False)
            return made.sequences["output"]
        more = {"draft": "layer:1", "draft_length": 2} if number % 3 == 1 else {}
        return eelib.generate(model, PROMPTS, max_new_tokens=12, batch_size=2, **more).sequences["output"]

    with ThreadPoolExecutor(3) as pool:
        assert all(outputs.equals(plain) for outputs in pool.map(decoded, range(6)))


LEARNED = ExitRule(gate_named("confidence"), Estimated(), exit_layers=(1,))
OTHER = StateClassifier.of(StateClassifier.build(32), "llama", "0" * 64)
BAD = [
    (dict(kv_policy="copy"), ["'copy'", "needs a gate"]),
    (dict(kv_policy="deferred", gate=OTHER), "for other weights than these"),
    (dict(kv_policy="copy", exit_layers=(1,), draft_length=2), ["draft_length=2", "'verified'"]),
    (dict(kv_policy="schedule", gate="confidence"), ["'schedule'", "confidence"]),
    (dict(kv_policy="verified", gate=LEARNED), ["'verified'", "deferred"]),
    (dict(kv_policy="deferred", gate="oracle"), ["oracle", "'deferred'"]),
    (dict(kv_policy=["full"]), ["kv_policy ['full']", "full, copy"]),
    (dict(keys="copy"), ["no keys=", "kv_policy="]),
    (dict(exit_layers=(2,)), ["without a gate needs a kv_policy", "draft='layer:2'"]),
    (dict(draft="layer:3"), ["draft='layer:3'", "layers 1 to 2"]),
    (dict(draft="block"), ["draft='block'", "no trained block", "allowed without one: auto, prompt, layer:K"]),
    (dict(draft="prompt", gate="confidence"), "draft stands in place of gate"),
]


@pytest.mark.parametrize("given, parts", BAD, ids=lambda value: str(value)[:40])
def test_bad_input(given, parts, model_of, one_line):
    one_line(InputError, parts, lambda: eelib.generate(model_of("llama"), PROMPTS, **given))


def test_prompts_and_models_that_do_not_fit(model_of, one_line, monkeypatch):
    llama = model_of("llama")
    one_line(InputError, ["prompt 1", f"1 to {WINDOW - 1}"], lambda: eelib.generate(llama, ["a", "dog " * 200]))
    one_line(InputError, "load_model", lambda: eelib.generate("llama", PROMPTS))
    model = model_of("gpt2")
    monkeypatch.setattr(self_test, "TESTED", type(self_test.TESTED)())
    monkeypatch.setattr(model, "cache", "own")
    one_line(InputError, ["gpt2", "can't be stopped", "cache of its own"], lambda: eelib.generate(model, PROMPTS))


def test_out_of_memory_halves_the_batch(model_of, monkeypatch, capsys):
    """In the third round of drafts: the output is that of smaller batches, and the model is left as it was."""
    model, run, ran = model_of("llama"), BlockRunner.call_block, []
    before = [set(vars(block)) for block in model.blocks]
    report_halving.cache_clear()
    given = dict(draft="layer:2", draft_length=2, max_new_tokens=8)
    wanted = eelib.generate(model, PROMPTS[:4], batch_size=2, **given)

    def tight(self, call, layer, states):
        ran.append(layer)
        if len(ran) == model.layers + 12:  # of blocks, after the prompt
            raise torch.OutOfMemoryError("full")
        return run(self, call, layer, states)

    monkeypatch.setattr(BlockRunner, "call_block", tight)
    made = eelib.generate(model, PROMPTS[:4], batch_size=4, **given)
    assert made.tokens.equals(wanted.tokens) and made.sequences.equals(wanted.sequences)
    assert made.expected == pytest.approx(wanted.expected) and capsys.readouterr().out.count("halved") == 1
    assert [set(vars(block)) for block in model.blocks] == before


def test_a_kv_policy_is_chosen(model_of):
    """The one that keeps plain decoding's output, or that the gate is made for; the result says which."""
    gates = {None: "full", "confidence": "verified", "oracle": "full", "schedule": "schedule"}
    for gate, chosen in [*gates.items(), (LEARNED, "deferred")]:
        assert eelib.generate(model_of("llama"), PROMPTS[:1], gate, max_new_tokens=3).kv_policy == chosen


# What the host reads of the device

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique")


class Counting(TorchDispatchMode):
    """Counts operations that need values on the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(name in func.__name__ for name in READS)
        return func(*args, **(kwargs or {}))


def per_step(model, monkeypatch, **given):
    """Reads of a step of one sequence after the prompt."""
    counts, tolist = [], torch.Tensor.tolist  # which goes round the dispatcher
    for steps in (9, 5):
        lists = []
        with monkeypatch.context() as patch, Counting() as mode:
            patch.setattr(torch.Tensor, "tolist", lambda tensor: lists.append(1) or tolist(tensor))
            assert len(eelib.generate(model, PROMPTS[:1], max_new_tokens=steps, **given).tokens) == steps
        counts.append(mode.count + len(lists))
    return (counts[0] - counts[1]) / 4


def test_reads_per_step(model_of, eos, monkeypatch):
    """One a step without a gate; one more per layer that is asked and may stop, and none at the others."""
    model = model_of("t5")
    eos(model, {model.vocab_size + 1})
    eelib.generate(model, PROMPTS[:1], max_new_tokens=2)  # what is tried once
    plain, confidence = per_step(model, monkeypatch), gate_named("confidence")
    for rule, asked in (
        (ExitRule(confidence, 2.0), model.layers - 1),
        (ExitRule(confidence, 2.0, full_depth_tokens=20), 0),
        (ExitRule(gate_named("patience"), 9.0, minimum_layer=model.layers - 1), 1),
    ):
        gated = per_step(model, monkeypatch, gate=rule, kv_policy="deferred")
        assert gated == plain + asked + 1  # and the scores, once a step
