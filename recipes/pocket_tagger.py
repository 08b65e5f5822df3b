"""The recipe of pocket-tagger: a small spaCy pipeline for English, without pretrained vectors, that sets token.pos_."""

import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path

import spacy
from spacy.language import Language
from spacy.tokens import Doc
from spacy.training import Example
from spacy.training.converters import conllu_to_docs
from spacy.util import fix_random_seed
from thinc.api import Adam, warmup_linear

from recipes.card import hashes, written
from recipes.texts import SEED, runs

NAME = "pocket-tagger"
EPOCHS, WORDS_PER_BATCH, DROPOUT = 15, 800, 0.35
WORD_DROPOUT = 1.0  # a word seen n times in training is made unknown with probability WORD_DROPOUT / (WORD_DROPOUT + n)
PEAK_RATE, WARMUP_STEPS = 2.5e-3, 200
DECAY_EPOCHS = 20  # the rate would reach zero here; training stops earlier, to save time
LONGEST_RUN = 3  # sentences of one training text: the tagger will meet outputs of several sentences
# Whole words, affixes and shapes are hashed; the first and last four characters are also read one by one,
# which tells unseen words apart. Four windows of three tokens see four neighbours on each side.
UPOS, ARCHITECTURE = json.loads(Path(__file__).with_suffix(".json").read_text()).values()


def read_conllu(path: Path) -> list[Doc]:
    """The sentences of a gzipped CoNLL-U file, on gold tokens with their UPOS tags."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return list(conllu_to_docs(file.read(), n_sents=1, no_print=True))


def gold_doc(nlp: Language, sentences: Iterable[Doc], tagged: bool = True) -> Doc:
    """One text of some sentences on gold tokens, with their tags or (`tagged` false) without them."""
    words, spaces, tags = [], [], []
    for sentence in sentences:
        words += [token.text for token in sentence]
        spaces += [bool(token.whitespace_) for token in sentence[:-1]] + [True]
        tags += [token.pos_ for token in sentence]
    spaces[-1] = False
    return Doc(nlp.vocab, words=words, spaces=spaces, pos=tags if tagged else None)


def hide_words(doc: Doc, counts: Counter, rng: random.Random) -> Doc:
    """Give rare words of `doc` a random norm in place, so that the model learns to read their characters instead.

    Word dropout of Kiperwasser and Goldberg (2016, section 4), which needs no token for unknown words here: what a
    hash table gives for a random norm is what it will give for an unknown word.
    """
    for token in doc:
        if rng.random() < WORD_DROPOUT / (WORD_DROPOUT + counts[token.lower_]):
            token.norm_ = f"unknown-{rng.getrandbits(32)}"
    return doc


def batches(nlp: Language, sentences: list[Doc], rng: random.Random) -> Iterator[list[Example]]:
    """One epoch of batches of about WORDS_PER_BATCH words, of runs of one to LONGEST_RUN neighbours in random order."""
    counts = Counter(token.lower_ for sentence in sentences for token in sentence)
    texts = list(runs(sentences, LONGEST_RUN, rng))
    rng.shuffle(texts)
    batch, words = [], 0
    for run_of in texts:
        seen = hide_words(gold_doc(nlp, run_of, tagged=False), counts, rng)
        batch.append(Example(seen, gold_doc(nlp, run_of)))
        words += len(batch[-1].reference)
        if words >= WORDS_PER_BATCH:
            yield batch
            batch, words = [], 0
    if batch:
        yield batch


def untrained() -> Language:
    """The pipeline with random weights. Its shapes come from one made-up sentence, its vocabulary from no corpus."""
    fix_random_seed(SEED)
    nlp = spacy.blank("en")
    tagger = nlp.add_pipe("morphologizer", config={"model": ARCHITECTURE})
    for tag in UPOS:
        tagger.add_label(f"POS={tag}")
    nlp.initialize(lambda: [Example(nlp.make_doc("a dog"), Doc(nlp.vocab, words=["a", "dog"], pos=["DET", "NOUN"]))])
    return nlp


def gold_accuracy(nlp: Language, sentences: list[Doc]) -> float:
    """Share of gold tokens that get the gold UPOS tag when the pipeline is given the gold tokens."""
    docs = nlp.pipe((gold_doc(nlp, [s], tagged=False) for s in sentences), batch_size=128)
    right = sum(token.pos_ == gold.pos_ for doc, s in zip(docs, sentences) for token, gold in zip(doc, s))
    return right / sum(map(len, sentences))


def evaluate(nlp: Language, corpora: Path) -> dict[str, float]:
    """UPOS quality on the test set of UD English EWT, sentence by sentence.

    "gold tokens": share of gold tokens tagged right when the pipeline is given the gold tokens.
    "spaCy tokens": the pipeline tokenizes the raw sentence itself; a gold token counts as right when the spaCy
    token that holds its first character has its tag (the rule by which words take their tags in `words.tags`).
    "spaCy tokens, same span": F1 of (start, end, tag) triples, as in the CoNLL 2018 shared task, so that every
    difference of tokenization is an error too.
    """
    sentences = read_conllu(corpora / "tagging/ud_english_ewt.test.conllu.gz")
    gold = [gold_doc(nlp, [s]) for s in sentences]
    held = same = own_tokens = 0
    for own, reference in zip(nlp.pipe((doc.text for doc in gold), batch_size=128), gold):
        tag_at = {i: token.pos_ for token in own for i in range(token.idx, token.idx + len(token))}
        spans = {(token.idx, token.idx + len(token), token.pos_) for token in own}
        held += sum(tag_at.get(token.idx) == token.pos_ for token in reference)
        same += sum((token.idx, token.idx + len(token), token.pos_) in spans for token in reference)
        own_tokens += len(own)
    tokens = sum(map(len, sentences))
    return {
        "UPOS accuracy, gold tokens": round(gold_accuracy(nlp, sentences), 4),
        "UPOS accuracy, spaCy tokens": round(held / tokens, 4),
        "UPOS F1, spaCy tokens, same span": round(2 * same / (tokens + own_tokens), 4),
    }


def save_without_corpus(weights: bytes, out: Path) -> None:
    """Write a fresh pipeline with `weights` to `out`: its strings and lexemes have never seen the corpus."""
    clean = untrained()
    clean.get_pipe("morphologizer").model.from_bytes(weights)
    clean.meta.update(
        name=NAME.replace("-", "_"),
        license="CC BY-SA 4.0",
        description="UPOS tagger for English, trained on UD English EWT",
        version="1.0.0",
    )
    clean.to_disk(out)


def run(corpora: Path, out: Path, work: Path, device: str) -> dict:
    """Train, keep the epoch that is best on dev, write pipeline and card.json to `out`; returns the card.

    `work` stays empty, for a run is not continued. `device`: "cpu" or "cuda".
    """
    del work
    began = time.monotonic()
    if device.startswith("cuda"):
        spacy.require_gpu()
    train, dev = (read_conllu(corpora / f"tagging/ud_english_ewt.{split}.conllu.gz") for split in ("train", "dev"))
    nlp, rng, best, curve = untrained(), random.Random(SEED), b"", list[dict]()
    steps = DECAY_EPOCHS * sum(map(len, train)) // WORDS_PER_BATCH
    optimizer = Adam(warmup_linear(PEAK_RATE, WARMUP_STEPS, steps), L2=0.01, grad_clip=1.0, use_averages=True)
    for epoch in range(1, EPOCHS + 1):
        losses: dict[str, float] = {}
        for batch in batches(nlp, train, rng):
            nlp.update(batch, drop=DROPOUT, sgd=optimizer, losses=losses)
            optimizer.step_schedules()
        with nlp.use_params(optimizer.averages):
            accuracy = round(gold_accuracy(nlp, dev), 5)  # as the card has it: of equal epochs the first is kept
            if accuracy > max((row["dev"] for row in curve), default=0.0):
                best = nlp.get_pipe("morphologizer").model.to_bytes()
        row = {"epoch": epoch, "loss": round(losses["morphologizer"], 1), "dev": accuracy}
        curve.append(row | {"seconds": round(time.monotonic() - began)})
        print(curve[-1], flush=True)
    save_without_corpus(best, out)
    return write_card(out, corpora, curve, (time.monotonic() - began) / 60)


def measure(corpora: Path, out: Path, device: str) -> dict[str, float]:
    """Accuracy of the pipeline in `out` on the test set; always on the CPU."""
    return evaluate(spacy.load(out), corpora)


def write_card(out: Path, corpora: Path, curve: list[dict], minutes: float) -> dict:
    """Evaluate the saved pipeline as a user would load it, and write its card beside it."""
    card = {
        "name": NAME,
        "kind": "spaCy pipeline (tok2vec + morphologizer), English, UPOS tags in token.pos_",
        "corpus": "Universal Dependencies English EWT, train (best epoch by dev, quality on test)",
        "licence": "CC BY-SA 4.0",
        "recipe": f"python -m recipes {NAME} --corpora DIR",
        "seed": SEED,
        "epochs": EPOCHS,
        "best_epoch": max(curve, key=lambda row: row["dev"])["epoch"],
        "training_minutes": round(minutes, 1),
        "quality": evaluate(spacy.load(out), corpora),
        "dev_accuracy_by_epoch": [[row["epoch"], row["dev"]] for row in curve],
        "sha256": hashes(out),
        "versions": {package: version(package) for package in ("spacy", "thinc", "numpy")},
        "date": date.today().isoformat(),
    }
    return written(card, out)
