"""The demo model: logits, perplexity and mlx-lm's conversion. (Its GGUF files: tools/demo_gguf.py.)

Packages: torch, transformers, tokenizers, safetensors, mlx[cpu], mlx-lm.

expected_*.safetensors: `tokens` [100], `positions` [8] and the f32 `logits` [8, vocabulary] at them, `greedy` [32]; for the
bf16 checkpoint, and for mlx-lm's 4-bit conversion decoded to f32. mlx_convert.json: a SHA-256 of every tensor of that
conversion. perplexity.json: of eval.txt, with the rule it was scored by.
"""

import hashlib
import json
import math
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import tokenizers
from safetensors import safe_open

from . import mlx_weights, oracle

WINDOW = 512
PROMPT = 100
POSITIONS = 8
ARCHITECTURE = "Qwen3_5MoeForConditionalGeneration"


MARKER = "<|endoftext|>"


def eval_tokens(demo: Path, markers: bool = True) -> np.ndarray:
    """eval.txt as the checkpoint's tokenizer.json cuts it: MARKER in it is the special token, or is cut out first."""
    tokenizer = tokenizers.Tokenizer.from_file(str(demo / "tokenizer.json"))
    text = (demo / "eval.txt").read_bytes().decode("utf-8")
    text = text if markers else text.replace(MARKER, "")
    return np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)


@torch.no_grad()
def window_nll(model, tokens: np.ndarray) -> np.ndarray:
    """-log p(tokens[i] | tokens[..i]) for every i but the first, in float64 from float32 logits."""
    logits = oracle.prefill(model, tokens[:-1]).double()
    chosen = logits.gather(1, torch.as_tensor(tokens[1:])[:, None])[:, 0]
    return (logits.logsumexp(1) - chosen).numpy()


def perplexity(model, tokens: np.ndarray) -> dict:
    """Windows of 512 that do not overlap, the shorter last one included if it has two tokens."""
    windows = [tokens[i : i + WINDOW] for i in range(0, len(tokens), WINDOW)]
    nll = [window_nll(model, window) for window in windows if len(window) > 1]
    every = np.concatenate(nll)
    mean = float(every.mean())
    # The second half as llama-perplexity scores it: full windows only, positions 256 to 511 of each predicting the next,
    # that is the tokens 257 to 511.
    second = np.concatenate([n[WINDOW // 2 :] for n in nll if len(n) == WINDOW - 1])
    return {
        "tokens": len(every),
        "nll": mean,
        "perplexity": math.exp(mean),
        "first_windows_nll": [float(n.mean()) for n in nll[:4]],
        "second_half": {
            "tokens": len(second),
            "nll": float(second.mean()),
            "perplexity": math.exp(float(second.mean())),
        },
    }


def write_expected(model, tokens: np.ndarray, out: Path) -> None:
    prompt = tokens[:PROMPT]
    arrays, metadata = oracle.evaluate(model, prompt, count=32)
    arrays["logits"] = np.ascontiguousarray(arrays["logits"][-POSITIONS:])
    arrays["positions"] = np.arange(PROMPT - POSITIONS, PROMPT, dtype=np.int64)
    oracle.save(arrays, out, metadata)
    print(out.name, metadata, flush=True)


def convert(demo: Path, mlx_dir: Path) -> None:
    command = [sys.executable, "-m", "mlx_lm", "convert", "--hf-path", str(demo), "--mlx-path", str(mlx_dir), "-q"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def describe_conversion(mlx_dir: Path) -> dict:
    """Shape, dtype and SHA-256 of the bytes of every tensor."""
    tensors = {}
    with safe_open(mlx_dir / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            tensors[name] = {
                "dtype": file.get_slice(name).get_dtype(),
                "shape": list(tensor.shape),
                "sha256": hashlib.sha256(data).hexdigest(),
            }
    return {
        "made_by": f"mlx_lm convert -q, mlx-lm {version('mlx-lm')}, mlx {version('mlx')} on the CPU",
        "quantization": json.loads((mlx_dir / "config.json").read_text())["quantization"],
        "tensors": tensors,
    }


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def arguments(parser):
    parser.add_argument("--demo", type=Path, default=Path("models/demo"), help="the checkpoint")
    parser.add_argument("--mlx", type=Path, help="where mlx-lm's conversion of it is, or is to stay")


def write(out, options):
    demo = options.demo
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        mlx_dir = options.mlx or Path(scratch) / "mlx"
        if not mlx_dir.exists():
            convert(demo, mlx_dir)
        write_json(out / "mlx_convert.json", describe_conversion(mlx_dir))
        tokens = eval_tokens(demo)
        result = {
            "made_by": f"transformers {version('transformers')}, torch {version('torch')}, float32, eager attention, CPU",
            "text": "eval.txt of the demo model, tokenizer.json, no special tokens added",
            "text_tokens": len(tokens),
            "rule": f"windows of {WINDOW} that do not overlap, each from an empty cache, the shorter last one included; every "
            "token of a window but its first is scored; nll is the mean over all of them, in nats",
            "second_half_rule": f"of full windows only, the tokens {WINDOW // 2 + 1} to {WINDOW - 1} of each, counted from 0",
        }
        for name, model in {
            "bf16": lambda: oracle.load(demo, ARCHITECTURE),
            "mlx_4bit_dequantized": lambda: mlx_weights.load(mlx_dir, demo),
        }.items():
            model = model()
            write_expected(model, tokens, out / f"expected_{name}.safetensors")
            result[name] = perplexity(model, tokens)
            if name == "bf16":
                # The text that llama.cpp and a tokenizer with special tokens cut alike (llama_perplexity.json).
                result["bf16_without_markers"] = perplexity(model, eval_tokens(demo, markers=False))
            print(name, result[name], flush=True)
        write_json(out / "perplexity.json", result)
