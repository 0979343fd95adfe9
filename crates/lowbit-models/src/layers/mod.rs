//! The layers of decoders. A layer holds its weights and calls the ops.

mod attention;
mod block;
mod decoder;
mod delta_net;
mod latent_attention;
mod layer_embedding;
mod linear;
mod mamba2;
mod mlp;
mod moe;
mod norm;
mod parallel;
mod rope;
mod short_conv;
mod spec;
mod tied;
mod verify;

pub use attention::{Attention, AttentionConfig, HeadNorms, QueryScale};
pub use block::{Block, Residual, Step, wrong_cache};
pub(crate) use block::{PagedRows, PagedWindow, PoolRows, PoolSpan, SpanWindow};
pub use decoder::{Decoder, DecoderConfig};
pub use delta_net::{DeltaNetConfig, GatedDeltaNet};
pub use latent_attention::{LatentAttention, LatentAttentionConfig};
pub use layer_embedding::{LayerEmbeddings, LayerInput};
pub use linear::{Embedding, Linear, MergedLinear};
pub use mamba2::{Mamba2, Mamba2Config, Mamba2Keys};
pub use mlp::Mlp;
pub use moe::{MoeConfig, SparseMoe};
pub use norm::{PartInput, RmsNorm};
pub use parallel::ParallelMoe;
pub(crate) use rope::latent_scale;
pub use rope::{RopeKind, STILL, rope_params, rope_params_of, sections_cover};
pub use short_conv::{ShortConv, ShortConvConfig};
pub use spec::{DecoderSpec, FeedforwardSpec, LayerNorms, LayerSpec, MixerSpec, MlpConfig, Multipliers};
pub(crate) use verify::{Recurrences, StateRows};
