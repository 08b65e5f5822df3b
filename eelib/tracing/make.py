"""Decode a task once, read every layer, keep it as Parquet shards; resumable, one maker at a time."""

import hashlib
import json
import platform
import re
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import transformers
from tqdm import tqdm

from eelib.common.errors import InputError
from eelib.common.files import only_one
from eelib.common.machine import free_memory, is_out_of_memory, versions
from eelib.common.sources import code_hash
from eelib.common.values import check_whole
from eelib.lens.buffer import Reader
from eelib.lens.readout import Readout, read, top_ids
from eelib.lens.similarity import layer_pairs
from eelib.models.model import Model
from eelib.tasks.glue import named
from eelib.tasks.task import Task
from eelib.tracing.decode import decode, states_of
from eelib.tracing.shards import (
    READOUTS,
    TOKEN_COLUMNS,
    add_file,
    add_time,
    intact,
    load_manifest,
    save_manifest,
    to_bytes,
)
from eelib.tracing.trace import Sites, Trace


def check_model(model: Model, task) -> None:
    """ValueError, one line, where a model can't do a task: labels asked of it or text, or labels of another task."""
    if task.kind != "classification":
        if model.kind == "classifier" and task.kind != "prompts":
            raise InputError(
                f"{task.name}: {model.name} is a sequence classifier, which gives labels, not text; "
                "allowed are classification tasks and free prompts"
            )
        return
    if model.kind != "classifier":
        raise InputError(f"{task.name} needs a sequence classifier; {model.name} is {model.kind}")
    theirs, ours = ", ".join(model.labels), ", ".join(task.labels)
    if len(model.labels) != len(task.labels):
        raise InputError(
            f"{model.name} has {len(model.labels)} labels ({theirs}), {task.name} has {len(task.labels)} ({ours})"
        )
    if {named(label, task.labels) for label in model.labels} != set(task.labels):
        raise InputError(
            f"{model.name} has the labels {theirs}, {task.name} has {ours}; allowed are the same names "
            "in any case and order, or numbers such as LABEL_0"
        )


SHARD = {"cpu": 32, "cuda": 128}  # most sequences in a batch, and so in a shard, where no batch size is given
ROOMS = ("models", "lens", "tracing")  # a trace depends on their code
SUBSET = 24  # sequences read for sites or pairs where the caller says only True


def trace(
    model: Model,
    task: Task,
    max_new_tokens: int = 64,
    folder: str | Path = "runs",
    batch_size: int | None = None,
    sites: bool | int = False,
    pairs: bool | int = False,
    strict: bool = False,
    progress: bool = True,
) -> "Trace":
    """The trace of `task` under `model`: made if it does not exist, finished if it is half made, else returned.

    Greedy decoding up to `max_new_tokens`; every emitted token is read at layers 0..L. `sites` and `pairs` (True, or a
    number of sequences) add sub-layer readouts and layer-by-layer similarities for the first so many sequences.
    Prompts beyond the model's window are counted and skipped, or refused with `strict`. A `batch_size` other than the
    one that a half made trace was begun with holds for the rest of it. Raises ValueError, or OSError where the disk is
    at fault: one line.
    """
    if not isinstance(model, Model) or not isinstance(task, Task):
        raise InputError(
            f"a trace needs a model from eelib.load_model and a task from eelib.load_task; got "
            f"{type(model).__name__} and {type(task).__name__}"
        )
    check_model(model, task)
    check_whole("max_new_tokens", max_new_tokens, 1)
    if batch_size is not None:
        check_whole("batch_size", batch_size, 1)
    for kind, wanted in (("sites", sites), ("pairs", pairs)):
        if not isinstance(wanted, bool):
            check_whole(kind, wanted, 0, "True, False or a number of sequences")
    if sites and not model.components:  # said before hours of decoding, not after
        raise InputError(model.components_error)
    settings = {"max_new_tokens": int(max_new_tokens), "dtype": model.dtype, "device": model.device.type}
    identity = {
        "model": model.name,
        "weights": model.hash,
        "task": task.name,
        "task_hash": task.hash,
        "settings": settings,
        "code": code_hash(*ROOMS),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    plain = re.sub(r"[^\w.+-]", ".", task.name)[:100]
    place = Path(folder) / model.name / f"{plain}-{key}"
    maker = Maker(model, task, place, identity, batch_size, strict, progress)
    with only_one(place):
        maker.make_outputs()
        for kind, wanted in (("sites", sites), ("pairs", pairs)):
            if wanted:
                maker.make_extra(kind, SUBSET if wanted is True else int(wanted))
    return Trace(place)


@dataclass
class Maker:
    """Makes the shards of one trace; each is a pure function of the model, the task and its list of sequences."""

    model: Model
    task: Task
    place: Path
    identity: dict
    batch_size: int | None
    strict: bool
    progress: bool
    halved: bool = False

    @cached_property
    def encoded(self) -> list[list[int]]:
        """Token ids of every prompt."""
        return encode(self.model, self.task)

    def make_outputs(self) -> None:
        """Decode and read whatever shards are missing or damaged, then seal the manifest."""
        manifest = self.plan()
        missing = [index for index in range(len(manifest["plan"])) if not self.is_made(manifest, index)]
        if not missing and manifest.get("finished"):
            return
        for index in tqdm(missing, desc=f"{self.model.name} {self.task.name}", unit="batch", disable=not self.progress):
            began = time.monotonic()
            self.make_shard(manifest, index, self.encoded)
            add_time(self.place, time.monotonic() - began)
        for key in ("rows", "mismatches"):
            manifest[key] = sum(counts[key] for counts in manifest["counts"].values())
        manifest["finished"] = True
        save_manifest(self.place, manifest)

    def is_made(self, manifest: dict, index: int) -> bool:
        """Whether both files of a shard are there, unaltered."""
        return all(intact(self.place, manifest, f"{part}-{index:05d}") for part in ("tokens", "sequences"))

    def plan(self) -> dict:
        """The manifest: as found, or a new one with sequences sorted by prompt length and cut into shards.

        A new one is saved with the first shard, so that nothing is left of a task that turns out to be refused. Without
        a sound manifest nothing says which shards are sound, so all are made anew.
        """
        known = load_manifest(self.place)
        if known and not (self.strict and known["skipped"]):
            return self.cut_rest(known)
        model, lengths = self.model, [len(ids) for ids in self.encoded]
        if 0 in lengths:
            raise InputError(f"{self.task.name}: prompt {lengths.index(0)} has no tokens in {model.name}'s vocabulary")
        fits = [i for i, n in enumerate(lengths) if n < model.context_length]
        skipped = len(lengths) - len(fits)
        if not fits or (skipped and self.strict):
            raise InputError(
                f"{self.task.name}: {skipped} of {len(lengths)} prompts do not fit {model.name}'s window "
                f"of {model.context_length} tokens (longest: {max(lengths)})"
            )
        if (self.place / "manifest.json").exists():
            print(f"{self.place.name}: the manifest is damaged; the trace is made anew")
        for file in self.place.glob("*.parquet"):
            file.unlink()
        longest = max(lengths[i] for i in fits) + self.identity["settings"]["max_new_tokens"]
        size = self.batch_size or batch_that_fits(model, min(longest, model.context_length))
        return {
            **self.identity,
            "layers": model.layers,
            "kind": self.task.kind,
            "architecture": model.kind,
            "vocabulary": model.vocab_size,
            "special_ids": sorted(set(map(int, model.tokenizer.all_special_ids))),
            "prompts": len(lengths),
            "skipped": skipped,
            "batch_size": size,
            "plan": self.cut(sorted(fits, key=lambda i: (lengths[i], i)), size),
            "versions": versions(),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "files": {},
            "counts": {},
        }

    def cut(self, order: list[int], size: int) -> list[list[int]]:
        """Shards of at most `size` sequences; where padding would change a row, all of one prompt length."""
        plan: list[list[int]] = []
        for i in order:
            same = self.model.pads or not plan or len(self.encoded[plan[-1][-1]]) == len(self.encoded[i])
            if plan and same and len(plan[-1]) < size:
                plan[-1].append(i)
            else:
                plan.append([i])
        return plan

    def cut_rest(self, manifest: dict) -> dict:
        """A known manifest; asked for another batch size, what comes after its last sound shard is cut anew."""
        plan = manifest["plan"]
        if manifest.get("finished") or self.batch_size in (None, manifest["batch_size"]):
            return manifest
        first = max((index + 1 for index in range(len(plan)) if self.is_made(manifest, index)), default=0)
        for name in (f"{part}-{index:05d}" for index in range(first, len(plan)) for part in ("tokens", "sequences")):
            manifest["files"].pop(name, None)
            (self.place / f"{name}.parquet").unlink(missing_ok=True)
        manifest["counts"] = {index: n for index, n in manifest["counts"].items() if int(index) < first}
        manifest["plan"] = plan[:first] + self.cut([i for rows in plan[first:] for i in rows], self.batch_size)
        return manifest | {"batch_size": self.batch_size}

    def make_shard(self, manifest: dict, index: int, encoded: list[list[int]]) -> None:
        """Decode one shard's sequences, read their states, write both tables, enter them in the manifest."""
        rows = manifest["plan"][index]
        outputs, result = self.decode([encoded[i] for i in rows], [self.reference_ids(i) for i in rows])
        emitted = torch.tensor([token for ids in outputs for token in ids])
        mismatches = settle_last_layer(result, emitted, self.model)
        manifest["counts"][str(index)] = {"rows": len(emitted), "mismatches": mismatches}
        tokens, sequences = self.tables(rows, outputs, [encoded[i] for i in rows])
        tokens |= {name: result[name].numpy() for name in READOUTS}
        for name, frame in ((f"tokens-{index:05d}", tokens), (f"sequences-{index:05d}", sequences)):
            add_file(self.place, manifest, name, to_bytes(frame))
        save_manifest(self.place, manifest)

    def decode(self, prompts: list[list[int]], references: list[list[int]]) -> tuple[list[list[int]], Readout]:
        """Outputs and readouts of one batch; out of memory, the batch is halved and the work goes on."""
        try:
            return read_outputs(self.model, prompts, references, self.identity["settings"]["max_new_tokens"])
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or len(prompts) == 1:
                raise
        # Outside the handler: inside it, the traceback would still hold the failed batch's memory.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        half = len(prompts) // 2
        if not self.halved:
            print(f"out of memory: batches of {len(prompts)} are halved")
            self.halved = True
        parts = [self.decode(prompts[:half], references[:half]), self.decode(prompts[half:], references[half:])]
        joined = {name: torch.cat([part[name] for _, part in parts]) for name in parts[0][1].values}
        return parts[0][0] + parts[1][0], Readout(joined)

    def reference_ids(self, sequence: int) -> list[int]:
        """Token ids of the first reference and of the end, or none."""
        references = self.task.references[sequence]
        if not references or self.model.kind not in ("causal", "seq2seq"):
            return []
        wanted = self.model.tokenizer(text_target=references[0], add_special_tokens=False)["input_ids"]
        return wanted + sorted(self.model.eos_ids)[:1]

    def tables(self, rows: list[int], outputs: list[list[int]], prompts: list[list[int]]) -> tuple[dict, dict]:
        """The columns that describe tokens and sequences, without the readouts."""
        task, model = self.task, self.model
        special = set(model.tokenizer.all_special_ids)
        tokens: dict[str, list] = {k: [] for k in TOKEN_COLUMNS}
        sequences: dict[str, list] = {
            k: []
            for k in (
                "sequence",
                "group",
                "prompt",
                "source",
                "reference",
                "output",
                "length",
                "truncated",
                "prompt_tokens",
            )
        }
        writes = model.kind in ("causal", "seq2seq")
        for i, ids, prompt in zip(rows, outputs, prompts):
            ended = writes and ids[-1] in model.eos_ids
            body = ids[:-1] if ended else ids
            truncated = writes and not ended
            if model.kind == "classifier":
                output = model.labels[ids[0]]
                texts, starts, ends = [output], [0], [len(output)]
            else:
                texts, starts, ends, output = pieces(model.tokenizer, body)
            if ended:
                texts, starts = texts + [model.tokenizer.decode(ids[-1:])], starts + [len(output)]
                ends = ends + [len(output)]
            count = len(ids)
            for key, values in (
                ("sequence", [i] * count),
                ("position", range(count)),
                ("token_id", ids),
                ("text", texts),
                ("start", starts),
                ("end", ends),
                ("is_eos", [False] * len(body) + [True] * ended),
                (
                    "is_special",
                    [model.kind != "classifier" and t in special for t in (prompt if model.kind == "masked" else ids)],
                ),
                ("truncated", [truncated] * count),
                ("group", [task.groups[i]] * count),
            ):
                tokens[key].extend(values)
            for key, value in (
                ("sequence", i),
                ("group", task.groups[i]),
                ("prompt", task.prompts[i]),
                ("source", task.sources[i]),
                ("reference", (task.references[i] or [""])[0]),
                ("output", output),
                ("length", len(body)),
                ("truncated", truncated),
                ("prompt_tokens", len(prompt)),
            ):
                sequences[key].append(value)
        return tokens, sequences

    def make_extra(self, kind: str, count: int) -> None:
        """Sub-layer readouts or layer pairs of the first `count` sequences, read in one pass over the known outputs."""
        manifest = load_manifest(self.place)
        name = f"{kind}-{count}"
        if intact(self.place, manifest, name):
            return
        made = Trace(self.place)
        chosen = made.sequences["sequence"].to_numpy()[:count]
        tokens = made.tokens[made.tokens["sequence"].isin(chosen)]
        outputs = [list(map(int, ids)) for _, ids in tokens.groupby("sequence", sort=True)["token_id"]]
        prompts = encode(self.model, self.task, chosen.tolist())
        columns: dict[str, list[np.ndarray]] = {}
        for prompt, output in tqdm(
            list(zip(prompts, outputs)), desc=f"{self.task.name} {kind}", unit="seq", disable=not self.progress
        ):
            states, found = states_of(self.model, [prompt], [output], sites=kind == "sites")
            emitted = torch.tensor(output)
            if kind == "sites":
                read_out = {
                    site: read(self.model.unembed, values, emitted, last=states[:, -1])
                    for site, values in found.items()
                }
                results = {f"{site}/{n}": r[n].numpy() for site, r in read_out.items() for n in Sites.READOUTS}
            else:
                results = layer_pairs(self.model.unembed, states)
            for key, value in results.items():
                columns.setdefault(key, []).append(value)
        frame = {"row": tokens.index.to_numpy()} | {key: np.concatenate(values) for key, values in columns.items()}
        add_file(self.place, manifest, name, to_bytes(frame))
        save_manifest(self.place, manifest)


def read_outputs(
    model: Model, prompts: list[list[int]], references: list[list[int]], max_new_tokens: int
) -> tuple[list[list[int]], Readout]:
    """Decode prompts and read every layer of every token.

    Of a masked model each position of the prompts is read in place; of a classifier, the one that it judges by.
    """
    reader = Reader(model.unembed, references)
    if model.kind in ("causal", "seq2seq"):
        return decode(model, prompts, max_new_tokens, reader), reader.finish()
    outputs = []
    for row, prompt in enumerate(prompts):
        states, _ = states_of(model, [prompt], [prompt])
        outputs.append(top_ids(model.unembed, states[:, -1]))
        reader.add(states, [row] * len(states), outputs[-1])
    return outputs, reader.finish()


def batch_that_fits(model: Model, tokens: int) -> int:
    """The largest power of two of rows, each `tokens` long, whose caches and activations fill half the free memory."""
    size = next(model.network.parameters()).element_size()
    row = tokens * model.hidden_size * size * (2 * model.layers + 16)
    fits = max(1, free_memory(model.device) // 2 // row)
    return min(2 ** (fits.bit_length() - 1), SHARD.get(model.device.type, 32))


def settle_last_layer(result: Readout, emitted: torch.Tensor, model: Model) -> int:
    """Count tokens whose last-layer top-1 is not the emitted one; in float32 only ties within rounding may differ."""
    wrong = result["top1"][:, -1] != emitted
    behind = (result["probability"][:, -1] / result["final_probability"][:, -1]).log()  # difference of the two logits
    if model.dtype == "float32" and bool((wrong & ~(behind <= 1e-3)).any()):
        row = int((wrong & ~(behind <= 1e-3)).nonzero()[0])
        raise InputError(
            f"{model.name}: last-layer top-1 of token row {row} is {int(result['top1'][row, -1])}, "
            f"decoding emitted {int(emitted[row])}"
        )
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
    """Prompt token ids, with the tokenizer's own special tokens, or in its chat template where the task asks."""
    rows = range(len(task)) if chosen is None else chosen
    return model.encode([task.prompts[i] for i in rows], task.chat, [task.seconds[i] for i in rows if task.seconds])
