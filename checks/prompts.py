"""Try wordings of prompts on the development texts, and choose one for each kind of task: data/prompts/log.json.

    python -m checks.prompts [--model NAME] [--out data/prompts/log.json]

A kind's "short" wording in eelib/tasks is the one chosen here. The choice looks at quality alone, never at
exit layers, and at texts that no report uses. A wording stands in the model's chat template ("chat") or is given as it
is. Only those in the template can be chosen, since that is where a study uses "short"; the others are for comparison.
(The rule was changed after the first run, for continuation only: at first it chose among the wordings outside the
template, and took "continue, raw".)
"""

import argparse
import hashlib
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from checks.report import headed, write_report
from eelib.common.files import data_folder
from eelib.models.model import Model, load_model
from eelib.tasks import structured, text_kinds
from eelib.tasks.metrics import normalised, repeated
from eelib.tasks.task import Task, load_task
from eelib.tracing.decode import greedy_decode

LOG = data_folder("prompts", "log.json")
BATCH = 20
MOST_WORDINGS = 6


class Wording(NamedTuple):
    """A template, and whether it stands in the model's chat template."""

    template: str
    chat: bool = True


class Trial(NamedTuple):
    """The wordings of a kind, and how one of them is chosen.

    best: the score by which the wording with the highest is chosen. Without one, that with the least repetition is
    chosen among those that end (at least half of the outputs reach the end token) or stay on topic (at least 80% do,
    see `on_topic`). The wording `natural` comes first if it is one of these and repeats at most 5 points more.
    """

    wordings: dict[str, Wording]
    most: int  # new tokens
    best: str = ""
    natural: str = ""


PASSAGE = (
    "The baker Ilmari kept his flour in the bell tower, because the cellar was wet. On Sundays he had to fetch it "
    "before the bells rang."
)
NEWS = (
    "The council of Orrin Bay voted on Monday to close the old swimming pool in March. Repairs would have cost four "
    "million euros. Swimmers can use the pool of the next town until a new one is built.",
    "A truck with twenty tons of oranges tipped over on the coast road near Velmouth on Friday. Nobody was hurt, but "
    "the road stayed closed for six hours while volunteers picked up the fruit.",
)
HEADLINES = ("Orrin Bay closes its old swimming pool", "Spilled oranges block coast road for hours")
NOTES = (
    "Nadia Brandt in Leipzig needs 3 umbrellas and two coats as soon as possible. The order is TB-3019-c.",
    "Pack seven plates for Oscar Lindgren, number MV-5562-h. It goes to Turin and there is plenty of time.",
)
RECORDS = (
    '{"id": "TB-3019-c", "name": "Nadia Brandt", "items": [{"what": "umbrellas", "count": 3}, {"what": "coats", '
    '"count": 2}], "city": "Leipzig", "urgent": true}',
    '{"id": "MV-5562-h", "name": "Oscar Lindgren", "items": [{"what": "plates", "count": 7}], "city": "Turin", '
    '"urgent": false}',
)
ASKED = (("Where was the flour?", "in the bell tower"), ("Why was it not in the cellar?", "the cellar was wet"))
AS_JSON = "Write the order as JSON with the keys id, name, items, city and urgent."
TRIALS = {
    "question_answering": Trial(
        {
            "paper, raw": Wording(text_kinds.QUESTION_PROMPT, chat=False),
            "paper": Wording(text_kinds.QUESTION_PROMPT),
            "few words, at the end": Wording("{context}\n\nQuestion: {question}\nAnswer in a few words."),
            "few words, at the start": Wording(
                "Answer the question with a few words from the text.\n\nText: {context}\n\nQuestion: {question}"
            ),
            "question last": Wording("{context}\n\n{question}"),
            "two worked answers": Wording(
                f"Answer the question with a few words from the text.\n\nText: {PASSAGE}\n"
                + "".join(f"Question: {question}\nAnswer: {answer}\n" for question, answer in ASKED)
                + "\nText: {context}\nQuestion: {question}\nAnswer:"
            ),
        },
        64,
        best="F1",
    ),
    "summarization": Trial(
        {
            "paper, raw": Wording(text_kinds.SUMMARIZATION_PROMPT, chat=False),
            "paper": Wording(text_kinds.SUMMARIZATION_PROMPT),
            "one sentence": Wording("Summarize this text in one short sentence.\n\n{text}"),
            "headline": Wording("Write a headline of at most eight words for this text.\n\n{text}"),
            "headline, at the end": Wording("{text}\n\nWrite a short headline for the text above."),
            "two worked headlines": Wording(
                "Write a short headline for the text.\n\n"
                + "".join(f"Text: {text}\nHeadline: {line}\n\n" for text, line in zip(NEWS, HEADLINES, strict=True))
                + "Text: {text}\nHeadline:"
            ),
        },
        64,
        best="ROUGE-1",
    ),
    "structured": Trial(
        {
            "paper, raw": Wording(structured.PROMPT, chat=False),
            "paper": Wording(structured.PROMPT),
            "keys": Wording(f"{AS_JSON} Answer with the JSON only.\n\n{{note}}"),
            "one worked order": Wording(f"{AS_JSON}\n\nNote: {NOTES[0]}\nJSON: {RECORDS[0]}\n\nNote: {{note}}\nJSON:"),
            "two worked orders": Wording(
                f"{AS_JSON}\n\n"
                + "".join(f"Note: {note}\nJSON: {record}\n\n" for note, record in zip(NOTES, RECORDS, strict=True))
                + "Note: {note}\nJSON:"
            ),
            "two worked orders, no instruction": Wording(
                "".join(f"{note}\n{record}\n\n" for note, record in zip(NOTES, RECORDS, strict=True)) + "{note}"
            ),
        },
        96,
        best="field F1",
    ),
    "instructions": Trial(
        {
            "plain, raw": Wording("{instruction}", chat=False),
            "plain": Wording("{instruction}"),
            "paper's form": Wording("### Instruction:\n{instruction}\n### Response:\n"),
            "briefly": Wording("{instruction}\n\nAnswer briefly."),
            "three sentences": Wording("{instruction} Please answer in at most three sentences."),
        },
        96,
        natural="plain",
    ),
    "continuation": Trial(
        {
            "plain, raw": Wording("{opening}", chat=False),
            "continue, raw": Wording("Continue the text.\n\n{opening}", chat=False),
            "paper's form, raw": Wording(
                "### Instruction:\nContinue the text:\n### Input:\n{opening}\n### Response:\n{opening}", chat=False
            ),
            "story book, raw": Wording("From a collection of short texts by several authors:\n\n{opening}", chat=False),
            "plain": Wording("{opening}"),
            "continue": Wording("Continue this text with a few sentences.\n\n{opening}"),
        },
        96,
    ),
}


def on_topic(output: str, source: str) -> bool:
    """Whether an output has a word of five letters or more of the text that it is about."""
    return not {word for word in normalised(source) if len(word) >= 5}.isdisjoint(normalised(output))


def tried(model: Model, task: Task, most: int) -> dict[str, float]:
    """Scores of a task's outputs, to four decimals; shares in percent, lengths in tokens without the end token."""
    encoded, ids = model.encode(task.prompts, task.chat), list[list[int]]()
    for start in range(0, len(encoded), BATCH):
        ids += greedy_decode(model, encoded[start : start + BATCH], most)
    ended = [row[-1] in model.eos_ids for row in ids]
    bare = [row[:-1] if end else row for row, end in zip(ids, ended, strict=True)]
    outputs = [str(model.tokenizer.decode(row, skip_special_tokens=True)) for row in bare]
    kept = sum(int(repeated(row).sum()) for row in bare)
    topical = [on_topic(output, source) for output, source in zip(outputs, task.sources, strict=True)]
    found = task.quality(outputs) | {
        "median words": statistics.median(len(output.split()) for output in outputs),
        "repeated": 100 * kept / max(1, sum(map(len, bare))),
        "ended": 100 * statistics.mean(ended),
        "on topic": 100 * statistics.mean(topical),
        "mean length": statistics.mean(map(len, bare)),
    }
    return {name: round(float(value), 4) for name, value in found.items()}


def choice(kind: str, scores: dict[str, dict[str, float]]) -> str:
    """The wording that the rule of a kind takes, from the scores of its wordings; the first of those that are equal."""
    trial = TRIALS[kind]
    rivals = [name for name in scores if trial.wordings[name].chat]
    if trial.best:
        return max(rivals, key=lambda name: scores[name][trial.best])
    rivals = [name for name in rivals if scores[name]["ended"] >= 50 or scores[name]["on topic"] >= 80] or rivals
    least = min(rivals, key=lambda name: scores[name]["repeated"])
    natural = trial.natural in rivals and scores[trial.natural]["repeated"] <= scores[least]["repeated"] + 5
    return trial.natural if natural else least


def rule(kind: str) -> str:
    """The same in words."""
    trial = TRIALS[kind]
    if trial.best:
        return f"the highest {trial.best} of the wordings in the chat template"
    least = (
        "the least repetition of the wordings in the chat template of which half of the outputs reach the end token or "
        "80% have a word of five letters or more of their text"
    )
    return least + (f"; {trial.natural!r}, where it is at most 5 points above that" if trial.natural else "")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name or a folder, with a chat template")
    parser.add_argument("--out", type=Path, default=LOG, help="the log, as JSON (default: %(default)s)")
    options = parser.parse_args()
    head = headed("prompts", "sacrebleu", "rouge-score")
    model, kinds = load_model(options.model), dict[str, Any]()
    for kind, trial in TRIALS.items():
        file = data_folder("prompts", "development", f"{kind}.jsonl")
        task, rows = load_task(str(file)), dict[str, dict[str, Any]]()
        for name, (template, chat) in trial.wordings.items():
            scores = tried(model, replace(task.worded(template), chat=chat), trial.most)
            rows[name] = {"template": template, "chat": chat, "scores": scores}
            print(f"{kind}, {name}: {scores}", flush=True)
        kinds[kind] = {
            "texts": len(task),
            "texts_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "max_new_tokens": trial.most,
            "rule": rule(kind),
            "chosen": choice(kind, {name: row["scores"] for name, row in rows.items()}),
            "wordings": rows,
        }
        print(f"{kind}: {kinds[kind]['chosen']!r} is chosen", flush=True)
    write_report(
        options.out,
        head,
        model=model.name,
        model_hash=model.hash,
        settings={"decoding": "greedy", "dtype": model.dtype, "device": model.device.type, "batch_size": BATCH},
        kinds=kinds,
    )


if __name__ == "__main__":
    main()
