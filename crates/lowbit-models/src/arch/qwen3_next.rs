//! Qwen3-Next: gated delta nets with gated full attention every fourth layer, and a mixture of
//! experts. Source: transformers 5 `models/qwen3_next`; llama.cpp `src/models/qwen3next.cpp`.

use super::biases::BY_FLAGS;
use super::qwen3::attention;
use super::qwen3_moe::feedforward;
use super::{Architecture, Conversion, ModelType, OffsetNorms, TiedByDefault, decoder, text_model};
use crate::keys::Fixed::Flag;
use crate::keys::{BASE, DECODER, EXPERTS, GGUF, GGUF_EXPERTS, GGUF_HYBRID, HYBRID, Key};
use crate::layers::{
    AttentionConfig, DecoderConfig, DecoderSpec, DeltaNetConfig, LayerNorms, LayerSpec, MixerSpec, MoeConfig,
};
use crate::names::{
    self, ATTENTION, DELTA_NET, HEAD_NORMS, INPUT_NORM, MLP, NEXTN, POST_ATTENTION_NORM, SHARED_EXPERT,
    SHARED_EXPERT_GATE, TOP,
};
use crate::{Config, ModelError, Weights};
use lowbit_files::Layout;
use lowbit_kernels::ops::HeadMap;

pub const QWEN3_NEXT: Architecture = Architecture {
    model_types: &[ModelType {
        name: "qwen3_next",
        tables: &[KEYS, HYBRID, EXPERTS, DECODER, BASE],
        wraps: false,
    }],
    gguf: "qwen3next",
    gguf_keys: &[GGUF_HYBRID, GGUF_EXPERTS, GGUF],
    offset_norms: Some(OFFSET_NORMS),
    names: &[
        TOP,
        ATTENTION,
        HEAD_NORMS,
        DELTA_NET,
        &MLP,
        names::EXPERTS,
        &SHARED_EXPERT,
        &[SHARED_EXPERT_GATE, POST_ATTENTION_NORM],
        NEXTN,
    ],
    aliases: &[],
    biases: BY_FLAGS,
    conversion: Conversion { fused_delta_nets: true, ..Conversion::PLAIN },
    mlx_prefix: "",
    tied_by_default: TiedByDefault::NO,
    describe,
};

/// All norms of Qwen3-Next and Qwen3.5 except those inside gated delta nets. mlx-lm and llama.cpp's
/// converter add the 1.
pub(super) const OFFSET_NORMS: OffsetNorms = OffsetNorms {
    layouts: &[Layout::HuggingFace],
    names: &[
        ".input_layernorm",
        ".post_attention_layernorm",
        "model.norm",
        ".q_norm",
        ".k_norm",
        // Of the layers that predict further tokens, as they are called in names::NEXTN.
        ".enorm",
        ".hnorm",
        ".shared_head.norm",
        // The same as they are published.
        "mtp.pre_fc_norm_embedding",
        "mtp.pre_fc_norm_hidden",
        "mtp.norm",
    ],
};

const KEYS: &[Key] = &[
    // Of the layers without experts.
    Key::optional("intermediate_size"),
    Key::size("num_key_value_heads", 2),
    Key::size("num_experts", 512),
    Key::size("num_experts_per_tok", 10),
    Key::size("moe_intermediate_size", 512),
    Key::size("shared_expert_intermediate_size", 512),
    Key::disputed("norm_topk_prob", Flag(true)),
    Key::size("decoder_sparse_step", 1),
    Key::optional("mlp_only_layers"),
];

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let hybrid = Hybrid::new(config, weights, &sizes, HeadMap::Grouped)?;
    let moe = MoeConfig::new(config, true)?;
    decoder(sizes, |index| {
        Ok(LayerSpec {
            norms: LayerNorms::before(INPUT_NORM, POST_ATTENTION_NORM),
            mixer: hybrid.mixer(config, index)?,
            feedforward: feedforward(config, weights, &moe, index)?,
        })
    })
}

/// The part that Qwen3-Next and Qwen3.5 share: the two mixers, and the layers that have each.
pub(super) struct Hybrid {
    attention: AttentionConfig,
    delta_net: DeltaNetConfig,
    layers: usize,
}

impl Hybrid {
    pub(super) fn new(
        config: &Config<'_>,
        weights: &Weights<'_>,
        sizes: &DecoderConfig,
        head_map: HeadMap,
    ) -> Result<Self, ModelError> {
        let delta_net = DeltaNetConfig::new(config, head_map)?;
        check_convolutions(weights, sizes, delta_net.linear_conv_kernel_dim)?;
        let mut attention = attention(config, weights, sizes)?;
        attention.gated = true;
        Ok(Self { attention, delta_net, layers: sizes.num_hidden_layers })
    }

    pub(super) fn mixer(&self, config: &Config<'_>, index: usize) -> Result<MixerSpec, ModelError> {
        let kinds = &["full_attention", "linear_attention"];
        let full = match config.layer_type(index, self.layers, kinds)? {
            Some(kind) => kind == "full_attention",
            None => {
                let interval =
                    config.optional_size("full_attention_interval", "full_attention_interval")?.unwrap_or(4);
                if interval == 0 {
                    return Err(config.refuse("full_attention_interval", "0", "it is at least 1"));
                }
                (index + 1).is_multiple_of(interval)
            }
        };
        Ok(match full {
            true => MixerSpec::Attention(self.attention.clone()),
            false => MixerSpec::DeltaNet(self.delta_net.clone()),
        })
    }
}

/// Checks that the convolutions have the shape that goes with the checkpoint's layout: mlx-lm
/// transposes `[C, 1, W]` to `[C, W, 1]` when it adds 1 to the norms. A checkpoint with only one of
/// the two changes would be computed wrongly.
fn check_convolutions(weights: &Weights<'_>, sizes: &DecoderConfig, width: usize) -> Result<(), ModelError> {
    let (name, model) = ("linear_attn.conv1d.weight", text_model(weights));
    let (kind, want) = match weights.layout() {
        Layout::Gguf => return Ok(()),
        Layout::HuggingFace => ("as published, not mlx-lm's", [1, width]),
        Layout::Mlx => ("mlx-lm's", [width, 1]),
    };
    for layer in 0..sizes.num_hidden_layers {
        let Some(shape) = model.layer(layer).shape(name, "") else { continue };
        if shape.len() != 3 || shape[1..] != want {
            return Err(ModelError::Tensor {
                path: weights.path().to_path_buf(),
                name: format!("layer {layer}'s {name}"),
                got: format!("{shape:?}"),
                want: format!("[channels, {}, {}]: the checkpoint is {kind}", want[0], want[1]),
            });
        }
    }
    Ok(())
}
