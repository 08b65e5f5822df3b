"""The recipes in legs: the model's own outputs, draft blocks, a joint version and a tuned lens, on a tiny model."""

import copy
import json
import shutil
from dataclasses import replace
from itertools import islice

import pytest
import torch
import transformers as hf
from peft import PeftModel

import eelib
from eelib.common.errors import InputError
from eelib.models.lens_adapters import DRAFT_FILE, load_draft
from eelib.tracing.decode import greedy_decode
from recipes import own_outputs, smollm2
from recipes.own_outputs import Prompts, batches, file_of, outputs_of, read_texts
from recipes.smollm2 import BLOCK, FEATURES, JOINT, OUTPUTS, accepted
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


def test_outputs_are_greedy_and_say_what_else_was_likely(own, corpora, monkeypatch):
    model, work = own
    texts, prompts = read_texts(file_of(work / OUTPUTS.name, 1)), Prompts(corpora)
    assert [text.number for text in texts] == list(range(20, 40))
    exact = copy.deepcopy(model.network).double()
    for text in texts:
        assert text.ids[: text.start].tolist() == prompts.encoded(model, text.number)
        (plain,) = greedy_decode(model, [text.ids[: text.start].tolist()], 12)
        assert text.output.tolist() == plain == text.top[text.start - 1 :, 0].tolist()
        with torch.no_grad():
            likely = exact(text.ids[None]).logits[0, :-1].log_softmax(-1)
        torch.testing.assert_close(text.likely[:, 0].double(), likely.amax(1), atol=5e-3, rtol=2e-3)
        torch.testing.assert_close(text.likely.double(), likely.gather(1, text.top), atol=5e-3, rtol=2e-3)
    monkeypatch.setattr(own_outputs, "AT_ONCE", (3, 3))
    monkeypatch.setattr(own_outputs, "LONGEST", 12)
    for one, other in zip(outputs_of(model, prompts, range(20, 40)), texts):  # whatever they are decoded with
        assert torch.equal(one.ids, other.ids)


def test_own_texts_go_on_from_a_place_and_new_outputs_come_before_the_next_epoch(own, tmp_path):
    outputs = own[1] / OUTPUTS.name
    whole = list(islice(batches(outputs, 300, None), 100))
    seen = [text.number for _, batch in whole for text in batch]
    assert sorted(seen[:40]) == list(range(40)) == sorted(seen[40:80])  # each once an epoch
    for at in (3, 11):
        later = list(islice(batches(outputs, 300, whole[at][0]), 5))
        assert [[t.number for t in b] for _, b in later] == [[t.number for t in b] for _, b in whole[at + 1 : at + 6]]
    shutil.copy(file_of(outputs, 0), file_of(tmp_path, 0))
    ended = next(place for place, _ in batches(tmp_path, 300, None) if place[1] == 1)
    shutil.copy(file_of(outputs, 1), file_of(tmp_path, 1))
    assert {t.number for t in next(batches(tmp_path, 300, ended))[1]} <= set(range(20, 40))


@pytest.fixture
def two_legs(own, start, tmp_path):
    """two_legs(recipe, **settings): the recipe, what its card says is its quality, and the folder of what it trained:
    in a leg, and from the weights that this left in another, after which the loss is smaller.
    """

    def run(recipe, **settings):
        recipe = replace(recipe, start=str(start), tokens=400, watch_every=30, **settings)
        work = own[1] / recipe.name
        replace(recipe, steps=recipe.steps // 2).run(tmp_path, tmp_path / "out", work, "cpu")
        shutil.rmtree(work)
        leg = recipe.run(tmp_path, tmp_path / "out", work, "cpu")
        card = json.loads((tmp_path / "out/card.json").read_text())
        assert leg["step"] == card["steps"] == recipe.steps and card["settings of the last leg"]["tokens"] == 400
        assert card["loss_by_step"][-1][1] < card["loss_by_step"][0][1]
        return recipe, card["quality"], tmp_path / "out"

    return run


@pytest.mark.parametrize("recipe", [BLOCK, FEATURES], ids=lambda recipe: recipe.kind)
def test_a_draft_block_learns_and_is_read(recipe, two_legs, own, monkeypatch):
    model, work = own
    recipe, quality, out = two_legs(recipe, layer=1, head=40, peak=3e-3, steps=60)
    assert quality["accepted by position"][0] > 0
    with pytest.raises(InputError, match="were over before the first step"):
        replace(recipe, minutes=0).run(out, out / "new", work / "new", "cpu")
    monkeypatch.setattr(smollm2, "most_written", None)  # the head is the file's, whatever outputs there are now
    measured = recipe.measure(out, out, "cpu", work / recipe.name)
    assert quality == json.loads(json.dumps(measured))  # of what was written
    found = load_draft(model, out / DRAFT_FILE)
    assert found.kind == recipe.kind and len(found.ids) <= 40 and (out / DRAFT_FILE).stat().st_size < 200_000


def test_the_joint_version_is_an_adapter_of_peft_of_a_model_that_stays(two_legs, own, start):
    model, work = own
    recipe, _, out = two_legs(JOINT, rank=4, peak=3e-3, steps=40, shown=(1, 2))
    plain = eelib.load_model(str(start), device="cpu").network
    tuned = PeftModel.from_pretrained(copy.deepcopy(plain), out).merge_and_unload()
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        assert (tuned(ids).logits - plain(ids).logits).abs().max() > 1e-3
    assert recipe.quality(model, None, recipe.held_out(work / recipe.name))["last layer keeps"] == 1.0


def test_a_tuned_lens_comes_nearer_to_the_last_layer_than_the_bare_head(two_legs, own):
    """At every inner layer. The card says so of what loads, and of the bare head what float64 says."""
    model, work = own
    recipe, found, out = two_legs(SMOLLM2_LENS, peak=1e-2, steps=40, shown=(1, 2))
    assert found == json.loads(json.dumps(recipe.measure(out, out, "cpu", work / recipe.name)))
    exact, apart, same = copy.deepcopy(model.network).double(), [], []
    for text in recipe.held_out(work / recipe.name):
        with torch.no_grad():
            hidden = exact(text.ids[None], output_hidden_states=True).hidden_states[1:]
            states = torch.stack(hidden)[:, 0, text.start - 1 : -1]
            states[:-1] = exact.model.norm(states[:-1])
            logs = exact.lm_head(states).log_softmax(-1)
        apart.append((logs[-1].exp() * (logs[-1] - logs[:-1])).sum(-1))
        same.append(logs[:-1].argmax(-1) == logs[-1].argmax(-1))
    for name, values in (("KL from", apart), ("agrees with", same)):
        bare = found[f"{name} the last layer, bare head, by layer"]
        assert bare == pytest.approx(torch.cat(values, dim=1).double().mean(1).tolist(), abs=2e-3)
        closer = [after - before for after, before in zip(found[f"{name} the last layer, by layer"], bare)]
        assert len(closer) == model.layers - 1 and all(more < 0 if values is apart else more >= 0 for more in closer)


def test_acceptance_by_position_counts_what_follows_right_drafts():
    """Of the first text the second draft of a row is tried after tokens 0 and 2, the third after token 0 and 1."""
    hits = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]).bool()
    # rows start at tokens 0, 2, 3 (their first drafts are right); the second drafts are of tokens 1 and 3
    assert accepted([(None, hits)]) == [0.75, 0.5, 1.0, 1.0]
