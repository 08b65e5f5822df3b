"""What trainings whose weights are not shipped have left in data/: read, and compared text by text."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from eelib.common.files import data_folder
from eelib.tasks.task import load_task
from eestudy.exits.task_quality import grouped, item_stats
from eestudy.old.statistics.interval import Interval
from eestudy.old.statistics.resampling import bootstrap_unweighted_totals_over_tasks

Totals = Callable[[np.ndarray], np.ndarray]  # a statistic of totals: [draws, columns] -> [draws]
Sums = Mapping[str, np.ndarray]  # {task: of each group [groups, columns]}


def read(folder: str, name: str) -> dict[str, Any]:
    """What is kept of a model."""
    found: dict[str, Any] = json.loads(data_folder(folder, f"{name}.json").read_text(encoding="utf-8"))
    return found


def bleu_of_outputs(texts: Mapping[str, Mapping[str, list]]) -> dict[str, np.ndarray]:
    """{task: BLEU's sums of each group [groups, 10]} of the outputs to shipped texts."""
    tasks = {name: load_task(name) for name in texts}
    return {
        name: grouped(item_stats(task, texts[name]["outputs"])["BLEU"].values, task.groups)
        for name, task in tasks.items()
    }


def captions(quality: Mapping[str, Mapping[str, float]]) -> float:
    """BLEU on public captions, mean of the directions."""
    return float(np.mean([scores["BLEU"] for scores in quality.values()]))


def change(statistic: Totals, after: Sums, before: Sums, seed: int = 0) -> Interval:
    """A statistic of one model less that of another, paired by text; they may have other numbers of columns."""
    return bootstrap_unweighted_totals_over_tasks(
        {
            task: (partial(apart, statistic, own.shape[1]), np.hstack([own, before[task]]))
            for task, own in after.items()
        },
        seed=seed,
    )


def apart(statistic: Totals, columns: int, both: np.ndarray) -> np.ndarray:
    """A statistic of the first `columns` less that of the rest [draws]."""
    return statistic(both[:, :columns]) - statistic(both[:, columns:])
