//! The smallest checkpoint of each architecture, as a configuration and a list of tensors, to be
//! damaged and then written as safetensors or as GGUF.

use serde_json::{Map, Value, json};

/// `model_type`, and GGUF's name of the architecture.
pub(crate) const ARCHITECTURES: [(&str, &str); 7] = [
    ("llama", "llama"),
    ("mistral", "llama"),
    ("qwen3", "qwen3"),
    ("qwen3_moe", "qwen3moe"),
    ("qwen3_next", "qwen3next"),
    ("qwen3_5", "qwen35"),
    ("qwen3_5_moe", "qwen35moe"),
];

const HIDDEN: usize = 32;
const INNER: usize = 32;
const HEADS: usize = 2;
const KV_HEADS: usize = 1;
const HEAD_DIM: usize = 16;
const LAYERS: usize = 2;
const EXPERTS: usize = 3;
/// Key heads, value heads, their sizes and the convolution's width in delta nets.
const DELTA: [usize; 5] = [1, 2, 16, 16, 4];

/// A tensor before it has bytes.
#[derive(Clone)]
pub(crate) struct Spec {
    /// The name in each layout.
    pub json: String,
    pub gguf: String,
    pub shape: Vec<usize>,
}

/// The parts of an architecture.
#[derive(Clone, Copy)]
struct Kind {
    gguf: bool,
    head_norm: bool,
    /// Every other layer is a delta net, and attention has an output gate.
    hybrid: bool,
    moe: bool,
    /// q, k, v and z, and b and a, in one projection each.
    interleaved: bool,
}

fn kind(model_type: &str, gguf: bool) -> Kind {
    Kind {
        gguf,
        head_norm: model_type.starts_with("qwen"),
        hybrid: model_type == "qwen3_next" || model_type.starts_with("qwen3_5"),
        moe: ["qwen3_moe", "qwen3_next", "qwen3_5_moe"].contains(&model_type),
        interleaved: model_type == "qwen3_next",
    }
}

/// `config.json`, without quantization.
pub(crate) fn config(model_type: &str, vocab_size: usize) -> Map<String, Value> {
    let kind = kind(model_type, false);
    let [key_heads, value_heads, key_dim, value_dim, width] = DELTA;
    let mut text = json!({
        "model_type": model_type, "hidden_act": "silu", "attention_bias": false, "mlp_bias": false,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": vocab_size,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": false,
    });
    let map = text.as_object_mut().expect("an object");
    let mut extend = |more: Value| map.extend(more.as_object().expect("an object").clone());
    if kind.moe {
        extend(json!({
            "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER, "norm_topk_prob": true,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        }));
    }
    if kind.hybrid {
        extend(json!({
            "linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads,
            "linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim, "linear_conv_kernel_dim": width,
            "layer_types": ["linear_attention", "full_attention"], "partial_rotary_factor": 0.5,
        }));
    }
    if kind.hybrid && kind.moe {
        extend(json!({"shared_expert_intermediate_size": INNER}));
    }
    if model_type == "mistral" {
        extend(json!({"sliding_window": 8}));
    }
    if !model_type.starts_with("qwen3_5") {
        return text.as_object().expect("an object").clone();
    }
    let text_type = format!("{model_type}_text");
    map.insert("model_type".into(), text_type.into());
    let whole = json!({"model_type": model_type, "text_config": text, "tie_word_embeddings": false});
    whole.as_object().expect("an object").clone()
}

/// GGUF's metadata below the architecture's name, as numbers.
pub(crate) fn metadata(model_type: &str) -> Vec<(&'static str, f64)> {
    let kind = kind(model_type, true);
    let [key_heads, value_heads, key_dim, value_dim, width] = DELTA.map(|n| n as f64);
    let mut entries = vec![
        ("embedding_length", HIDDEN as f64),
        ("feed_forward_length", INNER as f64),
        ("block_count", LAYERS as f64),
        ("attention.head_count", HEADS as f64),
        ("attention.head_count_kv", KV_HEADS as f64),
        ("attention.key_length", HEAD_DIM as f64),
        ("attention.value_length", HEAD_DIM as f64),
        ("rope.dimension_count", HEAD_DIM as f64),
        ("context_length", 64.0),
        ("attention.layer_norm_rms_epsilon", 1e-6),
        ("rope.freq_base", 10000.0),
    ];
    if kind.moe {
        entries.extend([
            ("expert_count", EXPERTS as f64),
            ("expert_used_count", 2.0),
            ("expert_feed_forward_length", INNER as f64),
        ]);
    }
    if kind.hybrid {
        entries.extend([
            ("full_attention_interval", 2.0),
            ("ssm.time_step_rank", value_heads),
            ("ssm.inner_size", value_heads * value_dim),
            ("ssm.group_count", key_heads),
            ("ssm.state_size", key_dim),
            ("ssm.conv_kernel", width),
        ]);
    }
    if kind.hybrid && kind.moe {
        entries.push(("expert_shared_feed_forward_length", INNER as f64));
    }
    entries
}

/// All tensors.
pub(crate) fn tensors(model_type: &str, vocab_size: usize, gguf: bool) -> Vec<Spec> {
    let kind = kind(model_type, gguf);
    let prefix = if model_type.starts_with("qwen3_5") { "model.language_model." } else { "model." };
    let mut all = vec![
        spec(&format!("{prefix}embed_tokens.weight"), "token_embd.weight", &[vocab_size, HIDDEN]),
        spec(&format!("{prefix}norm.weight"), "output_norm.weight", &[HIDDEN]),
        spec("lm_head.weight", "output.weight", &[vocab_size, HIDDEN]),
    ];
    for layer in 0..LAYERS {
        let mut tensors = vec![spec("input_layernorm.weight", "attn_norm.weight", &[HIDDEN])];
        let post = if kind.hybrid { "post_attention_norm.weight" } else { "ffn_norm.weight" };
        tensors.push(spec("post_attention_layernorm.weight", post, &[HIDDEN]));
        let mixer = if kind.hybrid && layer.is_multiple_of(2) { delta_net(kind) } else { attention(kind) };
        tensors.extend(mixer);
        tensors.extend(if kind.moe { experts(kind, layer) } else { mlp("mlp", "", INNER) });
        all.extend(tensors.into_iter().map(|tensor| Spec {
            json: format!("{prefix}layers.{layer}.{}", tensor.json),
            gguf: format!("blk.{layer}.{}", tensor.gguf),
            ..tensor
        }));
    }
    all
}

fn spec(json: &str, gguf: &str, shape: &[usize]) -> Spec {
    Spec { json: json.into(), gguf: gguf.into(), shape: shape.into() }
}

fn attention(kind: Kind) -> Vec<Spec> {
    let (queries, keys) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    let gated = if kind.hybrid { 2 * queries } else { queries };
    let mut all = vec![
        spec("self_attn.q_proj.weight", "attn_q.weight", &[gated, HIDDEN]),
        spec("self_attn.k_proj.weight", "attn_k.weight", &[keys, HIDDEN]),
        spec("self_attn.v_proj.weight", "attn_v.weight", &[keys, HIDDEN]),
        spec("self_attn.o_proj.weight", "attn_output.weight", &[HIDDEN, queries]),
    ];
    if kind.head_norm {
        all.push(spec("self_attn.q_norm.weight", "attn_q_norm.weight", &[HEAD_DIM]));
        all.push(spec("self_attn.k_norm.weight", "attn_k_norm.weight", &[HEAD_DIM]));
    }
    all
}

fn delta_net(kind: Kind) -> Vec<Spec> {
    let [key_heads, value_heads, key_dim, value_dim, width] = DELTA;
    let values = value_heads * value_dim;
    let channels = 2 * key_heads * key_dim + values;
    let conv: &[usize] = if kind.gguf { &[channels, width] } else { &[channels, 1, width] };
    let mut all = vec![
        spec("linear_attn.conv1d.weight", "ssm_conv1d.weight", conv),
        spec("linear_attn.A_log", "ssm_a", &[value_heads]),
        spec("linear_attn.dt_bias", "ssm_dt.bias", &[value_heads]),
        spec("linear_attn.norm.weight", "ssm_norm.weight", &[value_dim]),
        spec("linear_attn.out_proj.weight", "ssm_out.weight", &[HIDDEN, values]),
    ];
    let qkv = spec("linear_attn.in_proj_qkv.weight", "attn_qkv.weight", &[channels, HIDDEN]);
    let z = spec("linear_attn.in_proj_z.weight", "attn_gate.weight", &[values, HIDDEN]);
    let ba = spec("linear_attn.in_proj_ba.weight", "ssm_ba.weight", &[2 * value_heads, HIDDEN]);
    match (kind.interleaved, kind.gguf) {
        (true, false) => {
            all.push(spec("linear_attn.in_proj_qkvz.weight", "", &[channels + values, HIDDEN]));
            all.push(ba);
        }
        (true, true) => all.extend([qkv, z, ba]),
        (false, _) => all.extend([
            qkv,
            z,
            spec("linear_attn.in_proj_b.weight", "ssm_beta.weight", &[value_heads, HIDDEN]),
            spec("linear_attn.in_proj_a.weight", "ssm_alpha.weight", &[value_heads, HIDDEN]),
        ]),
    }
    all
}

fn mlp(json: &str, suffix: &str, inner: usize) -> Vec<Spec> {
    let one = |part: &str, shape: [usize; 2]| {
        spec(&format!("{json}.{part}_proj.weight"), &format!("ffn_{part}{suffix}.weight"), &shape)
    };
    vec![one("gate", [inner, HIDDEN]), one("up", [inner, HIDDEN]), one("down", [HIDDEN, inner])]
}

/// Experts in all the ways that checkpoints store them: one tensor each, stacked, and gate and up
/// in one.
fn experts(kind: Kind, layer: usize) -> Vec<Spec> {
    let mut all = vec![spec("mlp.gate.weight", "ffn_gate_inp.weight", &[EXPERTS, HIDDEN])];
    if kind.hybrid {
        all.extend(mlp("mlp.shared_expert", "_shexp", INNER));
        all.push(spec("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight", &[1, HIDDEN]));
    }
    let down = [EXPERTS, HIDDEN, INNER];
    if !kind.gguf && !kind.hybrid && layer == 0 {
        all.extend((0..EXPERTS).flat_map(|e| mlp(&format!("mlp.experts.{e}"), "", INNER)));
    } else if !kind.gguf && kind.hybrid && !kind.interleaved {
        all.push(spec("mlp.experts.gate_up_proj", "", &[EXPERTS, 2 * INNER, HIDDEN]));
        all.push(spec("mlp.experts.down_proj", "", &down));
    } else {
        for (part, shape) in
            [("gate", [EXPERTS, INNER, HIDDEN]), ("up", [EXPERTS, INNER, HIDDEN]), ("down", down)]
        {
            let (json, gguf) =
                (format!("mlp.switch_mlp.{part}_proj.weight"), format!("ffn_{part}_exps.weight"));
            all.push(spec(&json, &gguf, &shape));
        }
    }
    all
}

/// Value `i` of a tensor as it is before anything is damaged.
pub(crate) fn value(name: &str, i: usize) -> f32 {
    // Norms are near 1, whatever their names.
    let middle = if name.contains("norm") { 1.0 } else { 0.0 };
    middle + ((i * 37 + name.len() * 11) % 17) as f32 / 64.0 - 0.125
}
