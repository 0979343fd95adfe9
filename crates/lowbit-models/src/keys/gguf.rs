use super::Fixed::{Flag, Float, Int};
use super::Key;

/// The keys that llama.cpp reads for every architecture here, below its name.
///
/// Source: llama.cpp (llama-cpp-python 0.3.36) `llama_model_base::load_hparams` and
/// `src/models/*.cpp`.
pub const GGUF: &[Key] = &[
    Key::required("context_length"),
    Key::required("embedding_length"),
    Key::required("block_count"),
    Key::required("attention.head_count"),
    Key::optional("attention.head_count_kv"),
    Key::optional("attention.key_length"),
    Key::optional("attention.value_length"),
    Key::required("attention.layer_norm_rms_epsilon"),
    Key::only("attention.causal", &[Flag(true)]),
    Key::optional("rope.dimension_count"),
    Key::optional("rope.freq_base"),
    Key::optional("rope.scaling.type"),
    Key::optional("rope.scaling.factor"),
    Key::optional("rope.scale_linear"),
    Key::optional("rope.scaling.original_context_length"),
    Key::optional("rope.scaling.attn_factor"),
    Key::no_effect("rope.scaling.finetuned"),
    // The converter writes these, but llama.cpp does not read them for these models: only what it
    // takes instead.
    Key::only("rope.scaling.yarn_ext_factor", &[Float(1.0)]),
    Key::only("rope.scaling.yarn_beta_fast", &[Float(32.0)]),
    Key::only("rope.scaling.yarn_beta_slow", &[Float(1.0)]),
    Key::optional("rope.scaling.yarn_attn_factor"),
    // The vocabulary is as long as its embeddings.
    Key::no_effect("vocab_size"),
    // Read with the checkpoint: `Checkpoint::embedding_config`.
    Key::no_effect("pooling_type"),
    Key::optional("nextn_predict_layers"),
];

/// With an MLP in every layer.
pub const GGUF_DENSE: &[Key] = &[Key::required("feed_forward_length")];

/// With experts.
pub const GGUF_EXPERTS: &[Key] = &[
    Key::optional("feed_forward_length"),
    Key::required("expert_count"),
    Key::required("expert_used_count"),
    Key::required("expert_feed_forward_length"),
    Key::optional("expert_shared_feed_forward_length"),
    // llama.cpp computes softmax, norm and no scale or groups for these models, whatever the file
    // says.
    Key::only("expert_weights_scale", &[Float(0.0), Float(1.0)]),
    Key::only("expert_weights_norm", &[Flag(true)]),
    Key::only("expert_gating_func", &[Int(1)]),
    Key::only("expert_group_count", &[Int(0), Int(1)]),
    Key::only("expert_group_used_count", &[Int(0), Int(1)]),
];

/// With experts that are chosen by sigmoids.
pub const GGUF_SIGMOIDS: &[Key] = &[
    Key::required("expert_count"),
    Key::required("expert_used_count"),
    Key::required("expert_feed_forward_length"),
    Key::optional("leading_dense_block_count"),
    Key::optional("expert_weights_scale"),
    Key::optional("expert_weights_norm"),
    Key::optional("expert_group_count"),
    Key::optional("expert_group_used_count"),
];

/// With Kimi Delta Attention between layers of latent attention, which have one key head where the
/// others have none.
pub const GGUF_KIMI_DELTA: &[Key] = &[
    Key::required("feed_forward_length"),
    Key::required("expert_shared_count"),
    Key::only("expert_gating_func", &[Int(2), Int(0)]),
    // llama.cpp always divides by the weights' sum here, whatever the file says.
    Key::only("expert_weights_norm", &[Flag(true)]),
    Key::required("kda.head_dim"),
    Key::required("ssm.conv_kernel"),
    Key::optional("attention.q_lora_rank"),
    Key::required("attention.kv_lora_rank"),
    Key::optional("attention.key_length_mla"),
    Key::optional("attention.value_length_mla"),
];

/// With Mamba-2.
pub const GGUF_MAMBA: &[Key] = &[
    Key::required("ssm.conv_kernel"),
    Key::required("ssm.inner_size"),
    Key::required("ssm.state_size"),
    Key::required("ssm.time_step_rank"),
    Key::required("ssm.group_count"),
];

/// With gated delta nets.
pub const GGUF_HYBRID: &[Key] = &[
    Key::optional("full_attention_interval"),
    Key::optional("attention.recurrent_layers"),
    Key::optional("rope.dimension_sections"),
    Key::required("ssm.conv_kernel"),
    Key::required("ssm.inner_size"),
    Key::required("ssm.state_size"),
    Key::required("ssm.time_step_rank"),
    Key::required("ssm.group_count"),
];
