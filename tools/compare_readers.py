#!/usr/bin/env python3
"""What lowbit writes, in the programs that it is written for: MLX's layout in mlx-lm, GGUF in transformers and gguf-py.

    tools/compare_readers.py --lowbit target/debug/lowbit [CHECKPOINT ..]

Each checkpoint (by default those of tests/vectors/models that are directories) becomes MLX's layout, in floats and in 4 bits,
and GGUF, in F32 and Q8_0. The negative log-likelihood of a text that mlx-lm and transformers compute must be lowbit's own, with
`--exact`, to 1e-4 of it, but where `quantize` warned that mlx-lm computes otherwise. What a peer does not read is listed
(transformers takes a head's size from the hidden size in GGUF, say). Exits with 1 where a number differs.

Packages: mlx-lm (mlx-cpu on Linux), transformers, gguf.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
warnings.filterwarnings("ignore")

import gguf  # noqa: E402
import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
TEXT = "The quick brown fox; 12 caf\u00e9s \u2014 \u65e5\u672c and more of it.\n"
FORMS = {
    "MLX, floats": ["--bits", "4", "--group-size", "32", "--rule", "*=none"],
    "MLX, 4 bits": ["--bits", "4", "--group-size", "32"],
    "GGUF, F32": ["--format", "F32"],
    "GGUF, Q8_0": ["--format", "Q8_0"],
}
TOLERANCE = 1e-4


def of_logits(logits: np.ndarray, ids: list[int]) -> float:
    rows = logits.astype(np.float64)
    rows -= rows.max(-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
    return float(-rows[np.arange(len(ids) - 1), ids[1:]].mean())


def of_mlx_lm(path: Path, ids: list[int]) -> float:
    model, _ = load_model(path)
    # In f32, so that only what was written is compared; codes and scales stay as they are.
    model.set_dtype(mx.float32)
    logits = model(mx.array([ids]))[0].astype(mx.float32)
    return of_logits(np.array(logits)[:-1], ids)


def of_transformers(path: Path, ids: list[int]) -> float:
    reader = gguf.GGUFReader(path)
    tensors = reader.tensors
    if "gemma2.attn_logit_softcapping" in reader.fields:
        raise ValueError("the soft caps and the factor of scores are passed over")
    for tensor in tensors:
        gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    if any(tensor.name == "rope_freqs.weight" for tensor in tensors):
        raise ValueError("rope_freqs.weight, which scales rotary embeddings, is passed over")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(path.parent, gguf_file=path.name, dtype=torch.float32)
    biases = [sum(name.endswith(".bias") for name in names) for names in ([t.name for t in tensors], dict(model.named_parameters()))]
    if biases[0] > biases[1]:
        raise ValueError(f"{biases[0]} biases, of which {biases[0] - biases[1]} are passed over")
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    return of_logits(logits.float().numpy()[:-1], ids)


def of_lowbit(program: str, path: Path, text: Path) -> float:
    line = [program, "perplexity", "-m", path, "-f", text, "--exact", "-c", "512", "--json"]
    return json.loads(subprocess.run(line, capture_output=True, check=True).stdout)["nll"]


def compare(program: str, checkpoint: Path, scratch: Path) -> int:
    text, wrong = scratch / "text.txt", 0
    text.write_text(TEXT, encoding="utf-8")
    ids = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(TEXT).ids
    for form, flags in FORMS.items():
        output = scratch / (form.replace(", ", "-").replace(" ", "-") + (".gguf" if "--format" in flags else ""))
        line = [program, "quantize", "-m", checkpoint, "-o", output, *flags]
        done = subprocess.run(line, capture_output=True, encoding="utf-8")
        if done.returncode:
            print(f"  {form}: refused: {done.stderr.strip().splitlines()[-1]}")
            continue
        own, peer = of_lowbit(program, output, text), "transformers" if output.is_file() else "mlx-lm"
        try:
            theirs = (of_transformers if output.is_file() else of_mlx_lm)(output, ids)
        except Exception as error:  # Whatever a reader raises.
            print(f"  {form}: {peer} does not read it: {type(error).__name__}: {str(error).splitlines()[0][:140]}")
            continue
        warned = [line for line in done.stderr.splitlines() if line.startswith("warning: ") and peer in line]
        same = abs(own - theirs) <= TOLERANCE * max(1.0, own)
        wrong += not same and not warned
        verdict = "" if same else f", as said: {warned[0][:160]}" if warned else " DIFFERENT"
        print(f"  {form}: lowbit {own:.6f}, {peer} {theirs:.6f}{verdict}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path, nargs="*")
    parser.add_argument("--lowbit", default=ROOT / "target/debug/lowbit")
    arguments = parser.parse_args()
    folder = ROOT / "tests/vectors/models"
    found = sorted(path.parent for path in folder.glob("*/model*.safetensors") if (path.parent / "tokenizer.json").exists())
    wrong = 0
    transformers.utils.logging.disable_progress_bar()
    for checkpoint in arguments.checkpoints or dict.fromkeys(found):
        print(checkpoint.name, flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            wrong += compare(arguments.lowbit, checkpoint, Path(scratch))
    print(f"{wrong} different")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
