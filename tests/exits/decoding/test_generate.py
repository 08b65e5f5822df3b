"""What is asked of `generate`, what it returns and refuses, and how often a step waits for the device."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from exits_made import Deepening
from torch.utils._python_dispatch import TorchDispatchMode

import eelib
from checks.tiny import build
from checks.tiny_texts import PROMPTS, WINDOW, tokenizer_for
from eelib.common.errors import InputError
from eelib.common.machine import report_halving
from eelib.exits.decoding import self_test
from eelib.exits.exit_rule import Estimated, ExitRule
from eelib.exits.gates.gate import Gate, gate_named
from eelib.exits.gates.state import StateClassifier
from eelib.models.block_runner import BlockRunner
from eelib.tracing.plan import longest_mixed


def test_tables(model_of):
    """A row per token and per sequence, in the order of the prompts; texts add up to the outputs."""
    model, given = model_of("llama"), dict(exit_layers=(2,), kv_policy="project", max_new_tokens=6)
    made = eelib.generate(model, PROMPTS, batch_size=2, **given)
    tokens, sequences = made.tokens, made.sequences
    assert sequences["sequence"].tolist() == list(range(len(PROMPTS)))
    assert tokens[["sequence", "position"]].apply(tuple, axis=1).is_monotonic_increasing
    assert tokens.groupby("sequence").size().tolist() == sequences["length"].tolist()
    for _, part in tokens.groupby("sequence"):
        assert model.tokenizer.decode(part["token_id"].tolist()) == "".join(part["text"])
    assert eelib.generate(model, eelib.Task.from_prompts(PROMPTS), **given).sequences.equals(sequences)
    assert (tokens["head_reads"] == 1).all() and (tokens["score"] == 2).all() and made.seconds > 0


def test_no_row_of_a_batch_passes_the_window(tmp_path):
    """Padding before a row counts, too, in networks whose tables end with the window; alone, all rows fit."""
    build("causal", "mpt").save_pretrained(tmp_path)
    tokenizer_for("causal").save_pretrained(tmp_path)
    model = eelib.load_model(str(tmp_path), device="cpu")
    prompts, given = ["a" * 60, "b" * 80, "c" * 81, "a" * 100, "b" * 100], {"max_new_tokens": 48}
    alone = [eelib.generate(model, [prompt], **given).sequences["output"][0] for prompt in prompts]
    for more in ({}, {"draft": "prompt", "draft_length": 3}, {"draft": "layer:1", "draft_length": 5}):
        assert eelib.generate(model, prompts, **given, **more).sequences["output"].tolist() == alone
    eelib.generate(model, prompts, exit_layers=(2,), kv_policy="deferred", **given)
    assert longest_mixed(model, 48) == WINDOW - 48
    trace = eelib.trace(model, eelib.Task.from_prompts(prompts), max_new_tokens=48, progress=False)
    assert trace.sequences["output"].tolist() == alone


def test_the_model_is_left_as_it_was(model_of):
    """Also where a decoding is broken off."""
    model = model_of("llama")
    hooks, inner = len(model.blocks[0]._forward_hooks), set(model.blocks[0].__dict__)

    class Broken(Gate):
        name, default = "broken", 0.0

        def score(self, seen, memory):
            if seen.layer == 2:
                raise KeyboardInterrupt
            return torch.ones(len(seen.positions)) * (seen.positions - 1)  # the second token goes on

    with pytest.raises(KeyboardInterrupt):
        eelib.generate(model, PROMPTS[:1], gate=Broken(), kv_policy="deferred", max_new_tokens=4)
    eelib.generate(model, PROMPTS[:1], exit_layers=(1,), kv_policy="project", max_new_tokens=4)
    assert len(model.blocks[0]._forward_hooks) == hooks and set(model.blocks[0].__dict__) == inner


def test_threads_that_share_a_model_wait_for_each_other(model_of, tmp_path):
    model, plain = model_of("llama"), eelib.generate(model_of("llama"), PROMPTS, max_new_tokens=12).sequences["output"]
    forwards = [vars(block).get("forward") for block in model.blocks]

    def decoded(number):
        if number % 3 == 0:
            made = eelib.trace(model, eelib.Task.from_prompts(PROMPTS), 12, tmp_path / str(number), progress=False)
            return made.sequences["output"]
        more = {"draft": "layer:1", "draft_length": 2} if number % 3 == 1 else {}
        return eelib.generate(model, PROMPTS, max_new_tokens=12, batch_size=2, **more).sequences["output"]

    with ThreadPoolExecutor(3) as pool:
        assert all(outputs.equals(plain) for outputs in pool.map(decoded, range(9)))
    assert [vars(block).get("forward") for block in model.blocks] == forwards


def trained(*trained_for):
    """A gate that was trained for a model of this name, with weights of this hash."""
    return StateClassifier.of(StateClassifier.build(32), *trained_for)


LEARNED = ExitRule(gate_named("confidence"), Estimated(), exit_layers=(1,))

BAD = [
    (dict(gate="confidence", exit_layers=(9,)), ["(9,)", "layers 1 to 3"]),
    (dict(exit_layers=(1, 2), kv_policy="copy"), ["(1, 2)", "without a gate"]),
    (dict(kv_policy="copy"), ["'copy'", "needs a gate"]),
    (dict(kv_policy="deferred", gate=trained("gpt2")), "for gpt2, not for llama"),
    (dict(kv_policy="deferred", gate=trained("llama", "0" * 64)), "for other weights than these"),
    (dict(draft="layer:1", draft_length=WINDOW), ["draft_length 128", "window of 128"]),
    (dict(kv_policy="copy", exit_layers=(1,), draft_length=2), ["draft_length=2", "'verified'"]),
    (dict(kv_policy="schedule", gate="confidence"), ["'schedule'", "confidence"]),
    (dict(kv_policy="schedule", gate=Deepening()), ["schedule", "token 3", "deeper"]),
    (dict(kv_policy="verified", gate=LEARNED), ["'verified'", "deferred"]),
    (dict(kv_policy="deferred", gate="oracle"), ["oracle", "'deferred'"]),
    (dict(gate=ExitRule(gate_named("confidence")), exit_layers=(1,)), ["rule has exit_layers"]),
    (dict(gate=7), ["gate 7"]),
    (dict(kv_policy=["full"]), ["kv_policy ['full']", "full, copy"]),
    (dict(exit_layers=2, kv_policy="copy"), ["exit_layers 2", "(2, 4)"]),
    (dict(policy="none.json"), ["none.json is no policy"]),
    (dict(max_new_tokens="4"), "max_new_tokens '4'"),
    (dict(keys="copy"), ["no keys=", "kv_policy="]),
    (dict(temperature=0.5), "no temperature="),
    (dict(exit_layers=(2,)), ["without a gate needs a kv_policy", "draft='layer:2'"]),
    (dict(draft="layer:3"), ["draft='layer:3'", "layers 1 to 2"]),
    (dict(draft="prompt+layer:1"), ["'prompt+layer:1'", "auto, prompt, block"]),
    (dict(draft="block"), ["draft='block'", "no trained block", "allowed without one: auto, prompt, layer:K"]),
    (dict(draft="prompt", gate="confidence"), "draft stands in place of gate"),
]


@pytest.mark.parametrize("given, parts", BAD, ids=lambda value: str(value)[:40])
def test_bad_input(given, parts, model_of, one_line):
    one_line(InputError, parts, lambda: eelib.generate(model_of("llama"), PROMPTS, **given))


def test_prompts_and_models_that_do_not_fit(model_of, one_line, monkeypatch):
    llama = model_of("llama")
    one_line(InputError, ["prompt 1", f"1 to {WINDOW - 1}"], lambda: eelib.generate(llama, ["a", "dog " * 200]))
    one_line(InputError, "encoder-decoder", lambda: eelib.generate(model_of("bert"), PROMPTS))
    one_line(InputError, "load_model", lambda: eelib.generate("llama", PROMPTS))
    model = model_of("gpt2")
    monkeypatch.setattr(self_test, "TESTED", type(self_test.TESTED)())
    monkeypatch.setattr(model, "cache", "own")
    one_line(InputError, ["gpt2", "can't be stopped", "cache of its own"], lambda: eelib.generate(model, PROMPTS))
    monkeypatch.undo()
    monkeypatch.setattr(self_test, "TESTED", type(self_test.TESTED)())
    spread = [torch.empty(0), torch.empty(0, device="meta")]  # as device="balanced" does with several GPUs
    monkeypatch.setattr(model.network, "parameters", lambda: iter(spread))
    one_line(InputError, ["gpt2", "on several devices"], lambda: eelib.generate(model, PROMPTS))


def test_out_of_memory_halves_the_batch(model_of, monkeypatch, capsys):
    """In the third round of drafts: the output is that of smaller batches. One prompt that does not fit raises."""
    model, run, ran = model_of("llama"), BlockRunner.call_block, []
    report_halving.cache_clear()
    given = dict(draft="layer:2", draft_length=2, max_new_tokens=8)
    wanted = eelib.generate(model, PROMPTS[:4], batch_size=2, **given)

    def tight(self, call, layer, states):
        ran.append(layer)
        if len(ran) == model.layers + 12 or not given:  # of blocks, after the prompt
            raise torch.OutOfMemoryError("full")
        return run(self, call, layer, states)

    monkeypatch.setattr(BlockRunner, "call_block", tight)
    made = eelib.generate(model, PROMPTS[:4], batch_size=4, **given)
    assert made.tokens.equals(wanted.tokens) and made.sequences.equals(wanted.sequences)
    assert made.expected == pytest.approx(wanted.expected) and capsys.readouterr().out.count("halved") == 1
    given.clear()
    with pytest.raises(torch.OutOfMemoryError):
        eelib.generate(model, PROMPTS[:2], max_new_tokens=2)


def test_a_kv_policy_is_chosen(model_of):
    """The one that keeps plain decoding's output, or that the gate is made for; the result says which."""
    gates = {None: "full", "confidence": "verified", "oracle": "full", "schedule": "schedule"}
    for gate, chosen in [*gates.items(), (LEARNED, "deferred"), (trained("llama"), "verified")]:
        assert eelib.generate(model_of("llama"), PROMPTS[:1], gate, max_new_tokens=3).kv_policy == chosen


# What the host reads of the device

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique")


class Counting(TorchDispatchMode):
    """Counts operations that need values on the host; with those that go round the dispatcher."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(name in func.__name__ for name in READS)
        return func(*args, **(kwargs or {}))

    def counted(self, plain):
        def call(*args, **kwargs):
            self.count += 1
            return plain(*args, **kwargs)

        return call


def per_step(model, monkeypatch, **given):
    """Reads of a step of one sequence after the prompt."""
    counts = []
    for steps in (9, 5):
        with monkeypatch.context() as patch, Counting() as mode:
            for name in ("tolist", "numpy"):
                patch.setattr(torch.Tensor, name, mode.counted(getattr(torch.Tensor, name)))
            assert len(eelib.generate(model, PROMPTS[:1], max_new_tokens=steps, **given).tokens) == steps
        counts.append(mode.count)
    assert (counts[0] - counts[1]) % 4 == 0
    return (counts[0] - counts[1]) // 4


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_reads_per_step(name, model_of, eos, monkeypatch):
    """One a step without a gate; one more per layer that is asked and may stop, and none at the others."""
    model = model_of(name)
    eos(model, {model.vocab_size + 1})
    eelib.generate(model, PROMPTS[:1], max_new_tokens=2)  # what is tried once
    plain, confidence = per_step(model, monkeypatch), gate_named("confidence")
    for rule, asked in (
        (ExitRule(confidence, 2.0, exit_layers=(2,)), 1),
        (ExitRule(confidence, 2.0), model.layers - 1),
        (ExitRule(confidence, 2.0, full_depth_tokens=20), 0),
        (ExitRule(gate_named("patience"), 9.0, minimum_layer=model.layers - 1), 1),
    ):
        gated = per_step(model, monkeypatch, gate=rule, kv_policy="deferred")
        assert gated == plain + asked + 1  # and the scores, once a step
    fixed = per_step(model, monkeypatch, exit_layers=(1,), kv_policy="deferred")
    assert fixed <= plain + 2  # whether, the score and the token, in place of the last layer's token
