"""The values that a checkpoint's quantised tensors stand for, decoded by other programs than lowbit, and where two differ."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import safe_open

# `-exp` of a logarithm, or the logarithm of that: rounded in between.
INEXACT = ("ssm_a", "A_log")
# Biases of a router's choice, which keep their type in MLX's layout, as mlx-lm's converter keeps them.
KEPT = ("exp_probs_b.bias", ".e_score_correction_bias", ".expert_bias")
# The biases of steps keep it in these models alone.
STEPS_KEPT = ("kimi_linear", "bailing_hybrid")


def values(path: Path) -> dict[str, np.ndarray]:
    return of_directory(path) if path.is_dir() else of_gguf(path)


def of_gguf(path: Path) -> dict[str, np.ndarray]:
    tensors = gguf.GGUFReader(path).tensors
    shaped = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in tensors}
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(shaped[t.name]) for t in tensors}


def of_directory(path: Path) -> dict[str, np.ndarray]:
    """MLX's affine formats: a code times its group's scale, and its bias added, each rounded to f32."""
    stored = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            stored |= {name: tensors.get_tensor(name) for name in tensors.keys()}
    quantization = config(path).get("quantization", {})
    decoded = {}
    for name, tensor in stored.items():
        module = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{module}.scales" not in stored:
            decoded[name] = tensor.float().numpy()
            continue
        own = quantization.get(module)
        bits = (own if isinstance(own, dict) else quantization)["bits"]
        scales, biases = (stored[f"{module}.{part}"].double().numpy() for part in ("scales", "biases"))
        decoded[name] = affine(tensor.numpy().view(np.uint8), scales, biases, bits)
    return decoded


def affine(packed: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int) -> np.ndarray:
    stream = np.unpackbits(packed, axis=-1, bitorder="little")
    codes = stream.reshape(*stream.shape[:-1], -1, bits) @ (1 << np.arange(bits))
    products = (codes.reshape(*scales.shape, -1) * scales[..., None]).astype(np.float32)
    return (products + biases[..., None]).astype(np.float32).reshape(codes.shape)


def difference(one: Path, other: Path, through: Path) -> str | None:
    """The first tensor that is not the same in both, but for the type of `through`, by which `other` came of `one`."""
    ours, theirs = values(one), values(other)
    dtype = torch.float32 if through.is_file() else getattr(torch, config(through)["dtype"])
    kept = KEPT
    if through.is_dir() and config(through)["model_type"] in STEPS_KEPT:
        kept += ("ssm_dt.bias",)
    for name in sorted(ours.keys() | theirs.keys()):
        is_rope = name.startswith("rope_f")
        if name not in ours or name not in theirs:
            # Factors of 1 need not be there.
            if is_rope and ((ours | theirs)[name] == 1).all():
                continue
            alone = "the first" if name in ours else "the second"
            return f"{name} is in {alone} alone: {(ours | theirs)[name].ravel()[:4]}"
        a, b = (torch.tensor(of[name]).float() for of in (ours, theirs))
        if a.squeeze().shape != b.squeeze().shape:
            return f"{name}: {list(a.shape)} and {list(b.shape)}"
        a, b = a.flatten(), b.flatten()
        # Some norms have their 1 in one layout alone: it is added, or taken away, in f32.
        if "norm" in name and torch.equal(shifted(a, dtype, through), b):
            continue
        # Factors of rotary frequencies are numbers of config.json in MLX's layout.
        a = a if is_rope or name.endswith(kept) else a.to(dtype).float()
        inexact = torch.finfo(torch.float32 if is_rope else dtype).eps if is_rope or name.endswith(INEXACT) else 0
        allowed = 8 * inexact * a.abs()
        apart = ((a - b).abs() > allowed).nonzero()
        if len(apart):
            at = int(apart[0])
            return f"{name}: value {at} is {float(a[at])!r} and {float(b[at])!r}"
    return None


def shifted(values: torch.Tensor, dtype: torch.dtype, through: Path) -> torch.Tensor:
    """Norms after 1 was taken away in MLX's layout, in its type, and added again; or the other way round in GGUF, which has f32."""
    return values + 1.0 - 1.0 if through.is_file() else (values - 1.0).to(dtype).float() + 1.0


def config(path: Path) -> dict:
    root = json.loads((path / "config.json").read_text())
    return root.get("text_config", {}) | root
