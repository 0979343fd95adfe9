"""The tiny checkpoints quantised as mlx-lm writes them, and what transformers makes of the decoded weights."""

import json
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx.utils import tree_map, tree_map_with_path
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from safetensors.numpy import load_file

from . import mlx_weights, models, oracle

# mlx-lm and transformers, both in f32, on the same decoded weights.
MOST_DIFFERENCE = 1e-4


@dataclass
class Recipe:
    """How to quantise one checkpoint: the default, and other settings for paths that end in a suffix."""

    source: str
    name: str
    group_size: int = 32
    bits: int = 4
    mode: str = "affine"
    # A setting of False leaves the module as it is.
    overrides: tuple[tuple[str, dict | bool], ...] = ()
    dtype: mx.Dtype = mx.bfloat16
    # mlx-lm has no sliding window without layer_types: it can only be compared within the first window.
    compared: int | None = None


ROUTERS = (
    ("mlp.gate", {"group_size": 32, "bits": 8}),
    ("shared_expert_gate", {"group_size": 32, "bits": 8}),
)
MIXED = (
    ("v_proj", {"group_size": 32, "bits": 6}),
    ("down_proj", {"group_size": 32, "bits": 3}),
    ("q_proj", {"group_size": 64, "bits": 5}),
    ("lm_head", {"group_size": 64, "bits": 8}),
    ("o_proj", False),
)

FLOATS = (
    ("lm_head", {"group_size": 32, "bits": 8, "mode": "mxfp8"}),
    ("down_proj", {"group_size": 16, "bits": 4, "mode": "nvfp4"}),
)

RECIPES = [
    Recipe("qwen3", "qwen3-mlx-4bit"),
    Recipe("llama3", "llama3-mlx-mixed", bits=2, overrides=(("embed_tokens", {"group_size": 32, "bits": 4}),)),
    Recipe("llama-bias", "llama-bias-mlx-mixed", overrides=MIXED, dtype=mx.float16),
    Recipe("mistral", "mistral-mlx-fp", mode="mxfp4", overrides=FLOATS, compared=21),
    Recipe("qwen3_moe", "qwen3_moe-mlx-4bit", overrides=ROUTERS),
    Recipe("qwen3_next", "qwen3_next-mlx-4bit", overrides=ROUTERS),
    Recipe("qwen3_5", "qwen3_5-mlx-8bit", bits=8),
    Recipe("qwen3_5_moe", "qwen3_5_moe-mlx-4bit", overrides=ROUTERS),
]


def predicate(recipe: Recipe):
    def choose(path: str, module: nn.Module) -> dict | bool:
        return next((how for suffix, how in recipe.overrides if path.endswith(suffix)), True)

    return choose


def convert(recipe: Recipe, source: Path, out: Path) -> None:
    """What `mlx_lm convert` does, with the recipe's settings in place of the model's own."""
    model, config = load_model(source, lazy=True)
    keep = getattr(model, "cast_predicate", lambda _: True)

    def cast(path, value):
        return value.astype(recipe.dtype) if keep(path) and mx.issubdtype(value.dtype, mx.floating) else value

    model.update(tree_map_with_path(cast, model.parameters()))
    model, config = quantize_model(
        model, config, recipe.group_size, recipe.bits, mode=recipe.mode, quant_predicate=predicate(recipe)
    )
    save_model(out, model)
    save_config(config, out / "config.json")
    models.write_tokenizer(config.get("text_config", config)["vocab_size"], out)
    (out / "model.safetensors.index.json").unlink(missing_ok=True)


def mlx_logits(directory: Path, tokens: np.ndarray) -> np.ndarray:
    """mlx-lm's own logits, everything but the codes in float32."""
    model, _ = load_model(directory)
    model.update(tree_map(lambda v: v.astype(mx.float32) if mx.issubdtype(v.dtype, mx.floating) else v, model.parameters()))
    return np.array(model(mx.array(tokens)[None])[0])


def make(recipe: Recipe, base: Path) -> None:
    source, out = base / recipe.source, base / recipe.name
    tokens = load_file(source / "expected.safetensors")["tokens"]
    convert(recipe, source, out)
    arrays, metadata = oracle.evaluate(mlx_weights.load(out, source), tokens)
    theirs, ours = mlx_logits(out, tokens)[: recipe.compared], arrays["logits"][: recipe.compared]
    difference = float(np.abs(theirs - ours).max())
    if not difference < MOST_DIFFERENCE:
        raise ValueError(f"{recipe.name}: mlx-lm and transformers differ by {difference}")
    metadata["mlx_lm_minus_transformers"] = f"{difference:.3g}"
    metadata["made_by"] += f"; weights quantised and decoded by mlx {mx.__version__}, mlx-lm {mlx_lm.__version__}"
    oracle.save(arrays, out / "expected.safetensors", metadata)
    print(recipe.name, json.dumps(metadata), flush=True)


def write(folder: Path) -> None:
    """Adds the MLX checkpoints to the Hugging Face ones in `folder`."""
    for recipe in RECIPES:
        make(recipe, folder)
