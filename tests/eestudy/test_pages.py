"""Every claim of a page about one model tried both ways on planted traces, and runs on which nothing is concluded."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pages import result, run_page, texts, verdicts
from planted import NOUNS, STEPS, asked, deep_model, exits, pairs, plant, rewrite, sentences, varied, write, write_task
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import eelib
from eelib.common.errors import InputError
from eestudy import measured as kept_results

# The exit layer of a token by its position: of a task into English, of one out of it, and of answers to questions. The
# model has three layers. Three tasks of questions are one kind, but three of five in the averages over tasks.
SATURATION = {
    "holds": [lambda at: 1 + 0 * at, lambda at: np.where(at < 2, 3, 1), *[lambda at: 1 + 0 * at] * 3],
    "does not hold": [lambda at: 3 + 0 * at, lambda at: np.where(at % 5 % 2 == 1, 1, 3), *[lambda at: 3 + 0 * at] * 3],
}


@pytest.mark.parametrize("verdict", SATURATION)
def test_saturation(verdict, planted_tasks, tmp_path):
    """Nearly all tokens early, at nearly the same layer, most of all into English; or nearly none, and less into it."""
    model, tasks = deep_model(tmp_path / "wide", 3, window=256), [*planted_tasks]  # it holds a question's prompt
    rows = [{"context": f"Room {i}.", "question": "?", "answers": row["references"]} for i, row in enumerate(pairs(64))]
    tasks += [str(write(tmp_path / f"asked{number}.jsonl", rows)) for number in range(3)]
    for name, at in zip(tasks, SATURATION[verdict], strict=True):
        plant(model, eelib.load_task(name), tmp_path / "runs", lambda t: exits(varied(t, at(t["position"])), 3), STEPS)
    space = run_page("saturation", **asked(tmp_path, tmp_path / "wide", ",".join(tasks)))[0]
    assert verdicts(space) == dict.fromkeys(("P-S1", "P-S2", "P-S3", "P-S4", "P-S5"), verdict)


# Exit layer by position p (from 0), of three; verdicts on P-L1, P-L2, P-L3. With one late token at the start, the mean
# of n tokens is 1 + 2 / n: it falls with n, ever less. Any slope is a weighted mean of the slopes between neighbouring
# lengths, so no draw can change these signs.
LENGTH = {
    "the first token late": (lambda p: np.where(p == 0, 3, 1), ("holds", "holds", "holds")),
    "the first token early": (lambda p: np.where(p == 0, 1, 3), ("does not hold", "not applicable", "does not hold")),
}


@pytest.mark.parametrize("name", LENGTH)
def test_length(name, model_of, folder_of, tmp_path):
    """References have one to eight words; each half of the outputs has groups enough for a verdict."""
    words = [[NOUNS[(i + j) % 10] for j in range(1 + i % 8)] for i in range(80)]
    file = tmp_path / "tiny.de-en.jsonl"
    task, (layer, wanted) = write_task(file, sentences(map(" ".join, words))), LENGTH[name]
    plant(model_of("gpt2"), task, tmp_path / "runs", lambda t: exits(layer(t["position"].to_numpy()), 3), STEPS)
    space = run_page("length", **asked(tmp_path, folder_of("gpt2"), str(file)))[0]
    assert verdicts(space) == dict(zip(("P-L1", "P-L2", "P-L3"), wanted))


LAYERS = 10  # M-D7 starts at layer 8, and the step into the last layer may not be the only one
LONG_FROM = 8  # prefixes of fewer tokens are of one kind, longer ones of the other: half of all, more of longer outputs


def curve(embeddings, level, shape):
    """Cosines of layers 0..L: those of layers 1..L-1 have the mean `level`, so that no shape is easier than another."""
    return np.array([embeddings, *(level + shape - np.mean(shape)), 1.0])


RISES = np.linspace(-0.08, 0.08, LAYERS - 1)
FALLS_LATE = RISES[[*range(LAYERS - 3), LAYERS - 2, LAYERS - 3]]  # from layer 8 to layer 9
SPIKE = np.array([1.0, *np.linspace(0.08, -0.08, LAYERS - 2)])  # similar at layer 1, and never again
# Curves of prefixes shorter than LONG_FROM, and of longer ones, of even and of odd length; the kind at the higher
# level is easy. "holds": easy ones are similar from the middle on and rise from layer 0 on in half of the cases, the
# others only before the last layer and never from 0, but always from 1. "does not hold": easy ones are similar at the
# last layer alone and rise from 1, never from 0; of the others half are similar at layer 1, and half rise from 0.
CURVES = {
    "holds": ([curve(0.9, 0.3, RISES)] * 2, [curve(0.7, 0.89, RISES), curve(0.7, 0.89, FALLS_LATE)]),
    "does not hold": ([curve(0.9, 0.78, RISES)] * 2, [curve(-0.2, 0.1, RISES), curve(-0.2, 0.1, SPIKE)]),
}


def cosines(verdict, positions):
    """Cosines [tokens, L+1]; inside a kind, easier or harder by a little with every position, so that none are tied."""
    found = np.stack([CURVES[verdict][int(at >= LONG_FROM)][at % 2] for at in positions])
    found[:, 1:-1] += {"holds": 0.001, "does not hold": -0.001}[verdict] * positions[:, None]
    return found


@pytest.mark.parametrize("verdict", CURVES)
def test_difficulty(verdict, tmp_path):
    """Easy prefixes late, similar sooner, seldom steady from layer 4 on; or early, similar later, then steady.

    Certainty falls with the position, so the control calls early prefixes easy, as the second kind of curves does.
    """
    rows = [row if i % 6 else row | {"references": [f"A dog ran {i}."]} for i, row in enumerate(pairs(500))]
    file = tmp_path / "tiny.de-en.jsonl"
    model, task = deep_model(tmp_path / "deep"), write_task(file, rows)

    def readouts(tokens):
        positions = tokens["position"].to_numpy()
        entropy = np.repeat(positions[:, None], LAYERS + 1, axis=1).astype(float)
        return {"cosine": cosines(verdict, positions), "entropy": entropy}

    plant(model, task, tmp_path / "runs", lambda t: exits(np.full(len(t), LAYERS), LAYERS), STEPS, readouts)
    space = run_page("difficulty", **asked(tmp_path, tmp_path / "deep", str(file)))[0]
    found = {row["id"]: row for row in result(space)["claims"]}
    assert {name: row["verdict"] for name, row in found.items()} == {f"M-D{i}": verdict for i in (1, 3, 4, 5, 6, 7)}
    reversed_ = {name for name, row in found.items() if "reversed by the control" in row["weights"]}
    assert reversed_ == ({f"M-D{i}" for i in (1, 3, 5, 6, 7)} if verdict == "holds" else set())


OUTPUTS = 32  # whose modules are read, the notebook's default
SPAN = 20  # ids between two lists; a planted top ten lies within 11 of its first


def site_columns(site, knows, final, vocabulary):
    """A site's columns: in rows where it `knows`, the likely final top ten [rows, 10] at all layers; in the
    others unlikely lists that share nothing with it nor with each other. No id is 0.
    """
    ids = final[:, None] - 1 + SPAN * np.where(knows[:, None], 0, [1, 2, 3])[..., None]  # [rows, layers, 10]
    probability = np.where(knows[:, None], [0.9] + [0.005] * 9, [0.1] + [0.045] * 9)
    values = {
        "topk_ids": (ids % (vocabulary - 1) + 1).reshape(len(ids), -1),
        "topk_probability": np.tile(probability, 3),
        "final_rank": np.where(knows, 1, 100)[:, None].repeat(3, axis=1),
    }
    return {f"{site}/{readout}": value for readout, value in values.items()}


@pytest.mark.parametrize("verdict", ["holds", "does not hold"])
def test_sublayers(verdict, model_of, folder_of, planted_tasks, tmp_path):
    """The stream knows and modules do not, or the other way round; in every seventh output they change places. Every
    token settles at layer 2 of 3.
    """
    model, task = model_of("gpt2"), eelib.load_task(planted_tasks[0])
    made = plant(model, task, tmp_path / "runs", lambda t: exits(np.full(len(t), 2), 3), STEPS, sites=OUTPUTS)
    final = made["topk_ids"][made.sites.rows, -1]
    stream = (made.sites.tokens["sequence"] % 7 > 0).to_numpy() == (verdict == "holds")

    def change(_found):
        kept = ("topk_ids", "topk_probability", "final_rank")
        columns = {f"block/{key}": made[key][made.sites.rows, 1:].reshape(len(final), -1) for key in kept}
        for site, knows in {"attention": ~stream, "feed_forward": ~stream, "after_attention": stream}.items():
            columns |= site_columns(site, knows, final, model.vocab_size)
        return columns

    rewrite(made, f"sites-{OUTPUTS}", change)
    space = run_page("sublayers", **asked(tmp_path, folder_of("gpt2"), planted_tasks[0]))[0]
    assert list(verdicts(space).values()) == [verdict] * 4


CUT = [("tea", "pot"), ("foot", "path"), ("book", "shop"), ("cat", "walk")]
STARTS, ENDS = zip(*CUT)
WHOLE = ["dog", "house", "hill", "garden", "river", "city"]
FRAME = "The {} saw a {} near the {} and took a {} to the {}."


def words_model(folder):
    """A tiny model whose tokenizer reads every planted word whole, but for those in CUT."""
    words = [f"▁{word}" for word in [*re.findall(r"\w+", FRAME), *WHOLE, *STARTS]]
    pieces = dict.fromkeys(["<pad>", "</s>", "<unk>", ".", *ENDS, *words], -1.0)
    unigram = Tokenizer(models.Unigram([*pieces.items()], unk_id=2))
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    deep_model(folder, 3)
    special = {"pad_token": "<pad>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=unigram, **special).save_pretrained(folder)
    return eelib.load_model(str(folder), device="cpu")


def outputs(cut: int) -> list[str]:
    """32 outputs of two sentences, the second with the nouns of the first in other places; `cut` of five are in CUT."""
    nouns = [["".join(CUT[(i + n) % 4]) if n >= 5 - cut else WHOLE[(i + n) % 6] for n in range(5)] for i in range(32)]
    return [f"{FRAME.format(*own)} {FRAME.format(*own[1:], own[0])}" for own in nouns]


def kind_of(text: str) -> str:
    """What a token is, by its text."""
    word = text.strip()
    return "prefix" if word in STARTS else "suffix" if word in ENDS else "noun" if word in WHOLE else "other"


# How many nouns are cut (with one, 2 tokens of 17 are pieces), the exit layers of each kind of token in the first
# sentence and in the second, and verdicts on P-W1, P-W2, P-W3. In the second plant, half of the tokens of every part of
# speech leave at layer 1 and half at 3, in every output.
SUBWORDS = {
    "nouns late, prefixes later": (
        1,
        {"prefix": (3, 3), "suffix": (2, 2), "noun": (3, 3), "other": (1, 1)},
        ("holds", "undecided", "holds"),  # 2 of 17 in each of 32 texts: what never varies counts as one token a text
    ),
    "parts of speech alike, prefixes earlier": (
        4,
        {"prefix": (1, 1), "suffix": (3, 3), "noun": (1, 3), "other": (1, 3)},
        ("does not hold",) * 3,
    ),
}


@pytest.mark.parametrize("name", SUBWORDS)
def test_subwords(name, tmp_path, monkeypatch):
    cut, layers, wanted = SUBWORDS[name]
    path, model = tmp_path / "tiny.de-en.jsonl", words_model(tmp_path / "words")
    task = write_task(path, sentences(outputs(cut)))

    def agrees(tokens):
        assert (tokens.groupby("sequence").size() == 2 * (16 + cut) + 1).all()  # each output cut as it should be
        again, kinds = tokens["position"] >= 16 + cut, tokens["text"].map(kind_of)
        found = np.array([layers[kind][half] for kind, half in zip(kinds, again)])
        other = (kinds == "prefix") & (tokens["sequence"] % 7 == 0)
        return exits(np.where(other, 2, found), 3)  # groups that are all alike show nothing

    plant(model, task, tmp_path / "runs", agrees, STEPS)
    monkeypatch.setattr("eestudy.words.is_llama_2", lambda tokenizer: True)  # for which alone P-W2 is judged
    space = run_page("subwords", **asked(tmp_path, tmp_path / "words", str(path)))[0]
    assert verdicts(space) == dict(zip(("P-W1", "P-W2", "P-W3"), wanted))


EARLY, MIDDLE_LAYER, LATE = (exits([layer], 3)[0] for layer in (1, 2, 3))
UNSTABLE = np.array([False, True, False, True])  # "first" at layer 1, but P-A1 goes by "stable"
# Where most answers agree with the end: of the page's own model, which no claim is about and which would come out the
# other way; of an encoder-decoder; and of a classifier.
AGREE = {"holds": (LATE, EARLY, EARLY), "does not hold": (EARLY, UNSTABLE, LATE)}


@pytest.mark.parametrize("verdict", AGREE)
def test_architectures(verdict, model_of, folder_of, planted_tasks, tmp_path):
    """Most tokens of an encoder-decoder, and most texts of a classifier, are settled early, or late."""
    rows = [{"premise": f"Dog {i} ran", "hypothesis": "a dog", "label": min(i % 4, 2)} for i in range(36)]
    labels, kinds = str(write(tmp_path / "tiny.mnli.jsonl", rows)), ("gpt2", "t5", "bert_labels")
    for kind, name, agrees in zip(kinds, (*planted_tasks[:1] * 2, labels), AGREE[verdict]):

        def agreement(tokens):
            return np.where(tokens[["sequence"]] % 6, agrees, MIDDLE_LAYER)

        plant(model_of(kind), eelib.load_task(name), tmp_path / "runs", agreement, STEPS)
    own, t5, bert = map(folder_of, kinds)
    more = {"beside": f"{t5} on {planted_tasks[0]}; {bert} on {labels}"}
    more |= {"beside_limit": 0, "beside_new_tokens": STEPS, "timed_texts": 0}
    space = run_page("architectures", **asked(tmp_path, own, planted_tasks[0]), **more)[0]
    found = result(space)
    assert verdicts(space) == dict.fromkeys(("P-A1", "P-A2", "P-A3"), verdict)
    assert [row["models"] for row in found["claims"]] == ["t5", "bert_labels", "bert_labels"]


# Texts on which random models write nonsense, without references and with them; a classifier that guesses.
NOTHING = {
    "requests": ("gpt2", ["saturation", "joint_optimization", "production", "monotonicity"]),
    "de-en": ("t5", ["length", "difficulty", "subwords", "sublayers"]),
    "mnli": ("bert_labels", ["architectures", "gates", "speed", "should_i_use_it"]),
}


@pytest.mark.parametrize("kind, notebook", [(kind, name) for kind, (_, names) in NOTHING.items() for name in names])
def test_a_run_that_shows_nothing_says_so(kind, notebook, folder_of, tmp_path):
    """Each notebook once; `test_notebooks.py` runs all of them with a decoder on tasks with references."""
    model, file = str(folder_of(NOTHING[kind][0])), tmp_path / f"tiny.{kind}.jsonl"
    hypotheses = ["a green dog " * (i % 4 + 1) for i in range(40)]
    rows = {
        "requests": [{"instruction": f"Say {i}."} for i in range(5)],
        "de-en": sentences(f"Sentence {i}." for i in range(5)),
        "mnli": [{"premise": f"Dog {i}", "hypothesis": of, "label": i % 3} for i, of in enumerate(hypotheses)],
    }
    write_task(file, rows[kind])
    more = {
        "joint_optimization": {"after": model, "others": ""},
        "architectures": {"beside": ""},
        "production": {"structured": "", "sequences": 2, "batches": 2},
        "speed": {"timed_gates": ""},
        "gates": {"weighted": ""},
    }
    space, shown = run_page(notebook, **asked(tmp_path, model, str(file)) | more.get(notebook, {}))
    found = result(space)
    assert {row["verdict"] for row in found["claims"]} <= {"not testable here", "not applicable"}
    assert "nothing can be concluded" in found["answer"] and not re.search(r"\bnan\b", texts(shown), re.IGNORECASE)


TALL, DRAFTED, HEAD = 10, 8, 2.0
FLAT = {"layers": TALL, "rows": [1, 512], "call": [0.0, 0.0], "blocks": [float(TALL)] * 2, "head": [HEAD] * 2}


def race(weights, right, off, repeats=(1.6, 1.7)):
    """Kept results in which `right` of 100 rounds of one draft are right, and forecasts are off by a share."""
    counts = {"drafted": 100, "accepted": right, "passes": 110}
    times = {"times_plain": repeats[0], "ratios": [*repeats], "forecast": repeats[0] * (1 + off), "seconds": [6.0, 6.2]}
    by_text = {name: [every // 10] * 10 for name, every in counts.items()}
    by_text["accepted"][:2] = [right // 10 - 1, right // 10 + 1]  # texts that are all the same have no interval
    ways = [{"kind": "lossless", "method": "block", "by_text": by_text} | counts | times]
    ways.append({"kind": "plain", "method": "plain", "seconds": [10.0, 10.4]})
    ways.append({"kind": "part", "method": "prompts alone", "seconds": [2.0, 2.2]})
    rows = [{"task": "a/b", "batch": size, "texts": 10} | way for size in (1, 16) for way in ways]
    head = {"models": {"deep": weights}, "date": "2026-01-01", "commit": "abc", "machine": {"cpu": "a processor"}}
    return {"race": head | {"rows": rows}, "race_forecast": head | {"costs": {"1": FLAT, "16": FLAT}}}


@pytest.fixture
def map_page(monkeypatch, planted_tasks, tmp_path):
    """map_page(kept): the page where three of four tokens exit by layer 8, its results and its texts."""
    model, task = deep_model(tmp_path / "deep", TALL), eelib.load_task(planted_tasks[0])
    plant(model, task, tmp_path / "runs", lambda t: exits(np.where(t["position"] % 4, DRAFTED, TALL), TALL), STEPS)

    def run(kept):
        def read(name):
            if not kept:
                raise InputError("no result has this name")
            return kept(model.hash)[name]

        monkeypatch.setattr(kept_results, "measured", read)
        space, shown = run_page("should_i_use_it", **asked(tmp_path, tmp_path / "deep", planted_tasks[0]))
        return space, result(space), re.sub(r"\s+", " ", texts(shown))

    return run


# Right drafts of 100, the forecast's error, times plain decoding in two repeats, the error without a forecast.
RACES = {
    "save time": (90, 0.01, (1.6, 1.7), 1 - 1 / 1.6, "better", "meets its goals"),
    "save no time": (10, 0.5, (0.9, 0.8), 1 / 0.9 - 1, "worse", "misses its goals"),
}


@pytest.mark.parametrize("answer", RACES)
def test_acceptance_and_errors_are_those_of_the_race(answer, map_page):
    right, off, repeats, by_none, than_none, goals = RACES[answer]
    space, found, shown = map_page(lambda weights: race(weights, right, off, repeats=repeats))
    numbers = {name: value["estimate"] for name, value in found["overall"].items()}
    assert numbers["block_right"] == pytest.approx(right / 100) and numbers["error"] == pytest.approx(off)
    assert found["overall"]["block_right"]["low"] < right / 100 < found["overall"]["block_right"]["high"]
    assert numbers["none_error"] == pytest.approx(by_none)
    own = space["study"].tokens.query("counted")
    assert numbers["layer_right"] == pytest.approx(100 * (own["position"] % 4 > 0).mean())
    points = space["points"][["estimate", "low", "high"]].to_numpy(float)
    assert points == pytest.approx(np.array([[2.025, 2.0, 2.05]] * 2))  # 8 / 4 and 8.2 / 4
    assert f"The forecast is {than_none} than no forecast" in shown and f"It {goals} (10% and 20%)" in shown
    said = " ".join(found["answer"].split())
    assert f"Drafts of an early layer {answer}: one text" in said and f"{right} of 100 were right" in said
    assert f"decodes {repeats[0]:.2f} times as fast as plain decoding" in said


def test_a_race_is_of_a_model_on_a_cpu_in_float32(monkeypatch):
    monkeypatch.setattr(kept_results, "measured", lambda name: race("abc", 90, 0.0)[name])
    model = SimpleNamespace(name="deep", hash="abc", device=torch.device("cpu"), dtype="float32")
    assert kept_results.measured_on("race", model)
    for other in ({"hash": "abd"}, {"dtype": "bfloat16"}):
        assert kept_results.measured_on("race", SimpleNamespace(**vars(model) | other)) is None


def test_without_a_race_and_costs_the_page_says_why(map_page, monkeypatch):
    monkeypatch.setattr("eelib.exits.decoding.self_test.tested", lambda model: ("it has no cache", False))
    space, found, _ = map_page(None)
    assert not space["raced"] and not space["costs"] and not len(space["points"])
    assert "can't be stopped at a block: it has no cache), so nothing" in found["answer"]
