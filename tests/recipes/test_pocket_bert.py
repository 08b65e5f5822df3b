"""pocket-bert: masks, packed pieces, the loss by hand, resuming, and a whole run at a tiny size."""

import json
import math
import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import islice

import pytest
import torch
from bert_made import TINY, resumed
from torch.nn import functional as F
from transformers import AutoTokenizer

import eelib
from recipes import pocket_bert
from recipes.__main__ import RECIPES
from recipes.loop import Schedule, train
from recipes.pocket_bert import (
    FEW_STEPS,
    LENGTH,
    MASK,
    SEPARATOR,
    WINDOW,
    WORDS,
    batch_at,
    batches,
    build,
    masked,
    masked_loss,
)


def streams():
    """Articles count upwards in the lower half of the vocabulary, novels in the upper half."""
    return torch.arange(WORDS, 2000).short(), torch.arange(2000, 4096).short()


@pytest.mark.parametrize("step, length", [(7, 32), (FEW_STEPS - 1, 32), (FEW_STEPS, LENGTH), (FEW_STEPS + 7, WINDOW)])
def test_pieces_are_packed(step, length):
    """Each is a run of one text in a frame, full; a third is of articles; short at first, every eighth batch long."""
    batch = batch_at(streams(), step)
    ids = restored(batch)
    assert ids.shape == (pocket_bert.TOKENS_PER_BATCH // length, length)
    assert set(ids[:, 0].tolist()) == {pocket_bert.FIRST} and set(ids[:, -1].tolist()) == {SEPARATOR}
    assert bool((ids[:, 1:-1].diff() == 1).all())
    kept = int((ids[:, 1] < 2000).sum())
    assert kept == len(ids) // 3 and bool(((ids[:, 1] < 2000) == (ids[:, -2] < 2000)).all())


def test_pieces_reach_both_ends_of_a_text():
    short = torch.arange(WORDS, WORDS + 31).short()  # room for two places
    first = {int(row[1]) for step in range(6) for row in restored(batch_at((short, short), step))}
    assert first == {WORDS, WORDS + 1}


def restored(batch):
    """The pieces without holes."""
    ids = batch.ids.flatten().clone()
    ids[batch.rows] = batch.labels
    return ids.reshape(batch.ids.shape)


def test_shares_of_masks():
    """15% of the words; of these 80% hidden, 10% replaced, 10% left; nothing else is touched."""
    ids = torch.arange(2000).repeat(500, 1) % 1000 + 1  # one id in 250 is no word
    batch = masked(ids, torch.Generator().manual_seed(1))
    assert torch.equal(restored(batch), ids) and bool((batch.labels >= WORDS).all())
    words = int((ids >= WORDS).sum())
    shown = batch.ids.flatten()[batch.rows]
    hidden, left = (shown == MASK), (shown == batch.labels)
    assert len(batch.rows) / words == pytest.approx(0.15, abs=0.003)
    assert float(hidden.float().mean()) == pytest.approx(0.8, abs=0.005)
    assert float(left.float().mean()) == pytest.approx(0.1, abs=0.005)
    other = shown[~hidden & ~left]
    assert other.min() >= WORDS and other.max() > 4000 and len(other.unique()) > 3500


def test_masked_loss_by_hand():
    """Log-probabilities from the network's own logits of all positions, one piece at a time."""
    model = build(**TINY).float()
    batch = masked(torch.randint(WORDS, 4096, (5, 12)), torch.Generator().manual_seed(3))
    scores = torch.cat([model(input_ids=row[None]).logits[0] for row in batch.ids]).double()
    wanted = -torch.log_softmax(scores, -1)[batch.rows, batch.labels].mean()
    loss, size, *_ = masked_loss(model, batch)
    assert len(batch.rows) > 3 and loss.dtype == torch.float32 and size == 60
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_batches_are_the_same_from_any_step():
    whole = list(islice(batches(0, streams()), 9))
    for at in (1, 7):
        for one, other in zip(batches(at, streams()), whole[at:]):
            assert all(torch.equal(a, b) for a, b in zip(one, other))
    assert not torch.equal(whole[0].ids, whole[1].ids)


def test_resumed_pretraining_equals_uninterrupted(tmp_path):
    def small(start):
        return (
            masked(torch.arange(WORDS, WORDS + 64).reshape(4, 16), torch.Generator().manual_seed(i))
            for i in range(start, 9)
        )

    whole, again = resumed(partial(build, **TINY), small, masked_loss, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(whole, again))


def test_pretraining_learns(tmp_path):
    batch = masked(torch.arange(WORDS, WORDS + 128).reshape(4, 32), torch.Generator().manual_seed(1))
    curve = train(
        build(**TINY),
        lambda start: iter(lambda: batch, None),
        masked_loss,
        Schedule(steps=30, peak=1e-2, warmup=4, decay=10),
        tmp_path,
        save_every=10,
    )
    assert curve[-1]["loss"] < curve[0]["loss"] / 2


def test_size_and_head():
    """5.1 MB in bf16; one matrix is both embeddings and head; the untrained model guesses evenly."""
    model = build()
    assert sum(p.numel() for p in model.parameters()) * 2 == pytest.approx(5.1e6, rel=0.01)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    loss, *_ = masked_loss(model, masked(torch.randint(WORDS, 4096, (4, 32)), torch.Generator().manual_seed(0)))
    assert loss.item() == pytest.approx(torch.tensor(4096.0).log().item(), abs=0.5)


def test_beginning():
    """Positions are sinusoids; no sub-layer adds anything yet, so every layer gives what the embeddings do."""
    model = build(**TINY).float()
    table = model.bert.embeddings.position_embeddings.weight / 0.15
    for position, pair in ((0, 0), (3, 0), (200, 5), (255, 15)):
        angle = position / 10000 ** (2 * pair / 32)
        assert table[position, 2 * pair : 2 * pair + 2].tolist() == pytest.approx(
            [math.sin(angle), math.cos(angle)], abs=0.01
        )
    states = model.bert(input_ids=torch.randint(WORDS, 4096, (2, 9)), output_hidden_states=True).hidden_states
    assert all(torch.allclose(state, states[0], atol=1e-4) for state in states)


def test_texts(corpora):
    """No headings or marks of WikiText; the novels held out are one stretch that training never sees."""
    lines = pocket_bert.articles(corpora, "train")
    assert len(lines) == 60 and all(line.startswith("The [UNK] of 1,2-") for line in lines)
    training, held = pocket_bert.novels(corpora)
    assert len(held) == 24 and not set(training) & set(held)
    assert [line.split(":")[0] for line in training + held] == [f"Line {i}" for i in range(1200)]


def test_tokenizer(start):
    """BERT's own: lower case, no accents, its frame and token types; an unknown word of WikiText is one token."""
    tokenizer = AutoTokenizer.from_pretrained(start)
    encoded = tokenizer("The [UNK] DÔG", "a cat")
    assert tokenizer.convert_ids_to_tokens(encoded["input_ids"]) == [
        "[CLS]",
        "the",
        "[UNK]",
        "dog",
        "[SEP]",
        "a",
        "cat",
        "[SEP]",
    ]
    assert encoded["token_type_ids"] == [0] * 5 + [1] * 3 and tokenizer.model_max_length == WINDOW
    names = [
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
        tokenizer.cls_token_id,
        tokenizer.sep_token_id,
        tokenizer.mask_token_id,
    ]
    assert names == [0, pocket_bert.UNKNOWN, pocket_bert.FIRST, SEPARATOR, MASK] and WORDS == 5
    stream = pocket_bert.stream_of(tokenizer, ["The dog", "A [UNK] cat"])
    assert tokenizer.convert_ids_to_tokens(stream.tolist()) == ["the", "dog", "a", "[UNK]", "cat"]


def test_tokenizer_is_the_same_in_every_run(corpora):
    """In processes of their own: hash tables are ordered anew in each. Characters beyond the alphabet are unknown."""
    code = (
        "from recipes.pocket_bert import train_tokenizer\n"
        "lines = [''.join(chr(97 + i * k % 26) for k in range(i % 9 + 1)) + chr(913 + i % 300) + '!€'\n"
        "         for i in range(2000)]\n"
        "found = train_tokenizer(lines)\n"
        "assert sorted(found.all_special_ids) == list(range(5)) and '##!' not in found.get_vocab()\n"
        "print(sorted(found.get_vocab().items(), key=lambda item: item[1]))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    ]
    assert runs[0] == runs[1] == runs[2] and "('[PAD]', 0), ('[UNK]', 1), ('[CLS]', 2)" in runs[0]


def test_pretrained_folder_loads_and_its_quality_is_recomputed(start, corpora):
    """As a masked model whose unembed was proven; accuracy and perplexity by hand; the card's lines."""
    model = eelib.load_model(str(start), device="cpu")
    assert (model.kind, model.layers, model.hidden_size, model.context_length) == ("masked", 3, 32, WINDOW)
    card = json.loads((start / "card.json").read_text())
    assert list(card)[:4] == ["name", "kind", "objective", "corpus"] and card["steps"] == 3
    assert card["quality"] == pocket_bert.measure(corpora, start, "cpu")
    found = card["quality"]["novels held out"]
    stream = pocket_bert.stream_of(model.tokenizer, pocket_bert.novels(corpora)[1])
    places = torch.arange(0, len(stream) - LENGTH + 3, LENGTH - 2)
    batch = masked(pocket_bert.pieces(stream, places, LENGTH), torch.Generator().manual_seed(pocket_bert.SEED))
    assert 1 < len(places) < 16 and restored(batch)[1, 1:-1].tolist() == stream[126:252].tolist()
    with torch.no_grad():
        scores = model.network(input_ids=batch.ids).logits.double().flatten(0, 1)[batch.rows]
    right = (scores.argmax(-1) == batch.labels).double().mean()
    assert found["masked-token accuracy"] == pytest.approx(100 * right.item())
    assert found["perplexity"] == pytest.approx(F.cross_entropy(scores, batch.labels).exp().item(), rel=1e-4)
    most = Counter(batch.labels.tolist()).most_common(1)[0][1]
    assert found["accuracy of the most frequent token"] == pytest.approx(100 * most / len(batch.labels))
    assert found["items"] == len(batch.rows)


def test_recipe_is_known():
    assert RECIPES[pocket_bert.NAME] == "pocket_bert"
