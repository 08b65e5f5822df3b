"""Hand-made traces for the tests of words and of their exit layers."""

from types import SimpleNamespace

import pandas as pd


def make_trace(*outputs, truncated=(), groups=None, special_ids=(), eos=True):
    """A trace whose sequence i has the tokens outputs[i]; a str emits itself, None nothing (part of a character)."""
    rows, sequences = [], []
    for sequence, pieces in enumerate(outputs):
        group = groups[sequence] if groups else sequence
        cut, at = sequence in truncated, 0
        for position, piece in enumerate([*pieces, *([""] if eos and not cut else [])]):
            text = piece or ""
            is_eos = eos and not cut and position == len(pieces)
            rows.append(
                dict(
                    sequence=sequence,
                    position=position,
                    token_id=2 if is_eos else 99,
                    text=text,
                    start=at,
                    end=at + len(text),
                    is_eos=is_eos,
                    truncated=cut,
                    group=group,
                )
            )
            at += len(text)
        sequences.append(dict(sequence=sequence, group=group, output="".join(p or "" for p in pieces)))
    return SimpleNamespace(
        tokens=pd.DataFrame(rows), sequences=pd.DataFrame(sequences), manifest={"special_ids": list(special_ids)}
    )
