"""Writes a case, asks transformers and lowbit, and says whether they agree.

What two correct f32 programs may differ by is measured on transformers itself: each of its weights is moved by a few
units in the last place, several times, and so are its single steps; `SAFETY` times the largest change is the bound.
"""

import json
import math
import re
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from peer_vectors import models, oracle
from safetensors import safe_open
from safetensors.torch import save_file

from .case import Case

# Sums of some hundred terms, in another order.
WEIGHT_NOISE = 2.0**-22
SAFETY = 16.0
# What rounding f32 logits costs at least, of the largest of them.
LEAST_TOLERANCE = 2.0**-22
# What a bound larger than this would let pass may be a wrong number.
LARGEST_TOLERANCE = 2e-3
GENERATED = 16
SECONDS = 120


class Illegal(Exception):
    """transformers does not load it, or does not compute with it."""


class Unfair(Exception):
    """Rounding alone may change the result: another seed."""


@dataclass
class Expected:
    """What transformers makes of a checkpoint."""

    nll: float
    tolerance: float
    greedy: list[int]
    # Of each greedy token, its lead over the runner-up, and the bound on what rounding does to it.
    leads: list[float]
    lead_tolerance: float
    # What transformers has understood, for the report's counts.
    traits: list[str]
    max_position_embeddings: int


@dataclass
class Verdict:
    """`kind`: agrees, refused, wrong, crashed."""

    kind: str
    text: str = ""
    difference: float = 0.0


def model_class(root: dict):
    names = root.get("architectures") or []
    return getattr(transformers, names[0]) if names else transformers.AutoModelForCausalLM


def write(case: Case, seed: int, out: Path) -> None:
    """The checkpoint and a tokenizer.

    Raises Illegal when transformers refuses config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    tiny = case.tiny()
    try:
        by_name = case.root.get("architectures")
        create = model_class(case.root) if by_name else transformers.AutoModelForCausalLM.from_config
        model = models.random_model(tiny, create, ties(case), generator, out)
        model.save_pretrained(out, max_shard_size=case.shard_size, save_original_format=case.save_original_format)
        models.rename_as_published(case.architecture, out)
    except Exception as error:
        raise Illegal(f"{type(error).__name__}: {error}") from error
    (out / "generation_config.json").unlink(missing_ok=True)
    if not case.saved_config:
        (out / "config.json").write_text(case.json())
    edit_tensors(case, generator, out)
    for edit in case.file_edits:
        edit(out)
    models.write_tokenizer(model.config.get_text_config().vocab_size, out, padded=False)


def ties(case: Case) -> bool:
    return bool(case.root.get("tie_word_embeddings") or case.text.get("tie_word_embeddings"))


def edit_tensors(case: Case, generator: torch.Generator, out: Path) -> None:
    if not case.tensor_edits:
        return
    tensors = {}
    for path in sorted(out.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
        path.unlink()
    (out / "model.safetensors.index.json").unlink(missing_ok=True)
    for edit in case.tensor_edits:
        tensors = edit(tensors, generator)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def text_to_score(seed: str) -> str:
    """Letters of one to four bytes, so that tokens of all of the vocabulary occur."""
    random = np.random.default_rng(abs(hash_of(seed)))
    ranges = [(0x20, 0x7F)] * 4 + [(0xA1, 0x250), (0x3041, 0x3090), (0x1F600, 0x1F640)]
    chosen = random.integers(0, len(ranges), 52)
    return "".join(chr(random.integers(*ranges[i])) for i in chosen)


def hash_of(text: str) -> int:
    return zlib.crc32(text.encode())


def load(out: Path):
    """transformers' model of the directory.

    Raises Illegal.
    """
    root = json.loads((out / "config.json").read_text())
    try:
        model, info = oracle.from_file(out, model_class(root))
    except Exception as error:
        raise Illegal(f"loading: {type(error).__name__}: {error}") from error
    if info["missing_keys"] or info["mismatched_keys"]:
        raise Illegal(f"missing {sorted(info['missing_keys'])}, mismatched {info['mismatched_keys']}")
    return model


def measure(model, tokens: list[int], logits: torch.Tensor) -> Expected:
    """What lowbit should find, and how exactly.

    Raises Unfair.
    """
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or 0
    if rope.get("rope_type") == "longrope" and len(tokens) <= original < len(tokens) + GENERATED:
        raise Unfair("transformers changes LongRoPE's factors within the reply")
    gaps = oracle.RouterGaps(model, oracle.chosen_experts(model))
    nll = negative_log_likelihood(logits, tokens)
    greedy, leads = continuation(model, tokens)
    gaps.close()
    logit_error, nll_error = 0.0, 0.0
    for seed in range(3):
        with perturbed(model, seed):
            other = oracle.prefill(model, tokens[:-1])
        logit_error = max(logit_error, float((other - logits).abs().max()))
        nll_error = max(nll_error, abs(negative_log_likelihood(other, tokens) - nll))
    tolerance = max(SAFETY * nll_error, LEAST_TOLERANCE * max(1.0, float(logits.abs().max())))
    if tolerance > LARGEST_TOLERANCE or gaps.least < SAFETY * WEIGHT_NOISE * 16:
        raise Unfair(f"tolerance {tolerance:.1e}, router gap {gaps.least:.1e}")
    lead_tolerance = max(2 * SAFETY * logit_error, tolerance)
    context = model.config.get_text_config().max_position_embeddings
    return Expected(nll, tolerance, greedy, leads, lead_tolerance, traits(model), context)


def traits(model) -> list[str]:
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "no"}
    rope = rope.get("full_attention") or rope
    keys = ("hidden_act", "hidden_activation")
    activation = next((getattr(config, key) for key in keys if getattr(config, key, None)), "an activation without a key")
    names = [activation, f"{rope['rope_type']} rope"]
    names += ["sliding window"] * (window is not None) + ["tied"] * bool(model.all_tied_weights_keys)
    kinds = set(getattr(config, "layer_types", None) or [])
    return names + sorted(f"{kind} layers" if len(kinds) > 1 else f"{kind} only" for kind in kinds)


class perturbed:
    """The model with every weight moved by a few units in the last place."""

    def __init__(self, model, seed: int):
        self.model, self.generator = model, torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def __enter__(self):
        self.saved = [parameter.clone() for parameter in self.model.parameters()]
        for parameter in self.model.parameters():
            noise = torch.rand(parameter.shape, generator=self.generator) * 2 - 1
            parameter.mul_(1 + WEIGHT_NOISE * noise)

    @torch.no_grad()
    def __exit__(self, *exception):
        for parameter, saved in zip(self.model.parameters(), self.saved):
            parameter.copy_(saved)


def negative_log_likelihood(logits: torch.Tensor, tokens: list[int]) -> float:
    rows = logits.double().log_softmax(-1)
    return -float(rows.gather(1, torch.tensor(tokens[1:])[:, None]).mean())


def continuation(model, tokens: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens, each from a whole pass: caches obey keys that the model itself does not."""
    sequence, leads = list(tokens), []
    for _ in range(GENERATED):
        best, index = oracle.prefill(model, sequence)[-1].topk(2)
        leads.append(float(best[0] - best[1]))
        sequence.append(int(index[0]))
    return sequence[len(tokens) :], leads


def run_lowbit(lowbit: Path, command: str, out: Path, flags: list[str]) -> tuple[int, str, str]:
    line = [lowbit, command, "--model", str(out), "--threads", "1", "--json", *flags]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, errors="replace")
    except subprocess.TimeoutExpired:
        return -1, "", f"no answer in {SECONDS} s"
    return done.returncode, done.stdout, done.stderr


def compare(lowbit: Path, out: Path, text: str) -> tuple[Verdict, Expected | None]:
    """The verdict on a directory, and what it was measured by where lowbit computes.

    Raises Illegal and Unfair.
    """
    tokens = token_ids(out, text)
    model = load(out)
    try:
        logits = oracle.prefill(model, tokens[:-1])
    except Exception as error:
        raise Illegal(f"computing: {type(error).__name__}: {error}") from error
    if not logits.isfinite().all():
        raise Illegal("logits that are not finite")
    path = out / "text.txt"
    path.write_bytes(text.encode())
    # LongRoPE goes by the context that is asked for, and by the tokens that there are in transformers.
    flags = ["--exact", "--file", str(path), "--context", str(len(tokens))]
    code, output, error = run_lowbit(lowbit, "perplexity", out, flags)
    if code == 1:
        return Verdict("refused", message(error, out)), None
    if code != 0:
        return Verdict("crashed", f"perplexity: exit {code}: {error[-500:]}"), None
    expected = measure(model, tokens, logits)
    nll = json.loads(output)["nll"]
    difference = abs(nll - expected.nll) if nll is not None else math.inf
    if not difference <= expected.tolerance:
        both = f"nll {nll}, transformers {expected.nll:.7f} +- {expected.tolerance:.1e}"
        return Verdict("wrong", both, difference), expected
    verdict = judge_greedy(lowbit, out, text, tokens, expected)
    verdict.difference = difference
    return verdict, expected


def judge_greedy(lowbit: Path, out: Path, text: str, tokens: list[int], expected: Expected) -> Verdict:
    flags = ["--exact", "--prompt", text, "--ignore-eos", "--temp", "0", "--max-tokens", str(GENERATED)]
    flags += ["--ctx-size", str(len(tokens) + GENERATED)]
    code, output, error = run_lowbit(lowbit, "generate", out, flags)
    if code != 0:
        return Verdict("crashed", f"perplexity computes, generate: exit {code}: {error[-500:]}")
    reply = json.loads(output)
    if reply["prompt_tokens"] != tokens:
        return Verdict("wrong", f"prompt {reply['prompt_tokens']}, tokenizers {tokens}")
    for i, (got, want) in enumerate(zip(reply["tokens"], expected.greedy)):
        if got != want and expected.leads[i] <= expected.lead_tolerance:
            return Verdict("agrees")
        if got != want:
            lead = f"lead {expected.leads[i]:.3g} > {expected.lead_tolerance:.1e}"
            return Verdict("wrong", f"greedy token {i}: {got}, transformers {want} ({lead})")
    # A reply ends where the model's context does (the last token needs no place in it); transformers goes on.
    want = min(len(expected.greedy), expected.max_position_embeddings - len(tokens) + 1)
    if len(reply["tokens"]) != want:
        return Verdict("wrong", f"{len(reply['tokens'])} tokens of {want}: {error[-300:]}")
    return Verdict("agrees")


def message(error: str, out: Path) -> str:
    """The message without what differs from case to case."""
    text = error.strip().splitlines()[-1] if error.strip() else "(no message)"
    return re.sub(r"\d+", "N", text.replace(str(out), "DIR"))


def token_ids(out: Path, text: str) -> list[int]:
    return tokenizers.Tokenizer.from_file(str(out / "tokenizer.json")).encode(text).ids
