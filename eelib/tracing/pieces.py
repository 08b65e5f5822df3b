"""The text of an output, token by token."""

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

WINDOW = 16  # least tokens between two places from which decoding may start
BROKEN = "\ufffd"  # what decoders write for bytes that are no whole character


def pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> tuple[list[str], list[int], list[int], str]:
    """Texts and character offsets of tokens, by decoding ever longer beginnings of the generated ids; and the whole.

    A token that completes no character gets an empty text at the place where the character will stand.
    """

    def decode(part: list[int]) -> str:
        return str(tokenizer.decode(part, clean_up_tokenization_spaces=False)) if part else ""

    whole = decode(ids)
    ends, told = ends_in_windows(decode, ids, WINDOW)
    if told != whole:  # this tokenizer's text of a beginning depends on what comes much later
        ends, _ = ends_in_windows(decode, ids, len(ids))
    starts, at = [], 0
    for n, end in enumerate(ends):
        starts.append(at)
        ends[n] = at = max(at, min(end, len(whole))) if n + 1 < len(ids) else len(whole)
    return [whole[start:end] for start, end in zip(starts, ends)], starts, ends, whole


def ends_in_windows(decode: Callable[[list[int]], str], ids: list[int], window: int) -> tuple[list[int], str]:
    """Lengths of the decoded beginnings ids[:n], n = 1.., without broken characters at their end; and all the text.

    A beginning is decoded from `origin` only: ids[origin:known] are at least `window` tokens whose text is known to end
    at `told`, so that what a decoder does at its first token (such as dropping a space) is over at `known`. It moves on
    where a character is complete.
    """
    ends, told, text = [], "", ""
    origin = known = 0
    overlap = ""  # the text of ids[origin:known]
    for n in range(1, len(ids) + 1):
        text = decode(ids[origin:n])
        ends.append(len(told) - len(overlap) + len(text.rstrip(BROKEN)))
        if n - known >= window and n < len(ids) and text.startswith(overlap) and not text.endswith(BROKEN):
            told += text[len(overlap) :]
            origin, known = known, n
            overlap = decode(ids[origin:known])
    return ends, told + text[len(overlap) :]
