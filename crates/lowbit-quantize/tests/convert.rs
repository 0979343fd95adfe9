//! The demo model quantised here against `mlx_lm convert -q`, tensor by tensor, bit for bit.

use lowbit_files::{Checkpoint, FileError};
use lowbit_quantize::{QuantizeError, QuantizeOptions, quantize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn options() -> QuantizeOptions {
    QuantizeOptions { mode: "affine".into(), bits: 4, group_size: 64 }
}

/// The peer's tensors: shape, type and digest by name; and its `quantization`.
fn peer() -> Value {
    let path = root().join("tests/vectors/demo/mlx_convert.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[track_caller]
fn assert_same(checkpoint: &Checkpoint) {
    let peer = peer();
    let tensors = peer["tensors"].as_object().unwrap();
    assert!(tensors.len() > 300, "the peer's list is short");
    let names: Vec<_> = checkpoint.tensors().names().collect();
    let mut want: Vec<_> = tensors.keys().map(String::as_str).collect();
    want.sort_unstable();
    assert_eq!(names, want);
    for view in checkpoint.tensors().iter() {
        let tensor = &tensors[&view.name];
        let digest: String = Sha256::digest(&view.bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(serde_json::json!(view.shape), tensor["shape"], "{}", view.name);
        assert_eq!(digest, tensor["sha256"], "{}", view.name);
    }
    assert_eq!(checkpoint.config().unwrap()["quantization"], peer["quantization"]);
    assert_eq!(checkpoint.config().unwrap()["quantization_config"], peer["quantization"]);
}

#[test]
fn the_bundled_checkpoint_is_the_peers() {
    assert_same(&Checkpoint::open(&root().join("models/demo-4bit")).unwrap());
}

#[test]
fn converting_gives_the_peers_bits() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("demo-4bit");
    let demo = Checkpoint::open(&root().join("models/demo")).unwrap();
    let mut heard = 0;
    let summary = quantize(&demo, &output, &options(), |done, all| {
        heard += 1;
        assert!(done == heard && done <= all);
    });
    let summary = summary.unwrap();
    let made = Checkpoint::open(&output).unwrap();
    assert_same(&made);
    assert_eq!(summary.bytes, made.tensors().iter().map(|view| view.bytes.len() as u64).sum::<u64>());
    assert_eq!(summary.parameters, 13_695_968);
    let bundled = root().join("models/demo-4bit");
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        assert!(
            std::fs::read(output.join(name)).unwrap() == std::fs::read(bundled.join(name)).unwrap(),
            "{name}"
        );
    }
}

#[test]
fn every_mode_makes_a_checkpoint_that_opens() {
    let folder = tempfile::tempdir().unwrap();
    let demo = Checkpoint::open(&root().join("tests/vectors/models/qwen3_5_moe")).unwrap();
    for (mode, bits, group_size) in
        [("affine", 3, 32), ("affine", 8, 32), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
    {
        let output = folder.path().join(format!("{mode}-{bits}"));
        let options = QuantizeOptions { mode: mode.into(), bits, group_size };
        quantize(&demo, &output, &options, |_, _| ()).unwrap();
        let made = Checkpoint::open(&output).unwrap();
        assert!(made.tensors().iter().any(|view| view.name.ends_with("q_proj.scales")), "{mode}");
    }
}

#[test]
fn refusals_name_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let demo = Checkpoint::open(&root().join("models/demo")).unwrap();
    let error = quantize(&demo, folder.path(), &options(), |_, _| ()).unwrap_err();
    assert!(matches!(error, QuantizeError::Exists(_)), "{error}");
    let output = folder.path().join("new");
    let wrong = QuantizeOptions { bits: 7, ..options() };
    assert!(matches!(quantize(&demo, &output, &wrong, |_, _| ()), Err(QuantizeError::Format(_))));
    let wrong = QuantizeOptions { mode: "q4".into(), ..options() };
    assert!(matches!(quantize(&demo, &output, &wrong, |_, _| ()), Err(QuantizeError::Format(_))));
    let again = Checkpoint::open(&root().join("models/demo-4bit")).unwrap();
    let error = quantize(&again, &output, &options(), |_, _| ()).unwrap_err().to_string();
    assert!(error.contains("MLX") && error.contains("Hugging Face"), "{error}");
    assert!(!output.exists(), "nothing is written before the checks");
    let missing: Result<Checkpoint, FileError> = Checkpoint::open(&folder.path().join("none"));
    assert!(missing.is_err());
}
