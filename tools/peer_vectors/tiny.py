"""Tiny random checkpoints in the published layout of every architecture.

Every dimension that a kernel could mix up differs from every other, and every K is a multiple of 32, so that the same
checkpoint can be quantised in groups or blocks of 32. `config` is config.json as the published checkpoints spell it.
"""

from dataclasses import dataclass, field

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}


@dataclass
class Tiny:
    """A checkpoint to make."""

    name: str
    config: dict
    dtype: str = "bfloat16"
    # Tensors that the published checkpoint keeps in f32 beside a 16-bit rest.
    keep_f32: tuple[str, ...] = ()
    # Tensors of the multi-token-prediction head, which the published checkpoints carry and text inference skips.
    mtp: bool = False
    shard_size: str = "1GB"
    gguf_pre_tokenizer: str = "qwen2"
    seed: int = 0
    extra: dict = field(default_factory=dict)


def dense(architecture: str, model_type: str, **fields) -> dict:
    """The fields of config.json that all the plain transformers share."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        **fields,
    }


def qwen3() -> Tiny:
    return Tiny(
        "qwen3",
        dense(
            "Qwen3ForCausalLM",
            "qwen3",
            attention_bias=False,
            vocab_size=275,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            rope_theta=1000000.0,
            rope_scaling=None,
            sliding_window=None,
            use_sliding_window=False,
            max_window_layers=3,
            tie_word_embeddings=True,
            torch_dtype="bfloat16",
        ),
    )


def qwen3_yarn() -> Tiny:
    """Rope parameters nested, as transformers 5 writes them; queries wider than twice the hidden size."""
    return Tiny(
        "qwen3-yarn",
        dense(
            "Qwen3ForCausalLM",
            "qwen3",
            attention_bias=False,
            vocab_size=263,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=32,
            max_position_embeddings=128,
            rope_parameters=YARN_ROPE,
            sliding_window=None,
            use_sliding_window=False,
            max_window_layers=2,
            tie_word_embeddings=False,
            dtype="bfloat16",
        ),
    )


def llama3() -> Tiny:
    return Tiny(
        "llama3",
        dense(
            "LlamaForCausalLM",
            "llama",
            attention_bias=False,
            mlp_bias=False,
            vocab_size=267,
            hidden_size=96,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=40,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            rope_scaling=LLAMA3_ROPE,
            pretraining_tp=1,
            tie_word_embeddings=True,
            torch_dtype="bfloat16",
        ),
        gguf_pre_tokenizer="llama-bpe",
    )


def llama2() -> Tiny:
    """As old as they come: f32, no head_dim, no num_key_value_heads, rope_scaling null."""
    return Tiny(
        "llama2",
        dense(
            "LlamaForCausalLM",
            "llama",
            vocab_size=261,
            hidden_size=32,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            rms_norm_eps=1e-5,
            rope_scaling=None,
            tie_word_embeddings=False,
            torch_dtype="float32",
        ),
        dtype="float32",
        gguf_pre_tokenizer="llama-bpe",
    )


def llama_bias() -> Tiny:
    """Biases on the attention and the MLP, one key-value head, f16."""
    return Tiny(
        "llama-bias",
        dense(
            "LlamaForCausalLM",
            "llama",
            attention_bias=True,
            mlp_bias=True,
            vocab_size=265,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=24,
            rope_theta=10000.0,
            rope_scaling=None,
            tie_word_embeddings=False,
            torch_dtype="float16",
        ),
        dtype="float16",
        gguf_pre_tokenizer="llama-bpe",
    )


def mistral() -> Tiny:
    """A sliding window that the prompt exceeds."""
    return Tiny(
        "mistral",
        dense(
            "MistralForCausalLM",
            "mistral",
            vocab_size=271,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=16,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            sliding_window=21,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
        ),
        gguf_pre_tokenizer="llama-bpe",
    )


def qwen3_moe(mlp_only_layers: tuple[int, ...] = (1,)) -> Tiny:
    """Layer 1 is dense, as mlp_only_layers says."""
    return Tiny(
        "qwen3_moe",
        dense(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            attention_bias=False,
            decoder_sparse_step=1,
            vocab_size=277,
            hidden_size=64,
            intermediate_size=160,
            moe_intermediate_size=32,
            mlp_only_layers=list(mlp_only_layers),
            num_experts=6,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            rope_theta=1000000.0,
            rope_scaling=None,
            sliding_window=None,
            use_sliding_window=False,
            max_window_layers=3,
            output_router_logits=False,
            router_aux_loss_coef=0.001,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
        ),
    )


def delta_net(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> dict:
    """The fields of config.json that describe a gated delta net."""
    return {
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
    }


def layer_types(layers: int, interval: int) -> list[str]:
    return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]


def qwen3_next(value_dim: int = 16) -> Tiny:
    return Tiny(
        "qwen3_next",
        dense(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            attention_bias=False,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            full_attention_interval=2,
            vocab_size=279,
            hidden_size=64,
            intermediate_size=160,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=96,
            num_experts=5,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=40,
            partial_rotary_factor=0.25,
            rope_theta=10000000.0,
            rope_scaling=None,
            output_router_logits=False,
            router_aux_loss_coef=0.001,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
            **delta_net(2, 6, 24, value_dim),
        ),
    )


def qwen3_5_text(model_type: str, layers: int, interval: int, **fields) -> dict:
    """`text_config` of a Qwen3.5 checkpoint."""
    return {
        "model_type": model_type,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "full_attention_interval": interval,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": layer_types(layers, interval),
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 512,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        **fields,
    }


def qwen3_5_rope(sections: list[int]) -> dict:
    return {
        "mrope_interleaved": True,
        "mrope_section": sections,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000.0,
        "rope_type": "default",
    }


VISION = {
    "deepstack_visual_indexes": [],
    "depth": 1,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 16,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "num_heads": 2,
    "num_position_embeddings": 4,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
}


def qwen3_5(value_dim: int = 24) -> Tiny:
    """Carries the vision tower and the multi-token-prediction head that the published checkpoints carry."""
    text = qwen3_5_text(
        "qwen3_5_text",
        4,
        2,
        vocab_size=283,
        hidden_size=64,
        intermediate_size=160,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
        rope_parameters=qwen3_5_rope([2, 1, 1]),
        tie_word_embeddings=False,
        **delta_net(2, 4, 16, value_dim),
    )
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "qwen3_5", "out_hidden_size": 64, **VISION},
    }
    return Tiny("qwen3_5", config, keep_f32=("A_log", "linear_attn.norm.weight"), mtp=True, gguf_pre_tokenizer="qwen35")


def qwen3_5_moe(value_dim: int = 16) -> Tiny:
    """Three shards and an index."""
    text = qwen3_5_text(
        "qwen3_5_moe_text",
        6,
        3,
        vocab_size=281,
        hidden_size=32,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=96,
        num_experts=5,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=40,
        output_router_logits=False,
        router_aux_loss_coef=0.001,
        rope_parameters=qwen3_5_rope([2, 2, 1]),
        tie_word_embeddings=False,
        **delta_net(2, 6, 24, value_dim),
    )
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "qwen3_5_moe", "out_hidden_size": 32, **VISION},
    }
    return Tiny("qwen3_5_moe", config, keep_f32=("A_log",), shard_size="260KB", gguf_pre_tokenizer="qwen35")


def qwen2() -> Tiny:
    """Biases on q, k and v, which config.json does not mention."""
    return Tiny(
        "qwen2",
        dense(
            "Qwen2ForCausalLM",
            "qwen2",
            vocab_size=269,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_theta=1000000.0,
            sliding_window=4096,
            use_sliding_window=False,
            max_window_layers=3,
            tie_word_embeddings=True,
            torch_dtype="bfloat16",
        ),
    )


def qwen2_moe() -> Tiny:
    """A shared expert with a gate; weights of experts that are not divided by their sum."""
    return Tiny(
        "qwen2_moe",
        dense(
            "Qwen2MoeForCausalLM",
            "qwen2_moe",
            decoder_sparse_step=1,
            vocab_size=273,
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
            num_experts=6,
            num_experts_per_tok=3,
            norm_topk_prob=False,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_theta=1000000.0,
            sliding_window=4096,
            use_sliding_window=False,
            max_window_layers=3,
            output_router_logits=False,
            router_aux_loss_coef=0.001,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
        ),
    )


def mixtral() -> Tiny:
    """Experts one by one, as w1, w2 and w3."""
    return Tiny(
        "mixtral",
        dense(
            "MixtralForCausalLM",
            "mixtral",
            vocab_size=287,
            hidden_size=64,
            intermediate_size=96,
            num_local_experts=5,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_theta=1000000.0,
            sliding_window=None,
            output_router_logits=False,
            router_aux_loss_coef=0.02,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
        ),
        gguf_pre_tokenizer="llama-bpe",
    )


def qwen3_vl() -> Tiny:
    """Carries a vision tower, which adds to some layers."""
    text = dense(
        "Qwen3VLTextModel",
        "qwen3_vl_text",
        attention_bias=False,
        vocab_size=285,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=40,
        rope_scaling={"mrope_interleaved": True, "mrope_section": [8, 6, 6], "rope_type": "default"},
        rope_theta=5000000.0,
        dtype="bfloat16",
    )
    del text["architectures"]
    vision = {"model_type": "qwen3_vl", "out_hidden_size": 32, **VISION, "deepstack_visual_indexes": [0]}
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text,
        "tie_word_embeddings": True,
        "vision_config": vision,
    }
    return Tiny("qwen3_vl", config)


PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "image_size": 28,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 14,
    "rope_theta": 10000.0,
}


def mistral3(text: dict, name: str) -> Tiny:
    """A text model of Mistral's below `text_config`, beside a vision tower."""
    del text["architectures"]
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "dtype": "bfloat16",
        "image_token_index": 10,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": PIXTRAL,
        "vision_feature_layer": -1,
    }
    return Tiny(name, config, gguf_pre_tokenizer="tekken")


def mistral_small() -> Tiny:
    return mistral3(mistral().config | {"sliding_window": None, "hidden_size": 32, "num_hidden_layers": 2}, "mistral3")


def ministral3() -> Tiny:
    """YaRN, and queries that grow beyond the 32 tokens of the original training."""
    rope = {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
        "type": "yarn",
    }
    text = dense(
        "Ministral3ForCausalLM",
        "ministral3",
        vocab_size=299,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        sliding_window=None,
    )
    return mistral3(text, "ministral3")


def phi3() -> Tiny:
    """q, k and v in one matrix, gate and up in another."""
    return Tiny(
        "phi3",
        dense(
            "Phi3ForCausalLM",
            "phi3",
            vocab_size=289,
            pad_token_id=0,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            original_max_position_embeddings=512,
            rope_theta=10000.0,
            rope_scaling=None,
            sliding_window=None,
            attention_bias=False,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
        ),
        gguf_pre_tokenizer="dbrx",
    )


def glm4() -> Tiny:
    """Norms around attention and MLP; half of each head rotated, in pairs of neighbours."""
    return Tiny(
        "glm4",
        dense(
            "Glm4ForCausalLM",
            "glm4",
            attention_bias=True,
            pad_token_id=0,
            vocab_size=291,
            hidden_size=32,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            rms_norm_eps=1e-5,
            partial_rotary_factor=0.5,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
        ),
        gguf_pre_tokenizer="glm4",
    )


def glm4_moe() -> Tiny:
    """Sigmoids with a bias choose experts in some groups; a shared expert without a gate, a dense layer before."""
    return Tiny(
        "glm4_moe",
        dense(
            "Glm4MoeForCausalLM",
            "glm4_moe",
            attention_bias=True,
            pad_token_id=0,
            vocab_size=281,
            hidden_size=32,
            intermediate_size=96,
            moe_intermediate_size=32,
            n_routed_experts=8,
            n_shared_experts=2,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=1.5,
            num_hidden_layers=3,
            num_nextn_predict_layers=1,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=24,
            rms_norm_eps=1e-5,
            partial_rotary_factor=0.5,
            rope_scaling=None,
            rope_theta=1000000,
            use_qk_norm=True,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
        ),
        keep_f32=("e_score_correction_bias",),
        mtp=True,
        gguf_pre_tokenizer="glm4",
    )


def glm4_moe_lite() -> Tiny:
    """Latent attention with compressed queries; experts as GLM-4.5 has them."""
    return Tiny(
        "glm4_moe_lite",
        dense(
            "Glm4MoeLiteForCausalLM",
            "glm4_moe_lite",
            attention_bias=False,
            pad_token_id=0,
            vocab_size=283,
            hidden_size=32,
            intermediate_size=96,
            moe_intermediate_size=32,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=3,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=1.8,
            num_hidden_layers=3,
            num_nextn_predict_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=24,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=24,
            rms_norm_eps=1e-6,
            partial_rotary_factor=1.0,
            rope_scaling=None,
            rope_theta=1000000,
            topk_method="noaux_tc",
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
        ),
        keep_f32=("e_score_correction_bias",),
        mtp=True,
        gguf_pre_tokenizer="glm4",
    )


def deepseek_v3() -> Tiny:
    """Latent attention with YaRN, whose mscale_all_dim sharpens scores; experts in groups, two dense layers before."""
    return Tiny(
        "deepseek_v3",
        dense(
            "DeepseekV3ForCausalLM",
            "deepseek_v3",
            attention_bias=False,
            pad_token_id=0,
            vocab_size=279,
            hidden_size=32,
            intermediate_size=96,
            moe_intermediate_size=32,
            moe_layer_freq=1,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=2,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            num_hidden_layers=3,
            num_nextn_predict_layers=1,
            num_attention_heads=6,
            num_key_value_heads=6,
            q_lora_rank=48,
            kv_lora_rank=32,
            qk_nope_head_dim=32,
            qk_rope_head_dim=8,
            v_head_dim=16,
            rms_norm_eps=1e-6,
            max_position_embeddings=512,
            rope_scaling={
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 32,
                "type": "yarn",
            },
            rope_theta=10000,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
        ),
        keep_f32=("e_score_correction_bias",),
        mtp=True,
        gguf_pre_tokenizer="deepseek-v3",
    )


def kimi_linear() -> Tiny:
    """A decay per channel between latent attention without positions; experts in groups behind a dense layer."""
    config = dense(
        "KimiLinearForCausalLM",
        "kimi_linear",
        pad_token_id=0,
        vocab_size=281,
        hidden_size=64,
        head_dim=21,
        intermediate_size=96,
        moe_intermediate_size=32,
        moe_layer_freq=1,
        moe_renormalize=True,
        moe_router_activation_func="sigmoid",
        num_experts=8,
        num_experts_per_token=3,
        num_shared_experts=1,
        num_expert_group=1,
        topk_group=1,
        use_grouped_topk=True,
        routed_scaling_factor=2.446,
        first_k_dense_replace=1,
        num_hidden_layers=4,
        num_nextn_predict_layers=0,
        num_attention_heads=3,
        num_key_value_heads=3,
        linear_attn_config={
            "full_attn_layers": [3],
            "head_dim": 32,
            "kda_layers": [1, 2, 4],
            "num_heads": 3,
            "short_conv_kernel_size": 4,
        },
        mla_use_nope=True,
        model_max_length=512,
        q_lora_rank=None,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        rope_scaling=None,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
    )
    # It has another name here.
    del config["max_position_embeddings"], config["attention_dropout"]
    keep = ("e_score_correction_bias", "A_log", "dt_bias")
    return Tiny("kimi_linear", config | {"rms_norm_eps": 1e-5}, keep_f32=keep, gguf_pre_tokenizer="kimi-k2")


def bailing_hybrid() -> Tiny:
    """A bounded decay per channel, latent attention with a gate per head; experts in groups behind a dense layer."""
    config = dense(
        "BailingHybridForCausalLM",
        "bailing_hybrid",
        pad_token_id=0,
        vocab_size=285,
        hidden_size=64,
        head_dim=32,
        intermediate_size=96,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        moe_router_enable_expert_bias=True,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=1,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        score_function="sigmoid",
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        num_hidden_layers=4,
        num_nextn_predict_layers=1,
        layer_group_size=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        short_conv_kernel_size=4,
        kda_safe_gate=True,
        kda_lower_bound=-5.0,
        no_kda_lora=True,
        gated_attention_proj_granularity_type="head_wise",
        q_lora_rank=None,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        rope_interleave=True,
        rope_scaling=None,
        rope_theta=6000000.0,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
    )
    del config["attention_dropout"]
    keep = ("e_score_correction_bias", "A_log", "dt_bias", "conv1d.weight")
    return Tiny("bailing_hybrid", config, keep_f32=keep, mtp=True, gguf_pre_tokenizer="bailingmoe2")


def deepseek_v2() -> Tiny:
    """Latent attention with whole queries, as DeepSeek V2 Lite; softmax chooses experts in some groups, as V2."""
    return Tiny(
        "deepseek_v2",
        dense(
            "DeepseekV2ForCausalLM",
            "deepseek_v2",
            attention_bias=False,
            pad_token_id=0,
            vocab_size=277,
            hidden_size=32,
            intermediate_size=96,
            moe_intermediate_size=32,
            moe_layer_freq=1,
            n_routed_experts=8,
            n_shared_experts=2,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            norm_topk_prob=False,
            routed_scaling_factor=4.0,
            scoring_func="softmax",
            topk_method="group_limited_greedy",
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=32,
            qk_nope_head_dim=24,
            qk_rope_head_dim=8,
            v_head_dim=40,
            rms_norm_eps=1e-6,
            max_position_embeddings=512,
            rope_scaling={
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 32,
                "type": "yarn",
            },
            rope_theta=10000,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
        ),
        gguf_pre_tokenizer="deepseek-llm",
    )


def lfm2() -> Tiny:
    """Short convolutions around a layer with attention; an MLP whose size is adjusted."""
    return Tiny(
        "lfm2",
        {
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "block_auto_adjust_ff_dim": True,
            "block_dim": 64,
            "block_ff_dim": 150,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 32,
            "bos_token_id": 1,
            "conv_L_cache": 4,
            "conv_bias": False,
            "eos_token_id": 7,
            "hidden_size": 64,
            "initializer_range": 0.02,
            "layer_types": ["conv", "full_attention", "conv"],
            "max_position_embeddings": 512,
            "norm_eps": 1e-05,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "pad_token_id": 0,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 283,
        },
        gguf_pre_tokenizer="lfm2",
    )


def lfm2_moe() -> Tiny:
    """The same with experts, chosen by sigmoids with a bias, in the layers behind the first."""
    config = lfm2().config
    config = {key: value for key, value in config.items() if not key.startswith("block_")}
    config |= {
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "conv_L_cache": 3,
        "hidden_size": 32,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
        "vocab_size": 285,
    }
    return Tiny("lfm2_moe", config, keep_f32=("expert_bias",), gguf_pre_tokenizer="lfm2")


def smollm3() -> Tiny:
    """One layer of three without positions."""
    return Tiny(
        "smollm3",
        dense(
            "SmolLM3ForCausalLM",
            "smollm3",
            attention_bias=False,
            pad_token_id=0,
            mlp_bias=False,
            vocab_size=293,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            no_rope_layer_interval=2,
            no_rope_layers=[1, 0, 1],
            layer_types=["full_attention"] * 3,
            max_window_layers=3,
            pretraining_tp=1,
            rope_scaling=None,
            rope_theta=5000000.0,
            sliding_window=None,
            use_sliding_window=False,
            tie_word_embeddings=True,
            torch_dtype="bfloat16",
        ),
        gguf_pre_tokenizer="smaug-bpe",
    )


def seed_oss() -> Tiny:
    """Biases on q, k and v, and wide queries."""
    return Tiny(
        "seed_oss",
        dense(
            "SeedOssForCausalLM",
            "seed_oss",
            attention_bias=True,
            attention_out_bias=False,
            mlp_bias=False,
            vocab_size=295,
            hidden_size=32,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=5,
            num_key_value_heads=1,
            head_dim=24,
            pretraining_tp=1,
            residual_dropout=0.1,
            rope_scaling={"rope_type": "default"},
            rope_theta=10000000.0,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
        ),
        gguf_pre_tokenizer="seed-coder",
    )


def olmo2() -> Tiny:
    """Norms of what attention and MLP give alone, and of all heads together."""
    return Tiny(
        "olmo2",
        dense(
            "Olmo2ForCausalLM",
            "olmo2",
            attention_bias=False,
            eos_token_id=7,
            pad_token_id=1,
            vocab_size=297,
            hidden_size=96,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            rope_scaling=None,
            rope_theta=500000,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
        ),
        gguf_pre_tokenizer="dbrx",
    )


def olmo3() -> Tiny:
    """The same with windows in some layers, and YaRN in the others alone."""
    config = olmo2().config | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "vocab_size": 299,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "rope_type": "yarn",
        },
        "sliding_window": 19,
    }
    return Tiny("olmo3", config, gguf_pre_tokenizer="dbrx")


def exaone4() -> Tiny:
    """Windows and rotation in some layers, neither in the others; norms of each head."""
    return Tiny(
        "exaone4",
        dense(
            "Exaone4ForCausalLM",
            "exaone4",
            bos_token_id=1,
            eos_token_id=5,
            pad_token_id=0,
            vocab_size=305,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rms_norm_eps=1e-5,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            rope_scaling={
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
                "rope_type": "llama3",
            },
            rope_theta=1000000,
            sliding_window=23,
            sliding_window_pattern="LLG",
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
        ),
        gguf_pre_tokenizer="exaone4",
    )


def hunyuan() -> Tiny:
    """Norms of heads that were rotated, and a base that `alpha` makes larger."""
    return Tiny(
        "hunyuan",
        dense(
            "HunYuanDenseV1ForCausalLM",
            "hunyuan_v1_dense",
            attention_bias=False,
            attention_head_dim=24,
            head_dim=24,
            eod_token_id=3,
            pad_token_id=0,
            mlp_bias=False,
            use_cla=False,
            use_qk_norm=True,
            vocab_size=307,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_scaling={
                "alpha": 1000.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "type": "dynamic",
            },
            rope_theta=10000.0,
            tie_word_embeddings=True,
            torch_dtype="bfloat16",
        ),
        gguf_pre_tokenizer="hunyuan-dense",
    )


def minimax_m2() -> Tiny:
    """Experts chosen by sigmoids with a bias, norms of all heads together, half of each head rotated."""
    return Tiny(
        "minimax_m2",
        dense(
            "MiniMaxM2ForCausalLM",
            "minimax_m2",
            attn_type_list=[1, 1],
            num_local_experts=6,
            num_experts_per_tok=2,
            output_router_logits=False,
            qk_norm_type="per_layer",
            rotary_dim=12,
            router_aux_loss_coef=0.001,
            router_jitter_noise=0.0,
            scoring_func="sigmoid",
            shared_intermediate_size=0,
            use_qk_norm=True,
            use_routing_bias=True,
            vocab_size=309,
            hidden_size=64,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=24,
            rope_theta=5000000,
            sliding_window=None,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
        ),
        keep_f32=("e_score_correction_bias",),
        gguf_pre_tokenizer="minimax-m2",
    )


def gemma3_text(**fields) -> dict:
    """Two layers with a window to one without; queries scaled by another number than a head's width."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "head_dim": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 24,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000,
        "sliding_window": 21,
        "sliding_window_pattern": 3,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 301,
        **fields,
    }


def gemma2() -> Tiny:
    """A window in every other layer, and caps that bend scores and logits."""
    config = {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 2.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 12.0,
        "head_dim": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 24,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 21,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 303,
    }
    return Tiny("gemma2", config, gguf_pre_tokenizer="default")


def gemma4_text(**fields) -> dict:
    """Two layers with a window to one without, each kind with heads of its own size."""
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": True,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 48,
        "head_dim": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": 512,
        "moe_intermediate_size": None,
        "num_attention_heads": 4,
        "num_experts": None,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 21,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "torch_dtype": "bfloat16",
        "use_bidirectional_attention": None,
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": 311,
        "vocab_size_per_layer_input": 311,
        **fields,
    }


def gemma4() -> Tiny:
    return Tiny("gemma4", gemma4_text(), gguf_pre_tokenizer="default")


def gemma4_moe() -> Tiny:
    """Experts beside the MLP, and values with a projection of their own."""
    config = gemma4_text(
        attention_k_eq_v=False,
        enable_moe_block=True,
        layer_types=["sliding_attention", "full_attention"],
        moe_intermediate_size=32,
        num_experts=6,
        num_global_key_value_heads=None,
        num_hidden_layers=2,
        top_k_experts=2,
        vocab_size=313,
    )
    return Tiny("gemma4_moe", config, gguf_pre_tokenizer="default")


def gemma4_small() -> Tiny:
    """Embeddings of each layer's own, and layers that read the keys of earlier ones, with twice the MLP."""
    config = gemma4_text(
        attention_k_eq_v=False,
        hidden_size_per_layer_input=32,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        num_global_key_value_heads=None,
        num_hidden_layers=4,
        num_key_value_heads=1,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        vocab_size=317,
        vocab_size_per_layer_input=317,
    )
    return Tiny("gemma4_small", config, gguf_pre_tokenizer="default")


def gemma3() -> Tiny:
    return Tiny("gemma3", {**gemma3_text(), "tie_word_embeddings": True}, gguf_pre_tokenizer="default")


def granite() -> Tiny:
    """Factors of the embedding, of scores, of what layers add, and of logits."""
    return Tiny(
        "granite",
        dense(
            "GraniteForCausalLM",
            "granite",
            attention_bias=False,
            attention_multiplier=0.1,
            embedding_multiplier=3.0,
            logits_scaling=0.5,
            mlp_bias=False,
            residual_multiplier=1.5,
            vocab_size=303,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_scaling=None,
            rope_theta=10000000.0,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
        ),
        gguf_pre_tokenizer="refact",
    )


def granite_hybrid() -> Tiny:
    """Granite's factors around Mamba-2 and attention without positions."""
    return Tiny(
        "granite_hybrid",
        dense(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            attention_bias=False,
            attention_multiplier=0.1,
            embedding_multiplier=3.0,
            init_method="mup",
            layer_types=["mamba", "attention", "mamba"],
            logits_scaling=0.5,
            mamba_chunk_size=16,
            mamba_conv_bias=True,
            mamba_d_conv=4,
            mamba_d_head=24,
            mamba_d_state=32,
            mamba_expand=3,
            mamba_n_groups=1,
            mamba_n_heads=8,
            mamba_proj_bias=False,
            normalization_function="rmsnorm",
            num_local_experts=0,
            num_experts_per_tok=0,
            output_router_logits=False,
            position_embedding_type="nope",
            residual_multiplier=0.7,
            router_aux_loss_coef=0.01,
            shared_intermediate_size=96,
            vocab_size=307,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_scaling=None,
            rope_theta=10000,
            tie_word_embeddings=True,
            torch_dtype="bfloat16",
        ),
        gguf_pre_tokenizer="refact",
    )


def granite_hybrid_moe() -> Tiny:
    """The same with experts beside a shared one, B and C of two groups, and attention with positions."""
    config = granite_hybrid().config | {
        "hidden_size": 32,
        "intermediate_size": 32,
        "layer_types": ["attention", "mamba"],
        "mamba_d_head": 16,
        "mamba_expand": 2,
        "mamba_n_groups": 2,
        "mamba_n_heads": 4,
        "num_hidden_layers": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "position_embedding_type": "rope",
        "shared_intermediate_size": 64,
        "tie_word_embeddings": False,
        "vocab_size": 309,
    }
    return Tiny("granite_hybrid_moe", config, gguf_pre_tokenizer="refact")


def nemotron_h() -> Tiny:
    """Layers of one part: Mamba-2, MLPs that square, attention without positions."""
    return Tiny(
        "nemotron_h",
        {
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "chunk_size": 16,
            "conv_kernel": 4,
            "eos_token_id": 7,
            "expand": 2,
            "head_dim": 24,
            "hidden_size": 64,
            "hybrid_override_pattern": "M-M*-",
            "initializer_range": 0.02,
            "intermediate_size": 160,
            "layer_norm_epsilon": 1e-05,
            "mamba_head_dim": 32,
            "mamba_hidden_act": "silu",
            "mamba_num_heads": 4,
            "mamba_proj_bias": False,
            "max_position_embeddings": 512,
            "mlp_bias": False,
            "mlp_hidden_act": "relu2",
            "n_groups": 2,
            "num_attention_heads": 4,
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "pad_token_id": 0,
            "residual_in_fp32": False,
            "ssm_state_size": 16,
            "tie_word_embeddings": False,
            "time_step_floor": 0.0001,
            "time_step_max": 0.1,
            "time_step_min": 0.001,
            "torch_dtype": "bfloat16",
            "use_bias": False,
            "use_cache": True,
            "use_conv_bias": True,
            "vocab_size": 311,
        },
        gguf_pre_tokenizer="pixtral",
    )


def nemotron_h_moe() -> Tiny:
    """The same with experts of a latent input beside a shared one, chosen by sigmoids with a bias."""
    config = nemotron_h().config | {
        "hidden_size": 32,
        "hybrid_override_pattern": "ME*E",
        "mamba_head_dim": 16,
        "moe_intermediate_size": 64,
        "moe_latent_size": 96,
        "moe_shared_expert_intermediate_size": 128,
        "n_group": 1,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
        "vocab_size": 313,
    }
    return Tiny("nemotron_h_moe", config, keep_f32=("e_score_correction_bias",), gguf_pre_tokenizer="pixtral")


def gpt_oss() -> Tiny:
    """Windows in every other layer, sinks, YaRN without rounding, stacked experts with biases."""
    return Tiny(
        "gpt_oss",
        dense(
            "GptOssForCausalLM",
            "gpt_oss",
            attention_bias=True,
            vocab_size=286,
            hidden_size=64,
            intermediate_size=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            experts_per_token=2,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=24,
            rms_norm_eps=1e-5,
            initial_context_length=32,
            rope_theta=150000,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 32,
                "truncate": False,
            },
            sliding_window=20,
            layer_types=["sliding_attention", "full_attention"],
            swiglu_limit=7.0,
            output_router_logits=False,
            router_aux_loss_coef=0.9,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
        ),
        gguf_pre_tokenizer="gpt-4o",
    )


def all_tiny() -> list[Tiny]:
    return [
        qwen3(),
        qwen3_yarn(),
        llama3(),
        llama2(),
        llama_bias(),
        mistral(),
        qwen3_moe(),
        qwen3_next(),
        qwen3_5(),
        qwen3_5_moe(),
        qwen2(),
        qwen2_moe(),
        mixtral(),
        qwen3_vl(),
        phi3(),
        glm4(),
        glm4_moe(),
        lfm2(),
        lfm2_moe(),
        smollm3(),
        seed_oss(),
        mistral_small(),
        ministral3(),
        gemma2(),
        gemma3(),
        granite(),
        granite_hybrid(),
        granite_hybrid_moe(),
        nemotron_h(),
        nemotron_h_moe(),
        gpt_oss(),
        olmo2(),
        olmo3(),
        exaone4(),
        hunyuan(),
        minimax_m2(),
        glm4_moe_lite(),
        deepseek_v3(),
        deepseek_v2(),
        kimi_linear(),
        bailing_hybrid(),
        gemma4(),
        gemma4_moe(),
        gemma4_small(),
    ]
