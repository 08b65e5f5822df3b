"""Fixtures of the recipes: made-up corpora, and tiny networks of the shipped kinds."""

import gzip
import json
import random
from functools import partial

import families
import pytest
from bert_made import SHORT, TINY, sentence
from transformers import AutoTokenizer

from eelib.common.files import data_folder
from eelib.models.model import prepare
from recipes import pocket_bert, pocket_t5, texts
from recipes.pocket_bert import WINDOW, build


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Made-up corpora: sentences with several translations, so that held-out ones could leak through a neighbour."""
    folder, rng = tmp_path_factory.mktemp("corpora"), random.Random(0)
    for language in ("de", "fr"):
        write(
            folder / f"translation/tatoeba.{language}-en.jsonl.gz",
            [
                {language: f"{language} satz {rng.randrange(500)}.", "en": f"Sentence {rng.randrange(700)}."}
                for _ in range(1500)
            ],
        )
    write(
        folder / "translation/multi30k.train.jsonl.gz",
        [{"en": f"A dog {i}.", "de": f"Ein Hund {i}.", "fr": f"Un chien {i}."} for i in range(60)],
    )
    for name in ("fairytaleqa.train", "squadshifts.new_wiki", "squadshifts.amazon_reviews", "squadshifts.reddit"):
        write(
            folder / f"question_answering/{name}.jsonl.gz",
            [
                {"context": f"Passage {i} of {name} " + "word " * (i * 20), "question": q, "answers": [f"Ann {i}", "x"]}
                for i in range(16)
                for q in ("Who?", "Who else?")
            ],
        )
    paragraphs = [f"Chapter {i} of a long book. " + "They went on and on. " * 20 for i in range(150)]
    for name in ("text/wikitext2.train", "text/eltec_english_novels"):
        (folder / f"{name}.txt.gz").parent.mkdir(exist_ok=True)
        (folder / f"{name}.txt.gz").write_bytes(gzip.compress("\n".join(paragraphs).encode()))
    for split in ("train", "test"):
        write(
            folder / f"summarization/reuters21578.{split}.jsonl.gz",
            [
                {
                    "article": f"Today {name} Corp said it lost {i} mln dlrs. The loss of {name} grew.",
                    "highlights": words,
                }
                for i in range(1, 30)
                for name, words in [(f"Ann{i}", f"ANN{i} <A.N> LOST {i} MLN DLRS IN QTR")]
            ],
        )
    write(
        folder / "translation/multi30k.test2016.jsonl.gz",
        [{"en": f"A cat {i}.", "de": f"Eine Katze {i}.", "fr": f"Un chat {i}."} for i in range(6)],
    )
    write(
        folder / "question_answering/fairytaleqa.test.jsonl.gz",
        [{"context": "A cat. " * n, "question": "Who?", "answers": ["a cat"]} for n in (1, 2, 900)],
    )
    return folder


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(data_folder("models", "pocket-llama"))


@pytest.fixture
def made(tokenizer):
    """made(recipe): a tiny network of the recipe's kind, the same every time, as `load_model` would give it."""

    def build(recipe):
        is_llama = recipe.start.startswith("pocket-llama")
        if is_llama:
            network = families.build("llama").requires_grad_(True)
            network.resize_token_embeddings(len(tokenizer))
        else:
            sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 4}
            network = pocket_t5.build(tokenizer, **sizes).float()
        return prepare(network.eval(), tokenizer, "tiny", "causal" if is_llama else "seq2seq")

    return build


@pytest.fixture
def few_stories(monkeypatch):
    """The recipes' stories and orders, few of them: all stories take minutes."""
    monkeypatch.setattr(texts, "STORIES", 24)
    monkeypatch.setattr(texts, "ORDERS", 24)


@pytest.fixture(scope="session")
def corpora(tmp_path_factory):
    """Made-up texts and GLUE files, with one text that no window holds."""
    folder, rng = tmp_path_factory.mktemp("corpora"), random.Random(0)
    for name in ("text", "glue"):
        (folder / name).mkdir()

    def write(path, lines):
        (folder / path).write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))

    for split in ("train", "validation"):
        write(
            f"text/wikitext2.{split}.txt.gz",
            [
                line
                for i in range(60)
                for line in (f" = Heading {i} = ", " ", f" The <unk> of 1 @,@ 2 @-@ {sentence(rng)} ")
            ],
        )
    write("text/eltec_english_novels.txt.gz", [f"Line {i}: {sentence(rng)}" for i in range(1200)])
    for task, splits in (("sst2", ("train", "validation")), ("mrpc", ("train", "validation", "test"))):
        fields = ["sentence"] if task == "sst2" else ["sentence1", "sentence2"]
        for split in splits:
            rows = [{field: sentence(rng, 1, 12) for field in fields} | {"label": i % 3 % 2} for i in range(40)]
            rows[5][fields[-1]] = "dog " * WINDOW
            write(f"glue/{task}.{split}.jsonl.gz", map(json.dumps, rows))
    return folder


@pytest.fixture(scope="session")
def start(corpora, tmp_path_factory):
    """The folder of a tiny pocket-bert, made by its own recipe."""
    folder = tmp_path_factory.mktemp("pocket-bert")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pocket_bert, "SCHEDULE", SHORT)
        patch.setattr(pocket_bert, "build", partial(build, **TINY))
        card = pocket_bert.run(corpora, folder / "out", folder / "work", "cpu")
    assert card == json.loads((folder / "out/card.json").read_text())
    return folder / "out"
