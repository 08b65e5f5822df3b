"""The shipped tagger against its card, and the parts of its recipe that need no training."""

import json
import random

import pytest

from eelib.common.files import data_folder
from eestudy.old.analysis.words import load_tagger

pocket_tagger = pytest.importorskip("recipes.pocket_tagger")
FOLDER = data_folder("models", "pocket-tagger")

CONLLU = """# sent_id = 1
1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tDo\tdo\tAUX\tVB\t_\t3\taux\t_\t_
2\tn't\tnot\tPART\tRB\t_\t3\tadvmod\t_\t_
3\tgo\tgo\tVERB\tVB\t_\t0\troot\t_\tSpaceAfter=No
3.1\tgone\tgo\tVERB\tVB\t_\t_\t_\t_\t_
4\t!\t!\tPUNCT\t.\t_\t3\tpunct\t_\t_

# sent_id = 2
1-2\tcan't\t_\t_\t_\t_\t_\t_\t_\tSpaceAfter=No
1\tca\tcan\tAUX\tMD\t_\t0\troot\t_\t_
2\tn't\tnot\tPART\tRB\t_\t1\tadvmod\t_\t_
3\t.\t.\tPUNCT\t.\t_\t1\tpunct\t_\t_
"""


@pytest.fixture(scope="module")
def nlp():
    return load_tagger()


@pytest.fixture(scope="module")
def card():
    return json.loads((FOLDER / "card.json").read_text(encoding="utf-8"))


def test_card_matches_the_files(card):
    assert card["sha256"] == pocket_tagger.file_hashes(FOLDER)
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= 10_000_000
    assert card["licence"] == "CC BY-SA 4.0" and card["seed"] == pocket_tagger.SEED
    assert card["epochs"] == pocket_tagger.EPOCHS == len(card["dev_accuracy_by_epoch"])
    assert card["quality"]["UPOS accuracy, gold tokens"] > 0.945
    assert card["quality"]["UPOS accuracy, spaCy tokens"] > 0.94


def test_sensible_tags(nlp):
    doc = nlp("A small dog quickly runs to the house and she sees 12 old trees in London .")
    assert [token.pos_ for token in doc] == [
        "DET",
        "ADJ",
        "NOUN",
        "ADV",
        "VERB",
        "ADP",
        "DET",
        "NOUN",
        "CCONJ",
        "PRON",
        "VERB",
        "NUM",
        "ADJ",
        "NOUN",
        "ADP",
        "PROPN",
        "PUNCT",
    ]
    assert [token.pos_ for token in nlp("I don't think that he can swim.")] == [
        "PRON",
        "AUX",
        "PART",
        "VERB",
        "SCONJ",
        "PRON",
        "AUX",
        "VERB",
        "PUNCT",
    ]
    assert len(nlp("")) == 0


def test_no_corpus_words_in_the_model():
    fresh = set(pocket_tagger.untrained().vocab.strings)
    assert set(json.loads((FOLDER / "vocab" / "strings.json").read_text(encoding="utf-8"))) <= fresh


def test_loading_errors(tmp_path):
    with pytest.raises(ValueError, match="spaCy model 'xx_none' is not installed; allowed: pocket-tagger or any"):
        load_tagger("xx_none")
    import spacy

    spacy.blank("en").to_disk(tmp_path / "blank")
    with pytest.raises(ValueError, match="does not set token.pos_"):
        load_tagger(str(tmp_path / "blank"))


def test_reading_conllu(tmp_path):
    path = tmp_path / "two.conllu"
    path.write_text(CONLLU, encoding="utf-8")
    sentences = pocket_tagger.read_conllu(path)
    assert [s.words for s in sentences] == [["Do", "n't", "go", "!"], ["ca", "n't", "."]]
    assert [s.tags for s in sentences] == [["AUX", "PART", "VERB", "PUNCT"], ["AUX", "PART", "PUNCT"]]
    nlp = pocket_tagger.untrained()
    assert [pocket_tagger.gold_doc(nlp, [s]).text for s in sentences] == ["Don't go!", "can't."]
    assert pocket_tagger.gold_doc(nlp, sentences).text == "Don't go! can't."
    runs = pocket_tagger.training_texts(sentences * 5, random.Random(0))
    assert sum(len(run) for run in runs) == 10 and max(map(len, runs)) <= pocket_tagger.LONGEST_RUN


def test_evaluate_counts_tokens_by_their_first_character(tmp_path):
    (tmp_path / "tagging").mkdir()
    import gzip

    text = "\n".join(["1\tice-cream\tx\tNOUN\t_\t_\t0\troot\t_\t_", "2\tmelts\tx\tVERB\t_\t_\t1\tdep\t_\t_", "", ""])
    with gzip.open(tmp_path / "tagging/ud_english_ewt.test.conllu.gz", "wt", encoding="utf-8") as file:
        file.write(text)

    import spacy
    from spacy.language import Language

    @Language.component("by_rule")
    def by_rule(doc):
        for token in doc:
            token.pos_ = "VERB" if token.text == "melts" else "NOUN"
        return doc

    nlp = spacy.blank("en")
    nlp.add_pipe("by_rule")
    assert [token.text for token in nlp("ice-cream melts")] == ["ice", "-", "cream", "melts"]
    assert pocket_tagger.evaluate(nlp, tmp_path) == {
        "UPOS accuracy, gold tokens": 1.0,
        "UPOS accuracy, spaCy tokens": 1.0,
        "UPOS F1, spaCy tokens, same span": round(2 * 1 / (2 + 4), 4),
    }
