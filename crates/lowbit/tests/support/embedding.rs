//! The tiny Qwen3 as an embedding model: with the files that sentence-transformers reads beside it,
//! as tools/peer_vectors/embed.py writes them.
#![allow(dead_code, reason = "each test file uses a part")]

use serde_json::{Value, json};
use std::fs::{copy, create_dir_all, read_to_string, write};
use std::path::{Path, PathBuf};

/// The checkpoint's settings.
pub struct Embedding<'a> {
    /// sentence-transformers' older spelling: what follows `pooling_mode_`.
    pub pooling: &'a str,
    pub normalize: bool,
    /// Keys that go into the file that has them.
    pub settings: Value,
}

impl Default for Embedding<'_> {
    fn default() -> Self {
        Self { pooling: "lasttoken", normalize: true, settings: json!({}) }
    }
}

const END: &str = "<|endoftext|>";

pub fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors")
}

/// The texts of the peers' embeddings.
pub fn texts() -> Vec<String> {
    serde_json::from_str(&read_to_string(vectors().join("embed/texts.json")).unwrap()).unwrap()
}

impl Embedding<'_> {
    /// Writes the checkpoint to `folder`.
    pub fn write(&self, folder: &Path) {
        let source = vectors().join("models/qwen3");
        for name in ["config.json", "model.safetensors"] {
            copy(source.join(name), folder.join(name)).unwrap();
        }
        let read = |name: &str| -> Value {
            serde_json::from_str(&read_to_string(source.join(name)).unwrap()).unwrap()
        };
        let mut tokenizer = read("tokenizer.json");
        let piece = |sequence: &str| json!({"Sequence": {"id": sequence, "type_id": 0}});
        let end = json!({"SpecialToken": {"id": END, "type_id": 0}});
        tokenizer["post_processor"] = json!({
            "type": "TemplateProcessing", "single": [piece("A"), end], "pair": [piece("A"), end, piece("B"), end],
            "special_tokens": {END: {"id": END, "ids": [259], "tokens": [END]}},
        });
        let json = |name: &str, value: Value| {
            let path = folder.join(name);
            create_dir_all(path.parent().unwrap()).unwrap();
            write(path, value.to_string()).unwrap();
        };
        json("tokenizer.json", tokenizer);
        let mut names = read("tokenizer_config.json");
        names["pad_token"] = END.into();
        names["model_max_length"] = 512.into();
        names["truncation_side"] = self.setting("truncation_side");
        json("tokenizer_config.json", names);
        let classes = ["Transformer", "Pooling", "Normalize"];
        let module = |(index, class): (usize, &&str)| {
            let folder = if index == 0 { String::new() } else { format!("{index}_{class}") };
            let class = format!("sentence_transformers.models.{class}");
            json!({"idx": index, "name": index.to_string(), "path": folder, "type": class})
        };
        let classes = &classes[..2 + usize::from(self.normalize)];
        json("modules.json", classes.iter().enumerate().map(module).collect());
        let mut pooling = json!({"word_embedding_dimension": 64});
        pooling[format!("pooling_mode_{}", self.pooling)] = true.into();
        pooling["include_prompt"] = self.setting("include_prompt");
        json("1_Pooling/config.json", pooling);
        let prompts = json!({"query": "Instruct: find it\nQuery:", "document": ""});
        let default = self.setting("default_prompt_name");
        json(
            "config_sentence_transformers.json",
            json!({"prompts": prompts, "default_prompt_name": default}),
        );
        let length = self.setting("max_seq_length");
        json("sentence_bert_config.json", json!({"max_seq_length": length, "do_lower_case": false}));
    }

    fn setting(&self, name: &str) -> Value {
        self.settings.get(name).cloned().unwrap_or_default()
    }
}

/// Takes the output layer's place in the configuration, and the names' prefix, away: what
/// `Qwen3Model` saves.
pub fn behead(folder: &Path) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_str(&read_to_string(&path).unwrap()).unwrap();
    config["architectures"] = json!(["Qwen3Model"]);
    config["tie_word_embeddings"] = false.into();
    write(path, config.to_string()).unwrap();
    let path = folder.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&bytes[8..8 + length]).unwrap();
    let mut header = header.replace("\"model.", "\"").into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    write(path, [&(header.len() as u64).to_le_bytes()[..], &header, &bytes[8 + length..]].concat()).unwrap();
}
