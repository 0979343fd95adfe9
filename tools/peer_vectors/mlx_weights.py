"""MLX-quantised checkpoints, decoded by MLX in float32 and put back into transformers' modules."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
import transformers

from . import oracle

mx.set_default_device(mx.cpu)

# Architectures whose RMSNorm computes with 1 + weight in transformers; MLX stores the sum.
ONE_PLUS_WEIGHT = {"qwen3_next", "qwen3_5", "qwen3_5_moe"}
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")


def widen(array: mx.array) -> torch.Tensor:
    return torch.from_numpy(np.array(array.astype(mx.float32)))


def dequantize(path: str, weights: dict, quantization: dict) -> torch.Tensor:
    """code * scale + bias in float32, from the scales and biases as stored."""
    # A path's own settings replace the default ones whole: without a mode of their own they are affine.
    how = quantization.get(path, quantization)
    group_size, bits, mode = how["group_size"], how["bits"], how.get("mode", "affine")
    scales, biases = weights[f"{path}.scales"], weights.get(f"{path}.biases")
    if mode == "affine":
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    values = mx.dequantize(
        weights[f"{path}.weight"], scales, biases, group_size=group_size, bits=bits, mode=mode, dtype=mx.float32
    )
    return widen(values)


def decode(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint in float32 under MLX's names."""
    config = json.loads((directory / "config.json").read_text())
    weights = {}
    for file in sorted(directory.glob("model*.safetensors")):
        weights |= mx.load(str(file))
    decoded = {}
    for name, array in weights.items():
        path = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        quantized = f"{path}.scales" in weights
        decoded[name] = dequantize(path, weights, config["quantization"]) if quantized else widen(array)
    return decoded


def to_transformers(model_type: str, decoded: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors under the names and in the layout of transformers' text-only classes."""
    state, experts = {}, {}
    for name, value in decoded.items():
        name = name.removeprefix("language_model.")
        if name.endswith("conv1d.weight"):
            value = value.moveaxis(1, 2)
        if model_type in ONE_PLUS_WEIGHT and name.endswith(NORMS):
            value = value - 1.0
        if ".switch_mlp." in name:
            block, part = name.removesuffix(".weight").split(".switch_mlp.")
            experts.setdefault(f"{block}.experts", {})[part] = value
        else:
            state[name] = value
    for path, parts in experts.items():
        state[f"{path}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
        state[f"{path}.down_proj"] = parts["down_proj"]
    return state


def load(directory: Path, config_of: Path):
    """transformers' model of the configuration in `config_of`, with the weights of the MLX checkpoint in `directory`."""
    full = transformers.AutoConfig.from_pretrained(config_of)
    config = full.get_text_config()
    config.tie_word_embeddings = full.tie_word_embeddings
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = oracle.text_class(json.loads((config_of / "config.json").read_text())["architectures"][0])(config)
    state = to_transformers(full.model_type, decode(directory))
    if full.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.float().load_state_dict(state, strict=True)
    return model.eval()
