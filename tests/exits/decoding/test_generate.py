"""What is asked of `generate`, what it returns, and what it refuses."""

import pytest
import torch

import eelib
from checks.tiny_texts import PROMPTS, WINDOW
from eelib.common.errors import InputError
from eelib.exits.decoding.clock import PARTS
from eelib.exits.decoding.loop import Decoding
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.classifier import StateClassifier
from eelib.exits.gates.gate import Gate
from eelib.exits.gates.registry import gate_named
from eelib.exits.gates.trained import TRAINED


def test_tables(model_of):
    """A row per token and per sequence, in the order of the prompts; texts add up to the outputs."""
    model = model_of("llama")
    made = eelib.generate(model, PROMPTS, exits=(2,), keys="project", batch_size=2, max_new_tokens=6)
    tokens, sequences = made.tokens, made.sequences
    assert sequences["sequence"].tolist() == list(range(len(PROMPTS)))
    assert tokens[["sequence", "position"]].apply(tuple, axis=1).is_monotonic_increasing
    assert tokens.groupby("sequence").size().tolist() == sequences["length"].tolist()
    for row, part in tokens.groupby("sequence"):
        assert model.tokenizer.decode(part["token_id"].tolist()) == "".join(part["text"])
        alone = eelib.generate(model, [PROMPTS[row]], exits=(2,), keys="project", max_new_tokens=6)
        assert alone.tokens["token_id"].tolist() == part["token_id"].tolist()
        assert alone.sequences["output"][0] == sequences["output"][row]
    assert (tokens["heads"] == 1).all() and (tokens["score"] == 2).all()
    assert set(made.times) == set(PARTS) and min(made.times[part] for part in ("blocks", "head", "cache")) > 0


def test_a_task_is_decoded_as_its_prompts(model_of):
    model = model_of("gpt2")
    task = eelib.Task.from_prompts(PROMPTS)
    one, other = (eelib.generate(model, given, max_new_tokens=4) for given in (task, PROMPTS))
    assert one.tokens.equals(other.tokens) and one.sequences.equals(other.sequences)


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
        eelib.generate(model, PROMPTS[:1], gate=Broken(), keys="deferred", max_new_tokens=4)
    eelib.generate(model, PROMPTS[:1], exits=(1,), keys="project", max_new_tokens=4)
    assert len(model.blocks[0]._forward_hooks) == hooks and set(model.blocks[0].__dict__) == inner


class Needs(Gate):
    """A gate that wants what no decoding knows."""

    name, needs, default = "needs", ("readout", "reference"), 0.5


BAD = [
    (dict(keys="none"), ["keys 'none'", "full, copy"]),
    (dict(gate="confidnce"), ["confidnce", "patience"]),
    (dict(gate="confidence", exits=(9,)), ["(9,)", "layers 1 to 3"]),
    (dict(exits=(0,), keys="copy"), ["(0,)", "layers 1 to 3"]),
    (dict(exits=(1, 2), keys="copy"), ["(1, 2)", "without a gate"]),
    (dict(keys="copy"), ["'copy'", "needs a gate"]),
    (dict(keys="deferred", gate=Needs()), ["needs", "reference"]),
    (dict(keys="verified", exits=(1,), draft=WINDOW), ["draft 128", "window of 128"]),
    (dict(keys="verified", exits=(1,), draft=0), ["draft 0", "at least 1"]),
    (dict(keys="copy", exits=(1,), draft=2), ["draft=2", "'verified'"]),
    (dict(keys="schedule", gate="confidence"), ["'schedule'", "confidence"]),
    (dict(max_new_tokens=0), "max_new_tokens 0"),
    (dict(keys="deferred", gate="oracle"), ["oracle", "'deferred'"]),
    (dict(gate=ExitRule(gate_named("confidence")), exits=(1,)), ["rule has exits"]),
    (dict(gate=7), ["gate 7"]),
    (dict(batch_size=0), ["batch_size 0"]),
    (dict(keys=""), ["keys ''", "full, copy"]),
    (dict(keys=["full"]), ["keys ['full']", "full, copy"]),
    (dict(exits=2, keys="copy"), ["exit_layers 2", "(2, 4)"]),
    (dict(exits=("a",), keys="copy"), ["'a'"]),
    (dict(gate="confidence", exits=(1.5,)), ["1.5"]),
    (dict(gate="confidence", exits=(2, 1)), ["(2, 1)", "rising order"]),
    (dict(gate=ExitRule(gate_named("confidence"), exit_layers=(1, 9))), ["(1, 9)", "layers 1 to 3"]),
    (dict(keys="verified", exits=(1,), draft=WINDOW + 1), ["draft 129", "window of 128"]),
    (dict(keys="verified", exits=(1,), draft="2"), ["draft '2'"]),
    (dict(policy=7), ["7 is no policy"]),
    (dict(policy="none.json"), ["none.json is no policy"]),
    (dict(max_new_tokens="4"), "max_new_tokens '4'"),
    (dict(parting=3), "parting 3"),
]


@pytest.mark.parametrize("given, parts", BAD, ids=lambda value: str(value)[:40])
def test_bad_input(given, parts, model_of, one_line):
    one_line(InputError, parts, lambda: eelib.generate(model_of("llama"), PROMPTS, **given))


def test_a_schedule_that_deepens_is_refused(model_of, one_line):
    class Deepening(Gate):
        name, needs, default = "deepening", (), 0.0

        def score(self, seen, memory):
            return 3.0 - seen.positions

    call = lambda: eelib.generate(model_of("llama"), PROMPTS, gate=Deepening(), keys="schedule")  # noqa: E731
    one_line(InputError, ["schedule", "token 3", "deeper"], call)


def test_prompts_and_models_that_do_not_fit(model_of, one_line):
    llama = model_of("llama")
    one_line(InputError, ["prompt 1", f"1 to {WINDOW - 1}"], lambda: eelib.generate(llama, ["a", "dog " * 200]))
    one_line(InputError, "encoder-decoder", lambda: eelib.generate(model_of("bert"), PROMPTS))
    one_line(InputError, "load_model", lambda: eelib.generate("llama", PROMPTS))
    gate = TRAINED["classifier"].of(TRAINED["classifier"].build(32), "other")
    one_line(InputError, ["classifier", "other"], lambda: eelib.generate(llama, PROMPTS, gate=gate, keys="copy"))


def test_a_model_without_our_cache_is_refused(model_of, one_line, monkeypatch):
    model = model_of("gpt2")
    from eelib.exits.decoding import trial

    monkeypatch.setattr(trial, "TRIED", type(trial.TRIED)())
    monkeypatch.setattr(model, "cache", "own")
    one_line(InputError, ["gpt2", "can't be stopped", "cache of its own"], lambda: eelib.generate(model, PROMPTS))


def test_a_trained_gate_of_other_weights_is_refused(model_of):
    """Of another model's name, and of this one's with other weights; a gate whose weights are not known passes."""
    model = model_of("gpt2")

    def gate(*of):
        return StateClassifier.of(StateClassifier.build(model.hidden_size), *of)

    for given, told in (
        (("llama",), "for llama, not for gpt2"),
        ((model.name, "0" * 64), "for other weights than these"),
    ):
        with pytest.raises(InputError, match=told):
            eelib.generate(model, PROMPTS, gate=gate(*given), keys="deferred")
    for given in ((model.name,), (model.name, model.hash)):
        assert len(eelib.generate(model, PROMPTS, gate=gate(*given), keys="deferred", max_new_tokens=2).tokens)


def test_out_of_memory_halves_the_batch(model_of, monkeypatch, capsys):
    """Once said; the output is that of smaller batches. One prompt that does not fit raises."""
    model = model_of("llama")
    wanted = eelib.generate(model, PROMPTS, exits=(2,), keys="verified", temperature=0.5, max_new_tokens=6)
    decode, sizes, most = Decoding.decode, [], 2

    def tight(self, prompts, max_new_tokens):
        sizes.append(len(prompts))
        if len(prompts) > most:
            decode(self, prompts[:1], 3)  # part of the work was done
            raise torch.OutOfMemoryError("full")
        return decode(self, prompts, max_new_tokens)

    monkeypatch.setattr(Decoding, "decode", tight)
    made = eelib.generate(model, PROMPTS, exits=(2,), keys="verified", temperature=0.5, batch_size=4, max_new_tokens=6)
    assert made.tokens.equals(wanted.tokens) and made.sequences.equals(wanted.sequences)
    assert max(sizes) > most and capsys.readouterr().out.count("halved") == 1
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        eelib.generate(model, PROMPTS[:2], max_new_tokens=2)
