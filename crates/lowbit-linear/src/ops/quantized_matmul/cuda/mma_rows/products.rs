//! The products of a group: codes to numbers, numbers times x, and what scales them.

use super::super::numbers::{numbers, split};
use super::super::staging::Staged;
use super::config::{MmaRows, STEP};
use crate::gpu::cuda::ptx::{address, multiply, register, shared};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Addresses of what a unit needs of shared memory.
#[derive(CubeType)]
pub(super) struct Addresses {
    /// x's quarters for row `unit / 4`.
    pub x: u32,
    /// The sums of x for the first column of the unit's sums.
    pub sums: u32,
    /// The terms for the first row of the weight.
    pub terms: u32,
}

/// Those of a chunk's first step.
#[cube]
pub(super) fn addresses(
    x: &Staged,
    terms: &Shared<[Vector<f32, Const<2>>]>,
    strip: usize,
    #[comptime] config: MmaRows,
) -> Addresses {
    let (g, t) = (UNIT_POS_X % 32u32 / 4u32, UNIT_POS_X % 4u32);
    Addresses {
        x: address(&x.values) + (g * comptime!(config.x_row() as u32) + t) * 16u32,
        sums: address(&x.sums) + t * comptime!(8 * config.sum_row() as u32),
        terms: address(terms) + (strip as u32 + g) * comptime!(8 * config.term_row() as u32),
    }
}

/// Those of the chunk's `step`-th step.
#[cube]
pub(super) fn of_step(first: &Addresses, step: u32, #[comptime] config: MmaRows) -> Addresses {
    let groups = comptime!(config.groups() as u32);
    Addresses {
        x: register(first.x + step * comptime!(2 * STEP as u32)),
        sums: register(first.sums + step * (4u32 * groups)),
        terms: register(first.terms + step * (8u32 * groups)),
    }
}

/// Adds up x's groups of the chunk that begins at `x`, as products with ones: the sums are where
/// products with the weight have theirs.
#[cube]
pub(super) fn sum_groups(x: u32, x_sums: &mut Shared<[f32]>, #[comptime] config: MmaRows) {
    let one = comptime!(if config.x_type == FloatType::BF16 { 0x3f80_3f80u32 } else { 0x3c00_3c00u32 });
    let groups = comptime!(config.chunk * config.groups());
    let (unit, plane) = (UNIT_POS_X as usize % 32, UNIT_POS_X as usize / 32);
    let mut ones = Array::<u32>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        ones[i] = one.runtime();
    }
    let mut i = plane;
    while i < comptime!(groups * config.m_octets()) {
        let (group, column) = (i % groups, i / groups * 8);
        let skipped = group * comptime!(2 * config.group()) + column * comptime!(16 * config.x_row());
        let from = register(x + skipped as u32);
        let mut sums = Array::<f32>::new(4usize);
        #[unroll]
        for j in 0..4usize {
            sums[j] = 0.0;
        }
        #[unroll]
        for v in 0..comptime!(config.part() / 8) {
            let vector = shared::<u32, Const<4>>(from, comptime!(64 * v), 4usize);
            #[unroll]
            for half in 0..2usize {
                let (b0, b1) = (vector.extract(2 * half), vector.extract(2 * half + 1));
                multiply(&ones, 0usize, b0, b1, &mut sums, 0usize, config.x_type);
            }
        }
        // All rows of ones have the same sums.
        if unit < 4 {
            let to = (column + 2 * unit) * comptime!(config.sum_row()) + group;
            x_sums[to] = sums[0];
            x_sums[to + comptime!(config.sum_row())] = sums[1];
        }
        i += comptime!(config.strips * config.splits);
    }
}

/// The products of group `group` of a step, whose x lies at `x`: of each 8 rows of x, those of each
/// tile.
#[cube]
pub(super) fn multiply_group(
    words: &Array<u32>,
    x: u32,
    ones: u32,
    #[comptime] group: usize,
    #[comptime] config: MmaRows,
) -> Array<f32> {
    let (rows, columns) = comptime!((2 * config.n_tiles, config.m_octets()));
    let of_row = comptime!(config.numbers().halves(config.part()));
    let mut halves = Array::<u32>::new(comptime!(rows * of_row));
    #[unroll]
    for r in 0..rows {
        let from = comptime!((group * rows + r) * config.words());
        split(words, from, &mut halves, comptime!(r * of_row), config.part(), ones, config.numbers());
    }
    let mut products = Array::<f32>::new(comptime!(columns * config.n_tiles * 4));
    #[unroll]
    for i in 0..comptime!(columns * config.n_tiles * 4) {
        products[i] = 0.0;
    }
    // A vector of x serves two products, and each product takes two pairs of codes of a row.
    #[unroll]
    for v in 0..comptime!(config.part() / 8) {
        let mut b = Array::<u32>::new(comptime!(4 * columns));
        #[unroll]
        for f in 0..columns {
            let at = comptime!(group * 2 * config.group() + 16 * (8 * f * config.x_row() + 4 * v));
            let vector = shared::<u32, Const<4>>(x, at, 4usize);
            #[unroll]
            for j in 0..4usize {
                b[4 * f + j] = vector.extract(j);
            }
        }
        #[unroll]
        for half in 0..2usize {
            #[unroll]
            for tile in 0..comptime!(config.n_tiles) {
                let mut a = Array::<u32>::new(4usize);
                #[unroll]
                for i in 0..4usize {
                    let (r, q) = comptime!((2 * tile + i % 2, 4 * v + 2 * half + i / 2));
                    a[i] = numbers(&halves, comptime!(r * of_row), q, ones, config.numbers());
                }
                #[unroll]
                for f in 0..columns {
                    let to = comptime!((f * config.n_tiles + tile) * 4);
                    let right = comptime!(2 * (2 * f + half));
                    multiply(&a, 0usize, b[right], b[right + 1], &mut products, to, config.x_type);
                }
            }
        }
    }
    products
}

/// The terms and sums that two groups are scaled with.
#[derive(CubeType)]
pub(super) struct Scaling {
    /// Of each row of the weight, two terms a group.
    terms: Array<f32>,
    /// Of each of the unit's columns, one sum a group.
    sums: Array<f32>,
}

/// That of pair `pair` of a step's groups.
#[cube]
pub(super) fn scaling(places: &Addresses, #[comptime] pair: usize, #[comptime] config: MmaRows) -> Scaling {
    let mut terms = Array::<f32>::new(comptime!(4 * 2 * config.n_tiles));
    #[unroll]
    for r in 0..comptime!(2 * config.n_tiles) {
        let at = comptime!(16 * pair + 8 * 8 * r * config.term_row());
        let vector = shared::<f32, Const<4>>(places.terms, at, 4usize);
        #[unroll]
        for j in 0..4usize {
            terms[4 * r + j] = vector.extract(j);
        }
    }
    let mut sums = Array::<f32>::new(comptime!(2 * 2 * config.m_octets()));
    #[unroll]
    for i in 0..comptime!(2 * config.m_octets()) {
        let at = comptime!(8 * pair + 4 * (i / 2 * 8 + i % 2) * config.sum_row());
        let vector = shared::<f32, Const<2>>(places.sums, at, 2usize);
        sums[2 * i] = vector.extract(0usize);
        sums[2 * i + 1] = vector.extract(1usize);
    }
    Scaling { terms, sums }
}

/// Scales the products of one of both groups, and adds them to the unit's sums.
#[cube]
pub(super) fn add_scaled(
    products: &Array<f32>,
    scaling: &Scaling,
    #[comptime] group: usize,
    sums: &mut Array<f32>,
    #[comptime] config: MmaRows,
) {
    let tiles = comptime!(config.n_tiles);
    #[unroll]
    for r in 0..comptime!(2 * tiles) {
        let term = comptime!(4 * r + 2 * group);
        #[unroll]
        for i in 0..comptime!(2 * config.m_octets()) {
            let to = comptime!((i / 2 * tiles + r / 2) * 4 + r % 2 * 2 + i % 2);
            let scaled = fma(scaling.terms[term], products[to], sums[to]);
            sums[to] = fma(scaling.terms[term + 1], scaling.sums[comptime!(2 * i + group)], scaled);
        }
    }
}
