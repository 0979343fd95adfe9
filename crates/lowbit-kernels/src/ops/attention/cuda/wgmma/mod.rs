//! Attention on Hopper's tensor cores, for prompts: the structure of FlashAttention-3 (Shah et al.
//! 2024).
//!
//! Two groups of four planes have 64 query rows each, and a third copies keys and values. While a
//! group computes the weights of a tile of keys, tensor cores multiply the weights of the tile
//! before with its values, and work for the other group.

mod config;
mod pipe;
mod softmax;

pub(in super::super) use config::{ROWS, WgmmaConfig};

use super::rows::{
    Destination, Layout, PartPlace, RowBounds, place, row_bounds, visible_keys, zero_non_finite_values,
};
use crate::gpu::cuda::ptx::attention::{begin, multiply_keys, multiply_values, round_weights, wait_products};
use crate::gpu::cuda::ptx::{
    address, copy_vector, leave_registers, register, show_writes, take_registers, wait_copies,
};
use crate::gpu::launch::kernel;
use crate::ops::attention::gpu::operands::{Inputs, InputsArgs, Sizes, row_index};
use config::{MULTIPLYING, REGISTERS};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use pipe::{Of, Pipe, Tiles, copy_tiles, open, tiles};
use softmax::{Softmax, cap_scores, mask};

/// See [`attention`](crate::ops::attention()). `scale` is an f32 and includes the factor log2(e). y
/// holds pairs of q's type, or the bits of f32 where the keys are split.
#[kernel]
pub(super) fn attention_wgmma(
    inputs: &Inputs<Vector<u32, Const<4>>, Vector<u32, Const<4>>>,
    y: &mut [u32],
    scales: &mut [f32],
    sizes: Sizes,
    scale: u32,
    #[comptime] config: WgmmaConfig,
) {
    let scale = f32::reinterpret(scale);
    let memory =
        Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!(config.bytes() / 16), 1024usize);
    let memory = register(address(&memory));
    let pipe = open(memory, CUBE_POS_X * sizes.capacity, config);
    // The last rows have most keys, and go first.
    let row0 = (sizes.rows.div_ceil(comptime!(ROWS as u32)) - 1u32 - CUBE_POS_Y) * comptime!(ROWS as u32);
    let multiplies = UNIT_POS_X < comptime!(MULTIPLYING as u32);
    if multiplies {
        copy_queries(&inputs.q, memory, row0, &sizes, config);
        wait_copies();
        show_writes();
    }
    let visible = visible_keys(&inputs.positions, row0, &sizes, config.cut());
    // This group's queries in each panel.
    let q = register(memory + UNIT_POS_X / 128u32 * comptime!(64 * 128u32));
    let cube = Cube { pipe, tiles: tiles(&visible, config), q, scale };
    begin(config.products());
    if multiplies {
        take_registers(REGISTERS.0);
        let own = row0 + UNIT_POS_X / 32u32 * 16u32 + UNIT_POS_X % 32u32 / 4u32;
        let bounds = row_bounds(&inputs.positions, own, &sizes, 2usize);
        let mut softmax = Softmax::new();
        cube.multiply_masked(&mut softmax, &bounds, config);
        cube.multiply_others(&mut softmax, config);
        let any_keys = cube.tiles.count > 0u32;
        let part = PartPlace::of_cube(sizes.rows);
        let out = Destination { own, rows: sizes.rows, group: sizes.group, scale, any_keys, part };
        softmax.store(y, scales, &out, config);
    } else {
        leave_registers(REGISTERS.1);
        copy_tiles(inputs, &cube.pipe, &cube.tiles, config);
    }
}

/// Tiles, queries and scale of the multiplying planes.
#[derive(CubeType)]
struct Cube {
    pipe: Pipe,
    tiles: Tiles,
    /// The address of this group's queries.
    q: u32,
    scale: f32,
}

#[cube]
impl Cube {
    /// Takes the tiles that some rows do not wholly see, one after the other.
    pub fn multiply_masked(
        &self,
        softmax: &mut Softmax,
        bounds: &RowBounds,
        #[comptime] config: WgmmaConfig,
    ) {
        let mut non_finite = Shared::<[u32]>::new_slice(comptime!(config.keys));
        let mut i = 0u32.runtime();
        while i < self.tiles.masked {
            self.begin_scores(i, config);
            wait_products(0usize);
            self.pipe.release(i, Of::Keys, config);
            self.pipe.wait(i, Of::Values, config);
            zero_non_finite_values(self.pipe.tile(i, Of::Values, config), &mut non_finite, config.values());
            cap_scores(self.scale, config);
            mask(&non_finite, bounds, self.tiles.first(i, config), self.tiles.end, config);
            let shrink = softmax.weigh(self.scale, config);
            round_weights(shrink, config.products());
            self.begin_values(i, config);
            wait_products(0usize);
            self.pipe.release(i, Of::Values, config);
            i += 1u32;
        }
    }

    /// Takes the others: while weights of one are computed, those of the one before are multiplied.
    pub fn multiply_others(&self, softmax: &mut Softmax, #[comptime] config: WgmmaConfig) {
        let mut i = self.tiles.masked;
        if i < self.tiles.count {
            self.begin_scores(i, config);
            wait_products(0usize);
            self.pipe.release(i, Of::Keys, config);
            cap_scores(self.scale, config);
            let shrink = softmax.weigh(self.scale, config);
            self.pipe.wait(i, Of::Values, config);
            round_weights(shrink, config.products());
            i += 1u32;
            while i < self.tiles.count {
                self.begin_scores(i, config);
                self.begin_values(i - 1u32, config);
                wait_products(1usize);
                self.pipe.release(i, Of::Keys, config);
                cap_scores(self.scale, config);
                let shrink = softmax.weigh(self.scale, config);
                // This wait also keeps the assembler from waiting for all products before it
                // computes the weights.
                self.pipe.wait(i, Of::Values, config);
                wait_products(0usize);
                self.pipe.release(i - 1u32, Of::Values, config);
                round_weights(shrink, config.products());
                i += 1u32;
            }
            show_writes();
            self.begin_values(i - 1u32, config);
            wait_products(0usize);
        }
    }

    /// Begins the products with the keys of tile `i`, when it is there. Copies that were waited for
    /// can then be multiplied.
    fn begin_scores(&self, i: u32, #[comptime] config: WgmmaConfig) {
        self.pipe.wait(i, Of::Keys, config);
        show_writes();
        multiply_keys(self.q, self.pipe.tile(i, Of::Keys, config), config.products());
    }

    /// Begins the products with the values of tile `i`.
    fn begin_values(&self, i: u32, #[comptime] config: WgmmaConfig) {
        multiply_values(self.pipe.tile(i, Of::Values, config), config.products());
    }
}

/// Begins to copy the cube's rows of q.
#[cube]
fn copy_queries(
    q: &[Vector<u32, Const<4>>],
    to: u32,
    row0: u32,
    sizes: &Sizes,
    #[comptime] config: WgmmaConfig,
) {
    let vectors = comptime!((config.width / 8) as u32);
    let pass = comptime!(MULTIPLYING / (config.width / 8));
    let column = UNIT_POS_X % vectors;
    #[unroll]
    for n in 0..comptime!(ROWS / pass) {
        let row = UNIT_POS_X / vectors + comptime!((n * pass) as u32);
        // Rows past the last are computed and not stored.
        let from = row_index(min(row0 + row, sizes.rows - 1u32), sizes.group) * vectors + column;
        copy_vector(q, from, to + place(row, column, comptime!(Layout::Panels(ROWS))));
    }
}
