"""The notebook on architectures on planted traces of three models: every claim holds, or none does."""

import json

import families
import numpy as np
import pytest
from planted import STEPS, exits, plant, verdicts

import eelib

EARLY, MIDDLE, LATE = (exits([layer], 3)[0] for layer in (1, 2, 3))
UNSTABLE = np.array([False, True, False, True])  # "first" at layer 1, but P-A1 goes by "stable"
# Where most tokens agree with the end: of the page's own model, which no claim is about and which would come out the
# other way; of an encoder-decoder; and of a classifier.
AGREE = {"holds": (LATE, EARLY, EARLY), "does not hold": (EARLY, UNSTABLE, LATE)}


@pytest.mark.slow
@pytest.mark.parametrize("verdict", AGREE)
def test_architectures(verdict, planted_model, planted_tasks, tmp_path):
    """Most tokens of an encoder-decoder, and most texts of a classifier, are settled early, or late."""
    rows = [{"premise": f"Dog {i} ran", "hypothesis": "a dog", "label": i % 3} for i in range(36)]
    (tmp_path / "tiny.mnli.jsonl").write_text("\n".join(map(json.dumps, rows)))
    here, labels = planted_tasks[0], str(tmp_path / "tiny.mnli.jsonl")
    t5, bert = (
        eelib.load_model(str(families.save(name, tmp_path / name)), device="cpu") for name in ("t5", "bert_labels")
    )
    for model, name, agrees in zip((planted_model, t5, bert), (here, here, labels), AGREE[verdict]):

        def agreement(tokens):
            return np.where(tokens[["sequence"]] % 6, agrees, MIDDLE)

        made = plant(model, eelib.load_task(name), tmp_path / "runs", agreement, STEPS)
        emitted = made.tokens["token_id"].to_numpy()[:, None]
        np.testing.assert_array_equal(made["top1"] == emitted, agreement(made.tokens))  # of label 0, too
    more = {
        "beside": f"{tmp_path / 't5'} on {here}; {tmp_path / 'bert_labels'} on {labels}",
        "timed_sequences": 0,  # a run of the real model would stop at an output that is not its own; no claim is timed
    }
    found = verdicts("architectures", tmp_path, planted_model, [here], **more)
    assert found == dict.fromkeys(("P-A1", "P-A2", "P-A3"), verdict)
