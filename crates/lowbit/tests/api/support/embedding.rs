//! The tiny Qwen3 as an embedding model: with the files that sentence-transformers reads beside it,
//! as tools/peer_vectors/embed.py writes them.
#![allow(dead_code, reason = "each test file uses a part")]

use serde_json::{Value, json};
use std::fs::{copy, create_dir_all, read_to_string, write};
use std::path::{Path, PathBuf};

/// The checkpoint's settings.
pub struct Embedding<'a> {
    /// Its folder in tests/vectors/models.
    pub model: &'a str,
    /// sentence-transformers' older spelling: what follows `pooling_mode_`.
    pub pooling: &'a str,
    pub normalize: bool,
    /// Keys that go into the file that has them.
    pub settings: Value,
}

impl Default for Embedding<'_> {
    fn default() -> Self {
        Self { model: "qwen3", pooling: "lasttoken", normalize: true, settings: json!({}) }
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
        let source = vectors().join("models").join(self.model);
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
        let dense: &[&str] = if self.model == "gemma3" { &["Dense", "Dense"] } else { &[] };
        let last: &[&str] = if self.normalize { &["Normalize"] } else { &[] };
        let classes = [&["Transformer", "Pooling"][..], dense, last].concat();
        let module = |(index, class): (usize, &&str)| {
            let folder = if index == 0 { String::new() } else { format!("{index}_{class}") };
            let class = format!("sentence_transformers.models.{class}");
            json!({"idx": index, "name": index.to_string(), "path": folder, "type": class})
        };
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
    let changes = [("architectures", json!(["Qwen3Model"])), ("tie_word_embeddings", false.into())];
    without_prefix(folder, changes);
}

/// EmbeddingGemma: the tiny Gemma 3 whose tokens see those after them, with two linear layers
/// behind pooling, as tools/peer_vectors/embed.py writes it.
pub fn gemma(folder: &Path) {
    Embedding { model: "gemma3", pooling: "mean_tokens", ..Embedding::default() }.write(folder);
    let class = json!(["Gemma3TextModel"]);
    without_prefix(folder, [("architectures", class), ("use_bidirectional_attention", true.into())]);
    for (name, inputs, outputs) in [("2_Dense", 64, 96), ("3_Dense", 96, 64)] {
        let path = folder.join(name);
        create_dir_all(&path).unwrap();
        let function = "torch.nn.modules.linear.Identity";
        let config = json!({"in_features": inputs, "out_features": outputs, "bias": false, "activation_function": function});
        write(path.join("config.json"), config.to_string()).unwrap();
        let weight = |i: usize| ((((i / inputs) * 37 + (i % inputs) * 11) % 23) as f32 - 11.0) / 64.0;
        let bytes: Vec<u8> = (0..inputs * outputs).flat_map(|i| weight(i).to_le_bytes()).collect();
        let tensor = json!({"dtype": "F32", "shape": [outputs, inputs], "data_offsets": [0, bytes.len()]});
        let mut header = json!({"linear.weight": tensor}).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        let length = (header.len() as u64).to_le_bytes();
        write(path.join("model.safetensors"), [&length[..], &header, &bytes].concat()).unwrap();
    }
}

/// Takes the names' prefix away, and changes the configuration.
fn without_prefix(folder: &Path, changes: [(&str, Value); 2]) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_str(&read_to_string(&path).unwrap()).unwrap();
    changes.into_iter().for_each(|(key, value)| config[key] = value);
    write(path, config.to_string()).unwrap();
    let path = folder.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&bytes[8..8 + length]).unwrap();
    let mut header = header.replace("\"model.", "\"").into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    write(path, [&(header.len() as u64).to_le_bytes()[..], &header, &bytes[8 + length..]].concat()).unwrap();
}
