//! The products of a block: codes to numbers, numbers times x, and what scales them.

use super::super::numbers::{numbers, split};
use super::super::staging::x_pair;
use super::config::{BLOCK, StreamRows};
use crate::gpu::cuda::ptx::{multiply, register, shared, shared_integer, shared_words};
use crate::gpu::decode::{bias_of, scale_of};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// The place of a block in shared memory.
#[derive(CubeType)]
pub(super) struct Place {
    /// Addresses of the unit's first codes, of its first values of x, and of what scales its first
    /// row.
    pub codes: u32,
    pub x: u32,
    pub scales: u32,
    pub biases: u32,
    /// The plane's strip.
    pub strip: u32,
}

/// A unit's part of x: pairs in the order of products, and the sums of groups.
#[derive(CubeType)]
struct X {
    pairs: Array<u32>,
    sums: Array<f32>,
}

/// A unit's parts of tiles of the weight: words of its two rows' groups, and what scales them.
#[derive(CubeType)]
struct Tiles {
    words: Array<u32>,
    scales: Array<u32>,
    biases: Array<u32>,
}

/// Adds the products of a block to the unit's sums.
#[cube]
pub(super) fn multiply_block(
    place: &Place,
    sums: &mut Array<f32>,
    ones: u32,
    #[comptime] config: StreamRows,
) {
    let place = Place {
        codes: register(place.codes),
        x: register(place.x),
        scales: register(place.scales),
        biases: register(place.biases),
        strip: place.strip,
    };
    if comptime!(config.octets == 1) {
        // Few sums leave registers for all tiles, whose loads are then under way together.
        let tiles = load_tiles(&place, 0usize, comptime!(config.n_tiles()), config);
        let x = load_x(place.x, config);
        #[unroll]
        for tile in 0..comptime!(config.n_tiles()) {
            multiply_tile(&tiles, &x, sums, place.strip, ones, (tile, tile), config);
        }
    } else {
        let x = load_x(place.x, config);
        #[unroll]
        for tile in 0..comptime!(config.n_tiles()) {
            let tiles = load_tiles(&place, tile, 1usize, config);
            multiply_tile(&tiles, &x, sums, place.strip, ones, (tile, 0usize), config);
        }
    }
}

/// Loads a unit's parts of `count` of the plane's tiles, from the `first`-th on.
#[cube]
fn load_tiles(
    place: &Place,
    #[comptime] first: usize,
    #[comptime] count: usize,
    #[comptime] config: StreamRows,
) -> Tiles {
    let (layout, groups) = comptime!((config.layout, config.groups_of_block()));
    let of_part = comptime!(config.part_bytes() / 4);
    let (scale_pitch, bias_pitch) = comptime!(config.scale_pitches());
    let (scale, bias) = comptime!(layout.scale_sizes());
    // Of 8 runs: with fewer than 8 both groups share one.
    let (scales, biases) = comptime!(layout.elements(8));
    let mut loaded = Tiles {
        words: Array::new(comptime!(2 * count * groups * of_part)),
        scales: Array::new(comptime!(2 * count * groups)),
        biases: Array::new(comptime!(2 * count * groups)),
    };
    #[unroll]
    for r in 0..comptime!(2 * count) {
        let row = comptime!(16 * first + 8 * r);
        #[unroll]
        for i in 0..groups {
            let at = comptime!(r * groups + i);
            let offset = comptime!(row * config.code_pitch() + i * config.block_bytes() / groups);
            let words = shared_words(place.codes, offset, of_part);
            #[unroll]
            for j in 0..of_part {
                loaded.words[comptime!(at * of_part + j)] = words[j];
            }
            let apart = comptime!(if scales == 8 { i * scale } else { 0 });
            loaded.scales[at] = shared_integer(place.scales, comptime!(row * scale_pitch + apart), scale);
            loaded.biases[at] = 0u32;
            if comptime!(biases > 0) {
                let apart = comptime!(if biases == 8 { i * bias } else { 0 });
                loaded.biases[at] = shared_integer(place.biases, comptime!(row * bias_pitch + apart), bias);
            }
        }
    }
    loaded
}

/// Loads a unit's values of a block of x, and adds up its groups as products with ones: their sums
/// are where products with the weight have theirs.
#[cube]
fn load_x(from: u32, #[comptime] config: StreamRows) -> X {
    let (octets, groups, part) = comptime!((config.octets, config.groups_of_block(), config.part()));
    let mut pairs = Array::<u32>::new(comptime!(8 * octets));
    #[unroll]
    for f in 0..octets {
        let mut words = Array::<u32>::new(8usize);
        #[unroll]
        for i in 0..groups {
            #[unroll]
            for v in 0..comptime!(part / 8) {
                let offset = comptime!(8 * f * config.x_pitch() + i * 2 * BLOCK / groups + 16 * v);
                let vector = shared::<u32, Const<4>>(from, offset, 4usize);
                #[unroll]
                for j in 0..4usize {
                    words[comptime!(i * part / 2 + 4 * v + j)] = vector.extract(j);
                }
            }
        }
        #[unroll]
        for i in 0..groups {
            #[unroll]
            for q in 0..comptime!(part / 2) {
                pairs[comptime!(8 * f + i * part / 2 + q)] =
                    x_pair(&words, comptime!(i * part / 2), q, config.numbers());
            }
        }
    }
    let mut sums = Array::<f32>::new(comptime!(4 * octets * groups));
    #[unroll]
    for i in 0..comptime!(4 * octets * groups) {
        sums[i] = 0.0;
    }
    if comptime!(config.sums()) {
        let one = comptime!(if config.x_type == FloatType::BF16 { 0x3f80_3f80u32 } else { 0x3c00_3c00u32 });
        let mut left = Array::<u32>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            left[i] = one.runtime();
        }
        #[unroll]
        for f in 0..octets {
            #[unroll]
            for step in 0..4usize {
                let right = comptime!(8 * f + 2 * step);
                let to = comptime!((f * groups + step * groups / 4) * 4);
                multiply(
                    &left,
                    0usize,
                    pairs[right],
                    pairs[comptime!(right + 1)],
                    &mut sums,
                    to,
                    config.x_type,
                );
            }
        }
    }
    X { pairs, sums }
}

/// Adds the products of one of the plane's tiles, `at` its number in the plane and among the
/// `tiles` that were loaded.
#[cube]
fn multiply_tile(
    tiles: &Tiles,
    x: &X,
    sums: &mut Array<f32>,
    strip: u32,
    ones: u32,
    #[comptime] at: (usize, usize),
    #[comptime] config: StreamRows,
) {
    // The last strip may have one tile less.
    if comptime!(config.strips * (at.0 + 1) > config.tiles) {
        if strip == 0u32 {
            let products = multiply_words(tiles, x, ones, at.1, config);
            scale(tiles, &products, &x.sums, sums, at, config);
        }
    } else {
        let products = multiply_words(tiles, x, ones, at.1, config);
        scale(tiles, &products, &x.sums, sums, at, config);
    }
}

/// The products of the `tile`-th of the tiles that were loaded.
#[cube]
fn multiply_words(
    tiles: &Tiles,
    x: &X,
    ones: u32,
    #[comptime] tile: usize,
    #[comptime] config: StreamRows,
) -> Array<f32> {
    let (octets, groups, part) = comptime!((config.octets, config.groups_of_block(), config.part()));
    let words_of_part = comptime!(config.part_bytes() / 4);
    let of_part = comptime!(config.numbers().halves(config.part()));
    let mut halves = Array::<u32>::new(comptime!(2 * groups * of_part));
    #[unroll]
    for i in 0..comptime!(2 * groups) {
        let (from, to) = comptime!(((2 * tile * groups + i) * words_of_part, i * of_part));
        split(&tiles.words, from, &mut halves, to, part, ones, config.numbers());
    }
    let count = comptime!(4 * octets * groups);
    let mut products = Array::<f32>::new(comptime!(count * config.numbers().places));
    #[unroll]
    for i in 0..comptime!(count * config.numbers().places) {
        products[i] = 0.0;
    }
    #[unroll]
    for step in 0..4usize {
        let group = comptime!(step * groups / 4);
        let within = comptime!(step - group * 4 / groups);
        let mut a = Array::<u32>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            let (at, q) = comptime!(((i % 2 * groups + group) * of_part, 2 * within + i / 2));
            a[i] = numbers(&halves, at, q, ones, config.numbers());
        }
        #[unroll]
        for f in 0..octets {
            let right = comptime!(8 * f + 2 * step);
            let to = comptime!(config.numbers().place_of_step(step) * count + (f * groups + group) * 4);
            let (b0, b1) = (x.pairs[right], x.pairs[comptime!(right + 1)]);
            multiply(&a, 0usize, b0, b1, &mut products, to, config.x_type);
        }
    }
    if comptime!(config.numbers().places == 2) {
        #[unroll]
        for i in 0..count {
            products[i] =
                fma(products[count + i], comptime!(config.numbers().second()).runtime(), products[i]);
        }
    }
    products
}

/// Scales a tile's products, and adds them to the unit's sums.
#[cube]
fn scale(
    tiles: &Tiles,
    products: &Array<f32>,
    x_sums: &Array<f32>,
    sums: &mut Array<f32>,
    #[comptime] at: (usize, usize),
    #[comptime] config: StreamRows,
) {
    let (layout, groups, numbers) = comptime!((config.layout, config.groups_of_block(), config.numbers()));
    #[unroll]
    for r in 0..2usize {
        #[unroll]
        for i in 0..groups {
            let of_tile = comptime!((2 * at.1 + r) * groups + i);
            let (scale, bias) = (tiles.scales[of_tile], tiles.biases[of_tile]);
            let factor = scale_of(scale, bias, 0usize, layout);
            let mut added = 0.0f32;
            if comptime!(layout.biased()) {
                added = bias_of(scale, bias, 0usize, layout);
            }
            if comptime!(numbers.zero() != 0.0) {
                added = fma(factor, comptime!(-numbers.zero()), added);
            }
            let term = factor * comptime!(numbers.factor());
            #[unroll]
            for f in 0..comptime!(config.octets) {
                #[unroll]
                for c in 0..2usize {
                    let product = comptime!((f * groups + i) * 4 + 2 * r + c);
                    let to = comptime!((at.0 * config.octets + f) * 4 + 2 * r + c);
                    let mut sum = fma(term, products[product], sums[to]);
                    if comptime!(config.sums()) {
                        sum = fma(added, x_sums[comptime!((f * groups + i) * 4 + c)], sum);
                    }
                    sums[to] = sum;
                }
            }
        }
    }
}
