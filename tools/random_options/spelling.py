"""How config.json says it: what is nested, absent, null, said twice or without effect; and what stands beside the
weights that transformers saves."""

import random

import torch

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


def ties(case: Case, r: random.Random) -> None:
    """The flag at the root, in `text_config`, in both, contradicting; weights that do not fit the flag."""
    values = [True, True, False, None]
    for part in [case.root, case.text] if case.nested else [case.root]:
        part.pop("tie_word_embeddings", None)
        value = r.choice(values)
        if value is not None:
            part["tie_word_embeddings"] = value
    form = r.random()
    if form < 0.2:
        case.tensor_edits.append(own_head)
    elif form < 0.3:
        case.tensor_edits.append(same_head)
    elif form < 0.35:
        case.tensor_edits.append(head_alone)


def head_and_embedding(tensors: dict) -> tuple[str, str]:
    embedding = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    return "lm_head.weight", embedding


def own_head(tensors: dict, generator: torch.Generator) -> dict:
    """An output layer of its own, whatever the flag says."""
    head, embedding = head_and_embedding(tensors)
    value = tensors[embedding]
    own = 2 * value.shape[1] ** -0.5 * torch.randn(value.shape, generator=generator)
    return {**tensors, head: own.to(value.dtype)}


def same_head(tensors: dict, generator: torch.Generator) -> dict:
    """The embedding a second time as the output layer."""
    head, embedding = head_and_embedding(tensors)
    return {**tensors, head: tensors[embedding].clone()}


def head_alone(tensors: dict, generator: torch.Generator) -> dict:
    """The output layer without the embedding that is tied to it."""
    head, embedding = head_and_embedding(tensors)
    value = tensors.pop(embedding)
    return {head: value, **tensors}


def defaults(case: Case, r: random.Random) -> None:
    """Leaves keys out that transformers has a default for."""
    if r.random() < 0.4:
        return
    for key in DEFAULTED:
        if key in case.text and r.random() < 0.12:
            del case.text[key]
    for key in RARELY_DEFAULTED:
        if key in case.text and r.random() < 0.015:
            del case.text[key]


def nulls(case: Case, r: random.Random) -> None:
    keys = DEFAULTED + ["attention_dropout", "pad_token_id", "bos_token_id", "eos_token_id", "use_cache", "dtype"]
    for key in keys:
        if r.random() < 0.04:
            case.text[key] = None


def aliases(case: Case, r: random.Random) -> None:
    """Other names of a key, and keys that change the model in ways that few models use."""
    text = case.text
    if case.architecture == "qwen3_moe" and "num_experts" in text and r.random() < 0.25:
        text["num_local_experts"] = text.pop("num_experts")
        if r.random() < 0.3:
            text["num_experts"] = text["num_local_experts"] + 1
    if r.random() < 0.05 and "intermediate_size" in text:
        text["per_layer_config"] = {"0": {"intermediate_size": 64}}
    if r.random() < 0.05:
        text["per_layer_config"] = {"0": {"hidden_act": "relu"}}
    if r.random() < 0.03:
        text["chunk_size_feed_forward"] = 8
    if r.random() < 0.03:
        text["is_decoder"] = r.choice([True, False])
    if r.random() < 0.03:
        text["is_causal"] = False
    if r.random() < 0.03:
        text["query_pre_attn_scalar"] = 100
    if r.random() < 0.03:
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


def tensors(case: Case, r: random.Random) -> None:
    """Tensors that the model does not ask for."""
    if r.random() < 0.05:
        case.tensor_edits.append(extra_tensor)
    if r.random() < 0.05:
        case.tensor_edits.append(inverse_frequencies)
    if r.random() < 0.1:
        case.tensor_edits.append(stray_biases)


def extra_tensor(tensors: dict, generator: torch.Generator) -> dict:
    return {**tensors, "model.something_else.weight": torch.ones(3)}


def inverse_frequencies(tensors: dict, generator: torch.Generator) -> dict:
    """As old exporters wrote them."""
    return {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}


def stray_biases(tensors: dict, generator: torch.Generator) -> dict:
    """Biases of the attention in the file, whatever `attention_bias` says."""
    edited = dict(tensors)
    for name, value in tensors.items():
        bias = name.removesuffix("weight") + "bias"
        if name.endswith(("q_proj.weight", "o_proj.weight")) and bias not in tensors:
            edited[bias] = (0.3 * torch.randn(len(value), generator=generator)).to(value.dtype)
    return edited
