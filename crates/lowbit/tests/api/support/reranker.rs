//! The tiny Qwen3 as a reranker, as tools/peer_vectors/rerank.py makes it.
#![allow(dead_code, reason = "each test file uses a part")]

use serde_json::{Value, json};
use std::fs::{copy, create_dir_all, read_to_string, write};
use std::path::{Path, PathBuf};

fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors")
}

/// The peer's cases: `query`, `documents`, and `cases` with their files, arguments and scores.
pub fn peer() -> Value {
    serde_json::from_str(&read_to_string(vectors().join("rerank/cases.json")).unwrap()).unwrap()
}

/// The case of this name.
pub fn case(peer: &Value, name: &str) -> Value {
    peer["cases"].as_array().unwrap().iter().find(|case| case["name"] == name).unwrap().clone()
}

/// Writes the checkpoint of a case to `folder`.
pub fn make(folder: &Path, files: &Value) {
    let source = vectors().join("models/qwen3");
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        copy(source.join(name), folder.join(name)).unwrap();
    }
    for (name, value) in files.as_object().unwrap() {
        let path = folder.join(name);
        create_dir_all(path.parent().unwrap()).unwrap();
        let mut all = value.clone();
        if let Ok(before) = read_to_string(&path) {
            all = serde_json::from_str(&before).unwrap();
            value.as_object().unwrap().iter().for_each(|(key, value)| all[key] = value.clone());
        }
        write(path, all.to_string()).unwrap();
    }
}

/// The same with one value of a file set.
pub fn with(files: &Value, file: &str, key: &str, value: Value) -> Value {
    let mut files = files.clone();
    if files[file].is_null() {
        files[file] = json!({});
    }
    files[file][key] = value;
    files
}
