"""Whole models: tiny random checkpoints of every architecture and what transformers makes of them.

Packages: torch, transformers, tokenizers, safetensors; mlx[cpu], mlx-lm for the MLX checkpoints; for the GGUF files also
llama-cpp-python 0.3.36 with LLAMA_CPP_LIB_PATH set to `--tools`: its sdist carries the source tree of `--llama-cpp`, from
which cmake builds llama-quantize, llama-perplexity and libllama. Without `--llama-cpp` the GGUF files stay as they are.

A folder a checkpoint: the checkpoint, and expected.safetensors with `tokens` [T], `logits` [T, vocabulary] in f32 and
`greedy`, the tokens that follow. `about` in its metadata says what made them, and how far prefill and single steps differ.
"""

import json
import re
import shutil
import tempfile
import zlib
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch_file

from . import oracle
from .tiny import Tiny, all_tiny

PROMPT = 70
# A comparison of greedy tokens or chosen experts is only fair when rounding cannot change them.
LEAST_GREEDY_MARGIN = 0.02
LEAST_ROUTER_GAP = 1e-3
# A continuation that repeats one token would hide a stale cache.
LEAST_GREEDY_VARIETY = 8
# Nor of logits, when the checkpoint itself magnifies rounding (a delta net's norm does where q is nearly orthogonal to k).
MOST_ROUNDING = 2e-5


# Of experts' scores, in the choice alone: buffers.
ROUTERS_BIASES = ("e_score_correction_bias", "expert_bias")


def initial(name: str, value: torch.Tensor, tied: bool, generator: torch.Generator) -> torch.Tensor:
    """Random values on the scale that a trained checkpoint has, for the parameter `name`."""
    normal = torch.randn(value.shape, generator=generator)
    uniform = torch.rand(value.shape, generator=generator)
    if name.endswith("A_log"):
        return (0.5 + 7.5 * uniform).log()
    if name.endswith("dt_bias"):
        return -4.0 + 3.5 * uniform
    if ".visual." in name:
        return 0.02 * normal
    if name.endswith("post_feedforward_layernorm.weight"):
        # Layers that outweigh a scaled embedding, as the gains of tied models below.
        return value.mean() + 3.0 + 0.2 * normal
    if "norm" in name:
        # Either 1 or, where the model computes with 1 + weight, 0.
        return value.mean() + 0.2 * normal
    if name.endswith(("router.scale", "per_expert_scale", "layer_scalar")):
        return 0.6 + 0.8 * uniform
    if name.endswith((".bias", "proj_bias")):
        return 0.3 * normal
    if name.endswith(".sinks"):
        return 1.5 * normal
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return 0.5 * normal
    if name.endswith(("embed_tokens.weight", "embeddings.weight")):
        return (0.25 if tied else 1.0) * normal
    gain = {"lm_head.weight": 2.0, "router.layer.weight": 3.0, "mixer.gate.weight": 3.0, "mlp.gate.weight": 3.0, "mlp.router.weight": 3.0, "feed_forward.gate.weight": 3.0, "router.proj.weight": 30.0, "shared_expert_gate.weight": 1.5}
    if tied:
        # Layers that outweigh the token's own embedding: otherwise a tied head repeats that token for ever.
        gain |= {"o_proj.weight": 2.0, "down_proj.weight": 2.0}
        gain |= {"self_attn.out_proj.weight": 2.0, "conv.out_proj.weight": 2.0, "w2.weight": 2.0}
        gain |= {"mamba.out_proj.weight": 2.0, "output_linear.weight": 2.0}
    factor = next((g for suffix, g in gain.items() if name.endswith(suffix)), 0.9)
    return factor * value.shape[-1] ** -0.5 * normal


def mtp_tensors(tensors: dict, generator: torch.Generator) -> dict:
    """A multi-token-prediction head shaped after the last full-attention layer, under the published names."""
    if "model.norm.weight" in tensors:
        return layer_behind_the_others(tensors, generator)
    full = max(int(n.split(".layers.")[1].split(".")[0]) for n in tensors if ".self_attn.q_proj." in n)
    mark = f".layers.{full}."
    shapes = {"mtp.layers.0." + n.split(mark)[1]: t for n, t in tensors.items() if mark in n and ".visual." not in n}
    hidden = tensors["model.language_model.norm.weight"]
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        shapes[f"mtp.{norm}.weight"] = hidden
    shapes["mtp.fc.weight"] = hidden.new_zeros(len(hidden), 2 * len(hidden))
    return {n: (0.1 * torch.randn(t.shape, generator=generator)).to(t.dtype) for n, t in shapes.items()}


def layer_behind_the_others(tensors: dict, generator: torch.Generator) -> dict:
    """The same as GLM-4.5 has it: a layer more, and what joins it."""
    layers = 1 + max(int(n.split(".layers.")[1].split(".")[0]) for n in tensors if ".layers." in n)
    last, mark = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    shapes = {mark + n.removeprefix(last): t for n, t in tensors.items() if n.startswith(last)}
    hidden = tensors["model.norm.weight"]
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        shapes[f"{mark}{norm}.weight"] = hidden
    shapes[f"{mark}eh_proj.weight"] = hidden.new_zeros(len(hidden), 2 * len(hidden))
    return {n: (0.1 * torch.randn(t.shape, generator=generator)).to(t.dtype) for n, t in shapes.items()}


def random_model(tiny: Tiny, model_class, tied: bool, generator: torch.Generator, out: Path):
    """A model of `tiny`'s config.json, which is written to `out`, with random weights of its types."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(tiny.config, indent=2) + "\n")
    config = transformers.AutoConfig.from_pretrained(out)
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial(name, parameter, tied, generator))
        for name, buffer in model.named_buffers():
            if name.endswith(ROUTERS_BIASES):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(initial(name, buffer, tied, generator))
    saved = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(getattr(torch, tiny.dtype))
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(tiny.keep_f32 or ("\0",)):
            parameter.data = saved.get(name, parameter.data).float()
    return model


def rename_as_published(model_type: str, out: Path) -> None:
    """Renames what transformers calls otherwise when it saves a model: Kimi-Linear's MLPs as it calls experts, and the
    projection behind Ling 3's delta attention as it calls that of latent attention."""
    renames = {"kimi_linear": r"block_sparse_moe\.(\w+_proj)", "bailing_hybrid": r"attention\.(dense)"}
    if model_type not in renames:
        return
    published = {"kimi_linear": r"mlp.\1", "bailing_hybrid": "attention.o_proj"}[model_type]
    files = {path: {} for path in out.glob("*.safetensors")}
    for path, tensors in files.items():
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
    names = [name for tensors in files.values() for name in tensors]
    delta = {name.removesuffix("A_log") for name in names if name.endswith("A_log")}
    new = {}
    for name in names:
        concerns = model_type == "kimi_linear" or name.removesuffix("dense.weight") in delta
        new[name] = re.sub(renames[model_type], published, name) if concerns else name
    for path, tensors in files.items():
        save_torch_file({new[name]: tensor for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    index = out / "model.safetensors.index.json"
    if index.exists():
        root = json.loads(index.read_text())
        root["weight_map"] = {new[name]: file for name, file in root["weight_map"].items()}
        index.write_text(json.dumps(root, indent=2) + "\n")


def write_checkpoint(tiny: Tiny, seed: int, out: Path) -> None:
    """Saves the checkpoint with transformers' own class, under config.json as `tiny` gives it."""
    generator = torch.Generator().manual_seed(seed)
    model_class = getattr(transformers, tiny.config["architectures"][0])
    model = random_model(tiny, model_class, tiny.config["tie_word_embeddings"], generator, out)
    # transformers would save experts one by one; Qwen3.5 publishes them stacked.
    stacked = tiny.config["model_type"] == "qwen3_5_moe"
    model.save_pretrained(out, max_shard_size=tiny.shard_size, save_original_format=not stacked)
    rename_as_published(tiny.config["model_type"], out)
    (out / "generation_config.json").unlink(missing_ok=True)
    (out / "config.json").write_text(json.dumps(tiny.config, indent=2) + "\n")
    if tiny.mtp:
        tensors = load_file(out / "model.safetensors")
        tensors |= mtp_tensors(tensors, generator)
        save_torch_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(vocab_size: int, out: Path, padded: bool = True) -> None:
    """A byte-level BPE of the 256 bytes, a few merges and an end-of-text token; if `padded`, the ids beyond stay unused."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n")]
    vocabulary = {token: i for i, token in enumerate(alphabet + ["".join(pair) for pair in merges])}
    assert len(vocabulary) < vocab_size
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    if not padded:
        tokenizer.add_tokens([f"<|{id}|>" for id in range(tokenizer.get_vocab_size(), vocab_size)])
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (out / "tokenizer_config.json").write_text(json.dumps(config) + "\n")


def prompt_tokens(name: str, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(name.encode())).integers(0, vocab_size, PROMPT)


def vocab_size(tiny: Tiny) -> int:
    return tiny.config.get("text_config", tiny.config)["vocab_size"]


def fair(greedy: np.ndarray, metadata: dict[str, str]) -> bool:
    gap, margin = float(metadata["router_gap"]), float(metadata["greedy_margin"])
    rounding = float(metadata["prefill_minus_steps"])
    if len(set(greedy.tolist())) < LEAST_GREEDY_VARIETY:
        return False
    return margin > LEAST_GREEDY_MARGIN and gap > LEAST_ROUTER_GAP and rounding < MOST_ROUNDING


def make(tiny: Tiny, out: Path) -> dict[str, str]:
    """Writes a checkpoint and what is expected of it, from the first seed that is fair to compare."""
    tokens = prompt_tokens(tiny.name, vocab_size(tiny))
    for seed in range(tiny.seed, tiny.seed + 200):
        with tempfile.TemporaryDirectory() as scratch:
            scratch = Path(scratch) / "checkpoint"
            write_checkpoint(tiny, seed, scratch)
            model = oracle.load(scratch, tiny.config["architectures"][0])
            arrays, metadata = oracle.evaluate(model, tokens)
            if not fair(arrays["greedy"], metadata):
                continue
            for old in out.glob("model*.safetensors*"):
                old.unlink()
            shutil.copytree(scratch, out, dirs_exist_ok=True)
            write_tokenizer(vocab_size(tiny), out)
            oracle.save(arrays, out / "expected.safetensors", {**metadata, "seed": str(seed)})
            return {**metadata, "seed": str(seed)}
    raise ValueError(f"{tiny.name}: no seed is fair to compare")


def arguments(parser):
    parser.add_argument("--only", nargs="*", help="names of the tiny Hugging Face checkpoints to make, and nothing else")
    parser.add_argument("--llama-cpp", type=Path, help="llama.cpp's source tree")
    parser.add_argument("--tools", type=Path, help="the folder of the built llama-quantize and libllama")


def write(folder, options):
    for tiny in all_tiny():
        if not options.only or tiny.name in options.only:
            print(tiny.name, make(tiny, folder / tiny.name), flush=True)
    if options.only:
        return
    # They import this module.
    from . import gguf_models, mlx_models

    mlx_models.write(folder)
    if options.llama_cpp:
        gguf_models.write(folder, options.llama_cpp, options.tools)
