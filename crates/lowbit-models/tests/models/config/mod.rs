//! Effects of a configuration's keys: what transformers and mlx-lm compute is computed, anything
//! else is refused or warned of.

use crate::tiny::{Tiny, logits};
use safetensors::Dtype;
use serde_json::{Map, Value, json};

mod named;
mod tied;

const HUGGING_FACE: [&str; 7] =
    ["llama2", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"];

type Change<'a> = &'a dyn Fn(&mut Map<String, Value>);

/// The result of a changed configuration, or the refusal.
fn changed(name: &str, change: Change<'_>) -> Result<u64, String> {
    let mut tiny = Tiny::open(name);
    change(tiny.text());
    tiny.load().map(|model| logits(&model)).map_err(|error| error.to_string())
}

#[track_caller]
fn refused(name: &str, change: Change<'_>) -> String {
    changed(name, change).expect_err("it was loaded")
}

fn set<'a>(key: &'a str, value: Value) -> impl Fn(&mut Map<String, Value>) + 'a {
    move |config| drop(config.insert(key.into(), value.clone()))
}

#[test]
fn activations_other_than_silu_are_refused() {
    for name in HUGGING_FACE {
        let plain = changed(name, &|_| ()).unwrap();
        assert_eq!(changed(name, &set("hidden_act", json!("swish"))).unwrap(), plain);
        for act in
            [json!("relu"), json!("gelu"), json!("gelu_pytorch_tanh"), json!("SiLU"), json!(7), json!([])]
        {
            let message = refused(name, &set("hidden_act", act.clone()));
            assert!(
                message.contains(&format!("hidden_act is {act}")) && message.contains("silu"),
                "{message}"
            );
        }
    }
}

#[test]
fn a_quarter_of_a_head_is_rotated_where_hybrids_do_not_say_it() {
    for name in ["qwen3_next", "qwen3_5", "qwen3_5_moe"] {
        let plain = changed(name, &|_| ()).unwrap();
        let without = changed(name, &|config| {
            config.remove("partial_rotary_factor");
            if let Some(rope) = config.get_mut("rope_parameters") {
                rope.as_object_mut().unwrap().remove("partial_rotary_factor");
            }
        });
        assert_eq!(without.unwrap(), plain);
        let other = changed(name, &|config| {
            config.remove("rope_scaling");
            config.remove("partial_rotary_factor");
            config.insert("rope_parameters".into(), json!({"rope_theta": 1e7, "partial_rotary_factor": 0.5}));
        });
        assert_ne!(other.unwrap(), plain);
        for fraction in [0.0, -1.0, 1.5, 0.01] {
            let message = refused(name, &|config| {
                config.remove("partial_rotary_factor");
                config.insert(
                    "rope_parameters".into(),
                    json!({"partial_rotary_factor": fraction, "rope_theta": 1e7}),
                );
            });
            assert!(message.contains("partial_rotary_factor"), "{message}");
        }
    }
}

#[test]
fn rotary_embeddings_that_are_none_are_refused() {
    let cases = [
        (json!({"rope_parameters": "yarn"}), "rope_parameters"),
        (json!({"rope_parameters": [1]}), "rope_parameters"),
        (json!({"rope_scaling": true}), "rope_scaling"),
        (json!({"rope_parameters": {"rope_type": 7}}), "rope_type"),
        (json!({"rope_parameters": {"rope_type": ["yarn"]}}), "rope_type"),
        (json!({"rope_parameters": {"type": {}}}), "type"),
        (json!({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}), "dynamic"),
        (
            json!({"rope_parameters": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}),
            "rope_type is yarn",
        ),
        (json!({"rope_parameters": {"rope_type": "linear"}}), "factor"),
        (json!({"rope_parameters": {"rope_type": "linear", "factor": 0}}), "factor is 0"),
        (json!({"rope_parameters": {"rope_type": "linear", "factor": -2.0}}), "factor is -2"),
        (json!({"rope_parameters": {"rope_type": "linear", "factor": "2"}}), "factor"),
        (json!({"rope_parameters": {"rope_type": "yarn", "factor": 0.0}}), "factor is 0"),
        (json!({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1.0}}), "beta_fast"),
        (
            json!({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}}),
            "original_max_position_embeddings",
        ),
        (
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 0, "high_freq_factor": 4}}),
            "low_freq_factor",
        ),
        (
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 4}}),
            "high_freq_factor",
        ),
        (json!({"rope_theta": 0}), "theta"),
        (json!({"rope_theta": "1e4"}), "rope_theta"),
        (json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}), "rope_theta"),
        (
            json!({"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 1e6}}),
            "rope_scaling",
        ),
        (json!({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}), "full_attention"),
        (
            json!({"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
            "partial_rotary_factor",
        ),
    ];
    for (changes, word) in cases {
        let message = refused("qwen3", &|config| {
            ["rope_theta", "rope_scaling"].iter().for_each(|key| drop(config.remove(*key)));
            config.extend(changes.as_object().unwrap().clone());
        });
        assert!(message.contains(word), "{changes}: {message}");
    }
}

#[test]
fn what_transformers_takes_for_nothing_is_nothing() {
    let rope = |extra: Value| {
        move |config: &mut Map<String, Value>| {
            let mut rope = json!({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4});
            rope.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            config.remove("rope_theta");
            config.insert("rope_parameters".into(), rope);
            config.insert("rope_scaling".into(), Value::Null);
        }
    };
    let plain = changed("qwen3", &rope(json!({}))).unwrap();
    for same in [json!({"beta_fast": 0, "beta_slow": null}), json!({"mscale": 0, "mscale_all_dim": 1.0})] {
        assert_eq!(changed("qwen3", &rope(same)).unwrap(), plain);
    }
    assert_ne!(changed("qwen3", &rope(json!({"beta_fast": 3}))).unwrap(), plain);
    // The scaling stands in either section, and an empty one is none.
    let older = changed("qwen3", &|config| {
        rope(json!({}))(config);
        let section = config.insert("rope_parameters".into(), json!({})).unwrap();
        config.insert("rope_scaling".into(), section);
    });
    assert_eq!(older.unwrap(), plain);
}

#[test]
fn keys_that_the_peers_ignore_change_nothing() {
    let cases = [
        ("llama2", json!({"partial_rotary_factor": 0.5, "sliding_window": 3, "pretraining_tp": 2})),
        ("mistral", json!({"partial_rotary_factor": 0.5})),
        ("qwen3", json!({"partial_rotary_factor": 0.5, "sliding_window": 3})),
        ("qwen3_moe", json!({"shared_expert_intermediate_size": 64, "max_window_layers": 1})),
        ("qwen3_5_moe", json!({"norm_topk_prob": false, "decoder_sparse_step": 2, "mlp_only_layers": [0]})),
        ("qwen3_5", json!({"sliding_window": 3})),
    ];
    for (name, keys) in cases {
        // A vector of windows must not get another one.
        let same = changed(name, &|config| config.extend(keys.as_object().unwrap().clone()));
        assert_eq!(same, changed(name, &|_| ()), "{name} {keys}");
    }
    // A stretch reads the fraction, and then does not fit the heads.
    assert!(refused("llama3", &set("partial_rotary_factor", json!(0.5))).contains("whole heads"));
    // mlx-lm does not ignore this one.
    let mut tiny = Tiny::open("qwen3_5_moe-mlx-4bit");
    tiny.text().insert("norm_topk_prob".into(), json!(false));
    assert!(tiny.refused().contains("norm_topk_prob"));
}

#[test]
fn windows_are_where_transformers_has_them() {
    // All layers of Qwen3-MoE.
    let full = changed("qwen3_moe", &set("use_sliding_window", json!(false))).unwrap();
    let window = |first: usize| {
        changed("qwen3_moe", &|config| {
            config.extend(
                json!({"use_sliding_window": true, "sliding_window": 5, "max_window_layers": first})
                    .as_object()
                    .unwrap()
                    .clone(),
            );
        })
        .unwrap()
    };
    assert_ne!(window(0), full);
    assert_eq!(window(0), window(100), "max_window_layers is not read");
    // Mistral without the key has one of 4096, with null none; mlx-lm disagrees.
    let mut mistral = Tiny::open("mistral");
    let narrow = logits(&mistral.load().unwrap());
    mistral.text().remove("sliding_window");
    let wide = logits(&mistral.load().unwrap());
    assert_ne!(wide, narrow);
    mistral.text().insert("sliding_window".into(), Value::Null);
    assert_eq!(logits(&mistral.load().unwrap()), wide, "4096 is more than the prompt");
    mistral.text().remove("sliding_window");
    mistral.format = Some("mlx".into());
    let message = mistral.refused();
    assert!(message.contains("sliding_window is missing") && message.contains("4096"), "{message}");
    // Qwen3's layer types.
    let types = |types: Value, on: bool| {
        changed("qwen3", &|config| {
            config.extend(
                json!({"layer_types": types, "use_sliding_window": on, "sliding_window": 5})
                    .as_object()
                    .unwrap()
                    .clone(),
            );
        })
    };
    let full = json!(["full_attention", "attention", "full_attention"]);
    assert_eq!(types(full, false), changed("qwen3", &set("use_sliding_window", json!(false))));
    let sliding = json!(["full_attention", "sliding_attention", "full_attention"]);
    assert!(types(sliding.clone(), true).is_ok());
    assert!(types(sliding, false).unwrap_err().contains("layer_types[1] is sliding_attention"));
    for (bad, word) in [
        (json!(["full_attention"]), "num_hidden_layers is 3"),
        (json!(["full_attention", "chunked_attention", "full_attention"]), "chunked_attention"),
        (json!(["full_attention", 3, "full_attention"]), "layer_types[1] is 3"),
        (json!("full_attention"), "a list is wanted"),
    ] {
        let message = types(bad, false).unwrap_err();
        assert!(message.contains(word), "{message}");
    }
    for name in ["llama3", "mistral", "qwen3_moe"] {
        let layers = Tiny::open(name).config["num_hidden_layers"].as_u64().unwrap() as usize;
        let message = refused(name, &set("layer_types", json!(vec!["sliding_attention"; layers])));
        assert!(message.contains("layer_types[0]"), "{message}");
    }
}

#[test]
fn a_missing_key_has_transformers_default() {
    for (name, key, default) in [
        ("llama3", "rms_norm_eps", json!(1e-6)),
        ("qwen3", "rms_norm_eps", json!(1e-6)),
        ("qwen3_5", "rms_norm_eps", json!(1e-6)),
        ("qwen3_next", "norm_topk_prob", json!(true)),
        ("qwen3_moe", "norm_topk_prob", json!(false)),
        ("qwen3_moe", "decoder_sparse_step", json!(1)),
    ] {
        let without = changed(name, &|config| drop(config.remove(key)));
        assert_eq!(without, changed(name, &set(key, default)), "{name} {key}");
    }
    let mut tiny = Tiny::open("qwen3");
    tiny.text().remove("max_position_embeddings");
    assert_eq!(tiny.load().unwrap().config().max_position_embeddings, 32768);
    for (name, key, size) in [
        ("qwen3", "head_dim", "128"),
        ("qwen3_next", "shared_expert_intermediate_size", "512"),
        ("qwen3_next", "linear_key_head_dim", "128"),
    ] {
        let message = refused(name, &|config| drop(config.remove(key)));
        assert!(message.contains("tensor"), "{size}: {message}");
    }
    // The same model, if mlx-lm made it: its default is another one.
    let mut tiny = Tiny::open("qwen3_next-mlx-4bit");
    tiny.text().remove("norm_topk_prob");
    assert!(tiny.refused().contains("norm_topk_prob is missing"));
    // Another name of the number of experts.
    let renamed = changed("qwen3_moe", &|config| {
        let experts = config.remove("num_experts").unwrap();
        config.insert("num_local_experts".into(), experts);
    });
    assert_eq!(renamed, changed("qwen3_moe", &|_| ()));
    assert!(refused("qwen3_moe", &set("num_local_experts", json!(3))).contains("num_local_experts"));
}

#[test]
fn groups_of_experts_are_those_that_the_experts_make() {
    for (key, value, want) in [
        ("n_group", json!(3), "n_group is 3, but 8 experts make no such groups"),
        ("n_group", json!(8), "n_group is 8, but 8 experts make no such groups"),
        ("topk_group", json!(1), "topk_group is 1, but 3 experts are chosen in 1 to 4 groups of 2"),
        ("topk_group", json!(5), "topk_group is 5, but 3 experts are chosen in 1 to 4 groups of 2"),
        ("scoring_func", json!("softmax"), "scoring_func is \"softmax\""),
        ("n_shared_experts", json!(0), "n_shared_experts is 0"),
    ] {
        let message = refused("glm4_moe", &set(key, value));
        assert!(message.contains(want), "{message}");
    }
    // All groups are none.
    let all = changed("glm4_moe", &set("topk_group", json!(4))).unwrap();
    let none = changed("glm4_moe", &|config| {
        config.insert("n_group".into(), json!(1));
        config.insert("topk_group".into(), json!(1));
    });
    assert_eq!(all, none.unwrap());
    assert_ne!(all, changed("glm4_moe", &|_| ()).unwrap());
}

#[test]
fn layers_of_lfm2_are_those_that_both_keys_say() {
    let plain = changed("lfm2", &|_| ()).unwrap();
    assert_eq!(changed("lfm2", &set("full_attn_idxs", json!([1]))).unwrap(), plain);
    let message = refused("lfm2", &set("full_attn_idxs", json!([0, 1])));
    assert!(
        message.contains("full_attn_idxs is [0, 1], but layer_types says that layer 0 does not"),
        "{message}"
    );
    let indices = changed("lfm2", &|config| {
        config.remove("layer_types");
        config.insert("full_attn_idxs".into(), json!([1]));
    });
    assert_eq!(indices.unwrap(), plain);
    for (name, key, value, want) in [
        ("lfm2", "conv_bias", json!(true), "conv_bias is true"),
        ("lfm2", "tie_embedding", json!(false), "tie_embedding is false"),
        ("lfm2", "block_ffn_dim_multiplier", json!(-1.0), "it leaves no MLP"),
        ("lfm2", "head_dim", json!(8), "num_attention_heads * head_dim is 32"),
        ("lfm2_moe", "layer_types", json!(null), "layer_types is missing"),
    ] {
        let message = refused(name, &set(key, value));
        assert!(message.contains(want), "{message}");
    }
}

#[test]
fn biases_are_those_that_the_flags_promise() {
    for key in ["attention_bias", "mlp_bias"] {
        let message = refused("llama-bias", &set(key, json!(false)));
        assert!(message.contains(key) && message.contains("bias"), "{message}");
        let message = refused("llama3", &set(key, json!(true)));
        assert!(message.contains(".bias") && message.contains("missing"), "{message}");
    }
    for (name, bias) in [
        ("mistral", "model.layers.0.self_attn.q_proj.bias"),
        ("qwen3", "model.layers.1.mlp.down_proj.bias"),
        ("qwen3_moe", "model.layers.2.mlp.gate.bias"),
        ("qwen3_5", "lm_head.bias"),
        ("qwen3_next", "model.layers.0.linear_attn.out_proj.bias"),
    ] {
        let mut tiny = Tiny::open(name);
        let rows = tiny.tensor(&bias.replace(".bias", ".weight")).1[0];
        tiny.tensors.insert(bias.into(), (Dtype::F32, vec![rows], vec![0; 4 * rows]));
        let message = tiny.refused();
        assert!(message.contains(bias), "{message}");
    }
}
