"""Gradients of whole models: torch's autograd through transformers' own forward pass, on the tiny checkpoints of `models`.

Packages: torch, transformers, safetensors.

A file a checkpoint, NAME.safetensors. The loss is the sum over two texts of the sum of `logits[t, v] * cos(1.3 t + 0.7 v)`; for
every parameter NAME there is `NAME`, f32: up to 61 of its gradient's values, evenly spread (`spread` says which), and the norm of
the whole gradient last. Experts stand under the names that the checkpoint has and, split, under MLX's.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from . import oracle

TEXTS = [(7, 40), (3, 23)]
MOST = 61


def arguments(parser):
    parser.add_argument("--only", help="this checkpoint alone")


def text(step: int, count: int) -> list:
    """Ids below 200."""
    return [(i * step + i * i) % 200 for i in range(1, count + 1)]


def spread(count: int) -> list:
    """Which of `count` values are kept."""
    kept = min(count, MOST)
    return [i * count // kept for i in range(kept)]


def loss(model) -> torch.Tensor:
    total = 0.0
    for step, count in TEXTS:
        logits = model(input_ids=torch.tensor([text(step, count)]), use_cache=False).logits[0]
        t = torch.arange(count, dtype=torch.float64)[:, None]
        v = torch.arange(logits.shape[1], dtype=torch.float64)
        total = total + (logits.double() * torch.cos(1.3 * t + 0.7 * v)).sum()
    return total


def split(name: str, gradient: torch.Tensor):
    """The parameter under every name that it may have."""
    yield name, gradient
    if name.endswith("experts.gate_up_proj"):
        below = name.removesuffix("experts.gate_up_proj") + "switch_mlp."
        gate, up = gradient.chunk(2, dim=1)
        yield below + "gate_proj", gate
        yield below + "up_proj", up
    if name.endswith("experts.down_proj"):
        yield name.removesuffix("experts.down_proj") + "switch_mlp.down_proj", gradient


def write(folder: Path, options):
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted((folder.parent / "models").iterdir()):
        if not (path / "config.json").exists() or "-mlx" in path.name or options.only not in (None, path.name):
            continue
        config = json.loads((path / "config.json").read_text())
        model = oracle.load(path, config["architectures"][0])
        # torch leaves out the gradient of a padding token's row, which is a token like others here.
        model.get_input_embeddings().padding_idx = None
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        loss(model).backward()
        vectors = {}
        for parameter, value in model.named_parameters():
            for name, gradient in split(parameter, value.grad):
                flat = gradient.double().flatten()
                kept = flat[spread(len(flat))]
                vectors[name] = torch.cat([kept, flat.norm()[None]]).float().numpy()
        if config["model_type"] == "minimax_m2":
            # transformers' modules have other names than its checkpoints.
            vectors = {name.replace(".mlp.", ".block_sparse_moe."): vector for name, vector in vectors.items()}
        save_file(vectors, folder / f"{path.name}.safetensors")
        print(path.name, len(vectors))
