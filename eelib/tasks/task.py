"""Tasks: texts with their prompts and references, by name or from files, and the scores of outputs."""

import fnmatch
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from eelib.common.errors import InputError
from eelib.common.files import data_folder
from eelib.common.values import check_limit, check_text
from eelib.tasks import text_kinds
from eelib.tasks.classification import CLASSIFICATION
from eelib.tasks.kind import FIELD, TaskKind, filled
from eelib.tasks.sources import HUB, WMT22, Row, hub_rows, read_rows, wmt22_rows
from eelib.tasks.structured import STRUCTURED

# All kinds, in the order in which a row is held against them. A new kind is one more.
KINDS = {kind.name: kind for kind in (*text_kinds.SCORED_KINDS, STRUCTURED, CLASSIFICATION, *text_kinds.PLAIN_KINDS)}


def kind_named(name: str) -> TaskKind:
    """The kind with this name; InputError lists them."""
    if name not in KINDS:
        raise InputError(f"kind {name!r} of a task is not known; allowed: {', '.join(KINDS)}")
    return KINDS[name]


@dataclass(frozen=True)
class Task:
    """Prompts with their references.

    Attributes:
        kind: a name such as translation, question_answering or instructions, which says how outputs are scored.
        references: of each prompt, a list of texts; empty where it has none.
        sources: the inputs without the prompt's other words.
        groups: of each item, the name of the group with which it is resampled, such as a passage that questions share.
        baseline: scores that a model has to exceed.
        chat: whether each prompt is a user's message in the model's chat template.
        labels: a classification task's labels, in the order of their numbers.
        seconds: the second texts of a task of pairs.
        columns: the rows' further fields by name, None where a row lacks one; for analyses only, not in `hash`, nor in
            traces.
        fields: the texts from which `worded` makes each prompt, by name; not in `hash`, since the prompts are.
        units: of each item, a name of its text that is the same in all tasks: the independent unit where tasks are
            pooled; not in `hash`.
    """

    name: str
    kind: str
    prompts: list[str]
    references: list[list[str]]
    sources: list[str]
    groups: list[str]
    source_language: str = ""
    target_language: str = ""
    baseline: dict[str, float] = field(default_factory=dict)
    chat: bool = False
    labels: tuple[str, ...] = ()
    seconds: list[str] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    fields: list[dict[str, str]] = field(default_factory=list)
    units: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompts)

    @staticmethod
    def from_prompts(
        prompts: list[str], name: str = "prompts", references: list[list[str]] | None = None, chat: bool = False
    ) -> "Task":
        """A task of free prompts, with no scores unless references are given (then BLEU and chrF).

        `chat` puts each into the model's chat template, as does `dataclasses.replace(task, chat=True)` for any task.
        InputError for a prompt, name or reference that is not a text, or for another number of references.
        """
        if not isinstance(prompts, (list, tuple)) or not prompts:
            raise InputError("prompts must be a list of at least one string")
        check_text("name", name)
        for number, prompt in enumerate(prompts):
            check_text(f"prompt {number}", prompt)
        if references and len(references) != len(prompts):
            raise InputError(f"{len(references)} references for {len(prompts)} prompts")
        for number, known in enumerate(references or []):
            if not isinstance(known, (list, tuple)):
                raise InputError(f"references of prompt {number} must be a list of strings")
            for text in known:
                check_text(f"reference of prompt {number}", text)
        return Task(
            name,
            "prompts",
            list(prompts),
            [list(known) for known in references or []] or [[] for _ in prompts],
            list(prompts),
            [str(i) for i in range(len(prompts))],
            chat=chat,
            fields=[{"text": prompt} for prompt in prompts],
            units=[unit_of([prompt]) for prompt in prompts],
        )

    @property
    def hash(self) -> str:
        """SHA-256 of everything in the task that a trace depends on."""
        parts = [self.name, self.kind, self.prompts, self.references, self.groups, self.chat]
        content = json.dumps(parts + [self.seconds] * bool(self.seconds), ensure_ascii=False)
        return hashlib.sha256(content.encode()).hexdigest()

    def worded(self, wording: str) -> "Task":
        """The same items with other prompts.

        Args:
            wording: the name of one of the kind's wordings, such as "paper" or "short", or a template of the prompt
                with fields in braces, such as "Summarize: {text}".

        Raises:
            InputError: the wording is no such name and holds no field, or a field that the task does not have.
        """
        wordings = kind_named(self.kind).wordings
        template = wordings.get(wording, wording) if isinstance(wording, str) else ""
        wanted, known = FIELD.findall(template), list(self.fields[0]) if self.fields else []
        if not wanted or not set(wanted) <= set(known):
            allowed = [*wordings, *(["a template with " + " or ".join(f"{{{name}}}" for name in known)] * bool(known))]
            raise InputError(
                f"wording or template {wording!r} does not fit task {self.name!r} of kind {self.kind!r}; allowed: "
                f"{', '.join(allowed) or 'none, since its texts are given as they are'}"
            )
        return replace(self, prompts=[filled(template, fields) for fields in self.fields])

    def quality(self, outputs: list[str]) -> dict[str, float]:
        """Scores (0-100) by name of the outputs, one per prompt; those without references are left out.

        Translations: BLEU and chrF. Answers: F1 and containment. Summaries: ROUGE-1, 2 and L. Labels: accuracy, F1 and
        accuracy, or Matthews correlation (-100 to 100), as in GLUE. JSON: the shares of outputs that are exact and
        valid, and the F1 of fields. InputError for another number of outputs.
        """
        if len(outputs) != len(self.references):
            raise InputError(f"{len(outputs)} outputs for {len(self.references)} prompts")
        scored = [(row, output) for row, (output, known) in enumerate(zip(outputs, self.references)) if known]
        if not scored:
            return {}
        kept, answers = zip(*scored)
        return kind_named(self.kind).scores(self.pick(kept), list(answers))

    def above_baseline(self, quality: dict[str, float]) -> bool:
        """Whether every score is above the baseline that was stated beforehand; true where none was stated.

        The study passes the lower ends of the scores' 95% intervals, so that the whole intervals have to be above.
        """
        return all(quality.get(metric, 0.0) > value for metric, value in self.baseline.items())

    def take(self, limit: int | None) -> "Task":
        """The first `limit` items, one of each group before a second of any; all items for None or 0.

        Items of a group share their text, so many groups are more informative than many items of few groups.
        """
        check_limit(limit)
        if not limit or limit >= len(self):
            return self
        nth = pd.Series(self.groups).groupby(self.groups).cumcount()  # of its group
        return self.pick(nth.sort_values(kind="stable").index[:limit].tolist())

    def pick(self, rows: Iterable[int]) -> "Task":
        """The items with these numbers, in this order."""
        rows = list(rows)
        lists = {name: values for name, values in vars(self).items() if isinstance(values, list) and values}
        chosen: dict[str, Any] = {name: [values[i] for i in rows] for name, values in lists.items()}
        chosen["columns"] = {key: [values[i] for i in rows] for key, values in self.columns.items()}
        picked = replace(self, **chosen)
        depends = kind_named(self.kind).baseline_of and rows  # on the references: counted anew
        return replace(picked, baseline=kind_named(self.kind).baseline_for(picked)) if depends else picked


def unit_of(texts: Iterable[str]) -> str:
    """The `Task.units` name of an item with these texts, whatever their order."""
    return hashlib.sha256("\0".join(sorted(set(texts))).encode()).hexdigest()[:12]


def shipped_tasks() -> list[str]:
    """Names of the tasks that come with the project."""
    texts = data_folder("texts")
    return sorted(str(p.relative_to(texts).with_suffix("")) for p in texts.glob("*/*.jsonl"))


def task_names(pattern: str) -> list[str]:
    """The tasks that a notebook's `tasks` parameter names: one, several with commas, or a pattern (`translation/*`).

    InputError for a name that is neither shipped, nor a local folder or file, nor a hub task.
    """
    names: list[str] = []
    for part in (p.strip() for p in str(pattern).split(",")):
        found = fnmatch.filter(shipped_tasks(), part) if "*" in part else [part]
        if not part or not found or not all(is_known(name) for name in found):
            raise InputError(
                f"task {part!r} is not known; allowed: {', '.join(known_tasks())}, a local folder or "
                ".jsonl or .txt file, several with commas, or a pattern such as translation/*"
            )
        names += [name for name in found if name not in names]
    return names


def known_tasks() -> list[str]:
    return shipped_tasks() + [f"wmt22/{pair}" for pair in WMT22] + list(HUB)


def is_known(name: str) -> bool:
    """Whether `load_task` can try this name."""
    return isinstance(name, str) and (name in known_tasks() or os.path.exists(name))


def load_task(name: str, limit: int | None = None, source: str | None = None) -> Task:
    """Load a shipped task, a local folder or file, or a hub task (wmt22/de-en, glue/sst2, cnn_dailymail, squad ...).

    Args:
        name: of the task, or a path. A file holds rows (.jsonl, .jsonl.gz) or plain texts, one a paragraph (.txt).
        limit: number of items, chosen as by `Task.take`; None or 0 takes all.
        source: a local copy of a hub task in the hub's own format (for wmt22: a sacreBLEU folder), to load instead.

    Raises:
        InputError: unknown name; a source for another task than the hub's; a row with a missing, empty or NUL-holding
            text (file, line and field named).
    """
    if not is_known(name):
        raise InputError(f"task {name!r} is not known; allowed: {', '.join(known_tasks())}, a local folder or file")
    check_limit(limit)
    of_hub = name in HUB or name.startswith("wmt22/")
    if source is not None and not of_hub:
        raise InputError(f"task {name!r} is not the hub's, so source={source!r} does not apply; give the copy's path")
    if name in shipped_tasks():
        return task_of_rows(name, read_rows(data_folder("texts", f"{name}.jsonl"))).take(limit)
    if of_hub:
        fetched = hub_rows(name, source) if name in HUB else wmt22_rows(name.removeprefix("wmt22/"), source)
        numbered = ((f"task {name!r}, row {number}", row) for number, row in enumerate(fetched, 1))
        return task_of_rows(name, numbered).take(limit)
    path = Path(name).resolve()
    files = [path] if path.is_file() else files_in(path, name)
    name = path.name.split(".jsonl")[0].removesuffix(".txt")
    return task_of_rows(name, [row for file in files for row in read_rows(file)]).take(limit)


def files_in(folder: Path, name: str) -> list[Path]:
    """Files of rows in a task's folder and below it, without hidden ones such as Jupyter's copies.

    InputError where there is none, or where one is there twice, plain and packed: its rows would count twice.
    """
    found = sorted(f for f in folder.rglob("*") if f.name.endswith((".jsonl", ".jsonl.gz")) and f.is_file())
    files = [f for f in found if not any(part.startswith(".") for part in f.relative_to(folder).parts)]
    if not files:
        raise InputError(f"task folder {name!r} holds no .jsonl or .jsonl.gz file")
    if twice := next((f for f in files if f.with_name(f"{f.name}.gz") in files), None):
        raise InputError(f"task folder {name!r} holds both {twice.name} and {twice.name}.gz; allowed is one of them")
    return files


def task_of_rows(name: str, rows: Iterable[Row]) -> Task:
    """The task made of rows; the fields of the first row decide its kind. InputError names a row that does not fit."""
    check_text(f"the name of task {name!r}", name)
    rows = iter(rows)
    if (beginning := next(rows, None)) is None:
        raise InputError(f"task {name!r} has no rows")
    first = beginning[1]
    kind = next((kind for kind in KINDS.values() if kind.fits(first)), None)
    if kind is None or kind.reader is None:
        examples = [one for known in KINDS.values() for one in known.examples or (" + ".join(known.fields),)]
        allowed = ", ".join(filter(None, examples))
        raise InputError(f"task {name!r}: fields {', '.join(sorted(first))} fit no task; allowed: {allowed}")
    read, items = kind.reader(name, first), []
    columns: dict[str, list] = {key: [] for key in first if key not in kind.fields}
    for number, (at, row) in enumerate(chain([beginning], rows), 1):
        try:
            items.append(read(row, number))
        except InputError as error:
            raise InputError(f"{at}: {error}") from None
        for key, values in columns.items():
            values.append(row.get(key))
    prompts, sources, references, groups, seconds, fields, _ = map(list, zip(*items))
    task = Task(
        name,
        kind.name,
        prompts,
        references,
        sources,
        groups,
        seconds=[second for second in seconds if second],
        columns=columns,
        fields=[texts for texts in fields if texts],
        units=[item.group if item.shared else unit_of([item.source, *item.references]) for item in items],
        **kind.about(name, first),
    )
    return replace(task, baseline=kind.baseline_for(task))
