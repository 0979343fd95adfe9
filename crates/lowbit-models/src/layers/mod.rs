//! What decoder blocks are made of. A layer holds its weights and calls the ops; how a checkpoint names and lays
//! out the weights is each architecture's business.

mod attention;
mod decoder;
mod delta_net;
mod linear;
mod mlp;
mod moe;
mod norm;
mod rope;
mod tied;

pub use attention::{Attention, AttentionConfig};
pub(crate) use decoder::Step;
pub use decoder::{Block, Decoder, DecoderConfig, Feedforward, Mixer};
pub use delta_net::{DeltaNetConfig, GatedDeltaNet};
pub use linear::{Embedding, Linear, MergedLinear};
pub use mlp::Mlp;
pub use moe::{MoeConfig, SparseMoe};
pub use norm::RmsNorm;
pub use rope::rope_params;
