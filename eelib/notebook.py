"""What every notebook shares: checked parameters, traces of its tasks, results on disk and in the prose."""

import ast
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig
from transformers.utils import logging as transformers_logging

from .checkpoint import not_loaded, path_of
from .markdown import text
from .model import DTYPES, Model, load_model, resolve_device
from .papers import Verdict, judge, untestable
from .quality import quality_interval
from .shards import write_atomically
from .stats import Interval
from .tasks import Task, load_task, task_names
from .trace import Trace, trace
from .words import visible

MINIMUM_GROUPS = 30  # a learnt task with fewer sequences (or passages) is left out of averages, unless all have fewer
KINDS = {"int": int, "float": (int, float), "str": str, "bool": bool}


class ParameterError(ValueError):
    """A parameter that can't be used; shown as one line, in Jupyter and in papermill's log."""

    def _render_traceback_(self) -> list[str]:
        return [f"ParameterError: {self}"]


@dataclass(frozen=True)
class Parameters(Mapping):
    """The checked parameters of one run, by name."""

    values: dict

    def __getitem__(self, name: str):
        return self.values[name]

    def __getattr__(self, name: str):
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    def __iter__(self):
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)


def check_parameters(choices: dict[str, tuple] | None = None, cells: list[str] | None = None,
                     namespace: dict | None = None) -> Parameters:
    """Check the notebook's parameters and return them; ParameterError names the bad one and what is allowed.

    Declared are the annotated assignments of the notebook's cells; injected are the plain assignments of papermill's
    cell, which starts with `# Parameters`. `choices` adds a tuple of allowed values for a parameter.
    """
    if cells is None:
        from IPython import get_ipython
        shell = get_ipython()
        cells, namespace = shell.user_ns["In"], shell.user_ns
    declared, injected = {}, []
    for cell in cells:
        try:
            body = ast.parse(cell).body
        except SyntaxError:  # cells with magics hold no parameters
            continue
        given = cell.lstrip().startswith("# Parameters")
        for node in body:
            if isinstance(node, ast.AnnAssign) and not given and node.value is not None:
                declared.setdefault(node.target.id, ast.unparse(node.annotation))
            elif isinstance(node, ast.Assign) and given:
                injected += [target.id for target in node.targets]
    unknown = sorted(set(injected) - set(declared))
    if unknown:
        raise ParameterError(f"parameter {unknown[0]!r} is not known; allowed: {', '.join(declared)}")
    values = {name: namespace[name] for name in declared}
    for name, kind in declared.items():
        value = values[name]
        if kind not in KINDS:
            raise ParameterError(f"parameter {name} is declared as {kind}; allowed: {', '.join(KINDS)}")
        if not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise ParameterError(f"parameter {name} is {value!r}; it must be of type {kind}")
    check_values(values, choices or {})
    return Parameters(values)


def check_values(values: dict, choices: dict[str, tuple]) -> None:
    """The rules for the parameters that all notebooks share, and `choices`."""
    allowed = {"dtype": tuple(DTYPES)} | choices
    for name, options in allowed.items():
        if name in values and values[name] not in options:
            raise ParameterError(f"parameter {name} is {values[name]!r}; allowed: {', '.join(map(repr, options))}")
    for name, least in (("limit", 0), ("max_new_tokens", 1), ("batch_size", 0), ("seed", 0)):
        if name in values and values[name] < least:
            raise ParameterError(f"parameter {name} is {values[name]}; it must be {least} or more")
    if not values.get("model", "x").strip():
        raise ParameterError("parameter model is empty; give a shipped name, a local folder or a hub id")
    try:
        task_names(values.get("tasks", "*"))
        resolve_device(values.get("device", "auto"))
    except ValueError as error:
        raise ParameterError(str(error)) from None


def models_on_tasks(parameter: str, text: str, example: str) -> list[tuple[str, str]]:
    """(what stands before " on ", tasks) of each entry, several with semicolons; ParameterError for another form."""
    found = []
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        models, _, tasks = (piece.strip() for piece in part.rpartition(" on "))
        if not models:
            raise ParameterError(f"parameter {parameter} holds {part!r}; allowed are entries such as {example!r}, "
                                 "several with semicolons, or nothing")
        try:
            task_names(tasks)
        except ValueError as error:
            raise ParameterError(f"parameter {parameter}, {models}: {error}") from None
        found.append((models, tasks))
    return found


def config_of(parameter: str, name: str) -> PretrainedConfig:
    """A checkpoint's config, read before anything is decoded; ParameterError where there is none."""
    try:
        return AutoConfig.from_pretrained(path_of(name))
    except Exception as error:  # transformers raises many kinds; the reader needs one line
        raise ParameterError(f"parameter {parameter}: {not_loaded(name, error)}") from None


class Study:
    """The model and traces that a notebook's parameters ask for; ParameterError where they can't be had.

    `sites` and `pairs` are what `trace` takes. `other` are values that stand in place of the parameters', for a
    notebook that looks at several models: Study(p, model=p.after).
    """

    def __init__(self, parameters: Parameters, sites: int = 0, pairs: int = 0, **other: str):
        # papermill runs at the project's root, JupyterLab in notebooks/: both mean the same folders
        root = Path("..") if Path.cwd().name == "notebooks" else Path(".")
        self.parameters = p = Parameters({**parameters, **other, **{name: str(root / parameters[name])
                                                                    for name in ("runs_folder", "results_folder")}})
        try:
            self.tasks: dict[str, Task] = {n: load_task(n, limit=p.limit) for n in task_names(p.tasks)}
            if p.get("template"):
                self.tasks = {n: in_template(task, p.template) for n, task in self.tasks.items()}
            transformers_logging.disable_progress_bar()  # bars litter a page
            self.model: Model = load_model(p.model, dtype=p.dtype, device=p.device)
            if sites and not self.model.parts:  # said before hours of decoding, not after
                raise ValueError(self.model.parts_error)
            self.traces: dict[str, Trace] = {
                name: trace(self.model, task, max_new_tokens=p.max_new_tokens, folder=p.runs_folder,
                            batch_size=p.batch_size or None, sites=sites, pairs=pairs, progress=False)
                for name, task in self.tasks.items()}
        except (ValueError, OSError) as error:  # OSError: a full disk, a folder that can't be written to
            raise ParameterError(str(error)) from None

    @cached_property
    def quality(self) -> dict[str, dict[str, float]]:
        """Scores of the outputs, by task."""
        return {n: self.tasks[n].pick(t.sequences["sequence"].tolist()).quality(list(t.sequences["output"]))
                for n, t in self.traces.items()}

    @cached_property
    def learnt(self) -> dict[str, bool]:
        """Whether each task's baseline, stated beforehand, lies below the whole 95% interval of every score it names.

        A coin would be above the majority class of two balanced labels half the time; an interval tells it from skill.
        """
        found = {}
        for name, made in self.traces.items():
            task = self.tasks[name].pick(made.sequences["sequence"].tolist())
            scores = quality_interval(task, list(made.sequences["output"])) if task.baseline else {}
            found[name] = task.learnt({metric: interval.low for metric, interval in scores.items()})
        return found

    def learnt_tokens(self, values) -> dict[str, tuple]:
        """{task: (values, groups)} of the learnt tasks; `values(trace)` gives such a pair; empty ones are left out."""
        found = {name: values(made) for name, made in self.traces.items() if self.learnt[name]}
        found = {name: pair for name, pair in found.items() if len(pair[0])}
        # One small task must not make a claim untestable that four large ones can speak to.
        return {name: pair for name, pair in found.items() if len(set(pair[1])) >= MINIMUM_GROUPS} or found

    def judge(self, claim_id: str, make: Callable[[], Interval], requirement_met: bool = False) -> Verdict:
        """Verdict on a claim; "not testable here" where no task is learnt or `make` finds nothing to estimate.

        `requirement_met`: whether this run meets the claim's own condition, for claims that have one.
        """
        if not any(self.learnt.values()):
            return untestable(claim_id, "no task of this run is learnt")
        try:
            interval = make()
        except ValueError as error:
            return untestable(claim_id, str(error))
        if not math.isfinite(interval.estimate):
            return untestable(claim_id, "nothing to estimate it from")
        return judge(claim_id, interval, requirement_met=requirement_met)

    @property
    def where(self) -> str:
        """Model, dtype, device and date, for captions."""
        date = max(t.manifest["date"] for t in self.traces.values())
        return f"{self.model.name}, {self.model.dtype} on {self.model.device.type}, {date}"

    def token_text(self, token_id: int) -> str:
        """The text of one vocabulary entry, spaces and control characters shown; of a classifier, the label."""
        if self.model.kind == "classifier":
            return visible(self.model.labels[int(token_id)])
        return visible(self.model.tokenizer.decode([int(token_id)]))


def in_template(task: Task, template: str) -> Task:
    """A translation task whose prompts are `template` with each source in place of {source}; ValueError for others."""
    if task.kind != "translation" or "{source}" not in template:
        raise ValueError(f"parameter template is {template!r}, task {task.name!r}; allowed are a template that holds "
                         "{source}, for translation tasks, or nothing")
    return replace(task, prompts=[template.replace("{source}", source) for source in task.sources])


class Results:
    """The figures that a notebook states: kept for the JSON file and glued for the prose.

    `beside` are studies of further models on the same page.
    """

    def __init__(self, notebook: str, study: Study, beside: Sequence[Study] = ()):
        self.notebook, self.study, self.beside = notebook, study, beside
        self.tasks: dict[str, dict] = {}
        self.overall: dict[str, dict] = {}
        self.claims: list[dict] = []

    def put(self, task: str, key: str, value: Interval | float) -> None:
        """Keep one figure of one task."""
        self.tasks.setdefault(task, {})[key] = as_dict(value)

    def say(self, key: str, value: Interval | float | str) -> None:
        """Keep one figure over all tasks and make it available to the prose as {glue:text}`key:format`.

        An interval is glued as `key`, `key_low` and `key_high`.
        """
        from myst_nb import glue
        self.overall[key] = as_dict(value)
        if isinstance(value, Interval):
            for name, part in ((key, value.estimate), (f"{key}_low", value.low), (f"{key}_high", value.high)):
                glue(name, float(part), display=False)
        else:
            glue(key, value if isinstance(value, str) else float(value), display=False)

    def tell(self, key: str, sentences: str) -> None:
        """Keep whole sentences and make them available to the prose as {glue:md}`key`; nothing in them is markup."""
        from IPython.display import Markdown
        from myst_nb import glue
        self.overall[key] = as_dict(sentences)
        glue(key, Markdown(text(sentences)), display=False)

    def judge(self, verdicts: list[Verdict]) -> None:
        """Keep the verdicts on this notebook's claims."""
        self.claims = [v.to_dict() for v in verdicts]

    def save(self) -> Path:
        """Write results/<model>/<notebook>.json, whole or not at all."""
        study = self.study
        path = Path(study.parameters.results_folder) / study.model.name / f"{self.notebook}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"notebook": self.notebook, "model": study.model.name, "date": time.strftime("%Y-%m-%d"),
                   "parameters": dict(study.parameters), "manifest": {
                       "device": study.model.device.type, "dtype": study.model.dtype,
                       "versions": next(iter(study.traces.values())).manifest["versions"]},
                   **described(study), "tasks": self.tasks, "overall": self.overall, "claims": self.claims}
        if self.beside:
            content["beside"] = {other.model.name: described(other) for other in self.beside}
        write_atomically(path, json.dumps(clean(content), indent=1, ensure_ascii=False, default=float).encode())
        return path


def described(study: Study) -> dict:
    """Quality, what is learnt, and the traces of a study."""
    return {"quality": study.quality, "learnt": study.learnt,
            "traces": {n: {k: t.manifest.get(k) for k in ("weights", "task_hash", "settings", "code", "versions",
                                                          "seconds", "rows", "mismatches", "skipped", "layers")}
                       for n, t in study.traces.items()}}


def as_dict(value: Interval | float | str) -> dict:
    """An interval, or a bare figure, as JSON keeps it."""
    if isinstance(value, Interval):
        return {"estimate": float(value.estimate), "low": float(value.low), "high": float(value.high),
                "sequences": int(value.sequences)}
    return {"estimate": value if isinstance(value, str) else float(value)}


def clean(value):
    """JSON has no NaN: such figures become null."""
    if isinstance(value, dict):
        return {k: clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
