#!/usr/bin/env python3
"""Converts the demo model to GGUF with llama.cpp's own tools, quantises it, and records llama.cpp's perplexity.

    python tools/demo_gguf.py LLAMA_CPP TOOLS OUT [--demo models/demo] [--vectors tests/vectors]

LLAMA_CPP is llama.cpp's source tree, TOOLS the folder that holds the built llama-quantize, llama-perplexity and libllama.
OUT receives demo-{bf16,Q8_0,Q4_0,Q6_K,Q4_K_M}.gguf; VECTORS/demo/llama_perplexity.json the figures.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import tokenizers

from peer_vectors.demo import MARKER, write_json
from peer_vectors.llama_cpp import LlamaCpp

QUANTIZED = ["Q8_0", "Q4_0", "Q6_K", "Q4_K_M"]


def convert(llama: LlamaCpp, demo: Path, out: Path) -> dict[str, Path]:
    models = {"bf16": out / "demo-bf16.gguf"}
    if not models["bf16"].exists():
        llama.convert(demo, models["bf16"], "bf16", "qwen35")
    for kind in QUANTIZED:
        models[kind] = out / f"demo-{kind}.gguf"
        if not models[kind].exists():
            llama.quantize(models["bf16"], models[kind], kind)
    return models


def plain_tokens(demo: Path, text: str) -> np.ndarray:
    """The text's tokens when special tokens in it are plain characters."""
    tokenizer = tokenizers.Tokenizer.from_file(str(demo / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return np.asarray(tokenizer.encode(text, add_special_tokens=False).ids)


def scored_texts(demo: Path, out: Path, model: Path) -> dict[str, tuple[Path, np.ndarray]]:
    """The texts that are scored, each with its tokens, which llama.cpp's tokenizer must agree with."""
    from peer_vectors.llama_library import Model

    vocabulary = Model(model, vocab_only=True)
    if vocabulary.adds_bos():
        raise ValueError("this checkpoint should not begin with a BOS token")
    cut = out / "eval-without-markers.txt"
    cut.write_bytes((demo / "eval.txt").read_bytes().replace(MARKER.encode(), b""))
    found = {"eval.txt": demo / "eval.txt", "eval.txt without markers": cut}
    result = {}
    for name, path in found.items():
        text = path.read_bytes()
        # llama-perplexity would drop a last newline.
        assert not text.endswith(b"\n")
        tokens = plain_tokens(demo, text.decode())
        theirs = vocabulary.tokenize(text, special=False)
        if len(theirs) != len(tokens) or (theirs != tokens).any():
            raise ValueError(f"{name}: llama.cpp cuts it into other tokens than tokenizer.json does")
        result[name] = path, tokens
    return result


def measure(llama: LlamaCpp, models: dict[str, Path], scored: dict[str, tuple[Path, np.ndarray]], out: Path) -> dict:
    """For every model, llama.cpp as it runs it, and llama.cpp in f32 on the same weights decoded."""
    figures = {}
    for kind, model in models.items():
        decoded = out / "decoded.tmp"
        llama.quantize(model, decoded, "F32", "--allow-requantize")
        figures[kind] = {"bytes": model.stat().st_size}
        for name, (text, _) in scored.items():
            figures[kind][name] = {"llama.cpp": llama.perplexity(model, text), "f32": llama.perplexity(decoded, text)}
        decoded.unlink()
        print(kind, figures[kind], flush=True)
    return figures


def record(llama: LlamaCpp, models: dict[str, Path], demo: Path, out: Path) -> dict:
    scored = scored_texts(demo, out, models["bf16"])
    command = llama.perplexity_command(Path("MODEL"), Path("TEXT"))
    return {
        "made_by": "llama.cpp of the sdist of llama-cpp-python 0.3.36, built for the CPU",
        "commands": {
            "convert": "convert_hf_to_gguf.py DEMO --outtype bf16 --no-mtp, get_vocab_base_pre answering qwen35",
            "quantize": "llama-quantize BF16 OUT KIND",
            "decode for f32": "llama-quantize --allow-requantize MODEL OUT F32",
            "perplexity": " ".join(["llama-perplexity", *command[1:]]),
        },
        "rule": "windows of 512 tokens that do not overlap, each from an empty cache; a rest that fills no window is left "
        "out; no BOS; of each window the tokens 257 to 511, counted from 0, are scored, 255 a window; perplexity is exp of "
        "the mean nll of all scored tokens",
        "texts": {
            name: {
                "tokens": len(tokens),
                "windows": len(tokens) // 512,
                "scored": len(tokens) // 512 * 255,
                "first_tokens": tokens[:8].tolist(),
            }
            for name, (_, tokens) in scored.items()
        },
        "markers": f"llama-perplexity does not read special tokens in a text: {MARKER} is cut into plain tokens. Without the "
        "markers, any tokenizer gives the same ids.",
        "models": measure(llama, models, scored, out),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("tools", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--demo", type=Path, default=Path("models/demo"))
    parser.add_argument("--vectors", type=Path, default=Path("tests/vectors"))
    arguments = parser.parse_args()
    # Read when llama-cpp-python is imported.
    os.environ.setdefault("LLAMA_CPP_LIB_PATH", str(arguments.tools.resolve()))
    arguments.out.mkdir(parents=True, exist_ok=True)
    llama = LlamaCpp(arguments.llama_cpp, arguments.tools)
    models = convert(llama, arguments.demo, arguments.out)
    write_json(arguments.vectors / "demo" / "llama_perplexity.json", record(llama, models, arguments.demo, arguments.out))


if __name__ == "__main__":
    main()
