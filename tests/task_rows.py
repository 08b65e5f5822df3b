"""Rows of tasks, and files of them."""

import gzip
import json

PAIR = {"source": "Der Hund schläft.", "references": ["The dog sleeps.", "The dog is asleep."]}
QUESTION = {"context": "Ann has a red kite.", "question": "What has Ann?", "answers": ["a kite", "kite"]}


def write(path, rows):
    """A JSON Lines file, gzipped by its name; a row that is a text is a line as it stands."""
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path
