use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::Checkpoint;
use super::super::tests::{directory, tensors};
use super::{EmbeddingConfig, Pooling};
use crate::names::CONFIG;

/// A checkpoint with these JSON files beside it.
fn with(files: &[(&str, Value)]) -> TempDir {
    let folder = directory(&[(CONFIG, b"{}"), ("model.safetensors", &tensors("pt", &["a"]))]);
    for (name, json) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, json.to_string()).unwrap();
    }
    folder
}

fn read(files: &[(&str, Value)]) -> Result<EmbeddingConfig, String> {
    let folder = with(files);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    checkpoint.embedding_config().map_err(|error| error.to_string())
}

fn modules(classes: &[&str]) -> Value {
    let module = |(index, class): (usize, &&str)| {
        let folder = if index == 0 { String::new() } else { format!("{index}_M") };
        json!({"idx": index, "path": folder, "type": format!("sentence_transformers.models.{class}")})
    };
    classes.iter().enumerate().map(module).collect()
}

#[test]
fn settings_are_those_of_sentence_transformers() {
    assert_eq!(read(&[]).unwrap(), EmbeddingConfig::default());
    let list = modules(&["Transformer", "Pooling", "Normalize"]);
    let files = |pooling: Value| {
        vec![
            ("modules.json", list.clone()),
            ("1_M/config.json", pooling),
            ("tokenizer_config.json", json!({"model_max_length": 100, "truncation_side": "left"})),
            ("sentence_bert_config.json", json!({"max_seq_length": 50, "do_lower_case": false})),
            (
                "config_sentence_transformers.json",
                json!({"prompts": {"query": "Q: ", "document": null}, "default_prompt_name": "query"}),
            ),
        ]
    };
    let want = EmbeddingConfig {
        pooling: Some(Pooling::Last),
        dense: vec![],
        normalize: true,
        include_prompt: false,
        prompts: vec![("document".into(), "".into()), ("query".into(), "Q: ".into())],
        default_prompt: Some("query".into()),
        max_tokens: Some(50),
        cut_at_start: true,
        ranks: false,
    };
    for pooling in [
        json!({"pooling_mode": "lasttoken", "include_prompt": false}),
        json!({"pooling_mode": ["lasttoken"], "include_prompt": false}),
        json!({"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": false, "include_prompt": false}),
    ] {
        let mut config = read(&files(pooling)).unwrap();
        config.prompts.sort();
        assert_eq!(config, want);
    }
    // Neither is said.
    let config =
        read(&[("modules.json", modules(&["Transformer", "Pooling"])), ("1_M/config.json", json!({}))]);
    let config = config.unwrap();
    assert_eq!((config.pooling, config.normalize), (Some(Pooling::Mean), false));
    // A repository that was copied without its folders.
    assert_eq!(read(&[("modules.json", modules(&["Transformer", "Pooling"]))]).unwrap().pooling, None);
    assert!(read(&[("modules.json", modules(&["Transformer", "LogitScore"]))]).unwrap().ranks);
}

#[test]
fn what_is_not_computed_is_refused() {
    let dense = modules(&["Transformer", "Pooling", "Dense", "Normalize"]);
    let other = modules(&["Transformer", "Pooling", "LSTM"]);
    let plain = ("modules.json", modules(&["Transformer", "Pooling"]));
    let pooling = |value: Value| vec![plain.clone(), ("1_M/config.json", value)];
    let beside = |name: &'static str, value: Value| vec![plain.clone(), (name, value)];
    let cases = [
        (vec![("modules.json", other)], "module 2 should be Transformer beside it, then Pooling"),
        (vec![("modules.json", dense)], "the whole should be the sizes of a linear layer"),
        (vec![("modules.json", json!({}))], "the whole should be an array"),
        (
            vec![("modules.json", json!([{"type": "T", "path": "../x"}]))],
            "path of module 0 should be the name",
        ),
        (pooling(json!({"pooling_mode": "max"})), "pooling_mode should be mean, cls or lasttoken alone"),
        (pooling(json!({"pooling_mode": ["mean", "cls"]})), "pooling_mode should be"),
        (pooling(json!({"pooling_mode_max_tokens": true})), "pooling_mode should be"),
        (
            beside("sentence_bert_config.json", json!({"do_lower_case": true})),
            "do_lower_case should be false",
        ),
        (beside("sentence_bert_config.json", json!({"max_seq_length": "8"})), "max_seq_length should be"),
        (
            beside("config_sentence_transformers.json", json!({"prompts": {"a": 3}})),
            "prompts.a should be a text",
        ),
        (
            beside("config_sentence_transformers.json", json!({"default_prompt_name": "a"})),
            "default_prompt_name should be one of the prompts",
        ),
        (vec![("tokenizer_config.json", json!({"truncation_side": "middle"}))], "truncation_side should be"),
    ];
    for (files, want) in cases {
        let message = read(&files).unwrap_err();
        assert!(message.contains(want), "{message}\nshould say: {want}");
    }
}

#[test]
fn gguf_says_its_pooling_by_number() {
    let config = |number: u32| {
        let mut writer = crate::gguf::Writer::new();
        writer.entry("general.architecture", crate::gguf::Value::String("qwen3".into())).unwrap();
        writer.entry("qwen3.pooling_type", crate::gguf::Value::U32(number)).unwrap();
        let bytes = writer.begin(Vec::new()).unwrap().finish().unwrap();
        let folder = directory(&[("m.gguf", &bytes)]);
        Checkpoint::open(folder.path()).unwrap().embedding_config().map_err(|error| error.to_string())
    };
    for pooling in [Pooling::Mean, Pooling::Cls, Pooling::Last] {
        assert_eq!(config(pooling.ggml()).unwrap().pooling, Some(pooling));
    }
    assert_eq!(config(0).unwrap(), EmbeddingConfig::default());
    assert!(config(4).unwrap().ranks);
    let message = config(5).unwrap_err();
    assert!(
        message.ends_with("qwen3.pooling_type should be 0 to 4: none, mean, cls, last or rank, but is 5"),
        "{message}"
    );
}
