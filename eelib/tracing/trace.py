"""A finished trace on disk, as every analysis reads it."""

from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from eelib.common.errors import InputError
from eelib.lens.readout import top_k
from eelib.lens.similarity import PAIRS
from eelib.tracing.shards import READOUTS, TOKEN_COLUMNS, intact, load_manifest, load_times


class Trace:
    """A finished trace on disk. Rows are generated tokens, in order of sequence, then position.

    ValueError, one line, for a folder that holds no finished trace and for a file that is not as it was written.

    `trace["entropy"]` is numpy [tokens, L+1]; column l is layer l, 0 the embeddings. Names: `trace.READOUTS`.
    """

    READOUTS = READOUTS

    def __init__(self, place: str | Path):
        self.place = Path(place)
        manifest = load_manifest(self.place)
        if not manifest or not manifest.get("finished"):
            state = "is half made" if manifest else "holds no manifest that can be read"
            raise InputError(f"{self.place} {state}; ask for the trace with eelib.trace, which makes what is missing")
        self.manifest = manifest | load_times(self.place)
        self.layers: int = self.manifest["layers"]
        self.model_name: str = self.manifest["model"]
        self.task_name: str = self.manifest["task"]
        self._columns: dict[str, np.ndarray] = {}
        self._sound: set[str] = set()

    def _table(self, part: str, columns: list[str] | None = None) -> pa.Table:
        return pa.concat_tables(self._file(f"{part}-{i:05d}", columns) for i in range(len(self.manifest["plan"])))

    def _file(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """One Parquet file; its checksum is compared the first time that this object reads it."""
        if name not in self._sound:
            if not intact(self.place, self.manifest, name):
                raise InputError(
                    f"{self.place / name}.parquet is missing or was altered; ask for the trace with "
                    "eelib.trace, which makes it anew"
                )
            self._sound.add(name)
        return pq.read_table(self.place / f"{name}.parquet", columns=columns)

    @cached_property
    def _order(self) -> np.ndarray:
        keys = self._table("tokens", ["sequence", "position"])
        return np.lexsort((keys["position"].to_numpy(), keys["sequence"].to_numpy()))

    @cached_property
    def tokens(self) -> pd.DataFrame:
        """One row per generated token, with the columns `TOKEN_COLUMNS`; start and end are offsets in the output."""
        names = list(TOKEN_COLUMNS)
        return self._table("tokens", names).to_pandas().iloc[self._order].reset_index(drop=True)

    @cached_property
    def sequences(self) -> pd.DataFrame:
        """One row per sequence: sequence, group, prompt, source, reference, output, length, truncated, prompt_tokens.

        `length` counts tokens without the end token.
        """
        return self._table("sequences").to_pandas().sort_values("sequence").reset_index(drop=True)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in READOUTS:
            raise KeyError(f"readout {name!r} is not kept; allowed: {', '.join(READOUTS)}")
        if name not in self._columns:
            column = self._table("tokens", [name])[name].combine_chunks()
            self._columns[name] = self._shape(name, column)[self._order]
        return self._columns[name]

    def _shape(self, name: str, column: pa.Array, sites: int | None = None) -> np.ndarray:
        flat = column.flatten().to_numpy(zero_copy_only=False)
        sites = self.layers + 1 if sites is None else sites
        k = top_k(self.manifest["vocabulary"])
        return flat.reshape(len(column), sites, k) if name.startswith("topk") else flat.reshape(len(column), sites)

    def __len__(self) -> int:
        return len(self.tokens)

    def statistic_rows(self) -> np.ndarray:
        """Boolean [tokens]: rows that statistics use: no end tokens, and of a masked model's text no special ones."""
        framed = self.tokens["is_special"].to_numpy() & (self.manifest["architecture"] == "masked")
        return ~self.tokens["is_eos"].to_numpy() & ~framed

    def exit_layer(self, definition: str) -> np.ndarray:
        """int [tokens], 1..L. "first": smallest l >= 1 whose top-1 is the emitted token (P, §4); "stable": smallest l
        from which the top-1 never changes again (the saturation event, P §2 after Geva et al. 2020)."""
        from eelib.tracing.exit_layers import exit_layer

        return exit_layer(self["top1"], self.tokens["token_id"].to_numpy(), definition)

    @cached_property
    def sites(self) -> "Sites":
        """Sub-layer readouts; ask for them with `trace(..., sites=True)`."""
        return Sites(self)

    @cached_property
    def pairs(self) -> dict[str, np.ndarray]:
        """Similarities [tokens, L+1, L+1] of layers by name, and "row" into `tokens`; `trace(..., pairs=True)`."""
        table = extra_table(self, "pairs")
        size = self.layers + 1
        found = {n: table[n].combine_chunks().flatten().to_numpy().reshape(-1, size, size) for n in PAIRS}
        return found | {"row": table["row"].to_numpy()}


def extra_table(made: Trace, kind: str) -> pa.Table:
    """The largest sites or pairs table of a trace; ValueError where none was made."""
    names = [n for n in made.manifest["files"] if n.startswith(f"{kind}-")]
    if not names:
        raise InputError(f"this trace has no {kind}; ask for them with eelib.trace(..., {kind}=True)")
    return made._file(max(names, key=lambda n: int(n.split("-")[1])))


class Sites:
    """Readouts of sub-layers. `sites["probability"]` is numpy [rows, L, S], S in the order of `names`.

    `rows` index the trace's tokens.
    """

    READOUTS = ("top1", "probability", "entropy", "final_rank", "final_probability", "topk_ids", "topk_probability")

    def __init__(self, made: Trace):
        self._table, self._trace = extra_table(made, "sites"), made
        order = ("attention", "after_attention", "cross_attention", "feed_forward", "block")
        self.names = tuple(n for n in order if f"{n}/top1" in self._table.column_names)
        self.rows = self._table["row"].to_numpy()
        self.tokens = made.tokens.iloc[self.rows].reset_index(drop=True)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.READOUTS:
            raise KeyError(f"site readout {name!r} is not kept; allowed: {', '.join(self.READOUTS)}")
        made = self._trace
        parts = [made._shape(name, self._table[f"{site}/{name}"].combine_chunks(), made.layers) for site in self.names]
        return np.stack(parts, axis=2)
