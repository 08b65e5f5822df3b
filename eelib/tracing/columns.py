"""The columns of a trace: readouts, and descriptions of tokens and sequences, with each token's text and offsets."""

from collections.abc import Callable, Iterable

from transformers import PreTrainedTokenizerBase

from eelib.lens.readout import FROM_TOP_K, SCALARS, TOP_K
from eelib.models.model import Model
from eelib.tasks.task import Task

STORED = (*SCALARS, *TOP_K)
READOUTS = (*FROM_TOP_K, *STORED)
STORED_OF_SITES = ("entropy", "final_rank", "final_probability", *TOP_K)
WINDOW = 16  # least tokens between two places from which decoding may start
BROKEN = "\ufffd"  # what decoders write for bytes that are no whole character


def describe_all(
    model: Model, task: Task, rows: Iterable[tuple[int, list[int], list[int], bool]]
) -> tuple[dict[str, list], dict[str, list]]:
    """The token columns and the sequence columns of some sequences.

    `rows` has for each sequence its number in the task, the ids of its prompt and output, and whether its output was
    cut.
    """
    described = [describe(model, task, *row) for row in rows]
    tokens = {name: [value for columns, _ in described for value in columns[name]] for name in described[0][0]}
    return tokens, {name: [row[name] for _, row in described] for name in described[0][1]}


def describe(
    model: Model, task: Task, sequence: int, prompt: list[int], ids: list[int], truncated: bool
) -> tuple[dict[str, list], dict]:
    """Describe the tokens of one sequence (columns) and the sequence itself (a row).

    The end token, if reached, starts and ends at the end of the output.
    """
    end_ids = model.eos_ids if model.adapter.writes else set()
    ended = ids[-1] in end_ids
    body = ids[:-1] if ended else ids
    if model.labels:
        output = model.labels[ids[0]]
        texts, starts, ends, special = [output], [0], [len(output)], set[int]()  # its ids are labels
    else:
        texts, starts, ends, output = token_texts(model.tokenizer, body)
        special = set(model.tokenizer.all_special_ids)
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
        "is_eos": [token in end_ids for token in ids],
        "is_special": [token in special for token in (prompt if model.kind == "masked" else ids)],
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


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> tuple[list[str], list[int], list[int], str]:
    """Find the text of each token, by decoding ever longer beginnings of the generated ids.

    A token that completes no character gets an empty text, with the offsets of the character's place.

    Returns:
        The tokens' texts, where each starts and ends in the whole text, and the whole text.
    """

    def decode(part: list[int]) -> str:
        return str(tokenizer.decode(part, clean_up_tokenization_spaces=False)) if part else ""

    whole = decode(ids)
    ends, decoded = ends_in_windows(decode, ids, WINDOW)
    if decoded != whole:  # this tokenizer's text of a beginning depends on what comes much later
        ends, _ = ends_in_windows(decode, ids, len(ids))
    starts, at = [], 0
    for n, end in enumerate(ends):
        starts.append(at)
        ends[n] = at = max(at, min(end, len(whole))) if n + 1 < len(ids) else len(whole)
    return [whole[start:end] for start, end in zip(starts, ends)], starts, ends, whole


def ends_in_windows(decode: Callable[[list[int]], str], ids: list[int], window: int) -> tuple[list[int], str]:
    """Measure the texts of ids[:n], n = 1.., without broken characters at their end.

    To save time, ids[:known] are decoded once, to `settled`, and each step decodes ids[origin:n]. The tokens
    origin..known, at least `window` of them, are decoded again because decoders treat their first token in a way of its
    own (such as dropping a space). `origin` and `known` move on where a character is complete.

    Returns:
        The length of each beginning's text, and the whole text.
    """
    ends, settled, text = [], "", ""
    origin = known = 0
    overlap = ""  # the text of ids[origin:known]
    for n in range(1, len(ids) + 1):
        text = decode(ids[origin:n])
        ends.append(len(settled) - len(overlap) + len(text.rstrip(BROKEN)))
        if n - known >= window and n < len(ids) and text.startswith(overlap) and not text.endswith(BROKEN):
            settled += text[len(overlap) :]
            origin, known = known, n
            overlap = decode(ids[origin:known])
    return ends, settled + text[len(overlap) :]
