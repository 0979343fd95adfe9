"""transformers as the oracle: float32 weights, eager attention, CPU, one thread, no kernels from the hub."""

import json
import math
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)

# The text-only class of each architecture: loading it leaves out the vision tower and the multi-token-prediction head.
TEXT_CLASSES = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}


def text_class(architecture: str):
    return getattr(transformers, TEXT_CLASSES.get(architecture, architecture))


def from_file(path: Path, model_class):
    """The checkpoint at `path` in float32, and which of its tensors transformers missed or left over."""
    model, info = model_class.from_pretrained(
        path,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    model = model.eval().float()
    # Buffers such as A_log must not stay in half precision.
    dtypes = {p.dtype for p in model.parameters()}
    assert dtypes == {torch.float32}, dtypes
    return model, info


def load(path: Path, architecture: str):
    """The checkpoint at `path`, upcast to float32, from which nothing is missing and nothing left over."""
    model, info = from_file(path, text_class(architecture))
    # Layers that predict further tokens, and what sees images.
    known = ("mtp.", f"model.layers.{model.config.get_text_config().num_hidden_layers}.", "model.visual.")
    unexpected = {name for name in info["unexpected_keys"] if not name.startswith(known)}
    if info["missing_keys"] or unexpected or info["mismatched_keys"]:
        raise ValueError(f"{path}: {info}")
    return model


@torch.no_grad()
def prefill(model, tokens) -> torch.Tensor:
    """Logits [T, vocabulary] of one forward pass."""
    return model(input_ids=torch.as_tensor(tokens)[None], use_cache=False).logits[0]


@torch.no_grad()
def step_by_step(model, tokens) -> torch.Tensor:
    """The same logits, a token at a time through the caches."""
    cache, rows = None, []
    for token in tokens:
        out = model(input_ids=torch.tensor([[int(token)]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits[0, -1])
    return torch.stack(rows)


@torch.no_grad()
def greedy(model, tokens, count: int) -> tuple[list[int], float]:
    """`count` greedy tokens, and the least lead of a chosen token over the runner-up."""
    out = model(input_ids=torch.as_tensor(tokens)[None], use_cache=True)
    chosen, margin = [], math.inf
    for _ in range(count):
        best, index = out.logits[0, -1].topk(2)
        margin = min(margin, float(best[0] - best[1]))
        chosen.append(int(index[0]))
        out = model(input_ids=index[None, :1], past_key_values=out.past_key_values, use_cache=True)
    return chosen, margin


class RouterGaps:
    """Records the least gap between the last chosen and the first rejected expert's logit, or of what takes its place."""

    def __init__(self, model, top_k: int | None):
        self.least = math.inf
        self.hooks = []
        for name, module in model.named_modules():
            if top_k and name.endswith(("mlp.gate", "mlp.router", "feed_forward.gate", "block_sparse_moe.router", "mixer.gate", "router.proj")):
                self.hooks.append(module.register_forward_pre_hook(self.watch(top_k)))

    def watch(self, top_k: int):
        def hook(module, args):
            bias = getattr(module, "bias", None)
            logits = torch.nn.functional.linear(args[0].reshape(-1, args[0].shape[-1]), module.weight, bias)
            selection = getattr(module, "e_score_correction_bias", args[1] if len(args) > 1 else None)
            if selection is not None:
                logits = logits.sigmoid() + selection
            count = 1 if getattr(module, "topk_method", "") == "greedy" else getattr(module, "num_group", 1)
            if count > 1:
                groups = logits.unflatten(-1, (count, -1))
                best = 2 if selection is not None else 1
                sums = groups.topk(best, dim=-1).values.sum(dim=-1)
                self.least_between(sums, module.topk_group)
                kept = torch.zeros_like(sums, dtype=torch.bool).scatter_(-1, sums.topk(module.topk_group).indices, True)
                logits = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
            self.least_between(logits, top_k)

        return hook

    def least_between(self, values: torch.Tensor, chosen: int) -> None:
        ranked = values.sort(dim=-1, descending=True).values
        if chosen < ranked.shape[-1]:
            self.least = min(self.least, float((ranked[:, chosen - 1] - ranked[:, chosen]).min()))

    def close(self):
        for hook in self.hooks:
            hook.remove()


def chosen_experts(model) -> int | None:
    """Experts for each token, by whichever name the configuration has."""
    config = model.config.get_text_config()
    return getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)


def save(arrays: dict[str, np.ndarray], path: Path, metadata: dict[str, str]) -> None:
    """One metadata entry: safetensors would write several in random order, and files should be reproducible."""
    save_file(arrays, path, metadata={"about": json.dumps(metadata)})


def evaluate(model, tokens: np.ndarray, count: int = 20) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays of an expected.safetensors and its metadata."""
    gaps = RouterGaps(model, chosen_experts(model))
    logits = prefill(model, tokens)
    steps = step_by_step(model, tokens)
    continuation, margin = greedy(model, tokens, count)
    gaps.close()
    difference = float((logits - steps).abs().max())
    if not difference < 1e-3:
        raise ValueError(f"prefill and single steps differ by {difference}")
    arrays = {
        "tokens": np.asarray(tokens, dtype=np.int64),
        "logits": logits.numpy(),
        "greedy": np.asarray(continuation, dtype=np.int64),
    }
    metadata = {
        "made_by": f"transformers {transformers.__version__}, torch {torch.__version__}, float32, eager attention, CPU",
        "prefill_minus_steps": f"{difference:.3g}",
        "greedy_margin": f"{margin:.3g}",
        "router_gap": f"{gaps.least:.3g}",
        "logits_std": f"{float(logits.std()):.3g}",
    }
    return arrays, metadata
