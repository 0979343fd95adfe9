//! Configurations of Olmo, EXAONE, Hunyuan, MiniMax, Gemma 2 and 4, DeepSeek, GLM-4.7-Flash,
//! Kimi-Linear and Ling 3 that peers understand otherwise are refused.

use crate::tiny::{Tiny, logits};
use lowbit_files::Checkpoint;
use lowbit_models::{Config, Outline};
use serde_json::{Map, Value, json};

type Change<'a> = &'a dyn Fn(&mut Map<String, Value>);

fn changed(name: &str, change: Change<'_>) -> Result<u64, String> {
    let mut tiny = Tiny::open(name);
    change(tiny.text());
    tiny.load().map(|model| logits(&model)).map_err(|error| error.to_string())
}

#[track_caller]
fn assert_refused(name: &str, change: Change<'_>, wants: [&str; 2]) {
    let message = changed(name, change).expect_err("it was loaded");
    assert!(wants.iter().all(|want| message.contains(want)), "{message}");
}

fn set<'a>(key: &'a str, value: Value) -> impl Fn(&mut Map<String, Value>) + 'a {
    move |config| drop(config.insert(key.into(), value.clone()))
}

#[test]
fn olmo_3_rotates_layers_with_a_window_by_a_plain_embedding() {
    let plain = changed("olmo3", &|_| ()).unwrap();
    let nested = |local: f64| {
        move |config: &mut Map<String, Value>| {
            let mut full = config.remove("rope_scaling").unwrap();
            let theta = config.remove("rope_theta").unwrap();
            full["rope_theta"] = theta;
            let sliding = json!({"rope_type": "default", "rope_theta": local});
            let both = json!({"full_attention": full, "sliding_attention": sliding});
            config.insert("rope_parameters".into(), both);
        }
    };
    assert_eq!(changed("olmo3", &nested(500_000.0)).unwrap(), plain);
    assert_ne!(changed("olmo3", &nested(10_000.0)).unwrap(), plain);
    // Beside no sections, transformers takes another base for the layers with a window.
    assert_refused("olmo3", &set("rope_theta", json!(10_000)), ["rope_theta is 10000", "500000"]);
    assert_refused("olmo3", &set("sliding_window", Value::Null), ["sliding_window", "layer 0 has a window"]);
    // transformers looks for this key around the sections alone.
    let truncated = |around: Option<bool>| {
        let change = |config: &mut Map<String, Value>| {
            nested(500_000.0)(config);
            let both = &mut config["rope_parameters"];
            both["full_attention"]["original_max_position_embeddings"] = json!(400);
            match around {
                Some(true) => both["truncate"] = json!(false),
                Some(false) => both["full_attention"]["truncate"] = json!(false),
                None => {}
            }
        };
        changed("olmo3", &change).unwrap()
    };
    assert_eq!(truncated(Some(false)), truncated(None));
    assert_ne!(truncated(Some(true)), truncated(None));
    // Every fourth layer has no window by default.
    let by_default = changed("olmo3", &|config| drop(config.remove("layer_types"))).unwrap();
    let all = set("layer_types", json!(["sliding_attention", "sliding_attention", "sliding_attention"]));
    assert_eq!(by_default, changed("olmo3", &all).unwrap());
    assert_ne!(by_default, plain);
}

#[test]
fn exaone_4_rotates_all_layers_where_none_has_a_window() {
    let plain = changed("exaone4", &|_| ()).unwrap();
    let by = |types: Value, window: Value| {
        changed("exaone4", &|config| {
            config.insert("layer_types".into(), types.clone());
            config.insert("sliding_window".into(), window.clone());
        })
    };
    let full = json!(["full_attention", "full_attention", "full_attention"]);
    let still = by(full.clone(), json!(23)).unwrap();
    assert_ne!(still, by(full, Value::Null).unwrap());
    let error = by(json!(["sliding_attention", "full_attention", "full_attention"]), Value::Null);
    assert!(error.unwrap_err().contains("layer 0 has a window"));
    // Letters, which mlx-lm reads, are as good as a list.
    let letters = |letters: Value| {
        changed("exaone4", &|config| {
            config.remove("layer_types");
            config.insert("sliding_window_pattern".into(), letters.clone());
        })
    };
    assert_eq!(letters(json!("LLG")).unwrap(), plain);
    assert_eq!(letters(json!(3)).unwrap(), plain);
    assert_eq!(letters(json!("G")).unwrap(), still);
    assert!(letters(json!("LXG")).unwrap_err().contains("sliding_window_pattern is LXG"));
}

#[test]
fn hunyuans_alpha_makes_the_base_larger() {
    let plain = changed("hunyuan", &|_| ()).unwrap();
    let rope = |section: Value| set("rope_scaling", section);
    let base = |config: &mut Map<String, Value>| {
        config.insert("rope_scaling".into(), Value::Null);
        config.insert("rope_theta".into(), json!(10_000.0 * 1000f64.powf(24.0 / 22.0)));
    };
    assert_eq!(changed("hunyuan", &base).unwrap(), plain);
    let with = |kind: &str, alpha: f64| rope(json!({"type": kind, "alpha": alpha, "factor": 1.0}));
    assert_eq!(changed("hunyuan", &with("dynamic", 1000.0)).unwrap(), plain);
    assert_ne!(changed("hunyuan", &with("dynamic", 50.0)).unwrap(), plain);
    assert_refused("hunyuan", &with("linear", 50.0), ["alpha is 50", "rope_type is linear"]);
    assert_refused("hunyuan", &with("dynamic", -2.0), ["alpha is -2", "above 0"]);
    // Then the base depends on the length of the text.
    assert_refused("hunyuan", &with("dynamic", 0.0), ["dynamic", "supported"]);
    assert_refused("hunyuan", &set("use_qk_norm", json!(false)), ["use_qk_norm is false", "true"]);
}

#[test]
fn minimax_says_how_many_elements_are_rotated() {
    let plain = changed("minimax_m2", &|_| ()).unwrap();
    let fraction = |config: &mut Map<String, Value>| {
        config.remove("rotary_dim");
        config.insert("partial_rotary_factor".into(), json!(0.5));
    };
    assert_eq!(changed("minimax_m2", &fraction).unwrap(), plain);
    let whole = changed("minimax_m2", &|config| drop(config.remove("rotary_dim"))).unwrap();
    assert_eq!(whole, changed("minimax_m2", &set("rotary_dim", json!(24))).unwrap());
    assert_ne!(whole, plain);
    let other = set("partial_rotary_factor", json!(0.25));
    assert_refused("minimax_m2", &other, ["rotary_dim is 12", "partial_rotary_factor makes 6"]);
    assert_refused("minimax_m2", &set("rotary_dim", json!(26)), ["partial_rotary_factor", "24 elements"]);
    assert_refused("minimax_m2", &set("scoring_func", json!("softmax")), ["scoring_func", "sigmoid"]);
}

#[test]
fn latent_attention() {
    let plain = changed("deepseek_v3", &|_| ()).unwrap();
    let scaled = |key: &'static str, value: f64| {
        move |config: &mut Map<String, Value>| config["rope_scaling"][key] = json!(value)
    };
    // Beside the rotated part, mscale_all_dim sharpens all scores.
    let both = |config: &mut Map<String, Value>| {
        scaled("mscale", 0.5)(config);
        scaled("mscale_all_dim", 0.5)(config);
    };
    assert_ne!(changed("deepseek_v3", &both).unwrap(), plain);
    assert_ne!(changed("deepseek_v3", &set("rope_interleave", json!(false))).unwrap(), plain);
    for key in ["qk_head_dim", "head_dim", "num_nextn_predict_layers", "ep_size"] {
        assert_eq!(changed("deepseek_v3", &set(key, json!(77))).unwrap(), plain);
    }
    let null = set("num_key_value_heads", Value::Null);
    assert_eq!(changed("deepseek_v3", &null).unwrap(), plain);
    let heads = set("num_key_value_heads", json!(3));
    assert_refused("deepseek_v3", &heads, ["num_key_value_heads is 3", "each of the 6 query heads"]);
    let kimi = set("model_type", json!("kimi_k2"));
    assert_eq!(changed("deepseek_v3", &kimi).unwrap(), plain);
    let method = set("topk_method", json!("other"));
    assert_refused("deepseek_v2", &method, ["topk_method is other", "group_limited_greedy"]);
    let groups = changed("deepseek_v2", &|_| ()).unwrap();
    assert_ne!(changed("deepseek_v2", &set("topk_method", json!("greedy"))).unwrap(), groups);
}

#[test]
fn layers_of_glm_4_7_without_experts() {
    let plain = changed("glm4_moe_lite", &|_| ()).unwrap();
    let listed = |kinds: Value| set("mlp_layer_types", kinds);
    let same = listed(json!(["dense", "sparse", "sparse"]));
    assert_eq!(changed("glm4_moe_lite", &same).unwrap(), plain);
    let absent = |config: &mut Map<String, Value>| drop(config.remove("first_k_dense_replace"));
    assert_eq!(changed("glm4_moe_lite", &absent).unwrap(), plain);
    let other = listed(json!(["sparse", "dense", "sparse"]));
    assert_refused("glm4_moe_lite", &other, ["first_k_dense_replace is 1", "mlp_layer_types"]);
    let short = listed(json!(["dense"]));
    assert_refused("glm4_moe_lite", &short, ["mlp_layer_types is a list of 1", "num_hidden_layers is 3"]);
    let odd = listed(json!(["dense", "x", "sparse"]));
    assert_refused("glm4_moe_lite", &odd, ["mlp_layer_types[1]", "dense and sparse"]);
}

#[test]
fn kimi_linear() {
    let plain = changed("kimi_linear", &|_| ()).unwrap();
    // As transformers writes it.
    let kinds = json!(["linear_attention", "linear_attention", "full_attention", "linear_attention"]);
    let flat = |config: &mut Map<String, Value>| {
        config.remove("linear_attn_config").unwrap();
        config.insert("linear_num_heads".into(), json!(3));
        config.insert("linear_head_dim".into(), json!(32));
        config.insert("layer_types".into(), kinds.clone());
        for (published, own) in [
            ("num_experts_per_token", "num_experts_per_tok"),
            ("moe_renormalize", "norm_topk_prob"),
            ("num_expert_group", "n_group"),
            ("num_shared_experts", "n_shared_experts"),
            ("model_max_length", "max_position_embeddings"),
        ] {
            let value = config.remove(published).unwrap();
            config.insert(own.into(), value);
        }
    };
    assert_eq!(changed("kimi_linear", &flat).unwrap(), plain);
    for key in ["head_dim", "qk_head_dim", "num_nextn_predict_layers", "rope_theta"] {
        assert_eq!(changed("kimi_linear", &set(key, json!(77))).unwrap(), plain, "{key}");
    }
    let sum = set("moe_renormalize", json!(false));
    assert_ne!(changed("kimi_linear", &sum).unwrap(), plain);
    let section = |key: &'static str, value: Value| {
        move |config: &mut Map<String, Value>| config["linear_attn_config"][key] = value.clone()
    };
    let wants = ["linear_attn_config is full_attn_layers [3, 4]", "each layer from 1 to 4 is in one of them"];
    assert_refused("kimi_linear", &section("full_attn_layers", json!([3, 4])), wants);
    let other = set("layer_types", json!(vec!["linear_attention"; 4]));
    assert_refused("kimi_linear", &other, ["linear_attn_config", "layer_types says otherwise"]);
    let dense = set("mlp_layer_types", json!(["dense", "dense", "sparse", "sparse"]));
    assert_refused("kimi_linear", &dense, ["first_k_dense_replace is 1", "mlp_layer_types says otherwise"]);
    for (key, value) in [
        ("mla_use_nope", json!(false)),
        ("q_lora_rank", json!(24)),
        ("moe_router_activation_func", json!("softmax")),
        ("moe_layer_freq", json!(2)),
        ("rope_scaling", json!({"type": "yarn", "factor": 4.0})),
        ("tie_word_embeddings", json!(true)),
    ] {
        assert_refused("kimi_linear", &set(key, value), [key, "is"]);
    }
}

#[test]
fn ling_3() {
    let plain = changed("bailing_hybrid", &|_| ()).unwrap();
    let kinds = json!(["linear_attention", "full_attention", "linear_attention", "full_attention"]);
    assert_eq!(changed("bailing_hybrid", &set("layer_types", kinds)).unwrap(), plain);
    for (key, value) in [("kda_lower_bound", json!(-1.0)), ("kda_safe_gate", json!(false))] {
        assert_ne!(changed("bailing_hybrid", &set(key, value)).unwrap(), plain, "{key}");
    }
    let group = set("layer_group_size", json!(3));
    assert_refused("bailing_hybrid", &group, ["layer_group_size is 3", "the peers disagree"]);
    let shared = set("moe_shared_expert_intermediate_size", json!(64));
    assert_refused("bailing_hybrid", &shared, ["moe_shared_expert_intermediate_size is 64", "32"]);
    let bound = set("kda_lower_bound", json!(1));
    assert_refused("bailing_hybrid", &bound, ["kda_lower_bound is 1", "below 0"]);
    for (key, value) in [
        ("no_kda_lora", json!(false)),
        ("rope_interleave", json!(false)),
        ("score_function", json!("softmax")),
        ("group_norm_size", json!(8)),
        ("expert_swiglu_limit_list", json!([7.0])),
        ("gated_attention_proj_granularity_type", json!("element_wise")),
    ] {
        assert_refused("bailing_hybrid", &set(key, value), [key, "supported"]);
    }
}

#[test]
fn gemma_2_caps_scores_and_logits() {
    let plain = changed("gemma2", &|_| ()).unwrap();
    for (key, default) in [("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)] {
        assert_ne!(changed("gemma2", &set(key, Value::Null)).unwrap(), plain, "{key}");
        let missing = changed("gemma2", &|config| drop(config.remove(key))).unwrap();
        assert_eq!(missing, changed("gemma2", &set(key, json!(default))).unwrap(), "{key}");
        assert_ne!(missing, plain, "{key}");
        assert_refused("gemma2", &set(key, json!(0)), [key, "above 0"]);
        assert_refused("gemma2", &set(key, json!(-2.0)), [key, "above 0"]);
    }
    assert_refused("gemma2", &set("use_bidirectional_attention", json!(true)), ["bidirectional", "true"]);
}

#[test]
fn every_other_layer_of_gemma_2_has_a_window() {
    let plain = changed("gemma2", &|_| ()).unwrap();
    let [sliding, full] = ["sliding_attention", "full_attention"];
    let types = |kinds: [&str; 3]| changed("gemma2", &set("layer_types", json!(kinds))).unwrap();
    assert_eq!(types([sliding, full, sliding]), plain);
    assert_ne!(types([full, sliding, full]), plain);
    assert_ne!(changed("gemma2", &set("sliding_window", json!(2))).unwrap(), plain);
    assert_ne!(changed("gemma2", &set("query_pre_attn_scalar", json!(100))).unwrap(), plain);
    let wants = ["sliding_window", "layer 0 has a window"];
    assert_refused("gemma2", &set("sliding_window", Value::Null), wants);
}

#[test]
fn gemma_4_has_heads_of_two_sizes() {
    let plain = changed("gemma4", &|_| ()).unwrap();
    // As transformers saves it.
    let listed = |sizes: Value| {
        changed("gemma4", &|config| {
            config.remove("global_head_dim");
            config.remove("num_global_key_value_heads");
            config.insert("per_layer_config".into(), json!({"2": sizes}));
        })
    };
    assert_eq!(listed(json!({"head_dim": 48, "num_key_value_heads": 1})).unwrap(), plain);
    assert!(listed(json!({"head_dim": 48})).unwrap_err().contains("k_proj"));
    let error = listed(json!({"head_dim": 48, "sliding_window": 3})).unwrap_err();
    assert!(error.contains("per_layer_config.2 is sliding_window"), "{error}");
    let interval = changed("gemma4", &|config| drop(config.remove("layer_types"))).unwrap();
    // The last of three layers is always a full one.
    assert_eq!(interval, plain);
    let sliding = json!(["full_attention", "sliding_attention", "sliding_attention"]);
    assert_refused("gemma4", &set("layer_types", sliding), ["layer_types[2]", "sliding_attention"]);
    assert_refused("gemma4", &set("global_head_dim", json!(47)), ["global_head_dim is 47", "even"]);
    assert_refused(
        "gemma4",
        &set("num_global_key_value_heads", json!(3)),
        ["is 3", "4 query heads of layer 2"],
    );
}

#[test]
fn gemma_4_rotates_a_part_of_its_wide_heads() {
    let plain = changed("gemma4", &|_| ()).unwrap();
    assert_eq!(changed("gemma4", &|config| drop(config.remove("rope_parameters"))).unwrap(), plain);
    let full = |key: &'static str, value: Value| {
        changed("gemma4", &move |config| config["rope_parameters"]["full_attention"][key] = value.clone())
    };
    assert_ne!(full("partial_rotary_factor", json!(0.5)).unwrap(), plain);
    assert_ne!(
        full("partial_rotary_factor", json!(1)).unwrap(),
        full("partial_rotary_factor", json!(0.5)).unwrap()
    );
    assert_ne!(full("factor", json!(2.0)).unwrap(), plain);
    let error = full("partial_rotary_factor", json!(0.03)).unwrap_err();
    assert!(error.contains("0.03") && error.contains("48 elements"), "{error}");
    let error = full("rope_type", json!("yarn")).unwrap_err();
    assert!(error.contains("yarn") && error.contains("proportional or default"), "{error}");
    let error = changed("gemma4", &|config| {
        config["rope_parameters"]["sliding_attention"]["rope_type"] = json!("linear");
    });
    assert!(error.unwrap_err().contains("sliding_attention"));
}

#[test]
fn gemma_4s_logits_have_a_cap() {
    let plain = changed("gemma4", &|_| ()).unwrap();
    let key = "final_logit_softcapping";
    assert_ne!(changed("gemma4", &set(key, Value::Null)).unwrap(), plain);
    assert_ne!(changed("gemma4", &set(key, json!(5))).unwrap(), plain);
    assert_refused("gemma4", &set(key, json!(0)), [key, "above 0"]);
    assert_refused("gemma4", &set("use_bidirectional_attention", json!("all")), ["all", "vision"]);
    // Experts beside the MLP: without them, their tensors are left.
    let error = changed("gemma4_moe", &set("enable_moe_block", json!(false))).unwrap_err();
    assert!(error.contains("experts") || error.contains("router"), "{error}");
    assert_ne!(
        changed("gemma4_moe", &|_| ()).unwrap(),
        changed("gemma4_moe", &set("top_k_experts", json!(3))).unwrap()
    );
}

#[test]
fn small_gemma_4_reads_keys_of_earlier_layers() {
    let plain = changed("gemma4_small", &|_| ()).unwrap();
    let shared = |count: u32| set("num_kv_shared_layers", json!(count));
    // All layers have their own keys in the file, or lack them.
    assert_refused("gemma4_small", &shared(1), ["k_norm", "layers.2"]);
    assert_refused("gemma4_small", &shared(3), ["num_kv_shared_layers is 3", "before layer 1"]);
    assert_refused("gemma4_small", &shared(4), ["num_kv_shared_layers is 4", "4 layers"]);
    assert_refused("gemma4_small", &set("use_double_wide_mlp", json!(false)), ["layers.2.mlp", "96"]);
    let key = "hidden_size_per_layer_input";
    // transformers' default.
    assert_refused("gemma4_small", &|config| drop(config.remove(key)), ["per_layer_input_gate", "256"]);
    assert_refused("gemma4_small", &set("vocab_size_per_layer_input", json!(300)), ["300", "317"]);
    // Layers of their own kind have the same keys: this changes nothing but windows.
    assert_ne!(changed("gemma4_small", &set("sliding_window", json!(2))).unwrap(), plain);
    // Files that have keys for such layers, too, as published ones do.
    let mut tiny = Tiny::open("gemma4_small");
    for name in ["k_proj.weight", "v_proj.weight", "k_norm.weight"] {
        let own = tiny.tensors[&format!("model.layers.0.self_attn.{name}")].clone();
        tiny.tensors.insert(format!("model.layers.2.self_attn.{name}"), own);
    }
    let model = tiny.load().unwrap();
    assert_eq!(logits(&model), plain);
    // Caches of the first two layers, one head each of 24 and of 48 elements, for four.
    let size = model.cache_size().unwrap();
    let elements = 2 * (24 + 48);
    assert_eq!((size.attention_layers, size.whole_per_token() % elements), (4, 0), "{size:?}");
    assert!([2, 4].contains(&(size.whole_per_token() / elements)), "{size:?}");
}

#[test]
fn unified_gemma_4_has_defaults_of_its_own() {
    let unified = |config: &mut Map<String, Value>| {
        config.insert("model_type".into(), json!("gemma4_unified_text"));
        config.remove("hidden_size_per_layer_input");
    };
    assert_eq!(changed("gemma4", &unified).unwrap(), changed("gemma4", &|_| ()).unwrap());
}

#[test]
fn gemma_4_inside_a_multimodal_model() {
    let plain = changed("gemma4", &|_| ()).unwrap();
    let mut tiny = Tiny::open("gemma4");
    let tensors = std::mem::take(&mut tiny.tensors);
    let inner = |name: String| name.replacen("model.", "model.language_model.", 1);
    tiny.tensors = tensors.into_iter().map(|(name, tensor)| (inner(name), tensor)).collect();
    let own = tiny.tensors["model.language_model.norm.weight"].clone();
    for name in ["vision_tower.x.weight", "embed_vision.y.weight", "audio_tower.z.weight", "embed_audio.w"] {
        tiny.tensors.insert(format!("model.{name}"), own.clone());
    }
    let text = tiny.config.take();
    tiny.config = json!({
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": {"hidden_size": 32},
        "audio_config": Value::Null,
        "boa_token_id": 300,
        "tie_word_embeddings": true,
    });
    assert_eq!(logits(&tiny.load().unwrap()), plain);
    tiny.tensors.insert("model.language_model.something.weight".into(), own);
    assert!(tiny.load().unwrap_err().to_string().contains("something"));
}

/// A row of docs/models.md: `model_type`s, the name in GGUF, and whether it learns.
struct Row {
    model_types: Vec<String>,
    gguf: String,
    learn: String,
}

fn documented() -> Vec<Row> {
    let text = std::fs::read_to_string(crate::tiny::vectors("../../../docs/models.md")).unwrap();
    let quoted = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_string).collect::<Vec<_>>();
    let row = |line: &str| {
        let cells: Vec<_> = line.split(" | ").map(str::trim).collect();
        let gguf = quoted(cells[2]);
        assert_eq!(gguf.len(), 1, "{line}");
        Row { model_types: quoted(cells[1]), gguf: gguf[0].clone(), learn: cells[3].into() }
    };
    text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| family")).map(row).collect()
}

#[test]
fn the_table_of_families_is_that_of_the_code() {
    let rows = documented();
    let all =
        rows.iter().flat_map(|row| row.model_types.iter().map(|name| (name.as_str(), row.gguf.as_str())));
    let mut written: Vec<_> = all.collect();
    let known = lowbit_models::arch::ARCHITECTURES.iter();
    let mut known: Vec<_> =
        known.flat_map(|it| it.model_types.iter().map(|kind| (kind.name, it.gguf))).collect();
    written.sort_unstable();
    known.sort_unstable();
    // Granite 4 with experts and without has one name.
    written.dedup();
    known.dedup();
    assert_eq!(written, known);
    for folder in crate::tiny::vectors("").read_dir().unwrap() {
        let folder = folder.unwrap().path();
        let Ok(checkpoint) = Checkpoint::open(&folder) else { continue };
        let architecture = lowbit_models::arch::find(&Config::new(&checkpoint).unwrap()).unwrap();
        let name = architecture.model_types[0].name;
        let is_row =
            |row: &&Row| row.gguf == architecture.gguf && row.model_types.iter().any(|it| it == name);
        let row = rows.iter().find(is_row).unwrap();
        let without = Outline::new(&checkpoint).unwrap().spec().without_gradient();
        let want = if without.is_none() { "yes" } else { "no" };
        assert!(
            row.learn.split("; ").any(|said| said.ends_with(want)),
            "{folder:?}: {without:?}, {}",
            row.learn
        );
    }
}
