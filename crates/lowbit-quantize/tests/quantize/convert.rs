//! The demo model quantised here against `mlx_lm convert -q`, tensor by tensor, bit for bit.

use lowbit_files::{Checkpoint, FileError, Stored};
use lowbit_quantize::{MlxFormat, Progress, QuantizeError, Recipe};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::ops::ControlFlow::{Break, Continue};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn recipe() -> Recipe<'static> {
    Recipe::new(MlxFormat::new("affine", 4, 64))
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
        let digest: String =
            Sha256::digest(view.bytes.get()).iter().map(|byte| format!("{byte:02x}")).collect();
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

/// Asserts that `made` has every key of `peers`, with the same value.
#[track_caller]
fn assert_has(made: &Value, peers: &Value) {
    match peers.as_object() {
        Some(peers) => peers.iter().for_each(|(key, value)| assert_has(&made[key], value)),
        None => assert_eq!(made, peers),
    }
}

#[test]
fn converting_gives_the_peers_bits() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("demo-4bit");
    let demo = Checkpoint::open(&root().join("models/demo")).unwrap();
    let mut heard = 0;
    let made = recipe().run(&demo, &output, |progress| {
        let Progress::Tensors(done, all) = progress else { panic!("{progress:?}") };
        heard += 1;
        // Once more when all is on the disk.
        assert!(done == heard.min(all) && heard <= all + 1);
        Continue(())
    });
    let summary = made.unwrap().summary;
    let made = Checkpoint::open(&output).unwrap();
    assert_same(&made);
    assert_eq!(summary.bytes, made.tensors().iter().map(|view| view.bytes.len() as u64).sum::<u64>());
    assert_eq!(summary.parameters, 13_695_968);
    let bundled = root().join("models/demo-4bit");
    // The output states values that the original leaves to defaults.
    let (made, peers) = (made.config().unwrap(), Checkpoint::open(&bundled).unwrap());
    let text = |key: &str| &made["text_config"][key];
    assert_eq!(
        [text("full_attention_interval"), text("norm_topk_prob")],
        [&Value::from(4), &Value::from(true)]
    );
    assert_has(made, peers.config().unwrap());
    for name in ["model.safetensors", "tokenizer.json"] {
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
        let recipe = Recipe::new(MlxFormat::new(mode, bits, group_size));
        recipe.run(&demo, &output, |_| Continue(())).unwrap();
        let made = Checkpoint::open(&output).unwrap();
        assert!(made.tensors().iter().any(|view| view.name.ends_with("q_proj.scales")), "{mode}");
    }
}

#[test]
fn rules_give_modules_other_formats() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("new");
    let source = Checkpoint::open(&root().join("models/demo")).unwrap();
    let rules = ["switch_mlp.down=6", "layers.1.*shared_expert.=mxfp8", "embed_tokens=none", "mlp.gate=4"];
    let rules = rules.map(|rule| rule.parse().unwrap());
    let recipe = recipe().with_rules(rules.into());
    let summary = recipe.run(&source, &output, |_| Continue(())).unwrap().summary;
    assert_eq!(summary.fallbacks, []);
    let made = Checkpoint::open(&output).unwrap();
    let layer = "language_model.model.layers.1";
    for (module, want) in [
        (format!("{layer}.mlp.switch_mlp.down_proj"), Some("affine6g64")),
        (format!("{layer}.mlp.switch_mlp.up_proj"), Some("affine4g64")),
        (format!("{layer}.mlp.shared_expert.up_proj"), Some("mxfp8")),
        (format!("{layer}.mlp.shared_expert_gate"), Some("affine8g64")),
        (format!("{layer}.mlp.gate"), Some("affine4g64")),
        ("language_model.model.embed_tokens".into(), None),
    ] {
        let quantization = made.quantization(&module).unwrap();
        let scales = made.tensors().get(&format!("{module}.scales"));
        let format = quantization.zip(scales).map(|(quantization, scales)| match scales.stored {
            Stored::Plain(dtype) => quantization.format(dtype).unwrap().to_string(),
            Stored::Blocks(format) => format.to_string(),
        });
        assert_eq!(format.as_deref(), want, "{module}");
    }
}

#[test]
fn rows_that_are_no_whole_groups_take_smaller_ones_or_stay() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("new");
    // Rows of 96, 160 and 64 values.
    let source = Checkpoint::open(&root().join("tests/vectors/models/llama-bias")).unwrap();
    let recipe = Recipe::new(MlxFormat::new("affine", 4, 128));
    let summary = recipe.run(&source, &output, |_| Continue(())).unwrap().summary;
    assert!(summary.fallbacks.iter().any(|fallback| fallback.k == 64 && fallback.taken.block() == 64));
    assert!(summary.fallbacks.iter().any(|fallback| fallback.k == 96 && fallback.taken.block() == 32));
    let made = Checkpoint::open(&output).unwrap();
    for fallback in &summary.fallbacks {
        let module = fallback.tensor.strip_suffix(".weight").unwrap();
        let scales = made.tensors().get(&format!("{module}.scales")).unwrap();
        assert_eq!(scales.shape.last(), Some(&(fallback.k / fallback.taken.block())), "{module}");
        assert!(made.quantization(module).unwrap().is_some(), "{module}");
    }
    let recipe = Recipe::new(MlxFormat::for_mode("nvfp4")).with_rules(vec!["q_proj=mxfp4".parse().unwrap()]);
    let summary = recipe.run(&source, &folder.path().join("other"), |_| Continue(())).unwrap().summary;
    assert_eq!(summary.fallbacks, []);
}

#[test]
fn refusals_name_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let demo = Checkpoint::open(&root().join("models/demo")).unwrap();
    let error = recipe().run(&demo, folder.path(), |_| Continue(())).unwrap_err();
    assert!(matches!(error, QuantizeError::File(FileError::Exists { .. })), "{error}");
    let output = folder.path().join("new");
    let wrong = Recipe::new(MlxFormat::new("affine", 7, 64));
    assert!(matches!(wrong.run(&demo, &output, |_| Continue(())), Err(QuantizeError::Format(_))));
    let wrong = Recipe::new(MlxFormat::new("q4", 4, 64));
    assert!(matches!(wrong.run(&demo, &output, |_| Continue(())), Err(QuantizeError::Format(_))));
    assert!(!output.exists(), "nothing is written before the checks");
    let missing: Result<Checkpoint, FileError> = Checkpoint::open(&folder.path().join("none"));
    assert!(missing.is_err());
}

/// A copy of a tiny checkpoint of one file of weights.
fn tiny(folder: &Path) -> PathBuf {
    let (from, to) = (root().join("tests/vectors/models/qwen3"), folder.join("source"));
    std::fs::create_dir(&to).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(from.join(name), to.join(name)).unwrap();
    }
    to
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_is_broken_off_or_fails_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let source = tiny(folder.path());
    let checkpoint = Checkpoint::open(&source).unwrap();
    let output = folder.path().join("a/b/new");
    for end in 1..4 {
        let result = recipe().run(&checkpoint, &output, |progress| match progress {
            Progress::Tensors(done, _) if done == end => Break(()),
            _ => Continue(()),
        });
        assert!(matches!(result, Err(QuantizeError::Interrupted)));
        assert_eq!(names(folder.path()), ["source"]);
    }
    let wrong = Recipe::new(MlxFormat::new("affine", 4, 48));
    wrong.run(&checkpoint, &output, |_| Continue(())).unwrap_err();
    assert_eq!(names(folder.path()), ["source"]);
}

#[test]
fn an_output_is_replaced_when_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let source = tiny(folder.path());
    let checkpoint = Checkpoint::open(&source).unwrap();
    let output = folder.path().join("new");
    let bits = |bits| Recipe::new(MlxFormat::new("affine", bits, 64)).with_replace(true);
    for wanted in [4, 8, 4] {
        bits(wanted).run(&checkpoint, &output, |_| Continue(())).unwrap();
        assert_eq!(Checkpoint::open(&output).unwrap().config().unwrap()["quantization"]["bits"], wanted);
        assert_eq!(names(folder.path()), ["new", "source"]);
    }
    let result = bits(8).run(&checkpoint, &output, |_| Break(()));
    assert!(matches!(result, Err(QuantizeError::Interrupted)));
    assert_eq!(Checkpoint::open(&output).unwrap().config().unwrap()["quantization"]["bits"], 4);
}

#[cfg(unix)]
#[test]
fn the_source_is_never_the_output() {
    let folder = tempfile::tempdir().unwrap();
    let source = tiny(folder.path());
    std::os::unix::fs::symlink(&source, folder.path().join("link")).unwrap();
    let checkpoint = Checkpoint::open(&source).unwrap();
    let before = names(&source);
    for (output, want) in [
        ("source", "is"),
        ("source/", "is"),
        ("link", "is"),
        ("source/new", "lies in"),
        ("link/a/b", "lies in"),
        ("source/../source/a", "lies in"),
        ("none/../source/a", "lies in"),
        (".", "holds"),
    ] {
        let recipe = recipe().with_replace(true);
        let result = recipe.run(&checkpoint, &folder.path().join(output), |_| Continue(()));
        let error = result.unwrap_err();
        assert!(
            matches!(error, QuantizeError::Output { relation, .. } if relation == want),
            "{output}: {error}"
        );
        assert_eq!(names(folder.path()), ["link", "source"]);
    }
    assert_eq!(names(&source), before);
}

#[cfg(unix)]
#[test]
fn a_strangers_links_are_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let source = tiny(folder.path());
    let checkpoint = Checkpoint::open(&source).unwrap();
    let output = folder.path().join("new");
    std::fs::write(folder.path().join("secret.json"), "{\"token\": 1}").unwrap();
    for target in ["/etc/passwd", "../secret.json", "/dev/zero", "nothing"] {
        std::fs::remove_file(source.join("tokenizer_config.json")).unwrap();
        std::os::unix::fs::symlink(target, source.join("tokenizer_config.json")).unwrap();
        let error = recipe().run(&checkpoint, &output, |_| Continue(())).unwrap_err().to_string();
        assert!(error.contains("tokenizer_config.json"), "{error}");
        assert_eq!(names(folder.path()), ["secret.json", "source"]);
    }
}

#[test]
fn weights_that_are_no_numbers_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let source = tiny(folder.path());
    let original = std::fs::read(source.join("model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(original[..8].try_into().unwrap()) as usize;
    let json: Value = serde_json::from_slice(&original[8..header]).unwrap();
    // A product's weight, which is encoded, and a norm's, which stays as it is.
    for name in ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"] {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let offsets = &json[name]["data_offsets"];
            let [start, end] = [0, 1].map(|i| header + offsets[i].as_u64().unwrap() as usize);
            assert_eq!(json[name]["dtype"], "BF16");
            let (mut bytes, last) = (original.clone(), (end - start) / 2 - 1);
            bytes[end - 2..end].copy_from_slice(&value.to_le_bytes()[2..]);
            std::fs::write(source.join("model.safetensors"), bytes).unwrap();
            let checkpoint = Checkpoint::open(&source).unwrap();
            let error = recipe().run(&checkpoint, &folder.path().join("new"), |_| Continue(()));
            let error = error.unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(&format!("value {last} is {value}")), "{error}");
            assert_eq!(names(folder.path()), ["source"]);
        }
    }
}
