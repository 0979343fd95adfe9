//! Language models over the ops of `lowbit-kernels`: loading a [`Checkpoint`](lowbit_files::Checkpoint) into a
//! [`Model`], its caches, and generation. One file per architecture, under [`arch`].

pub mod arch;
mod cache;
mod config;
mod error;
mod generate;
pub mod keys;
pub mod layers;
mod model;
mod perplexity;
mod steps;
#[cfg(all(test, any(feature = "cuda", feature = "vulkan", feature = "metal")))]
#[path = "../tests/support/mod.rs"]
mod support;
mod warnings;
mod weights;

pub use cache::{Cache, LayerCache};
pub use config::Config;
pub use error::ModelError;
pub use generate::{Finish, Generation, GenerationOptions, Session};
pub use model::{Logits, Model};
pub use perplexity::{Perplexity, Scoring, perplexity};
pub use warnings::warnings;
pub use weights::{Target, Weights};
