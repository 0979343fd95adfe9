use super::Fixed::{Empty, Flag, Float, Int, Text};
use super::Key;

/// Every configuration class: outputs, training, bookkeeping and sampling.
pub const BASE: &[Key] = &[
    Key::optional("model_type"),
    Key::optional("tie_word_embeddings"),
    // Read with the checkpoint.
    Key::no_effect("quantization"),
    Key::no_effect("quantization_config"),
    Key::no_effect("bos_token_id"),
    Key::no_effect("eos_token_id"),
    // These would change the computation, but none of these models has them.
    Key::only("per_layer_config", &[Empty]),
    Key::only("is_encoder_decoder", &[Flag(false)]),
    Key::only("add_cross_attention", &[Flag(false)]),
    Key::only("is_causal", &[Flag(true)]),
    Key::only("pruned_heads", &[Empty]),
    // Another file of weights, which transformers reads instead.
    Key::only("transformers_weights", &[]),
    // Weights have the types that they are stored in.
    Key::no_effect("dtype"),
    Key::no_effect("torch_dtype"),
    Key::no_effect("use_bfloat16"),
    // The implementation: the result is the same.
    Key::no_effect("attn_implementation"),
    Key::no_effect("experts_implementation"),
    Key::no_effect("chunk_size_feed_forward"),
    Key::no_effect("use_cache"),
    Key::no_effect("torchscript"),
    Key::no_effect("_attn_implementation_autoset"),
    Key::no_effect("_attn_implementation_internal"),
    Key::no_effect("_experts_implementation_internal"),
    // Outputs.
    Key::no_effect("output_hidden_states"),
    Key::no_effect("output_attentions"),
    Key::no_effect("return_dict"),
    Key::no_effect("tie_last_hidden_states"),
    // Training and classification.
    Key::no_effect("initializer_range"),
    Key::no_effect("id2label"),
    Key::no_effect("label2id"),
    Key::no_effect("num_labels"),
    Key::no_effect("problem_type"),
    Key::no_effect("finetuning_task"),
    Key::no_effect("task_specific_params"),
    Key::no_effect("tie_encoder_decoder"),
    Key::no_effect("cross_attention_hidden_size"),
    Key::no_effect("is_decoder"),
    Key::no_effect("unsloth_fixed"),
    Key::no_effect("unsloth_version"),
    // Bookkeeping.
    Key::no_effect("architectures"),
    Key::no_effect("transformers_version"),
    Key::no_effect("name_or_path"),
    Key::no_effect("_name_or_path"),
    Key::no_effect("_commit_hash"),
    Key::no_effect("tokenizer_class"),
    Key::no_effect("prefix"),
    Key::no_effect("pad_token_id"),
    Key::no_effect("sep_token_id"),
    Key::no_effect("decoder_start_token_id"),
    // Sampling, which old configurations have here; transformers drops it.
    Key::no_effect("assistant_confidence_threshold"),
    Key::no_effect("assistant_lookbehind"),
    Key::no_effect("bad_words_ids"),
    Key::no_effect("begin_suppress_tokens"),
    Key::no_effect("diversity_penalty"),
    Key::no_effect("do_sample"),
    Key::no_effect("early_stopping"),
    Key::no_effect("encoder_no_repeat_ngram_size"),
    Key::no_effect("encoder_repetition_penalty"),
    Key::no_effect("epsilon_cutoff"),
    Key::no_effect("eta_cutoff"),
    Key::no_effect("exponential_decay_length_penalty"),
    Key::no_effect("forced_bos_token_id"),
    Key::no_effect("forced_eos_token_id"),
    Key::no_effect("length_penalty"),
    Key::no_effect("max_length"),
    Key::no_effect("min_length"),
    Key::no_effect("no_repeat_ngram_size"),
    Key::no_effect("num_assistant_tokens"),
    Key::no_effect("num_assistant_tokens_schedule"),
    Key::no_effect("num_beam_groups"),
    Key::no_effect("num_beams"),
    Key::no_effect("num_return_sequences"),
    Key::no_effect("output_scores"),
    Key::no_effect("remove_invalid_values"),
    Key::no_effect("repetition_penalty"),
    Key::no_effect("return_dict_in_generate"),
    Key::no_effect("suppress_tokens"),
    Key::no_effect("target_lookbehind"),
    Key::no_effect("temperature"),
    Key::no_effect("top_k"),
    Key::no_effect("top_p"),
    Key::no_effect("typical_p"),
];

/// Every decoder here. Keys whose meaning or default differs between them are in their own tables.
pub const DECODER: &[Key] = &[
    Key::required("hidden_size"),
    Key::required("num_hidden_layers"),
    Key::required("num_attention_heads"),
    Key::required("vocab_size"),
    Key::or("rms_norm_eps", Float(1e-6)),
    Key::only("hidden_act", &[Text("silu"), Text("swish")]),
    Key::no_effect("attention_dropout"),
    Key::only("mlp_bias", &[Flag(false)]),
    Key::optional("rope_parameters"),
    Key::optional("rope_scaling"),
    Key::optional("rope_theta"),
    Key::optional("original_max_position_embeddings"),
    // mlx-lm alone: pairs of neighbours are rotated together.
    Key::only("rope_traditional", &[Flag(false)]),
];

/// The models with experts.
pub const EXPERTS: &[Key] = &[Key::no_effect("output_router_logits"), Key::no_effect("router_aux_loss_coef")];

/// The models with gated delta nets.
pub const HYBRID: &[Key] = &[
    Key::size("max_position_embeddings", 32768),
    Key::flag("attention_bias", false),
    Key::disputed("rope_theta", Float(10000.0)),
    Key::or("partial_rotary_factor", Float(0.25)),
    Key::optional("layer_types"),
    Key::size("full_attention_interval", 4),
    Key::size("linear_conv_kernel_dim", 4),
    Key::disputed("linear_key_head_dim", Int(128)),
    Key::size("linear_value_head_dim", 128),
    Key::size("linear_num_key_heads", 16),
    Key::disputed("linear_num_value_heads", Int(32)),
    Key::disputed("head_dim", Int(256)),
    // Masks are read from it in other models; here no layer is of that kind.
    Key::no_effect("sliding_window"),
    Key::no_effect("use_sliding_window"),
    // Published, but no peer reads them: the state is always f32, and queries always have gates.
    Key::only("attn_output_gate", &[Flag(true)]),
    Key::only("mamba_ssm_dtype", &[Text("float32")]),
    // Multi-token prediction, which is not computed.
    Key::no_effect("mtp_num_hidden_layers"),
    Key::no_effect("mtp_use_dedicated_embeddings"),
];

/// A multimodal model around its `text_config`.
pub const WRAPPER: &[Key] = &[
    Key::optional("text_config"),
    Key::no_effect("vision_config"),
    Key::no_effect("image_token_id"),
    Key::no_effect("video_token_id"),
    Key::no_effect("vision_start_token_id"),
    Key::no_effect("vision_end_token_id"),
    Key::no_effect("language_model_only"),
    // Of Mistral's.
    Key::no_effect("image_token_index"),
    Key::no_effect("multimodal_projector_bias"),
    Key::no_effect("projector_hidden_act"),
    Key::no_effect("spatial_merge_size"),
    Key::no_effect("vision_feature_layer"),
    // Of Gemma's.
    Key::no_effect("boi_token_index"),
    Key::no_effect("eoi_token_index"),
    Key::no_effect("mm_tokens_per_image"),
    Key::no_effect("audio_config"),
    Key::no_effect("audio_token_id"),
    Key::no_effect("boa_token_id"),
    Key::no_effect("boi_token_id"),
    Key::no_effect("eoa_token_id"),
    Key::no_effect("eoa_token_index"),
    Key::no_effect("eoi_token_id"),
    Key::no_effect("vision_soft_tokens_per_image"),
];

/// Inside `linear_attn_config`, which transformers takes apart into keys beside it.
pub const LINEAR_ATTN: &[Key] = &[
    Key::required("num_heads"),
    Key::required("head_dim"),
    Key::size("short_conv_kernel_size", 4),
    Key::optional("kda_layers"),
    Key::optional("full_attn_layers"),
];

/// Inside `rope_parameters` and `rope_scaling`.
pub const ROPE: &[Key] = &[
    Key::optional("rope_type"),
    Key::optional("type"),
    Key::optional("rope_theta"),
    Key::optional("partial_rotary_factor"),
    Key::optional("factor"),
    Key::optional("original_max_position_embeddings"),
    Key::optional("low_freq_factor"),
    Key::optional("high_freq_factor"),
    Key::optional("short_factor"),
    Key::optional("long_factor"),
    // Hunyuan's and Ministral 3's, which others ignore.
    Key::optional("alpha"),
    Key::optional("llama_4_scaling_beta"),
    Key::no_effect("max_position_embeddings"),
    Key::optional("attention_factor"),
    Key::optional("beta_fast"),
    Key::optional("beta_slow"),
    Key::optional("mscale"),
    Key::optional("mscale_all_dim"),
    Key::flag("truncate", true),
    // For text alone, interleaved or not, the sections have the same positions.
    Key::no_effect("mrope_section"),
    Key::no_effect("mrope_interleaved"),
];
