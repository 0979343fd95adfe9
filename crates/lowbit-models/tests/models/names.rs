//! Checkpoints whose tensors have other names, or more of them: read, or refused with the names
//! that are there.

use crate::tiny::{Tiny, logits};
use safetensors::Dtype;
use serde_json::json;

const HUGGING_FACE: [&str; 7] =
    ["llama2", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"];

/// The logits of the model `name` with every tensor renamed by `rename`, or the error of loading
/// it.
fn renamed(name: &str, rename: impl Fn(&str) -> String) -> Result<u64, String> {
    let mut tiny = Tiny::open(name);
    tiny.tensors = tiny.tensors.into_iter().map(|(name, tensor)| (rename(&name), tensor)).collect();
    tiny.load().map(|model| logits(&model)).map_err(|error| error.to_string())
}

#[test]
fn a_model_that_was_saved_without_its_output_layer_is_read() {
    for name in HUGGING_FACE {
        let plain = logits(&Tiny::open(name).load().unwrap());
        let without = renamed(name, |name| name.strip_prefix("model.").unwrap_or(name).into());
        assert_eq!(without, Ok(plain), "{name}");
    }
}

#[test]
fn experts_are_read_from_lists_by_projection() {
    let by_projection = |name: &str| {
        let Some((mlp, rest)) = name.split_once(".experts.") else { return name.into() };
        let parts: Vec<_> = rest.split('.').collect();
        format!("{mlp}.experts.{}.{}.{}", parts[1], parts[0], parts[2])
    };
    let plain = logits(&Tiny::open("qwen3_moe").load().unwrap());
    assert_eq!(renamed("qwen3_moe", by_projection), Ok(plain));
}

#[test]
fn names_that_are_not_known_are_listed_beside_the_missing_one() {
    let message = renamed("qwen3", |name| name.replace("self_attn", "attention")).unwrap_err();
    let want = "tensor model.layers.0.self_attn.q_norm.weight is missing; there are model.layers.0.attention.q_norm.weight, ";
    assert!(message.contains(want) && message.ends_with(" more"), "{message}");
    let message = renamed("qwen3", |name| format!("module.{name}")).unwrap_err();
    assert!(message.contains("; there are module.model.embed_tokens.weight, "), "{message}");
    let mut tiny = Tiny::open("qwen3");
    tiny.tensors.clear();
    assert!(tiny.refused().contains("0 tensors"), "{}", tiny.refused());
}

#[test]
fn constants_that_nobody_reads_change_nothing() {
    for name in ["llama2", "qwen3"] {
        let mut tiny = Tiny::open(name);
        let plain = logits(&tiny.load().unwrap());
        for (buffer, dtype) in [
            ("model.position_ids", Dtype::I64),
            ("model.layers.0.self_attn.rotary_emb.inv_freq", Dtype::F32),
            ("model.rotary_emb.cos_cached", Dtype::F32),
            ("model.layers.1.self_attn.rotary_emb.sin_cached", Dtype::F32),
            ("model.layers.0.self_attn.bias", Dtype::BOOL),
            ("model.layers.0.attn.bias", Dtype::U8),
            ("model.layers.0.self_attn.masked_bias", Dtype::F32),
            ("model.layers.0.attn.masked_bias", Dtype::F16),
        ] {
            let bytes = vec![1; 2 * dtype.bitsize() / 8];
            tiny.tensors.insert(buffer.into(), (dtype, vec![2], bytes));
        }
        assert_eq!(logits(&tiny.load().unwrap()), plain, "{name}");
    }
}

#[test]
fn numbers_that_f32_does_not_hold_are_refused() {
    let refused = |key: &str, value: &str| {
        let mut tiny = Tiny::open("llama2");
        tiny.text().insert(key.into(), serde_json::from_str(value).unwrap());
        tiny.refused()
    };
    for (key, value, want) in [
        ("rope_theta", "1e39", "rope_theta is 1e+39, but it is computed with in f32, which ends at 3.4e38"),
        ("rope_theta", "1e-46", "rope_theta is 1e-46, but it is computed with in f32, where that is 0"),
        ("rms_norm_eps", "1e-50", "rms_norm_eps is 1e-50, but it is computed with in f32, where that is 0"),
    ] {
        let message = refused(key, value);
        assert!(message.ends_with(want), "{message}");
    }
    let mut tiny = Tiny::open("llama2");
    tiny.text().insert("rope_scaling".into(), json!({"rope_type": "linear", "factor": 1e300}));
    assert!(
        tiny.refused().ends_with("factor is 1e+300, but it is computed with in f32, which ends at 3.4e38")
    );
}
