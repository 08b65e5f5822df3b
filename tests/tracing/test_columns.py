"""The columns of a trace: what was asked, what was written, and where each token's text is."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from traces import STEPS, TASK, make
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from checks.tiny_texts import tokenizer_for
from eelib.models.checkpoint import path_of
from eelib.tracing import columns
from eelib.tracing.columns import token_texts

TOKENIZER = tokenizer_for("causal")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.mark.parametrize("name", ["llama", "t5", "bert"])
def test_tables(name, made, model_of):
    trace, model = made(name), model_of(name)
    tokens, sequences = trace.tokens, trace.sequences
    assert sequences["sequence"].tolist() == list(range(len(TASK))) and sequences["prompt"].tolist() == TASK.prompts
    assert sequences["reference"].tolist() == ["of the"] * len(TASK) and sequences["group"].tolist() == TASK.groups
    assert sequences["prompt_tokens"].tolist() == [len(ids) for ids in model.tokenizer(TASK.prompts)["input_ids"]]
    assert len(trace) == len(tokens) and tokens.index.tolist() == list(range(len(tokens)))
    for (_, rows), row in zip(tokens.groupby("sequence"), sequences.itertuples()):
        assert rows["position"].tolist() == list(range(len(rows)))
        body = rows[~rows["is_eos"]]
        assert row.length == len(body)
        assert "".join(body["text"]) == row.output == model.tokenizer.decode(body["token_id"])
        assert all(row.output[s:e] == t for s, e, t in zip(body["start"], body["end"], body["text"]))
        assert row.truncated == (name != "bert" and not rows["is_eos"].any())
        assert set(rows["truncated"]) == {row.truncated} and set(rows["group"]) == {row.group}
    special = set(model.tokenizer.all_special_ids)
    read = sum(model.tokenizer(TASK.prompts)["input_ids"], []) if name == "bert" else tokens["token_id"]
    assert tokens["is_special"].tolist() == [t in special for t in read]
    counted = ~tokens["is_special"] if name == "bert" else ~tokens["is_eos"]
    np.testing.assert_array_equal(trace.statistic_rows(), counted)


def test_ends_are_marked(model_of, tmp_path, eos):
    """A row that stops at an end token keeps that token, marked, with an empty place at the end of the text."""
    model = model_of("llama")
    free = make(model, tmp_path / "free").tokens
    end = int(free[(free["sequence"] == 0) & (free["position"] == 2)]["token_id"].iloc[0])
    eos(model, {end})
    trace = make(model, tmp_path / "ends")
    rows = trace.tokens[trace.tokens["sequence"] == 0]
    assert rows["token_id"].iloc[-1] == end and rows["is_eos"].tolist() == [False] * (len(rows) - 1) + [True]
    assert not trace.sequences["truncated"][0] and trace.sequences["length"][0] == len(rows) - 1
    last = rows.iloc[-1]
    assert last["start"] == last["end"] == len(trace.sequences["output"][0])
    assert trace.sequences["truncated"].sum() == trace.sequences["length"].eq(STEPS).sum() > 0


# Texts of tokens


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Words that begin with a mark for their space, and bytes for what no word holds, as Llama's first tokenizer."""
    words = ["▁", "▁the", "▁dog", "s", "é", "▁日", "本", ".", "▁▁", "\ufffd"]
    inner = Tokenizer(models.BPE({name: i for i, name in enumerate([*BYTES, *words])}, [], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@cache
def tokenizer_of(name: str):
    """A tokenizer of each kind of decoder: bytes; words with a mark for their space; these and bytes; word pieces."""
    if name in ("causal", "seq2seq", "masked"):
        return tokenizer_for(name)
    return sentencepiece_like() if name == "sentencepiece-like" else AutoTokenizer.from_pretrained(path_of(name))


NAMES = ("causal", "seq2seq", "masked", "sentencepiece-like", "pocket-llama", "pocket-t5", "pocket-bert")


def quadratic(tokenizer, ids):
    """Ends of the tokens' texts by decoding every beginning as a whole."""
    whole, ends, at = tokenizer.decode(ids, clean_up_tokenization_spaces=False) if ids else "", [], 0
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:n], clean_up_tokenization_spaces=False)
        at = len(whole) if n == len(ids) else max(at, min(len(text.rstrip("\ufffd")), len(whole)))
        ends.append(at)
    return ends


@pytest.mark.parametrize("name, window", [*zip(NAMES, [1, 2, 5, 1, 2, 5, 1])])
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

    @settings(max_examples=150, deadline=None)
    @given(st.one_of(kinds))
    def check(ids):
        texts, starts, ends, whole = token_texts(tokenizer, ids)
        assert ends == quadratic(tokenizer, ids) and [whole[s:e] for s, e in zip(starts, ends)] == texts
        assert "".join(texts) == whole == (tokenizer.decode(ids, clean_up_tokenization_spaces=False) if ids else "")

    check()


def test_long_outputs_are_decoded_in_windows(monkeypatch):
    """Each token costs the same, however long the output is."""
    asked = []
    ids = TOKENIZER("the small dog 🐯 " * 60)["input_ids"]

    class Counting:
        def decode(self, part, **options):
            asked.append(len(part))
            return TOKENIZER.decode(part, **options)

    assert token_texts(Counting(), ids)[2] == quadratic(TOKENIZER, ids)
    assert sorted(asked)[-2] < 3 * columns.WINDOW < max(asked) == len(ids) > 500


def test_texts_of_an_emoji():
    """Four byte tokens make one character: the first three are empty, the last one holds it."""
    ids = [TOKENIZER.convert_tokens_to_ids(t) for t in ("a", "ð", "Ł", "Ĳ", "¯", "b")]  # U+1F42F in bytes
    texts, starts, ends, whole = token_texts(TOKENIZER, ids)
    assert whole == "a🐯b" and texts == ["a", "", "", "", "🐯", "b"]
    assert (starts, ends) == ([0, 1, 1, 1, 1, 2], [1, 1, 1, 1, 2, 3])
