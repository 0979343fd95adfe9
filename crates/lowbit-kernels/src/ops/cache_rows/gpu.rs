//! Caches of integers on a GPU: new rows are encoded where they are stored, and whole caches are
//! expanded for kernels that multiply matrices of floats.
//!
//! A cache is words here: four codes each, then two scales each. Units of a plane share a row in
//! registers, four values each.

#![allow(unsafe_code)] // Launches.

use super::{CacheType, LEAST_CODE};
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{narrow, widen, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::rows::{self, Maximum, Sum};
use crate::ops::Check;
use crate::ops::hadamard_transform::gpu::{
    RowLanes, load_row, quad_of_unit, reduce_quads, row_of_unit, store_row, transform,
};
use crate::ops::pages::gpu::{PoolSizes, Table, cache_row};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Values of a word.
const WORD: usize = 4;

/// Rows of one width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct IntegerRow {
    /// D.
    pub width: usize,
}

impl IntegerRow {
    /// Words of a cache's row.
    pub fn words(self) -> usize {
        CacheType::Int8.row(self.width) / WORD
    }

    /// Words of codes; those of scales come after them.
    fn codes(self) -> usize {
        self.width / WORD
    }

    pub fn group(self) -> usize {
        CacheType::group(self.width)
    }
}

/// Heads of new tokens, `[T, heads, D]` each: for one or two caches, and queries that are
/// transformed in place.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct NewRows<X: Int, V: Size> {
    queries: Box<[Vector<X, V>]>,
    first: Box<[Vector<X, V>]>,
    second: Box<[Vector<X, V>]>,
}

/// The caches.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct WordCaches {
    first: Box<[u32]>,
    second: Box<[u32]>,
}

/// The counts of a launch.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct RowCounts {
    /// Heads of queries, of the first cache and of the second.
    queries: u32,
    first: u32,
    second: u32,
    /// Key heads, and tokens that a contiguous cache has room for.
    heads: u32,
    capacity: u32,
}

/// A launch's compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct EncodeConfig {
    x: FloatType,
    first: RowLanes,
    second: RowLanes,
    /// True if the first cache's rows are transformed.
    transforms: bool,
    paged: bool,
}

/// The first cubes take queries, the next ones rows of the first cache, the rest those of the
/// second. `table` and `pool` are those of pages.
#[kernel]
fn cache_rows_encode<X: Int, V: Size>(
    new: &mut NewRows<X, V>,
    positions: &[u32],
    table: &[u32],
    caches: &mut WordCaches,
    counts: RowCounts,
    pool: PoolSizes,
    #[comptime] config: EncodeConfig,
) {
    let (first, second) = comptime!((config.first, config.second));
    let of_queries = (counts.queries as usize).div_ceil(comptime!(first.rows()));
    let of_first = of_queries + (counts.first as usize).div_ceil(comptime!(first.rows()));
    if CUBE_POS < of_queries {
        let row = row_of_unit(0usize.runtime(), first);
        let exists = row < counts.queries as usize;
        // Units past the last row compute the first, but do not store it.
        let row = select(exists, row, 0usize);
        let mut values = load_row::<X, V>(&new.queries, row, config.x, first);
        transform(&mut values, first);
        if exists {
            store_row::<X, V>(&values, &mut new.queries, row, config.x, first);
        }
    } else if CUBE_POS < of_first {
        let row = row_of_unit(of_queries, first);
        let exists = row < counts.first as usize;
        let row = select(exists, row, 0usize);
        let (to, has) = place(row as u32, positions, table, &counts, &pool, config.paged);
        let mut values = load_row::<X, V>(&new.first, row, config.x, first);
        if comptime!(config.transforms) {
            transform(&mut values, first);
        }
        encode_row(&values, &mut caches.first, to, exists && has, first);
    } else {
        let row = row_of_unit(of_first, second);
        let exists = row < counts.second as usize;
        let row = select(exists, row, 0usize);
        let (to, has) = place(row as u32, positions, table, &counts, &pool, config.paged);
        let values = load_row::<X, V>(&new.second, row, config.x, second);
        encode_row(&values, &mut caches.second, to, exists && has, second);
    }
}

/// The row of a cache for row `row` of the new ones, and true if the cache has it.
#[cube]
fn place(
    row: u32,
    positions: &[u32],
    table: &[u32],
    counts: &RowCounts,
    pool: &PoolSizes,
    #[comptime] paged: bool,
) -> (u32, bool) {
    let (token, head) = (row / counts.heads, row % counts.heads);
    cache_row(table, (token, head, positions[token as usize]), counts.capacity, pool, paged)
}

/// Encodes a row, and stores it as row `to` of a cache if it is `live`. Every unit of the plane
/// must call this.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube]
fn encode_row(values: &Array<f32>, cache: &mut [u32], to: u32, live: bool, #[comptime] of: RowLanes) {
    let integers = comptime!(IntegerRow { width: of.width });
    let (each, quads) = comptime!((of.each(), of.quads()));
    // Quads of a group.
    let group = comptime!(integers.group() / WORD);
    let mut greatest = Array::<u32>::new(each);
    #[unroll]
    for n in 0..each {
        // Magnitudes are in the order of their bits, NaN and infinity above all others.
        let mut bits = 0u32.runtime();
        #[unroll]
        for j in 0..WORD {
            bits = max(bits, u32::reinterpret(values[comptime!(n * WORD + j)]) & 0x7fff_ffffu32);
        }
        greatest[n] = bits;
    }
    reduce_quads::<u32, Maximum>(&mut greatest, group, of);
    let mut scales = Array::<u32>::new(each);
    let mut least = Array::<f32>::new(each);
    let mut errors = Array::<f32>::new(each);
    let mut code_of_greatest = 127u32.runtime();
    while code_of_greatest >= LEAST_CODE {
        let factor = 128.0f32 / f32::cast_from(code_of_greatest);
        #[unroll]
        for n in 0..each {
            errors[n] = squared_error(values, n, scale_bits(greatest[n], factor));
        }
        reduce_quads::<f32, Sum>(&mut errors, group, of);
        #[unroll]
        for n in 0..each {
            // The error of a scale that is not finite is NaN.
            let better = code_of_greatest == 127u32 || errors[n] < least[n];
            scales[n] = select(better, scale_bits(greatest[n], factor), scales[n]);
            least[n] = select(better, errors[n], least[n]);
        }
        code_of_greatest -= 1u32;
    }
    let row = to * comptime!(integers.words() as u32);
    #[unroll]
    for n in 0..each {
        let quad = quad_of_unit(n, of) as u32;
        let next = next_group(&scales, n, group, of);
        if live && quad < comptime!(quads as u32) {
            let mut codes = 0u32.runtime();
            #[unroll]
            for j in 0..WORD {
                let code = code(values[comptime!(n * WORD + j)], scales[n]);
                codes |= (u32::reinterpret(code) & 0xffu32) << comptime!(8 * j as u32);
            }
            cache[(row + quad) as usize] = codes;
            // Two scales are a word.
            if quad % comptime!(2 * group as u32) == 0u32 {
                let at = row + comptime!(quads as u32) + quad / comptime!(2 * group as u32);
                cache[at as usize] = scales[n] | (next << 16u32);
            }
        }
    }
}

/// The scale of the group after that of a unit's quad `n`, if that is the first of two; 0 past the
/// last one.
#[cube]
fn next_group(
    scales: &Array<u32>,
    #[comptime] n: usize,
    #[comptime] group: usize,
    #[comptime] of: RowLanes,
) -> u32 {
    if comptime!(group < of.lanes) {
        plane_shuffle_xor(scales[n], comptime!(group as u32).runtime())
    } else if comptime!(n + group / of.lanes < of.each()) {
        scales[comptime!(n + group / of.lanes)]
    } else {
        0u32.runtime()
    }
}

/// The bits of a group's scale by its greatest magnitude's.
#[cube]
fn scale_bits(greatest: u32, factor: f32) -> u32 {
    let bits = narrow(f32::reinterpret(greatest) * factor, FloatType::F16);
    select(greatest < 0x7f80_0000u32 && bits < 0x7c00u32, bits, 0x7e00u32)
}

/// The sum of the squared errors of a unit's quad `n` with the scale of these bits.
#[cube]
fn squared_error(values: &Array<f32>, #[comptime] n: usize, bits: u32) -> f32 {
    let unit = widen(bits, FloatType::F16) * comptime!(1.0f32 / 128.0);
    let mut sum = 0.0f32;
    #[unroll]
    for j in 0..WORD {
        let value = values[comptime!(n * WORD + j)];
        let error = fma(f32::cast_from(code(value, bits)), -unit, value);
        sum = fma(error, error, sum);
    }
    sum
}

/// The code of a value by the bits of its group's scale.
#[cube]
fn code(value: f32, bits: u32) -> i32 {
    let scale = widen(bits, FloatType::F16);
    let inverse = select(bits == 0u32, 0.0f32, 128.0f32 / scale);
    let bounded = max(min(value * inverse, 127.0f32), -127.0f32);
    // The sum's last place is 1: it rounds to nearest, ties to even.
    let code = i32::reinterpret(bounded + 12_582_912.0f32) - 0x4b40_0000;
    select(bits == 0x7e00u32, 0i32, code)
}

/// 1/128 of a scale, which is the upper or lower half of a word: of infinity, too, NaN.
#[cube]
pub(crate) fn unit_of(word: u32, upper: bool) -> f32 {
    let bits = select(upper, word >> 16u32, word & 0xffffu32);
    let unit = widen(bits, FloatType::F16) * comptime!(1.0f32 / 128.0);
    select(bits & 0x7c00u32 == 0x7c00u32, f32::reinterpret(0x7fc0_0000u32), unit)
}

/// Code `i` of a word.
#[cube]
pub(crate) fn code_of(word: u32, #[comptime] i: usize) -> f32 {
    let biased = ((word >> comptime!(8 * i as u32)) & 0xffu32) ^ 0x80u32;
    f32::cast_from(biased) - 128.0f32
}

/// `len` counts the words of codes.
#[kernel]
fn cache_rows_expand<Y: Int>(
    cache: &[u32],
    y: &mut [Y],
    len: u32,
    #[comptime] float: FloatType,
    #[comptime] of: IntegerRow,
) {
    let (codes, group) = comptime!((of.codes() as u32, of.group() as u32));
    let mut i = ABSOLUTE_POS as u32;
    while i < len {
        let (row, word) = (i / codes, i % codes);
        let first = row * comptime!(of.words() as u32);
        let scale = word * comptime!(WORD as u32) / group;
        let unit = unit_of(cache[(first + codes + scale / 2u32) as usize], scale % 2u32 == 1u32);
        let packed = cache[(first + word) as usize];
        #[unroll]
        for j in 0..WORD {
            let bits = narrow(code_of(packed, j) * unit, float);
            y[(i * comptime!(WORD as u32) + comptime!(j as u32)) as usize] = Y::cast_from(bits);
        }
        i += CUBE_COUNT_X * CUBE_DIM_X;
    }
}

fn compiled_encode(target: &Target, config: EncodeConfig) -> Kernel<CacheRowsEncode<'static>> {
    let EncodeConfig { x, first, .. } = config;
    with_storage!(x, X => CacheRowsEncode::kernel::<X>(target, first.units(), first.vector, config))
}

fn compiled_expand(target: &Target, float: FloatType, of: IntegerRow) -> Kernel<CacheRowsExpand<'static>> {
    with_storage!(float, Y => CacheRowsExpand::kernel::<Y>(target, UNITS, float, of))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every kernel for `target`, at sizes of layers.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let mut kernels = Vec::new();
    for (x, width) in crate::ops::testing::FLOATS.into_iter().zip([64, 128, 256]) {
        for (paged, vector) in [(false, 1), (true, rows::VECTOR)] {
            let of = RowLanes::new(target, width, vector);
            let config = EncodeConfig { x, first: of, second: of, transforms: paged, paged };
            kernels.push(compiled_encode(target, config).code());
        }
        kernels.push(compiled_expand(target, x, IntegerRow { width }).code());
    }
    kernels
}

/// New rows for caches of integers.
pub(in crate::ops) struct Append<'a> {
    /// Rows `[T, heads, D]` of one type for one cache, or for two of as many heads.
    pub x: &'a [&'a Tensor],
    /// Queries of as many elements as the first cache's, if there are some: they and its rows are
    /// transformed, they in place.
    pub queries: Option<&'a Tensor>,
    pub positions: &'a Tensor,
    pub table: Option<Table<'a>>,
}

impl Append<'_> {
    /// Encodes them into `caches`; everything was checked.
    pub fn launch(&self, check: Check, gpu: &Gpu, caches: &mut [&mut Tensor]) -> Result<(), KernelError> {
        let Self { x, queries, positions, table } = *self;
        let [first, second] = [x[0], x[x.len() - 1]];
        if first.is_empty() || caches[0].is_empty() {
            return Ok(());
        }
        for cache in caches.iter_mut() {
            cache.unshare()?;
            check.index(cache.len())?;
        }
        let tensors = [first, second, queries.unwrap_or(first)];
        let vector = |width: usize| rows::vector(gpu.target(), rows::VECTOR, width, &tensors);
        let vector = vector(first.dim(2)).min(vector(second.dim(2)));
        let of = [first, second].map(|x| RowLanes::new(gpu.target(), x.dim(2), vector));
        let rows = first.dim(0) * first.dim(1);
        let counts = [queries.map_or(0, |q| q.dim(0) * q.dim(1)), rows, if x.len() == 2 { rows } else { 0 }];
        let [queries_count, first_count, second_count] = counts.map(|count| check.index(count));
        let [stored, stored_second] = [&*caches[0], &*caches[caches.len() - 1]];
        let config = EncodeConfig {
            x: check.float("x", first)?,
            first: of[0],
            second: of[1],
            transforms: queries.is_some(),
            paged: table.is_some(),
        };
        let arguments = CacheRowsEncode {
            // An unused operand gets a placeholder buffer.
            new: NewRowsArgs {
                queries: queries.unwrap_or(first).buffer()?,
                first: first.buffer()?,
                second: second.buffer()?,
            },
            positions: positions.buffer()?,
            table: table.map_or(positions, |(table, _)| table).buffer()?,
            caches: WordCachesArgs { first: stored.buffer()?, second: stored_second.buffer()? },
            counts: RowCounts {
                queries: queries_count?,
                first: first_count?,
                second: second_count?,
                heads: check.index(first.dim(1))?,
                capacity: if table.is_some() { 0 } else { check.index(stored.dim(1))? },
            },
            pool: table.map_or_else(PoolSizes::none, |(_, pool)| pool),
        };
        let cubes = of[0].cubes(counts[0]) + of[0].cubes(counts[1]) + of[1].cubes(counts[2]);
        let kernel = compiled_encode(gpu.target(), config);
        // SAFETY: the op checked that rows of x are the caches' and that each token has a position;
        // queries are rows of the first width; the kernel leaves out positions beyond the capacity
        // or the table, and pages beyond the pool.
        unsafe { gpu.launch(kernel, rows::cubes(cubes), arguments) }
    }
}

/// See [`super::expand_cache`]; y has `shape`.
pub(super) fn expand(
    check: Check,
    gpu: &Gpu,
    cache: &Tensor,
    float: FloatType,
    shape: &[usize],
) -> Result<Tensor, KernelError> {
    let y = Tensor::allocate(shape, float.dtype(), cache.device())?;
    if y.is_empty() {
        return Ok(y);
    }
    check.index(y.len().max(cache.len()))?;
    let len = y.len() / WORD;
    let arguments = CacheRowsExpand { cache: cache.buffer()?, y: y.buffer()?, len: check.index(len)? };
    let kernel = compiled_expand(gpu.target(), float, IntegerRow { width: y.dim(-1) });
    // SAFETY: y has a row for each row of the cache, whose rows have as many words as the width
    // says.
    unsafe { gpu.launch(kernel, cubes(len), arguments)? };
    Ok(y)
}
