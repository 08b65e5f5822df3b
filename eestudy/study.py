"""The study of a notebook: a model, its tasks, one trace per task, and one frame of all their tokens."""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from transformers.utils import logging as transformers_logging

from eelib.common.errors import InputError
from eelib.common.files import model_folder, read_json, shipped_version
from eelib.common.values import check_name
from eelib.models.checkpoint import path_of
from eelib.models.lens_adapters import TRANSLATORS_FILE, origin_of, with_translators
from eelib.models.model import Model, load_model
from eelib.tasks.metrics import ItemStats, repeated
from eelib.tasks.task import Task, kind_named, load_task, task_names
from eelib.tracing.decode import encode
from eelib.tracing.make import make_free_shards, trace
from eelib.tracing.trace import Trace
from eestudy.markup.text import visible
from eestudy.parameters import (
    ParameterError,
    Parameters,
    as_parameter_error,
    check_beforehand,
    entries,
    in_project,
    models_beside,
)
from eestudy.resampling import MINIMUM_GROUPS, Interval
from eestudy.statistics import interval_of

MOST_REPEATED = 0.2  # of the tokens of a task with sensible text, in an 8-gram that occurs twice in its output
SHORTEST = 5  # tokens; MINIMUM_GROUPS outputs of a task with sensible text have so many
# Of a study on tasks that are not the page's.
NOT_OURS: dict[str, Any] = {"wording": "auto", "example_sequence": -1, "beside": ""}
WHY_NOT = {
    "sensible": f"No task of this run has sensible text, so nothing can be concluded about exit layers: it takes "
    f"{MINIMUM_GROUPS} outputs of {SHORTEST} tokens, and at most {MOST_REPEATED:.0%} of tokens in repeated 8-grams.",
    "masked": f"No task of this run counts, so nothing can be concluded about exit layers: it takes, for a masked "
    f"model, {MINIMUM_GROUPS} texts of {SHORTEST} tokens, at most {MOST_REPEATED:.0%} of tokens in repeated 8-grams, "
    "and a last layer that gives back most of the tokens.",
    "above_baseline": "The model is above the baseline of no task of this run, so nothing can be concluded.",
}


class Study:
    """The model and traces that a notebook's parameters ask for.

    Args:
        parameters: as `check_parameters` returns them.
        sites, pairs: as in `eelib.trace`.
        loaded: the model, where another study has loaded it already.
        other: parameters in place of the page's own, for a page about several models: Study(p, model=p.after).

    Raises:
        ParameterError: one line, for a parameter with which no trace can be made.
    """

    def __init__(
        self, parameters: Parameters, sites: int = 0, pairs: int = 0, loaded: Model | None = None, **other: str | int
    ) -> None:
        self.parameters = p = Parameters(parameters | other)
        with as_parameter_error():
            self.tasks: dict[str, Task] = {n: load_task(n, limit=p.limit) for n in task_names(p.tasks)}
            check_beforehand(p, self.tasks)
            check_name("the last part of parameter model,", model_folder(p.model))  # names the folder of results
            transformers_logging.disable_progress_bar()  # bars litter a page
            self.model: Model = loaded or load_model(p.model, dtype=p.dtype, device=p.device)
            asked = p.get("chat", "auto"), p.get("wording", "auto")
            self.tasks = {name: prompted(task, self.model, *asked) for name, task in self.tasks.items()}
            if sites and not self.model.components:  # before hours of decoding, not after
                raise InputError(self.model.components_error)
            settings = p.max_new_tokens, in_project(p.runs_folder), p.batch_size or None
            for task in self.tasks.values() if len(self.tasks) > 1 else ():  # while others make one, go to the next
                make_free_shards(self.model, task, *settings)
            self.traces: dict[str, Trace] = {
                name: trace(self.model, task, *settings, sites, pairs, progress=False)
                for name, task in self.tasks.items()
            }

    @property
    def name(self) -> str:
        """The model's name in sentences, without the storage of its weights, which captions add."""
        return (self.model.title or self.model.name).partition(",")[0]

    @property
    def card(self) -> dict[str, Any]:
        """The model's card, which describes its training; empty where it has none."""
        return read_json(Path(path_of(self.parameters.model)) / "card.json")

    @property
    def layers(self) -> int:
        """L, the number of blocks."""
        return self.model.layers

    @cached_property
    def tokens(self) -> pd.DataFrame:
        """All tokens of all tasks, a row each; `study["entropy"]` has the same rows.

        Columns: model, task, kind, group, sequence, position (from 0), length (of the output, in tokens), token_id,
        text, truncated; exit layers `first` and `stable` (1..L); `counted`: not an end token, nor a special one of a
        masked model's text; of the task, `sensible` (text that is long enough and repeats little) and `above_baseline`
        (quality).
        """
        parts = []
        for name, made in self.traces.items():
            length = made.sequences.set_index("sequence")["length"]
            parts.append(
                made.tokens.assign(
                    model=self.model.name,
                    task=name,
                    kind=self.tasks[name].kind,
                    sensible=self.sensible[name],
                    above_baseline=self.above_baseline[name],
                    length=made.tokens["sequence"].map(length),
                    first=made.exit_layer("first"),
                    stable=made.exit_layer("stable"),
                    counted=made.statistic_rows(),
                )
            )
        return pd.concat(parts, ignore_index=True)

    def __getitem__(self, readout: str) -> np.ndarray:
        """A readout of all tasks, in the rows of `tokens`: [tokens, L+1]; column 0 is of the embeddings."""
        return np.concatenate([made[readout] for made in self.traces.values()])

    @cached_property
    def quality(self) -> dict[str, dict[str, float]]:
        """Scores of the outputs, by task."""
        return {
            n: self.tasks[n].pick(t.sequences["sequence"].tolist()).quality(list(t.sequences["output"]))
            for n, t in self.traces.items()
        }

    @cached_property
    def sensible(self) -> dict[str, bool]:
        """By task: whether its outputs are long enough, and repeat little enough, for claims on exit layers.

        A masked model also has to give back most tokens of its texts. A classifier writes no text: its tasks count if
        they are above their baseline.
        """
        if not self.model.adapter.writes and self.model.labels:
            return self.above_baseline
        return {
            name: self.repetition[name] <= MOST_REPEATED
            and int((made.sequences["length"] >= SHORTEST).sum()) >= MINIMUM_GROUPS
            and (self.model.adapter.writes or self.gives_back(name))
            for name, made in self.traces.items()
        }

    def gives_back(self, name: str) -> bool:
        """Whether a masked model's last layer gives back most tokens of a task's texts, as a random one does not.

        False for a classifier, which is judged by its labels alone.
        """
        if self.model.labels:
            return False
        made, counted = self.traces[name], self.traces[name].statistic_rows()
        own = np.concatenate(encode(self.model, self.tasks[name], made.sequences["sequence"].tolist()))
        same = made.tokens["token_id"].to_numpy() == own
        return bool(2 * same[counted].sum() > counted.sum())

    @cached_property
    def repetition(self) -> dict[str, float]:
        """By task: the share of tokens in an 8-gram that occurs twice in their output."""
        found = {}
        for name, made in self.traces.items():
            outputs = made.tokens.groupby("sequence", sort=False)["token_id"]
            twice = np.concatenate([repeated(ids.tolist()) for _, ids in outputs])[made.statistic_rows()]
            found[name] = float(twice.mean()) if len(twice) else 0.0
        return found

    @cached_property
    def above_baseline(self) -> dict[str, bool]:
        """By task: whether its baseline, stated beforehand, lies below the 95% interval of every score that it names.

        Where none is stated, a model that writes counts as above it, another model only if it gives back its texts. The
        whole interval has to be above, since guessing beats the majority class of two balanced labels half the time.
        """
        found = {}
        for name, made in self.traces.items():
            task = self.tasks[name].pick(made.sequences["sequence"].tolist())
            scores = quality_interval(task, list(made.sequences["output"])) if task.baseline else {}
            above = task.above_baseline({metric: interval.low for metric, interval in scores.items()})
            found[name] = above and bool(task.baseline or self.model.adapter.writes or self.gives_back(name))
        return found

    def why_not(self, premise: str = "sensible") -> str:
        """Why no claim can be judged that needs `premise` ("sensible" or "above_baseline"); empty if a task has it."""
        if any(getattr(self, premise).values()):
            return ""
        if premise == "sensible" and not self.model.adapter.writes:
            premise = "above_baseline" if self.model.labels else "masked"
        return WHY_NOT[premise]

    @property
    def where(self) -> str:
        """Model and tasks, for captions."""
        return f"{self.model.title or self.model.name}; {', '.join(self.tasks)}."

    @property
    def ran(self) -> str:
        """When and how the traces were made, once per page."""
        date = max(t.manifest["date"] for t in self.traces.values())
        rows = sum(t.manifest["rows"] for t in self.traces.values())
        wrong = sum(t.manifest["mismatches"] for t in self.traces.values())
        return (
            f"{self.model.title or self.model.name}, {self.layers} layers, {self.model.dtype} on "
            f"{self.model.device.type}, {date}. The last layer's best token is the emitted one for "
            f"{rows - wrong:,} of {rows:,} tokens."
        )

    def about_tasks(self) -> pd.DataFrame:
        """A row per task: outputs, tokens, outputs that were cut, repetition, quality, and what it can be judged on."""
        rows = []
        for name, made in self.traces.items():
            scores = ", ".join(f"{metric} {value:.1f}" for metric, value in self.quality[name].items())
            rows.append(
                {
                    "task": name,
                    "outputs": len(made.sequences),
                    "tokens": int(made.statistic_rows().sum()),
                    "cut": int(made.sequences["truncated"].sum()),
                    "repeated (%)": round(100 * self.repetition[name], 1),
                    "quality": scores or "–",
                    "sensible text": "yes" if self.sensible[name] else "no",
                    "above baseline": ("yes" if self.above_baseline[name] else "no") if self.quality[name] else "–",
                }
            )
        return pd.DataFrame(rows)

    def token_text(self, token_id: int) -> str:
        """The text of one vocabulary entry, spaces and control characters shown; of a classifier, the label."""
        if self.model.kind == "classifier":
            return visible(self.model.labels[int(token_id)])
        return visible(str(self.model.tokenizer.decode([int(token_id)])))


def studies_beside(p: Parameters) -> list[Study]:
    """A study of each model that the parameter `beside` names, except the page's own.

    The parameters `beside_limit` and `beside_new_tokens` are their texts per task and longest output.

    Raises:
        ParameterError: one line, as in `models_beside`.
    """
    asked = {"limit": p.beside_limit, "max_new_tokens": p.beside_new_tokens}
    return [Study(p, model=model, tasks=tasks, **asked, **NOT_OURS) for model, tasks in models_beside(p)]


def study_named(p: Parameters, parameter: str) -> Study | None:
    """A study of the model that a parameter names with its tasks, as in "A on translation/*"; None where it is empty.

    Raises:
        ParameterError: one line, for a value of another form.
    """
    found = entries(p, parameter)
    if len(found) > 1:
        raise ParameterError(f"parameter {parameter} names {len(found)} models; allowed is one, with its tasks")
    return Study(p, model=found[0][0], tasks=found[0][1], **NOT_OURS) if found else None


def lens_of(p: Parameters, study: Study) -> Study | None:
    """A study of the page's model, read through the tuned lens that the parameter `lens` names; None where it is empty.

    None, too, with a printed line, where the shipped lens is of other weights than a model of its name, and where near
    ties were decoded otherwise, as they may be in batches of another size.

    Raises:
        ParameterError: one line, for a lens of another model, and for a damaged one.
    """
    if not p.lens:
        return None
    folder = Path(path_of(p.lens))
    try:
        shipped = p.lens == shipped_version(p.model, "lens")
        if shipped and origin_of(folder / TRANSLATORS_FILE)["model_hash"] != study.model.hash:
            print(f"{p.lens} was trained for other weights than these of {p.model}; it is left out.")
            return None
        read = with_translators(study.model, folder)
    except InputError as error:
        raise ParameterError(f"parameter lens: {error}") from error
    found, token = Study(p, model=p.lens, loaded=read), ["task", "sequence", "position", "token_id"]
    if found.tokens[token].equals(study.tokens[token]):
        return found
    print(f"{p.lens} is left out: it was decoded otherwise than {p.model}, in near ties.")
    return None


def pair_of(p: Parameters, pairs: int = 0) -> tuple[Study, Study]:
    """A study of `model` and one of `after`, the same model after joint optimization, on the same prompts.

    Raises:
        ParameterError: one line, where `after` is empty, a model of another shape, or one with another chat template.
    """
    if not p.after:
        raise ParameterError("parameter after is empty; this notebook compares a model with another training of it")
    transformers_logging.disable_progress_bar()  # bars litter a page
    with as_parameter_error():
        models = [load_model(name, dtype=p.dtype, device=p.device) for name in (p.model, p.after)]
    shapes = [(m.kind, m.network.config.model_type, m.layers, m.hidden_size, m.vocab_size) for m in models]
    if shapes[0] != shapes[1]:
        raise ParameterError(
            f"parameter after is {p.after!r}, whose kind, type, layers, width and vocabulary are {shapes[1]}; those of "
            f"{p.model!r} are {shapes[0]}"
        )
    if p.get("chat") != "no" and models[0].tokenizer.chat_template != models[1].tokenizer.chat_template:
        raise ParameterError(
            f"parameter after is {p.after!r}, whose chat template is not that of {p.model!r}, so their prompts would "
            "differ; allowed with chat=no"
        )
    return Study(p, pairs=pairs, loaded=models[0]), Study(p, pairs=pairs, model=p.after, loaded=models[1])


def pairs_beside(p: Parameters) -> list[tuple[Study, Study]]:
    """The pairs that the parameter `others` names, as in "A > B on classification/sst2; C > D on E,F".

    The parameter `beside_limit`, where a page has it, is their texts per task.

    Raises:
        ParameterError: one line, for an entry of another form.
    """
    found = []
    for models, tasks in entries(p, "others", "A > B on translation/*"):
        before, _, after = (part.strip() for part in models.partition(">"))
        asked = {"model": before, "after": after, "tasks": tasks, "limit": p.get("beside_limit", p.limit)}
        found.append(pair_of(Parameters({**p, **asked, **NOT_OURS})))
    return found


def quality_interval(task: Task, outputs: list[str]) -> dict[str, Interval]:
    """The interval of each score of the outputs (0-100), items resampled by group; of width 0 if all groups are equal.

    BLEU of translations, F1 of answers, ROUGE-1, 2 and L of summaries, GLUE's scores of labels; {} without references.
    Items without a reference are left out.
    """
    groups, (stats,) = item_stats(task, outputs)
    found = {}
    for name, (values, score) in stats.items():
        sums = pd.DataFrame(values).assign(group=groups)
        one = interval_of(sums, lambda totals: score(totals.to_numpy()))
        same = one.groups > 1 and not one.bounded  # a perfect score, for example
        found[name] = one._replace(low=one.estimate, high=one.estimate) if same else one
    return found


def item_stats(task: Task, *outputs: list[str]) -> tuple[list[str], list[dict[str, ItemStats]]]:
    """The groups of the items that have references, and the statistics that scores need of each of these.

    `outputs`: lists of one output for each item; each list has its statistics, {} without references.
    """
    rows = [row for row, known in enumerate(task.references) if known]
    task, of_kind = task.pick(rows), kind_named(task.kind).item_stats
    return task.groups, [of_kind(task, [texts[row] for row in rows]) if rows else {} for texts in outputs]


def prompted(task: Task, model: Model, chat: str, wording: str) -> Task:
    """The task with the prompts that the parameters `chat` and `wording` ask for.

    Args:
        task: as it was loaded, in the paper's wording.
        model: whose tokenizer may have a chat template.
        chat: "yes", "no", or "auto": if there is a template, and the kind of task instructs or has a "short" wording.
        wording: see `Task.worded`; "auto" is "short" in a chat template, where the kind of task has it, else "paper".
    """
    if chat == "yes" and not model.tokenizer.chat_template:
        raise ParameterError(f"parameter chat is 'yes', but {model.name} has no chat template; allowed: auto, no")
    kind = kind_named(task.kind)
    for_chat = kind.instructs or "short" in kind.wordings
    in_chat = chat == "yes" or (chat == "auto" and for_chat and bool(model.tokenizer.chat_template))
    if wording == "auto":
        wording = "short" if in_chat and "short" in kind.wordings else "paper"
    return replace(task.worded(wording) if kind.wordings else task, chat=in_chat)
