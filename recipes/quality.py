"""How good a model that knows P's tasks is: on public test sets that it has not seen, and on the shipped texts."""

from collections.abc import Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tqdm import tqdm

from eelib.common.files import data_folder
from eelib.exits.decoding.generate import batches
from eelib.models.model import Model, load_model
from eelib.tasks.metrics import answer_stats, bleu, chrf, normalised, rouge, scores_of
from eelib.tasks.task import load_task
from eelib.tasks.text_kinds import question_prompt, summarization_prompt, translation_prompt
from eelib.tracing.decode import greedy_decode
from eelib.tracing.make import trace as make_trace
from recipes.texts import ARTICLE_WORDS, WHOLE, first_words, multi30k, read_jsonl, shifts, tatoeba

TATOEBA, CAPTIONS, QUESTIONS = 500, 250, 1000  # how many at most
EVERY_ARTICLE = 5  # one article of Reuters' test set in so many
LONGEST_ANSWER, LONGEST_TRANSLATION = 32, 128  # tokens; records of orders are as long as translations
HEADLINE_WORDS = 8  # of an article are the baseline: as many as the longer half of the headlines has
TRANSLATIONS = tuple(f"translation/{pair}" for pair in ("de-en", "en-de", "fr-en", "en-fr"))
ORDERS = "structured/orders"
TEXTS = dict.fromkeys(TRANSLATIONS, "translation") | {
    ORDERS: "orders",
    "question_answering/passages": "reading",
    "summarization/news": "headlines",
}  # and the part of the training texts that stands for each


def measure(corpora: Path, folder: Path, device: str, parts: Collection[str] = WHOLE) -> dict[str, dict]:
    """Every figure of the card of a model that was trained on these parts: scores 0-100 by test set.

    EM is exact match after SQuAD's normalisation.
    """
    model = load_model(str(folder), device=device)
    scores = translations(model, corpora, parts) | (readings(model, corpora) if "reading" in parts else {})
    scores |= (headlines(model, corpora) if "headlines" in parts else {}) | shipped(model, parts)
    return scores | {
        "agreement with the last layer": agreement(model, [n for n in (*TRANSLATIONS, ORDERS) if TEXTS[n] in parts])
    }


def translations(model: Model, corpora: Path, parts: Collection[str]) -> dict[str, dict]:
    """Multi30k test2016 (all 1,000) and held-out Tatoeba (the first of it).

    Of models that translate beside something else, without the part translation, the first CAPTIONS of Multi30k alone.
    """
    found, most = dict[str, dict](), 0 if "translation" in parts else CAPTIONS
    for language in ("de", "fr"):
        _, held = tatoeba(corpora, language)
        captions = multi30k(corpora, "test2016", language)
        for source, target, at in ((language, "en", 0), ("en", language, 1)):
            found[f"Multi30k test2016 {source}-{target}"] = translated(model, captions, source, target, at, most)
            if "translation" in parts:
                found[f"Tatoeba held out {source}-{target}"] = translated(model, held, source, target, at, TATOEBA)
    return found


def translated(model: Model, pairs: list[tuple[str, str]], source: str, target: str, at: int, most: int = 0) -> dict:
    """BLEU and chrF of the pairs' column `at` translated; several targets of one source are several references."""
    references: dict[str, list[str]] = {}
    for pair in pairs:
        references.setdefault(pair[at], []).append(pair[1 - at])
    if most:
        texts = list(references)[:most]
        wanted = [references[text] for text in texts]
    else:
        texts, wanted = [pair[at] for pair in pairs], [[pair[1 - at]] for pair in pairs]
    outputs = greedy_texts(model, [translation_prompt(text, source, target) for text in texts], LONGEST_TRANSLATION)
    return scores_of({"BLEU": bleu(outputs, wanted)}) | chrf(outputs, wanted) | {"items": len(texts)}


def readings(model: Model, corpora: Path) -> dict[str, dict]:
    """FairytaleQA test, the held-out passages of SQuADShifts, and the rooms by number of facts and by kind."""
    tales = read_jsonl(corpora / "question_answering/fairytaleqa.test.jsonl.gz")
    spans = [row for rows in shifts(corpora)[1].values() for row in rows][:QUESTIONS]
    rooms = read_jsonl(data_folder("texts", "question_answering", "rooms.jsonl"))
    found = {"FairytaleQA test": answered(model, tales), "SQuADShifts held out": answered(model, spans)}
    outputs = greedy_texts(model, [question_prompt(row["context"], row["question"]) for row in rooms], LONGEST_ANSWER)
    for kind in ("one", "two", "three", "count", "unknown"):
        chosen = [number for number, row in enumerate(rooms) if row["kind"] == kind]
        found[f"rooms {kind}"] = answers([outputs[i] for i in chosen], [rooms[i]["answers"] for i in chosen])
    return found


def greedy_texts(model: Model, prompts: Sequence[str], longest: int) -> list[str]:
    """Output texts of prompts, in their order, special tokens dropped; as many at once as the device likes."""
    encoded, size = model.tokenizer(list(prompts))["input_ids"], 64 if model.device.type == "cpu" else 256
    texts = [""] * len(prompts)
    for some in tqdm(batches(model, encoded, size), unit="batch", mininterval=5):
        for i, ids in zip(some, greedy_decode(model, [encoded[i] for i in some], longest)):
            texts[i] = str(model.tokenizer.decode(ids, skip_special_tokens=True))
    return texts


def answered(model: Model, rows: Sequence[dict]) -> dict:
    """Scores of the questions whose prompt leaves room for an answer."""
    prompts = [question_prompt(row["context"], row["question"]) for row in rows]
    room = model.context_length - LONGEST_ANSWER
    fits = [i for i, ids in enumerate(model.tokenizer(prompts, verbose=False)["input_ids"]) if len(ids) < room]
    outputs = greedy_texts(model, [prompts[i] for i in fits], LONGEST_ANSWER)
    return answers(outputs, [rows[i]["answers"] for i in fits]) | {"beyond the window": len(rows) - len(fits)}


def answers(outputs: list[str], known: list[list[str]]) -> dict:
    """F1 and exact match of the best answer, with SQuAD's normalisation."""
    exact = [any(normalised(o) == normalised(answer) for answer in k) for o, k in zip(outputs, known)]
    f1 = scores_of(answer_stats(outputs, known))["F1"]
    return {"F1": f1, "EM": 100 * sum(exact) / len(exact), "items": len(outputs)}


def headlines(model: Model, corpora: Path) -> dict[str, dict]:
    """ROUGE on a part of Reuters' test articles, cut as in training, and that of each article's first words."""
    rows = read_jsonl(corpora / "summarization/reuters21578.test.jsonl.gz")[::EVERY_ARTICLE]
    return {"Reuters test": summarized(model, [row["article"] for row in rows], [[row["highlights"]] for row in rows])}


def summarized(model: Model, articles: list[str], known: list[list[str]]) -> dict:
    """ROUGE-1, 2 and L of the model's headlines, and of the first words of each article."""
    prompts = [summarization_prompt(first_words(article, ARTICLE_WORDS)) for article in articles]
    begun = scores_of(rouge([first_words(article, HEADLINE_WORDS) for article in articles], known))
    return scores_of(rouge(greedy_texts(model, prompts, LONGEST_ANSWER), known)) | {
        "first words": begun,
        "items": len(articles),
    }


def shipped(model: Model, parts: Collection[str]) -> dict[str, dict]:
    """The project's own texts of the tasks that a model of these parts was trained for."""
    found = {}
    for name in (name for name, part in TEXTS.items() if part in parts):
        task = load_task(name)
        if task.kind == "summarization":
            found[name] = summarized(model, task.sources, task.references)
        else:
            longest = LONGEST_ANSWER if task.kind == "question_answering" else LONGEST_TRANSLATION
            found[name] = task.quality(greedy_texts(model, task.prompts, longest)) | {"items": len(task)}
    return found


def agreement(model: Model, names: Sequence[str]) -> dict:
    """Share (0-100) of the model's own output tokens that each layer 1..L has as its top-1, end tokens left out."""
    found = []
    for name in names:
        with TemporaryDirectory() as folder:
            trace = make_trace(
                model, load_task(name), max_new_tokens=LONGEST_TRANSLATION, folder=folder, progress=False
            )
            found.append((trace["top1"][:, 1:].T == trace.tokens["token_id"].to_numpy())[:, ~trace.tokens["is_eos"]])
    agreed = np.concatenate(found, axis=1)
    return {"by layer": [round(100 * share, 1) for share in agreed.mean(1).tolist()], "items": agreed.shape[1]}
