"""The columns that describe tokens and sequences: what was asked, what was written, and where each token's text is."""

from eelib.models.model import Model
from eelib.tasks.task import Task
from eelib.tracing.pieces import pieces
from eelib.tracing.shards import TOKEN_COLUMNS

SEQUENCE_COLUMNS = (
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


def tables(
    model: Model, task: Task, rows: list[int], prompts: list[list[int]], outputs: list[list[int]], truncated: list[bool]
) -> tuple[dict[str, list], dict[str, list]]:
    """(token columns, sequence columns) of the sequences `rows`, with the ids of their prompts and outputs, and whether
    an output was cut.
    """
    described = [describe(model, task, *each) for each in zip(rows, prompts, outputs, truncated)]
    tokens = {name: [value for columns, _ in described for value in columns[name]] for name in TOKEN_COLUMNS}
    return tokens, {name: [row[name] for _, row in described] for name in SEQUENCE_COLUMNS}


def describe(
    model: Model, task: Task, sequence: int, prompt: list[int], ids: list[int], truncated: bool
) -> tuple[dict[str, list], dict]:
    """(columns of one sequence's tokens, its own row).

    The end token, where it was reached, has an empty place at the end of the output.
    """
    ended = model.adapter.writes and ids[-1] in model.eos_ids
    body = ids[:-1] if ended else ids
    if model.labels:
        output = model.labels[ids[0]]
        texts, starts, ends = [output], [0], [len(output)]
    else:
        texts, starts, ends, output = pieces(model.tokenizer, body)
    if ended:
        texts = texts + [str(model.tokenizer.decode(ids[-1:]))]
        starts, ends = starts + [len(output)], ends + [len(output)]
    count, group = len(ids), task.groups[sequence]
    tokens: dict[str, list] = {
        "sequence": [sequence] * count,
        "position": list(range(count)),
        "token_id": ids,
        "text": texts,
        "start": starts,
        "end": ends,
        "is_eos": [False] * len(body) + [True] * ended,
        "is_special": model.adapter.are_special(prompt, ids),
        "truncated": [truncated] * count,
        "group": [group] * count,
    }
    row: dict = {
        "sequence": sequence,
        "group": group,
        "prompt": task.prompts[sequence],
        "source": task.sources[sequence],
        "reference": (task.references[sequence] or [""])[0],
        "output": output,
        "length": len(body),
        "truncated": truncated,
        "prompt_tokens": len(prompt),
    }
    return tokens, row
