"""What a notebook must conclude where its data leave no doubt, one way and the other."""

import json

import numpy as np
import torch
import transformers as hf
from planted import STEPS, exits, pairs, plant, rewrite

import eelib
from checks.tiny_texts import tokenizer_for

WIDE = 256  # tokens


def test_a_planted_trace_is_what_was_planted(planted_model, planted_tasks, tmp_path):
    """References as outputs, the exit layers that were asked for, and readouts that agree with them."""
    task = eelib.load_task(planted_tasks[0], limit=4)
    made = plant(planted_model, task, tmp_path / "runs", lambda t: exits(1 + t["position"] % 3, 3), STEPS, pairs=2)
    assert list(made.sequences["output"]) == [known for (known,) in task.references] and made.manifest["finished"]
    assert not made.sequences["truncated"].any() and made.tokens["is_eos"].sum() == 4
    for definition in ("first", "stable"):
        np.testing.assert_array_equal(made.exit_layer(definition), 1 + made.tokens["position"] % 3)
    agreement = made["final_rank"] == 1
    emitted = np.broadcast_to(made.tokens["token_id"].to_numpy()[:, None], agreement.shape)
    np.testing.assert_array_equal(made["top1"] == emitted, agreement)
    np.testing.assert_array_equal(made["topk_ids"][..., 0], made["top1"])
    assert all(len(set(ids)) == 10 for layers in made["topk_ids"] for ids in layers)
    spans = made.tokens[~made.tokens["is_eos"]]
    text = dict(zip(made.sequences["sequence"], made.sequences["output"]))
    assert all(text[row.sequence][row.start : row.end] == row.text for row in spans.itertuples())
    before = made.pairs
    rewrite(planted_model, task, tmp_path / "runs", "pairs-2-4", lambda found: {"js": 0 * found["js"]})
    again = eelib.trace(planted_model, task, max_new_tokens=STEPS, folder=tmp_path / "runs", progress=False, pairs=2)
    assert (again.pairs["js"] == 0).all() and (again.pairs["cosine"] == before["cosine"]).all()


# The exit layer of a token by its position: of a task into English, of one out of it, and of answers to questions. The
# model has three layers. Four tasks of questions are one kind, but four of six in the averages over tasks.
SATURATION = {
    "holds": (
        lambda position: 1 + 0 * position,
        lambda position: np.where(position < 2, 3, 1),
        *[lambda position: 1 + 0 * position] * 4,
    ),
    "does not hold": (
        lambda position: 3 + 0 * position,
        lambda position: np.where(position % 5 % 2 == 1, 1, 3),
        *[lambda position: 3 + 0 * position] * 4,
    ),
}


def wide_model(folder):
    """Of three layers, with a window that holds a question's prompt."""
    tokenizer = tokenizer_for("causal")
    tokenizer.model_max_length = WIDE
    torch.manual_seed(0)
    size = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": WIDE, "vocab_size": len(tokenizer)}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    hf.GPT2LMHeadModel(hf.GPT2Config(**size, **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return eelib.load_model(str(folder), device="cpu")


def questions(folder, name):
    """A file of questions whose answers all differ."""
    rows = [
        {"context": f"Room {i}.", "question": "What?", "answers": [row["references"][0]]}
        for i, row in enumerate(pairs(64))
    ]
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / f"{name}.jsonl")
