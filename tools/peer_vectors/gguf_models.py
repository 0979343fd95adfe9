"""The tiny checkpoints in GGUF, by llama.cpp's own converter and quantiser.

Where the weights are those of the Hugging Face checkpoint beside them, so are the expected logits. Quantised files expect
what llama.cpp computes in f32 from its own decoding of them: its quantised products round the activations too.
"""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from . import models, oracle, tiny
from .llama_cpp import LlamaCpp

# llama.cpp and transformers, both in f32, on the same weights; the checkpoints are chosen not to magnify rounding.
MOST_DIFFERENCE = 1e-4
LEAST_GREEDY_MARGIN = 1e-3
GREEDY = 20
OUT_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

# llama.cpp has no sliding window for Mistral in its llama architecture, so that one has no GGUF.
CONVERTED = [tiny.qwen3, tiny.qwen3_yarn, tiny.llama3, tiny.llama2, tiny.llama_bias]
# llama.cpp knows no dense layers in a Qwen3 MoE, and its delta net wants keys and values of one size, so these are
# checkpoints of their own.
OWN = [
    tiny.qwen3_moe(mlp_only_layers=()),
    tiny.qwen3_next(value_dim=24),
    tiny.qwen3_5(value_dim=16),
    tiny.qwen3_5_moe(value_dim=24),
]
# Quantised files, from the ones above; the last of them replaces its source, to keep the repository small.
QUANTIZED = [("qwen3", "Q4_0"), ("qwen3_moe-gguf", "Q5_1"), ("qwen3_5_moe-gguf", "Q8_0")]


def evaluate(llama: LlamaCpp, model: Path, tokens: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """llama.cpp's logits, and `count` greedy tokens, in f32 arithmetic: from a file with all its tensors decoded."""
    from .llama_library import Model

    with tempfile.TemporaryDirectory() as scratch:
        decoded = Path(scratch) / "decoded.gguf"
        llama.quantize(model, decoded, "F32", "--allow-requantize")
        loaded = Model(decoded, context=128)
        logits, longer = loaded.logits(tokens), list(tokens)
        last = logits[-1]
        for _ in range(count):
            runner_up, best = np.argsort(last)[-2:]
            if last[best] - last[runner_up] < LEAST_GREEDY_MARGIN:
                raise ValueError(f"{model}: greedy tokens hang on rounding")
            longer.append(best)
            last = loaded.logits(longer)[-1]
    return {"tokens": tokens, "logits": logits, "greedy": np.asarray(longer[len(tokens) :], dtype=np.int64)}


def check(llama: LlamaCpp, model: Path, expected: Path) -> float:
    arrays = load_file(expected)
    theirs = evaluate(llama, model, arrays["tokens"], len(arrays["greedy"]))
    if (theirs["greedy"] != arrays["greedy"]).any():
        raise ValueError(f"{model}: llama.cpp continues otherwise than transformers")
    difference = float(np.abs(theirs["logits"] - arrays["logits"]).max())
    if not difference < MOST_DIFFERENCE:
        raise ValueError(f"{model}: llama.cpp and transformers differ by {difference}")
    return difference


def convert(llama: LlamaCpp, spec: tiny.Tiny, checkpoint: Path, out: Path) -> None:
    llama.convert(checkpoint, out / "model.gguf", OUT_TYPES[spec.dtype], spec.gguf_pre_tokenizer)
    print(out.name, "llama.cpp - transformers", check(llama, out / "model.gguf", out / "expected.safetensors"), flush=True)


def convert_own(llama: LlamaCpp, spec: tiny.Tiny, out: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch) / "checkpoint"
        models.make(replace(spec, name=out.name, shard_size="1GB"), checkpoint)
        out.mkdir(exist_ok=True)
        shutil.copy(checkpoint / "expected.safetensors", out)
        convert(llama, spec, checkpoint, out)


def quantize(llama: LlamaCpp, source: Path, kind: str, out: Path) -> None:
    out.mkdir(exist_ok=True)
    llama.quantize(source / "model.gguf", out / "model.gguf", kind, "--pure")
    tokens = load_file(source / "expected.safetensors")["tokens"]
    arrays = evaluate(llama, out / "model.gguf", tokens, GREEDY)
    metadata = {"made_by": "llama-quantize --pure of llama-cpp-python 0.3.36; logits by llama.cpp from the file decoded to f32"}
    oracle.save(arrays, out / "expected.safetensors", metadata)
    print(out.name, flush=True)


def write(folder: Path, tree: Path, tools: Path) -> None:
    """Adds the GGUF files to the Hugging Face checkpoints in `folder`."""
    llama = LlamaCpp(tree, tools)
    for make_spec in CONVERTED:
        spec = make_spec()
        convert(llama, spec, folder / spec.name, folder / spec.name)
    for spec in OWN:
        convert_own(llama, spec, folder / f"{spec.name}-gguf")
    for name, kind in QUANTIZED:
        quantize(llama, folder / name, kind, folder / f"{name}-{kind}")
    shutil.rmtree(folder / QUANTIZED[-1][0])
