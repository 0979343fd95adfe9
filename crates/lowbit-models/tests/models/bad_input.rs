//! Damaged and contradictory checkpoints, and inputs that a model cannot take: each a clear error,
//! never a panic.

use crate::tiny::{Tiny, vectors};
use lowbit_files::Checkpoint;
use lowbit_kernels::Device;
use lowbit_kernels::ops::SampleParams;
use lowbit_models::{GenerationOptions, Logits, Model, ModelError, Scoring, Session, perplexity};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::ops::ControlFlow::Continue;

fn device() -> Device {
    Device::cpu(Some(1)).unwrap()
}

fn model(name: &str) -> Model {
    Model::load(&Checkpoint::open(&vectors(name)).unwrap(), &device()).unwrap()
}

#[test]
fn the_tiny_checkpoint_itself_loads() {
    for name in ["qwen3", "qwen3-mlx-4bit", "qwen3_next", "qwen3_moe"] {
        Tiny::open(name).load().unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn a_missing_tensor_is_named() {
    for name in ["model.norm.weight", "model.layers.1.self_attn.q_norm.weight", "model.embed_tokens.weight"] {
        let mut tiny = Tiny::open("qwen3");
        tiny.tensors.remove(name);
        let message = tiny.refused();
        assert!(message.contains(name) && message.contains("missing"), "{message}");
    }
    let mut tiny = Tiny::open("qwen3_moe");
    tiny.tensors.retain(|name, _| !name.contains(".experts.2.up_proj"));
    assert!(tiny.refused().contains("experts.2.up_proj"));
}

#[test]
fn a_surplus_tensor_is_named() {
    let mut tiny = Tiny::open("qwen3");
    tiny.tensors.insert("model.layers.0.self_attn.sinks".into(), (Dtype::F32, vec![3], vec![0; 12]));
    let message = tiny.refused();
    assert!(message.contains("model.layers.0.self_attn.sinks") && message.contains("1 tensors"), "{message}");
    let mut tiny = Tiny::open("qwen3_moe");
    let expert = tiny.tensors.keys().find(|name| name.contains(".experts.0.up_proj")).unwrap().clone();
    let copy = tiny.tensors[&expert].clone();
    tiny.tensors.insert(expert.replace(".experts.0.", ".experts.99."), copy);
    assert!(tiny.refused().contains("experts.99.up_proj"));
}

#[test]
fn a_wrong_shape_or_type_names_both_sides() {
    let mut tiny = Tiny::open("qwen3");
    let name = "model.layers.0.self_attn.k_proj.weight";
    let shape = tiny.tensor(name).1.clone();
    tiny.tensor(name).1.reverse();
    let message = tiny.refused();
    let turned: Vec<_> = shape.iter().rev().collect();
    assert!(message.contains(name) && message.contains(&format!("{shape:?}")), "{message}");
    assert!(message.contains(&format!("{turned:?}")), "{message}");

    let mut tiny = Tiny::open("qwen3");
    let (dtype, shape, bytes) = tiny.tensor(name);
    *bytes = vec![0; shape.iter().product()];
    *dtype = Dtype::U8;
    let message = tiny.refused();
    assert!(message.contains(name) && message.contains("u8") && message.contains("bf16"), "{message}");
}

#[test]
fn a_configuration_that_lacks_or_contradicts_is_refused() {
    type Change = fn(&mut Value);
    let changes: [(&str, Change, &str); 10] = [
        ("qwen3", |config| config["model_type"] = json!("mamba3"), "mamba3"),
        ("qwen3", |config| config["model_type"] = json!(7), "model_type"),
        ("qwen3", |config| drop(config.as_object_mut().unwrap().remove("hidden_size")), "hidden_size"),
        ("qwen3", |config| config["num_attention_heads"] = json!(0), "num_attention_heads"),
        ("qwen3", |config| config["hidden_size"] = json!("many"), "hidden_size"),
        ("qwen3", |config| config["num_key_value_heads"] = json!(1000), "num_key_value_heads"),
        ("qwen3_moe", |config| config["num_experts_per_tok"] = json!(1000), "num_experts_per_tok"),
        ("llama3", |config| config["rope_scaling"] = json!({"rope_type": "dynamic"}), "dynamic"),
        ("llama3", |config| config["rope_scaling"] = json!({"rope_type": "longrope"}), "short_factor"),
        ("qwen3_next", |config| config["linear_num_value_heads"] = json!(7), "linear_num_value_heads"),
    ];
    for (name, change, word) in changes {
        let mut tiny = Tiny::open(name);
        change(&mut tiny.config);
        let message = tiny.refused();
        assert!(message.contains(word), "{word}: {message}");
    }
    let mut tiny = Tiny::open("qwen3");
    tiny.config["model_type"] = json!("mamba3");
    assert!(tiny.refused().contains("qwen3_5_moe"), "what is supported is listed");
}

/// Sizes that would take minutes or gigabytes, or whose products wrap, are compared with the
/// tensors first.
#[test]
fn absurd_sizes_are_refused_at_once() {
    let start = std::time::Instant::now();
    let wrapping = (1u64 << 62) + 64;
    let cases = [
        (
            "qwen3_next",
            "num_hidden_layers",
            json!(1_000_000_000),
            "num_hidden_layers is 1000000000, but the checkpoint has",
        ),
        ("qwen3", "num_hidden_layers", json!(u64::MAX), "num_hidden_layers is 18446744073709551615"),
        ("qwen3", "head_dim", json!(1u64 << 40), "head_dim is 1099511627776, but tensors have 1 to"),
        ("qwen3", "head_dim", json!(0), "head_dim is 0, but tensors have 1 to"),
        ("llama3", "num_attention_heads", json!(1u64 << 63), ""),
        (
            "qwen3_next",
            "partial_rotary_factor",
            json!(1e12),
            "partial_rotary_factor is 1000000000000, but an even number of the 40 elements",
        ),
        (
            "qwen3_next",
            "linear_key_head_dim",
            json!(wrapping),
            "linear_num_key_heads * linear_key_head_dim is 2 * 4611686018427387968, but that is more",
        ),
        (
            "qwen3_next",
            "linear_value_head_dim",
            json!(wrapping),
            "linear_value_head_dim is 6 * 4611686018427387968",
        ),
        (
            "qwen3_next",
            "linear_conv_kernel_dim",
            json!(1u64 << 62),
            "wants [channels, 1, 4611686018427387904]",
        ),
        ("qwen3_next", "linear_conv_kernel_dim", json!(1u64 << 40), "conv1d.weight is"),
        ("qwen3_next", "moe_intermediate_size", json!(1u64 << 63), "9223372036854775808"),
        ("qwen3_moe", "num_experts", json!(u64::MAX), "num_experts"),
        ("qwen3_next", "shared_expert_intermediate_size", json!(u64::MAX), "18446744073709551615"),
        ("qwen3", "intermediate_size", json!(u64::MAX), "18446744073709551615"),
        ("qwen3", "hidden_size", json!(u64::MAX), "18446744073709551615"),
        ("qwen3", "vocab_size", json!(u64::MAX), "18446744073709551615"),
    ];
    for (name, key, value, want) in cases {
        let mut tiny = Tiny::open(name);
        tiny.config[key] = value.clone();
        let message = tiny.refused();
        let experts = key == "num_experts" && message.contains(".experts.");
        assert!(message.contains(want) || experts, "{name} {key} {value}: {message}\nshould say: {want}");
    }
    // Keys that only limit the length of a text may have any value.
    for key in ["max_position_embeddings", "sliding_window"] {
        let mut tiny = Tiny::open("mistral");
        tiny.config[key] = json!(u64::MAX);
        let model = tiny.load().unwrap_or_else(|error| panic!("{key}: {error}"));
        model
            .forward(&[1, 2, 3], &mut model.cache(), Logits::Last)
            .unwrap_or_else(|error| panic!("{key}: {error}"));
    }
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}

#[test]
fn an_unknown_or_wrong_quantization_is_refused() {
    let mut tiny = Tiny::open("qwen3");
    tiny.config["quantization_config"] = json!({"quant_method": "gptq", "bits": 4});
    assert!(tiny.refused().contains("GPTQ"));

    let mut tiny = Tiny::open("qwen3-mlx-4bit");
    for key in ["quantization", "quantization_config"] {
        tiny.config.as_object_mut().unwrap().remove(key);
    }
    let message = tiny.refused();
    assert!(message.contains("quantization") && message.contains("scales"), "{message}");

    // Codes for another number of bits than the configuration says.
    let mut tiny = Tiny::open("qwen3-mlx-4bit");
    for key in ["quantization", "quantization_config"] {
        tiny.config[key]["bits"] = json!(8);
    }
    assert!(tiny.refused().contains("weight"));

    let mut tiny = Tiny::open("qwen3-mlx-4bit");
    let name = tiny.tensors.keys().find(|name| name.ends_with("k_proj.scales")).unwrap().clone();
    let (_, shape, bytes) = tiny.tensor(&name);
    let columns = shape[1] - 1;
    bytes.truncate(bytes.len() / shape[1] * columns);
    shape[1] = columns;
    let message = tiny.refused();
    assert!(message.contains(&name), "{message}");
}

#[test]
fn tokens_that_the_model_cannot_take_are_refused_and_change_nothing() {
    let model = model("qwen3");
    let (vocab_size, limit) = (model.config().vocab_size, model.config().max_position_embeddings);
    let mut cache = model.cache();
    let error = model.forward(&[1, vocab_size as u32], &mut cache, Logits::Last).unwrap_err();
    assert!(matches!(error, ModelError::Token { index: 1, .. }), "{error}");
    assert!(error.to_string().contains(&vocab_size.to_string()));
    assert!(matches!(model.forward(&[], &mut cache, Logits::Last), Err(ModelError::NoTokens)));
    let long = vec![1; limit + 1];
    let error = model.forward(&long, &mut cache, Logits::Last).unwrap_err();
    assert!(matches!(error, ModelError::ContextLength { .. }), "{error}");
    assert_eq!(cache.position(), 0);

    let mut session = Session::new(&model);
    assert!(session.prefill(&long, |_| Continue(())).is_err());
    assert!(session.tokens().is_empty());
    assert!(matches!(session.prefill(&[], |_| Continue(())), Err(ModelError::NoTokens)));
    let bad = perplexity(&model, &[1, 2, vocab_size as u32], 8, (Scoring::All, None), |_| Continue(()));
    assert!(bad.is_err());
}

#[test]
fn generation_stops_where_the_context_ends() {
    let model = model("qwen3");
    let limit = model.config().max_position_embeddings;
    let mut session = Session::new(&model);
    let logits = session.prefill(&vec![1; limit - 3], |_| Continue(())).unwrap().unwrap();
    let options = GenerationOptions::default().with_max_tokens(100);
    let written = session.generate(logits, &options, |_| Continue(())).unwrap();
    assert_eq!(written.tokens.len(), 4, "three fill the context, and the last one's successor is known");
    assert_eq!((session.cache().position(), session.tokens().len()), (limit, limit + 1));
    let error = session.prefill(&[1], |_| Continue(())).unwrap_err();
    assert!(matches!(error, ModelError::ContextLength { tokens, .. } if tokens == limit + 2), "{error}");
}

#[test]
fn weights_of_nan_are_an_error_at_sampling() {
    let mut tiny = Tiny::open("qwen3");
    let norm = tiny.tensor("model.norm.weight");
    norm.2.chunks_exact_mut(2).for_each(|value| value.copy_from_slice(&[0xc0, 0x7f]));
    let model = tiny.load().unwrap();
    let mut session = Session::new(&model);
    let logits = session.prefill(&[1, 2, 3], |_| Continue(())).unwrap().unwrap();
    for temperature in [0.0, 1.0] {
        let sampling = SampleParams { temperature, ..SampleParams::default() };
        let options = GenerationOptions::default().with_sampling(sampling);
        let error = session.generate(logits.clone(), &options, |_| Continue(())).unwrap_err().to_string();
        assert!(error.contains("NaN"), "{error}");
    }
}

/// The tiny checkpoint with `value` in all places of the tensors whose names end with `name`.
fn filled(name: &str, value: f32) -> Model {
    let mut tiny = Tiny::open("llama3");
    for (_, (dtype, _, bytes)) in tiny.tensors.iter_mut().filter(|(tensor, _)| tensor.ends_with(name)) {
        assert_eq!(*dtype, Dtype::BF16);
        bytes.chunks_exact_mut(2).for_each(|place| place.copy_from_slice(&value.to_le_bytes()[2..]));
    }
    tiny.load().unwrap()
}

#[test]
fn logits_that_are_no_numbers_are_an_error_everywhere() {
    let greatest = f32::from_bits(0x7f7f_0000);
    let tokens: Vec<u32> = (1..40).collect();
    for (name, value) in [
        ("embed_tokens.weight", greatest),
        ("embed_tokens.weight", f32::NAN),
        ("q_proj.weight", f32::INFINITY),
        ("down_proj.weight", greatest),
        ("norm.weight", greatest),
        ("", greatest),
        ("model.norm.weight", f32::NEG_INFINITY),
    ] {
        let model = filled(name, value);
        for scoring in [Scoring::All, Scoring::SecondHalf] {
            let result = perplexity(&model, &tokens, 8, (scoring, None), |_| Continue(()));
            assert!(matches!(result, Err(ModelError::Logits { .. })), "{name} {value}: {result:?}");
        }
        for temperature in [0.0, 1.0] {
            let sampling = SampleParams { temperature, ..SampleParams::default() };
            let options = GenerationOptions::default().with_sampling(sampling);
            let mut session = Session::new(&model);
            let logits = session.prefill(&tokens, |_| Continue(())).unwrap().unwrap();
            let error = session.generate(logits, &options, |_| Continue(())).unwrap_err();
            assert!(matches!(error, ModelError::Draw { tokens: 39, .. }), "{name} {value}: {error}");
        }
    }
}

#[test]
fn sizes_of_any_number_are_taken_or_refused() {
    let model = Tiny::open("llama3").load().unwrap();
    let limit = model.config().max_position_embeddings;
    let tokens: Vec<u32> = (0..40).collect();
    let huge = [1 << 31, 1 << 32, 1 << 63, usize::MAX];
    for context in huge {
        let all = perplexity(&model, &tokens, context, (Scoring::All, None), |_| Continue(())).unwrap();
        let whole = perplexity(&model, &tokens, 40, (Scoring::All, None), |_| Continue(())).unwrap();
        assert_eq!(all, whole, "a window of all tokens");
        let half = perplexity(&model, &tokens, context, (Scoring::SecondHalf, None), |_| Continue(()));
        assert!(half.unwrap_err().to_string().contains("are too few"));
    }
    let long = vec![1; limit + 2];
    let error = perplexity(&model, &long, usize::MAX, (Scoring::All, None), |_| Continue(())).unwrap_err();
    assert!(matches!(error, ModelError::ContextLength { .. }), "{error}");
    let write = |repetition_context: usize, max_tokens: usize| {
        let sampling = SampleParams { repetition_penalty: 1.3, top_k: usize::MAX, ..SampleParams::default() };
        let options = GenerationOptions::default()
            .with_sampling(sampling)
            .with_max_tokens(max_tokens)
            .with_repetition_context(repetition_context);
        let mut session = Session::new(&model);
        let logits = session.prefill(&tokens, |_| Continue(())).unwrap().unwrap();
        session.generate(logits, &options, |_| Continue(())).unwrap().tokens
    };
    for any in huge {
        assert_eq!(write(any, 20), write(limit, 20), "all of the text");
        assert_eq!(write(0, any).len(), limit + 1 - tokens.len(), "until the context is full");
    }
    for threads in [0, 1 << 20, 1 << 31, 1 << 32, 1 << 63, usize::MAX] {
        let message = Device::cpu(Some(threads)).unwrap_err().to_string();
        assert!(message.starts_with(&format!("{threads} threads were asked for")), "{message}");
    }
}
