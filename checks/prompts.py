"""Try wordings of prompts on the development texts; the "short" wording of a kind in eelib has to be the one chosen.

data/prompts/wordings.json holds the wordings, data/prompts/log.json what they scored. The choice looks at quality
alone, never at exit layers, and at texts that no report uses. A wording stands in the model's chat template ("chat") or
is given as it is. Only those in the template can be chosen, since that is where a study uses "short"; the others are
for comparison. (The rule was changed after the first run, for continuation only: at first it chose among the wordings
outside the template, and took "continue, raw".)
"""

import hashlib
import json
import statistics
from dataclasses import replace
from typing import Any

from checks.report import Goal, finish, headed, options
from eelib.common.files import data_folder
from eelib.models.model import Model, load_model
from eelib.tasks.metrics import normalised, repeated
from eelib.tasks.task import KINDS, Task, load_task
from eelib.tracing.decode import greedy_decode

FOLDER = data_folder("prompts")
TRIALS: dict[str, dict[str, Any]] = json.loads((FOLDER / "wordings.json").read_text(encoding="utf-8"))
MODEL = "smollm2-135m-instruct"


def on_topic(output: str, source: str) -> bool:
    """Whether an output has a word of five letters or more of the text that it is about."""
    return not {word for word in normalised(source) if len(word) >= 5}.isdisjoint(normalised(output))


def tried(model: Model, task: Task, most: int) -> dict[str, float]:
    """Scores of a task's outputs, to four decimals; shares in percent, lengths in tokens without the end token."""
    ids = greedy_decode(model, model.encode(task.prompts, task.chat), most)
    ended = [row[-1] in model.eos_ids for row in ids]
    bare = [row[:-1] if end else row for row, end in zip(ids, ended, strict=True)]
    outputs = [str(model.tokenizer.decode(row, skip_special_tokens=True)) for row in bare]
    topical = [on_topic(output, source) for output, source in zip(outputs, task.sources, strict=True)]
    found = task.quality(outputs) | {
        "median words": statistics.median(len(output.split()) for output in outputs),
        "repeated": 100 * sum(int(repeated(row).sum()) for row in bare) / max(1, sum(map(len, bare))),
        "ended": 100 * statistics.mean(ended),
        "on topic": 100 * statistics.mean(topical),
        "mean length": statistics.mean(map(len, bare)),
    }
    return {name: round(float(value), 4) for name, value in found.items()}


def choice(kind: str, scores: dict[str, dict[str, float]]) -> str:
    """The wording that the rule of a kind takes, from the scores of its wordings; the first of those that are equal."""
    trial = TRIALS[kind]
    rivals = [name for name in scores if trial["wordings"][name]["chat"]]
    if trial["best"]:
        return max(rivals, key=lambda name: scores[name][trial["best"]])
    rivals = [name for name in rivals if scores[name]["ended"] >= 50 or scores[name]["on topic"] >= 80] or rivals
    least = min(rivals, key=lambda name: scores[name]["repeated"])
    natural = trial["natural"]
    return natural if natural in rivals and scores[natural]["repeated"] <= scores[least]["repeated"] + 5 else least


def rule(kind: str) -> str:
    """The same in words."""
    best, natural = TRIALS[kind]["best"], TRIALS[kind]["natural"]
    if best:
        return f"the highest {best} of the wordings in the chat template"
    least = (
        "the least repetition of the wordings in the chat template of which half of the outputs reach the end token or "
        "80% have a word of five letters or more of their text"
    )
    return least + (f"; {natural!r}, where it is at most 5 points above that" if natural else "")


def goals(kinds: dict[str, Any]) -> list[Goal]:
    """What the rule chooses is what eelib has."""
    found = []
    for kind, log in kinds.items():
        chosen = log["wordings"][log["chosen"]]["template"]
        name = f"{kind}: the wording that the rule chooses is the one that eelib has"
        met = chosen == KINDS[kind].wordings["short"]
        found.append({"goal": name, "measured": log["chosen"], "bound": "the same", "met": met})
    return found


def main() -> None:
    parser = options(__doc__, "prompts")
    parser.set_defaults(output=FOLDER / "log.json")
    asked = parser.parse_args()
    depends = ("eelib/common", "eelib/models", "eelib/tasks", "data/prompts/development", "data/prompts/wordings.json")
    head = headed("prompts", "sacrebleu", "rouge-score", depends=depends)
    model, kinds = load_model(MODEL), dict[str, Any]()
    for kind, trial in TRIALS.items():
        file = FOLDER / "development" / f"{kind}.jsonl"
        task, rows = load_task(str(file)), dict[str, dict[str, Any]]()
        for name, wording in trial["wordings"].items():
            worded = replace(task.worded(wording["template"]), chat=wording["chat"])
            rows[name] = wording | {"scores": tried(model, worded, trial["most"])}
            print(f"{kind}, {name}: {rows[name]['scores']}", flush=True)
        kinds[kind] = {
            "texts": len(task),
            "texts_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "max_new_tokens": trial["most"],
            "rule": rule(kind),
            "chosen": choice(kind, {name: row["scores"] for name, row in rows.items()}),
            "wordings": rows,
        }
    settings = {"decoding": "greedy", "dtype": model.dtype, "device": model.device.type, "batch_size": len(task)}
    head |= {"models": {model.name: model.hash}, "settings": settings}
    finish(asked.output, head, goals(kinds), kinds=kinds)
