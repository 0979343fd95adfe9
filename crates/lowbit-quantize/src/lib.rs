//! Quantising checkpoints by a [`Recipe`]: into the layout that mlx-lm writes and reads, and into
//! GGUF with the types that `llama-quantize` chooses; rounded to nearest, or learned.

mod computed;
mod config_json;
mod converted;
mod error;
mod exact;
mod from_gguf;
mod gguf;
mod heads;
mod latents;
mod learn;
mod left_out;
mod mlx;
mod mlx_lm;
mod nvfp4;
mod output_path;
mod planned;
mod recipe;
mod rope_divisors;
mod round;
mod rule;
mod sensitivity;
mod source;
mod summary;
mod tensor;
mod threads;

pub use error::QuantizeError;
pub use gguf::Mix;
pub use learn::{
    BlockReport, Data, Found, Learn, LearnOptions, LearnProgress, LearnReport, Learning, Progress, Saving,
    Targets, default_rate,
};
pub use recipe::{Made, OutputFormat, Recipe};
pub use round::MlxFormat;
pub use rule::Rule;
pub use sensitivity::Budget;
pub use summary::{Fallback, Kind, KindSummary, Summary};

/// The README's examples are tests, too.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
