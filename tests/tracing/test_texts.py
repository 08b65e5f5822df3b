"""Texts of tokens tile the output; classifiers read pairs of texts as plain transformers does."""

from dataclasses import replace
from functools import cache

import families
import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_as_near, assert_top_ids, bert_labels
from tokenizers import Tokenizer, decoders, models, processors
from torch.distributions import Categorical

import eelib
from checks.tiny_texts import WINDOW, tokenizer_for
from eelib.tasks.classification import LABELS
from eelib.tasks.task import load_task, task_of_rows
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


def pairs_task():
    """A task of pairs without a file."""
    rows = [{"premise": first, "hypothesis": second, "label": i % 3} for i, (first, second) in enumerate(PAIRS)]
    return task_of_rows("glue/mnli", [("", row) for row in rows])


@cache
def pair_tokenizer():
    """The masked families' tokenizer with a frame for pairs, and token types."""
    plain = tokenizer_for("masked")
    ids = [(token, plain.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    plain.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=ids
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
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
def plain_scores(dtype):
    """The plain use of transformers: label scores of every layer, and the network's own, of each pair."""
    network, layers, own = families.build("bert_labels").to(dtype), [], []
    for pair in PAIRS:
        run = network(**pair_tokenizer()(*pair, return_tensors="pt"), output_hidden_states=True)
        layers.append(torch.stack([bert_labels(network, states[0, 0]) for states in run.hidden_states]))
        own.append(run.logits[0])
    return torch.stack(layers), torch.stack(own)


def test_pairs_against_plain_transformers(classifier_of, tmp_path):
    """Every layer of pairs, special tokens inside a text included."""
    names = ("label_0", "1", "LABEL_2")  # numbers mean GLUE's order
    (plain, _), (layers, own) = (plain_scores(dtype) for dtype in (torch.float32, torch.float64))
    np.testing.assert_allclose(layers[:, -1], own, rtol=1e-9)
    task = pairs_task()
    trace = eelib.trace(classifier_of(names), task, folder=tmp_path, batch_size=2, progress=False)
    assert not trace.tokens["is_special"].any()  # labels are no tokens of the tokenizer
    assert trace["topk_ids"].shape == (len(PAIRS), trace.layers + 1, 3) and trace.statistic_rows().all()
    order = torch.tensor(trace["topk_ids"]).long()
    near, shares = (scores.softmax(-1).gather(-1, order) for scores in (plain, layers))
    assert_as_near(torch.tensor(trace["topk_probability"]), near, shares, "probabilities")
    rounded, entropy = (Categorical(logits=scores).entropy() for scores in (plain, layers))
    assert_as_near(torch.tensor(trace["entropy"]), rounded, entropy, "entropy")
    assert_top_ids(torch.tensor(trace["top1"]), plain, layers)
    assert trace.sequences["output"].tolist() == [names[i] for i in own.argmax(-1)]
    right = [[LABELS["mnli"][i]] == known for i, known in zip(own.argmax(-1), task.references)]
    assert task.quality(list(trace.sequences["output"])) == {"accuracy": pytest.approx(100 * np.mean(right))}


def test_models_and_tasks_that_do_not_fit(classifier_of, model_of, tmp_path, one_line):
    bert, two, three = classifier_of(), load_task("classification/rte", 4), pairs_task()
    for model, task, parts in (
        (model_of("llama"), three, ("glue/mnli needs a sequence classifier", "llama")),
        (bert, load_task("translation/de-en", 2), ("gives labels, not text", "free prompts")),
        (bert, two, ("3 labels (Entailment, NEUTRAL, contradiction)", "rte has 2 (entailment, not_entailment)")),
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


def quadratic(tokenizer, ids):
    """Ends of the tokens' texts by decoding every beginning as a whole."""
    whole, ends, at = tokenizer.decode(ids, clean_up_tokenization_spaces=False) if ids else "", [], 0
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:n], clean_up_tokenization_spaces=False)
        at = len(whole) if n == len(ids) else max(at, min(len(text.rstrip("\ufffd")), len(whole)))
        ends.append(at)
    return ends


@pytest.mark.parametrize("name, window", [("causal", 1), ("masked", 5), ("sentencepiece-like", 1)])
def test_windows_change_nothing(name, window, monkeypatch):
    """Whatever is generated, broken characters too: texts tile the output, and end as from decoding each beginning."""
    tokenizer = sentencepiece_like() if name == "sentencepiece-like" else tokenizer_for(name)
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
