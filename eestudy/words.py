"""What kind of piece a token id is, known from the vocabulary alone, so that a gate needs no text while decoding."""

import hashlib
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

CLASSES = ("none", "word start", "continuation", "punctuation", "digits", "special")
STARTS = ("\u2581", "\u0120", " ")  # what SentencePiece and byte-level BPE write for the space before a word
INSIDE = "##"  # what WordPiece writes inside a word


class PieceTable:
    """The class of each id of a vocabulary. Two tables of the same classes are the same, and print the same."""

    def __init__(self, classes: Tensor):
        self.classes = classes  # uint8 [V], indices of CLASSES

    @cached_property
    def hash(self) -> str:
        """Of the classes."""
        return hashlib.sha256(self.classes.numpy().tobytes()).hexdigest()[:12]

    def of(self, ids: Tensor) -> Tensor:
        """Classes int64 of token ids [n]; 0 where there is none (-1)."""
        table = self.classes.to(ids.device)
        return torch.where(ids < 0, 0, table[ids.clamp(min=0)].long())

    def __repr__(self) -> str:
        return f"PieceTable({self.hash})"

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, PieceTable) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)


def piece_table(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> PieceTable:
    """The classes of ids 0..vocab_size-1; ids that the tokenizer does not know are special."""
    known = list(range(min(vocab_size, len(tokenizer))))
    names, special = tokenizer.convert_ids_to_tokens(known), set(tokenizer.all_special_ids)
    texts = tokenizer.batch_decode([[token] for token in known], clean_up_tokenization_spaces=False)
    pieces = any(name and name.startswith(STARTS) for name in names)
    found = torch.full((vocab_size,), CLASSES.index("special"), dtype=torch.uint8)
    for token, (name, text) in enumerate(zip(names, texts)):
        if token not in special and name:
            found[token] = CLASSES.index(class_of(name, text, pieces))
    return PieceTable(found)


def class_of(name: str, text: str, marks_starts: bool) -> str:
    """The class of a vocabulary entry.

    Args:
        name: its spelling in the vocabulary, where a byte that is no letter may be spelled by one.
        text: what it decodes to.
        marks_starts: words begin with a sign for the space.
    """
    starts = name.startswith(STARTS) if marks_starts else not name.startswith(INSIDE)
    text = text.strip().removeprefix(INSIDE)
    if text and text.isdigit():
        return "digits"
    if not any(character.isalpha() for character in text):
        return "punctuation"
    return "word start" if starts else "continuation"
