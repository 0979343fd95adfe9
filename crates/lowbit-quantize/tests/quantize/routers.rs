//! Families between layouts: GLM-4.5, LFM2 and MiniMax-M2 (experts chosen by sigmoids with a bias,
//! dense layers before them, short convolutions), Olmo, EXAONE and Hunyuan (norms in other places),
//! Gemma (windows, caps, heads of two sizes).

use crate::support::layouts::{apart, changed, logits, plain};
use lowbit_files::{Checkpoint, Stored};
use lowbit_formats::DType;
use lowbit_quantize::{Mix, MlxFormat, Recipe, Summary};
use serde_json::{Value, json};
use std::ops::ControlFlow::Continue;
use std::path::Path;

fn to(source: &Path, output: &Path, recipe: &Recipe<'_>) -> Result<Summary, String> {
    let made = recipe.run(&Checkpoint::open(source).unwrap(), output, |_| Continue(()));
    made.map(|made| made.summary).map_err(|error| error.to_string())
}

fn gguf() -> Recipe<'static> {
    Recipe::new(Mix::from_name("F32").unwrap())
}

#[track_caller]
fn every_layout_computes_the_same(name: &str, change: impl FnOnce(&mut Value)) -> Vec<String> {
    let (folder, source) = changed(name, change);
    let made = |name: &str| folder.path().join(name);
    let want = logits(&source);
    let summary = to(&source, &made("a.gguf"), &gguf()).unwrap();
    to(&source, &made("b"), &plain()).unwrap();
    to(&made("a.gguf"), &made("c"), &plain()).unwrap();
    to(&made("c"), &made("d.gguf"), &gguf()).unwrap();
    for name in ["a.gguf", "b", "c", "d.gguf"] {
        let apart = apart(&want, &logits(&made(name)));
        assert!(apart <= 1e-5, "{name} is {apart} apart");
    }
    summary.warnings
}

#[test]
fn glm_4_5() {
    let warnings = every_layout_computes_the_same("glm4_moe", |_| ());
    let left_out = |warning: &String| {
        warning.contains("of the layers of multi-token prediction (model.layers.3.")
            && warning.contains("left out")
    };
    assert!(warnings.iter().any(left_out), "{warnings:?}");
    every_layout_computes_the_same("glm4_moe", |config| {
        config["n_group"] = 1.into();
        config["topk_group"] = 1.into();
        config["norm_topk_prob"] = false.into();
        config["routed_scaling_factor"] = 1.into();
    });
}

#[test]
fn latent_attention() {
    for name in ["glm4_moe_lite", "deepseek_v3"] {
        let warnings = every_layout_computes_the_same(name, |_| ());
        assert!(warnings.iter().all(|warning| warning.contains("multi-token prediction")), "{warnings:?}");
        // mlx-lm has the projections from latents per head.
        let (folder, source) = changed(name, |_| ());
        let made = folder.path().join("made");
        to(&source, &made, &plain()).unwrap();
        let checkpoint = Checkpoint::open(&made).unwrap();
        let shape = |module: &str| {
            let found = checkpoint.tensors().get(&format!("model.layers.1.self_attn.{module}.weight"));
            found.map(|view| view.shape.clone())
        };
        let sizes = ["num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"];
        let [heads, rank, keys, values] =
            sizes.map(|key| checkpoint.config().unwrap()[key].as_u64().unwrap() as usize);
        assert_eq!(shape("embed_q"), Some(vec![heads, rank, keys]));
        assert_eq!(shape("unembed_out"), Some(vec![heads, values, rank]));
        assert_eq!(shape("kv_b_proj"), None);
    }
    every_layout_computes_the_same("deepseek_v3", |config| {
        config["n_group"] = 1.into();
        config["topk_group"] = 1.into();
        config["rope_scaling"] = Value::Null;
    });
    every_layout_computes_the_same("glm4_moe_lite", |config| {
        config["mlp_layer_types"] = json!(["dense", "sparse", "sparse"]);
    });
    // llama.cpp scales what is not rotated by the rotary embedding's own factor, too.
    let (folder, source) = changed("deepseek_v3", |config| config["rope_scaling"]["mscale"] = 0.5.into());
    let error = to(&source, &folder.path().join("made.gguf"), &gguf()).unwrap_err();
    assert!(error.contains("factor"), "{error}");
    let linear = json!({"type": "linear", "factor": 2.0});
    let (folder, source) = changed("deepseek_v3", |config| config["rope_scaling"] = linear);
    to(&source, &folder.path().join("made"), &plain()).unwrap();
    let error = to(&source, &folder.path().join("made.gguf"), &gguf()).unwrap_err();
    assert!(error.contains("attention scale"), "{error}");
    // Neighbours make pairs there.
    let (folder, source) = changed("deepseek_v3", |config| config["rope_interleave"] = false.into());
    let error = to(&source, &folder.path().join("made"), &plain()).unwrap_err();
    assert!(error.contains("rotated pairs"), "{error}");
}

#[test]
fn kimi_delta_attention() {
    // Another eps would be that of some norms alone in transformers.
    let warnings =
        every_layout_computes_the_same("kimi_linear", |config| config["rms_norm_eps"] = 1e-6.into());
    assert_eq!(warnings, [""; 0]);
    every_layout_computes_the_same("kimi_linear", |config| {
        config["rms_norm_eps"] = 1e-6.into();
        config["num_expert_group"] = 4.into();
        config["topk_group"] = 2.into();
        config["layer_types"] =
            json!(["linear_attention", "linear_attention", "full_attention", "linear_attention"]);
    });
    let (folder, source) = changed("kimi_linear", |config| config["moe_renormalize"] = false.into());
    to(&source, &folder.path().join("made"), &plain()).unwrap();
    let error = to(&source, &folder.path().join("made.gguf"), &gguf()).unwrap_err();
    assert!(error.contains("expert_weights_norm"), "{error}");
    // As mlx-lm names them.
    let checkpoint = Checkpoint::open(&folder.path().join("made")).unwrap();
    let config = checkpoint.config().unwrap();
    assert_eq!(config["linear_attn_config"]["kda_layers"], json!([1, 2, 4]));
    assert_eq!((&config["num_experts_per_token"], &config["moe_renormalize"]), (&json!(3), &json!(false)));
    assert_eq!(config.get("num_experts_per_tok"), None);
    let shape = |name: &str| {
        let found = checkpoint.tensors().get(&format!("model.layers.1.{name}"));
        found.map(|view| view.shape.clone())
    };
    assert_eq!(shape("self_attn.q_conv.conv.weight"), Some(vec![96, 4, 1]));
    assert_eq!(shape("self_attn.A_log"), Some(vec![1, 1, 3, 1]));
    assert_eq!(shape("mlp.e_score_correction_bias"), Some(vec![8]));
    assert_eq!(shape("mlp.shared_experts.up_proj.weight"), Some(vec![32, 64]));

    let warnings = every_layout_computes_the_same("bailing_hybrid", |_| ());
    assert!(warnings.iter().all(|warning| warning.contains("multi-token prediction")), "{warnings:?}");
    every_layout_computes_the_same("bailing_hybrid", |config| {
        config["kda_lower_bound"] = (-2.5).into();
        config["n_group"] = 1.into();
        config["topk_group"] = 1.into();
    });
    // mlx-lm and llama.cpp compute a decay with a bound alone.
    let (folder, source) = changed("bailing_hybrid", |config| config["kda_safe_gate"] = false.into());
    let warnings = to(&source, &folder.path().join("made"), &plain()).unwrap().warnings;
    assert!(warnings.iter().any(|warning| warning.contains("kda_safe_gate")), "{warnings:?}");
    let error = to(&source, &folder.path().join("made.gguf"), &gguf()).unwrap_err();
    assert!(error.contains("kda_safe_gate"), "{error}");
}

#[test]
fn deepseek_v2() {
    let (folder, source) = changed("deepseek_v2", |config| {
        config["topk_method"] = "greedy".into();
    });
    let made = |name: &str| folder.path().join(name);
    let want = logits(&source);
    to(&source, &made("a.gguf"), &gguf()).unwrap();
    to(&source, &made("b"), &plain()).unwrap();
    to(&made("b"), &made("c.gguf"), &gguf()).unwrap();
    to(&made("a.gguf"), &made("d"), &plain()).unwrap();
    for name in ["a.gguf", "b", "c.gguf", "d"] {
        let apart = apart(&want, &logits(&made(name)));
        assert!(apart <= 1e-5, "{name} is {apart} apart");
    }
    // llama.cpp takes other groups than transformers and mlx-lm.
    let (_folder, source) = changed("deepseek_v2", |_| ());
    to(&source, &made("e"), &plain()).unwrap();
    assert!(apart(&logits(&source), &logits(&made("e"))) <= 1e-5);
    let error = to(&source, &made("f.gguf"), &gguf()).unwrap_err();
    assert!(error.contains("expert_group_count"), "{error}");
}

#[test]
fn norms_of_latents_with_another_eps_are_named() {
    let (folder, source) = changed("glm4_moe_lite", |config| config["rms_norm_eps"] = 1e-5.into());
    for (output, recipe, peer) in [("made", plain(), "mlx-lm"), ("made.gguf", gguf(), "llama.cpp")] {
        let summary = to(&source, &folder.path().join(output), &recipe).unwrap();
        let want = format!("{peer} adds 0.00001 in the norms of compressed queries");
        assert!(summary.warnings.iter().any(|text| text.contains(&want)), "{:?}", summary.warnings);
    }
    // A GGUF file with it is GLM's in MLX's layout, since DeepSeek V3's cannot say it.
    let made = folder.path().join("again");
    let summary = to(&folder.path().join("made.gguf"), &made, &plain()).unwrap();
    assert!(!summary.warnings.iter().any(|text| text.contains("in the norms")), "{:?}", summary.warnings);
    assert_eq!(Checkpoint::open(&made).unwrap().config().unwrap()["model_type"], "glm4_moe_lite");
}

#[test]
fn lfm2() {
    every_layout_computes_the_same("lfm2", |_| ());
    every_layout_computes_the_same("lfm2", |config| {
        config["full_attn_idxs"] = json!([1]);
        config.as_object_mut().unwrap().remove("layer_types");
    });
    every_layout_computes_the_same("lfm2_moe", |_| ());
}

#[test]
fn granite_hybrid() {
    let warnings = every_layout_computes_the_same("granite_hybrid", |_| ());
    assert!(warnings.is_empty(), "{warnings:?}");
    let (folder, source) = changed("granite_hybrid", |_| ());
    let made = folder.path().join("made");
    to(&source, &made, &plain()).unwrap();
    let checkpoint = Checkpoint::open(&made).unwrap();
    for name in ["mamba.in_proj.weight", "mlp.gate_proj.weight", "mlp.down_proj.weight"] {
        assert!(checkpoint.tensors().get(&format!("model.layers.0.{name}")).is_some(), "{name}");
    }
    // mlx-lm takes other limits where it finds none.
    let config = checkpoint.config().unwrap();
    assert_eq!(config["time_step_limit"][0], json!(0.0));
    assert_eq!(config["layer_types"], json!(["mamba", "attention", "mamba"]));
    // GGUF has no limits.
    let (folder, source) = changed("granite_hybrid", |config| config["time_step_limit"] = json!([0.01, 0.2]));
    let error = to(&source, &folder.path().join("made.gguf"), &gguf()).unwrap_err();
    assert!(error.contains("time_step_limit"), "{error}");
}

#[test]
fn granite_hybrid_with_experts() {
    every_layout_computes_the_same("granite_hybrid_moe", |_| ());
    let (folder, source) = changed("granite_hybrid_moe", |_| ());
    let made = folder.path().join("made");
    let summary = to(&source, &made, &plain()).unwrap();
    assert!(summary.warnings.iter().any(|warning| warning.contains("all groups together")));
    let checkpoint = Checkpoint::open(&made).unwrap();
    let names =
        ["block_sparse_moe.router.layer", "block_sparse_moe.switch_mlp.up_proj", "shared_mlp.input_linear"];
    for name in names.map(|name| format!("model.layers.1.{name}.weight")) {
        assert!(checkpoint.tensors().get(&name).is_some(), "{name}");
    }
}

#[test]
fn nemotron_h() {
    let warnings = every_layout_computes_the_same("nemotron_h", |_| ());
    assert!(warnings.is_empty(), "{warnings:?}");
    every_layout_computes_the_same("nemotron_h_moe", |_| ());
    every_layout_computes_the_same("nemotron_h_moe", |config| {
        config.as_object_mut().unwrap().remove("hybrid_override_pattern");
        config["layers_block_type"] = json!(["mamba", "moe", "attention", "moe"]);
    });
    let (folder, source) = changed("nemotron_h_moe", |_| ());
    let made = folder.path().join("made");
    to(&source, &made, &plain()).unwrap();
    let checkpoint = Checkpoint::open(&made).unwrap();
    for name in ["norm_f.weight", "embeddings.weight", "layers.1.mixer.switch_mlp.fc1.weight"] {
        assert!(checkpoint.tensors().get(&format!("backbone.{name}")).is_some(), "{name}");
    }
    assert_eq!(checkpoint.config().unwrap()["hybrid_override_pattern"], json!("ME*E"));
    // A list of the layers and their number, or two lists, that say different things.
    for (key, value) in [("num_hidden_layers", json!(5)), ("layers_block_type", json!(["moe"]))] {
        let (folder, source) = changed("nemotron_h_moe", |config| config[key] = value);
        let error = to(&source, &folder.path().join("made"), &plain()).unwrap_err();
        assert!(error.contains("hybrid_override_pattern") || error.contains(key), "{error}");
    }
}

#[test]
fn minimax_m2() {
    let warnings = every_layout_computes_the_same("minimax_m2", |_| ());
    assert!(warnings.is_empty(), "{warnings:?}");
    let (folder, source) = changed("minimax_m2", |_| ());
    let made = folder.path().join("made");
    to(&source, &made, &plain()).unwrap();
    let checkpoint = Checkpoint::open(&made).unwrap();
    let names = ["e_score_correction_bias", "gate.weight", "switch_mlp.up_proj.weight"];
    for name in names.map(|name| format!("model.layers.1.block_sparse_moe.{name}")) {
        assert!(checkpoint.tensors().get(&name).is_some(), "{name}");
    }
    // mlx-lm wants these keys.
    let config = checkpoint.config().unwrap();
    assert_eq!([&config["rotary_dim"], &config["shared_intermediate_size"]], [&json!(12), &json!(0)]);
}

#[test]
fn olmo() {
    let warnings = every_layout_computes_the_same("olmo2", |_| ());
    assert!(warnings.is_empty(), "{warnings:?}");
    every_layout_computes_the_same("olmo3", |_| ());
    every_layout_computes_the_same("olmo3", |config| {
        config["layer_types"] = json!(["full_attention", "sliding_attention", "full_attention"]);
    });
    // Without a window in any layer, it is Olmo 2 but for its configuration.
    every_layout_computes_the_same("olmo3", |config| {
        config["layer_types"] = json!(["full_attention", "full_attention", "full_attention"]);
    });
    // mlx-lm and llama.cpp have one base for both kinds of layers.
    let (folder, source) = changed("olmo3", |config| {
        let config = config.as_object_mut().unwrap();
        config.remove("rope_scaling");
        let of = |theta: f64| json!({"rope_type": "default", "rope_theta": theta});
        let both = json!({"full_attention": of(1e6), "sliding_attention": of(1e4)});
        config.insert("rope_parameters".into(), both);
    });
    for (output, recipe, peer) in [("made", plain(), "mlx-lm"), ("made.gguf", gguf(), "frequencies")] {
        let error = to(&source, &folder.path().join(output), &recipe).unwrap_err();
        assert!(error.contains(peer), "{error}");
    }
}

#[test]
fn exaone_4() {
    // Without windows, as the smaller model.
    let all_full = |config: &mut Value| {
        config["layer_types"] = json!(["full_attention", "full_attention", "full_attention"]);
        config["sliding_window"] = Value::Null;
        config["sliding_window_pattern"] = Value::Null;
    };
    every_layout_computes_the_same("exaone4", all_full);
    let (folder, source) = changed("exaone4", |_| ());
    let made = folder.path().join("made");
    to(&source, &made, &plain()).unwrap();
    let apart = apart(&logits(&source), &logits(&made));
    assert!(apart <= 1e-6, "{apart}");
    let config = Checkpoint::open(&made).unwrap().config().unwrap().clone();
    assert_eq!(config["sliding_window_pattern"], json!("LLG"));
    // llama.cpp has windows in the 32B alone, by its number of layers.
    let error = to(&source, &folder.path().join("made.gguf"), &gguf()).unwrap_err();
    assert!(error.contains("64 layers alone; this one has 3"), "{error}");
    // mlx-lm reads the pattern alone.
    let mut other = config;
    other["sliding_window_pattern"] = json!("LGG");
    std::fs::write(made.join("config.json"), other.to_string()).unwrap();
    let error = to(&made, &folder.path().join("other"), &plain()).unwrap_err();
    assert!(error.contains("sliding_window_pattern") && error.contains("layer_types"), "{error}");
}

#[test]
fn hunyuan() {
    let warnings = every_layout_computes_the_same("hunyuan", |_| ());
    assert!(warnings.is_empty(), "{warnings:?}");
    every_layout_computes_the_same("hunyuan", |config| config["rope_scaling"] = Value::Null);
}

#[test]
fn gemma_2() {
    let warnings = every_layout_computes_the_same("gemma2", |_| ());
    assert!(warnings.is_empty(), "{warnings:?}");
    // Windows elsewhere, and another base.
    every_layout_computes_the_same("gemma2", |config| {
        config["layer_types"] = json!(["full_attention", "full_attention", "sliding_attention"]);
        config["rope_theta"] = json!(500.0);
        config["attn_logit_softcapping"] = json!(0.5);
    });
    let (folder, source) = changed("gemma2", |_| ());
    let made = folder.path().join("made");
    let warnings = to(&source, &made, &plain()).unwrap().warnings;
    assert!(warnings.iter().any(|warning| warning.contains("attends to all tokens before")), "{warnings:?}");
    let checkpoint = Checkpoint::open(&made).unwrap();
    let config = checkpoint.config().unwrap();
    for (key, want) in [
        ("attn_logit_softcapping", json!(2.0)),
        ("final_logit_softcapping", json!(12.0)),
        ("query_pre_attn_scalar", json!(24)),
        ("layer_types", json!(["sliding_attention", "full_attention", "sliding_attention"])),
    ] {
        assert_eq!(config[key], want, "{key}");
    }
    // llama.cpp cannot do without a cap, nor with another factor of scores.
    for (key, value, want) in [
        ("attn_logit_softcapping", Value::Null, "softcap of scores"),
        ("final_logit_softcapping", Value::Null, "softcap of logits"),
        ("query_pre_attn_scalar", json!(100), "attention scale"),
    ] {
        let (folder, source) = changed("gemma2", |config| config[key] = value);
        let error = to(&source, &folder.path().join("a.gguf"), &gguf()).unwrap_err();
        assert!(error.contains(want), "{error}");
        let warnings = to(&source, &folder.path().join("b"), &plain()).unwrap().warnings;
        let told = warnings.iter().any(|warning| warning.contains(&format!("mlx-lm wants {key}")));
        assert_eq!(told, key.ends_with("softcapping"), "{warnings:?}");
    }
}

#[test]
fn gemma_4() {
    let warnings = every_layout_computes_the_same("gemma4", |_| ());
    assert!(warnings.is_empty(), "{warnings:?}");
    // No pair is left as it is, and no cap.
    every_layout_computes_the_same("gemma4", |config| {
        config["rope_parameters"]["full_attention"] = json!({"rope_type": "default", "rope_theta": 5e5});
        config["final_logit_softcapping"] = Value::Null;
    });
    every_layout_computes_the_same("gemma4", |config| {
        let full = &mut config["rope_parameters"]["full_attention"];
        (full["partial_rotary_factor"], full["factor"]) = (json!(0.5), json!(2.0));
    });
    let (folder, source) = changed("gemma4", |config| {
        config.as_object_mut().unwrap().remove("global_head_dim");
        config["per_layer_config"] = json!({"2": {"head_dim": 48, "num_key_value_heads": 1}});
    });
    let made = folder.path().join("made");
    to(&source, &made, &plain()).unwrap();
    let checkpoint = Checkpoint::open(&made).unwrap();
    let config = checkpoint.config().unwrap();
    for (key, want) in [
        ("head_dim", json!(24)),
        ("global_head_dim", json!(48)),
        ("num_global_key_value_heads", json!(1)),
        ("per_layer_config", Value::Null),
        // mlx-lm's defaults are others.
        ("num_kv_shared_layers", json!(0)),
        ("use_double_wide_mlp", json!(false)),
    ] {
        assert_eq!(config[key], want, "{key}");
    }
    // mlx-lm takes a cap of 30 where none is named.
    let mut other = config.clone();
    other.as_object_mut().unwrap().remove("final_logit_softcapping");
    std::fs::write(made.join("config.json"), other.to_string()).unwrap();
    let error = to(&made, &folder.path().join("other"), &plain()).unwrap_err();
    assert!(error.contains("final_logit_softcapping is missing"), "{error}");
}

#[test]
fn gemma_4_with_experts() {
    let warnings = every_layout_computes_the_same("gemma4_moe", |_| ());
    assert!(warnings.is_empty(), "{warnings:?}");
    let (folder, source) = changed("gemma4_moe", |_| ());
    let made = folder.path().join("made");
    to(&source, &made, &plain()).unwrap();
    let checkpoint = Checkpoint::open(&made).unwrap();
    for name in ["experts.switch_glu.up_proj.weight", "router.proj.weight", "router.per_expert_scale"] {
        assert!(checkpoint.tensors().get(&format!("model.layers.1.{name}")).is_some(), "{name}");
    }
    let config = checkpoint.config().unwrap();
    assert_eq!([&config["top_k_experts"], &config["enable_moe_block"]], [&json!(2), &json!(true)]);
    assert!(config.get("num_experts_per_tok").is_none());
}

#[test]
fn small_gemma_4() {
    let warnings = every_layout_computes_the_same("gemma4_small", |_| ());
    assert!(warnings.is_empty(), "{warnings:?}");
    let (folder, source) = changed("gemma4_small", |_| ());
    let made = folder.path().join("made");
    to(&source, &folder.path().join("made.gguf"), &gguf()).unwrap();
    to(&folder.path().join("made.gguf"), &made, &plain()).unwrap();
    let checkpoint = Checkpoint::open(&made).unwrap();
    let config = checkpoint.config().unwrap();
    for (key, want) in [
        ("num_kv_shared_layers", json!(2)),
        ("hidden_size_per_layer_input", json!(32)),
        ("vocab_size_per_layer_input", json!(317)),
        ("use_double_wide_mlp", json!(true)),
        ("intermediate_size", json!(96)),
    ] {
        assert_eq!(config[key], want, "{key}");
    }
}

/// mlx-lm has GLM's routers in a class of their own, and LFM2's in a linear layer.
#[test]
fn routers_that_mlx_lm_does_not_quantise() {
    let to_4_bits = Recipe::new(MlxFormat::new("affine", 4, 32));
    let names_of = |name: &str| {
        let (folder, source) = changed(name, |_| ());
        let output = folder.path().join("made");
        to(&source, &output, &to_4_bits).unwrap();
        let made = Checkpoint::open(&output).unwrap();
        let tensors = made.tensors();
        let stored = |name: &str| tensors.get(name).map(|view| view.stored);
        (
            folder,
            stored("model.layers.1.mlp.gate.scales"),
            [
                stored("model.layers.1.mlp.gate.weight"),
                stored("model.layers.1.mlp.gate.e_score_correction_bias"),
                stored("model.layers.1.feed_forward.gate.scales"),
                stored("model.layers.1.feed_forward.expert_bias"),
                stored("model.layers.1.feed_forward.switch_mlp.up_proj.scales"),
                stored("model.layers.0.feed_forward.up_proj.scales"),
                stored("model.layers.0.conv.conv.weight"),
            ],
        )
    };
    let plain = |dtype| Some(Stored::Plain(dtype));
    let (_folder, scales, glm) = names_of("glm4_moe");
    assert_eq!(scales, None);
    assert_eq!(glm[..2], [plain(DType::BF16), plain(DType::F32)]);
    let (_folder, _, lfm) = names_of("lfm2_moe");
    let (bf16, f32) = (plain(DType::BF16), plain(DType::F32));
    assert_eq!(lfm[2..], [bf16, f32, bf16, bf16, bf16]);
    // A rule that names such a router names nothing.
    let (folder, source) = changed("glm4_moe", |_| ());
    let rule =
        Recipe::new(MlxFormat::new("affine", 4, 32)).with_rules(vec!["layers.1.mlp.gate=6".parse().unwrap()]);
    let error = to(&source, &folder.path().join("made"), &rule).unwrap_err();
    assert!(error.contains("layers.1.mlp.gate"), "{error}");
}

#[test]
fn layouts_that_cannot_say_it_refuse() {
    // llama.cpp does not read the factor of this model.
    let (folder, source) = changed("lfm2_moe", |config| config["routed_scaling_factor"] = 2.5.into());
    let output = folder.path().join("made.gguf");
    let error = to(&source, &output, &gguf()).unwrap_err();
    assert!(error.contains("expert_weights_scale") && error.contains("2.5"), "{error}");
    assert!(!output.exists());
    to(&source, &folder.path().join("made"), &plain()).unwrap();
    // mlx-lm computes these otherwise.
    for (key, value, what) in [
        ("num_experts_per_tok", json!(1), "the weight of a single expert"),
        ("num_experts_per_tok", json!(3), "experts of other groups"),
    ] {
        let (folder, source) = changed("glm4_moe", |config| config[key] = value);
        let summary = to(&source, &folder.path().join("made"), &plain()).unwrap();
        assert!(summary.warnings.iter().any(|warning| warning.contains(what)), "{:?}", summary.warnings);
    }
}
