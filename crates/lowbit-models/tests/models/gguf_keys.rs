//! Effects of GGUF's keys: what llama.cpp computes is computed, anything else is refused or warned
//! of.

use crate::tiny::{logits, vectors};
use lowbit_files::Checkpoint;
use lowbit_files::gguf::{Array, Value, Writer};
use lowbit_kernels::Device;
use lowbit_models::{Model, ModelError};

fn device() -> Device {
    Device::cpu(Some(1)).unwrap()
}

fn plain(name: &str) -> u64 {
    logits(&Model::load(&Checkpoint::open(&vectors(name).join("model.gguf")).unwrap(), &device()).unwrap())
}

/// The vector's model with one key more, or another value for it.
fn with(name: &str, key: &str, value: Value) -> Result<Model, ModelError> {
    let source = Checkpoint::open(&vectors(name).join("model.gguf")).unwrap();
    let mut writer = Writer::new();
    for (old, value) in source.metadata().unwrap().iter().filter(|(old, _)| *old != key) {
        writer.entry(old, value.clone()).unwrap();
    }
    writer.entry(key, value).unwrap();
    for view in source.tensors().iter() {
        writer.tensor(&view.name, view.stored, &view.shape).unwrap();
    }
    let mut body = writer.begin(vec![]).unwrap();
    for view in source.tensors().iter() {
        body.tensor(&view.bytes.get()).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, body.finish().unwrap()).unwrap();
    Model::load(&Checkpoint::open(&path).unwrap(), &device())
}

#[test]
fn what_is_not_computed_is_refused() {
    let sections = |sections: [i32; 4]| Value::Array(Array::I32(sections.to_vec()));
    for (name, key, value) in [
        ("qwen3", "qwen3.attention.causal", Value::Bool(false)),
        ("qwen3", "qwen3.attention.value_length", Value::U32(8)),
        ("qwen3", "qwen3.attention.layer_norm_rms_epsilon", Value::F32(-1.0)),
        ("qwen3", "qwen3.rope.scaling.type", Value::String("longrope".into())),
        ("qwen3", "qwen3.rope.scaling.factor", Value::F32(0.0)),
        ("qwen3", "qwen3.rope.scaling.factor", Value::F32(-4.0)),
        ("qwen3", "qwen3.rope.scaling.attn_factor", Value::F32(0.5)),
        ("qwen3-yarn", "qwen3.rope.scaling.yarn_beta_fast", Value::F32(16.0)),
        ("qwen3-yarn", "qwen3.rope.scaling.yarn_attn_factor", Value::F32(0.5)),
        ("llama3", "llama.expert_used_count", Value::U32(8)),
        ("qwen3_moe-gguf", "qwen3moe.expert_gating_func", Value::U32(2)),
        ("qwen3_moe-gguf", "qwen3moe.expert_weights_scale", Value::F32(2.5)),
        ("qwen3_moe-gguf", "qwen3moe.expert_weights_norm", Value::Bool(false)),
        ("qwen3_5-gguf", "qwen35.rope.dimension_sections", sections([3, 0, 1000, 0])),
        ("qwen3_5-gguf", "qwen35.rope.dimension_sections", sections([0; 4])),
    ] {
        let message = with(name, key, value).map(drop).expect_err(key).to_string();
        let key = key.split_once('.').unwrap().1;
        assert!(message.contains(key), "{key}: {message}");
    }
}

#[test]
fn rope_is_scaled_as_llama_cpp_does() {
    let run = |name: &str, key: &str, value: f32| logits(&with(name, key, Value::F32(value)).unwrap());
    let own = plain("qwen3");
    // A missing type is linear.
    let linear = run("qwen3", "qwen3.rope.scaling.factor", 4.0);
    assert_ne!(linear, own);
    assert_eq!(linear, run("qwen3", "qwen3.rope.scale_linear", 4.0));
    assert_eq!(run("qwen3", "qwen3.rope.scaling.factor", 1.0), own);
    let yarn = plain("qwen3-yarn");
    let key = "qwen3.rope.scaling.attn_factor";
    assert_eq!(run("qwen3-yarn", key, 1.0), yarn, "1 leaves YaRN's own factor");
    assert_ne!(run("qwen3-yarn", key, 0.5), yarn);
}

#[test]
fn pairs_of_no_section_are_not_rotated() {
    let run = |sections: [i32; 4]| {
        let value = Value::Array(Array::I32(sections.to_vec()));
        logits(&with("qwen3_5-gguf", "qwen35.rope.dimension_sections", value).unwrap())
    };
    let own = plain("qwen3_5-gguf");
    // Sections interleave: of four pairs the fourth is the first section's second, and the sixth
    // the third's second.
    assert_eq!(run([2, 1, 1, 0]), own);
    assert_ne!(run([1, 1, 1, 1]), own);
    assert_ne!(run([3, 0, 1, 0]), own);
}

#[test]
fn what_llama_cpp_does_not_read_is_warned_of() {
    let own = plain("qwen3");
    for (key, value) in [
        ("qwen3.attention.logit_softcapping", Value::F32(30.0)),
        ("qwen3.attention.scale", Value::F32(0.5)),
        ("qwen3.attention.sliding_window", Value::U32(4)),
    ] {
        let model = with("qwen3", key, value).unwrap();
        let [warning] = model.warnings() else { panic!("{:?}", model.warnings()) };
        assert!(warning.contains(key), "{warning}");
        assert_eq!(logits(&model), own);
    }
    let model = with("qwen3", "tokenizer.ggml.eot_token_id", Value::U32(1_000_000)).unwrap();
    let [warning] = model.warnings() else { panic!("{:?}", model.warnings()) };
    assert!(warning.contains("eos_token_id 1000000"), "{warning}");
}
