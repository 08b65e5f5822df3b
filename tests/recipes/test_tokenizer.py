"""The shipped models' tokenizer: every text comes back, and no piece mixes letters with punctuation."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eelib.tasks.text_kinds import question_prompt, summarization_prompt, translation_prompt
from recipes.tokenizer import END, FIXED_PARTS, PAD, train_tokenizer

LINES = [
    "Der Hund, der bellt, beisst nicht!",
    "The dog (that barks) doesn't bite.",
    "Wo? Dort: 12,345 Bücher – «ja».",
    "l'été à la plage; c'est-à-dire demain",
    "e-mail: a.b@c.de",
] * 4
TOKENIZER = train_tokenizer(LINES, 420, 512)
TEXTS = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="aé ,.'-–1\t\n😀", max_size=40),
    st.lists(st.sampled_from([*FIXED_PARTS, "<0x41>", "a", " ", "<|"]), max_size=6).map("".join),
)


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_every_text_comes_back(text):
    assert TOKENIZER.decode(ids_of(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " a",
        "  two  spaces ",
        "\n\n\ttab\r\n",
        "<0x41>",
        "😀👩‍👩‍👧🏽",
        "\0\x01\x7f",
        "e\u0301 é",
        "١٢٣",
        "日本語テキスト",
        "\ufffd",
        "a\u2028b",
        "##x ▁y Ġz",
    ],
)
def test_awkward_texts_come_back(text):
    assert TOKENIZER.decode(ids_of(text), clean_up_tokenization_spaces=False) == text
    assert TOKENIZER.unk_token_id is None


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abcdeö,.!?'-()12 \n", max_size=40))
def test_no_piece_mixes_letters_and_punctuation(text):
    for piece in (TOKENIZER.decode([i]) for i in ids_of(text)):
        assert not (re.search(r"[^\W\d_]", piece) and re.search(r"[^\w\s]", piece)), piece
        assert not (re.search(r"\d", piece) and re.search(r"[^\d\s]", piece)), piece


def test_vocabulary_holds_no_mixed_entry():
    """Whatever was learned: outside the prompt's fixed parts no entry has both letters and punctuation."""
    for token, i in TOKENIZER.get_vocab().items():
        text = TOKENIZER.decode([i])
        if token not in (PAD, END, *FIXED_PARTS):
            assert not (re.search(r"[^\W\d_]", text) and re.search(r"[^\w\s\ufffd]", text)), text


def test_fixed_parts_are_one_entry_each():
    assert all(len(ids_of(part)) == 1 for part in FIXED_PARTS)
    for prompt in (translation_prompt("Hund", "de", "en"), summarization_prompt("dog"), question_prompt("a", "b?")):
        assert TOKENIZER.decode(ids_of(prompt), skip_special_tokens=True) == prompt


def test_size_and_saving(tmp_path):
    assert len(TOKENIZER) <= 420 and TOKENIZER.model_max_length == 512
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token) == (END, PAD)
    assert TOKENIZER("a")["input_ids"] == ids_of("a")  # adds nothing around a prompt
    from transformers import AutoTokenizer

    TOKENIZER.save_pretrained(tmp_path)
    text = "Der Hund – 😀 «12»"
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == ids_of(text)
