"""What a decoding returns: tokens, sequences, and where the time went."""

from dataclasses import asdict, dataclass, fields

import pandas as pd

from eelib.exits.decoding.row import Row, Token
from eelib.models.model import Model
from eelib.tracing.pieces import pieces

COLUMNS = ("sequence", "position", "text", *(field.name for field in fields(Token)))


@dataclass
class Generated:
    """`tokens`: a row per token, sequence and position from 0, the fields of `Token`, and its text. `sequences`: a row
    per prompt: output (as in a trace, without its end token), length in tokens, truncated (no end token), and of
    verified decoding the deep passes, tokens drafted and accepted. `times`: seconds in blocks, head, gate, cache and
    Python.
    """

    tokens: pd.DataFrame
    sequences: pd.DataFrame
    times: dict[str, float]


def described(model: Model, rows: list[Row], times: dict[str, float]) -> Generated:
    """The tables of rows, which are numbered as their prompts."""
    tokens, sequences = [], []
    for row in sorted(rows, key=lambda row: row.number):
        ids = [token.token_id for token in row.tokens]
        ended = ids[-1] in model.eos_ids
        texts, _, _, output = pieces(model.tokenizer, ids[:-1] if ended else ids)
        texts += [str(model.tokenizer.decode(ids[-1:]))] * ended
        for position, (token, text) in enumerate(zip(row.tokens, texts)):
            tokens.append({"sequence": row.number, "position": position, "text": text, **asdict(token)})
        sequences.append(
            {
                "sequence": row.number,
                "output": output,
                "length": len(ids),
                "truncated": not ended,
                "deep_passes": row.deep_runs,
                "drafted": row.drafted,
                "accepted": row.accepted,
            }
        )
    return Generated(pd.DataFrame(tokens, columns=list(COLUMNS)), pd.DataFrame(sequences), times)
