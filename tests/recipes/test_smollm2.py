"""The recipes in legs: numbered prompts, own outputs, draft blocks and a joint version, on a tiny model end to end."""

import copy
import json
import shutil
from dataclasses import replace
from itertools import islice

import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer

import eelib
from eelib.models.lens_adapters import DRAFT_FILE, DraftBlock, load_draft
from eelib.tracing.decode import greedy_decode
from recipes import own_outputs
from recipes.own_outputs import FIRST, OwnText, Prompts, batches, file_of, outputs_of, read_texts
from recipes.smollm2 import BLOCK, FEATURES, JOINT, OUTPUTS, accepted, places_of

TEMPLATE = "{% for m in messages %}user {{ m['content'] }} {% endfor %}assistant"


@pytest.fixture(scope="module")
def start(folder_of, tmp_path_factory):
    """A tiny llama with room for the prompts, whose tokenizer has a chat template."""
    folder = shutil.copytree(folder_of("llama"), tmp_path_factory.mktemp("start") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template, tokenizer.model_max_length = TEMPLATE, 2048
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(corpora, start, tmp_path_factory):
    """(the tiny model, the folder of works with its outputs)."""
    work = tmp_path_factory.mktemp("works")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_outputs, "CHUNK", 20)
        patch.setattr(own_outputs, "AT_ONCE", 8)
        patch.setattr(own_outputs, "LONGEST", 12)
        replace(OUTPUTS, start=str(start), chunks=2, dtype="float32").run(corpora, work, work / OUTPUTS.name, "cpu")
    return eelib.load_model(str(start), device="cpu"), work


def test_prompts_are_numbered_and_sources_are_on_one_side(corpora):
    training, held = Prompts(corpora), Prompts(corpora, held_out=True)
    again = Prompts(corpora)
    texts = [training.text(number) for number in range(60)]
    assert texts == [again.text(number) for number in range(60)] and len(set(texts)) > 50
    assert {training.task_of(number) for number in range(20)} == set(training.sources)
    assert not any("### Context:" in text for text in texts)
    assert any("### Context:" in training.text(FIRST + number) for number in range(60))  # the study's own wording
    for task, some in training.sources.items():
        other = {source[0] for source in held.sources[task]}
        assert other and not other & {source[0] for source in some}


def test_outputs_are_greedy_and_say_what_else_was_likely(made, corpora, monkeypatch):
    model, work = made
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
    monkeypatch.setattr(own_outputs, "AT_ONCE", 3)
    monkeypatch.setattr(own_outputs, "LONGEST", 12)
    for one, other in zip(outputs_of(model, prompts, range(20, 40)), texts):  # whatever they are decoded with
        assert torch.equal(one.ids, other.ids)


def own_text(length, task="story", number=0):
    """A text of one prompt token and different tokens after it."""
    nothing = torch.zeros(length, 3)
    return OwnText(number, task, torch.arange(length + 1) - 1, 1, nothing, nothing)


def test_a_text_that_repeats_itself_is_flagged():
    assert own_text(40).repeated == 0
    run = [*range(8), 90, *range(8), 91]
    text = replace(own_text(1), ids=torch.tensor([5, *run]))
    assert text.repeated == 16 / 18


def test_batches_go_on_from_a_place_and_new_outputs_come_before_the_next_epoch(made, tmp_path):
    _, work = made
    outputs = work / OUTPUTS.name
    whole = list(islice(batches(outputs, 300, None), 100))
    seen = [text.number for (epoch, chunk, _), batch in whole for text in batch]
    assert sorted(seen[:40]) == list(range(40)) == sorted(seen[40:80])  # each once an epoch
    for at in (3, 11):
        place, _ = whole[at]
        later = list(islice(batches(outputs, 300, place), 5))
        assert [[t.number for t in b] for _, b in later] == [[t.number for t in b] for _, b in whole[at + 1 : at + 6]]
    assert all(max(len(t.ids) for t in batch) * len(batch) <= 300 or len(batch) == 1 for _, batch in whole)
    shutil.copy(file_of(outputs, 0), file_of(tmp_path, 0))
    ended = next(place for place, _ in batches(tmp_path, 300, None) if place[1] == 1)
    shutil.copy(file_of(outputs, 1), file_of(tmp_path, 1))
    assert {t.number for t in next(batches(tmp_path, 300, ended))[1]} <= set(range(20, 40))


def sharpened(model, kind, layer, tokens):
    """A draft block with other weights than its network's."""
    torch.manual_seed(0)
    found = DraftBlock(model, kind, layer, tokens)
    with torch.no_grad():
        for weight in found.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return found.requires_grad_(False)


def test_drafts_in_a_row_at_once_are_those_one_after_the_other(made):
    """Step by step with a cache, as decoding will: true features, then those that the block itself made."""
    model, _ = made
    found = sharpened(model, "features", model.layers, torch.arange(30))
    ids, nothing = torch.arange(20, 30), torch.zeros(9, 1)
    text = OwnText(0, "story", ids, 4, nothing, nothing)
    at_once = FEATURES.drafted(model, found, [text], places_of([text], 0.0, model.device), 3)
    with torch.no_grad(), eelib.models.probe.block_states(model.blocks) as states:
        model.network(ids[None])
    features = found.features(states[-1])
    for first in range(4, 8):  # the first token of a row of three drafts, after which the true ones are fed
        cache = model.writer.new_cache()
        given, fed = features[:, : first - 1], ids[None, 1:first]
        for step in range(3):
            made_now = found.features(found(found.joined(given, fed), torch.ones(1, first - 1 + step).long(), cache))
            given, fed = made_now[:, -1:], ids[None, first + step : first + step + 1]
            torch.testing.assert_close(found.logits(given)[0, 0], at_once[step][first + step - 4], atol=1e-4, rtol=1e-4)


def test_places_of_prompts_weigh_less_and_have_what_the_model_gave_there():
    top = torch.arange(9)[:, None]
    texts = [
        OwnText(0, "story", torch.arange(length), start, top[: length - 1], top[: length - 1] / 10)
        for length, start in ((6, 4), (10, 2))
    ]
    every, outputs = (places_of(texts, weight, torch.device("cpu")) for weight in (0.3, 0.0))
    assert (
        outputs.at.tolist() == [3, 4, *range(1, 9)] == outputs.top[:, 0].tolist()
        and outputs.weights.unique().numel() == 1
    )
    assert every.at.tolist() == [1, 2, 3, 4, *range(1, 9)] == every.top[:, 0].tolist()
    assert every.rows.tolist() == [0] * 4 + [1] * 8
    torch.testing.assert_close(every.weights, torch.tensor([0.3, 0.3] + [1.0] * 10) / 10.6)
    torch.testing.assert_close(every.likely[:, 0], every.at / 10)


def test_acceptance_by_position_counts_what_follows_right_drafts():
    """Of the first text the second draft of a row is tried after tokens 0 and 2, the third after token 0 and 1."""
    hits = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]).bool()
    # rows start at tokens 0, 2, 3 (their first drafts are right); the second drafts are of tokens 1 and 3
    assert accepted([(own_text(4), hits)]) == [0.75, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("recipe", [BLOCK, FEATURES], ids=lambda recipe: recipe.kind)
def test_a_draft_block_learns_and_is_read(recipe, made, start, tmp_path):
    model, work = made
    recipe = replace(recipe, start=str(start), layer=1, head=40, tokens=400, peak=3e-3, steps=12, watch_every=10)
    out = tmp_path / "drafts"
    first = recipe.run(tmp_path, out, work / recipe.name, "cpu")
    leg = replace(recipe, steps=60).run(tmp_path, out, work / recipe.name, "cpu")
    losses = [row["loss"] for row in leg["curve"] if "loss" in row]
    assert leg["step"] == 60 and first["step"] == 12 and losses[-1] < losses[0]
    card = json.loads((out / "card.json").read_text())
    assert card["steps"] == 60 and card["quality"]["accepted by position"][0] > 0
    found = load_draft(model, out / DRAFT_FILE)
    assert found.kind == recipe.kind and len(found.ids) <= 40 and (out / DRAFT_FILE).stat().st_size < 200_000


def test_the_joint_version_is_an_adapter_of_peft(made, start, tmp_path):
    model, work = made
    recipe = replace(JOINT, start=str(start), rank=4, tokens=400, peak=3e-3, steps=4, shown=(1, 2), watch_every=3)
    out, before = tmp_path / "joint", {k: v.clone() for k, v in model.network.state_dict().items()}
    recipe.run(tmp_path, out, work / recipe.name, "cpu")
    leg = replace(recipe, steps=40).run(tmp_path, out, work / recipe.name, "cpu")
    losses = [row["loss"] for row in leg["curve"] if "loss" in row]
    assert leg["step"] == 40 and losses[-1] < losses[0]
    plain = eelib.load_model(str(start), device="cpu").network
    assert all(torch.equal(value, before[key]) for key, value in plain.state_dict().items())
    tuned = PeftModel.from_pretrained(plain, out).merge_and_unload()
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        changed = (tuned(ids).logits - model.network(ids).logits).abs().max()
    assert changed > 1e-3
    assert recipe.quality(model, None, recipe.held_out(work / recipe.name))["last layer keeps"] == 1.0
