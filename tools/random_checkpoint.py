#!/usr/bin/env python3
"""Writes a checkpoint with random weights: for timing whole models where the trained weights are not at hand.

    tools/random_checkpoint.py qwen3.5-9b FOLDER             4 bits in MLX's layout; needs Python alone
    tools/random_checkpoint.py qwen3.5-9b FOLDER --dense     bf16 in Hugging Face's layout, for lowbit quantize
    tools/random_checkpoint.py qwen3-0.5b FILE --gguf        f16, for llama-quantize; needs numpy and gguf

    tools/random_checkpoint.py gemma4-e2b FOLDER             4 bits in MLX's layout

The shapes are those of the published config.json files, but for qwen3-0.5b: Qwen3-0.6B with a smaller vocabulary, 487
million parameters. The tokenizer is the demo model's, which knows the first 8192 ids, and a GGUF file has none: time with
`lowbit bench --model FOLDER`, which takes ids."""
import argparse
import json
import math
import pathlib
import random
import shutil
import struct

COMMON = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


def dense(layers, hidden, inner, heads, kv_heads, value_heads):
    return {
        "model_type": "qwen3_5", "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "linear_num_value_heads": value_heads,
    }


# Of the larger ones: global layers have heads of 512, whose values are their keys.
GEMMA4 = {
    "model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True,
    "sliding_window": 1024, "final_logit_softcapping": 30.0, "vocab_size": 262144, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144, "tie_word_embeddings": True, "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
}

SHAPES = {
    "qwen3.5-4b": dense(32, 2560, 9216, 16, 4, 32),
    "qwen3.5-9b": dense(32, 4096, 12288, 16, 4, 32),
    "qwen3.5-27b": dense(64, 5120, 17408, 24, 4, 48),
    "qwen3.5-35b-a3b": {
        "model_type": "qwen3_5_moe", "num_hidden_layers": 40, "hidden_size": 2048, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32,
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite", "num_hidden_layers": 47, "hidden_size": 2048, "intermediate_size": 10240,
        "moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8,
        "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "attention_bias": False,
        "rms_norm_eps": 1e-5, "vocab_size": 154880, "max_position_embeddings": 202752, "rope_theta": 1e6,
        "tie_word_embeddings": False, "dtype": "bfloat16",
    },
    # mlx-lm's defaults.
    "gemma4-e2b": {
        "model_type": "gemma4_text", "num_hidden_layers": 35, "hidden_size": 1536, "intermediate_size": 6144,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
        "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
        "sliding_window": 512, "final_logit_softcapping": 30.0, "vocab_size": 262144, "rms_norm_eps": 1e-6,
        "vocab_size_per_layer_input": 262144, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
    # Five layers with a window to each one without.
    "gemma3-270m": {
        "model_type": "gemma3_text", "num_hidden_layers": 18, "hidden_size": 640, "intermediate_size": 2048,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256,
        "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "tie_word_embeddings": True,
    },
    # Tied embeddings of 46.7 million weights, and 28 layers of 15.7 million.
    "qwen3-0.5b": {
        "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 45568,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "intermediate_size": 2880,
        "num_local_experts": 32, "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "sliding_window": 128, "vocab_size": 201088, "rms_norm_eps": 1e-5, "rope_theta": 150000,
        "max_position_embeddings": 131072, "attention_bias": True, "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe", "num_hidden_layers": 46, "hidden_size": 4096, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True,
        "use_qk_norm": False, "partial_rotary_factor": 0.5, "rope_theta": 1e6, "rms_norm_eps": 1e-5,
        "vocab_size": 151552, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "gemma4-31b": {
        **GEMMA4, "num_hidden_layers": 60, "hidden_size": 5376, "intermediate_size": 21504,
        "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4,
    },
    "gemma4-26b-a4b": {
        **GEMMA4, "num_hidden_layers": 30, "hidden_size": 2816, "intermediate_size": 2112,
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
        "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
    },
    # Granite 4 H Micro's.
    "granite-4-h-micro": {
        "model_type": "granitemoehybrid", "num_hidden_layers": 40, "hidden_size": 2048, "intermediate_size": 8192,
        "shared_intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 100352, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "position_embedding_type": "nope", "attention_bias": False, "tie_word_embeddings": True, "num_local_experts": 0,
        "num_experts_per_tok": 0, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22, "logits_scaling": 8.0, "mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_d_conv": 4, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
    },
}
BITS, GROUP = 4, 64
QUANTIZATION = {"group_size": GROUP, "bits": BITS, "mode": "affine"}


def bfloat16(value):
    """The bytes of a value whose lower half may be cut off."""
    return struct.pack("<f", value)[2:]


class Tensors:
    """Names, types, shapes and where the bytes come from: None for random bytes, k for weights in rows of k, or one value's bytes."""

    def __init__(self, dense=False):
        self.entries = []
        self.dense = dense
        self.normal = {}

    def add(self, name, dtype, shape, fill):
        self.entries.append((name, dtype, shape, fill))

    def plain(self, name, shape, value):
        self.add(name, "BF16", shape, bfloat16(value))

    def quantized(self, name, *shape, bits=BITS):
        *rows, k = shape
        if self.dense:
            self.add(f"{name}.weight", "BF16", shape, k)
            return
        # Codes around their middle, so that a row's product with unit activations is about one.
        scale = 1 / (2 ** bits / math.sqrt(12) * math.sqrt(k))
        self.add(f"{name}.weight", "U32", [*rows, k * bits // 32], None)
        self.plain(f"{name}.scales", [*rows, k // GROUP], scale)
        self.plain(f"{name}.biases", [*rows, k // GROUP], -scale * 2 ** (bits - 1))

    def weights(self, k, draw):
        """Values whose sum of k squares is about 1, drawn once for each k: a number of them that is odd, so that no two rows are alike."""
        if k not in self.normal:
            self.normal[k] = b"".join(bfloat16(draw.gauss(0, 1 / math.sqrt(k))) for _ in range((1 << 18) - 5)) * 64
        return self.normal[k]

    def write(self, path, seed):
        sizes = {"BF16": 2, "F32": 4, "U32": 4}
        header, offset = {}, 0
        for name, dtype, shape, _ in self.entries:
            end = offset + math.prod(shape) * sizes[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        # One block of random bytes again and again: a prime length, so that no two rows are alike.
        draw = random.Random(seed)
        noise = draw.randbytes((1 << 25) - 39)
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for index, (name, dtype, shape, fill) in enumerate(self.entries):
                begin, end = header[name]["data_offsets"]
                if fill is None:
                    source = noise
                elif isinstance(fill, int):
                    source = self.weights(fill, draw)
                else:
                    source = fill * (1 << 16)
                left = end - begin
                # Each tensor begins elsewhere in the noise: an output layer like the embedding would be taken for it.
                start = index * 40 * 1000 % len(source) if fill is None else 0
                left -= file.write(source[start : start + left])
                while left > 0:
                    left -= file.write(source[:left])
        return offset


def attention(tensors, prefix, shape, gated=True, normed=True, valued=True):
    hidden, dim = shape["hidden_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    tensors.quantized(f"{prefix}.q_proj", (1 + gated) * heads * dim, hidden)
    tensors.quantized(f"{prefix}.k_proj", kv_heads * dim, hidden)
    if valued:
        tensors.quantized(f"{prefix}.v_proj", kv_heads * dim, hidden)
    tensors.quantized(f"{prefix}.o_proj", hidden, heads * dim)
    for norm in ("q_norm", "k_norm") if normed else ():
        tensors.plain(f"{prefix}.{norm}.weight", [dim], 1.0)


def delta_net(tensors, prefix, shape):
    hidden, heads = shape["hidden_size"], shape["linear_num_value_heads"]
    values = heads * shape["linear_value_head_dim"]
    channels = 2 * shape["linear_num_key_heads"] * shape["linear_key_head_dim"] + values
    tensors.quantized(f"{prefix}.in_proj_qkv", channels, hidden)
    tensors.quantized(f"{prefix}.in_proj_z", values, hidden)
    tensors.quantized(f"{prefix}.in_proj_b", heads, hidden)
    tensors.quantized(f"{prefix}.in_proj_a", heads, hidden)
    tensors.quantized(f"{prefix}.out_proj", hidden, values)
    width = shape["linear_conv_kernel_dim"]
    tensors.plain(f"{prefix}.conv1d.weight", [channels, 1, width] if tensors.dense else [channels, width, 1], 0.25)
    tensors.plain(f"{prefix}.A_log", [heads], 0.0)
    tensors.plain(f"{prefix}.dt_bias", [heads], 0.0)
    tensors.plain(f"{prefix}.norm.weight", [shape["linear_value_head_dim"]], 1.0)


def mamba(tensors, prefix, shape):
    hidden, heads = shape["hidden_size"], shape["mamba_n_heads"]
    inner = heads * shape["mamba_d_head"]
    channels = inner + 2 * shape["mamba_n_groups"] * shape["mamba_d_state"]
    tensors.quantized(f"{prefix}.in_proj", inner + channels + heads, hidden)
    tensors.quantized(f"{prefix}.out_proj", hidden, inner)
    tensors.plain(f"{prefix}.conv1d.weight", [channels, shape["mamba_d_conv"], 1], 0.25)
    tensors.plain(f"{prefix}.conv1d.bias", [channels], 0.0)
    for name, value in (("A_log", 0.0), ("dt_bias", -3.0), ("D", 1.0)):
        tensors.plain(f"{prefix}.{name}", [heads], value)
    tensors.plain(f"{prefix}.norm.weight", [inner], 1.0)


def layer_norms(tensors, layer, hidden, names=("input", "post_attention")):
    for name in names:
        tensors.plain(f"{layer}.{name}_layernorm.weight", [hidden], 1.0)


def feedforward(tensors, prefix, hidden, inner):
    tensors.quantized(f"{prefix}.gate_proj", inner, hidden)
    tensors.quantized(f"{prefix}.up_proj", inner, hidden)
    tensors.quantized(f"{prefix}.down_proj", hidden, inner)


def experts(tensors, prefix, shape):
    hidden, count, inner = shape["hidden_size"], shape["num_experts"], shape["moe_intermediate_size"]
    tensors.quantized(f"{prefix}.gate", count, hidden, bits=8)
    if tensors.dense:
        tensors.add(f"{prefix}.experts.gate_up_proj", "BF16", [count, 2 * inner, hidden], hidden)
        tensors.add(f"{prefix}.experts.down_proj", "BF16", [count, hidden, inner], inner)
    else:
        switch_mlp(tensors, f"{prefix}.switch_mlp", count, hidden, inner)
    feedforward(tensors, f"{prefix}.shared_expert", hidden, shape["shared_expert_intermediate_size"])
    tensors.quantized(f"{prefix}.shared_expert_gate", 1, hidden, bits=8)


def predictor(tensors, prefix, shape):
    """A layer that predicts further tokens, of a dense Qwen3.5."""
    hidden = shape["hidden_size"]
    tensors.quantized(f"{prefix}.fc", hidden, 2 * hidden)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors.plain(f"{prefix}.{norm}.weight", [hidden], 1.0)
    layer = f"{prefix}.layers.0"
    layer_norms(tensors, layer, hidden)
    attention(tensors, f"{layer}.self_attn", shape)
    feedforward(tensors, f"{layer}.mlp", hidden, shape["intermediate_size"])


def checkpoint(shape, dense, mtp):
    """All tensors of a model, and the config.json that describes them."""
    tensors, overrides = Tensors(dense), {}
    model = "model.language_model" if dense else "language_model.model"
    tensors.quantized(f"{model}.embed_tokens", shape["vocab_size"], shape["hidden_size"])
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(shape["num_hidden_layers"])]
    for index, kind in enumerate(kinds):
        layer = f"{model}.layers.{index}"
        layer_norms(tensors, layer, shape["hidden_size"])
        if kind == "full_attention":
            attention(tensors, f"{layer}.self_attn", shape)
        else:
            delta_net(tensors, f"{layer}.linear_attn", shape)
        if "num_experts" in shape:
            experts(tensors, f"{layer}.mlp", shape)
            for gate in ["gate", "shared_expert_gate"]:
                overrides[f"{layer}.mlp.{gate}"] = {"group_size": GROUP, "bits": 8}
        else:
            feedforward(tensors, f"{layer}.mlp", shape["hidden_size"], shape["intermediate_size"])
    tensors.plain(f"{model}.norm.weight", [shape["hidden_size"]], 1.0)
    head = "lm_head" if dense else "language_model.lm_head"
    tensors.quantized(head, shape["vocab_size"], shape["hidden_size"])
    if mtp:
        predictor(tensors, "mtp" if dense else "language_model.mtp", shape)
    text = {**shape, "layer_types": kinds, "tie_word_embeddings": False, "dtype": "bfloat16"}
    text["model_type"] += "_text"
    config = {"model_type": shape["model_type"], "text_config": text}
    if not dense:
        config["quantization"] = {**QUANTIZATION, **overrides}
    return tensors, config


def qwen3(shape):
    """The same of a plain Qwen3."""
    tensors = Tensors()
    tensors.quantized("model.embed_tokens", shape["vocab_size"], shape["hidden_size"])
    for index in range(shape["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        layer_norms(tensors, layer, shape["hidden_size"])
        attention(tensors, f"{layer}.self_attn", shape, gated=False)
        feedforward(tensors, f"{layer}.mlp", shape["hidden_size"], shape["intermediate_size"])
    tensors.plain("model.norm.weight", [shape["hidden_size"]], 1.0)
    return tensors, {**shape, "quantization": QUANTIZATION}


def granite(shape):
    """The same of Granite 4 H without experts: attention in every tenth layer, from the sixth on."""
    tensors = Tensors()
    tensors.quantized("model.embed_tokens", shape["vocab_size"], shape["hidden_size"])
    kinds = ["attention" if i % 10 == 5 else "mamba" for i in range(shape["num_hidden_layers"])]
    for index, kind in enumerate(kinds):
        layer = f"model.layers.{index}"
        layer_norms(tensors, layer, shape["hidden_size"])
        if kind == "attention":
            attention(tensors, f"{layer}.self_attn", shape, gated=False, normed=False)
        else:
            mamba(tensors, f"{layer}.mamba", shape)
        feedforward(tensors, f"{layer}.mlp", shape["hidden_size"], shape["intermediate_size"])
    tensors.plain("model.norm.weight", [shape["hidden_size"]], 1.0)
    return tensors, {**shape, "layer_types": kinds, "quantization": QUANTIZATION}


def latent(shape, dense):
    """The same of a model with latent attention."""
    tensors = Tensors(dense)
    hidden, heads, rank = shape["hidden_size"], shape["num_attention_heads"], shape["kv_lora_rank"]
    plain, rotated, values = shape["qk_nope_head_dim"], shape["qk_rope_head_dim"], shape["v_head_dim"]
    count, inner = shape["n_routed_experts"], shape["moe_intermediate_size"]
    tensors.quantized("model.embed_tokens", shape["vocab_size"], hidden)
    for index in range(shape["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        layer_norms(tensors, layer, hidden)
        tensors.quantized(f"{attention}.q_a_proj", shape["q_lora_rank"], hidden)
        tensors.plain(f"{attention}.q_a_layernorm.weight", [shape["q_lora_rank"]], 1.0)
        tensors.quantized(f"{attention}.q_b_proj", heads * (plain + rotated), shape["q_lora_rank"])
        tensors.quantized(f"{attention}.kv_a_proj_with_mqa", rank + rotated, hidden)
        tensors.plain(f"{attention}.kv_a_layernorm.weight", [rank], 1.0)
        if dense:
            tensors.quantized(f"{attention}.kv_b_proj", heads * (plain + values), rank)
        else:
            tensors.quantized(f"{attention}.embed_q", heads, rank, plain)
            tensors.quantized(f"{attention}.unembed_out", heads, values, rank)
        tensors.quantized(f"{attention}.o_proj", hidden, heads * values)
        if index < shape["first_k_dense_replace"]:
            feedforward(tensors, mlp, hidden, shape["intermediate_size"])
            continue
        tensors.add(f"{mlp}.gate.weight", "BF16", [count, hidden], hidden)
        tensors.plain(f"{mlp}.gate.e_score_correction_bias", [count], 0.0)
        if dense:
            tensors.add(f"{mlp}.experts.gate_up_proj", "BF16", [count, 2 * inner, hidden], hidden)
            tensors.add(f"{mlp}.experts.down_proj", "BF16", [count, hidden, inner], inner)
        else:
            switch_mlp(tensors, f"{mlp}.switch_mlp", count, hidden, inner)
        feedforward(tensors, f"{mlp}.shared_experts", hidden, inner * shape["n_shared_experts"])
    tensors.plain("model.norm.weight", [hidden], 1.0)
    tensors.quantized("lm_head", shape["vocab_size"], hidden)
    config = dict(shape)
    if not dense:
        config["quantization"] = QUANTIZATION
    return tensors, config


def biased(tensors, name, *shape, bits=BITS):
    """Weights with a bias, of zeros."""
    tensors.quantized(name, *shape, bits=bits)
    tensors.plain(f"{name}.bias", shape[:-1], 0.0)


def gpt_oss(shape):
    """The same of gpt-oss: each second layer has a window."""
    tensors, hidden, dim = Tensors(), shape["hidden_size"], shape["head_dim"]
    rows, kv_rows = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    count, inner = shape["num_local_experts"], shape["intermediate_size"]
    tensors.quantized("model.embed_tokens", shape["vocab_size"], hidden)
    for index in range(shape["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        layer_norms(tensors, layer, hidden)
        for name, sizes in {"q": [rows, hidden], "k": [kv_rows, hidden], "v": [kv_rows, hidden], "o": [hidden, rows]}.items():
            biased(tensors, f"{layer}.self_attn.{name}_proj", *sizes)
        tensors.plain(f"{layer}.self_attn.sinks", [shape["num_attention_heads"]], 0.0)
        biased(tensors, f"{layer}.mlp.router", count, hidden)
        for name, sizes in {"gate": [inner, hidden], "up": [inner, hidden], "down": [hidden, inner]}.items():
            biased(tensors, f"{layer}.mlp.experts.{name}_proj", count, *sizes)
    tensors.plain("model.norm.weight", [hidden], 1.0)
    tensors.quantized("lm_head", shape["vocab_size"], hidden)
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(shape["num_hidden_layers"])]
    return tensors, {**shape, "layer_types": kinds, "quantization": QUANTIZATION}


def switch_mlp(tensors, prefix, count, hidden, inner):
    tensors.quantized(f"{prefix}.gate_proj", count, inner, hidden)
    tensors.quantized(f"{prefix}.up_proj", count, inner, hidden)
    tensors.quantized(f"{prefix}.down_proj", count, hidden, inner)


def glm4_moe(shape):
    """The same of GLM-4.5 without heads' norms."""
    tensors, hidden, dim = Tensors(), shape["hidden_size"], shape["head_dim"]
    rows, kv_rows = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    count, inner = shape["n_routed_experts"], shape["moe_intermediate_size"]
    tensors.quantized("model.embed_tokens", shape["vocab_size"], hidden)
    for index in range(shape["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        layer_norms(tensors, layer, hidden)
        for name, height in {"q": rows, "k": kv_rows, "v": kv_rows}.items():
            biased(tensors, f"{layer}.self_attn.{name}_proj", height, hidden)
        tensors.quantized(f"{layer}.self_attn.o_proj", hidden, rows)
        mlp = f"{layer}.mlp"
        if index < shape["first_k_dense_replace"]:
            feedforward(tensors, mlp, hidden, shape["intermediate_size"])
            continue
        tensors.add(f"{mlp}.gate.weight", "BF16", [count, hidden], hidden)
        tensors.plain(f"{mlp}.gate.e_score_correction_bias", [count], 0.0)
        switch_mlp(tensors, f"{mlp}.switch_mlp", count, hidden, inner)
        feedforward(tensors, f"{mlp}.shared_experts", hidden, inner * shape["n_shared_experts"])
    tensors.plain("model.norm.weight", [hidden], 1.0)
    tensors.quantized("lm_head", shape["vocab_size"], hidden)
    return tensors, {**shape, "quantization": QUANTIZATION}


def gemma4(shape):
    """The same of a Gemma 4."""
    tensors, layers, hidden = Tensors(), shape["num_hidden_layers"], shape["hidden_size"]
    own, shared = shape["hidden_size_per_layer_input"], min(shape["num_kv_shared_layers"], layers // 2)
    # Small ones have four layers with a window to each one without, larger ones five.
    period = 5 if own else 6
    kinds = ["full_attention" if i % period == period - 1 or i == layers - 1 else "sliding_attention" for i in range(layers)]
    tensors.quantized("model.embed_tokens", shape["vocab_size"], hidden)
    if own:
        tensors.quantized("model.embed_tokens_per_layer", shape["vocab_size"], layers * own)
        tensors.quantized("model.per_layer_model_projection", layers * own, hidden)
        tensors.plain("model.per_layer_projection_norm.weight", [own], 1.0)
    for index, kind in enumerate(kinds):
        layer = f"model.layers.{index}"
        gemma4_attention(tensors, f"{layer}.self_attn", shape, kind == "full_attention")
        double = 2 if index >= layers - shared and own else 1
        feedforward(tensors, f"{layer}.mlp", hidden, double * shape["intermediate_size"])
        layer_norms(tensors, layer, hidden, ("input", "post_attention", "pre_feedforward", "post_feedforward"))
        if shape.get("enable_moe_block"):
            tensors.quantized(f"{layer}.router.proj", shape["num_experts"], hidden)
            tensors.plain(f"{layer}.router.scale", [hidden], 1.0)
            tensors.plain(f"{layer}.router.per_expert_scale", [shape["num_experts"]], 1.0)
            switch_mlp(tensors, f"{layer}.experts.switch_glu", shape["num_experts"], hidden, shape["moe_intermediate_size"])
            for norm in ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"):
                tensors.plain(f"{layer}.{norm}.weight", [hidden], 1.0)
        if own:
            tensors.plain(f"{layer}.post_per_layer_input_norm.weight", [hidden], 1.0)
            tensors.quantized(f"{layer}.per_layer_input_gate", own, hidden)
            tensors.quantized(f"{layer}.per_layer_projection", hidden, own)
        tensors.plain(f"{layer}.layer_scalar", [1], 1.0)
    tensors.plain("model.norm.weight", [hidden], 1.0)
    return tensors, {**shape, "layer_types": kinds, "num_kv_shared_layers": shared, "quantization": QUANTIZATION}


def gemma4_attention(tensors, prefix, shape, is_global):
    """Global layers have heads of their own size and number, and no values where these are the keys."""
    if not is_global:
        attention(tensors, prefix, shape, gated=False)
        return
    heads = shape.get("num_global_key_value_heads", shape["num_key_value_heads"])
    own = {**shape, "head_dim": shape["global_head_dim"], "num_key_value_heads": heads}
    attention(tensors, prefix, own, gated=False, valued=not shape.get("attention_k_eq_v"))


def gemma3(shape):
    """The same of a Gemma 3."""
    tensors, hidden = Tensors(), shape["hidden_size"]
    tensors.quantized("model.embed_tokens", shape["vocab_size"], hidden)
    for index in range(shape["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        attention(tensors, f"{layer}.self_attn", shape, gated=False)
        feedforward(tensors, f"{layer}.mlp", hidden, shape["intermediate_size"])
        layer_norms(tensors, layer, hidden, ("input", "post_attention", "pre_feedforward", "post_feedforward"))
    tensors.plain("model.norm.weight", [hidden], 1.0)
    return tensors, {**shape, "quantization": QUANTIZATION}


def gguf_tensors(shape):
    """Names and shapes of a plain Qwen3's tensors, as llama.cpp's converter names them."""
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    rows, kv_rows = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    layer = {
        "attn_norm": [hidden], "attn_q": [rows, hidden], "attn_k": [kv_rows, hidden], "attn_v": [kv_rows, hidden],
        "attn_q_norm": [dim], "attn_k_norm": [dim], "attn_output": [hidden, rows],
        "ffn_norm": [hidden], "ffn_gate": [inner, hidden], "ffn_up": [inner, hidden], "ffn_down": [hidden, inner],
    }
    tensors = {"token_embd.weight": [shape["vocab_size"], hidden], "output_norm.weight": [hidden]}
    for index in range(shape["num_hidden_layers"]):
        tensors |= {f"blk.{index}.{name}.weight": sizes for name, sizes in layer.items()}
    return tensors


def write_gguf(shape, path, seed):
    """Normally distributed weights in f16, norms of ones in f32, and no tokenizer."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    tensors = gguf_tensors(shape)
    kinds = {name: np.dtype(np.float32 if len(sizes) == 1 else np.float16) for name, sizes in tensors.items()}
    for name, sizes in tensors.items():
        writer.add_tensor_info(name, sizes, kinds[name], math.prod(sizes) * kinds[name].itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    draw = np.random.default_rng(seed)
    for name, sizes in tensors.items():
        one = len(sizes) == 1
        values = np.ones(sizes) if one else draw.standard_normal(sizes, np.float32) / math.sqrt(sizes[-1])
        writer.write_tensor_data(values.astype(kinds[name]))
    writer.close()
    return sum(math.prod(sizes) * kinds[name].itemsize for name, sizes in tensors.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--gguf", action="store_true", help="write a GGUF file of that name; of qwen3-0.5b alone")
    parser.add_argument("--dense", action="store_true", help="bf16 in Hugging Face's layout; of Qwen3.5's shapes alone")
    parser.add_argument("--mtp", action="store_true", help="with a layer that predicts further tokens; of dense Qwen3.5's shapes alone")
    parser.add_argument("--vocabulary", type=int, help="so many tokens instead of the published number")
    parser.add_argument("--layers", type=int, help="so many layers instead of the published number")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    makers = {
        "qwen3": qwen3, "granitemoehybrid": granite, "gemma3_text": gemma3, "gemma4_text": gemma4, "gpt_oss": gpt_oss,
        "glm4_moe": glm4_moe,
    }
    maker = makers.get(SHAPES[arguments.shape]["model_type"])
    whole = maker or "kv_lora_rank" in SHAPES[arguments.shape]
    shape = SHAPES[arguments.shape] if whole else {**COMMON, **SHAPES[arguments.shape]}
    if arguments.layers:
        shape = {**shape, "num_hidden_layers": arguments.layers}
    if arguments.vocabulary:
        shape = {**shape, "vocab_size": arguments.vocabulary}
    if arguments.mtp and (whole or "num_experts" in shape):
        parser.error("--mtp is of dense Qwen3.5's shapes alone")
    if arguments.gguf:
        if maker is not qwen3:
            parser.error("--gguf writes qwen3-0.5b alone")
        print(f"{arguments.folder}: {write_gguf(shape, arguments.folder, arguments.seed) / 1e9:.2f} GB")
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if maker:
        tensors, config = maker(shape)
    elif whole:
        tensors, config = latent(shape, arguments.dense)
    else:
        tensors, config = checkpoint(shape, arguments.dense, arguments.mtp)
    (arguments.folder / "config.json").write_text(json.dumps(config, indent=2))
    size = tensors.write(arguments.folder / "model.safetensors", arguments.seed)
    demo = pathlib.Path(__file__).parent.parent / "models/demo"
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        shutil.copy(demo / name, arguments.folder / name)
    print(f"{arguments.folder}: {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
