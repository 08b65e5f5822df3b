"""A tiny Qwen 2 model as a GGUF file with a chat template, and the same weights as a network."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers as hf
from families import WIDE

from checks.tiny_texts import END, WINDOW, tokenizer_for

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} assistant: {% endif %}"
)


def write(
    path: Path, architecture: str = "qwen2", kind: str = "Q8_0", more: Callable[[gguf.GGUFWriter], None] | None = None
) -> hf.Qwen2ForCausalLM:
    """Write the file with matrices in a type of gguf; returns the network with the weights that the file then holds.

    `more`: adds to what is written.
    """
    torch.manual_seed(5)
    tokenizer = tokenizer_for("causal")
    # each matrix has rows of 32 or 64 numbers, as Q8_0 needs
    sizes = WIDE | dict(intermediate_size=64, num_key_value_heads=2, vocab_size=len(tokenizer))
    network = hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes, eos_token_id=tokenizer.eos_token_id))
    network = network.eval().requires_grad_(False)
    for parameter in network.parameters():  # nowhere at a default
        parameter.copy_(0.3 * torch.randn_like(parameter) + (parameter.ndim == 1))
    config, state = network.config, network.state_dict()
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(WINDOW)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    model = tokenizer.backend_tokenizer.to_str()
    merges = [" ".join(pair) for pair in json.loads(model)["model"]["merges"]]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    special = set(tokenizer.all_special_ids)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokens.index(END))
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    packed_as = gguf.GGMLQuantizationType[kind]
    for key in list(state):
        name, values = names.get_name(key, (".weight", ".bias")), state[key].numpy().astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(name, values)
            continue
        packed = gguf.quants.quantize(values, packed_as)
        writer.add_tensor(name, packed, raw_dtype=packed_as)
        state[key] = torch.from_numpy(gguf.quants.dequantize(packed, packed_as))
    if more:
        more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    network.load_state_dict(state)
    return network
