"""Decode a task once, read every layer, keep it as Parquet shards; resumable, one maker at a time."""

import hashlib
import json
import platform
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from .greedy import Decoded, decode, states_of
from .model import Model
from .readout import LOGITS_AT_ONCE, SCALARS, Readout, read, top_k
from .shards import add_file, intact, only_one, save_manifest, to_bytes
from .similarity import PAIRS, layer_pairs
from .tasks import Task

READOUTS = ("top1", *SCALARS, "topk_ids", "topk_probability")
TOKEN_COLUMNS = ("sequence", "position", "token_id", "text", "start", "end", "is_eos", "is_special",
                 "truncated", "group")
SHARD = 32  # sequences per shard, and the batch where none is given
CODE = ("trace.py", "greedy.py", "readout.py", "probe.py", "similarity.py", "model.py", "shards.py")
SUBSET = 24  # sequences read for sites or pairs where the caller says only True


def trace(model: Model, task: Task, max_new_tokens: int = 64, folder: str | Path = "runs",
          batch_size: int | None = None, sites: bool | int = False, pairs: bool | int = False, strict: bool = False,
          progress: bool = True) -> "Trace":
    """The trace of `task` under `model`: made if it does not exist, finished if it is half made, else returned.

    Greedy decoding up to `max_new_tokens`; every emitted token is read at layers 0..L. `sites` and `pairs` (True, or a
    number of sequences) add sub-layer readouts and layer-by-layer similarities for the first so many sequences.
    Prompts beyond the model's window are counted and skipped, or refused with `strict`. Raises ValueError, one line.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens} is not allowed; it must be at least 1")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size {batch_size} is not allowed; it must be at least 1")
    for kind, wanted in (("sites", sites), ("pairs", pairs)):
        if wanted < 0:
            raise ValueError(f"{kind} {wanted} is not allowed; it must be True, False or a number of sequences")
    settings = {"max_new_tokens": max_new_tokens, "dtype": model.dtype, "device": model.device.type}
    identity = {"model": model.name, "weights": model.hash, "task": task.name, "task_hash": task.hash,
                "settings": settings, "code": code_hash(), "torch": torch.__version__}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    place = Path(folder) / model.name / f"{task.name.replace('/', '.')}-{key}"
    maker = Maker(model, task, place, identity, batch_size or SHARD, strict, progress)
    with only_one(place):
        maker.make_outputs()
        for kind, wanted in (("sites", sites), ("pairs", pairs)):
            if wanted:
                maker.make_extra(kind, SUBSET if wanted is True else int(wanted))
    return Trace(place)


def code_hash() -> str:
    """Hash of the code that a trace's numbers depend on."""
    here = Path(__file__).parent
    return hashlib.sha256(b"".join((here / name).read_bytes() for name in CODE)).hexdigest()[:16]


@dataclass
class Maker:
    """Makes the shards of one trace; each is a pure function of the model, the task and its list of sequences."""

    model: Model
    task: Task
    place: Path
    identity: dict
    batch_size: int
    strict: bool
    progress: bool

    def make_outputs(self) -> None:
        """Decode and read whatever shards are missing or damaged, then seal the manifest."""
        manifest = self.plan()
        missing = [i for i in range(len(manifest["plan"])) if not all(
            intact(self.place, manifest, f"{part}-{i:05d}") for part in ("tokens", "sequences"))]
        if not missing and manifest.get("finished"):
            return
        began = time.monotonic()
        encoded = encode(self.model, self.task)
        for index in tqdm(missing, desc=f"{self.model.name} {self.task.name}", unit="batch", disable=not self.progress):
            self.make_shard(manifest, index, encoded)
        for key in ("rows", "mismatches"):
            manifest[key] = sum(counts[key] for counts in manifest["counts"].values())
        manifest["seconds"] = round(manifest.get("seconds", 0.0) + time.monotonic() - began, 1)
        manifest["finished"] = True
        save_manifest(self.place, manifest)

    def plan(self) -> dict:
        """The manifest: as found, or a new one with sequences sorted by prompt length and cut into shards."""
        path = self.place / "manifest.json"
        known = json.loads(path.read_text()) if path.exists() else None
        if known and not (self.strict and known["skipped"]):
            return known
        model, lengths = self.model, [len(ids) for ids in encode(self.model, self.task)]
        fits = [i for i, n in enumerate(lengths) if n < model.window]
        skipped = len(lengths) - len(fits)
        if not fits or (skipped and self.strict):
            raise ValueError(f"{self.task.name}: {skipped} of {len(lengths)} prompts do not fit {model.name}'s window "
                             f"of {model.window} tokens (longest: {max(lengths)})")
        order = sorted(fits, key=lambda i: (lengths[i], i))
        plan: list[list[int]] = []
        for i in order:
            same = model.pads or not plan or lengths[plan[-1][-1]] == lengths[i]
            if plan and same and len(plan[-1]) < self.batch_size:
                plan[-1].append(i)
            else:
                plan.append([i])
        manifest = {**self.identity, "layers": model.layers, "kind": self.task.kind, "architecture": model.kind,
                    "vocabulary": model.vocabulary,
                    "special_ids": sorted(set(map(int, model.tokenizer.all_special_ids))),
                    "prompts": len(lengths), "skipped": skipped, "plan": plan, "batch_size": self.batch_size,
                    "versions": versions(), "machine": platform.machine(), "date": time.strftime("%Y-%m-%d"),
                    "files": {}, "counts": {}}
        save_manifest(self.place, manifest)
        return manifest

    def make_shard(self, manifest: dict, index: int, encoded: list[list[int]]) -> None:
        """Decode one shard's sequences, read their states, write both tables, enter them in the manifest."""
        rows = manifest["plan"][index]
        decoded = self.decode([encoded[i] for i in rows])
        emitted = torch.tensor([t for ids in decoded.ids for t in ids])
        known = torch.tensor([t for i, ids in zip(rows, decoded.ids) for t in self.reference_ids(i, ids)])
        result = read(self.model.tail, decoded.states, emitted, known)
        mismatches = settle_last_layer(result, emitted, decoded.gap, self.model)
        manifest["counts"][str(index)] = {"rows": len(emitted), "mismatches": mismatches}
        tokens, sequences = self.tables(rows, decoded.ids, [encoded[i] for i in rows])
        tokens |= {name: result[name].numpy() for name in READOUTS}
        for name, frame in ((f"tokens-{index:05d}", tokens), (f"sequences-{index:05d}", sequences)):
            add_file(self.place, manifest, name, to_bytes(frame))
        save_manifest(self.place, manifest)

    def decode(self, prompts: list[list[int]]) -> Decoded:
        """Greedy decoding; when the device is out of memory the batch is halved and the work goes on."""
        limit = self.identity["settings"]["max_new_tokens"]
        if self.model.kind == "masked":
            states, _ = states_of(self.model, prompts, prompts)
            parts = states[:, -1].split(max(1, LOGITS_AT_ONCE // self.model.vocabulary))
            top, best = (torch.cat(column) for column in zip(*(self.model.tail(part).topk(2) for part in parts)))
            ids, start = [], 0
            for prompt in prompts:
                ids.append(best[start:start + len(prompt), 0].tolist())
                start += len(prompt)
            return Decoded(ids, states, (top[:, 0] - top[:, 1]).cpu())
        try:
            return decode(self.model, prompts, limit)
        except torch.OutOfMemoryError:
            if len(prompts) == 1:
                raise
        # Outside the handler: inside it, the traceback would still hold the failed batch's memory.
        torch.cuda.empty_cache()
        half = len(prompts) // 2
        print(f"out of memory: batch of {len(prompts)} halved")
        parts = [self.decode(prompts[:half]), self.decode(prompts[half:])]
        return Decoded(parts[0].ids + parts[1].ids, torch.cat([p.states for p in parts]),
                       torch.cat([p.gap for p in parts]))

    def reference_ids(self, sequence: int, ids: list[int]) -> list[int]:
        """The first reference's next token at each output position while the output is its beginning; then -1."""
        references = self.task.references[sequence]
        if not references or self.model.kind == "masked":
            return [-1] * len(ids)
        wanted = self.model.tokenizer(text_target=references[0], add_special_tokens=False)["input_ids"]
        wanted = wanted + sorted(self.model.eos_ids)[:1]
        agree = next((p for p, (a, b) in enumerate(zip(ids, wanted)) if a != b), min(len(ids), len(wanted)))
        return [wanted[p] if p <= agree and p < len(wanted) else -1 for p in range(len(ids))]

    def tables(self, rows: list[int], outputs: list[list[int]], prompts: list[list[int]]) -> tuple[dict, dict]:
        """The columns that describe tokens and sequences, without the readouts."""
        task, model = self.task, self.model
        special = set(model.tokenizer.all_special_ids)
        tokens: dict[str, list] = {k: [] for k in TOKEN_COLUMNS}
        sequences: dict[str, list] = {k: [] for k in ("sequence", "group", "prompt", "source", "reference", "output",
                                                      "length", "truncated", "prompt_tokens")}
        masked = model.kind == "masked"
        for i, ids, prompt in zip(rows, outputs, prompts):
            ended = ids[-1] in model.eos_ids and not masked
            body = ids[:-1] if ended else ids
            truncated = not ended and not masked
            texts, starts, ends, output = pieces(model.tokenizer, body)
            if ended:
                texts, starts = texts + [model.tokenizer.decode(ids[-1:])], starts + [len(output)]
                ends = ends + [len(output)]
            count = len(ids)
            for key, values in (("sequence", [i] * count), ("position", range(count)), ("token_id", ids),
                                ("text", texts), ("start", starts), ("end", ends),
                                ("is_eos", [False] * len(body) + [True] * ended),
                                ("is_special", [t in special for t in (prompt if masked else ids)]),
                                ("truncated", [truncated] * count), ("group", [task.groups[i]] * count)):
                tokens[key].extend(values)
            for key, value in (("sequence", i), ("group", task.groups[i]), ("prompt", task.prompts[i]),
                               ("source", task.sources[i]), ("reference", (task.references[i] or [""])[0]),
                               ("output", output), ("length", len(body)), ("truncated", truncated),
                               ("prompt_tokens", len(prompt))):
                sequences[key].append(value)
        return tokens, sequences

    def make_extra(self, kind: str, count: int) -> None:
        """Sub-layer readouts or layer pairs of the first `count` sequences, read in one pass over the known outputs."""
        manifest = json.loads((self.place / "manifest.json").read_text())
        name = f"{kind}-{count}"
        if intact(self.place, manifest, name):
            return
        made = Trace(self.place)
        chosen = made.sequences["sequence"].to_numpy()[:count]
        tokens = made.tokens[made.tokens["sequence"].isin(chosen)]
        outputs = [list(map(int, ids)) for _, ids in tokens.groupby("sequence", sort=True)["token_id"]]
        prompts = encode(self.model, self.task, chosen.tolist())
        columns: dict[str, list[np.ndarray]] = {}
        for prompt, output in tqdm(list(zip(prompts, outputs)), desc=f"{self.task.name} {kind}", unit="seq",
                                   disable=not self.progress):
            states, found = states_of(self.model, [prompt], [prompt if self.model.kind == "masked" else output],
                                      sites=kind == "sites")
            emitted = torch.tensor(output)
            if kind == "sites":
                read_out = {site: read(self.model.tail, values, emitted, last=states[:, -1])
                            for site, values in found.items()}
                results = {f"{site}/{n}": r[n].numpy() for site, r in read_out.items() for n in Sites.READOUTS}
            else:
                results = layer_pairs(self.model.tail, states)
            for key, value in results.items():
                columns.setdefault(key, []).append(value)
        frame = {"row": tokens.index.to_numpy()} | {key: np.concatenate(values) for key, values in columns.items()}
        add_file(self.place, manifest, name, to_bytes(frame))
        save_manifest(self.place, manifest)


def settle_last_layer(result: Readout, emitted: torch.Tensor, gap: torch.Tensor, model: Model) -> int:
    """Count tokens whose last-layer top-1 is not the emitted one; in float32 only ties within rounding may differ."""
    wrong = result["top1"][:, -1] != emitted
    if model.dtype == "float32" and bool((wrong & (gap > 1e-3)).any()):
        row = int((wrong & (gap > 1e-3)).nonzero()[0])
        raise ValueError(f"{model.name}: last-layer top-1 of token row {row} is {int(result['top1'][row, -1])}, "
                         f"decoding emitted {int(emitted[row])}")
    result["top1"][wrong, -1] = emitted[wrong].to(torch.int32)
    return int(wrong.sum())


def pieces(tokenizer, ids: list[int]) -> tuple[list[str], list[int], list[int], str]:
    """Texts and character offsets of tokens, by decoding ever longer beginnings of the generated ids; and the whole.

    A token that completes no character gets an empty text at the place where the character will stand.
    """
    texts, starts, ends, output, at = [], [], [], "", 0
    whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False) if ids else ""
    for n in range(1, len(ids) + 1):
        output = whole if n == len(ids) else tokenizer.decode(ids[:n], clean_up_tokenization_spaces=False)
        end = len(output) if n == len(ids) else len(output.rstrip("\ufffd"))
        end = max(at, min(end, len(whole)))
        texts.append(whole[at:end])
        starts.append(at)
        ends.append(end)
        at = end
    return texts, starts, ends, whole


def encode(model: Model, task: Task, chosen: list[int] | None = None) -> list[list[int]]:
    """Prompt token ids, with the tokenizer's own special tokens."""
    prompts = task.prompts if chosen is None else [task.prompts[i] for i in chosen]
    return model.tokenizer(prompts)["input_ids"]


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    import transformers
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


class Trace:
    """A finished trace on disk. Rows are generated tokens, in order of sequence, then position.

    `trace["entropy"]` is numpy [tokens, L+1]; column l is layer l, 0 the embeddings. Names: `trace.READOUTS`.
    """

    READOUTS = READOUTS

    def __init__(self, place: str | Path):
        self.place = Path(place)
        self.manifest = json.loads((self.place / "manifest.json").read_text())
        self.layers: int = self.manifest["layers"]
        self.model_name: str = self.manifest["model"]
        self.task_name: str = self.manifest["task"]
        self._columns: dict[str, np.ndarray] = {}

    def _table(self, part: str, columns: list[str] | None = None) -> pa.Table:
        names = [f"{part}-{i:05d}" for i in range(len(self.manifest["plan"]))]
        return pa.concat_tables(pq.read_table(self.place / f"{n}.parquet", columns=columns) for n in names)

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
        from .saturation import exit_layer
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
        raise ValueError(f"this trace has no {kind}; ask for them with eelib.trace(..., {kind}=True)")
    return pq.read_table(made.place / f"{max(names, key=lambda n: int(n.split('-')[1]))}.parquet")


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
