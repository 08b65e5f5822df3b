"""Quality: every figure that a card of a model of P's tasks needs, and scores by hand."""

import families
import pytest
import torch
from transformers import AutoTokenizer

from eelib.common.files import data_folder
from eelib.models.model import prepare
from eelib.models.probe import block_states
from eelib.tasks.task import load_task
from eelib.tracing.decode import greedy_decode
from recipes import quality
from recipes.quality import agreement, answered, answers, measure, summarized


@pytest.fixture(scope="module")
def model():
    tokenizer = AutoTokenizer.from_pretrained(data_folder("models") / "pocket-llama")
    network = families.build("llama").float()
    network.resize_token_embeddings(len(tokenizer))
    return prepare(network.eval(), tokenizer, "tiny", "causal")


@pytest.fixture
def oracle(monkeypatch):
    """oracle(say): outputs come from `say(prompt)` instead of from the model."""

    def made(say):
        monkeypatch.setattr(quality, "greedy_texts", lambda _model, prompts, _most, **_: [say(p) for p in prompts])

    return made


def test_answers_by_hand():
    """SQuAD's normalisation: case, articles and punctuation do not count; the best reference does."""
    found = answers(["The hotel.", "in a red barn", "no"], [["hotel"], ["barn", "red barn"], ["yes"]])
    assert found == {"F1": pytest.approx(100 * (1 + 0.8 + 0) / 3), "EM": pytest.approx(100 / 3), "items": 3}


def test_questions_beyond_the_window_are_counted(model, oracle):
    oracle(lambda prompt: "a cat")
    rows = [{"context": "A cat. " * n, "question": "Who?", "answers": ["cat"]} for n in (1, 2, 900)]
    assert answered(model, rows) == {"F1": 100.0, "EM": 100.0, "items": 2, "beyond the window": 1}


def test_headlines_stand_beside_the_first_words(model, oracle):
    oracle(lambda prompt: "cat lost")
    article = "A dog said it lost a cat in the park on Monday and so on. " * 30
    found = summarized(model, [article], [["CAT LOST"]])
    assert found["ROUGE-1"] == 100.0 and found["items"] == 1
    assert found["first words"]["ROUGE-1"] == pytest.approx(100 * 2 * 2 / (2 + 8))  # "cat" and "lost" among 8 words


def test_agreement_by_hand(model, monkeypatch):
    """Each layer's top-1 against the tokens that the model gave; end tokens do not count; the last agrees always."""
    monkeypatch.setattr(quality, "LONGEST_TRANSLATION", 3)
    task = load_task("translation/de-en").take(5)
    monkeypatch.setattr(quality, "load_task", lambda _name: task)
    agreed, tokens = [0] * model.layers, 0
    for prompt in model.encode(task.prompts):
        for token in greedy_decode(model, [prompt], 3)[0]:
            with torch.no_grad(), block_states(model.blocks) as states:
                model.network(torch.tensor([prompt]))
            prompt = [*prompt, token]
            if token not in model.eos_ids:
                tokens += 1
                for layer in range(model.layers):
                    agreed[layer] += model.unembed(states[layer + 1][0, -1:]).argmax().item() == token
    found = agreement(model, ["translation/de-en"])
    assert found == {"by layer": [round(100 * n / tokens, 1) for n in agreed], "items": tokens}
    assert found["by layer"][-1] == 100.0


def test_measure_has_every_figure(folder, model, monkeypatch, oracle):
    """Translation, reading, headlines and the shipped texts, with how many items each is of."""
    monkeypatch.setattr(quality, "load_model", lambda *_, **__: model)
    monkeypatch.setattr(quality, "agreement", lambda *_: {"items": 1})
    oracle(lambda prompt: "Ein Mann. nobody knows")
    found = measure(folder, folder, "cpu")
    pairs = ("de-en", "en-de", "fr-en", "en-fr")
    assert {f"{name} {pair}" for name in ("Multi30k test2016", "Tatoeba held out") for pair in pairs} < set(found)
    rooms = {kind: found[f"rooms {kind}"]["items"] for kind in ("one", "two", "three", "count", "unknown")}
    assert rooms == {"one": 75, "two": 75, "three": 75, "count": 45, "unknown": 30}
    assert {"FairytaleQA test", "SQuADShifts held out", "Reuters test", *quality.TEXTS} - {quality.ORDERS} < set(found)
    assert found["FairytaleQA test"]["beyond the window"] == 1 and found["Reuters test"]["items"] == 6
    assert found["translation/de-en"]["items"] == 156 and found["summarization/news"]["items"] == 60
    assert all(scores["items"] for scores in found.values())
    few = measure(folder, folder, "cpu", ("captions", "translation"))
    assert set(few) < set(found) and "translation/de-en" in few
    assert not {"FairytaleQA test", "rooms one", "Reuters test", "summarization/news"} & set(few)
    told = measure(folder, folder, "cpu", ("captions", "orders"))
    multi30k = {f"Multi30k test2016 {pair}" for pair in pairs}
    assert set(told) == {*multi30k, quality.ORDERS, "agreement with the last layer"}
    assert told[quality.ORDERS] == {"exact": 0.0, "valid": 0.0, "field F1": 0.0, "items": 150}
