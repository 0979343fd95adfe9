"""What transformers and mlx-lm compute in single ops.

Packages: transformers, torch, mlx[cpu], mlx-lm, numpy, safetensors.

Files: `rope` holds, for each case, `{case}.inv_freq`, `{case}.attention_factor` and `{case}.rotated`, the rotation of
`{case}.x` [T, H, D] at `positions`. `sample` holds, for each case, `{case}.params` (top_k, top_p, min_p,
repetition_penalty) and `{case}.logprobs`, what the penalty (for `history`) and the filters leave of `logits` [V].
"""

import importlib.metadata

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_repetition_penalty
from safetensors.numpy import save_file
from transformers import Qwen3NextConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding, apply_rotary_pos_emb

POSITIONS = [0, 1, 5, 1000, 40_961, 1_048_575]
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)
# Case: head_dim, interleaved, rope_parameters.
ROPE = {
    "plain": (128, False, dict(rope_theta=10_000.0)),
    "odd_sizes": (36, False, dict(rope_theta=1_000_000.0)),
    "partial": (64, False, dict(rope_theta=10_000_000.0, partial_rotary_factor=0.25)),
    "interleaved": (64, True, dict(rope_theta=10_000.0)),
    "linear": (64, False, dict(rope_theta=10_000.0, rope_type="linear", factor=3.0)),
    "llama3": (128, False, dict(rope_theta=500_000.0, original_max_position_embeddings=8192, **LLAMA3)),
    "llama3_2": (
        64,
        False,
        dict(rope_theta=500_000.0, original_max_position_embeddings=8192, **LLAMA3 | dict(factor=32.0)),
    ),
    "yarn": (128, False, dict(rope_theta=1_000_000.0, **YARN)),
    "yarn_partial": (128, False, dict(rope_theta=10_000_000.0, partial_rotary_factor=0.5, **YARN)),
    "yarn_factor": (64, False, dict(rope_theta=10_000.0, attention_factor=0.7, **YARN)),
    "yarn_mscale": (64, True, dict(rope_theta=10_000.0, mscale=1.0, mscale_all_dim=0.8, **YARN | dict(factor=40.0))),
    "yarn_untruncated": (64, False, dict(rope_theta=150_000.0, truncate=False, beta_fast=24.0, beta_slow=2.0, **YARN)),
}

# top_k, top_p, min_p, repetition_penalty; 0 or, for the last, 1 is off.
SAMPLE = [
    (0, 0.0, 0.0, 1.0),
    (0, 0.0, 0.0, 1.3),
    (7, 0.0, 0.0, 1.0),
    (0, 0.9, 0.0, 1.0),
    (0, 0.3, 0.0, 1.1),
    (0, 0.0, 0.05, 1.0),
    (20, 0.95, 0.01, 1.0),
    (3, 0.8, 0.1, 0.8),
]


def arguments(parser):
    pass


def write(folder, options):
    folder.mkdir(parents=True, exist_ok=True)

    def save(name, arrays, *packages):
        versions = {package: importlib.metadata.version(package) for package in packages}
        save_file(arrays, folder / f"{name}.safetensors", {"source": packages[0], **versions})

    save("rope", rope(), "transformers", "torch", "numpy")
    save("sample", sample(), "mlx-lm", "mlx", "numpy")


def rope():
    rng = np.random.default_rng(3)
    positions = torch.tensor([POSITIONS])
    arrays = {"positions": np.array(POSITIONS, dtype=np.uint32)}
    for name, (head_dim, interleaved, parameters) in ROPE.items():
        parameters = {"rope_type": "default", "partial_rotary_factor": 1.0, **parameters}
        config = Qwen3NextConfig(head_dim=head_dim, rope_parameters=parameters, max_position_embeddings=131072)
        embedding = Qwen3NextRotaryEmbedding(config)
        x = torch.tensor(rng.standard_normal((len(POSITIONS), 2, head_dim)), dtype=torch.float32)
        cos, sin = embedding(x, positions)
        apply = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
        rotated, _ = apply(x[None], x[None], cos, sin, unsqueeze_dim=2)
        if interleaved:
            # DeepSeek leaves the pairs' first elements before all their second ones: put the pairs back.
            rotated = rotated.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        arrays[f"{name}.x"] = x.numpy()
        arrays[f"{name}.rotated"] = rotated[0].contiguous().numpy()
        arrays[f"{name}.inv_freq"] = embedding.inv_freq.numpy()
        arrays[f"{name}.attention_factor"] = np.array([embedding.attention_scaling], dtype=np.float32)
    return arrays


def sample():
    rng = np.random.default_rng(5)
    logits = rng.standard_normal(300).astype(np.float32) * 3
    history = [5, 0, 299, 5, int(logits.argmax()), int(logits.argmin())]
    arrays = {"logits": logits, "history": np.array(history, dtype=np.uint32)}
    for i, (top_k, top_p, min_p, penalty) in enumerate(SAMPLE):
        x = make_repetition_penalty(penalty, len(history))(mx.array(history), mx.array(logits)[None])
        # The order of generate_step and make_sampler.
        x = x - mx.logsumexp(x, keepdims=True)
        if top_p > 0:
            x = apply_top_p(x, top_p)
        if min_p > 0:
            x = apply_min_p(x, min_p)
        if top_k > 0:
            x = apply_top_k(x, top_k)
        arrays[f"{i}.params"] = np.array([top_k, top_p, min_p, penalty], dtype=np.float32)
        arrays[f"{i}.logprobs"] = np.array(x[0])
    return arrays
