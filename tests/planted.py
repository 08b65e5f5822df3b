"""Traces with made-up readouts, whose outputs are their references: data that force a notebook's verdict either way.

`plant` makes a trace as a notebook will ask for it, so that folder, identity and columns are the real ones, and then
writes other outputs and readouts in its place. A notebook finds it finished, and its task above the baseline.
"""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import torch
import transformers as hf

import eelib
from checks.tiny_texts import WINDOW, tokenizer_for
from eelib.models.model import Model
from eelib.tasks.classification import named
from eelib.tasks.task import Task
from eelib.tracing.columns import token_texts
from eelib.tracing.store import add_file, load_manifest, save_manifest, to_bytes
from eelib.tracing.trace import Trace

Columns = dict[str, np.ndarray]
STEPS = 48  # max_new_tokens of the planted traces; no reference of `pairs` is as long
NOUNS = ["dog", "cat", "hill", "book", "test", "word", "tree", "house", "sun", "road"]
PLACES = ["river", "forest", "city", "garden", "kitchen", "station"]


def pairs(count: int) -> list[dict]:
    """Rows of a translation task whose references all differ; their source holds no more than the row's number."""
    filled = [(NOUNS[i % 10], NOUNS[i // 10 % 10], PLACES[i % 6], i) for i in range(count)]
    return sentences("The {} saw a {} near the {} {}.".format(*words) for words in filled)


def exits(layers: np.ndarray, depth: int) -> np.ndarray:
    """Agreement [tokens, L+1] of tokens with these exit layers, "first" and "stable" alike: int [tokens], 1..L."""
    return np.arange(depth + 1) >= np.asarray(layers)[:, None]


def plant(
    model: Model,
    task: Task,
    folder: Path,
    agrees: Callable[[pd.DataFrame], np.ndarray],
    max_new_tokens: int,
    readouts: Callable[[pd.DataFrame], Columns] = lambda tokens: {},
    **extras: int,
) -> Trace:
    """A finished trace under `folder` whose outputs are the first references.

    agrees: from the tokens' table, whether the top-1 of each layer is the emitted token, bool [tokens, L+1]. The other
    readouts follow it, but for those that `readouts` gives by name, [tokens, L+1]. `extras` (sites, pairs) are what
    `trace` takes; they are read from the model for the planted outputs, and `rewrite` may change them.
    """
    asked = {"max_new_tokens": max_new_tokens, "folder": folder, "progress": False}
    with mock.patch.object(Model, "eos_ids", set(range(model.vocab_size))):  # an output ends with its first token
        place = eelib.trace(model, task, **asked).folder
    manifest = load_manifest(place)
    for index, rows in enumerate(manifest["plan"]):
        tokens, sequences = planted_tables(model, task, rows)
        agreement = agrees(tokens)
        assert agreement.shape == (len(tokens), model.layers + 1) and agreement[:, -1].all()
        columns = {name: tokens[name].to_numpy() for name in tokens}
        columns |= consistent(tokens["token_id"].to_numpy(), agreement, model.vocab_size) | readouts(tokens)
        replace_file(place, manifest, f"tokens-{index:05d}", columns)
        replace_file(place, manifest, f"sequences-{index:05d}", {k: np.array(sequences[k]) for k in sequences})
        (place / f"states-{index:05d}.parquet").unlink(missing_ok=True)  # they are of other tokens
        manifest["counts"][str(index)] = {"rows": len(tokens), "mismatches": 0}
    manifest |= {"rows": sum(count["rows"] for count in manifest["counts"].values()), "mismatches": 0}
    save_manifest(place, manifest)
    return eelib.trace(model, task, **asked, **extras)


def rewrite(made: Trace, name: str, change: Callable[[Columns], Columns]) -> None:
    """Change columns of one file of a trace, such as sites-4; wide ones are [rows, values], flattened in each row."""
    manifest = load_manifest(made.folder)
    table = pq.read_table(made.folder / f"{name}.parquet")
    columns = {key: np.array(table[key].to_pylist()) for key in table.column_names}
    replace_file(made.folder, manifest, name, columns | change(columns))
    save_manifest(made.folder, manifest)


def replace_file(place: Path, manifest: dict, name: str, columns: Columns) -> None:
    """Write a file anew with the columns and types that the real one has; none of them may be missing."""
    real = pq.read_schema(place / f"{name}.parquet")
    frame = {}
    for field in real:
        kind = getattr(field.type, "value_type", field.type).to_pandas_dtype()
        frame[field.name] = np.asarray(columns[field.name]) if kind is np.object_ else columns[field.name].astype(kind)
    add_file(place, manifest, name, to_bytes(frame))


def planted_tables(model: Model, task: Task, rows: list[int]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The tables of tokens and of sequences, as if the model had given the references, and then its end token."""
    tokens, sequences = [], []
    for i in rows:
        wanted = task.references[i][0]
        ids, texts = as_output(model, task, wanted)
        ends = np.cumsum([len(text) for text in texts])
        about = {"sequence": i, "group": task.groups[i], "truncated": False}
        for position, (token, text, end) in enumerate(zip(ids, texts, ends)):
            spot = {"position": position, "token_id": token, "text": text, "start": end - len(text), "end": end}
            tokens.append(about | spot | {"is_eos": False, "is_special": False})
        if model.kind != "classifier":
            eos = min(model.eos_ids)
            spot = {"position": len(ids), "token_id": eos, "text": model.tokenizer.decode([eos])}
            at = {"start": len(wanted), "end": len(wanted), "is_eos": True, "is_special": True}
            tokens.append(about | spot | at)
        texts_of = {"prompt": task.prompts[i], "source": task.sources[i], "reference": wanted, "output": "".join(texts)}
        prompt = model.encode([task.prompts[i]], task.chat, [task.seconds[i]] if task.seconds else [])[0]
        sequences.append(about | texts_of | {"length": len(ids), "prompt_tokens": len(prompt)})
    return pd.DataFrame(tokens), pd.DataFrame(sequences)


def as_output(model: Model, task: Task, wanted: str) -> tuple[list[int], list[str]]:
    """Token ids of a reference, and the text of each; of a classifier, its own name for the label."""
    if model.kind == "classifier":
        number = next(n for n, label in enumerate(model.labels) if named(label, task.labels) == wanted)
        return [number], [model.labels[number]]
    ids = model.tokenizer(text_target=wanted, add_special_tokens=False)["input_ids"]
    texts, _, _, whole = token_texts(model.tokenizer, ids)
    assert whole == wanted and all(texts), "references of a planted trace must be cut into whole characters"
    return ids, texts


def consistent(token_ids: np.ndarray, agreement: np.ndarray, vocabulary: int, k: int = 10) -> Columns:
    """Readouts [tokens, L+1] that agree with each other: the emitted token is first where it should be, else second.

    The first of a list has half of the probability, each further one half of what is left. The cosine to the last state
    rises with every layer.
    """
    shape, depth = agreement.shape, agreement.shape[1] - 1
    k = min(k, vocabulary)
    right, wrong = np.array([ranked(token, vocabulary, k) for token in token_ids.tolist()]).swapaxes(0, 1)
    ids = np.where(agreement[..., None], right[:, None], wrong[:, None])
    probability = np.broadcast_to(0.5 ** np.arange(1, k + 1), (*shape, k))
    final = np.where(agreement, 0.5, 0.25)
    share = np.broadcast_to(np.arange(depth + 1) / depth, shape)
    return {
        "topk_ids": ids.reshape(len(ids), -1),
        "topk_probability": probability.reshape(len(ids), -1),
        "entropy": np.where(agreement, 1.0, 2.0),
        "final_rank": np.where(agreement, 1, 2),
        "final_probability": final,
        "reference_rank": np.where(agreement, 1.0, 2.0),
        "reference_probability": final,
        "cosine": share,
        "js_final": np.log(2) * (1 - share),
        "kl_final": 1 - share,
    }


def ranked(emitted: int, vocabulary: int, k: int) -> tuple[list[int], list[int]]:
    """Lists of k ids: the emitted one first; and second, after id 0, which no text has, or a classifier's other label.

    The first list does without that id unless a classifier has too few labels.
    """
    instead = int(emitted == 0)
    rest = [i % vocabulary for i in range(emitted + 1, emitted + min(k + 1, vocabulary)) if i % vocabulary != instead]
    return [emitted, *rest, instead][:k], [instead, emitted, *rest][:k]


def deep_model(folder: Path, layers: int = 10, seed: int = 0, window: int = WINDOW, last_place: float = 0.0) -> Model:
    """A checkpoint as tiny as may be, of so many blocks; `last_place` is added to the weights of its last position."""
    tokenizer = tokenizer_for("causal")
    tokenizer.model_max_length = window
    torch.manual_seed(seed)
    size = {"n_embd": 16, "n_layer": layers, "n_head": 2, "n_positions": window, "vocab_size": len(tokenizer)}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    network = hf.GPT2LMHeadModel(hf.GPT2Config(**size, **ids))
    with torch.no_grad():
        network.transformer.wpe.weight[-1] += last_place
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return eelib.load_model(str(folder), device="cpu")


def varied(tokens, layers, other=None):
    """Exit layers, but `other` (None: of three the other end) for one token of every seventh output: groups that are
    all alike show nothing.
    """
    chosen = (tokens["sequence"] % 7 == 0) & (tokens["position"] == 1)
    return np.where(chosen, 4 - layers if other is None else other, layers)


def asked(folder, model, tasks):
    """Parameters of a page whose texts, traces and results lie in `folder`."""
    kept = {"runs_folder": str(folder / "runs"), "results_folder": str(folder / "results")}
    return kept | {"model": str(model), "tasks": tasks, "limit": 0, "max_new_tokens": STEPS, "device": "cpu"}


def write(path, rows):
    """A JSON Lines file, gzipped by its name; a row that is a text is a line as it stands."""
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def write_task(path, rows):
    """A task of these rows."""
    return eelib.load_task(str(write(path, rows)))


def sentences(references):
    """Rows of a translation with these references."""
    return [{"source": f"Satz {i}.", "references": [text]} for i, text in enumerate(references)]
