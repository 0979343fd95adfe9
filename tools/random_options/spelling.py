"""How config.json says it: what is nested, absent, null, said twice or without effect."""

import random

from .case import Case

NESTED_CLASSES = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}
# Keys whose defaults make no enormous checkpoints.
DEFAULTED = [
    "hidden_act", "rms_norm_eps", "max_position_embeddings", "head_dim", "num_key_value_heads", "attention_bias",
    "sliding_window", "use_sliding_window", "max_window_layers", "norm_topk_prob", "decoder_sparse_step",
    "mlp_only_layers", "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok",
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "tie_word_embeddings", "rope_parameters",
    "rope_theta", "rope_scaling", "layer_types", "full_attention_interval", "mlp_bias", "num_attention_heads",
]
RARELY_DEFAULTED = ["num_experts", "linear_num_key_heads", "linear_num_value_heads", "intermediate_size"]
RARELY_DEFAULTED += ["vocab_size", "num_hidden_layers"]


def nesting(case: Case, r: random.Random) -> None:
    """Qwen3.5's text model alone, flat; or below `text_config` under the text model's class."""
    names = NESTED_CLASSES.get(case.architecture)
    form = r.choice(["published", "published", "flat", "text class", "no architectures"])
    if form == "no architectures":
        del case.root["architectures"]
    if names is None or form == "published":
        return
    if form == "flat":
        text = case.text
        case.root = {"architectures": [f"{names}ForCausalLM"], **text}
        case.root["model_type"] = f"{case.architecture}_text"
    elif form == "text class":
        case.root["architectures"] = [f"{names}ForCausalLM"]
        if r.random() < 0.5:
            del case.root["vision_config"]


def defaults(case: Case, r: random.Random) -> None:
    """Leaves keys out that transformers has a default for."""
    if r.random() < 0.4:
        return
    for key in DEFAULTED:
        if key in case.text and r.random() < 0.09:
            del case.text[key]
    for key in RARELY_DEFAULTED:
        if key in case.text and r.random() < 0.01:
            del case.text[key]


def nulls(case: Case, r: random.Random) -> None:
    keys = DEFAULTED + ["attention_dropout", "pad_token_id", "bos_token_id", "eos_token_id", "use_cache", "dtype"]
    for key in keys:
        if r.random() < 0.008:
            case.text[key] = None


def aliases(case: Case, r: random.Random) -> None:
    """Other names of a key, and keys that change the model in ways that few models use."""
    text = case.text
    if case.architecture == "qwen3_moe" and "num_experts" in text and r.random() < 0.25:
        text["num_local_experts"] = text.pop("num_experts")
        if r.random() < 0.3:
            text["num_experts"] = text["num_local_experts"] + 1
    if r.random() < 0.02:
        text["per_layer_config"] = {"0": {"hidden_act": "relu"}}
    if "global_head_dim" in text and r.random() < 0.15:
        sizes = {"head_dim": r.choice([8, 16, 40]), "num_key_value_heads": text.get("num_key_value_heads", 4)}
        kinds = enumerate(text.get("layer_types") or [])
        text["per_layer_config"] = {str(i): sizes for i, kind in kinds if kind == "full_attention"}
    if r.random() < 0.015:
        text["chunk_size_feed_forward"] = 8
    if r.random() < 0.015:
        text["is_decoder"] = r.choice([True, False])
    if r.random() < 0.015:
        text["is_causal"] = False
    if r.random() < 0.015:
        text["query_pre_attn_scalar"] = 100
    if r.random() < 0.015:
        text["hidden_activation"] = "relu"


def idle_keys(case: Case, r: random.Random) -> None:
    """Keys that change nothing in inference."""
    idle = {
        "attention_dropout": r.choice([0.0, 0.5, 1]),
        "initializer_range": 0.3,
        "use_cache": False,
        "pretraining_tp": r.choice([1, 2]),
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
        "bos_token_id": r.choice([0, 7]),
        "eos_token_id": r.choice([3, [3, 4], 99999]),
        "pad_token_id": r.choice([5, 0]),
        "_name_or_path": "somebody/something",
        "transformers_version": r.choice(["4.37.0", "5.0.0"]),
        "mamba_ssm_dtype": r.choice(["float32", "bfloat16"]),
        "mtp_num_hidden_layers": 1,
        "_attn_implementation": "sdpa",
        "auto_map": {"AutoConfig": "configuration.Config"},
        "use_qk_norm": False,
        "residual_multiplier": 2.0,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "final_logit_softcapping": 30.0,
        "rope_interleaved": True,
        "clip_qkv": 0.1,
        "attention_multiplier": 0.5,
        "no_rope_layers": [0],
        "quantization_config": None,
        "unheard_of": {"a": [1, None]},
    }
    for key, value in idle.items():
        if r.random() < 0.07:
            case.text[key] = value


def stray_root_keys(case: Case, r: random.Random) -> None:
    """Keys beside `text_config` that belong inside: transformers does not look at them there."""
    if not case.nested:
        return
    stray = {
        "hidden_act": "relu",
        "rms_norm_eps": 0.5,
        "partial_rotary_factor": 0.5,
        "rope_theta": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
        "sliding_window": 5,
        "layer_types": ["full_attention"] * 9,
        "full_attention_interval": 1,
        "norm_topk_prob": False,
        "head_dim": 8,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "attention_bias": True,
    }
    for key, value in stray.items():
        if r.random() < 0.1:
            case.root[key] = value


def said_twice(case: Case, r: random.Random) -> None:
    """A key twice in the same object: the last one counts."""
    if r.random() < 0.05 and "rms_norm_eps" in case.text:
        case.duplicate = ("rms_norm_eps", 0.7)
