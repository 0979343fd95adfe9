#!/usr/bin/env python3
"""Random embedding models, with random legal options, in sentence-transformers and in lowbit: the embeddings of some texts
must agree, or lowbit must refuse with a message.

    pip install -r tools/requirements.txt sentence-transformers
    tools/compare_embeddings.py --lowbit target/debug/lowbit --seeds 0:40

Checkpoints are those of tools/compare_transformers.py without their output layer, as sentence-transformers saves them:
EmbeddingGemma's kind (gemma3, whose tokens see those after them, with two linear layers behind the mean) and
Qwen3-Embedding's (the last token). Pooling, normalising, prompts and the room for tokens are drawn, too. What two correct
f32 programs may differ by is measured as there. With `--round-trip` each case that agrees is converted to GGUF and to MLX's
layout in 8 bits, too: the one keeps embeddings to the same bound, the other to a cosine of 0.99, or lowbit refuses before
it writes.
"""

import argparse
import collections
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from peer_vectors import embed  # noqa: E402
from random_options import check, round_trip  # noqa: E402
from random_options.draw import draw  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from safetensors.torch import save_file as save_torch  # noqa: E402
from sentence_transformers import SentenceTransformer  # noqa: E402

torch.set_num_threads(1)
DRAWS = 100
# Their modes of pooling, by what sentence-transformers calls them.
KINDS = {"gemma3": ["mean", "mean", "cls", "lasttoken"], "qwen3": ["lasttoken", "lasttoken", "mean", "cls"]}
HEADLESS = {"gemma3": "Gemma3TextModel", "qwen3": "Qwen3Model"}
PROMPTS = {"query": "task: find | query: ", "document": "title: none | text: "}
KEYS = {"lasttoken": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}


def write(architecture: str, name: str, in_f32: bool, out: Path) -> dict:
    """The checkpoint of a draw, and the arguments of encode.

    Raises Illegal.
    """
    rng = random.Random(f"embeddings/{architecture}/{name}")
    case, _ = draw(architecture, name, frozenset())
    if case.nested:
        raise check.Illegal("a nested configuration")
    if architecture == "gemma3":
        case.text["use_bidirectional_attention"] = True
    if in_f32:
        # The converter's sums of 16-bit norms are rounded.
        round_trip.in_f32(case)
    check.write(case, check.hash_of(name), out)
    behead(architecture, out)
    mode, normalised = rng.choice(KINDS[architecture]), rng.random() < 0.8
    hidden = json.loads((out / "config.json").read_text())["hidden_size"]
    dense = [(hidden, rng.choice([64, 96])), (None, hidden)] if architecture == "gemma3" and rng.random() < 0.8 else []
    classes = ["Transformer", "Pooling"] + ["Dense"] * len(dense) + ["Normalize"] * normalised
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(classes)
    ]
    embed.write_json(out / "modules.json", modules)
    pooling = {"word_embedding_dimension": hidden, f"pooling_mode_{KEYS[mode]}": True}
    if rng.random() < 0.3 and not in_f32:
        pooling["include_prompt"] = rng.random() < 0.5
    embed.write_json(out / "1_Pooling" / "config.json", pooling)
    embed.write_json(out / "config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": None})
    # GGUF does not say how many tokens are read.
    length = None if in_f32 else rng.choice([None, 24, 60])
    embed.write_json(out / "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False})
    names = json.loads((out / "tokenizer_config.json").read_text())
    embed.write_json(out / "tokenizer_config.json", names | {"pad_token": "<|endoftext|>", "model_max_length": 512})
    generator, inputs = np.random.default_rng(check.hash_of(name)), hidden
    for index, (_, outputs) in enumerate(dense, start=2):
        config = {"in_features": inputs, "out_features": outputs, "bias": False}
        config["activation_function"] = "torch.nn.modules.linear.Identity"
        embed.write_json(out / f"{index}_Dense" / "config.json", config)
        weight = generator.standard_normal((outputs, inputs)).astype(np.float32) / inputs**0.5
        save_file({"linear.weight": weight}, out / f"{index}_Dense" / "model.safetensors", {"format": "pt"})
        inputs = outputs
    return {"prompt_name": "query"} if rng.random() < 0.5 else {}


def behead(architecture: str, out: Path) -> None:
    config = json.loads((out / "config.json").read_text())
    config["architectures"] = [HEADLESS[architecture]]
    (out / "config.json").write_text(json.dumps(config))
    files = sorted(out.glob("*.safetensors"))
    for path in files:
        tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
        if any(name.startswith("language_model.") for name in tensors):
            raise check.Illegal("names that the model's class does not have")
        if len(files) == 1:
            tensors.pop("lm_head.weight", None)
        save_torch(tensors, path, {"format": "pt"})
    if len(files) > 1:
        raise check.Illegal("several files")


def texts(name: str) -> list[str]:
    return [check.text_to_score(f"{name}/{i}")[: 4 + 11 * i] for i in range(5)] + ["the inner theme " * 8]


def encode(encoder, name: str, arguments: dict) -> np.ndarray:
    return encoder.encode(texts(name), **arguments).astype(np.float32)


def run(lowbit: Path, model: Path, name: str, arguments: dict, scratch: Path):
    """Embeddings, or lowbit's message."""
    path = scratch / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(name)))
    flags = ["--exact", "--file", str(path)]
    if "prompt_name" in arguments:
        # GGUF has no prompts.
        by_name = ["--prompt-name", arguments["prompt_name"]]
        flags += ["--prefix", PROMPTS[arguments["prompt_name"]]] if model.suffix == ".gguf" else by_name
    if model.suffix == ".gguf" and not normalised(model.parent / "checkpoint"):
        # Nor does it say that embeddings keep their length.
        flags.append("--no-normalize")
    code, output, error = check.run_lowbit(lowbit, "embed", model, flags)
    if code == 1:
        return None, check.message(error, model)
    if code != 0:
        raise RuntimeError(f"{name}: exit {code}: {error[-500:]}")
    return np.array([json.loads(line)["embedding"] for line in output.splitlines()], np.float32), ""


def normalised(directory: Path) -> bool:
    return json.loads((directory / "modules.json").read_text())[-1]["type"].endswith("Normalize")


def lengths(values: np.ndarray) -> np.ndarray:
    return np.linalg.norm(values, axis=1, keepdims=True)


def attempt(options, architecture: str, name: str):
    """agrees, refused or wrong; what to say of it; the difference."""
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        out = scratch / "checkpoint"
        out.mkdir()
        arguments = write(architecture, name, options.round_trip, out)
        try:
            encoder = SentenceTransformer(str(out), device="cpu", model_kwargs={"dtype": torch.float32})
            want = encode(encoder, name, arguments)
        except Exception as error:
            raise check.Illegal(f"{type(error).__name__}: {error}") from error
        if not np.isfinite(want).all():
            raise check.Illegal("embeddings that are not finite")
        noise = 0.0
        for seed in range(3):
            with check.perturbed(encoder, seed):
                noise = max(noise, float((abs(encode(encoder, name, arguments) - want) / lengths(want)).max()))
        bound = max(check.SAFETY * noise, 2.0**-20)
        if bound > check.LARGEST_TOLERANCE:
            raise check.Unfair(f"tolerance {bound:.1e}")
        got, message = run(options.lowbit, out, name, arguments, scratch)
        if got is None:
            return "refused", message, 0.0
        difference = float((abs(got - want) / lengths(want)).max()) if got.shape == want.shape else np.inf
        if not difference <= bound:
            return "wrong", f"{got.shape} {want.shape}: {difference:.2e}, at most {bound:.1e}", difference
        for format, target in [("F32", "new.gguf"), ("affine", "mlx")] if options.round_trip else []:
            line = [options.lowbit, "quantize", "--model", out, "--output", scratch / target, "--format", format]
            line += ["--bits", "8", "--group-size", "32"] if format == "affine" else []
            done = subprocess.run([str(word) for word in line], capture_output=True, text=True)
            if done.returncode == 1:
                options.refused[f"{target}: {check.message(done.stderr, out)}"] += 1
                continue
            again, message = run(options.lowbit, scratch / target, name, arguments, scratch)
            if again is None or again.shape != want.shape:
                return "wrong", f"{target} {message}", np.inf
            cosines = ((again * want).sum(1, keepdims=True) / lengths(again) / lengths(want)).min()
            apart = float((abs(again - want) / lengths(want)).max())
            if apart > bound if format == "F32" else cosines < 0.99:
                return "wrong", f"{target}: {apart:.2e}, cosine {cosines:.5f}", apart
            options.kept[target] += 1
        return "agrees", "", difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lowbit", type=Path, required=True, help="the program")
    parser.add_argument("--seeds", default="0:40", help="FIRST:END, for each architecture [0:40]")
    parser.add_argument("--architectures", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--round-trip", action="store_true", help="convert each case that agrees")
    options = parser.parse_args()
    options.lowbit = options.lowbit.resolve()
    options.refused, options.kept = collections.Counter(), collections.Counter()
    transformers.utils.logging.disable_progress_bar()
    first, last = (int(part) for part in options.seeds.split(":"))
    good = True
    for architecture in options.architectures:
        kinds, worst, refused, illegal = collections.Counter(), 0.0, collections.Counter(), collections.Counter()
        for seed in range(first, last):
            for number in range(DRAWS):
                name = f"{seed}.{number}"
                try:
                    kind, text, difference = attempt(options, architecture, name)
                except (check.Illegal, check.Unfair) as error:
                    illegal[f"{type(error).__name__}: {error}"[:120]] += 1
                    continue
                kinds[kind] += 1
                if kind == "refused":
                    refused[text] += 1
                    continue
                if kind == "wrong":
                    print(f"{architecture}/{name} wrong: {text}", flush=True)
                    good = False
                else:
                    worst = max(worst, difference)
                break
        print(f"{architecture}: {dict(kinds)}, worst difference {worst:.1e} of an embedding's length", flush=True)
        for text, count in refused.most_common():
            print(f"    {count} x refused: {text}")
        for text, count in illegal.most_common(5):
            print(f"    {count} x {text}")
    print(f"converted: {dict(options.kept)}")
    for text, count in options.refused.most_common():
        print(f"    {count} x refused: {text}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
