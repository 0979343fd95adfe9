//! Kernels for NVIDIA's hardware alone, on tensor cores, and the vendor's library.
//!
//! | | |
//! |---|---|
//! | `stream.rs` | one row of x, from Hopper on: the weight streams through shared memory |
//! | `stream_rows/` | 2 to 32 rows of x, and more of narrow weights, likewise: exact products of codes |
//! | `stream_experts/` | steps with experts, likewise: each cube sorts the pairs of tokens and experts |
//! | `mma_vec/` | 1 to 8 rows of x: wide loads, exact products of codes |
//! | `mma_rows/` | 6 to 32 rows of x, and experts with few pairs each: exact products of codes |
//! | `wgmma/` | many rows of x, on Hopper: weights rounded to x's type; experts with many pairs |
//! | `mma_tile/` | the same before and after Hopper |
//! | `vendor_blas.rs` | very many rows: the weight decoded to memory, then cuBLASLt |
//! | `numbers.rs`, `staging.rs` | shared by the exact ones: codes as numbers of x's type; x in shared memory |
//! | `parts.rs` | results in parts of their columns |
//! | `tiles/` | shared by the rounding ones: weights in registers, x packed, pairs sorted by expert |

pub(super) mod mma_rows;
pub(super) mod mma_tile;
pub(super) mod mma_vec;
mod numbers;
pub(super) mod parts;
mod staging;
pub(super) mod stream;
pub(super) mod stream_experts;
pub(super) mod stream_rows;
pub(super) mod tiles;
pub(in crate::ops) mod vendor_blas;
pub(super) mod wgmma;
