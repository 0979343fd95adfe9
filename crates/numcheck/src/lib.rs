//! Test support: peers' vectors and error bounds.
//!
//! Vectors are safetensors files under `tests/vectors/`, written by `tools/peer_vectors.py` from
//! the peers' own packages; each file's metadata says which package and version.

mod bounds;
// Benchmarks check their answers with these two, so they are published in lowbit-device, which
// numcheck is not: tests have them from here without depending on the kernels.
#[path = "../../lowbit-device/src/gamma.rs"]
mod gamma;
#[path = "../../lowbit-device/src/random.rs"]
mod random;
mod vectors;

pub use bounds::{assert_bits, assert_within};
pub use gamma::gamma;
pub use random::Random;
pub use vectors::{Vector, Vectors};
