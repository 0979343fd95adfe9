//! The facts of an architecture that conversions between layouts need.

use lowbit_files::Layout;

/// A module's name in a layer as the layers here call it, and as the checkpoint does. `{}` stands
/// for a number. The part behind the name stays.
pub type Alias = (&'static str, &'static str);

/// Facts about an architecture that conversions between layouts need besides its names.
#[derive(Clone, Copy, Debug)]
pub struct Conversion {
    /// GGUF's converter is Llama's: it orders q's and k's rows so that rotated pairs are
    /// neighbours, and writes `vocab_size` and `rope.dimension_count`.
    pub like_llama: bool,
    /// The tensors of divisors of the rotary frequencies that llama.cpp reads.
    pub rope_divisors: &'static [&'static str],
    /// GGUF has YaRN's `mscale_all_dim` and the slope of queries' scales, as Ministral 3 has them.
    pub query_scale: bool,
    /// MLX's checkpoint is that of the text model alone, also of a multimodal one.
    pub mlx_is_text: bool,
    /// Only some layers have a window: how checkpoints say which.
    pub windows: Option<Windows>,
    /// Readers do not take a missing `rope_scaling` for none: it is always written.
    pub names_plain_rope: bool,
    /// llama.cpp rounds the bounds of YaRN's ramp to whole pairs, also of models that were trained
    /// without: a GGUF file of such a model computes that.
    pub rounds_yarn: bool,
    /// GGUF has `rope.dimension_count`, since a part of each head is rotated.
    pub rotary_dimension: bool,
    /// A `dynamic` rotary embedding with `alpha` has a larger base and is otherwise a plain one.
    pub alpha_rope: bool,
    /// llama.cpp wants an output layer, also where it is the embedding.
    pub gguf_never_ties: bool,
    /// llama.cpp's output layer is always the embedding: a file with another one is not read.
    pub gguf_always_ties: bool,
    /// GGUF always has the sections of multimodal positions.
    pub sections: bool,
    /// GGUF has value heads that read one key head apart from each other.
    pub tiled_value_heads: bool,
    /// Hugging Face and MLX have q, k, v and z of a delta net in one matrix, and b and a in
    /// another.
    pub fused_delta_nets: bool,
    /// Hugging Face has the layers that predict further tokens behind the others, as GGUF does.
    pub predicts_in_layers: bool,
    /// Attention is multi-head latent attention: how its layouts differ.
    pub latents: Option<Latents>,
    /// Tokens see those after them, so that a model makes embeddings alone.
    pub sees_later: bool,
    /// The keys of Mamba-2's sizes, where it has such layers.
    pub mamba: Option<Mamba2Keys>,
    /// The prefix of the text model's names, but for GGUF, where it is not `model.`; aliases are
    /// then of names outside of layers, too.
    pub text_prefix: Option<&'static str>,
    /// Keys that `config.json` of mlx-lm's checkpoints has under another name: ours, and that one.
    pub mlx_keys: &'static [Alias],
    /// Modules of layers of latent attention that other layers call otherwise, though the
    /// checkpoints' names are the same: the other layers' names, and those.
    pub latent_names: &'static [Alias],
    /// Names that MLX's checkpoints have otherwise than [`aliases`](super::Architecture::aliases)
    /// says.
    pub mlx_aliases: &'static [Alias],
    /// The parts of it that mlx-lm computes.
    pub mlx_lm: MlxLm,
}

/// The parts of an architecture that mlx-lm 0.32 computes.
#[derive(Clone, Copy, Debug)]
pub struct MlxLm {
    /// The kinds of scaled rotary embeddings; `None` for all.
    pub rope_types: Option<&'static [&'static str]>,
    /// The output layer is never the embedding there: a checkpoint without one is not read.
    pub never_ties: bool,
    /// The output layer is always the embedding there: a checkpoint with another is not read.
    pub always_ties: bool,
    /// All layers attend to all tokens there.
    pub ignores_windows: bool,
    /// It fails on a checkpoint without soft caps.
    pub wants_caps: bool,
    /// True if, with windows, some layers must have one, and others none.
    pub wants_both_kinds: bool,
}

impl MlxLm {
    /// All that transformers computes.
    pub const ALL: Self = Self {
        rope_types: None,
        never_ties: false,
        always_ties: false,
        ignores_windows: false,
        wants_caps: false,
        wants_both_kinds: false,
    };
    /// No scaled rotary embeddings.
    pub const UNSCALED: Self = Self { rope_types: Some(&[]), ..Self::ALL };
    /// Neither those nor a tied output layer.
    pub const UNSCALED_UNTIED: Self = Self { never_ties: true, ..Self::UNSCALED };
}

/// The differences between the layouts of multi-head latent attention.
#[derive(Clone, Copy, Debug)]
pub struct Latents {
    /// MLX has the projections from latents per head, in the form that is computed with; Hugging
    /// Face has them in one matrix.
    pub mlx_per_head: bool,
    /// mlx-lm's norms of compressed queries and of latents have the model's eps, as llama.cpp's do;
    /// those of transformers have 1e-6.
    pub mlx_has_eps: bool,
    /// mlx-lm fails without YaRN.
    pub mlx_wants_yarn: bool,
}

impl Latents {
    /// The eps of those norms in a checkpoint of this layout, whose model has `eps`.
    pub fn norm_eps(&self, layout: Layout, eps: f32) -> f32 {
        match layout {
            Layout::Gguf => eps,
            Layout::Mlx if self.mlx_has_eps => eps,
            Layout::Mlx | Layout::HuggingFace => 1e-6,
        }
    }
}

/// Windows that only some layers have.
#[derive(Clone, Copy, Debug)]
pub struct Windows {
    /// Of so many layers the last one has no window, where a GGUF file does not say it.
    pub interval: usize,
    /// Layers with a window have a rotary embedding of their own.
    pub ropes: bool,
    /// The keys of `config.json`.
    pub keys: WindowKeys,
}

/// The keys by which `config.json` says which layers have windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowKeys {
    /// `layer_types`.
    Types,
    /// Of Gemma 3: mlx-lm reads an interval alone.
    Interval,
    /// Of Gemma 4: `layer_types`, and each kind of layer has heads of its own size, too.
    Sizes,
    /// Of EXAONE 4: mlx-lm reads a letter for each layer, `L` where there is a window.
    Letters,
}

/// The names of a [`Mamba2Config`](crate::layers::Mamba2Config)'s sizes in `config.json`. GGUF's
/// are the same for all.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Mamba2Keys {
    pub num_heads: &'static str,
    pub head_dim: &'static str,
    pub state_size: &'static str,
    pub n_groups: &'static str,
    pub conv_kernel: &'static str,
    pub limits: &'static str,
}

/// LongRoPE's divisors, for contexts of the original training's length and for longer ones.
pub const LONG_ROPE: &[&str] = &["rope_factors_short.weight", "rope_factors_long.weight"];

impl Conversion {
    /// None of them.
    pub const PLAIN: Self = Self {
        like_llama: false,
        rope_divisors: &[],
        query_scale: false,
        mlx_is_text: false,
        windows: None,
        names_plain_rope: false,
        rounds_yarn: false,
        rotary_dimension: false,
        alpha_rope: false,
        gguf_never_ties: false,
        gguf_always_ties: false,
        sections: false,
        tiled_value_heads: false,
        fused_delta_nets: false,
        predicts_in_layers: false,
        latents: None,
        sees_later: false,
        mamba: None,
        text_prefix: None,
        mlx_keys: &[],
        latent_names: &[],
        mlx_aliases: &[],
        mlx_lm: MlxLm::ALL,
    };
}
