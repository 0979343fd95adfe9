use super::{Absent, BASE, GGUF, Key, ROPE, Role, Tables, WRAPPER, role};
use crate::arch::{ARCHITECTURES, JsonFacts, model_type};
use serde_json::Value;
use std::collections::HashSet;

/// transformers' keys, as tools/peer_vectors.py lists them.
fn peers() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/config_keys/keys.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The tables of a model type; those of the whole, where that is around a `text_config`.
fn tables(name: &str) -> Tables {
    let (_, found) = model_type(name, None, JsonFacts::default())
        .unwrap_or_else(|| panic!("{name} is in no architecture"));
    if found.wraps { &[WRAPPER, BASE] } else { found.tables }
}

fn names(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().unwrap().iter().map(|name| name.as_str().unwrap())
}

#[test]
fn every_key_that_transformers_reads_is_in_a_table() {
    let peers = peers();
    let types = peers["model_types"].as_object().unwrap();
    let ours = ARCHITECTURES.iter().flat_map(|architecture| architecture.model_types);
    assert_eq!(
        ours.map(|model_type| model_type.name).collect::<HashSet<_>>(),
        types.keys().map(String::as_str).collect()
    );
    let mut missing = vec![];
    for (name, keys) in types {
        let fields = keys["fields"].as_object().unwrap().keys().map(String::as_str);
        for key in fields.chain(names(&keys["reads"])).chain(names(&peers["generation"])) {
            if role(tables(name), key).is_none() {
                missing.push(format!("{name}: {key}"));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn missing_keys_mean_what_they_mean_in_transformers() {
    let (peers, mut wrong) = (peers(), vec![]);
    for (name, keys) in peers["model_types"].as_object().unwrap() {
        for (key, default) in keys["fields"].as_object().unwrap() {
            let agrees = match role(tables(name), key).unwrap() {
                // Another file decides these, or a function that says why.
                Role::Computed(Absent::Nothing) => {
                    let decided =
                        ["tie_word_embeddings", "time_step_limit", "linear_head_dim", "linear_num_heads"];
                    default.is_null() || decided.contains(&&**key)
                }
                Role::Computed(Absent::Is(fixed) | Absent::Disputed(fixed)) => fixed.is(default),
                Role::Only(values) => default.is_null() || values.iter().any(|fixed| fixed.is(default)),
                // Refusing is right in any case.
                Role::Computed(Absent::Required) | Role::NoEffect => true,
                // As is refusing a file that has neither name.
                Role::Alias(other) => {
                    matches!(role(tables(name), other), Some(Role::Computed(Absent::Required)))
                }
            };
            // Only layers without experts need it.
            let needless = key == "intermediate_size" && name.contains("moe") || name == "qwen3_next";
            if !(agrees || needless && key == "intermediate_size") {
                wrong.push(format!("{name}: {key} is {default} there"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn tables_name_each_key_once() {
    let shadowed: HashSet<&str> = [
        "mlp_bias",
        "rope_theta",
        "feed_forward_length",
        "rms_norm_eps",
        "original_max_position_embeddings",
        "rope_traditional",
        "rope_parameters",
        "rope.scaling.finetuned",
        "num_attention_heads",
        "num_hidden_layers",
        "attention.layer_norm_rms_epsilon",
        "hidden_act",
        "per_layer_config",
        "max_position_embeddings",
        "sliding_window",
        "hidden_size_per_layer_input",
        "use_bidirectional_attention",
        "attention.causal",
        "rope_scaling",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "expert_weights_norm",
    ]
    .into();
    let check = |tables: Tables| {
        let mut seen = HashSet::new();
        for Key { name, .. } in tables.iter().copied().flatten() {
            assert!(seen.insert(*name) || shadowed.contains(name), "{name} is there twice");
        }
        for Key { name, role } in tables.iter().copied().flatten() {
            if let Role::Alias(other) = role {
                assert!(seen.contains(other), "{name} is another name of {other}, which is not there");
            }
        }
    };
    for architecture in ARCHITECTURES {
        architecture.model_types.iter().for_each(|model_type| check(model_type.tables));
        check(architecture.gguf_keys);
    }
    check(&[WRAPPER, BASE]);
    check(&[ROPE]);
    check(&[GGUF]);
}
