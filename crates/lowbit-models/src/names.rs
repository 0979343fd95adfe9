//! The names of tensors in each layout. Loading asks for tensors by these names, and conversion
//! from one layout to the other renames by them
//! ([`Architecture::gguf_name`](crate::arch::Architecture::gguf_name)).

#![allow(missing_docs)]

/// The name in Hugging Face's and MLX's checkpoints, and GGUF's. Those of a layer are below
/// `layers.N.` and `blk.N.`; those of modules are without `.weight`.
pub type Name<'a> = (&'a str, &'a str);

/// The names of one layer type.
pub type Names = &'static [Name<'static>];

pub const EMBED_TOKENS: Name<'_> = ("embed_tokens", "token_embd");
pub const NORM: Name<'_> = ("norm", "output_norm");
pub const LM_HEAD: Name<'_> = ("lm_head", "output");
/// LFM2's norm behind the last layer.
pub const EMBEDDING_NORM: Name<'_> = ("embedding_norm", "token_embd_norm");
/// Outside of the layers.
pub const TOP: Names = &[EMBED_TOKENS, NORM, LM_HEAD];

pub const INPUT_NORM: Name<'_> = ("input_layernorm", "attn_norm");
/// The second norm of a block, as most architectures call it in GGUF,
pub const FFN_NORM: Name<'_> = ("post_attention_layernorm", "ffn_norm");
/// and as the hybrids do.
pub const POST_ATTENTION_NORM: Name<'_> = ("post_attention_layernorm", "post_attention_norm");

/// GLM-4's norms of what attention and the MLP give.
pub const POST_SELF_ATTN_NORM: Name<'_> = ("post_self_attn_layernorm", "post_attention_norm");
pub const POST_MLP_NORM: Name<'_> = ("post_mlp_layernorm", "post_ffw_norm");

/// Gemma's norms of the MLP's input and output.
pub const PRE_FEEDFORWARD_NORM: Name<'_> = ("pre_feedforward_layernorm", "ffn_norm");
pub const POST_FEEDFORWARD_NORM: Name<'_> = ("post_feedforward_layernorm", "post_ffw_norm");

/// Gemma 4's norms where experts stand beside an MLP: of what the MLP gives, and of the experts'
/// input and output.
pub const POST_FEEDFORWARD_NORM_1: Name<'_> = ("post_feedforward_layernorm_1", "post_ffw_norm_1");
pub const PRE_FEEDFORWARD_NORM_2: Name<'_> = ("pre_feedforward_layernorm_2", "pre_ffw_norm_2");
pub const POST_FEEDFORWARD_NORM_2: Name<'_> = ("post_feedforward_layernorm_2", "post_ffw_norm_2");
/// Embeddings of tokens for each layer, all in one row; the projection of the usual embedding that
/// is added to them, and its norm.
pub const EMBED_PER_LAYER: Name<'_> = ("embed_tokens_per_layer", "per_layer_token_embd");
pub const PER_LAYER_MODEL_PROJ: Name<'_> = ("per_layer_model_projection", "per_layer_model_proj");
pub const PER_LAYER_PROJ_NORM: Name<'_> = ("per_layer_projection_norm", "per_layer_proj_norm");
/// Outside of the layers.
pub const PER_LAYER_TOP: Names = &[EMBED_PER_LAYER, PER_LAYER_MODEL_PROJ, PER_LAYER_PROJ_NORM];
/// A layer's use of its own.
pub const PER_LAYER_GATE: Name<'_> = ("per_layer_input_gate", "inp_gate");
pub const PER_LAYER_PROJ: Name<'_> = ("per_layer_projection", "proj");
pub const PER_LAYER_NORM: Name<'_> = ("post_per_layer_input_norm", "post_norm");
/// The factor of a layer's result.
pub const LAYER_SCALAR: Name<'_> = ("layer_scalar", "layer_output_scale.weight");

pub const Q_PROJ: Name<'_> = ("self_attn.q_proj", "attn_q");
pub const K_PROJ: Name<'_> = ("self_attn.k_proj", "attn_k");
pub const V_PROJ: Name<'_> = ("self_attn.v_proj", "attn_v");
pub const O_PROJ: Name<'_> = ("self_attn.o_proj", "attn_output");
pub const ATTENTION: Names = &[INPUT_NORM, Q_PROJ, K_PROJ, V_PROJ, O_PROJ];

/// q's rows, k's and v's after each other.
pub const FUSED_QKV: Name<'_> = ("self_attn.qkv_proj", "attn_qkv");

/// Queries from compressed ones, where these are compressed, and the norm between.
pub const Q_A_PROJ: Name<'_> = ("self_attn.q_a_proj", "attn_q_a");
pub const Q_A_NORM: Name<'_> = ("self_attn.q_a_layernorm", "attn_q_a_norm");
pub const Q_B_PROJ: Name<'_> = ("self_attn.q_b_proj", "attn_q_b");
/// The latents of keys and values, and the part of keys that is rotated; and the latents' norm.
pub const KV_A_PROJ: Name<'_> = ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa");
pub const KV_A_NORM: Name<'_> = ("self_attn.kv_a_layernorm", "attn_kv_a_norm");
/// Keys and values of all heads from latents, a head's keys before its values: Hugging Face's, and
/// that of old GGUF files.
pub const KV_B_PROJ: Name<'_> = ("self_attn.kv_b_proj", "attn_kv_b");
/// The same per head: latents from keys, `[heads, kv_lora_rank, qk_nope_head_dim]`, and values from
/// latents.
pub const EMBED_Q: Name<'_> = ("self_attn.embed_q", "attn_k_b");
pub const UNEMBED_OUT: Name<'_> = ("self_attn.unembed_out", "attn_v_b");
/// Ling 3's gate for each head's result, and its name of the projection of the results.
pub const LATENT_GATE: Name<'_> = ("self_attn.g_proj", "attn_gate");
pub const LATENT_DENSE: Name<'_> = ("self_attn.dense", "attn_output");
pub const LATENT_ATTENTION: Names = &[
    INPUT_NORM,
    Q_PROJ,
    Q_A_PROJ,
    Q_A_NORM,
    Q_B_PROJ,
    KV_A_PROJ,
    KV_A_NORM,
    KV_B_PROJ,
    EMBED_Q,
    UNEMBED_OUT,
    O_PROJ,
];

pub const Q_NORM: Name<'_> = ("self_attn.q_norm", "attn_q_norm");
pub const K_NORM: Name<'_> = ("self_attn.k_norm", "attn_k_norm");
pub const HEAD_NORMS: Names = &[Q_NORM, K_NORM];
/// A logit per query head, which has no value.
pub const SINKS: Name<'_> = ("self_attn.sinks", "attn_sinks.weight");

/// Gate, up and down.
pub const MLP: [Name<'_>; 3] =
    [("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down")];

/// Gate's rows and up's after each other, with GGUF's name for up alone.
pub const FUSED_MLP: Name<'_> = ("mlp.gate_up_proj", "ffn_up");

pub const ROUTER: Name<'_> = ("mlp.gate", "ffn_gate_inp");
/// The weight of the norm before the router, but for a constant factor.
pub const ROUTER_SCALE: Name<'_> = ("router.scale", "ffn_gate_inp.scale");
/// A factor of each expert's weight.
pub const EXPERT_SCALE: Name<'_> = ("router.per_expert_scale", "ffn_down_exps.scale");
/// The bias that is added to experts' scores to choose by; it does not weigh them.
pub const SELECTION_BIAS: Name<'_> = ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias");
/// MLX's names; Hugging Face stores one matrix per expert or other stacks.
pub const EXPERTS_GATE: Name<'_> = ("mlp.switch_mlp.gate_proj", "ffn_gate_exps");
pub const EXPERTS_UP: Name<'_> = ("mlp.switch_mlp.up_proj", "ffn_up_exps");
pub const EXPERTS_DOWN: Name<'_> = ("mlp.switch_mlp.down_proj", "ffn_down_exps");
pub const EXPERTS: Names = &[ROUTER, EXPERTS_GATE, EXPERTS_UP, EXPERTS_DOWN];
/// Hugging Face's stacks: gate and up rows of an expert after each other, and down.
pub const FUSED_GATE_UP: Name<'_> = ("mlp.experts.gate_up_proj", "ffn_gate_up_exps");
pub const FUSED_DOWN: Name<'_> = ("mlp.experts.down_proj", "");

/// A stack of ups alone, of experts without gates.
pub const STACKED_UP: Name<'_> = ("mlp.experts.up_proj", "");
/// To the experts' input, and from their sum back.
pub const LATENT_DOWN: Name<'_> = ("mlp.latent_down", "ffn_latent_down");
pub const LATENT_UP: Name<'_> = ("mlp.latent_up", "ffn_latent_up");

pub const SHARED_EXPERT_GATE: Name<'_> = ("mlp.shared_expert_gate", "ffn_gate_inp_shexp");
/// Gate, up and down.
pub const SHARED_EXPERT: [Name<'_>; 3] = [
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
];

/// Gate's rows and up's after each other; GGUF has them apart.
pub const FUSED_SHARED_EXPERT: Name<'_> = ("mlp.shared_expert.gate_up_proj", "");

pub const IN_PROJ_QKV: Name<'_> = ("linear_attn.in_proj_qkv", "attn_qkv");
pub const IN_PROJ_Z: Name<'_> = ("linear_attn.in_proj_z", "attn_gate");
pub const IN_PROJ_B: Name<'_> = ("linear_attn.in_proj_b", "ssm_beta");
pub const IN_PROJ_A: Name<'_> = ("linear_attn.in_proj_a", "ssm_alpha");
/// Qwen3-Next's, rows grouped by key head; GGUF has what is in it as [`IN_PROJ_QKV`] and
/// [`IN_PROJ_Z`].
pub const IN_PROJ_QKVZ: Name<'_> = ("linear_attn.in_proj_qkvz", "");
pub const IN_PROJ_BA: Name<'_> = ("linear_attn.in_proj_ba", "ssm_ba");
pub const OUT_PROJ: Name<'_> = ("linear_attn.out_proj", "ssm_out");
pub const DELTA_NORM: Name<'_> = ("linear_attn.norm", "ssm_norm");
pub const CONV1D: Name<'_> = ("linear_attn.conv1d.weight", "ssm_conv1d.weight");
pub const DT_BIAS: Name<'_> = ("linear_attn.dt_bias", "ssm_dt.bias");
/// GGUF stores `-exp(A_log)`.
pub const A_LOG: Name<'_> = ("linear_attn.A_log", "ssm_a");
pub const DELTA_NET: Names =
    &[IN_PROJ_QKV, IN_PROJ_Z, IN_PROJ_B, IN_PROJ_A, IN_PROJ_BA, OUT_PROJ, DELTA_NORM, CONV1D, DT_BIAS, A_LOG];

/// Kimi Delta Attention, whose projections to q, k, v and back are attention's: a convolution over
/// each of these,
pub const Q_CONV: Name<'_> = ("self_attn.q_conv1d.weight", "ssm_conv1d_q.weight");
pub const K_CONV: Name<'_> = ("self_attn.k_conv1d.weight", "ssm_conv1d_k.weight");
pub const V_CONV: Name<'_> = ("self_attn.v_conv1d.weight", "ssm_conv1d_v.weight");
/// the two parts of the projections to the decay's gate and to the output's, beta's,
pub const F_A_PROJ: Name<'_> = ("self_attn.f_a_proj", "ssm_f_a");
pub const F_B_PROJ: Name<'_> = ("self_attn.f_b_proj", "ssm_f_b");
pub const G_A_PROJ: Name<'_> = ("self_attn.g_a_proj", "ssm_g_a");
pub const G_B_PROJ: Name<'_> = ("self_attn.g_b_proj", "ssm_g_b");
pub const B_PROJ: Name<'_> = ("self_attn.b_proj", "ssm_beta");
/// and the decay's parameters and the norm of the result. GGUF stores `-exp(A_log)`.
pub const KDA_A_LOG: Name<'_> = ("self_attn.A_log", "ssm_a");
pub const KDA_DT_BIAS: Name<'_> = ("self_attn.dt_bias", "ssm_dt.bias");
pub const O_NORM: Name<'_> = ("self_attn.o_norm", "ssm_norm");
pub const KIMI_DELTA: Names = &[
    K_PROJ,
    V_PROJ,
    Q_CONV,
    K_CONV,
    V_CONV,
    F_A_PROJ,
    F_B_PROJ,
    G_A_PROJ,
    G_B_PROJ,
    B_PROJ,
    KDA_A_LOG,
    KDA_DT_BIAS,
    O_NORM,
];

/// Mamba-2. The rows of its input's projection are z, x, B, C and steps of time.
pub const MAMBA_IN: Name<'_> = ("mamba.in_proj", "ssm_in");
pub const MAMBA_CONV: Name<'_> = ("mamba.conv1d.weight", "ssm_conv1d.weight");
pub const MAMBA_CONV_BIAS: Name<'_> = ("mamba.conv1d.bias", "ssm_conv1d.bias");
pub const MAMBA_DT_BIAS: Name<'_> = ("mamba.dt_bias", "ssm_dt.bias");
/// GGUF stores `-exp(A_log)`.
pub const MAMBA_A_LOG: Name<'_> = ("mamba.A_log", "ssm_a");
pub const MAMBA_D: Name<'_> = ("mamba.D", "ssm_d");
pub const MAMBA_NORM: Name<'_> = ("mamba.norm", "ssm_norm");
pub const MAMBA_OUT: Name<'_> = ("mamba.out_proj", "ssm_out");
pub const MAMBA: Names =
    &[MAMBA_IN, MAMBA_CONV, MAMBA_CONV_BIAS, MAMBA_DT_BIAS, MAMBA_A_LOG, MAMBA_D, MAMBA_NORM, MAMBA_OUT];

/// A gated short convolution.
pub const SHORT_CONV_IN: Name<'_> = ("conv.in_proj", "shortconv.in_proj");
pub const SHORT_CONV: Name<'_> = ("conv.conv.weight", "shortconv.conv.weight");
pub const SHORT_CONV_OUT: Name<'_> = ("conv.out_proj", "shortconv.out_proj");

/// Of the layer that predicts a further token, which follows the others in GGUF, as llama.cpp's
/// converter calls them before and after. (In Hugging Face's checkpoints they are below `mtp.`,
/// under other names.)
pub const NEXTN: Names = &[
    ("eh_proj", "nextn.eh_proj"),
    ("enorm", "nextn.enorm"),
    ("hnorm", "nextn.hnorm"),
    ("shared_head.norm", "nextn.shared_head_norm"),
];
