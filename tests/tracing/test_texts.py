"""Texts of tokens tile the output; classifiers read pairs of texts and single ones as plain transformers does."""

import copy
from dataclasses import replace
from functools import cache

import families
import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_as_near, assert_close, assert_top_ids, bert_labels, oracle_run
from tokenizers import Tokenizer, decoders, models, processors

import eelib
from checks.tiny_texts import PROMPTS, WINDOW, tokenizer_for
from eelib.tasks.classification import LABELS
from eelib.tasks.task import Task, load_task, task_of_rows
from eelib.tracing import columns
from eelib.tracing.columns import token_texts

PAIRS = [
    ("The small dog", "a dog"),
    ("Wo ist das Buch? Here!", "over the hill"),
    ("a", "one two three four five 😀"),
    ("odd </s> text", "with <s> marks </s> in it"),
    ("Der kleine Hund", "x"),
]
NAMES = ("Entailment", "NEUTRAL", "contradiction")


def pairs_task(pairs=PAIRS):
    """A task of pairs without a file."""
    rows = [{"premise": first, "hypothesis": second, "label": i % 3} for i, (first, second) in enumerate(pairs)]
    return task_of_rows("glue/mnli", [("", row) for row in rows])


@cache
def pair_tokenizer():
    """The masked families' tokenizer with a frame for pairs, and token types."""
    plain = tokenizer_for("masked")
    backend = copy.deepcopy(plain.backend_tokenizer)
    ids = [(token, plain.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=ids
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=WINDOW,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


@pytest.fixture(scope="module")
def classifier_of(tmp_path_factory):
    """classifier_of(names): a classifier with three labels, through `load_model`."""

    def make(names=NAMES):
        folder, network = tmp_path_factory.mktemp("classifier"), families.build("bert_labels")
        network.config.id2label = dict(enumerate(names))
        network.config.label2id = {name: number for number, name in enumerate(names)}
        network.save_pretrained(folder)
        pair_tokenizer().save_pretrained(folder)
        return eelib.load_model(str(folder), device="cpu")

    return make


@torch.no_grad()
def plain_scores(texts, dtype):
    """The plain use of transformers: label scores of every layer, and the network's own, of each text."""
    network, layers, own = families.build("bert_labels").to(dtype), [], []
    for text in texts:
        run = network(**pair_tokenizer()(*text, return_tensors="pt"), output_hidden_states=True)
        layers.append(torch.stack([bert_labels(network, states[0, 0]) for states in run.hidden_states]))
        own.append(run.logits[0])
    return torch.stack(layers), torch.stack(own)


def shares_and_entropy(scores, order):
    """(probabilities in the order of ids [..., k]; entropy) of scores [..., labels]."""
    shares = scores.softmax(-1)
    return shares.gather(-1, order), -(shares * shares.log()).sum(-1)


@pytest.mark.parametrize("paired", [True, False])
def test_against_plain_transformers(paired, classifier_of, tmp_path):
    """Every layer of pairs and of single texts, special tokens inside a text included."""
    names = ("label_0", "1", "LABEL_2") if paired else NAMES  # numbers mean GLUE's order
    texts = PAIRS if paired else list(zip(PROMPTS))
    (plain, _), (layers, own) = (plain_scores(texts, dtype) for dtype in (torch.float32, torch.float64))
    np.testing.assert_allclose(layers[:, -1], own, rtol=1e-9)
    task = pairs_task(texts) if paired else Task.from_prompts([text for (text,) in texts])
    trace = eelib.trace(classifier_of(names), task, folder=tmp_path, batch_size=2, sites=2, pairs=3, progress=False)
    assert not trace.tokens["is_special"].any()  # labels are no tokens of the tokenizer
    assert trace["topk_ids"].shape == (len(texts), trace.layers + 1, 3) and trace.statistic_rows().all()
    order = torch.tensor(trace["topk_ids"]).long()
    (near, rounded), (shares, entropy) = (shares_and_entropy(scores, order) for scores in (plain, layers))
    assert_as_near(torch.tensor(trace["topk_probability"]), near, shares, "probabilities")
    assert_as_near(torch.tensor(trace["entropy"]), rounded, entropy, "entropy")
    assert_top_ids(torch.tensor(trace["top1"]), plain, layers)
    assert trace.sequences["output"].tolist() == [names[i] for i in own.argmax(-1)]
    block = trace.sites.names.index("block")  # made by another pass over the same texts
    tops = (top[:2, 1:, 0] for top in (near, shares))
    assert_as_near(torch.tensor(trace.sites["probability"][:, :, block]), *tops, "block")
    assert_close(trace.pairs["js"][:, :, -1], trace["js_final"][:3])
    if paired:
        right = [[LABELS["mnli"][i]] == known for i, known in zip(own.argmax(-1), task.references)]
        assert task.quality(list(trace.sequences["output"])) == {"accuracy": pytest.approx(100 * np.mean(right))}


def test_causal_classifier_reads_a_pair_at_its_end(folder_of, tmp_path):
    """A tokenizer without separators puts the second text after the first."""
    name = "gpt2_labels"
    family, position = families.CLASSIFIERS[name]
    model = eelib.load_model(str(folder_of(name)), device="cpu")
    model.tokenizer.model_input_names = ["input_ids", "attention_mask"]
    trace = eelib.trace(model, pairs_task(), folder=tmp_path, batch_size=2, progress=False)
    prompts = [model.tokenizer(a)["input_ids"] + model.tokenizer(b)["input_ids"] for a, b in PAIRS]
    found = []
    for network in (families.build(name), families.build(name).double()):
        runs = [oracle_run(network, family, prompt, [0]) for prompt in prompts]
        scores = family.unembed(network, torch.stack([run["states"][position] for run in runs]))
        found.append(scores.softmax(-1).amax(-1))
    assert_as_near(torch.tensor(trace["probability"]), *found)


def test_models_and_tasks_that_do_not_fit(classifier_of, model_of, tmp_path, one_line):
    bert, mixed = classifier_of(), ("entailment", "neutral", "LABEL_0")
    retyped = classifier_of()
    retyped.network.config.type_vocab_size = 1
    two, three = load_task("classification/rte", 4), pairs_task()
    with pytest.raises(ValueError) as caught:  # other names would not help
        eelib.trace(bert, two, folder=tmp_path / "runs", progress=False)
    assert "LABEL_0" not in str(caught.value)
    for model, task, parts in (
        (model_of("llama"), three, ("glue/mnli needs a sequence classifier", "llama")),
        (bert, load_task("translation/de-en", 2), ("gives labels, not text", "free prompts")),
        (bert, two, ("3 labels (Entailment, NEUTRAL, contradiction)", "rte has 2 (entailment, not_entailment)")),
        (classifier_of(mixed), three, (*mixed, "entailment, neutral, contradiction")),
        (retyped, three, ("types up to 1", "knows 1")),
        (bert, replace(three, chat=True), ("pairs", "chat=False")),
    ):
        one_line(ValueError, parts, lambda: eelib.trace(model, task, folder=tmp_path / "runs", progress=False))
        assert not (tmp_path / "runs").exists()


# Texts of tokens


def sentencepiece_like() -> hf.PreTrainedTokenizerFast:
    """Words that begin with a mark for their space, and bytes for what no word holds, as Llama's first tokenizer."""
    words = [f"<0x{byte:02X}>" for byte in range(256)]
    words += ["▁", "▁the", "▁dog", "s", "é", "▁日", "本", ".", "▁▁", "\ufffd"]
    inner = Tokenizer(models.BPE({name: i for i, name in enumerate(words)}, [], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner)


@cache
def tokenizer_of(name: str):
    """A tokenizer of each kind of decoder: bytes; words with a mark for their space; word pieces; words and bytes."""
    return sentencepiece_like() if name == "sentencepiece-like" else tokenizer_for(name)


def quadratic(tokenizer, ids):
    """Ends of the tokens' texts by decoding every beginning as a whole."""
    whole, ends, at = tokenizer.decode(ids, clean_up_tokenization_spaces=False) if ids else "", [], 0
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:n], clean_up_tokenization_spaces=False)
        at = len(whole) if n == len(ids) else max(at, min(len(text.rstrip("\ufffd")), len(whole)))
        ends.append(at)
    return ends


@pytest.mark.parametrize("name, window", [("causal", 1), ("seq2seq", 2), ("masked", 5), ("sentencepiece-like", 1)])
def test_windows_change_nothing(name, window, monkeypatch):
    """Whatever is generated, broken characters too: texts tile the output, and end as from decoding each beginning."""
    tokenizer = tokenizer_of(name)
    monkeypatch.setattr(columns, "WINDOW", window)
    bytes_only = st.sampled_from([0xC3, 0xA9, 0xE6, 0x97, 0xA5, 0x41, 0xF0, 0x9F, 0x90, 0xAF])
    texts = st.text("aé日本🐯 .\n\ufffd", max_size=20).map(lambda text: tokenizer(text)["input_ids"])
    anything = st.lists(st.integers(0, len(tokenizer) - 1), max_size=40)
    kinds = [anything, texts, st.tuples(texts, anything, texts).map(lambda parts: sum(map(list, parts), []))]
    if name == "sentencepiece-like":
        kinds = [anything, st.lists(bytes_only | st.integers(256, len(tokenizer) - 1), max_size=40)]

    @settings(max_examples=60, deadline=None)
    @given(st.one_of(kinds))
    def check(ids):
        texts, starts, ends, whole = token_texts(tokenizer, ids)
        assert ends == quadratic(tokenizer, ids) and [whole[s:e] for s, e in zip(starts, ends)] == texts
        assert "".join(texts) == whole == (tokenizer.decode(ids, clean_up_tokenization_spaces=False) if ids else "")

    check()


def test_long_outputs_are_decoded_in_windows():
    """Each token costs the same, however long the output is."""
    asked, tokenizer = [], tokenizer_for("causal")
    ids = tokenizer("the small dog 🐯 " * 60)["input_ids"]

    class Counting:
        def decode(self, part, **options):
            asked.append(len(part))
            return tokenizer.decode(part, **options)

    assert token_texts(Counting(), ids)[2] == quadratic(tokenizer, ids)
    assert sorted(asked)[-2] < 3 * columns.WINDOW < max(asked) == len(ids) > 500


def test_a_tokenizer_whose_text_depends_on_tokens_far_away():
    """It writes what follows a 9 twice, however far it is: then beginnings are decoded as a whole."""

    class Doubling:
        def decode(self, part, **options):
            before, nine, after = "".join(map(str, part)).partition("9")
            return before + nine + "".join(2 * character for character in after)

    ids = [1, 9] + [1, 2, 3] * 3 * columns.WINDOW
    assert token_texts(Doubling(), ids)[2] == quadratic(Doubling(), ids)
