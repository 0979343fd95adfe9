//! Effects of a configuration's keys: what transformers and mlx-lm compute is computed, anything
//! else is refused or warned of.

use lowbit_files::Checkpoint;
use lowbit_models::keys::{self, Role, role};
use lowbit_models::{arch, warnings};
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use std::path::Path;
use tiny::{Tiny, logits, vectors};

#[path = "support/tiny.rs"]
mod tiny;

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

/// A second output layer, that differs from the embedding or not.
fn with_head_of(tiny: &mut Tiny, part: &str, differs: bool) {
    let embedding = format!("embed_tokens.{part}");
    let embedding = tiny.tensors.iter().find(|(name, _)| name.ends_with(&embedding)).unwrap();
    let mut head = embedding.1.clone();
    if differs {
        head.2.reverse();
    }
    tiny.tensors.insert(format!("lm_head.{part}"), head);
}

#[test]
fn an_output_layer_beside_the_tied_embedding_is_used_only_if_it_is_the_same() {
    let plain = changed("llama3", &|_| ()).unwrap();
    for format in ["pt", "mlx"] {
        let mut tiny = Tiny::open("llama3");
        tiny.format = Some(format.into());
        with_head_of(&mut tiny, "weight", false);
        assert_eq!(logits(&tiny.load().unwrap()), plain);
        with_head_of(&mut tiny, "weight", true);
        let message = tiny.refused();
        assert!(
            message.contains("tie_word_embeddings is true") && message.contains("lm_head.weight"),
            "{message}"
        );
        tiny.text().insert("tie_word_embeddings".into(), json!(false));
        assert_ne!(logits(&tiny.load().unwrap()), plain);
        // Without the key mlx-lm ties Llama's; transformers does not.
        tiny.text().remove("tie_word_embeddings");
        assert_eq!(tiny.load().is_err(), format == "mlx");
    }
    let message = refused("llama3", &set("tie_word_embeddings", json!(false)));
    assert!(message.contains("lm_head.weight is missing"), "{message}");
}

/// Codes that are equal say nothing of weights whose scales are not.
#[test]
fn a_quantized_output_layer_is_the_embedding_only_with_its_scales() {
    let plain = changed("qwen3-mlx-4bit", &|_| ()).unwrap();
    let mut tiny = Tiny::open("qwen3-mlx-4bit");
    for part in ["weight", "scales", "biases"] {
        with_head_of(&mut tiny, part, false);
    }
    assert_eq!(logits(&tiny.load().unwrap()), plain);
    with_head_of(&mut tiny, "scales", true);
    assert!(tiny.refused().contains("tie_word_embeddings is true"));
}

#[test]
fn a_multimodal_model_is_tied_as_its_whole_says() {
    let load = |whole: Option<bool>, text: Option<bool>, head: bool, format: &str| {
        let mut tiny = Tiny::open("qwen3_5");
        tiny.format = Some(format.into());
        if format == "mlx" {
            make_mlx(&mut tiny);
        }
        if !head {
            tiny.tensors.remove("lm_head.weight");
        }
        tiny.config.as_object_mut().unwrap().remove("tie_word_embeddings");
        tiny.text().remove("tie_word_embeddings");
        if let Some(flag) = text {
            tiny.text().insert("tie_word_embeddings".into(), json!(flag));
        }
        if let Some(flag) = whole {
            tiny.config["tie_word_embeddings"] = json!(flag);
        }
        tiny.load().map(|model| model.config().tie_word_embeddings).map_err(|error| error.to_string())
    };
    for (whole, text, head, format, want) in [
        (Some(false), Some(true), true, "pt", Some(false)),
        (None, Some(true), true, "pt", Some(false)),
        (None, None, true, "pt", Some(false)),
        (Some(true), Some(false), true, "pt", None),
        (Some(true), Some(false), false, "pt", Some(true)),
        (Some(true), None, false, "pt", Some(true)),
        (None, None, false, "pt", None),
        (Some(false), Some(true), true, "mlx", None),
        (Some(true), Some(false), true, "mlx", Some(false)),
        (Some(false), Some(true), false, "mlx", Some(true)),
    ] {
        let got = load(whole, text, head, format);
        assert_eq!(got.clone().ok(), want, "{whole:?} {text:?} head {head} {format}: {got:?}");
    }
}

/// As mlx-lm stores a hybrid, but not quantised: norms with 1 added, convolutions turned.
fn make_mlx(tiny: &mut Tiny) {
    tiny.format = Some("mlx".into());
    let norms = [
        "layernorm.weight",
        "model.norm.weight",
        "language_model.norm.weight",
        "q_norm.weight",
        "k_norm.weight",
    ];
    for (name, (dtype, shape, bytes)) in &mut tiny.tensors {
        if name.ends_with("conv1d.weight") {
            shape.swap(1, 2);
        }
        if name.contains("visual") || !norms.iter().any(|norm| name.ends_with(norm)) {
            continue;
        }
        let values: Vec<f32> = match dtype {
            Dtype::F32 => {
                bytes.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect()
            }
            Dtype::BF16 => bytes
                .chunks_exact(2)
                .map(|value| f32::from_bits(u32::from(u16::from_le_bytes(value.try_into().unwrap())) << 16))
                .collect(),
            other => panic!("a norm of {other:?}"),
        };
        *bytes = values.iter().flat_map(|value| (value + 1.0).to_le_bytes()).collect();
        *dtype = Dtype::F32;
    }
}

/// Only the layers of full attention, so that nothing but the checkpoint's kind says how norms are
/// stored.
fn attention_only(name: &str) -> Tiny {
    let mut tiny = Tiny::open(name);
    let full = {
        let names: Vec<String> = tiny.tensors.keys().cloned().collect();
        let layer =
            names.iter().find(|name| name.contains("layers.") && name.contains(".self_attn.q_proj")).unwrap();
        layer.split("layers.").nth(1).unwrap().split('.').next().unwrap().to_string()
    };
    tiny.tensors = std::mem::take(&mut tiny.tensors)
        .into_iter()
        .filter(|(name, _)| {
            !name.contains(".layers.")
                || name.contains("visual")
                || name.contains(&format!(".layers.{full}."))
        })
        .map(|(name, tensor)| (name.replace(&format!(".layers.{full}."), ".layers.0."), tensor))
        .collect();
    tiny.text().insert("num_hidden_layers".into(), json!(1));
    tiny.text().insert("layer_types".into(), json!(["full_attention"]));
    tiny
}

#[test]
fn the_kind_of_checkpoint_says_how_norms_are_stored() {
    for name in ["qwen3_next", "qwen3_5", "qwen3_5_moe"] {
        for open in [Tiny::open, attention_only] {
            let mut tiny = open(name);
            let published = logits(&tiny.load().unwrap());
            make_mlx(&mut tiny);
            assert_eq!(logits(&tiny.load().unwrap()), published, "{name}");
            // The same tensors under the other kind are another model, or none.
            tiny.format = Some("pt".into());
            match tiny.load() {
                Ok(model) => assert_ne!(logits(&model), published, "{name}"),
                Err(error) => assert!(error.to_string().contains("conv1d"), "{error}"),
            }
        }
    }
}

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
        let (_, found) = arch::model_type(&model_type, None).unwrap();
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
