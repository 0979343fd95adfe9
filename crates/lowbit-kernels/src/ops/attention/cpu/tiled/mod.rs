//! Attention of many rows on a unit that multiplies tiles of bf16 ([`tiles`](crate::simd::tiles)).
//!
//! Scores are kept transposed, `[keys][rows]`, and so are the sums of values, `[Dv][rows]`:
//! whatever the softmax does, a lane is a row.
//!
//! ```text
//! scores [keys][rows]  = k   [keys][D]  * q^T     [D][rows]
//! sums   [Dv][rows]   += v^T [Dv][keys] * weights [keys][rows]
//! ```
//!
//! Queries are laid in tiles once; keys and values are once per [`KEYS`], for all rows of a task.
//! Queries (scaled), keys, weights and values are rounded to bf16, to nearest even; sums are f32.
//!
//! Floor: for 32 rows, a key costs `D + Dv` products per row, of which four tiles in 16 cycles each
//! do 32 x 32 x 32; and a weight some 15 operations of a vector of 16, which for heads of 128 is
//! about as long.

mod chunk;
mod rows;
#[cfg(test)]
mod tests;

use super::{Plan, Task};
use crate::{
    Cpu,
    buffer::Buffer,
    ops::cache_rows::Stored,
    simd::{
        Simd,
        tiles::{Block, Pairs, STEP, TILE, TileKernel, Tiles},
    },
};
use bytemuck::Pod;
use chunk::Chunk;
use rows::{Rows, Scratch};
use std::sync::Arc;

/// Keys whose scores are computed at a time: with their weights they stay in the first-level cache.
const KEYS: usize = 128;
/// Steps that a sum over them has.
const STEPS: usize = KEYS / STEP;
/// Rows whose scores are computed at a time.
const ROWS: usize = 2 * TILE;

/// A [`Task`] of many rows.
pub(super) struct Tiled<'a, T> {
    pub cpu: &'a Arc<Cpu>,
    pub task: Task<'a, T>,
}

impl<T: Stored> TileKernel for Tiled<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, U: Tiles>(self, simd: S, tiles: &mut U) {
        let Self { cpu, mut task } = self;
        let Plan { width, value_width, .. } = *task.plan;
        let blocks = task.rows().div_ceil(ROWS);
        let [k, v] = Chunk::tiles([width, value_width]);
        let (queries, sums) = (2 * width.div_ceil(STEP), value_width.div_ceil(2 * TILE));
        let pairs = k + v + 2 * STEPS + blocks * queries;
        let bytes = pairs * size_of::<Pairs>() + (STEPS + blocks * sums) * size_of::<Block>();
        // The next task takes it again.
        let mut buffer = Buffer::any(bytes, cpu).expect("memory for attention's tiles");
        let mut memory = buffer.bytes_mut();
        let mut chunk = Chunk::new([width, value_width], take(&mut memory, k), take(&mut memory, v));
        let mut scratch = Scratch {
            scores: take(&mut memory, STEPS),
            weights: [take(&mut memory, STEPS), take(&mut memory, STEPS)],
        };
        let mut all = Vec::with_capacity(blocks);
        for index in 0..blocks {
            let (queries, sums) = (take(&mut memory, queries), take(&mut memory, sums));
            all.push(Rows::new(simd, &task, index * ROWS, queries, sums));
        }
        for start in task.keys.clone().step_by(KEYS) {
            let keys = start..task.keys.end.min(start + KEYS);
            if all.iter().any(|rows| rows.steps(&keys) > 0) {
                chunk.load(simd, &task, keys);
                for rows in &mut all {
                    rows.add(simd, tiles, &chunk, &mut scratch);
                }
            }
        }
        for (index, rows) in all.into_iter().enumerate() {
            rows.finish(simd, index * ROWS, value_width, &mut task.output);
        }
    }
}

/// The first `count` elements of what is left of `memory`.
fn take<'a, P: Pod>(memory: &mut &'a mut [u8], count: usize) -> &'a mut [P] {
    let (taken, rest) = std::mem::take(memory).split_at_mut(count * size_of::<P>());
    *memory = rest;
    bytemuck::cast_slice_mut(taken)
}
