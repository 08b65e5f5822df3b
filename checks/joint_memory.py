"""Peak memory and time of a training step: plain, joint (a loss on every layer), and joint with all logits held.

`python -m checks.joint_memory [--steps 3]` trains a random Llama of two vocabularies for a few steps, each way in a
process of its own, and writes data/checks/joint_memory.json. It ends with status 1 where joint optimization takes more
than 1.5 times the peak memory of plain fine-tuning.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from eelib.common.files import data_folder

RESULT = data_folder("checks", "joint_memory.json")
VOCABULARIES, WAYS, MOST = (8192, 32000), ("plain", "joint", "joint, all logits held"), 1.5
TEXTS, TOKENS, TARGETS = 32, 128, 64  # 4,096 tokens a step, half of them targets


def steps(vocabulary: int, way: str, count: int) -> dict:
    """Train a random network for `count` steps; peak memory of this process in MB and seconds of the last step."""
    import torch
    from torch.nn import functional as F
    from transformers import LlamaConfig, LlamaForCausalLM

    from eelib.models.head import Head
    from eelib.models.model import Model
    from recipes.losses import layers_loss, states_at, uniform_weights
    from recipes.training import Optimizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )
    network = LlamaForCausalLM(config).bfloat16().train()
    unembed = Head([network.model.norm], network.lm_head, 256, vocabulary)
    no_tokenizer: Any = None  # no text is read
    model = Model("random", "causal", network, no_tokenizer, list(network.model.layers), unembed, [], "", "", True)
    optimizer, depth = Optimizer(network), model.layers
    ids = torch.randint(vocabulary, (TEXTS, TOKENS))
    rows = (torch.arange(TEXTS)[:, None] * TOKENS + torch.arange(TOKENS - TARGETS, TOKENS)).flatten()
    labels = torch.randint(vocabulary, (len(rows),))
    for _ in range(count):
        began = time.perf_counter()
        states = states_at(model, {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}, rows)
        if way == "plain":
            loss = F.cross_entropy(unembed(states[-1]), labels)
        elif way == "joint":
            loss = layers_loss(unembed, states, labels, uniform_weights(depth))
        else:
            loss = torch.stack([F.cross_entropy(unembed(state), labels) for state in states]).sum() / depth
        loss.backward()
        optimizer.step(1e-3)
        seconds = time.perf_counter() - began
    return {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "seconds_per_step": seconds}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="training steps (3)")
    parser.add_argument("--output", type=Path, default=RESULT, help=f"where the JSON goes ({RESULT})")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(steps(int(asked.one[0]), asked.one[1], asked.steps)))
        return
    from checks.report import headed, write_report  # late: a child's memory is measured

    head, rows = headed("joint_memory", "pyarrow"), []
    for vocabulary in VOCABULARIES:
        found = {}
        for way in WAYS:
            told = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "checks.joint_memory",
                    "--steps",
                    str(asked.steps),
                    "--one",
                    str(vocabulary),
                    way,
                ],
                check=True,
                capture_output=True,
                text=True,
            )
            found[way] = json.loads(told.stdout.splitlines()[-1])
            rows.append(
                {
                    "vocabulary": vocabulary,
                    "way": way,
                    **found[way],
                    "memory_of_plain": found[way]["peak_mb"] / found["plain"]["peak_mb"],
                    "time_of_plain": found[way]["seconds_per_step"] / found["plain"]["seconds_per_step"],
                }
            )
            print(json.dumps(rows[-1]))
    ok = all(row["memory_of_plain"] <= MOST for row in rows if row["way"] == "joint")
    write_report(
        asked.output,
        head,
        network="Llama of 12 blocks of width 256, bf16, random weights",
        batch=f"{TEXTS} texts of {TOKENS} tokens, {TARGETS} of them targets",
        steps=asked.steps,
        most=MOST,
        ok=ok,
        rows=rows,
    )
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
