"""What the tests of pages share: a tiny deep model, exit layers that vary, and the parameters of a page."""

import numpy as np
import torch
import transformers as hf
from planted import STEPS

import eelib
from checks.tiny_texts import WINDOW, tokenizer_for


def deep_model(folder, layers=10, seed=0, window=WINDOW):
    """A checkpoint as tiny as may be, of so many blocks."""
    tokenizer = tokenizer_for("causal")
    tokenizer.model_max_length = window
    torch.manual_seed(seed)
    size = {"n_embd": 16, "n_layer": layers, "n_head": 2, "n_positions": window, "vocab_size": len(tokenizer)}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    hf.GPT2LMHeadModel(hf.GPT2Config(**size, **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return eelib.load_model(str(folder), device="cpu")


def varied(tokens, layer):
    """Exit layers by position, but for one token of every seventh output: groups that are all alike show nothing."""
    layers = layer(tokens["position"].to_numpy())
    other = (tokens["sequence"] % 7 == 0) & (tokens["position"] == 1)
    return np.where(other, 4 - layers, layers)


def asked(folder, model, tasks):
    """Parameters of a page whose texts, traces and results lie in `folder`."""
    kept = {"runs_folder": str(folder / "runs"), "results_folder": str(folder / "results")}
    return kept | {"model": str(model), "tasks": tasks, "limit": 0, "max_new_tokens": STEPS, "device": "cpu"}
