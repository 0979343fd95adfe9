"""Rotary positions: every kind that transformers computes, in its old and its new spelling."""

import random

from .case import Case

KINDS = ["default"] * 6 + ["linear"] * 3 + ["llama3"] * 4 + ["yarn"] * 7 + ["dynamic", "longrope", "proportional"]
NESTED = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
PARTIAL = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "glm4", "glm4_moe", "phi3", "minimax_m2")


def option(case: Case, r: random.Random) -> None:
    text = case.text
    old = text.get("rope_parameters") or {}
    if case.architecture == "ministral3":
        old["original_max_position_embeddings"] = r.choice([16, 32, 64, 512])
        old["factor"] = r.choice([2.0, 4.0, 16.0])
        old["llama_4_scaling_beta"] = r.choice([0.0, 0.1, 0.5])
        return
    for key in NESTED:
        text.pop(key, None)
    if case.architecture == "kimi_linear":
        # Nothing is rotated.
        text["rope_theta"] = r.choice([10000.0, 500.0])
        return
    if case.architecture in ("gemma4", "gemma4_moe", "gemma4_small"):
        proportional(text, r)
        return
    if case.architecture in ("gemma3", "olmo3"):
        by_kind(case.architecture, text, r)
        return
    if case.architecture == "hunyuan_v1_dense" and r.random() < 0.5:
        body = {"type": "dynamic", "alpha": r.choice([1000.0, 50, 1.0, 3.5]), "factor": 1.0}
        text["rope_theta"] = r.choice([10000.0, 500.0])
        text[r.choice(["rope_scaling", "rope_parameters"])] = body | maybe({"beta_fast": 32, "mscale": 1.0}, 0.5, r)
        return
    kind = r.choice(["default", "default", "longrope"] if case.architecture == "phi3" else KINDS)
    if case.architecture == "deepseek_v2" and r.random() < 0.5:
        # mlx-lm has nothing else.
        kind = "yarn"
    # Only these models rotate a part of a head; for the others the factor is without effect, or does not fit.
    chance = 0.6 if case.architecture in PARTIAL else 0.15
    partial = r.choice([0.25, 0.25, 0.3, 0.5, 0.75, 1.0, 1]) if r.random() < chance else None
    body = scaling(text, kind, partial, case.architecture, r)
    if "mrope_section" in old and r.random() < 0.5:
        body |= {key: old[key] for key in ("mrope_section", "mrope_interleaved")}
    theta = r.choice([None, 10000.0, 10000, 1e6, 500.0, 37.5])
    place(text, kind, body, theta, partial, r)


def by_kind(architecture: str, text: dict, r: random.Random) -> None:
    """One embedding for each kind of layer, in the old spelling or in the new one."""
    text.pop("rope_local_base_freq", None)
    kind = r.choice(["default", "linear", "llama3", "yarn"])
    body = scaling(text, kind, None, architecture, r)
    theta, local = r.choice([1e6, 10000, 500.0]), r.choice([10000.0, 10000, 300.0])
    if architecture == "olmo3" and r.random() < 0.7:
        # GGUF and MLX's layout have one base.
        theta = local = 500000.0
    if r.random() < 0.5:
        if r.random() < 0.7:
            text["rope_theta"] = theta
            if architecture == "gemma3":
                text["rope_local_base_freq"] = local
        if kind != "default":
            text["rope_scaling"] = body | {"rope_type": kind}
        return
    full = body | {"rope_type": kind, "rope_theta": theta}
    text["rope_parameters"] = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": local}}


def proportional(text: dict, r: random.Random) -> None:
    """Gemma 4's: one embedding for each kind of layer, always in the new spelling."""
    if r.random() < 0.15:
        return
    full = {"rope_type": "proportional", "rope_theta": r.choice([1e6, 10000, 500.0])}
    full |= maybe({"partial_rotary_factor": r.choice([0.25, 0.25, 0.5, 1.0, 0.3])}, 0.85, r)
    full |= maybe({"factor": r.choice([1.0, 2.0, 8])}, 0.15, r)
    if r.random() < 0.1:
        full = {"rope_type": r.choice(["default", "linear"]), "rope_theta": 1e6, "factor": 2.0}
    local = {"rope_type": "default", "rope_theta": r.choice([10000.0, 10000, 300.0])}
    text["rope_parameters"] = {"full_attention": full, "sliding_attention": local}


def scaling(text: dict, kind: str, partial: float | None, architecture: str, r: random.Random) -> dict:
    """What `kind` needs, and some of what it may have."""
    if kind == "default":
        return {"factor": 4.0} if r.random() < 0.05 else {}
    original = {"original_max_position_embeddings": r.choice([16, 32, 64, 100])}
    factor = {"factor": r.choice([1.0, 0.5, 2, 3.5, 4.0, 8.0])}
    if kind == "llama3":
        low = r.choice([1, 1.0, 0.5, 2.0])
        return factor | maybe(original, 0.8, r) | {"low_freq_factor": low, "high_freq_factor": low * r.choice([2, 4])}
    if kind == "yarn":
        body = factor | maybe(original, 0.8, r)
        body |= maybe({"attention_factor": r.choice([None, 0.7, 1.3, 1])}, 0.3, r)
        body |= maybe({"beta_fast": r.choice([None, 0, 4, 16.0, 32])}, 0.4, r)
        body |= maybe({"beta_slow": r.choice([None, 0, 0.5, 1, 2.5])}, 0.4, r)
        body |= maybe({"mscale": r.choice([None, 0, 0.7, 1.0, 1.4])}, 0.5, r)
        body |= maybe({"mscale_all_dim": r.choice([None, 0, 0.5, 1.0])}, 0.5, r)
        return body | maybe({"truncate": r.choice([True, False, False])}, 0.4, r)
    if kind == "longrope":
        pairs = longrope_pairs(text, partial, architecture)
        lists = {key: [round(r.uniform(1, 6), 2) for _ in range(pairs)] for key in ("short_factor", "long_factor")}
        body = lists | maybe(original, 0.8, r) | maybe(factor, 0.5, r)
        return body | maybe({"attention_factor": r.choice([None, 0.8, 1.2])}, 0.3, r)
    return factor


def longrope_pairs(text: dict, partial: float | None, architecture: str) -> int:
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if partial is None:
        partial = {"glm4": 0.5, "glm4_moe": 0.5, "phi3": 1.0, "minimax_m2": 1.0}.get(architecture, 0.25 if architecture in PARTIAL else 1.0)
    return (int(head_dim * partial) + 1) // 2


def maybe(entries: dict, chance: float, r: random.Random) -> dict:
    return entries if r.random() < chance else {}


def place(text: dict, kind: str, body: dict, theta, partial, r: random.Random) -> None:
    """Writes the parameters in one of their spellings."""
    spelling = r.choice(["old"] * 4 + ["new"] * 4 + ["theta apart"] * 2 + ["both"])
    if partial is not None:
        inside = r.random() < 0.5
        (body if inside else text)["partial_rotary_factor"] = partial
        if r.random() < 0.05:
            text["partial_rotary_factor"] = 0.5
    if kind != "default" or r.random() < 0.5:
        for name in r.choice([["rope_type"], ["rope_type"], ["type"], ["type", "rope_type"]]):
            body[name] = kind
    if body.get("type") and body.get("rope_type") and r.random() < 0.1:
        body["type"] = "default"
    if spelling == "old":
        if theta is not None:
            text["rope_theta"] = theta
        text["rope_scaling"] = body or None
        if not body and r.random() < 0.5:
            del text["rope_scaling"]
        return
    if theta is not None:
        inside = spelling != "theta apart"
        (body if inside else text)["rope_theta"] = theta
        if inside and r.random() < 0.05:
            text["rope_theta"] = 123.0
    text["rope_parameters"] = body or None
    if spelling == "both":
        text["rope_scaling"] = r.choice([None, {}, {"rope_type": "linear", "factor": 2.5}, {"type": "default"}])
    if "original_max_position_embeddings" in body and r.random() < 0.15:
        text["original_max_position_embeddings"] = r.choice([24, 48])
