//! The engine's tests.

#[path = "../../../lowbit-models/tests/models/support/mod.rs"]
mod device;
mod support;

mod gpu;
mod guesses;
mod lifecycle;
mod replies;

// The library's own tests have the support of devices, too, and name these by the crate.
use lowbit_models::{Model, Target};
