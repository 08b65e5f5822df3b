"""A traffic of structured output arrives: what the product's validator says, and what token accuracy says (A).

A, "A production failure to design for": thresholds that other texts were calibrated with let JSON's easy tokens leave,
and a single token that is wrong makes a whole object useless.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from eelib.common.errors import InputError, NotEstimable
from eelib.exits.decoding.generate import generate
from eelib.exits.exit_rule import ExitRule
from eelib.exits.trace_scores import rule_at
from eelib.tasks.structured import failures
from eelib.tasks.task import load_task, task_names
from eestudy.claims import Verdict
from eestudy.exits.task_quality import grouped
from eestudy.old.analysis.keys_values import writing_model
from eestudy.old.analysis.production import CALIBRATION, REPORT, Served, leaving, mean_of, served_by
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.resampling import bootstrap_totals
from eestudy.old.study.claims import untestable
from eestudy.old.study.study import Study
from eestudy.parameters import Parameters, as_parameter_error

TOGETHER = 32  # outputs decoded in a batch
TRIED = 3  # thresholds that the validator is asked about
MORE = 0.01  # share of outputs by which failures may rise
FULL, CARRIED, TOKENS, VALIDATOR = "full depth", "other traffic's", "by tokens", "by the validator"


@dataclass(frozen=True)
class Structured:
    """A model that writes structured output and other texts, its outputs under each threshold.

    `served`: calibrated on both tasks. `numbers`: of the outputs of the structured task's report side. `thresholds`:
    {way: threshold; None: all layers}. `failed`: {way: as of `failing`}, `layers`: {way: mean per token}. `tokens`: the
    report side, teacher-forced, at the threshold of the other task.
    """

    served: Served
    other: str
    task: str
    numbers: list[int]
    thresholds: dict[str, float | None]
    failed: dict[str, np.ndarray]
    layers: dict[str, float]
    tokens: pd.DataFrame


def open_structured(p: Parameters, rule: ExitRule, other: str) -> Structured:
    """The model and task of the parameters `structured` and `structured_task`, beside another task of its own.

    NotEstimable without one, where it has not learnt both, and where the other traffic's threshold lets no token leave.
    ParameterError for a task of another kind, or one that is the other task.
    """
    if not p.structured.strip():
        raise NotEstimable("no model that writes structured output is named")
    with as_parameter_error():
        task = task_names(p.structured_task)[0]
        if load_task(task, limit=1).kind != "structured" or task == other:
            raise InputError(
                f"parameter structured_task is {p.structured_task!r}; it must be a structured task beside {other}"
            )
        study = Study(p, model=p.structured, tasks=f"{other},{task}", loaded=writing_model(p, p.structured))
    if unlearnt := [name for name in (other, task) if not study.learnt[name]]:
        raise NotEstimable(f"{study.model.name} has not learnt {', '.join(unlearnt)}")
    served = served_by(study, rule, p.kept, [other, task])
    if served.threshold(other) is None:
        raise NotEstimable(f"no threshold of {other} lets tokens leave")
    thresholds = {
        FULL: None,
        CARRIED: served.threshold(other),
        TOKENS: served.threshold(task),
        VALIDATOR: by_validator(served, task),
    }
    numbers = numbers_of(served, task, REPORT)
    failed, layers = {}, {}
    for way, value in thresholds.items():
        outputs, layers[way] = said(served, task, numbers, value)
        failed[way] = failing(served, task, numbers, outputs)
    tokens = leaving(served, task, served.rule_of(other))
    return Structured(served, other, task, numbers, thresholds, failed, layers, tokens)


def numbers_of(served: Served, task: str, side: int) -> list[int]:
    """Numbers of the outputs of one side of a task."""
    return served.study.traces[task].tokens.loc[served.sides[task][side], "sequence"].unique().tolist()


def said(served: Served, task: str, numbers: Sequence[int], threshold: float | None) -> tuple[list[str], float]:
    """(outputs, mean layers per token) of some prompts at a threshold, deferred keys; of the trace where it is None."""
    study = served.study
    if threshold is None:
        return study.traces[task].sequences.set_index("sequence").loc[numbers, "output"].tolist(), float(served.depth)
    made = generate(
        study.model,
        study.tasks[task].pick(numbers),
        rule_at(served.rule, threshold),
        kv_policy="deferred",
        batch_size=TOGETHER,
        batch_split=None,
        max_new_tokens=study.parameters.max_new_tokens,
    )
    return made.sequences["output"].tolist(), float(made.tokens["exit_layer"].mean())


def failing(served: Served, task: str, numbers: Sequence[int], outputs: list[str]) -> np.ndarray:
    """float [outputs, 2]: whether each fails the schema, and whether its identifier is wrong."""
    references = served.study.tasks[task].pick(numbers).references
    return np.array([(one.schema, one.identifier) for one in failures(outputs, references)], dtype=float)


def by_validator(served: Served, task: str) -> float | None:
    """The lowest of a few thresholds from which on, on the calibration side, outputs fail the schema or have a wrong
    identifier more often than at full depth for at most a share MORE of them; None where none does, and where no
    threshold keeps the tokens.
    """
    lowest, best = served.threshold(task), None
    if lowest is None:
        return None
    numbers = numbers_of(served, task, CALIBRATION)
    before = failing(served, task, numbers, said(served, task, numbers, None)[0]).max(1).mean()
    values = served.study.scores(served.rule, task).score[served.sides[task][CALIBRATION]][:, :-1].numpy()
    above = values[np.isfinite(values) & (values >= lowest)]
    for value in sorted(set(np.quantile(above, np.linspace(0.2, 0.95, TRIED)).tolist()), reverse=True):
        now = failing(served, task, numbers, said(served, task, numbers, value)[0]).max(1).mean()
        if now > before + MORE:
            break
        best = value
    return best


def ways_table(found: Structured) -> pd.DataFrame:
    """A row per threshold: columns threshold, value, layers, fails (schema), identifier (wrong), both as Interval."""
    rows, groups = [], groups_of(found)
    for way, failed in found.failed.items():
        value = found.thresholds[way]
        wrong = pd.DataFrame(failed, columns=["schema", "identifier"]).assign(group=groups)
        rows.append(
            {
                "threshold": way,
                "value": np.nan if value is None else value,
                "layers": found.layers[way],
                "fails": mean_of(wrong, "schema", found.served.seed),
                "identifier": mean_of(wrong, "identifier", found.served.seed),
            }
        )
    return pd.DataFrame(rows)


def groups_of(found: Structured) -> list[str]:
    """The group of each output."""
    return found.served.study.tasks[found.task].pick(found.numbers).groups


def rise_beyond_tokens(found: Structured) -> Interval:
    """Rise of the share that fails the schema at the other traffic's threshold, less the fall of token agreement below
    what was promised (A-P4); groups of outputs are resampled.
    """
    kept = found.served.study.parameters.kept
    rise = found.failed[CARRIED][:, 0] - found.failed[FULL][:, 0]
    tokens = found.tokens.groupby("sequence")["wrong"].agg(["sum", "size"])
    wrong = tokens.reindex(found.numbers, fill_value=0).to_numpy(float)  # an output may be nothing but its end
    sums = grouped(np.column_stack([rise, np.ones(len(rise)), wrong]), groups_of(found))
    return bootstrap_totals(
        lambda t: t[:, 0] / t[:, 1] - (t[:, 2] / t[:, 3] - (1 - kept)), sums, seed=found.served.seed
    )


def verdict(found: Structured | None, why: str = "") -> Verdict:
    """Verdict on A-P4."""
    if found is None:
        return untestable("A-P4", why)
    made = found.served.study.judge("A-P4", lambda: rise_beyond_tokens(found), requirement_met=True, tasks=1)
    return replace(made, models=found.served.name)
