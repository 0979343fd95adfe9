"""The options: each may change a case's config.json, or how its tensors are stored.

Not every combination is legal. What transformers does not load and compute with is drawn again.
"""

import random

from . import files, rope, spelling
from .case import Case

HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
EXPERTS = ("qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen2_moe", "mixtral", "gpt_oss", "minimax_m2")
# Those whose experts have the MLP's size, and one name more for their number.
LOCAL_EXPERTS = ("mixtral", "gpt_oss", "minimax_m2")
# Those whose windows have no switch.
GEMMA4 = ("gemma4", "gemma4_moe", "gemma4_small")
ALWAYS_WINDOWED = (*GEMMA4, "gemma2", "gemma3", "gpt_oss", "mistral", "mistral3", "ministral3", "mixtral", "phi3", "olmo3", "exaone4")
WINDOWED = (*ALWAYS_WINDOWED, "qwen3", "qwen3_moe", "qwen2", "smollm3")
SHORT_CONVOLUTIONS = ("lfm2", "lfm2_moe")
SIGMOIDS = ("glm4_moe", "lfm2_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v2", "kimi_linear", "bailing_hybrid")
# Those with latent attention.
LATENT = ("glm4_moe_lite", "deepseek_v3", "deepseek_v2", "kimi_linear", "bailing_hybrid")
# Those whose configuration need not say how wide a head is.
MAMBA = ("granitemoehybrid",)
HEADS_FROM_HIDDEN = ("granite", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "smollm3", "phi3", "olmo2", "olmo3", "exaone4")
# Those that have layers with windows and others.
MIXED = ("gemma2", "gemma3", "gpt_oss", "qwen3", "qwen2", "smollm3", "olmo3", "exaone4")
# Those for which GGUF's readers take it that heads make up the hidden size.
HIDDEN_OF_HEADS = ("olmo2", "olmo3", "exaone4")
ACTIVATIONS = ["silu"] * 30 + ["swish", "relu", "gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_python", "gelu_fast"]
ACTIVATIONS += ["quick_gelu", "relu2", "sigmoid", "tanh", "linear", "mish", "gelu_accurate", "gelu_10", "hardswish"]


def sizes(case: Case, r: random.Random) -> None:
    text = case.text
    text["hidden_size"] = r.choice([32, 33, 48, 50, 64, 72, 96, 120])
    text["vocab_size"] = r.choice([261, 264, 277, 288, 300])
    text["num_hidden_layers"] = layers = r.choice([1, 2, 2, 3, 4, 5])
    if "layer_types" in text:
        kinds = ["linear_attention", "full_attention"] if case.architecture in HYBRIDS else ["full_attention"]
        if case.architecture in ("gpt_oss", "olmo3", "exaone4", *GEMMA4):
            kinds = ["sliding_attention", "full_attention"]
        if case.architecture in MAMBA:
            kinds = r.choice([["mamba", "attention"], ["linear_attention", "full_attention"]])
        if case.architecture in SHORT_CONVOLUTIONS:
            kinds = ["conv", "full_attention"]
        text["layer_types"] = [r.choice(kinds) for _ in range(layers)]
    if case.architecture in GEMMA4 and r.random() < 0.95:
        # transformers computes nothing else.
        text["layer_types"][-1] = "full_attention"
    if case.architecture in GEMMA4:
        small = case.architecture == "gemma4_small"
        text["num_kv_shared_layers"] = r.choice([0, 1, 1, 2, 3]) if small else 0
        text["hidden_size_per_layer_input"] = r.choice([0, 4, 32, 33, 64]) if small else 0
        text["use_double_wide_mlp"] = r.random() < 0.5
        text["vocab_size_per_layer_input"] = text["vocab_size"]
    if "no_rope_layers" in text:
        text["no_rope_layers"] = r.choice([None, [r.choice([0, 1]) for _ in range(layers)]])
        text["no_rope_layer_interval"] = r.choice([2, 3, 4])
    if "max_window_layers" in text:
        text["max_window_layers"] = layers
    if "logits_scaling" in text:
        text["logits_scaling"] = r.choice([1.0, 2, 8.0, 0.7])
        text["embedding_multiplier"] = r.choice([1, 1.0, 12.0, 0.3])
        text["residual_multiplier"] = r.choice([1.0, 0.22, 2])
        text["attention_multiplier"] = r.choice([1.0, 0.25, 0.0078125])
    if case.architecture == "exaone4":
        text["sliding_window_pattern"] = r.choice([4, 3, "LLLG", "LG", None])
    elif "sliding_window_pattern" in text:
        text["sliding_window_pattern"] = r.choice([1, 2, 3, 6])
        text["query_pre_attn_scalar"] = r.choice([16, 24, 100])
    if "intermediate_size" in text:
        text["intermediate_size"] = r.choice([32, 37, 48, 96, 100, 160])


def heads(case: Case, r: random.Random) -> None:
    text = case.text
    if case.architecture in LATENT:
        return latent_heads(case, r)
    kv_heads = r.choice([1, 1, 2, 3, 4])
    text["num_key_value_heads"] = kv_heads
    text["num_attention_heads"] = kv_heads * r.choice([1, 2, 3, 4])
    text["head_dim"] = r.choice([4, 8, 12, 16, 24, 32, 40, 64])
    if case.architecture in GEMMA4:
        text["attention_k_eq_v"] = r.random() < 0.6
        text["global_head_dim"] = r.choice([4, 8, 16, 24, 40, 48, 96])
        text["num_global_key_value_heads"] = r.choice([None, 1, kv_heads, text["num_attention_heads"]])
        text["final_logit_softcapping"] = r.choice([None, 30.0, 30.0, 5.0])
    if case.architecture == "gemma2":
        text["query_pre_attn_scalar"] = r.choice([16, 24, 100])
        text["attn_logit_softcapping"] = r.choice([50.0, 50.0, 2.0, 0.5, None if r.random() < 0.3 else 1.0])
        text["final_logit_softcapping"] = r.choice([30.0, 30.0, 5.0, None if r.random() < 0.3 else 2.0])
    if case.architecture in ("gemma2", "gemma3") and r.random() < 0.9:
        # transformers wants it of these two.
        text["hidden_size"] += -text["hidden_size"] % text["num_attention_heads"]
    if "query_pre_attn_scalar" in text and r.random() < 0.6:
        # As in all published models but one; GGUF has no key for another.
        text["query_pre_attn_scalar"] = text["head_dim"]
    if case.architecture in HEADS_FROM_HIDDEN and r.random() < 0.5:
        text["head_dim"] = None
        if case.architecture not in ("llama", "mistral") or r.random() < 0.5:
            del text["head_dim"]
    if case.architecture in HIDDEN_OF_HEADS and r.random() < 0.6:
        text["hidden_size"] = text["num_attention_heads"] * (text.get("head_dim") or 16)
    if "attention_head_dim" in text:
        text["attention_head_dim"] = text["head_dim"]
    if "rotary_dim" in text:
        text["rotary_dim"] = r.choice([2, text["head_dim"] // 2, text["head_dim"]])
    if case.architecture == "llama" and r.random() < 0.3:
        text["num_key_value_heads"] = None


def latent_heads(case: Case, r: random.Random) -> None:
    text = case.text
    text["num_attention_heads"] = text["num_key_value_heads"] = r.choice([1, 2, 3, 4, 6])
    if case.architecture == "deepseek_v2":
        text["hidden_size"] -= text["hidden_size"] % text["num_attention_heads"]
        if r.random() < 0.3:
            text["num_key_value_heads"] = None
    text["q_lora_rank"] = r.choice([None, 16, 24, 40])
    text["kv_lora_rank"] = r.choice([16, 32, 33, 64, 96])
    text["qk_nope_head_dim"] = r.choice([8, 16, 17, 32, 64])
    text["qk_rope_head_dim"] = r.choice([2, 4, 8, 16, 24])
    text["v_head_dim"] = r.choice([8, 16, 20, 32, 48])
    if case.architecture not in ("deepseek_v2", "kimi_linear", "bailing_hybrid") and r.random() < 0.2:
        text["rope_interleave"] = r.choice([True, False])


def hidden_act(case: Case, r: random.Random) -> None:
    case.text["hidden_act"] = r.choice(ACTIVATIONS)


def epsilon(case: Case, r: random.Random) -> None:
    key = "norm_eps" if case.architecture in SHORT_CONVOLUTIONS else "rms_norm_eps"
    case.text[key] = r.choice([1e-6, 1e-5, 1e-3, 0.03, 1.0, 0.0])


def biases(case: Case, r: random.Random) -> None:
    """Mistral has no such key: there it is without effect."""
    if r.random() < (0.1 if case.architecture == "mistral" else 0.4):
        case.text["attention_bias"] = r.choice([True, True, False])
    if case.architecture in ("llama", "smollm3", "seed_oss", "granite") and r.random() < 0.4:
        case.text["mlp_bias"] = True
    elif r.random() < 0.03:
        case.text["mlp_bias"] = True
    if case.architecture == "seed_oss" and r.random() < 0.4:
        case.text["attention_out_bias"] = True
    if case.architecture == "qwen2_moe" and r.random() < 0.3:
        case.text["qkv_bias"] = r.choice([True, False])


def context(case: Case, r: random.Random) -> None:
    case.text["max_position_embeddings"] = r.choice([64, 128, 128, 512, 512, 4096, 4096, 1048576])


def windows(case: Case, r: random.Random) -> None:
    text = case.text
    stray = case.architecture not in WINDOWED
    if stray and r.random() < 0.8:
        return
    text["sliding_window"] = r.choice([None, None, 1, 1, 2, 2, 7, 7, 21, 21, 64, 64, 100, 4096, 0, -1])
    if case.architecture not in ALWAYS_WINDOWED:
        text["use_sliding_window"] = r.random() < 0.7
        text["max_window_layers"] = r.choice([0, 1, 2, 5])
    if case.architecture in MIXED and r.random() < 0.4:
        kinds = ["sliding_attention", "full_attention"]
        text["layer_types"] = [r.choice(kinds) for _ in range(text["num_hidden_layers"])]
    elif case.architecture in ("llama", "mistral", "qwen3_moe") and r.random() < 0.15:
        kinds = ["sliding_attention", "full_attention"]
        text["layer_types"] = [r.choice(kinds) for _ in range(text["num_hidden_layers"])]


def hybrid_layers(case: Case, r: random.Random) -> None:
    """Which layers mix how; attention alone and delta nets alone are legal, too."""
    text, layers = case.text, case.text["num_hidden_layers"]
    if case.architecture not in HYBRIDS:
        return
    form = r.choice(["types", "interval", "both", "attention", "linear", "default"])
    text.pop("layer_types", None)
    text.pop("full_attention_interval", None)
    kinds = {"attention": ["full_attention"], "linear": ["linear_attention"]}
    if form in ("types", "both", "attention", "linear"):
        choice = kinds.get(form, ["full_attention", "linear_attention"])
        text["layer_types"] = [r.choice(choice) for _ in range(layers)]
    if form in ("interval", "both"):
        text["full_attention_interval"] = r.choice([1, 2, 3])
    if form == "interval" and r.random() < 0.3:
        text["layer_types"] = None


def delta_nets(case: Case, r: random.Random) -> None:
    if case.architecture not in HYBRIDS:
        return
    text = case.text
    key_heads = r.choice([1, 2, 3])
    text["linear_num_key_heads"] = key_heads
    text["linear_num_value_heads"] = key_heads * r.choice([1, 2, 3])
    text["linear_key_head_dim"] = r.choice([4, 7, 8, 16, 24, 32, 40])
    text["linear_value_head_dim"] = r.choice([4, 5, 8, 16, 24, 32, 40])
    text["linear_conv_kernel_dim"] = r.choice([4, 4, 1, 2, 3, 5])
    if case.architecture != "qwen3_next" and r.random() < 0.2:
        text["attn_output_gate"] = r.choice([True, False])


def experts(case: Case, r: random.Random) -> None:
    if case.architecture not in EXPERTS:
        return
    text = case.text
    count = r.choice([1, 2, 4, 5, 8, 16, 0 if r.random() < 0.1 else 3])
    local = case.architecture in LOCAL_EXPERTS
    text["num_local_experts" if local else "num_experts"] = count
    text["num_experts_per_tok"] = r.choice([n for n in (1, 2, 3, 5, 8) if n <= max(count, 1)])
    # Stacked, the bias of MiniMax's choice has a name of its own, which nobody publishes.
    case.save_original_format = r.random() < 0.5 or case.architecture == "minimax_m2"
    if local:
        return
    text["moe_intermediate_size"] = r.choice([16, 17, 32, 48, 64])
    if case.architecture != "qwen3_moe" or r.random() < 0.1:
        text["shared_expert_intermediate_size"] = r.choice([16, 32, 96])
    text["norm_topk_prob"] = r.random() < 0.5
    if r.random() < 0.2:
        text["norm_topk_prob"] = None
        del text["norm_topk_prob"]


def sigmoid_experts(case: Case, r: random.Random) -> None:
    if case.architecture not in SIGMOIDS:
        return
    text, layers = case.text, case.text["num_hidden_layers"]
    glm = case.architecture != "lfm2_moe"
    groups = r.choice([1, 1, 2, 3, 4]) if glm else 1
    size = r.choice([2, 3, 4, 5]) if groups > 1 else r.choice([1, 2, 4, 5, 8, 16])
    count = groups * size
    chosen = r.choice(range(1, groups + 1))
    text["n_routed_experts" if glm else "num_experts"] = count
    text["num_experts_per_tok"] = r.choice([n for n in (1, 2, 3, 5, 8) if n <= chosen * size])
    text["moe_intermediate_size"] = r.choice([16, 17, 32, 48, 64])
    text["first_k_dense_replace" if glm else "num_dense_layers"] = r.choice([0, 1, 1, 2, layers, layers + 1])
    text["norm_topk_prob"] = r.random() < 0.7
    text["routed_scaling_factor"] = r.choice([1.0, 1.0, 2.5, 0.7])
    case.save_original_format = r.random() < 0.5
    if glm:
        text["n_group"], text["topk_group"] = groups, chosen
        text["n_shared_experts"] = r.choice([1, 1, 2])
    if case.architecture == "glm4_moe":
        text["use_qk_norm"] = r.random() < 0.5
    if case.architecture == "glm4_moe_lite":
        # transformers reads a list of its own; the number is mlx-lm's and llama.cpp's.
        dense = text.pop("first_k_dense_replace")
        if dense != 1 or r.random() < 0.5:
            text["mlp_layer_types"] = ["dense" if layer < dense else "sparse" for layer in range(layers)]
        if dense == 1 or r.random() < 0.5:
            text["first_k_dense_replace"] = dense
    if case.architecture == "deepseek_v2":
        text["topk_method"] = r.choice(["greedy", "group_limited_greedy"])
        text["norm_topk_prob"] = False
        if text["topk_method"] == "greedy" and r.random() < 0.5:
            text["n_group"] = text["topk_group"] = None
    if not glm:
        text["use_expert_bias"] = r.random() < 0.8


def kimi_delta(case: Case, r: random.Random) -> None:
    """Which layers mix how, said in one way or another, and the published names of what experts have."""
    if case.architecture != "kimi_linear":
        return
    text, layers = case.text, case.text["num_hidden_layers"]
    names = {
        "n_routed_experts": ["num_experts", "num_experts", "num_local_experts"],
        "num_experts_per_tok": ["num_experts_per_token", "num_experts_per_token", "num_experts_per_tok"],
        "norm_topk_prob": ["moe_renormalize", "moe_renormalize", "norm_topk_prob"],
        "n_group": ["num_expert_group", "num_expert_group", "n_group"],
        "n_shared_experts": ["num_shared_experts", "num_shared_experts", "n_shared_experts"],
        "max_position_embeddings": ["model_max_length", "model_max_length", "max_position_embeddings"],
    }
    for name, spellings in names.items():
        if name in text:
            value = text.pop(name)
            for spelling in spellings:
                text.pop(spelling, None)
            text[r.choice(spellings)] = value
    if r.random() < 0.9:
        text["q_lora_rank"] = None
    if r.random() < 0.8:
        text["first_k_dense_replace"] = min(text["first_k_dense_replace"], layers)
    # Stacked, the tensors have names that nobody publishes.
    case.save_original_format = True
    taken = r.choice([[True, False], [True, False], [True, False], [True], [False]])
    attends = [r.choice(taken) for _ in range(layers)]
    number = lambda kind: [index + 1 for index in range(layers) if attends[index] == kind]
    sizes = {"num_heads": r.choice([1, 2, 3, 4]), "head_dim": r.choice([4, 7, 8, 16, 24, 32, 40])}
    sizes["short_conv_kernel_size"] = r.choice([4, 4, 1, 2, 3, 5])
    text["linear_attn_config"] = sizes | {"kda_layers": number(False), "full_attn_layers": number(True)}
    form = r.choice(["lists", "lists", "both", "types", "flat"])
    if form != "lists":
        text["layer_types"] = ["full_attention" if full else "linear_attention" for full in attends]
    if form in ("types", "flat"):
        del text["linear_attn_config"]["kda_layers"], text["linear_attn_config"]["full_attn_layers"]
    if form == "flat":
        sizes = text.pop("linear_attn_config")
        text["linear_num_heads"], text["linear_head_dim"] = sizes["num_heads"], sizes["head_dim"]
        text["linear_conv_kernel_dim"] = sizes["short_conv_kernel_size"]
    if r.random() < 0.3:
        dense = text["first_k_dense_replace"]
        text["mlp_layer_types"] = ["dense" if layer < dense else "sparse" for layer in range(layers)]
        if r.random() < 0.5:
            del text["first_k_dense_replace"]
    if r.random() < 0.9:
        text["tie_word_embeddings"] = False


def ling(case: Case, r: random.Random) -> None:
    """Which layers mix how, the decay's kind, and the published names of what experts have."""
    if case.architecture != "bailing_hybrid":
        return
    text, layers = case.text, case.text["num_hidden_layers"]
    names = {
        "n_routed_experts": ["num_experts", "num_experts", "num_local_experts"],
        "num_experts_per_tok": ["num_experts_per_tok", "num_experts_per_tok", "num_experts_per_token"],
        "n_shared_experts": ["num_shared_experts", "num_shared_experts", "n_shared_experts"],
    }
    for name, spellings in names.items():
        if name in text:
            value = text.pop(name)
            for spelling in spellings:
                text.pop(spelling, None)
            text[r.choice(spellings)] = value
    case.save_original_format = True
    text["num_nextn_predict_layers"] = 0
    text["moe_shared_expert_intermediate_size"] = text["moe_intermediate_size"]
    text["head_dim"] = r.choice([4, 7, 8, 16, 24, 32, 40])
    text["short_conv_kernel_size"] = r.choice([4, 4, 1, 2, 3, 5])
    text["kda_lower_bound"] = r.choice([-5.0, -5, -1.0, -20.0])
    text["kda_safe_gate"] = r.random() < 0.9
    text["layer_group_size"] = r.choice([size for size in (1, 2, 3, 4, 5, 6) if layers % size == 0 or r.random() < 0.1])
    if r.random() < 0.3:
        text["layer_types"] = [r.choice(["full_attention", "linear_attention"]) for _ in range(layers)]
    if r.random() < 0.3:
        dense = text["first_k_dense_replace"]
        text["mlp_layer_types"] = ["dense" if layer < dense else "sparse" for layer in range(layers)]
    if r.random() < 0.9:
        text["tie_word_embeddings"] = False


def short_convolutions(case: Case, r: random.Random) -> None:
    """Heads make up the hidden size."""
    if case.architecture not in SHORT_CONVOLUTIONS:
        return
    text, layers = case.text, case.text["num_hidden_layers"]
    text["hidden_size"] = text["num_attention_heads"] * text["head_dim"]
    if r.random() < 0.7:
        del text["head_dim"]
    text["conv_L_cache"] = r.choice([3, 3, 1, 2, 4, 5])
    if r.random() < 0.1:
        text["tie_embedding"] = r.choice([True, True, False])
    if r.random() < 0.05:
        text["conv_bias"] = True
    if case.architecture != "lfm2":
        return
    text["block_auto_adjust_ff_dim"] = r.random() < 0.6
    text["block_ff_dim"] = r.choice([32, 37, 48, 96, 100, 160])
    text["block_multiple_of"] = r.choice([1, 7, 32])
    text["block_ffn_dim_multiplier"] = r.choice([1.0, 1, 0.7, 1.3])
    form = r.choice(["types", "types", "indices", "default"])
    if form != "types":
        del text["layer_types"]
    if form == "indices":
        text["full_attn_idxs"] = [index for index in range(layers) if r.random() < 0.5]
    if r.random() < 0.3:
        text["intermediate_size"] = text.pop("block_ff_dim")


def mamba(case: Case, r: random.Random) -> None:
    """Heads of both mixers make up the hidden size, or a multiple of it."""
    if case.architecture not in MAMBA:
        return
    text = case.text
    kv_heads, width = r.choice([1, 1, 2, 3]), r.choice([4, 8, 12, 16])
    heads = kv_heads * r.choice([1, 2, 3])
    text["num_key_value_heads"], text["num_attention_heads"] = kv_heads, heads
    text["hidden_size"] = heads * width
    text.pop("head_dim", None)
    text["mamba_expand"] = expand = r.choice([2, 2, 2, 1, 3])
    count = r.choice([n for n in (1, 2, 3, 4, 6, 8, 12) if expand * heads * width % n == 0])
    text["mamba_n_heads"] = count
    text["mamba_d_head"] = r.choice(["auto", expand * heads * width // count])
    text["mamba_n_groups"] = r.choice([1, 1, 1, *(n for n in (2, 3, 4) if count % n == 0)])
    text["mamba_d_state"] = r.choice([4, 7, 16, 32, 64])
    text["mamba_d_conv"] = r.choice([4, 4, 4, 1, 2, 3])
    text["mamba_conv_bias"] = r.random() < 0.8
    text["mamba_proj_bias"] = r.random() < 0.1
    text["mamba_chunk_size"] = r.choice([1, 16, 256])
    text["position_embedding_type"] = r.choice(["nope", "nope", "rope", None])
    text["shared_intermediate_size"] = r.choice([16, 32, 33, 96])
    text["num_local_experts"] = experts = r.choice([0, 0, 1, 2, 4, 7])
    text["num_experts_per_tok"] = r.choice([n for n in (1, 2, 3) if n <= max(experts, 1)])
    if r.random() < 0.2:
        text["time_step_limit"] = r.choice([[0.0, 1e9], [0.01, 0.2], [0.0, 0.05]])


def experts_beside_mlps(case: Case, r: random.Random) -> None:
    if case.architecture not in GEMMA4:
        return
    text = case.text
    text["enable_moe_block"] = r.random() < (0.95 if case.architecture == "gemma4_moe" else 0.05)
    if case.architecture == "gemma4_moe" or r.random() < 0.3:
        text["num_experts"] = count = r.choice([1, 2, 4, 5, 8, 16])
        text["top_k_experts"] = r.choice([n for n in (1, 2, 3, 5, 8) if n <= count])
        text["moe_intermediate_size"] = r.choice([16, 17, 32, 48, 64])


def one_part_layers(case: Case, r: random.Random) -> None:
    if case.architecture != "nemotron_h":
        return
    text = case.text
    layers = r.choice([1, 2, 3, 4, 5])
    letters = r.choice(["M*-", "M*-", "M*E", "M*E", "M-", "*E", "M", "M*-E"])
    pattern = "".join(r.choice(letters) for _ in range(layers))
    del text["hybrid_override_pattern"]
    text["num_hidden_layers"] = layers
    old = r.random() < 0.5
    words = {"M": "mamba" if old else "linear_attention", "*": "attention" if old else "full_attention", "-": "mlp", "E": "moe"}
    form = r.choice(["pattern", "pattern", "list", "list"])
    if form == "pattern":
        text["hybrid_override_pattern"] = pattern
    else:
        text["layers_block_type"] = [words[letter] for letter in pattern]
        if r.random() < 0.5:
            del text["num_hidden_layers"]
    groups = r.choice([1, 2, 3])
    text["n_groups"] = groups
    text["mamba_num_heads"] = groups * r.choice([1, 2, 3])
    text["mamba_head_dim"] = r.choice([4, 8, 12, 16])
    text["ssm_state_size"] = r.choice([4, 7, 16, 32, 64])
    text["conv_kernel"] = r.choice([4, 4, 4, 1, 2, 3])
    text["use_conv_bias"] = r.random() < 0.8
    text["use_bias"] = r.random() < 0.1
    text["mlp_bias"] = r.random() < 0.1
    text["layer_norm_epsilon"] = text.pop("rms_norm_eps", 1e-5)
    text["tie_word_embeddings"] = False
    size, chosen = r.choice([1, 2, 4, 5]), r.choice([1, 1, 2])
    count = size if size < 2 else size * chosen
    text["n_routed_experts"] = count
    text["n_group"] = text["topk_group"] = 1
    text["num_experts_per_tok"] = r.choice([n for n in (1, 2, 3) if n <= count])
    text["moe_intermediate_size"] = r.choice([16, 17, 32])
    text["moe_shared_expert_intermediate_size"] = r.choice([16, 32, 48])
    text["moe_latent_size"] = r.choice([None, None, 16, 24, 64])
    text["routed_scaling_factor"] = r.choice([1.0, 2.5])
    text["norm_topk_prob"] = r.random() < 0.8
    case.save_original_format = r.random() < 0.6


def sparse_layers(case: Case, r: random.Random) -> None:
    """In Qwen3.5 these keys are without effect."""
    if case.architecture not in EXPERTS or (case.architecture == "qwen3_5_moe" and r.random() < 0.8):
        return
    text, layers = case.text, case.text["num_hidden_layers"]
    text["decoder_sparse_step"] = r.choice([1, 1, 2, 3])
    text["mlp_only_layers"] = r.choice([[], [], None, [0], [layers - 1], list(range(layers)), [99]])
    if r.random() < 0.2:
        del text["mlp_only_layers"]


def storage(case: Case, r: random.Random) -> None:
    case.dtype = r.choice(["float32", "bfloat16", "float16", "float64" if r.random() < 0.1 else "float32"])
    if case.dtype != "float32" and r.random() < 0.5:
        case.keep_f32 = tuple(r.sample(["A_log", "dt_bias", "norm.weight", "q_proj.weight", "lm_head.weight"], 2))
    case.shard_size = r.choice(["1GB", "1GB", "60KB", "20KB"])
    case.saved_config = r.random() < 0.3
    key = r.choice(["dtype", "torch_dtype", None])
    if key:
        case.text[key] = r.choice([case.dtype, "float32", "bfloat16", "float16"])


OPTIONS = {
    "sizes": sizes,
    "heads": heads,
    "hidden_act": hidden_act,
    "epsilon": epsilon,
    "biases": biases,
    "context": context,
    "windows": windows,
    "hybrid_layers": hybrid_layers,
    "delta_nets": delta_nets,
    "experts": experts,
    "sparse_layers": sparse_layers,
    "experts_beside_mlps": experts_beside_mlps,
    "sigmoid_experts": sigmoid_experts,
    "kimi_delta": kimi_delta,
    "ling": ling,
    "short_convolutions": short_convolutions,
    "mamba": mamba,
    "one_part_layers": one_part_layers,
    "rope": rope.option,
    "storage": storage,
    "nesting": spelling.nesting,
    "ties": files.ties,
    "defaults": spelling.defaults,
    "nulls": spelling.nulls,
    "aliases": spelling.aliases,
    "idle_keys": spelling.idle_keys,
    "stray_root_keys": spelling.stray_root_keys,
    "said_twice": spelling.said_twice,
    "tensors": files.tensors,
    "stray_files": files.stray_files,
}
