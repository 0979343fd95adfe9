//! Test support: peers' vectors and error bounds.
//!
//! Vectors are safetensors files under `tests/vectors/`, written by `tools/peer_vectors.py` from the peers' own
//! packages; each file's metadata says which package and version.

mod bounds;
mod random;
mod vectors;

pub use bounds::{assert_bits, assert_within, gamma};
pub use random::Random;
pub use vectors::{Vector, Vectors};
