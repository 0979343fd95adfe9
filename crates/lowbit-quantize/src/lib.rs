//! Quantising checkpoints, round-to-nearest: into the layout that mlx-lm writes and reads, and into
//! GGUF with the types that `llama-quantize` chooses.

mod computed;
mod config_json;
mod converted;
mod error;
mod exact;
mod from_gguf;
mod gguf;
mod heads;
mod learn;
mod left_out;
mod mlx;
mod output_path;
mod rope_divisors;
mod round;
mod rule;
mod sensitivity;
mod source;
mod summary;
mod tensor;
mod threads;

pub use error::QuantizeError;
pub use gguf::{GgufOptions, Mix, plan_gguf, quantize_to_gguf, quantize_to_gguf_and_learn};
pub use learn::{
    BlockReport, Data, Found, Learn, LearnOptions, LearnProgress, LearnReport, Learning, Progress, Saving,
    Targets, default_rate,
};
pub use round::{QuantizeOptions, plan, quantize, quantize_and_learn};
pub use rule::Rule;
pub use sensitivity::{Budget, allocate_bits};
pub use summary::{Fallback, Kind, KindSummary, Summary};

/// The README's examples are tests, too.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
