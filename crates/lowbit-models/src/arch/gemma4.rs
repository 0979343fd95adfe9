//! Gemma 4 as a text model: two kinds of layers, with a window and without, which have heads of
//! their own size and a rotary embedding each; values that are normed and may be the keys; norms
//! around attention and MLP. Some models have experts beside the MLP; the smaller ones have
//! embeddings for each layer, and layers that read the keys of earlier ones. Source: transformers
//! 5.24 `models/gemma4`; mlx-lm 0.32 `models/gemma4_text.py`; llama.cpp `src/models/gemma4.cpp`.

use super::biases::BY_FLAGS;
use super::{Architecture, Conversion, ModelType, TiedByDefault, WindowKeys, Windows, decoder, window};
use crate::keys::Fixed::{Flag, Float, Int, Text};
use crate::keys::{BASE, DECODER, GGUF, GGUF_DENSE, Key, Tables, WRAPPER};
use crate::layers::{
    AttentionConfig, DecoderConfig, DecoderSpec, FeedforwardSpec, LayerNorms, LayerSpec, MixerSpec,
    MlpConfig, MoeConfig, Multipliers, RopeKind, rope_params_of,
};
use crate::names::{
    self, ATTENTION, EXPERT_SCALE, HEAD_NORMS, INPUT_NORM, LAYER_SCALAR, MLP, PER_LAYER_GATE, PER_LAYER_NORM,
    PER_LAYER_PROJ, POST_ATTENTION_NORM, POST_FEEDFORWARD_NORM, POST_FEEDFORWARD_NORM_1,
    POST_FEEDFORWARD_NORM_2, PRE_FEEDFORWARD_NORM, PRE_FEEDFORWARD_NORM_2, ROUTER_SCALE, TOP, V_PROJ,
};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::{Gate, Rope};
use std::sync::Arc;

pub const GEMMA4: Architecture = Architecture {
    model_types: &[
        ModelType { name: "gemma4_text", tables: TABLES, wraps: false },
        ModelType { name: "gemma4", tables: TABLES, wraps: true },
        // The 12B, whose images and sounds have no towers.
        ModelType { name: "gemma4_unified_text", tables: UNIFIED, wraps: false },
        ModelType { name: "gemma4_unified", tables: UNIFIED, wraps: true },
    ],
    gguf: "gemma4",
    gguf_keys: &[GGUF_KEYS, GGUF_DENSE, GGUF],
    offset_norms: None,
    names: &[
        TOP,
        ATTENTION,
        HEAD_NORMS,
        &MLP,
        names::EXPERTS,
        names::PER_LAYER_TOP,
        &[
            PER_LAYER_GATE,
            PER_LAYER_PROJ,
            PER_LAYER_NORM,
            POST_ATTENTION_NORM,
            PRE_FEEDFORWARD_NORM,
            POST_FEEDFORWARD_NORM,
            POST_FEEDFORWARD_NORM_1,
            PRE_FEEDFORWARD_NORM_2,
            POST_FEEDFORWARD_NORM_2,
            LAYER_SCALAR,
            ROUTER_SCALE,
            EXPERT_SCALE,
        ],
    ],
    aliases: &[
        ("mlp.gate", "router.proj"),
        ("mlp.experts.gate_up_proj", "experts.gate_up_proj"),
        ("mlp.experts.down_proj", "experts.down_proj"),
    ],
    biases: BY_FLAGS,
    conversion: Conversion {
        rope_divisors: &["rope_freqs.weight"],
        mlx_is_text: true,
        windows: Some(WINDOWS),
        mlx_aliases: &[("mlp.switch_mlp", "experts.switch_glu")],
        ..Conversion::PLAIN
    },
    mlx_prefix: "",
    tied_by_default: TiedByDefault { transformers: true, mlx_lm: true },
    describe,
};

/// transformers' interval; mlx-lm has another.
const WINDOWS: Windows = Windows { interval: 6, ropes: true, keys: WindowKeys::Sizes };

const TABLES: Tables = &[KEYS, DECODER, BASE, WRAPPER];

/// The same keys with other defaults.
const UNIFIED: Tables = &[UNIFIED_KEYS, KEYS, DECODER, BASE, WRAPPER];

const UNIFIED_KEYS: &[Key] = &[
    Key::size("max_position_embeddings", 262_144),
    Key::size("sliding_window", 1024),
    Key::disputed("hidden_size_per_layer_input", Int(0)),
];

const KEYS: &[Key] = &[
    Key::required("intermediate_size"),
    Key::size("num_attention_heads", 8),
    Key::disputed("num_key_value_heads", Int(4)),
    Key::size("head_dim", 256),
    Key::size("global_head_dim", 512),
    Key::optional("num_global_key_value_heads"),
    Key::flag("attention_k_eq_v", false),
    Key::optional("per_layer_config"),
    Key::size("max_position_embeddings", 131_072),
    // Not `hidden_act`, which its configuration does not have.
    Key::no_effect("hidden_act"),
    Key::only("hidden_activation", &[Text("gelu_pytorch_tanh")]),
    Key::only("attention_bias", &[Flag(false)]),
    Key::optional("final_logit_softcapping"),
    // Of images alone.
    Key::only("use_bidirectional_attention", &[Text("vision")]),
    Key::size("sliding_window", 512),
    // mlx-lm reads it where `layer_types` is missing, which is refused in its layout.
    Key::no_effect("sliding_window_pattern"),
    Key::optional("layer_types"),
    // Each kind of layer has its own inside `rope_parameters`.
    Key::no_effect("rope_theta"),
    Key::only("rope_scaling", &[]),
    Key::no_effect("partial_rotary_factor"),
    Key::no_effect("global_partial_rotary_factor"),
    Key::flag("enable_moe_block", false),
    Key::optional("num_experts"),
    Key::optional("top_k_experts"),
    Key::optional("moe_intermediate_size"),
    // Of the smaller models.
    Key::disputed("num_kv_shared_layers", Int(0)),
    Key::disputed("hidden_size_per_layer_input", Int(256)),
    Key::size("vocab_size_per_layer_input", 262_144),
    // Of layers that read another one's keys.
    Key::disputed("use_double_wide_mlp", Flag(false)),
    // Caches of other programs.
    Key::no_effect("cache_implementation"),
];

const GGUF_KEYS: &[Key] = &[
    Key::required("attention.sliding_window"),
    Key::required("attention.sliding_window_pattern"),
    Key::required("attention.key_length_swa"),
    Key::optional("attention.value_length_swa"),
    Key::optional("attention.shared_kv_layers"),
    Key::optional("embedding_length_per_layer_input"),
    Key::required("rope.freq_base_swa"),
    Key::optional("rope.dimension_count_swa"),
    Key::optional("final_logit_softcapping"),
    Key::optional("expert_count"),
    Key::optional("expert_used_count"),
    Key::optional("expert_feed_forward_length"),
    // llama.cpp computes these, whatever the file says.
    Key::only("expert_weights_scale", &[Float(0.0), Float(1.0)]),
    Key::only("expert_weights_norm", &[Flag(true)]),
    Key::only("expert_gating_func", &[Int(1)]),
];

const NORMS: LayerNorms = LayerNorms {
    mixer: Some(INPUT_NORM),
    after_mixer: Some(POST_ATTENTION_NORM),
    feedforward: Some(PRE_FEEDFORWARD_NORM),
    after_feedforward: Some(POST_FEEDFORWARD_NORM),
};

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let (hidden, layers) = (sizes.hidden_size, sizes.num_hidden_layers);
    let mut heads = Heads::new(config, weights, &sizes)?;
    let attention = (0..layers).map(|index| heads.of_layer(index)).collect::<Result<Vec<_>, _>>()?;
    let mlps = mlps(config, layers, first_shared(config, layers)?)?;
    let layer_embedding = layer_embedding(config, &sizes)?;
    let has_experts = match config.is_gguf() {
        true => config.optional_size("", "expert_count")?.is_some_and(|count| count > 0),
        false => config.flag("enable_moe_block", false)?,
    };
    let moe = match has_experts {
        false => None,
        true => {
            let count = config.size("num_experts", "expert_count")?;
            let inner = config.size("moe_intermediate_size", "expert_feed_forward_length")?;
            let moe = MoeConfig::by("top_k_experts", config, [count, inner])?;
            Some(MoeConfig { gate: Gate::GeluTanh, factors: true, ..moe })
        }
    };
    let spec = decoder(sizes, |index| {
        let mixer = MixerSpec::Attention(attention[index].clone());
        let feedforward = match &moe {
            None => FeedforwardSpec::Dense(mlps[index]),
            Some(moe) => FeedforwardSpec::Parallel(mlps[index], moe.clone()),
        };
        Ok(LayerSpec { norms: NORMS, mixer, feedforward })
    })?;
    let multipliers = Multipliers {
        embedding: (hidden as f64).sqrt() as f32,
        softcap: softcap(config)?,
        layer: Some(LAYER_SCALAR),
        ..Multipliers::NONE
    };
    Ok(DecoderSpec { multipliers, layer_embedding, ..spec })
}

/// The size of the embeddings of each layer's own, of the smaller models.
fn layer_embedding(config: &Config<'_>, sizes: &DecoderConfig) -> Result<Option<usize>, ModelError> {
    let size = config.optional_size("hidden_size_per_layer_input", "embedding_length_per_layer_input")?;
    let size = size.filter(|&size| size > 0);
    let key = "vocab_size_per_layer_input";
    if let (Some(_), false) = (size, config.is_gguf())
        && let Some(other) = config.optional_size(key, "")?.filter(|&other| other != sizes.vocab_size)
    {
        let want = format!("vocab_size is {}, and each token has such an embedding", sizes.vocab_size);
        return Err(config.refuse(key, &other.to_string(), &want));
    }
    Ok(size)
}

/// The first of the last layers, which read the keys of earlier ones.
fn first_shared(config: &Config<'_>, layers: usize) -> Result<usize, ModelError> {
    let (json, gguf) = ("num_kv_shared_layers", "attention.shared_kv_layers");
    let shared = config.optional_size(json, gguf)?.unwrap_or(0);
    layers.checked_sub(shared).filter(|&own| own > 0 || layers == 0).ok_or_else(|| {
        let key = if config.is_gguf() { gguf } else { json };
        config.refuse(key, &shared.to_string(), &format!("fewer than the {layers} layers are wanted"))
    })
}

/// The MLP of each layer: layers that read another one's keys may have twice the rows.
fn mlps(config: &Config<'_>, layers: usize, first_shared: usize) -> Result<Vec<MlpConfig>, ModelError> {
    let key = "feed_forward_length";
    let listed = if config.is_gguf() { config.gguf_layers(key)? } else { None };
    if let Some(other) = listed.as_ref().map(Vec::len).filter(|&length| length != layers) {
        let want = format!("there are {layers} layers");
        return Err(config.refuse(key, &format!("a list of {other}"), &want));
    }
    let doubled = !config.is_gguf() && config.flag("use_double_wide_mlp", false)?;
    let of_layer = |index: usize| {
        let rows = match &listed {
            Some(listed) => listed[index],
            None => config.size("intermediate_size", key)?,
        };
        let rows = if doubled && index >= first_shared { rows.saturating_mul(2) } else { rows };
        Ok(MlpConfig { gate: Gate::GeluTanh, ..MlpConfig::new(rows) })
    };
    (0..layers).map(of_layer).collect()
}

/// The bound of logits.
fn softcap(config: &Config<'_>) -> Result<Option<f32>, ModelError> {
    let key = "final_logit_softcapping";
    if config.is_mlx() && !config.says(key) {
        let want = "transformers then takes none and mlx-lm 30: an MLX checkpoint has to have it";
        return Err(config.refuse(key, "missing", want));
    }
    match config.optional_float(key, key)? {
        Some(0.0) if config.is_gguf() => Ok(None),
        Some(cap) if cap <= 0.0 => Err(config.refuse(key, &cap.to_string(), "a number above 0 is wanted")),
        cap => Ok(cap.map(|cap| cap as f32)),
    }
}

/// Attention by kind of layer.
struct Heads<'a> {
    config: &'a Config<'a>,
    weights: &'a Weights<'a>,
    hidden: usize,
    eps: f32,
    /// Query heads.
    count: usize,
    window: usize,
    /// True for each layer with a window.
    sliding: Vec<bool>,
    /// The first layer that reads an earlier one's keys.
    first_shared: usize,
    /// GGUF's key heads by layer, if it lists them.
    listed: Option<Vec<usize>>,
    ropes: Vec<((RopeKind, usize), Arc<Rope>)>,
}

impl<'a> Heads<'a> {
    fn new(
        config: &'a Config<'a>,
        weights: &'a Weights<'a>,
        sizes: &DecoderConfig,
    ) -> Result<Self, ModelError> {
        let layers = sizes.num_hidden_layers;
        let window = match config.is_gguf() {
            true => config.size("", "attention.sliding_window")?,
            false => window(config)?.ok_or_else(|| config.missing("sliding_window"))?,
        };
        let listed = match config.is_gguf() {
            true => config.gguf_layers(KEY_HEADS)?,
            false => None,
        };
        if let Some(other) = listed.as_ref().map(Vec::len).filter(|&length| length != layers) {
            let want = format!("there are {layers} layers");
            return Err(config.refuse(KEY_HEADS, &format!("a list of {other}"), &want));
        }
        Ok(Self {
            config,
            weights,
            hidden: sizes.hidden_size,
            eps: sizes.rms_norm_eps,
            count: config.size("num_attention_heads", "attention.head_count")?,
            window,
            sliding: sliding(config, layers)?,
            first_shared: first_shared(config, layers)?,
            listed,
            ropes: vec![],
        })
    }

    fn of_layer(&mut self, index: usize) -> Result<AttentionConfig, ModelError> {
        let sliding = self.sliding[index];
        let head_dim = self.head_dim(index, sliding)?;
        let key = if self.config.is_gguf() { KEY_HEADS } else { "num_key_value_heads" };
        let key_heads = self.key_heads(index, sliding)?;
        if key_heads == 0 || !self.count.is_multiple_of(key_heads) {
            let want = format!("the {} query heads of layer {index} are no multiple of it", self.count);
            return Err(self.config.refuse(key, &key_heads.to_string(), &want));
        }
        let kind = if sliding { RopeKind::Sliding } else { RopeKind::Full };
        let rope = self.rope(kind, head_dim)?;
        let kv_of = self.kv_of(index)?;
        let keys_are_values = match self.config.is_gguf() {
            true if kv_of.is_some() => false,
            true => !self.weights.has("", &format!("blk.{index}.{}.weight", V_PROJ.1)),
            false => kv_of.is_none() && !sliding && self.config.flag("attention_k_eq_v", false)?,
        };
        Ok(AttentionConfig {
            scale: 1.0,
            head_norm: Some(self.eps),
            value_norm: kv_of.is_none(),
            keys_are_values,
            kv_of,
            sliding_window: sliding.then_some(self.window),
            ..AttentionConfig::plain(self.hidden, [self.count, key_heads, head_dim], rope)
        })
    }

    /// The layer whose keys a layer reads, if they are not its own: the last one of its kind before
    /// all such layers.
    fn kv_of(&self, index: usize) -> Result<Option<usize>, ModelError> {
        if index < self.first_shared {
            return Ok(None);
        }
        let is_alike = |&other: &usize| self.sliding[other] == self.sliding[index];
        let found = (0..self.first_shared).rev().find(is_alike);
        found.map(Some).ok_or_else(|| {
            let key =
                if self.config.is_gguf() { "attention.shared_kv_layers" } else { "num_kv_shared_layers" };
            let want = format!("before layer {index} there is no layer of its kind with keys of its own");
            self.config.refuse(key, &(self.sliding.len() - self.first_shared).to_string(), &want)
        })
    }

    /// Elements of a head of a layer.
    fn head_dim(&self, index: usize, sliding: bool) -> Result<usize, ModelError> {
        let (config, [local, full]) = (self.config, HEAD_DIMS);
        let (json, gguf) = if sliding { local } else { full };
        let own = self.own(index, "head_dim")?;
        let listed = config.has("per_layer_config");
        let dim = match own {
            Some(dim) => dim,
            // If layers are listed, the others have the model's size.
            None if listed => config.size(local.0, "")?,
            None => config.size(json, gguf)?,
        };
        let key = if config.is_gguf() { gguf } else { json };
        // The rotary embedding's table is made before the projections are asked for.
        self.weights.check_size(key, dim)?;
        let values = if sliding { "attention.value_length_swa" } else { "attention.value_length" };
        let value_dim = if config.is_gguf() { config.optional_size("", values)? } else { None };
        match value_dim.filter(|&other| other != dim) {
            None if dim > 0 && dim.is_multiple_of(2) => Ok(dim),
            None => Err(config.refuse(key, &dim.to_string(), "an even size is wanted")),
            Some(other) => Err(config.refuse(values, &other.to_string(), &format!("{gguf} is {dim}"))),
        }
    }

    fn key_heads(&self, index: usize, sliding: bool) -> Result<usize, ModelError> {
        let config = self.config;
        if config.is_gguf() {
            return match &self.listed {
                Some(listed) => Ok(listed[index]),
                None => Ok(config.optional_size("", KEY_HEADS)?.unwrap_or(self.count)),
            };
        }
        let heads = config.size("num_key_value_heads", "")?;
        if config.has("per_layer_config") {
            return Ok(self.own(index, "num_key_value_heads")?.unwrap_or(heads));
        }
        let fewer = !sliding && config.flag("attention_k_eq_v", false)?;
        let global = config.optional_size("num_global_key_value_heads", "")?.filter(|_| fewer);
        Ok(global.unwrap_or(heads))
    }

    /// A layer's own size, which transformers alone reads.
    fn own(&self, index: usize, key: &str) -> Result<Option<usize>, ModelError> {
        let name = "per_layer_config";
        if self.config.is_mlx() && self.config.has(name) {
            let want =
                "mlx-lm does not read it, and takes global_head_dim: an MLX checkpoint has to do without";
            return Err(self.config.refuse(name, "there", want));
        }
        self.config.of_layer(index, key, &["head_dim", "num_key_value_heads"])
    }

    fn rope(&mut self, kind: RopeKind, head_dim: usize) -> Result<Arc<Rope>, ModelError> {
        let known = self.ropes.iter().find(|(of, _)| *of == (kind, head_dim));
        if let Some((_, rope)) = known {
            return Ok(rope.clone());
        }
        let divisors = "rope_freqs.weight";
        if self.config.is_gguf() && kind == RopeKind::Full && !self.weights.has("", divisors) {
            let (path, names) = (self.config.path(), self.weights.names());
            return Err(ModelError::missing_tensor(path, divisors, names));
        }
        let rope = Arc::new(Rope::new(&rope_params_of(self.config, self.weights, head_dim, kind)?)?);
        self.ropes.push(((kind, head_dim), rope.clone()));
        Ok(rope)
    }
}

const KEY_HEADS: &str = "attention.head_count_kv";

/// The keys of a head's size, in layers with a window and in others.
const HEAD_DIMS: [(&str, &str); 2] =
    [("head_dim", "attention.key_length_swa"), ("global_head_dim", "attention.key_length")];

/// True for each layer with a window.
fn sliding(config: &Config<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    if config.is_gguf() {
        return config.gguf_pattern("attention.sliding_window_pattern", WINDOWS.interval, layers);
    }
    let kinds = &["full_attention", "sliding_attention"];
    let is_sliding = |index: usize| match config.layer_type(index, layers, kinds)? {
        Some(kind) => Ok(kind == "sliding_attention"),
        None if config.is_mlx() => {
            let want = "the peers then have layers without a window at other intervals";
            Err(config.refuse("layer_types", "missing", want))
        }
        // transformers has none in the last layer in any case.
        None => Ok(!(index + 1).is_multiple_of(WINDOWS.interval) && index + 1 != layers),
    };
    let sliding = (0..layers).map(is_sliding).collect::<Result<Vec<_>, _>>()?;
    match sliding.last() {
        Some(true) => {
            let want = "transformers takes full_attention for it, and the other peers do not";
            Err(config.refuse(&format!("layer_types[{}]", layers - 1), "sliding_attention", want))
        }
        _ => Ok(sliding),
    }
}
