//! Keys that are named: unknown ones, and what each key's table promises.

use super::{HUGGING_FACE, set};
use crate::tiny::{Tiny, logits, vectors};
use lowbit_files::Checkpoint;
use lowbit_models::keys::{self, Role, role};
use lowbit_models::{arch, warnings};
use serde_json::{Value, json};
use std::path::Path;

#[test]
fn unknown_keys_are_named_and_nulls_are_not() {
    let all = ["llama3-mlx-mixed", "qwen3_5-mlx-8bit", "qwen3_5_moe-mlx-4bit"];
    for name in HUGGING_FACE.iter().chain(&all) {
        let mut tiny = Tiny::open(name);
        assert_eq!(tiny.load().unwrap().warnings(), [""; 0], "{name}");
        tiny.text().insert("attention_sinks".into(), json!(4));
        tiny.text().insert("auto_map".into(), Value::Null);
        if !tiny.text().contains_key("rope_parameters")
            && tiny.text().get("rope_scaling").is_none_or(Value::is_null)
        {
            let theta = tiny.text().remove("rope_theta");
            tiny.text().insert("rope_parameters".into(), json!({"rope_theta": theta}));
        }
        let section =
            if tiny.text().contains_key("rope_parameters") { "rope_parameters" } else { "rope_scaling" };
        tiny.text()[section]["attention_temperature\u{1b}[2J"] = json!(2.0);
        tiny.config["logit_scale"] = json!(0.5);
        let model = tiny.load().unwrap();
        let [warning] = model.warnings() else { panic!("{name}: {:?}", model.warnings()) };
        for key in ["attention_sinks", "logit_scale", "attention_temperature\\u{1b}[2J"] {
            assert!(warning.contains(key), "{name}: {warning}");
        }
        assert!(!warning.contains("auto_map"), "{warning}");
    }
}

#[test]
fn what_a_published_checkpoint_has_gives_no_warning() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut paths = vec![root.join("models/demo"), root.join("models/demo-4bit")];
    for folder in vectors("").read_dir().unwrap() {
        let folder = folder.unwrap().path();
        let gguf = folder.join("model.gguf");
        paths.extend(folder.join("config.json").is_file().then_some(folder));
        paths.extend(gguf.is_file().then_some(gguf));
    }
    assert!(paths.len() > 25);
    for path in paths {
        let warnings = warnings(&Checkpoint::open(&path).unwrap()).unwrap();
        assert_eq!(warnings, [""; 0], "{}", path.display());
    }
}

#[test]
fn overrides_adapters_and_ids_that_lead_nowhere_are_warned_of() {
    let mut tiny = Tiny::open("qwen3-mlx-4bit");
    let vocab_size = tiny.config["vocab_size"].as_u64().unwrap();
    for key in ["quantization", "quantization_config"] {
        tiny.config[key]["model.layers.77.mlp.up_proj"] = json!({"bits": 8, "group_size": 64});
    }
    tiny.files.push(("adapter_config.json", "{}".into()));
    tiny.files
        .push(("generation_config.json", json!({"eos_token_id": [1, vocab_size, 900_000]}).to_string()));
    let model = tiny.load().unwrap();
    let [overrides, adapter, ids] = model.warnings() else { panic!("{:?}", model.warnings()) };
    assert!(overrides.contains("model.layers.77.mlp.up_proj"), "{overrides}");
    assert!(adapter.contains("adapter_config.json is not applied"), "{adapter}");
    assert!(
        ids.contains(&format!("{vocab_size}, 900000")) && ids.contains(&format!("has {vocab_size}")),
        "{ids}"
    );
}

/// Values that a key might be given, of every type.
fn odd_values() -> Vec<Value> {
    vec![
        json!(null),
        json!(true),
        json!(false),
        json!(0),
        json!(-1),
        json!(3),
        json!(0.5),
        json!("x"),
        json!([1]),
        json!({}),
    ]
}

/// The tables hold: what has no effect changes nothing, what is fixed is refused, and what is
/// computed is refused or shows.
#[test]
fn each_key_does_what_its_table_says() {
    // The table of a whole has them; other code reads them.
    let unseen = [
        "max_position_embeddings",
        "model_type",
        "text_config",
        "quantization",
        "quantization_config",
        "bos_token_id",
        "eos_token_id",
    ];
    for name in HUGGING_FACE {
        let mut tiny = Tiny::open(name);
        let (_, folder) = tiny.checkpoint();
        let plain = logits(&tiny.reload(&folder).unwrap());
        let model_type = tiny.config["model_type"].as_str().unwrap().to_string();
        let (_, found) = arch::model_type(&model_type, None, arch::JsonFacts::default()).unwrap();
        for key in found.tables.iter().copied().flatten().map(|key| key.name) {
            if unseen.contains(&key) || key.ends_with("text_config") {
                continue;
            }
            // A key that all architectures have, for one of them.
            let base = keys::BASE.iter().any(|base| base.name == key);
            if base && name != "qwen3" {
                continue;
            }
            let values = odd_values().into_iter().step_by(if base { 4 } else { 1 });
            for value in values {
                let before = tiny.text().clone();
                set(key, value.clone())(tiny.text());
                let result =
                    tiny.reload(&folder).map(|model| logits(&model)).map_err(|error| error.to_string());
                *tiny.text() = before;
                match (role(found.tables, key).unwrap(), result) {
                    (Role::NoEffect, result) => {
                        assert_eq!(result.as_ref(), Ok(&plain), "{name} {key} {value}")
                    }
                    (Role::Only(values), result) => {
                        let fine = value.is_null() || values.iter().any(|fixed| fixed.is(&value));
                        assert_eq!(result.is_ok(), fine, "{name} {key} {value}");
                    }
                    (Role::Computed(_) | Role::Alias(_), Err(message)) => {
                        assert!(message.len() < 1000, "{message}");
                    }
                    (Role::Computed(_) | Role::Alias(_), Ok(_)) => {}
                }
            }
        }
    }
}
