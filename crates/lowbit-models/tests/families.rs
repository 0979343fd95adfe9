//! Configurations of Olmo, EXAONE, Hunyuan, MiniMax, DeepSeek and GLM-4.7-Flash that peers
//! understand otherwise are refused.

use serde_json::{Map, Value, json};
use tiny::{Tiny, logits};

#[path = "support/tiny.rs"]
mod tiny;

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
