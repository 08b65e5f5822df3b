"""The text of an output, token by token."""

from hypothesis import given, settings
from hypothesis import strategies as st

from checks.tiny_texts import tokenizer_for
from eelib.tracing.make import pieces

TOKENIZER = tokenizer_for("causal")


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.lists(st.integers(4, len(TOKENIZER) - 1), max_size=12),
        st.text(max_size=8).map(lambda text: TOKENIZER(text)["input_ids"]),
    )
)
def test_pieces(ids):
    """Whatever was generated, broken characters included: the pieces tile the decoded text."""
    texts, starts, ends, whole = pieces(TOKENIZER, ids)
    assert whole == TOKENIZER.decode(ids) == "".join(texts) and len(texts) == len(ids)
    assert [whole[s:e] for s, e in zip(starts, ends)] == texts
    assert all(0 <= s <= e <= len(whole) for s, e in zip(starts, ends))


def test_pieces_of_an_emoji():
    """Four byte tokens make one character: the first three are empty, the last one holds it."""
    ids = [TOKENIZER.convert_tokens_to_ids(t) for t in ("a", "ð", "Ł", "Ĳ", "¯", "b")]  # U+1F42F in bytes
    texts, starts, ends, whole = pieces(TOKENIZER, ids)
    assert whole == "a🐯b" and texts == ["a", "", "", "", "🐯", "b"]
    assert (starts, ends) == ([0, 1, 1, 1, 1, 2], [1, 1, 1, 1, 2, 3])
