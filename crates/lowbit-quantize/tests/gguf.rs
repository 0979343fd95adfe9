//! GGUF files made here against llama.cpp's own: whole files, and the types of tensors.

use lowbit_files::gguf::{self, Value as Entry, Writer};
use lowbit_files::{Checkpoint, Stored};
use lowbit_formats::DType;
use lowbit_quantize::{GgufOptions, Mix, QuantizeError, quantize_to_gguf};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::ops::ControlFlow::{Break, Continue};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn vectors(name: &str) -> Value {
    let path = root().join("tests/vectors/quantize").join(name);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn options(mix: &str) -> GgufOptions {
    GgufOptions::new(Mix::from_name(mix).unwrap())
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Quantises `source` in a new folder and returns the file's bytes.
fn quantised(source: &Path, mix: &str) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("new.gguf");
    let checkpoint = Checkpoint::open(source).unwrap();
    let summary = quantize_to_gguf(&checkpoint, &output, &options(mix), |_, _| Continue(())).unwrap();
    let made = Checkpoint::open(&output).unwrap();
    assert_eq!(summary.bytes, made.tensors().iter().map(|view| view.bytes.len() as u64).sum::<u64>());
    assert_eq!(summary.kinds.iter().map(|kind| kind.bytes).sum::<u64>(), summary.bytes);
    std::fs::read(output).unwrap()
}

#[test]
fn files_are_llama_quantizes_byte_for_byte() {
    let files = vectors("files.json");
    let models = files["models"].as_object().unwrap();
    assert!(models.len() >= 8);
    for (model, digests) in models {
        let source = root().join("tests/vectors/models").join(model).join("model.gguf");
        for (mix, want) in digests.as_object().unwrap() {
            assert_eq!(digest(&quantised(&source, mix)), want.as_str().unwrap(), "{model} as {mix}");
        }
        assert_eq!(digests.as_object().unwrap().len(), Mix::names().count(), "{model}");
    }
}

/// A GGUF file of zeros in f16 with the metadata and tensors of `model`.
fn write_zeros(model: &Value, path: &Path) {
    let architecture = model["architecture"].as_str().unwrap();
    let mut writer = Writer::new();
    writer.entry("general.architecture", Entry::String(architecture.into())).unwrap();
    for (key, value) in model["metadata"].as_object().unwrap() {
        writer.entry(&format!("{architecture}.{key}"), Entry::U32(value.as_u64().unwrap() as u32)).unwrap();
    }
    let mut sizes = vec![];
    for (name, shape) in model["tensors"].as_object().unwrap() {
        let shape: Vec<usize> = serde_json::from_value(shape.clone()).unwrap();
        sizes.push(writer.tensor(name, Stored::Plain(DType::F16), &shape).unwrap());
    }
    let mut body = writer.begin(std::fs::File::create(path).unwrap()).unwrap();
    sizes.iter().for_each(|&size| body.tensor(&vec![0; size]).unwrap());
    body.finish().unwrap();
}

#[test]
fn types_are_those_that_llama_quantize_chooses() {
    let types = vectors("types.json");
    let letters = types["letters"].as_object().unwrap();
    for model in types["models"].as_array().unwrap() {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("source.gguf");
        write_zeros(model, &source);
        let checkpoint = Checkpoint::open(&source).unwrap();
        let names = model["tensors"].as_object().unwrap().keys();
        for (mix, want) in model["types"].as_object().unwrap() {
            let output = folder.path().join(mix);
            quantize_to_gguf(&checkpoint, &output, &options(mix), |_, _| Continue(())).unwrap();
            let made = Checkpoint::open(&output).unwrap();
            let letter = |name: &String| {
                let stored = made.tensors().get(name).unwrap().stored.to_string().to_uppercase();
                letters[&stored].as_str().unwrap().to_string()
            };
            let got: String = names.clone().map(letter).collect();
            assert_eq!(
                got,
                want.as_str().unwrap(),
                "{} {} as {mix}",
                model["architecture"],
                model["metadata"]
            );
            std::fs::remove_file(output).unwrap();
        }
    }
}

#[test]
fn metadata_is_carried_over() {
    let source = root().join("tests/vectors/models/qwen3/model.gguf");
    let old = gguf::read(&source).unwrap().metadata;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new.gguf");
    std::fs::write(&path, quantised(&source, "Q5_1")).unwrap();
    let new = gguf::read(&path).unwrap().metadata;
    for (key, value) in old.iter().filter(|(key, _)| *key != "general.file_type") {
        assert_eq!(new.value(key), Some(value), "{key}");
    }
    assert_eq!(new.get::<u32>("general.file_type").unwrap(), 9);
    assert_eq!(new.iter().count(), old.iter().count());
}

#[test]
fn what_is_not_possible_is_refused_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("model.gguf");
    std::fs::copy(root().join("tests/vectors/models/qwen3/model.gguf"), &source).unwrap();
    let checkpoint = Checkpoint::open(&source).unwrap();
    let refusal = |checkpoint: &Checkpoint, output: &Path| {
        let options = options("Q4_0").with_replace(true);
        quantize_to_gguf(checkpoint, output, &options, |_, _| Continue(())).unwrap_err().to_string()
    };
    let path = source.display();
    let want = format!("{path} is {path}, the checkpoint that is to be quantised; name a path outside of it");
    assert_eq!(refusal(&checkpoint, &source), want);
    let other = folder.path().join("other.gguf");
    let mut writer = Writer::new();
    writer.entry("general.architecture", Entry::String("falcon".into())).unwrap();
    writer.begin(std::fs::File::create(&other).unwrap()).unwrap().finish().unwrap();
    let error = refusal(&Checkpoint::open(&other).unwrap(), &folder.path().join("new.gguf"));
    let want = format!(
        "{}: architecture \"falcon\" is not supported; supported are llama, qwen3, qwen3moe, qwen3next, qwen35, qwen35moe",
        other.display()
    );
    assert_eq!(error, want);
    for end in 1..4 {
        let output = folder.path().join("new.gguf");
        let result = quantize_to_gguf(&checkpoint, &output, &options("Q4_0"), |done, _| {
            if done == end { Break(()) } else { Continue(()) }
        });
        assert!(matches!(result, Err(QuantizeError::Interrupted)));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
