"""Read a finished trace: tokens, sequences, readouts and exit layers."""

from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from eelib.common.errors import InputError
from eelib.lens.readout import FROM_TOP_K, TOP_K, from_top_k, top_k
from eelib.lens.similarity import PAIRS
from eelib.tracing.columns import READOUTS, STORED_OF_SITES
from eelib.tracing.store import intact, load_manifest, load_times


class Trace:
    """A finished trace on disk. Rows are generated tokens, in order of sequence, then position; for given texts, all
    tokens but the first of each.

    InputError, one line, for a folder that holds no finished trace and for a file that is not as it was written;
    StorageError for one that can't be read.

    `trace["entropy"]` is numpy [tokens, L+1]; column l is layer l, 0 the embeddings. Names: entropy, js_final and
    kl_final, in nats; probability, margin, final_probability and reference_probability, from 0 to 1; final_rank and
    reference_rank (1 is the best); top1 (token ids); cosine; topk_ids and topk_probability, [tokens, L+1, 10], or fewer
    for a smaller vocabulary. Another name is a KeyError.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        manifest = load_manifest(self.folder)
        if not manifest.get("finished"):
            state = "is half made" if manifest else "holds no manifest that can be read"
            raise InputError(f"{self.folder} {state}; ask for the trace with eelib.trace, which makes what is missing")
        self.manifest = manifest | load_times(self.folder)
        self.layers: int = self.manifest["layers"]
        self.model_name: str = self.manifest["model"]
        self.task_name: str = self.manifest["task"]
        self.given: bool = self.manifest["settings"].get("given", False)
        self._readouts: dict[str, np.ndarray] = {}
        self._sound: set[str] = set()

    def _table(self, part: str, columns: list[str] | None = None) -> pa.Table:
        return pa.concat_tables(self.file(f"{part}-{i:05d}", columns) for i in range(len(self.manifest["plan"])))

    def file(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """One Parquet file, by its name without suffix; InputError if it is missing or was altered."""
        if name not in self._sound:
            if not intact(self.folder, self.manifest, name):
                raise InputError(
                    f"{self.folder / name}.parquet is missing or was altered; ask for the trace with "
                    "eelib.trace, which makes it anew"
                )
            self._sound.add(name)
        return pq.read_table(self.folder / f"{name}.parquet", columns=columns)

    @cached_property
    def _order(self) -> np.ndarray:
        sequences, positions = self._table("tokens", ["sequence", "position"]).columns
        return np.lexsort((positions.to_numpy(), sequences.to_numpy()))

    @cached_property
    def tokens(self) -> pd.DataFrame:
        """One row per generated token, with sequence, position, token_id, text, start and end (offsets in the output),
        is_eos, is_special, truncated and group.

        The position of a token of a given text is the one before it, which has to predict it.
        """
        order = self._order  # files are checked before one is opened for its names
        names = [n for n in pq.read_schema(self.folder / "tokens-00000.parquet").names if n not in READOUTS]
        return self._table("tokens", names).to_pandas().iloc[order].reset_index(drop=True)

    @cached_property
    def sequences(self) -> pd.DataFrame:
        """One row per sequence, with sequence, group, prompt, source, reference, output, length, truncated and
        prompt_tokens.

        `length` counts tokens without the end token.
        """
        return self._table("sequences").to_pandas().sort_values("sequence").reset_index(drop=True)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in READOUTS:
            raise KeyError(f"readout {name!r} is not known; allowed: {', '.join(READOUTS)}")
        if name not in self._readouts:
            found = from_top_k(name, self._stored) if name in FROM_TOP_K else self._stored(name)
            self._readouts[name] = found[self._order]
        return self._readouts[name]

    @cached_property
    def states(self) -> np.ndarray:
        """The states [tokens, L+1, hidden_size], float32. InputError if the trace keeps none, or they were altered."""
        names = [f"states-{index:05d}" for index in range(len(self.manifest["plan"]))]
        if not all(intact(self.folder, self.manifest, name) for name in names):
            raise InputError(
                f"{self.folder} keeps no states, or they were altered; without this folder, eelib.trace makes the "
                "trace anew, with states if they take at most 256 MB"
            )
        self._sound.update(names)
        flat = self._table("states")["state"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return flat.reshape(len(self._order), self.layers + 1, -1)[self._order]

    def _stored(self, name: str) -> np.ndarray:
        """A readout as it lies in the shards, [tokens, L+1] or [tokens, L+1, k]."""
        return self._shaped(name, self._table("tokens", [name])[name], self.layers + 1)

    def _shaped(self, name: str, column: pa.ChunkedArray, states: int) -> np.ndarray:
        """A readout's column as numpy [rows, states]; of the top-k, [rows, states, k]."""
        flat = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
        width = (top_k(self.manifest["vocabulary"]),) if name in TOP_K else ()
        return flat.reshape(len(column), states, *width)

    def __len__(self) -> int:
        return len(self.tokens)

    def statistic_rows(self) -> np.ndarray:
        """Boolean [tokens], the rows that statistics use: not end tokens, nor special tokens of a masked model."""
        framed = self.tokens["is_special"].to_numpy() & (self.manifest["architecture"] == "masked")
        return ~self.tokens["is_eos"].to_numpy() & ~framed

    @property
    def final_ids(self) -> np.ndarray:
        """The target of exit layers, int [tokens]: the emitted token; for given texts, the last layer's top-1."""
        return self["top1"][:, -1] if self.given else self.tokens["token_id"].to_numpy()

    def exit_layer(self, definition: str) -> np.ndarray:
        """Exit layer of every token.

        Args:
            definition: "first": the smallest l >= 1 whose top-1 is the token of `final_ids` (P, section 4); "stable":
                the smallest l from which the top-1 never changes again (the saturation event of Geva et al. 2022; P,
                section 2).

        Returns:
            int [tokens], from 1 to L.

        Raises:
            InputError: another definition.
        """
        return exit_layer(self["top1"], self.final_ids, definition)

    @cached_property
    def sites(self) -> "Sites":
        """Sub-layer readouts; ask for them with `trace(..., sites=True)`."""
        return Sites(self)

    @cached_property
    def pairs(self) -> dict[str, np.ndarray]:
        """Similarities [n, L+1, L+1] of layers by name, and "row" [n], their rows in `tokens`; ask for them with
        `trace(..., pairs=True)`.
        """
        table = extra_table(self, "pairs")
        size = self.layers + 1
        found = {n: table[n].combine_chunks().flatten().to_numpy().reshape(-1, size, size) for n in PAIRS}
        return found | {"row": table["row"].to_numpy()}


PAIR_TOKENS = 4  # of each sequence at which layers are compared in pairs, which takes long


def extra_file(kind: str, count: int) -> str:
    """File name, without suffix, of the sites or pairs of `count` sequences."""
    return f"{kind}-{count}" + (f"-{PAIR_TOKENS}" if kind == "pairs" else "")


def extra_table(made: Trace, kind: str) -> pa.Table:
    """The largest unaltered sites or pairs table of a trace; InputError where there is none."""
    counts = [int(n.split("-")[1]) for n in made.manifest["files"] if n.startswith(f"{kind}-")]
    names = [extra_file(kind, count) for count in sorted(counts, reverse=True)]
    if not names:
        raise InputError(f"this trace has no {kind}; ask for them with eelib.trace(..., {kind}=True)")
    return made.file(next((name for name in names if intact(made.folder, made.manifest, name)), names[0]))


class Sites:
    """Readouts of sub-layers. `sites["probability"]` is numpy [rows, L, S], with the S sites in the order of `names`.

    The last site is the block's output, as the trace has it. `rows` are the row numbers of these tokens in the
    trace. Another name of a readout is a KeyError.
    """

    READOUTS = ("top1", "probability", *STORED_OF_SITES)

    def __init__(self, made: Trace):
        self._table, self._trace = extra_table(made, "sites"), made
        order = ("attention", "after_attention", "cross_attention", "feed_forward")
        self.names = (*(n for n in order if f"{n}/topk_ids" in self._table.column_names), "block")
        self.rows = self._table["row"].to_numpy()
        self.tokens = made.tokens.iloc[self.rows].reset_index(drop=True)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.READOUTS:
            raise KeyError(f"site readout {name!r} is not known; allowed: {', '.join(self.READOUTS)}")
        return from_top_k(name, self._stored) if name in FROM_TOP_K else self._stored(name)

    def _stored(self, name: str) -> np.ndarray:
        """A stored readout, [rows, L, S] or [rows, L, S, k]."""
        trace, columns = self._trace, [self._table[f"{site}/{name}"] for site in self.names[:-1]]
        found = [trace._shaped(name, column, trace.layers) for column in columns]
        return np.stack([*found, trace[name][self.rows, 1:]], axis=2)


def exit_layer(top1: np.ndarray, final: np.ndarray, definition: str) -> np.ndarray:
    """`Trace.exit_layer` of top-1 ids [tokens, L+1] and final ids [tokens]."""
    if definition not in ("first", "stable"):
        raise InputError(f"definition {definition!r} is not known; allowed: first, stable")
    agrees = top1[:, 1:] == final[:, None]
    agrees[:, -1] = True  # block L gave the token, also where rounding gave its readout another one
    if definition == "first":
        return agrees.argmax(axis=1) + 1
    from_the_end = np.logical_and.accumulate(agrees[:, ::-1], axis=1).sum(axis=1)
    return top1.shape[1] - from_the_end  # L + 1 less the layers that agree without a break up to L
