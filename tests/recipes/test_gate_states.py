"""What gates learn from: labels and states against a plain loop, and which texts they are of."""

import json

import families
import plain_runs
import pytest
import torch
from transformers import AutoTokenizer

from eelib.common.files import data_folder
from eelib.models.model import prepare
from recipes import gate_states
from recipes.corpora import shipped_texts
from recipes.gate_states import batches_of, in_turn, names_of, prompts_of, take_states


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_states_and_labels_are_those_of_a_plain_loop(family, model_of, plain_of, monkeypatch):
    """One output at a time, no cache: whether the layer's top-1 is the token that was emitted."""
    monkeypatch.setattr(gate_states, "LONGEST", 5)
    monkeypatch.setattr(gate_states, "AT_ONCE", 2)
    model, known = model_of(family), families.FAMILIES[family]
    prompts = model.encode(families.PROMPTS[:4])
    taken = take_states(model, prompts, 10**6, progress=False)
    network, last = plain_of(family), 0
    order = [prompt for batch in batches_of(prompts, 2) for prompt in batch]
    for number, prompt in enumerate(order):
        output = plain_runs.plain_greedy(network, known, prompt, 5, model.eos_ids)
        run = plain_runs.oracle_run(network, known, prompt, output)
        mine = (taken.output == number).nonzero()[:, 0]
        assert len(mine) == len(output)
        for position, row in enumerate(mine.tolist()):
            assert bool(taken.ends[row]) == (output[position] in model.eos_ids)
            for layer in range(1, model.layers):
                state = run["states"][position, layer]
                torch.testing.assert_close(taken.states[row, layer - 1], state, rtol=1e-3, atol=1e-3)
                top = known.unembed(network, state[None])[0].argmax().item()
                assert bool(taken.agrees[row, layer - 1]) == (top == output[position])
        last += len(output)
    assert last == len(taken.ends) and 0 < taken.agrees.float().mean() < 1


def test_decoding_stops_with_the_batch_that_has_enough(model_of, monkeypatch):
    monkeypatch.setattr(gate_states, "LONGEST", 5)
    monkeypatch.setattr(gate_states, "AT_ONCE", 2)
    model = model_of("llama")
    prompts = model.encode(families.PROMPTS[:4])
    assert take_states(model, prompts, 1, progress=False).output.unique().tolist() == [0, 1]


def test_batches_are_of_like_lengths_and_hold_every_prompt(monkeypatch):
    monkeypatch.setattr(gate_states, "AHEAD", 3)
    prompts = [[0] * length for length in (5, 1, 9, 2, 8, 7, 3, 4)]
    batches = [[len(prompt) for prompt in batch] for batch in batches_of(prompts, 2)]
    assert sorted(batches[:3]) == [[1, 2], [5, 7], [8, 9]] and batches[3:] == [[3, 4]]
    assert list(batches_of(prompts, 2)) == list(batches_of(prompts, 2))


@pytest.fixture
def pocket():
    """A tiny network with the tokenizer of the pocket models, whose window holds the made-up texts."""
    tokenizer = AutoTokenizer.from_pretrained(data_folder("models", "pocket-llama"))
    network = families.build("llama")
    network.resize_token_embeddings(len(tokenizer))
    network.config.max_position_embeddings = 512
    return prepare(network, tokenizer, "tiny", "causal")


def test_prompts_are_of_all_parts_in_turn_and_of_no_shipped_text(pocket, folder, tmp_path):
    found = prompts_of(pocket, "captions,read*", folder, tmp_path, 40)
    texts = [pocket.tokenizer.decode(ids, skip_special_tokens=True) for ids in found]
    asks = ["### Question" in text for text in texts]
    assert 10 <= len(texts) <= 40 and 10 < sum(asks) < 30
    assert found == prompts_of(pocket, "captions,read*", folder, tmp_path, 40)
    assert not {text.lower() for text in texts} & shipped_texts()
    assert all(len(ids) <= pocket.context_length - gate_states.LONGEST for ids in found)


def test_names():
    assert names_of("captions, rea*") == ["captions", "reading"]
    assert list(in_turn([["a", "b", "c"], ["x"]])) == ["a", "x", "b", "c"]


def test_texts_that_gates_are_judged_on_are_refused(pocket, tmp_path, one_line):
    """Under whatever name, even one of them."""
    row = json.loads(data_folder("texts", "translation", "de-en.jsonl").read_text().splitlines()[0])
    rows = [{"source": f"Satz {i}.", "references": ["x"]} for i in range(12)]
    file = tmp_path / "de-en.jsonl"
    for extra, refused in (([], False), ([row], True)):
        file.write_text("".join(json.dumps(each) + "\n" for each in rows + extra))
        if refused:
            one_line(ValueError, "on which gates are judged", lambda: prompts_of(pocket, str(file), None, tmp_path, 99))
        else:
            assert len(prompts_of(pocket, str(file), None, tmp_path, 99)) == 12


def test_too_few_prompts_that_fit_are_refused(model_of, tmp_path, one_line):
    file = tmp_path / "de-en.jsonl"
    file.write_text(json.dumps({"source": "Satz", "references": ["x"]}) + "\n")
    parts = ["prompts leave room for 128 tokens", "window of 128"]
    one_line(ValueError, parts, lambda: prompts_of(model_of("llama"), str(file), None, tmp_path, 9))
