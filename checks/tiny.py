"""A tiny random network of any architecture in transformers: its default configuration, shrunken; no downloads."""

import dataclasses
import re

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from checks.tiny_texts import WINDOW, tokenizer_for

KINDS = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "classifier": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
}
LAYERS, VOCABULARY = 4, 304

# Field names and their value in a tiny network; the first pattern that matches the whole name decides.
SIZES = [
    (r"(src_|tgt_|decoder_|unpadded_|t2u_)?vocab_size(_per_layer_input)?", VOCABULARY),
    (r".*vocab_size.*|.*_vocab|index_topk.*", 64),
    (
        r".*head_dim|d_kv|index_n_heads|mamba_(n|num)_heads|.*(state_size|d_state)|patch_size|sliding_window(_size)?"
        r"|attention_window(_size)?|local_attention|window_size|attention_chunk_size",
        8,
    ),
    (r"(.*_)?(hidden_size|d_model|n_embd|emb_dim|embedding_size|lru_width|word_embed_proj_dim|hidden_sizes)|dim", 32),
    (r".*(intermediate|ffn|feed_forward|feedforward|ff|expert)_?(hidden_)?(size|dim)(_mlp)?|d(im)?_?ff|hidden_dim", 64),
    (r"(swa_)?num_key_value_heads|num_kv_heads|num_experts_per_tok(en)?|moe_topk?|moe_k", 2),
    (r".*_pattern|interleave_moe_layer_step|global_attn_every_n_layers|layer_group_size", 2),
    (r".*(attention_heads|num_heads|n_heads?)|linear_num_(key|value)_heads|prompt_length", 4),
    (r"num_(local_|routed_)?experts|n_routed_experts|zero_expert_num", 4),
    (r"num_hidden_layers|n_layers?|num_layers|(num_)?(decoder|encoder)_layers", LAYERS),
    (r"n_group|topk_group|first_k_dense_replace|num_dense_layers|moe_num_shared_experts|n_shared_experts", 1),
    (r"num_kv_shared_layers", 0),
    (r"max_(seq_len|source_positions|target_positions|(.*_)?position_embeddings)|n_positions", WINDOW),
    (r"(mamba_)?chunk_size|image_size|num_mel_bins|.*_rank", 16),
    (r"residual_multiplier", 0.6),
    (r"embedding_multiplier|logits_scaling", 2.0),
    (r"logit_scale", 0.5),
]

# Sizes that are None by default and that the network needs; the second entry, where the first is a field too.
ABSENT = {
    "num_key_value_heads": ("num_attention_heads", 2),
    "head_dim": ("num_attention_heads", 8),
    "n_routed_experts": ("n_shared_experts", 4),
    "n_shared_experts": ("n_routed_experts", 1),
    "num_experts_per_tok": ("n_routed_experts", 2),
    "n_group": ("n_routed_experts", 1),
    "topk_group": ("n_routed_experts", 1),
}

# What the rules above can't know, by model type. Keys with a dot reach into a nested configuration.
OVERRIDES: dict[str, dict] = {
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "zaya": {"num_experts_per_tok": 1},
    "mamba2": {"num_heads": 8},
    "esm": {"vocab_size": VOCABULARY},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": ["global", "local"] * 2},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "xmod": {"default_language": "en_XX"},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "longcat_flash": {"qk_head_dim": 16},
    "neomme": {"head_dim": 16},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2},
    "hy_v4": {"indexer_types": ["full"] * 4},
    "dots3_note": {
        "vision_config.adapter_in_dim": 32,
        "vision_config.adapter_out_dim": 32,
        "audio_config.adapter_input_size": 32,
        "audio_config.adapter_out_dim": 32,
        "audio_config.downsample_hidden_size": 16,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
}


def small_fields(kind: type[PretrainedConfig], given: dict) -> dict:
    """Arguments of a configuration class that make its network tiny."""
    try:
        default = kind().to_dict()
    except Exception:  # some classes can't be made without arguments
        default = {}
    fields = {f.name: f.default for f in dataclasses.fields(kind)}
    depth = next((default[k] for k in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if k in default), 0)
    chosen: dict = {}
    for name in fields:
        value = default.get(name, fields[name])
        if isinstance(value, list) and len(value) == depth and depth > 1:
            chosen[name] = some_of_each(value)
        elif value is None and name in ABSENT and ABSENT[name][0] in fields:
            chosen[name] = ABSENT[name][1]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            size = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), value)
            if name == "num_key_value_heads" and value == default.get("num_attention_heads"):
                size = 4  # as many as queries: some families allow nothing else
            if value and size != value:
                chosen[name] = size
    for name, part in kind.sub_configs.items():
        nested = default.get(name)
        inner = nested.get("model_type") if isinstance(nested, dict) else None
        if part.__name__ == "AutoConfig":
            if not inner or inner not in CONFIG_MAPPING:
                continue
            part = CONFIG_MAPPING[inner]
        inside = {k.removeprefix(f"{name}."): v for k, v in given.items() if k.startswith(f"{name}.")}
        chosen[name] = small_fields(part, inside) | ({"model_type": inner} if inner else {})
    return chosen | {k: v for k, v in given.items() if "." not in k}


def some_of_each(values: list) -> list:
    """`LAYERS` entries that show every kind of entry, the list's last entry last."""
    last = values[-1]
    others = [value for i, value in enumerate(values) if value != last and value not in values[:i]]
    return [*([*others, last] * LAYERS)[: LAYERS - 1], last]


def tiny_config(kind: str, model_type: str) -> PretrainedConfig:
    tokenizer = tokenizer_for("masked" if kind == "classifier" else kind)
    made = CONFIG_MAPPING[model_type]
    known = {f.name for f in dataclasses.fields(made)}
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    fields = small_fields(made, OVERRIDES.get(model_type, {}))
    for name, part in fields.items():
        if name in made.sub_configs and name.startswith(("text", "decoder", "encoder", "thinker")):
            fields[name] = ids | part
    fields |= {name: value for name, value in ids.items() if name in known}
    if kind == "seq2seq" or (kind == "classifier" and made.is_encoder_decoder):
        fields["decoder_start_token_id"] = tokenizer.bos_token_id
    if kind == "causal" and "is_decoder" in known:
        fields["is_decoder"] = True
    if kind == "classifier":
        fields["num_labels"] = 3
    return made(**fields)


def build(kind: str, model_type: str) -> PreTrainedModel:
    """The network in eval mode, with random weights that leave nothing at its default; the same ones every time."""
    network_class = getattr(transformers, KINDS[kind][model_type])
    torch.manual_seed(0)
    config = tiny_config(kind, model_type)
    if not isinstance(config, network_class.config_class):  # the language model of a larger one
        config = config.get_text_config(decoder=True)
    network = network_class(config)
    randomize(network)
    return network.eval().requires_grad_(False)


@torch.no_grad()
def randomize(network: nn.Module) -> None:
    """Matrices, norms and biases away from what they start as."""
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad or not parameter.is_floating_point():
            continue
        if parameter.ndim <= 1 or "A_log" in name:
            parameter.add_(0.4 * torch.randn_like(parameter))
        else:
            parameter.copy_(torch.randn_like(parameter) * 1.6 / parameter.shape[-1] ** 0.5)
    for name, buffer in network.named_buffers():
        if name.endswith("final_logits_bias"):
            buffer.normal_(0.0, 0.5)
