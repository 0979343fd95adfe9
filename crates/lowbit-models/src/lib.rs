//! Language models over the ops of `lowbit-kernels`. A [`Checkpoint`](lowbit_files::Checkpoint) is
//! loaded into a [`Model`], which has caches, generation, and gradients ([`tape`],
//! [`Distillation`]). Each architecture is a file under [`arch`].
//!
//! # Features
//!
//! `cuda`, `vulkan` and `metal` bring the devices of these names, as in `lowbit-kernels`; the
//! default build runs on the CPU.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod arch;
mod batch;
mod blocks;
mod cache;
mod compile;
mod config;
mod dense;
mod distill;
mod error;
mod generate;
mod grammar;
pub mod keys;
pub mod layers;
mod logprobs;
mod model;
pub mod names;
mod outline;
mod perplexity;
mod pool;
mod pooled;
mod speculate;
#[cfg(all(test, any(feature = "cuda", feature = "vulkan", feature = "metal")))]
#[path = "../tests/models/support/mod.rs"]
mod support;
pub mod tape;
mod target;
mod warnings;
mod weights;

pub use batch::{BatchDrawn, BatchRow, BatchSteps, FirstRow, MtpRow, Verification, Verified};
pub use cache::window::WINDOW_ROLLBACK;
pub use cache::{Cache, CacheSize, DeltaCache, KvCache, LayerCache, Mark};
pub use compile::{dry_batches, dry_chat, dry_generation, dry_guesses, dry_pooled, dry_speculation};
pub use config::Config;
pub use distill::{Distillation, Distilled, TargetDistillation, likelihood_gradients, top_k_targets};
pub use error::ModelError;
pub use generate::{Finish, Generation, GenerationOptions, LogitRules, Session, Steps};
pub use grammar::{Constraint, Grammar};
pub use logprobs::{Logprob, TokenLogprobs};
#[doc(no_inline)]
pub use lowbit_kernels::ops::CacheType;
pub use model::{Logits, Model, Sequence};
pub use outline::{Difference, Outline};
pub use perplexity::{
    ComparedToken, Estimate, Perplexity, Quantiles, Scoring, Statistics, compare, compare_layers,
    dry_perplexity, perplexity,
};
pub use pool::{CachePool, PoolCache, PoolMark, PoolSequence};
pub use pooled::Pooled;
pub use speculate::{
    DraftModel, DraftPass, Drafter, Mtp, Ngrams, Predictor, Script, Speculated, Speculation,
};
pub use target::Target;
pub use warnings::warnings;
pub use weights::Weights;
