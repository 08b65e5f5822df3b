"""Every claim of a page about one model tried both ways on planted traces, and runs on which nothing is concluded."""

import re

import families
import numpy as np
import pytest
import transformers as hf
from pages import NOTEBOOKS, result, run_page, texts, verdicts
from planted import NOUNS, STEPS, asked, deep_model, exits, pairs, plant, rewrite, sentences, varied, write_task

import eelib
from eestudy.parameters import ParameterError

WIDE = 256  # a window, in tokens, that holds a question's prompt


# The exit layer of a token by its position: of a task into English, of one out of it, and of answers to questions. The
# model has three layers. Four tasks of questions are one kind, but four of six in the averages over tasks.
SATURATION = {
    "holds": [lambda at: 1 + 0 * at, lambda at: np.where(at < 2, 3, 1), *[lambda at: 1 + 0 * at] * 4],
    "does not hold": [lambda at: 3 + 0 * at, lambda at: np.where(at % 5 % 2 == 1, 1, 3), *[lambda at: 3 + 0 * at] * 4],
}


@pytest.mark.parametrize("verdict", SATURATION)
def test_saturation(verdict, planted_tasks, tmp_path):
    """Nearly all tokens early, at nearly the same layer, most of all into English; or nearly none, and less into it."""
    model, tasks = deep_model(tmp_path / "wide", 3, window=WIDE), [*planted_tasks]
    rows = [
        {"context": f"Room {i}.", "question": "What?", "answers": row["references"]} for i, row in enumerate(pairs(64))
    ]
    for name in ("asked0", "asked1", "asked2", "asked3"):
        tasks.append(str(tmp_path / f"{name}.jsonl"))
        write_task(tmp_path / f"{name}.jsonl", rows)
    for name, at in zip(tasks, SATURATION[verdict], strict=True):
        plant(model, eelib.load_task(name), tmp_path / "runs", lambda t: exits(varied(t, at(t["position"])), 3), STEPS)
    space = run_page("saturation", **asked(tmp_path, tmp_path / "wide", ",".join(tasks)))[0]
    assert verdicts(space) == dict.fromkeys(("P-S1", "P-S2", "P-S3", "P-S4", "P-S5"), verdict)


MIDDLE = 18  # tokens of a planted output: no output of the shorter half is longer

# Exit layer by position p (from 0) and length n, of three; verdicts on P-L1, P-L2, P-L3. With one late token at the
# start, the mean of n tokens is 1 + 2 / n: it falls with n, ever less. Any slope is a weighted mean of the slopes
# between neighbouring lengths, so no draw can change these signs.
LENGTH = {
    "the first token late": (lambda p, n: np.where(p == 0, 3, 1), ("holds", "holds", "holds")),
    "the first token early": (
        lambda p, n: np.where(p == 0, 1, 3),
        ("does not hold", "not applicable", "does not hold"),
    ),
    # The shorter half stays at 3, the longer falls as 1 + 2 * MIDDLE / n, and inside those the end is late.
    "the last tokens late": (lambda p, n: np.where(p >= n - MIDDLE, 3, 1), ("holds", "does not hold", "does not hold")),
}


@pytest.mark.parametrize("name", LENGTH)
def test_length(name, model_of, folder_of, tmp_path):
    """References have one to eight words; each half of the outputs has groups enough for a verdict."""
    words = [[NOUNS[(i + j) % 10] for j in range(1 + i % 8)] for i in range(80)]
    file = tmp_path / "tiny.de-en.jsonl"
    task, (layer, wanted) = write_task(file, sentences(map(" ".join, words))), LENGTH[name]

    def agrees(tokens):
        length = tokens.groupby("sequence")["position"].transform("max")  # the end token's place
        return exits(layer(tokens["position"].to_numpy(), length.to_numpy()), 3)

    made = plant(model_of("gpt2"), task, tmp_path / "runs", agrees, STEPS)
    assert 40 <= (made.sequences["length"] <= MIDDLE).sum() <= 50
    space = run_page("length", **asked(tmp_path, folder_of("gpt2"), str(file)))[0]
    found = result(space)
    assert verdicts(space) == dict(zip(("P-L1", "P-L2", "P-L3"), wanted))
    own, levels = space["own"], np.eye(48)
    at_position = np.column_stack([own["length"], levels[own["position"]]]).astype(float)
    of_output = np.column_stack([own["position"], np.eye(80)[own["sequence"]]]).astype(float)
    for name, design in (("at_same", at_position), ("inside", of_output)):
        slope = np.linalg.lstsq(design, own["first"].astype(float), rcond=None)[0][0]
        assert found["overall"][name]["estimate"] == pytest.approx(slope)


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
    again = run_page("difficulty", **asked(tmp_path, tmp_path / "deep", str(file)), share=0.3)[0]
    rows = result(again)["claims"]  # whose record has another share
    assert {row["verdict"] for row in rows} == {"not testable here"} and all("0.4" in row["reason"] for row in rows)


def test_known_difficulty(tmp_path):
    """Answers to hard questions whose states are similar two layers later, or earlier, than those to easy ones."""
    model, levels = deep_model(tmp_path / "wide", 3, window=WIDE), ["one", "two", "three"]
    rows = [row | {"kind": levels[i % 3]} for i, row in enumerate(pairs(90))]
    task = write_task(tmp_path / "known.de-en.jsonl", rows)

    def similar(tokens):
        first = 1 + tokens["sequence"].to_numpy() % 3  # the first similar state
        return {"cosine": np.where(np.arange(4) >= first[:, None], 0.95, 0.1)}

    plant(model, task, tmp_path / "runs", lambda t: exits(np.full(len(t), 3), 3), STEPS, similar)
    values = asked(tmp_path, tmp_path / "wide", str(tmp_path / "known.de-en.jsonl"))
    for levels, gap in (("one,two,three", 2), ("three,one", -2)):
        assert run_page("difficulty", **values, levels=levels)[0]["gap"].estimate == pytest.approx(gap)
    write_task(tmp_path / "plain.de-en.jsonl", sentences(["a", "b"]))
    beside = f"{families.save('t5', tmp_path / 't5')} on {tmp_path / 'plain.de-en.jsonl'}"  # whose texts have no levels
    assert run_page("difficulty", **values, beside=beside)[0]["gap"].estimate == pytest.approx(2)


OUTPUTS = 32  # whose modules are read, the notebook's default
SPAN = 20  # ids between two lists; a planted top ten lies within 11 of its first

# What sites show: the number of their list at layers 1 to 3, and the probability of the first in it. List 0 is the
# token's final top ten; any other shares nothing with it nor with the rest. Here: the stream, the two modules, and the
# verdicts on P-B1 to P-B4; each claim has verdicts of its own.
SITES = {
    "the stream knows": (((0, 0, 0), 0.9), ((1, 2, 3), 0.1), "1111"),
    "the modules know": (((1, 2, 3), 0.1), ((0, 0, 0), 0.9), "0000"),
    "a stream of its own": (((1, 1, 1), 0.1), ((0, 0, 2), 0.9), "0011"),
    "a confident stream that wanders": (((1, 2, 1), 0.9), ((0, 0, 2), 0.1), "0101"),
}


def site_columns(name, shown, final, vocabulary):
    """A site's columns in the table, from what it shows in each row and the final top ten [rows, 10]; no id is 0."""
    numbers, confidence = map(np.array, zip(*shown))
    ids = (final[:, None] - 1 + SPAN * numbers[..., None]) % (vocabulary - 1) + 1  # [rows, layers, 10]
    probability = np.repeat((1 - confidence)[:, None, None] / 20, 3, axis=1).repeat(10, axis=2)
    probability[..., 0] = confidence[:, None]
    values = {
        "topk_ids": ids.reshape(len(ids), -1),
        "topk_probability": probability.reshape(len(ids), -1),
        "final_rank": np.where(numbers == 0, 1, 100),
        "final_probability": np.where(numbers == 0, confidence[:, None], 1e-4),
        "entropy": np.ones(numbers.shape),
    }
    return {f"{name}/{readout}": value for readout, value in values.items()}


@pytest.mark.parametrize("name", SITES)
def test_sublayers(name, model_of, folder_of, planted_tasks, tmp_path):
    """Every token settles at layer 2 of 3; in every seventh output stream and modules change places."""
    stream, module, wanted = SITES[name]
    model, task = model_of("gpt2"), eelib.load_task(planted_tasks[0])
    made = plant(model, task, tmp_path / "runs", lambda t: exits(np.full(len(t), 2), 3), STEPS, sites=OUTPUTS)
    final = made["topk_ids"][made.sites.rows, -1]
    others = made.sites.tokens["sequence"] % 7 == 0

    def change(_found):
        kept = ("topk_ids", "topk_probability", "final_rank", "final_probability", "entropy")
        block = {f"block/{key}": made[key][made.sites.rows, 1:].reshape(len(final), -1) for key in kept}
        streams, modules = ([b if other else a for other in others] for a, b in ((stream, module), (module, stream)))
        shown = {"attention": modules, "feed_forward": modules, "after_attention": streams}
        return block | {
            k: v for site, at in shown.items() for k, v in site_columns(site, at, final, model.vocab_size).items()
        }

    rewrite(model, task, tmp_path / "runs", f"sites-{OUTPUTS}", change)
    space = run_page("sublayers", **asked(tmp_path, folder_of("gpt2"), planted_tasks[0]))[0]
    assert list(verdicts(space).values()) == ["holds" if one == "1" else "does not hold" for one in wanted]


CUT = [("tea", "pot"), ("foot", "path"), ("book", "shop"), ("cat", "walk")]
STARTS, ENDS = zip(*CUT)
WHOLE = ["dog", "house", "hill", "garden", "river", "city"]
FRAME = "The {} saw a {} near the {} and took a {} to the {}."
OTHERS = ["The", "saw", "a", "near", "the", "and", "took", "to"]
ENTRIES = 32_000  # of the paper's tokenizer, for which alone P-W2 is judged


def chains(words: list[str]) -> list[tuple[str, str]]:
    """Merges that put each of these words together letter by letter."""
    return list(dict.fromkeys((word[:n], word[n]) for word in words for n in range(1, len(word))))


def tokenizer() -> hf.LlamaTokenizer:
    """One that reads every planted word whole, but for those in CUT; most of its entries are never used."""
    merges = chains([f"▁{word}" for word in [*OTHERS, *WHOLE, *STARTS]]) + chains(list(ENDS))
    longer = ["".join(merge) for merge in merges]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    entries = [*special, *sorted(set("".join(longer) + ".")), *longer]
    entries += [f"<unused {n}>" for n in range(ENTRIES - len(entries))]
    return hf.LlamaTokenizer(vocab={entry: n for n, entry in enumerate(entries)}, merges=merges, pad_token="<unk>")


@pytest.fixture
def llama(tmp_path):
    """A tiny model of three layers with that tokenizer."""
    config = families.FAMILIES["llama"].config(vocab_size=ENTRIES, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    tokenizer().save_pretrained(tmp_path / "llama")
    return eelib.load_model(str(tmp_path / "llama"), device="cpu")


def outputs(cut: int) -> list[str]:
    """32 outputs of two sentences, the second with the nouns of the first in other places; `cut` of five are in CUT."""
    nouns = [["".join(CUT[(i + n) % 4]) if n >= 5 - cut else WHOLE[(i + n) % 6] for n in range(5)] for i in range(32)]
    return [f"{FRAME.format(*own)} {FRAME.format(*own[1:], own[0])}" for own in nouns]


def kind_of(text: str) -> str:
    """What a token is, by its text."""
    word = text.strip()
    return "prefix" if word in STARTS else "suffix" if word in ENDS else "noun" if word in WHOLE else "other"


OTHER = {1: 2, 2: 1, 3: 2}  # the exit layer of one first piece in every seventh output, by that of the others
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
    "nouns late, prefixes earlier": (
        4,
        {"prefix": (2, 2), "suffix": (3, 3), "noun": (3, 3), "other": (1, 1)},
        ("does not hold", "does not hold", "holds"),
    ),
}


@pytest.mark.parametrize("name", SUBWORDS)
def test_subwords(name, llama, tmp_path):
    cut, layers, wanted = SUBWORDS[name]
    path = tmp_path / "tiny.de-en.jsonl"
    task = write_task(path, sentences(outputs(cut)))

    def agrees(tokens):
        assert (tokens.groupby("sequence").size() == 2 * (16 + cut) + 1).all()  # each output cut as it should be
        again = tokens["position"] >= 16 + cut
        found = np.array([layers[kind_of(text)][half] for text, half in zip(tokens["text"], again)])
        first_piece = tokens["text"].map(kind_of) == "prefix"
        other = first_piece & (first_piece.groupby(tokens["sequence"]).cumsum() == 1) & (tokens["sequence"] % 7 == 0)
        return exits(np.where(other, OTHER[layers["prefix"][0]], found), 3)  # groups that are all alike show nothing

    plant(llama, task, tmp_path / "runs", agrees, STEPS)
    space = run_page("subwords", **asked(tmp_path, tmp_path / "llama", str(path)))[0]
    found = result(space)
    assert verdicts(space) == dict(zip(("P-W1", "P-W2", "P-W3"), wanted))
    prefix, words = layers["prefix"][0], 2 * 32 * cut
    gap = prefix - layers["suffix"][0] + 5 * (OTHER[prefix] - prefix) / words  # of outputs 0, 7, 14, 21 and 28
    assert found["overall"]["inside"]["estimate"] == pytest.approx(gap)


EARLY, MIDDLE_LAYER, LATE = (exits([layer], 3)[0] for layer in (1, 2, 3))
UNSTABLE = np.array([False, True, False, True])  # "first" at layer 1, but P-A1 goes by "stable"
# Where most answers agree with the end: of the page's own model, which no claim is about and which would come out the
# other way; of an encoder-decoder; and of a classifier.
AGREE = {"holds": (LATE, EARLY, EARLY), "does not hold": (EARLY, UNSTABLE, LATE)}


@pytest.mark.parametrize("verdict", AGREE)
def test_architectures(verdict, model_of, folder_of, planted_tasks, tmp_path):
    """Most tokens of an encoder-decoder, and most texts of a classifier, are settled early, or late."""
    labels, kinds = labelled(tmp_path), ("gpt2", "t5", "bert_labels")
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
    rows = space["parts"][2]  # of the classifier: swapped labels in plain loops
    inner, labels = space["studies"][2]["top1"][:, 1:-1], rows["token_id"]
    early = [np.mean([own[-1] == label for label in labels]) for own in inner]
    depth = [np.mean([([*own, label].index(label) + 1) / 3 for label in labels]) for own in inner]
    np.testing.assert_allclose(rows["swapped stable early"], early)
    np.testing.assert_allclose(rows["swapped first depth"], depth)


def labelled(folder):
    """A file of 36 pairs of texts with one of three labels."""
    rows = [{"premise": f"Dog {i} ran", "hypothesis": "a dog", "label": min(i % 4, 2)} for i in range(36)]
    write_task(folder / "tiny.mnli.jsonl", rows)
    return str(folder / "tiny.mnli.jsonl")


def test_the_oracle_gives_the_labels_of_the_trace(folder_of, tmp_path):
    values = asked(tmp_path, folder_of("bert_labels"), labelled(tmp_path))
    space = run_page("architectures", **values, beside="", repeats=1)[0]
    times = space["times"]
    assert len(times) == 36 and not times["other label"].any() and (times["full"] > 0).all()


REFUSED = dict.fromkeys(("saturation", "sublayers", "joint_optimization", "production", "gates", "speed"), "one block")
REFUSED["monotonicity"] = "parameter first_exit is 6; allowed are 1 to"


@pytest.mark.parametrize("notebook", REFUSED)
def test_a_model_of_too_few_blocks_is_refused_in_one_line(notebook, planted_tasks, tmp_path, one_line):
    deep_model(tmp_path / "one", 2 if notebook == "monotonicity" else 1)
    values = asked(tmp_path, tmp_path / "one", planted_tasks[0]) | {"limit": 2, "max_new_tokens": 2}
    more = {"gates": {"weighted": ""}, "speed": {"timed_gates": ""}}
    more["joint_optimization"] = {"after": values["model"], "others": ""}
    beside = {"beside_tasks": values["tasks"], "beside_limit": 2, "beside_new_tokens": 2}
    more["monotonicity"] = {"first_exit": 6, "distilled": values["model"]} | beside
    values |= more.get(notebook, {})
    one_line(ParameterError, REFUSED[notebook], lambda: run_page(notebook, **values))


NOTHING = [(path.stem, kind) for path in sorted(NOTEBOOKS.glob("*.ipynb")) for kind in ("requests", "de-en", "mnli")]


@pytest.mark.parametrize("notebook, kind", [*NOTHING, ("subwords", "en-de")])
def test_a_run_that_shows_nothing_says_so(notebook, kind, folder_of, tmp_path):
    """Texts on which random models write nonsense, without references and with them; a classifier that guesses; texts
    that are not in English, on the page that asks for it. `test_notebooks.py` runs a decoder on tasks with references.
    """
    model, file = (
        str(folder_of({"de-en": "t5", "mnli": "bert_labels"}.get(kind, "gpt2"))),
        tmp_path / f"tiny.{kind}.jsonl",
    )
    rows = sentences(f"Sentence {i}." for i in range(5))
    if kind == "requests":
        rows = [{"instruction": f"Say {i}."} for i in range(5)]
    if kind == "mnli":
        hypotheses = ["a green dog " * (i % 4 + 1) for i in range(40)]
        rows = [{"premise": f"The dog {i} ran", "hypothesis": of, "label": i % 3} for i, of in enumerate(hypotheses)]
    write_task(file, rows)
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
