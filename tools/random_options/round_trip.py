"""Converts a checkpoint into lowbit's other layouts and back. Each conversion keeps the negative log-likelihood of a text, or is
refused before anything is written; what is written can be read. Of what was quantised, all values are the same there and back."""

import json
import re
import shutil
import subprocess
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from . import decoded
from .case import Case
from .check import SECONDS, run_lowbit

# Of a mean over some fifty tokens, in f32.
TOLERANCE = 1e-6
GGUF = ["--format", "F32"]
FLOAT = ["--bits", "4", "--group-size", "32", "--rule", "*=none"]
# One of these for each checkpoint.
BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"]
BITS = [2, 3, 4, 5, 6, 8]


def steps(seed: int) -> list[tuple[str, str, list[str]]]:
    """Name, what it is made of, and how. What goes there and back has the same decoded values."""
    blocks, bits = BLOCKS[seed % len(BLOCKS)], BITS[seed % len(BITS)]
    return [
        ("GGUF", "checkpoint", GGUF),
        ("MLX", "checkpoint", FLOAT),
        ("GGUF -> MLX", "GGUF", FLOAT),
        ("GGUF -> MLX -> GGUF", "GGUF -> MLX", GGUF),
        ("blocks", "checkpoint", ["--format", blocks]),
        ("blocks -> MLX", "blocks", FLOAT),
        ("blocks -> MLX -> GGUF", "blocks -> MLX", GGUF),
        ("bits", "checkpoint", ["--bits", str(bits), "--group-size", "32"]),
        ("bits -> GGUF", "bits", GGUF),
        ("bits -> GGUF -> MLX", "bits -> GGUF", FLOAT),
    ]


# What these are compared with: rounding is meant to change the result. MLX's layout has the type of the file's floats.
ORIGINS = {
    "blocks": None,
    "blocks -> MLX": None,
    "blocks -> MLX -> GGUF": "blocks -> MLX",
    "bits": None,
    "bits -> GGUF": "bits",
    "bits -> GGUF -> MLX": "bits",
}
# Those of which each value is compared, with what, and what was between: their names are the same.
SAME_VALUES = {
    "blocks -> MLX -> GGUF": ("blocks", "blocks -> MLX"),
    "bits -> GGUF -> MLX": ("bits", "bits -> GGUF"),
}


@dataclass
class RoundTrip:
    """`wrong`: a sentence for each conversion that is not right. `refused`: step and message."""

    wrong: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    worst: float = 0.0


def in_f32(case: Case) -> None:
    """Stores the weights in the type that everything is computed in: conversions round to the configuration's."""
    case.dtype, case.keep_f32 = "float32", ()
    for part in (case.root, case.text):
        for key in ("dtype", "torch_dtype"):
            part.pop(key, None)
    case.text["dtype"] = "float32"
    if case.architecture in ("glm4_moe_lite", "deepseek_v3", "deepseek_v2", "kimi_linear", "bailing_hybrid"):
        # Of the norms of compressed queries and latents, other readers take the model's, transformers always this one.
        case.text["rms_norm_eps"] = 1e-6
    if case.architecture == "gpt_oss":
        # llama.cpp rounds, whatever this says: a GGUF file computes something else by design.
        for key in ("rope_scaling", "rope_parameters"):
            (case.text.get(key) or {}).pop("truncate", None)


def check(lowbit: Path, checkpoint: Path, text: Path, scratch: Path) -> RoundTrip:
    result = RoundTrip()
    made = {"checkpoint": checkpoint}
    likelihoods = {"checkpoint": measure(lowbit, checkpoint, text)}
    for name, source, flags in steps(zlib.crc32(text.read_bytes())):
        if source not in made:
            continue
        output = scratch / (re.sub(r"\W+", "-", name) + (".gguf" if "--format" in flags else ""))
        line = [lowbit, "quantize", "--model", made[source], "--output", output, *flags]
        done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, errors="replace")
        if done.returncode == 1:
            result.refused.append((name, message(done.stderr, checkpoint, scratch)))
            if output.exists():
                result.wrong.append(f"{name}: refused, but written")
            continue
        if done.returncode != 0:
            result.wrong.append(f"{name}: exit {done.returncode}: {done.stderr[-300:]}")
            continue
        if not judge(lowbit, name, output, text, likelihoods, result):
            continue
        made[name] = output
        if name in SAME_VALUES:
            first, between = (made[step] for step in SAME_VALUES[name])
            if other := decoded.difference(first, output, between):
                result.wrong.append(f"{name}: {other}")
    for path in list(made.values())[1:]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return result


def judge(lowbit: Path, name: str, output: Path, text: Path, likelihoods: dict, result: RoundTrip) -> bool:
    """Whether it can be read."""
    try:
        nll = measure(lowbit, output, text)
    except ValueError as error:
        result.wrong.append(f"{name}: unread: {error}")
        return False
    likelihoods[name] = nll
    origin = ORIGINS.get(name, "checkpoint")
    if origin is None:
        return True
    difference = abs(nll - likelihoods[origin])
    result.worst = max(result.worst, difference)
    if difference <= TOLERANCE * max(1.0, likelihoods[origin]):
        result.kept.append(name)
    else:
        result.wrong.append(f"{name}: nll {nll}, not {likelihoods[origin]}")
    return True


def measure(lowbit: Path, path: Path, text: Path) -> float:
    """The negative log-likelihood of the text.

    Raises ValueError where the checkpoint is not read.
    """
    code, output, error = run_lowbit(lowbit, "perplexity", path, ["--exact", "--file", str(text), "--context", "4096"])
    if code != 0:
        raise ValueError(error.strip().splitlines()[-1] if error.strip() else f"exit {code}")
    return json.loads(output)["nll"]


def message(error: str, *folders: Path) -> str:
    """The message without what differs from case to case."""
    text = error.strip().splitlines()[-1] if error.strip() else "(no message)"
    for folder in folders:
        text = text.replace(str(folder), "DIR")
    return re.sub(r"\[[-0-9N., e]+\]", "[..]", re.sub(r"\d+(\.\d+)?", "N", text))
