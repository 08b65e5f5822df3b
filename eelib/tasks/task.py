"""Tasks: texts, the paper's prompts, references, and how an output is scored."""

import copy
import fnmatch
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from eelib.common.data import data_folder
from eelib.common.errors import InputError
from eelib.common.values import check_limit, check_text, first_line, inside, text_of, texts_of
from eelib.tasks import glue as classification
from eelib.tasks.metrics import bleu_chrf, comet, rouge, squad_f1
from eelib.tasks.prompts import LANGUAGES, question_prompt, summarization_prompt, translation_prompt

WMT22 = ("de-en", "de-fr", "en-de", "en-ja", "en-ru", "en-zh", "fr-de", "ja-en", "ru-en", "zh-en")  # P, Table 7
HUB = {  # task -> (dataset, config, split), as P and M use them
    "cnn_dailymail": ("abisee/cnn_dailymail", "3.0.0", "validation"),
    "narrativeqa": ("deepmind/narrativeqa", None, "test"),
    "squad": ("rajpurkar/squad", None, "validation"),
} | classification.HUB
Row = tuple[str, dict]  # (where it stands, for messages; its fields)
Item = tuple[str, str, list[str], str]  # prompt, source, references, group; of pairs to classify, the second text, too


@dataclass(frozen=True)
class Task:
    """Prompts with their references. `groups` names what is resampled together: the passage that questions share.

    `kind` is translation, question_answering, summarization, classification or prompts; `sources` are the bare inputs.
    `labels` are a classification task's, in GLUE's order; where it judges pairs, `seconds` are the second texts.
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
    chat: bool = False  # each prompt is a user's turn in the model's chat template
    labels: tuple[str, ...] = ()
    seconds: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompts)

    @staticmethod
    def from_prompts(
        prompts: list[str], name: str = "prompts", references: list[list[str]] | None = None, chat: bool = False
    ) -> "Task":
        """A task of free prompts, with no metric unless references are given (then chrF).

        `chat` puts each into the model's chat template, as does `replace(task, chat=True)` for any other task.
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
            references or [[] for _ in prompts],
            list(prompts),
            [str(i) for i in range(len(prompts))],
            chat=chat,
        )

    @property
    def hash(self) -> str:
        """SHA-256 of everything that a trace depends on."""
        parts = [self.name, self.kind, self.prompts, self.references, self.groups, self.chat]
        content = json.dumps(parts + [self.seconds] * bool(self.seconds), ensure_ascii=False)
        return hashlib.sha256(content.encode()).hexdigest()

    def quality(self, outputs: list[str]) -> dict[str, float]:
        """Scores (0-100) of one output per prompt: BLEU and chrF (COMET-22 where installed), F1, or ROUGE-1, 2, L.

        Of labels: accuracy, F1 and accuracy, or Matthews correlation (-100 to 100), as GLUE has it for the task.
        """
        if len(outputs) != len(self.references):
            raise InputError(f"{len(outputs)} outputs for {len(self.references)} prompts")
        scored = [(o, r) for o, r in zip(outputs, self.references) if r]
        if not scored:
            return {}
        hypotheses, references = [o for o, _ in scored], [r for _, r in scored]
        if self.kind == "question_answering":
            return squad_f1(hypotheses, references)
        if self.kind == "summarization":
            return rouge(hypotheses, references)
        if self.kind == "classification":
            return classification.label_scores(self.name, hypotheses, references)
        scores = bleu_chrf(hypotheses, references, self.target_language)
        judged = (
            comet(hypotheses, [s for s, r in zip(self.sources, self.references) if r], references)
            if self.kind == "translation"
            else None
        )
        return scores if judged is None else scores | {"COMET-22": judged}

    def learnt(self, quality: dict[str, float]) -> bool:
        """Whether every score is above the baseline that was stated beforehand; true where none was stated."""
        return all(quality.get(metric, 0.0) > value for metric, value in self.baseline.items())

    def take(self, limit: int | None) -> "Task":
        """The first `limit` items; all of them for None or 0."""
        check_limit(limit)
        if not limit or limit >= len(self):
            return self
        return self.pick(range(limit))

    def pick(self, rows: Iterable[int]) -> "Task":
        """The items with these numbers, in this order."""
        rows = list(rows)
        names = ("prompts", "references", "sources", "groups", *["seconds"] * bool(self.seconds))
        picked = replace(self, **{name: [getattr(self, name)[i] for i in rows] for name in names})
        if self.kind != "classification" or not rows:
            return picked
        return replace(picked, baseline=classification.majority(self.name, picked.references))


# At or below these a model has not learnt the task, so no claim is judged on it. Round levels, set before any run.
# (Of a classification task the scores of its majority class, `classification.majority`.)
BASELINES = {"translation": {"BLEU": 10.0}, "question_answering": {"F1": 10.0}, "summarization": {"ROUGE-1": 15.0}}


def shipped_tasks() -> list[str]:
    """Names of the tasks that come with the project."""
    texts = data_folder("texts")
    return sorted(str(p.relative_to(texts).with_suffix("")) for p in texts.glob("*/*.jsonl"))


def task_names(pattern: str) -> list[str]:
    """The tasks that a notebook's `tasks` parameter asks for: one name, several with commas, or a pattern with *.

    Raises ValueError for a name that is neither shipped, nor a local folder or file, nor a hub task.
    """
    names: list[str] = []
    for part in (p.strip() for p in str(pattern).split(",")):
        found = fnmatch.filter(shipped_tasks(), part) if "*" in part else [part]
        if not part or not found or not all(is_known(name) for name in found):
            raise InputError(
                f"task {part!r} is not known; allowed: {', '.join(known_tasks())}, a local folder or "
                ".jsonl file, several with commas, or a pattern such as translation/*"
            )
        names += [name for name in found if name not in names]
    return names


def known_tasks() -> list[str]:
    """Shipped names, then the names of hub tasks."""
    return shipped_tasks() + [f"wmt22/{pair}" for pair in WMT22] + list(HUB)


def is_known(name: str) -> bool:
    """Whether `load_task` can try this name."""
    if not isinstance(name, str) or not name:
        return False
    try:
        return name in known_tasks() or Path(name).exists()
    except OSError:  # too long for a file's name
        return False


def load_task(name: str, limit: int | None = None, source: str | None = None) -> Task:
    """A shipped task, a local folder or .jsonl file, or a hub task (wmt22/de-en, glue/sst2, cnn_dailymail, squad ...).

    `source` loads a hub task from a local copy in the hub's own format instead (for wmt22: a sacreBLEU folder).
    Raises ValueError: unknown name; a row with a missing, empty or NUL-holding text (file, line and field named).
    """
    if not is_known(name):
        raise InputError(f"task {name!r} is not known; allowed: {', '.join(known_tasks())}, or a local folder")
    check_limit(limit)
    if name in shipped_tasks():
        return task_of_rows(name, read_rows(data_folder("texts", f"{name}.jsonl"))).take(limit)
    if name.startswith("wmt22/"):
        return task_of_rows(name, numbered(name, wmt22_rows(name.removeprefix("wmt22/"), source))).take(limit)
    if name in HUB:
        return task_of_rows(name, numbered(name, hub_rows(name, source, limit))).take(limit)
    path = Path(name).resolve()
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.name.endswith((".jsonl", ".jsonl.gz")))
    if not files:
        raise InputError(f"task folder {name!r} holds no .jsonl or .jsonl.gz file")
    return task_of_rows(path.name.split(".jsonl")[0], [row for file in files for row in read_rows(file)]).take(limit)


def read_rows(path: Path) -> list[Row]:
    """Rows of a JSON Lines file with their places; ValueError names the file and the line that can't be read."""
    rows: list[Row] = []
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                place = f"{path}, line {number}"
                try:
                    row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                except UnicodeDecodeError:
                    raise InputError(f"{place}: not UTF-8") from None
                except (ValueError, RecursionError):
                    row = None
                if not isinstance(row, dict):
                    raise InputError(f"{place}: not a JSON object")
                rows.append((place, row))
    except (EOFError, OSError, zlib.error) as error:
        raise InputError(f"{path}, after line {len(rows)}: can't be read ({first_line(error)})") from None
    return rows


def numbered(name: str, rows: list[dict]) -> list[Row]:
    """Rows that stand in no file, with their places."""
    return [(f"task {name!r}, row {number}", row) for number, row in enumerate(rows, 1)]


def hub_rows(name: str, source: str | None, limit: int | None) -> list[dict]:
    """Rows of a hub dataset, or of a local copy of it in a format that `datasets` loads."""
    import datasets

    dataset, config, split = HUB[name]
    try:
        if source and config not in datasets.get_dataset_config_names(source):
            config = None
        loaded = datasets.load_dataset(source or dataset, config, split=split)
    except Exception as error:  # datasets raises many kinds; the reader needs one line
        raise InputError(f"task {name!r} could not be loaded from {source or dataset}: {first_line(error)}") from error
    return [dict(row) for row in loaded.select(range(min(limit or len(loaded), len(loaded))))]


def wmt22_rows(pair: str, source: str | None) -> list[dict]:
    """WMT22 general test of one pair, through sacreBLEU; `source` is a folder to use as its cache."""
    if pair not in WMT22:
        raise InputError(f"direction {pair!r} is not one of P's Table 7; allowed: {', '.join(WMT22)}")
    from sacrebleu.dataset import DATASETS

    data = copy.copy(DATASETS["wmt22"])
    if source:  # sacreBLEU settles on its cache folder when it is imported
        data._outdir = os.path.join(source, "wmt22")
        data._rawdir = os.path.join(data._outdir, "raw")
        data.maybe_download = lambda: None
    try:
        files = [data.get_source_file(pair), *data.get_reference_files(pair)]
    except (Exception, SystemExit) as error:  # sacreBLEU leaves the program where a download is damaged
        raise InputError(
            f"task 'wmt22/{pair}' could not be loaded from {source or 'sacreBLEU'}: {first_line(error)}"
        ) from None
    columns = [Path(file).read_text(encoding="utf-8").split("\n")[:-1] for file in files]
    return [{"source": s, "references": [r for r in refs if r]} for s, *refs in zip(*columns, strict=True)]


def task_of_rows(name: str, rows: list[Row]) -> Task:
    """The task that rows describe, told by their fields: translation, question answering, summarization or labels."""
    if not rows:
        raise InputError(f"task {name!r} has no rows")
    kind, read = reader_of(name, rows[0][1])
    items = []
    for number, (place, row) in enumerate(rows, 1):
        try:
            items.append(read(row, number))
        except InputError as error:
            raise InputError(f"{place}: {error}") from None
    prompts, sources, references, groups, *seconds = (list(column) for column in zip(*items))
    if kind == "classification":
        return Task(
            name,
            kind,
            prompts,
            references,
            sources,
            groups,
            labels=classification.labels_of(name),
            baseline=classification.majority(name, references),
            seconds=seconds[0] if seconds else [],
        )
    source, target = languages_of(name, rows[0][1]) if kind == "translation" else ("", "")
    return Task(name, kind, prompts, references, sources, groups, source, target, BASELINES[kind])


def reader_of(name: str, row: dict) -> tuple[str, Callable]:
    """(kind, function from (row, number) to prompt, source, references, group)."""
    if "context" in row and "question" in row:
        return "question_answering", read_question
    if "document" in row and "question" in row:
        return "question_answering", read_narrative
    if "article" in row:
        return "summarization", read_article
    if "translation" in row or "source" in row:
        source, target = languages_of(name, row)

        def read_pair(row: dict, number: int) -> Item:
            if "translation" in row:
                text, known = text_of(row, "translation", source), [text_of(row, "translation", target)]
            else:
                text, known = text_of(row, "source"), texts_of(row, "references")
            return translation_prompt(text, source, target), text, known, str(number)

        return "translation", read_pair
    if classification.is_labelled(row):
        return "classification", classification.labelled_reader(name)
    raise InputError(
        f"task {name!r}: fields {', '.join(sorted(row))} fit no task; allowed: source + references, "
        "translation, context + question + answers, document + question + answers, article + highlights, "
        "sentence + label, sentence1 + sentence2 + label"
    )


def read_question(row: dict, _number: int) -> Item:
    """A SQuAD-like row; `answers` is a list of strings, or SQuAD's own {"text": [...]}."""
    context, question = text_of(row, "context"), text_of(row, "question")
    answers = texts_of(row, "answers", "text") if isinstance(row.get("answers"), dict) else texts_of(row, "answers")
    group = str(row.get("passage") or hashlib.sha256(context.encode()).hexdigest()[:12])
    check_text("field passage", group)
    return question_prompt(context, question), question, answers, group


def read_narrative(row: dict, _number: int) -> Item:
    """A NarrativeQA row: the summary is the context, as in P."""
    context, question = text_of(row, "document", "summary", "text"), text_of(row, "question", "text")
    answers = inside(row, "answers")
    if not isinstance(answers, (list, np.ndarray)):
        raise InputError("field answers is not a list")
    known = [text_of({"answers": answer}, "answers", "text") for answer in answers]
    return question_prompt(context, question), question, known, text_of(row, "document", "id")


def read_article(row: dict, number: int) -> Item:
    """A CNN/DailyMail row."""
    article = text_of(row, "article")
    return summarization_prompt(article), article, [text_of(row, "highlights")], str(number)


def languages_of(name: str, row: dict) -> tuple[str, str]:
    """(source, target) codes from the `de-en` at the end of a task's name."""
    pair = name.replace("/", ".").split(".")[-1].split("-")[-2:]
    pair = [part.split("_")[-1] for part in pair]
    if len(pair) != 2 or any(code not in LANGUAGES for code in pair):
        raise InputError(
            f"direction of task {name!r} is not known: its name must end like de-en, with codes from "
            f"{', '.join(LANGUAGES)}"
        )
    return pair[0], pair[1]
