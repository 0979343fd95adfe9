#!/usr/bin/env python3
"""GGUF files that lowbit makes of checkpoints beside llama.cpp's own, key by key and tensor by tensor.

    python tools/compare_gguf.py LLAMA_CPP TOOLS LOWBIT OUT [MIX ..] [--model DIR ..]

LLAMA_CPP is llama.cpp's source tree, TOOLS the folder of the built llama-quantize, LOWBIT the program. Each checkpoint is
converted by convert_hf_to_gguf.py and quantised by llama-quantize, and again by lowbit, into OUT. By default the models are
the demo and the tiny checkpoints of tests/vectors/models, and the types of file all those that both have.

Packages: those of the converter (torch, transformers, numpy), and gguf from the source tree.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

from peer_vectors.llama_cpp import LlamaCpp
from peer_vectors.quantize import CHECKPOINTS, MIXES, PRE, out_type

ROOT = Path(__file__).resolve().parent.parent
# The converter writes its default for the one where config.json has no list of layers, whatever config.json says; and for the
# other sections that do not cover all pairs, which llama.cpp then gives position 0.
WRONG = {"qwen3_next": "qwen3next.full_attention_interval", "demo": "qwen35moe.rope.dimension_sections"}
# exp of f32 differs by a unit in the last place between libraries.
INEXACT = ("ssm_a",)


def read(path):
    import gguf

    reader = gguf.GGUFReader(path)
    keys = {name: (field.types, field.contents()) for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return keys, {tensor.name: tensor for tensor in reader.tensors}


def differences(ours, theirs, unlike):
    (keys, tensors), (their_keys, their_tensors) = read(ours), read(theirs)
    for key in sorted(keys.keys() | their_keys.keys()):
        if keys.get(key) != their_keys.get(key) and key not in unlike:
            yield f"{key}: {str(keys.get(key))[:100]} - {str(their_keys.get(key))[:100]}"
    for name in sorted(tensors.keys() | their_tensors.keys()):
        if name not in tensors or name not in their_tensors:
            yield f"{name} is only in {'ours' if name in tensors else 'theirs'}"
            continue
        one, other = tensors[name], their_tensors[name]
        shapes = [[int(n) for n in tensor.shape] for tensor in (one, other)]
        # What llama-quantize writes has no trailing dimensions of 1.
        while shapes[1][-1] == 1 and len(shapes[1]) > len(shapes[0]):
            shapes[1].pop()
        if one.tensor_type != other.tensor_type or shapes[0] != shapes[1]:
            yield f"{name}: {one.tensor_type.name} {shapes[0]} - {other.tensor_type.name} {shapes[1]}"
        elif one.data.tobytes() != other.data.tobytes():
            ulps = np.abs(one.data.view(np.int32).astype(np.int64) - other.data.view(np.int32)).max() if name.endswith(INEXACT) else None
            if ulps is None or ulps > 1:
                yield f"{name}: {one.tensor_type.name} {shapes[0]}: bytes differ"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("llama_cpp", "tools", "lowbit", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("mixes", nargs="*", default=MIXES.split())
    parser.add_argument("--model", type=Path, nargs="*")
    options = parser.parse_args()
    sys.path.insert(0, str(options.llama_cpp / "gguf-py"))
    models = options.model or [ROOT / "models/demo", *(ROOT / "tests/vectors/models" / name for name in CHECKPOINTS)]
    llama = LlamaCpp(options.llama_cpp, options.tools)
    options.out.mkdir(parents=True, exist_ok=True)
    wrong = compared = 0
    for model in models:
        converted = options.out / f"{model.name}.gguf"
        if not converted.exists():
            llama.convert(model, converted, out_type(model), PRE.get(model.name, "gpt-2"), mtp=True)
        unlike = [WRONG.get(model.name)]
        for mix in options.mixes:
            ours, theirs = options.out / "ours.gguf", options.out / "theirs.gguf"
            llama.quantize(converted, theirs, mix)
            command = [options.lowbit, "quantize", "--model", model, "--output", ours, "--format", mix, "--force"]
            result = subprocess.run(command, capture_output=True, text=True)
            found = [result.stderr.strip()] if result.returncode else list(differences(ours, theirs, unlike))
            compared += 1
            wrong += bool(found)
            for line in found[:10]:
                print(f"{model.name} {mix}: {line}", flush=True)
    print(f"{compared} files compared, {wrong} differ")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
