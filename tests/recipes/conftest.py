"""Fixtures of the recipes: one folder of made-up corpora for all, and tiny networks of the shipped kinds."""

import random
from functools import partial

import pytest
import torch
import transformers as hf
from planted import write

from checks.tiny import randomize
from eelib.common.files import data_folder
from eelib.models.model import prepare
from recipes import pocket_llama, pocket_t5, texts

LINE = "the a small big dog cat ran slept over under green hill house and it was good bad not never"
THINGS = "dog house river king apple stone ring tree boat door bird cloud"
WORDS, NOUNS = LINE.split(), THINGS.split()


def sentence(rng):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(8, 16))) + " ."


@pytest.fixture(scope="session")
def corpora(tmp_path_factory):
    """Made-up corpora: sentences with several translations, so that a held-out one could leak through a neighbour."""
    folder, rng = tmp_path_factory.mktemp("corpora"), random.Random(0)
    for language in ("de", "fr"):
        rows = [
            {language: f"{language} satz {rng.randrange(500)}.", "en": f"Sentence {rng.randrange(700)}."}
            for _ in range(1500)
        ]
        write(folder / f"translation/tatoeba.{language}-en.jsonl.gz", rows)
    for split, count, word in (("train", 60, "dog"), ("test2016", 6, "cat")):
        rows = [{"en": f"A {word} {i}.", "de": f"Ein Hund {i}.", "fr": f"Un chien {i}."} for i in range(count)]
        write(folder / f"translation/multi30k.{split}.jsonl.gz", rows)
    for name in ("fairytaleqa.train", *texts.SHIFTS):
        rows = [
            {"context": f"Passage {i} of {name} " + "word " * (i % 16 * 20), "question": q, "answers": ["Ann", "x"]}
            for i in range(60)
            for q in ("Who?", "Who else?")
        ]
        write(folder / f"question_answering/{name}.jsonl.gz", rows)
    tales = [{"context": "A cat. " * n, "question": "Who?", "answers": ["a cat"]} for n in (1, 2, 900)]
    write(folder / "question_answering/fairytaleqa.test.jsonl.gz", tales)
    for split in ("train", "test"):
        rows = [
            {
                "article": f"Ann{i} lost {i} mln dlrs." + " It fell." * 20,
                "highlights": f"ANN{i} <A.N> LOST {i} MLN",
            }
            for i in range(1, 60)
        ]
        write(folder / f"summarization/reuters21578.{split}.jsonl.gz", rows)
    heads = [(f" = Heading {i} = ", " ", f" The <unk> of 1 @,@ 2 @-@ {sentence(rng)} ") for i in range(60)]
    write(folder / "text/wikitext2.train.txt.gz", [line for lines in heads for line in lines])
    novels = [
        f"Line {i}: {sentence(rng)} " + " ".join(f"They saw the {rng.choice(NOUNS)}, then" for _ in range(4))
        for i in range(1200)
    ]
    write(folder / "text/eltec_english_novels.txt.gz", novels)
    write(folder / "classification/trec.train.jsonl.gz", [{"text": f"What is number {i} ?"} for i in range(60)])
    return folder


@pytest.fixture(scope="session")
def tokenizer():
    return hf.AutoTokenizer.from_pretrained(data_folder("models", "pocket-llama"))


@pytest.fixture(scope="session")
def tiny(tokenizer):
    """The recipes' own builders of networks, for tiny ones."""
    llama = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 4}
    return {"llama": partial(pocket_llama.build, **llama), "t5": partial(pocket_t5.build, tokenizer, **t5)}


@pytest.fixture
def made(tokenizer, tiny):
    """made(kind): a tiny network of the kind of pocket-llama or pocket-t5, as if loaded, far from where it begins."""

    def build(kind):
        network = tiny[kind]().float()
        with torch.no_grad():
            randomize(network)
        return prepare(network.eval(), tokenizer, "tiny", {"llama": "causal", "t5": "seq2seq"}[kind])

    return build


@pytest.fixture
def few_stories(monkeypatch):
    """The recipes' stories and orders, few of them: all stories take minutes."""
    monkeypatch.setattr(texts, "STORIES", 24)
    monkeypatch.setattr(texts, "ORDERS", 24)
