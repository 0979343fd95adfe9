//! Tests of whole models.

mod support;
#[path = "support/thirds.rs"]
mod thirds;
#[path = "support/tiny.rs"]
mod tiny;

mod bad_input;
mod compile;
mod config;
mod distillation;
mod families;
mod gguf_keys;
mod gpu;
mod gradients;
mod names;
mod peers;
mod pool;
mod sessions;
mod speculation;
mod windows;

// The library's own tests have the support, too, and name these by the crate.
use lowbit_models::{Model, Target};
