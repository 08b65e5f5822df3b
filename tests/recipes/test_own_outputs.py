"""The recipes in legs: a model's own outputs, and draft blocks, a joint version and a tuned lens that learn them."""

import copy
import json
import shutil
from dataclasses import replace
from itertools import islice

import pytest
import torch
import transformers as hf

import eelib
from eelib.models.lens_adapters import Translators
from eelib.tracing.decode import greedy_decode
from recipes import own_outputs
from recipes.gates import known_outputs
from recipes.own_outputs import Prompts, batches, file_of, read_texts
from recipes.smollm2 import BLOCK, FEATURES, JOINT, OUTPUTS, Joint
from recipes.tuned_lens import SMOLLM2_LENS

TEMPLATE = "{% for m in messages %}user {{ m['content'] }} {% endfor %}assistant"


@pytest.fixture(scope="module")
def start(folder_of, tmp_path_factory):
    """A tiny llama with room for the prompts, whose tokenizer has a chat template."""
    folder = shutil.copytree(folder_of("llama"), tmp_path_factory.mktemp("start") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template, tokenizer.model_max_length = TEMPLATE, 2048
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def own(corpora, start, tmp_path_factory):
    """(the tiny model, the folder of works with its outputs)."""
    work = tmp_path_factory.mktemp("works")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_outputs, "CHUNK", 20)
        patch.setattr(own_outputs, "AT_ONCE", (8, 8))
        patch.setattr(own_outputs, "LONGEST", 12)
        replace(OUTPUTS, start=str(start), chunks=2, dtype="float32").run(corpora, work, work / OUTPUTS.name, "cpu")
    return eelib.load_model(str(start), device="cpu"), work


def test_outputs_and_what_is_learned_of_them(own, corpora):
    """Greedy outputs with the likeliest tokens, which gates read, too; the loss of a lens that has learned nothing: the
    KL divergence of all inner layers from the last. In float64.
    """
    model, work = own
    texts, prompts = read_texts(file_of(work / OUTPUTS.name, 1)), Prompts(corpora)
    assert [text.number for text in texts] == list(range(20, 40))
    exact, apart = copy.deepcopy(model.network).double(), []
    for text in texts:
        assert text.ids[: text.start].tolist() == prompts.encoded(model, text.number)
        (plain,) = greedy_decode(model, [text.ids[: text.start].tolist()], 12)
        assert text.output.tolist() == plain == text.top[text.start - 1 :, 0].tolist()
        with torch.no_grad():
            run = exact(text.ids[None], output_hidden_states=True)
            inner = exact.lm_head(exact.model.norm(torch.cat(run.hidden_states[1:-1]))).log_softmax(-1)
        likely = run.logits[0, :-1].log_softmax(-1)
        torch.testing.assert_close(text.likely.double(), likely.gather(1, text.top), atol=5e-3, rtol=2e-3)
        apart.append((likely.exp() * (likely - inner[:, :-1])).sum(-1)[:, text.start - 1 :])
    loss = SMOLLM2_LENS.loss_of(model, Translators(model.layers, model.hidden_size), texts, 0)
    assert loss.shown.item() == pytest.approx(torch.cat(apart, dim=1).mean().item(), rel=1e-3)
    known = [(prompt, output) for (prompt,), (output,) in known_outputs(work / OUTPUTS.name)][20:]
    in_order = [(text.ids[: text.start].tolist(), text.output.tolist()) for text in texts]
    assert sorted(known) == sorted(in_order) and known != in_order


def test_own_texts_go_on_from_a_place(own):
    """Each of them once an epoch."""
    whole = list(islice(batches(own[1] / OUTPUTS.name, 300, None), 100))
    numbers = [[text.number for text in batch] for _, batch in whole]
    seen = sum(numbers, [])
    assert sorted(seen[:40]) == list(range(40)) == sorted(seen[40:80])
    for at in (3, 11):
        later = islice(batches(own[1] / OUTPUTS.name, 300, whole[at][0]), 5)
        assert [[text.number for text in batch] for _, batch in later] == numbers[at + 1 : at + 6]


@pytest.mark.parametrize(
    "recipe",
    [
        replace(BLOCK, layer=1, head=40, peak=1e-2, steps=40),
        replace(FEATURES, head=40, peak=2e-2, steps=40),
        replace(JOINT, rank=4, peak=2e-2, steps=40, shown=(1, 2)),
        replace(SMOLLM2_LENS, peak=1e-2, steps=20, shown=(1, 2)),
    ],
    ids=lambda recipe: recipe.name,
)
def test_legs_go_on_and_what_they_write_is_read(recipe, own, start, tmp_path):
    """From the weights of the leg before, without its checkpoint; the card says how good they are when read."""
    recipe = replace(recipe, start=str(start), tokens=400, watch_every=50)
    work, out = own[1] / recipe.name, tmp_path / "out"
    replace(recipe, steps=recipe.steps // 2).run(tmp_path, out, work, "cpu")
    shutil.rmtree(work)
    leg = recipe.run(tmp_path, out, work, "cpu")
    card = json.loads((out / "card.json").read_text())
    assert leg["step"] == card["steps"] == recipe.steps and leg["warm"] == recipe.steps // 2
    assert card["loss_by_step"][-1][1] < card["loss_by_step"][0][1]
    assert card["quality"] == json.loads(json.dumps(recipe.measure(tmp_path, out, "cpu", work)))
    if isinstance(recipe, Joint):
        assert eelib.load_model(str(out), device="cpu").layers == own[0].layers
