use std::path::Path;

use tempfile::TempDir;

use super::tests::{EMPTY, INDEX, assert_refused, directory, index, part, refused, tensors};
use super::{CONFIG, Checkpoint};

const WEIGHTS: &str = "model.safetensors";
const POINTER: &[u8] =
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4665a5ea423c2713d436b5ee50593a9640e0018c1550b5a0002f74190d6caea8\nsize 12345\n";

#[test]
fn a_file_of_a_directory_stands_for_it() {
    let weights = tensors("pt", &["a"]);
    let shard = "model-00001-of-00001.safetensors";
    let single = directory(&[(CONFIG, b"{}"), (WEIGHTS, &weights), ("tokenizer.json", b"{}")]);
    let parts = directory(&[(CONFIG, b"{}"), (shard, &weights)]);
    let indexed = directory(&[
        (CONFIG, b"{}"),
        ("x.safetensors", &weights),
        (INDEX, &index(r#"{"a": "x.safetensors"}"#)),
        ("other.safetensors", &weights),
    ]);
    let files = [
        (&single, CONFIG),
        (&single, WEIGHTS),
        (&single, "tokenizer.json"),
        (&parts, shard),
        (&indexed, INDEX),
        (&indexed, "x.safetensors"),
    ];
    for (directory, file) in files {
        let checkpoint = Checkpoint::open(&directory.path().join(file)).unwrap();
        assert_eq!(checkpoint.path(), directory.path(), "{file}");
    }
    let message = Checkpoint::open(&indexed.path().join("other.safetensors")).unwrap_err().to_string();
    assert!(message.contains("is no part of a model"), "{message}");
}

#[test]
fn a_git_lfs_pointer_is_named_wherever_it_is() {
    let weights = tensors("pt", &["a"]);
    let want = "is a git-lfs pointer";
    assert_refused(&[EMPTY, (WEIGHTS, POINTER)], want);
    assert_refused(&[(CONFIG, POINTER), (WEIGHTS, &weights)], want);
    assert_refused(&[EMPTY, (INDEX, POINTER)], want);
    assert_refused(&[EMPTY, (INDEX, &index(r#"{"a": "x.safetensors"}"#)), ("x.safetensors", POINTER)], want);
    assert_refused(&[("model.gguf", POINTER)], want);
    let named = directory(&[("model.gguf", POINTER)]);
    let message = Checkpoint::open(&named.path().join("model.gguf")).unwrap_err().to_string();
    assert!(message.contains(want), "{message}");
    let directory = directory(&[EMPTY, (WEIGHTS, &weights), ("tokenizer.json", POINTER)]);
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    let message = crate::Tokenizer::from_checkpoint(&checkpoint).unwrap_err().to_string();
    assert!(message.contains(want) && message.contains("tokenizer.json"), "{message}");
}

#[test]
fn other_directories_are_named_as_what_they_are() {
    let cases: &[(&[&str], &str)] = &[
        (&["config.json", "pytorch_model.bin"], "pytorch_model.bin: PyTorch weights"),
        (&["config.json", "pytorch_model-00001-of-00002.bin"], "PyTorch weights"),
        (&["params.json", "consolidated.00.pth"], "PyTorch weights"),
        (&["adapter_config.json", "adapter_model.safetensors"], "is an adapter (LoRA)"),
        (&["adapter_config.json", "adapters.safetensors", "config.json"], "is an adapter (LoRA)"),
        (&["config.json", "model.onnx"], "an ONNX model"),
        (&["config.json", "tf_model.h5"], "a Keras model"),
        (&["model.mlpackage"], "a Core ML model"),
        (&["config.json", "weights.npz"], "NumPy arrays"),
        (&["model_index.json"], "a diffusion pipeline"),
        (&["model.zip"], "an archive"),
        (&["config.json", "model.safetensors.part"], "not whole"),
        (&["rank0.engine"], "TensorRT"),
        (&["README.md"], "holds neither config.json nor a .gguf file"),
    ];
    for (names, want) in cases {
        let files: Vec<_> = names.iter().map(|name| (*name, b"{}".as_slice())).collect();
        assert_refused(&files, want);
    }
    let outer = TempDir::new().unwrap();
    let inner = outer.path().join("snapshots/c0ffee");
    std::fs::create_dir_all(&inner).unwrap();
    std::fs::write(inner.join(CONFIG), "{}").unwrap();
    let message = Checkpoint::open(outer.path()).unwrap_err().to_string();
    let want = format!("{} does", Path::new("snapshots").join("c0ffee").display());
    assert!(message.contains(&want), "{message}");
}

#[test]
fn other_files_are_named_as_what_they_are() {
    let safetensors = tensors("pt", &["a"]);
    let cases: &[(&str, &[u8], &str)] = &[
        ("pytorch_model.bin", b"PK\x03\x04\0\0\0\0archive/data.pkl", "PyTorch weights"),
        ("model.ckpt", b"\x80\x02}q\0", "PyTorch weights"),
        ("model.zip", b"PK\x03\x04 a model.gguf", "an archive"),
        ("model.gguf", b"\x1f\x8b\x08\0", "an archive"),
        ("model.h5", b"\x89HDF\r\n\x1a\n", "HDF5"),
        ("model.keras", b"PK\x03\x04 metadata.json", "a Keras model"),
        ("model.onnx", b"\x08\x07\x12\x07pytorch", "an ONNX model"),
        ("model.mlmodel", b"\x08\x01", "a Core ML model"),
        ("model.tflite", b"\x1c\0\0\0TFL3", "TensorFlow Lite"),
        ("ggml-model-q4_0.bin", b"tjgg\x03\0\0\0", "from before GGUF"),
        ("model.gguf", b"<!DOCTYPE html><html>", "a web page"),
        ("model.gguf", b"", "is empty"),
        ("model.llamafile", b"MZqFpD='\n", "a llamafile"),
        ("weights.bin", &safetensors, "a safetensors file"),
        ("generation.json", b"{\"a\": 1}", "JSON"),
        ("README.md", b"# A model", "a text"),
        ("adapters.safetensors", &safetensors, "is an adapter"),
        ("x.gguf", b"GGUX\x03\0\0\0", "it begins with"),
    ];
    for (name, bytes, want) in cases {
        let directory = directory(&[(name, bytes)]);
        let message = Checkpoint::open(&directory.path().join(name)).unwrap_err().to_string();
        assert!(message.contains(want) && message.contains(name), "{message}\nshould say: {want}");
    }
}

#[test]
fn beginnings_of_any_length_are_refused() {
    let folder = TempDir::new().unwrap();
    let beginnings: [&[u8]; 7] = [
        b"PK\x03\x04 data.pkl",
        b"\x89HDF\r\n",
        POINTER,
        b"GGUF\x03\0\0\0\0",
        b"{\"a\": 1}",
        b"\xff\xfe\0{",
        b"\x20\0\0\0\0\0\0\0{",
    ];
    for name in
        ["model", "model.gguf", "model.bin", "x.safetensors", WEIGHTS, "config.json", ".gguf", "m.onnx"]
    {
        for bytes in beginnings {
            for length in (0..bytes.len().min(24)).chain([bytes.len()]) {
                let path = folder.path().join(name);
                std::fs::write(&path, &bytes[..length]).unwrap();
                Checkpoint::open(&path).unwrap_err();
                std::fs::remove_file(path).unwrap();
            }
        }
    }
}

#[test]
fn models_that_write_no_text_are_named() {
    let refused_config =
        |config: &str| refused(&[(CONFIG, config.as_bytes()), (WEIGHTS, &tensors("pt", &["a"]))]);
    let cases = [
        (r#"{"architectures": ["BertForMaskedLM"]}"#, "fills gaps"),
        (r#"{"architectures": ["Qwen3ForSequenceClassification"]}"#, "classifies texts"),
        (r#"{"architectures": ["ViTForImageClassification"]}"#, "classifies pictures"),
        (r#"{"architectures": ["XLMRobertaModel"]}"#, "makes embeddings"),
        (r#"{"architectures": ["T5EncoderModel"]}"#, "makes embeddings"),
        (
            r#"{"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": true}"#,
            "encoder-decoder",
        ),
    ];
    for (config, want) in cases {
        let message = refused_config(config);
        assert!(message.contains(want), "{message}\nshould say: {want}");
    }
    // Valid but unknown values are left to the loader.
    for config in [
        r#"{"architectures": []}"#,
        r#"{"architectures": 3}"#,
        r#"{"is_encoder_decoder": false}"#,
        r#"{"architectures": ["Qwen3Model"]}"#,
    ] {
        Checkpoint::open(directory(&[(CONFIG, config.as_bytes()), (WEIGHTS, &tensors("pt", &["a"]))]).path())
            .unwrap();
    }
}

#[test]
fn other_quantizations_are_named() {
    let refused_settings = |settings: &str| {
        let config = format!(r#"{{"quantization_config": {settings}}}"#);
        refused(&[(CONFIG, config.as_bytes()), (WEIGHTS, &tensors("pt", &["a"]))])
    };
    let cases = [
        (
            r#"{"quant_method": "fp8", "weight_block_size": [128, 128]}"#,
            "FP8 without any of its tensors quantization",
        ),
        (r#"{"quant_method": "gptq", "bits": 4}"#, "GPTQ without any of its tensors quantization"),
        (r#"{"quant_method": "awq", "bits": 4}"#, "AWQ without any of its tensors quantization"),
        (r#"{"quant_method": "bitsandbytes", "load_in_4bit": true}"#, "bitsandbytes quantization"),
        (
            r#"{"quant_method": "compressed-tensors"}"#,
            "compressed-tensors without any of its tensors quantization",
        ),
        (r#"{"quant_algo": "NVFP4"}"#, "ModelOpt without any of its tensors quantization"),
        (r#"{"quant_method": "\u001b[2Jx"}"#, r"\u{1b}[2Jx quantization"),
    ];
    for (settings, want) in cases {
        let message = refused_settings(settings);
        assert!(
            message.contains(want) && message.contains("lowbit quantize"),
            "{message}\nshould say: {want}"
        );
    }
    for (name, want) in [
        ("quantize_config.json", "GPTQ"),
        ("quant_config.json", "AWQ"),
        ("hf_quant_config.json", "ModelOpt with quant_algo NONE"),
    ] {
        assert_refused(&[EMPTY, (WEIGHTS, &tensors("pt", &["a"])), (name, b"{}")], want);
    }
}

#[test]
fn gguf_files_that_write_no_text_are_named() {
    let named = |key: &str, value: &str| {
        let mut writer = crate::gguf::Writer::new();
        writer.entry(key, crate::gguf::Value::String(value.into())).unwrap();
        let bytes = writer.begin(Vec::new()).unwrap().finish().unwrap();
        refused(&[("m.gguf", &bytes)])
    };
    assert!(named("general.architecture", "clip").contains("(mmproj)"));
    assert!(named("general.type", "mmproj").contains("(mmproj)"));
    assert!(named("general.type", "adapter").contains("is an adapter"));
    assert!(named("general.type", "imatrix").contains("importance matrix"));
    assert!(named("general.architecture", "bert").contains("makes embeddings"));
    assert!(named("general.architecture", "flux").contains("makes pictures"));
    // The part that sees does not hide the model beside it.
    let both = directory(&[("m.gguf", &part("a", &[])), ("mmproj-m.gguf", &part("b", &[]))]);
    assert_eq!(Checkpoint::open(both.path()).unwrap().tensors().names().collect::<Vec<_>>(), ["a"]);
}
