//! Caches of integers on a GPU: new rows are encoded where they are stored, and whole caches are
//! expanded for kernels that multiply matrices of floats.
//!
//! A cache is words here: four codes each, then two scales each. A unit writes one word, and looks
//! at all values of the groups that it needs: they are neighbours of its own, in the nearest cache.

#![allow(unsafe_code)] // Launches.

use super::CacheType;
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{narrow, read, widen, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::ops::Check;
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

    /// Words that have codes or scales.
    fn written(self) -> usize {
        self.codes() + self.width.div_ceil(2 * self.group())
    }

    pub fn group(self) -> usize {
        CacheType::group(self.width)
    }
}

/// New rows `x`, `[T, heads, D]`, for `first`, and as many for `second`.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct NewRows<X: CubePrimitive> {
    first: Box<[X]>,
    second: Box<[X]>,
}

/// The caches of those.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct WordCaches {
    first: Box<[u32]>,
    second: Box<[u32]>,
}

/// The counts of a launch.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct RowCounts {
    /// Words to write of the first cache, and of both.
    first: u32,
    all: u32,
    /// Key heads, and tokens that a contiguous cache has room for.
    heads: u32,
    capacity: u32,
}

/// A launch's compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct EncodeConfig {
    x: FloatType,
    first: IntegerRow,
    second: IntegerRow,
    paged: bool,
}

/// Writes rows of both caches; `table` and `pool` are those of pages.
#[kernel]
fn cache_rows_encode<X: Int>(
    new: &NewRows<X>,
    positions: &[u32],
    table: &[u32],
    caches: &mut WordCaches,
    counts: RowCounts,
    pool: PoolSizes,
    #[comptime] config: EncodeConfig,
) {
    let mut i = ABSOLUTE_POS as u32;
    while i < counts.all {
        if i < counts.first {
            let to = place(i, positions, table, &counts, &pool, config.first, config.paged);
            write_word::<X>(&new.first, &mut caches.first, i, to, config.x, config.first);
        } else {
            let i = i - counts.first;
            let to = place(i, positions, table, &counts, &pool, config.second, config.paged);
            write_word::<X>(&new.second, &mut caches.second, i, to, config.x, config.second);
        }
        i += CUBE_COUNT_X * CUBE_DIM_X;
    }
}

/// The word of a cache for word `i` of the new rows, and true if the cache has it.
#[cube]
fn place(
    i: u32,
    positions: &[u32],
    table: &[u32],
    counts: &RowCounts,
    pool: &PoolSizes,
    #[comptime] of: IntegerRow,
    #[comptime] paged: bool,
) -> (u32, bool) {
    let written = comptime!(of.written() as u32);
    let row = i / written;
    let (token, head) = (row / counts.heads, row % counts.heads);
    let at = (token, head, positions[token as usize]);
    let (to, has) = cache_row(table, at, counts.capacity, pool, paged);
    (to * comptime!(of.words() as u32) + i % written, has)
}

/// Encodes word `i` of the new rows to word `to` of their cache.
#[cube]
fn write_word<X: Int>(
    x: &[X],
    cache: &mut [u32],
    i: u32,
    to: (u32, bool),
    #[comptime] float: FloatType,
    #[comptime] of: IntegerRow,
) {
    let written = comptime!(of.written() as u32);
    let codes = comptime!(of.codes() as u32);
    let group = comptime!(of.group() as u32);
    let (first, word) = (i / written * comptime!(of.width as u32), i % written);
    let (to, has) = to;
    if has {
        if word < codes {
            let at = word * comptime!(WORD as u32);
            let bits = scale_of::<X>(x, first + at / group * group, float, of);
            let mut packed = 0u32.runtime();
            #[unroll]
            for j in 0..WORD {
                let value = read(x, (first + at + comptime!(j as u32)) as usize, float);
                packed |= code(value, bits) << comptime!(8 * j as u32);
            }
            cache[to as usize] = packed;
        } else {
            let at = (word - codes) * 2u32 * group;
            let low = scale_of::<X>(x, first + at, float, of);
            let mut high = 0u32.runtime();
            if at + group < comptime!(of.width as u32) {
                high = scale_of::<X>(x, first + at + group, float, of);
            }
            cache[to as usize] = low | (high << 16u32);
        }
    }
}

/// The bits of the scale of the group of values from `first` on.
#[cube]
fn scale_of<X: Int>(x: &[X], first: u32, #[comptime] float: FloatType, #[comptime] of: IntegerRow) -> u32 {
    let mut greatest = 0u32.runtime();
    #[unroll]
    for j in 0..comptime!(of.group()) {
        let value = read(x, (first + comptime!(j as u32)) as usize, float);
        // Magnitudes are in the order of their bits, NaN and infinity above all others.
        greatest = max(greatest, u32::reinterpret(value) & 0x7fff_ffffu32);
    }
    let scale = narrow(f32::reinterpret(greatest) * comptime!(128.0f32 / 127.0), FloatType::F16);
    select(greatest < 0x7f80_0000u32 && scale < 0x7c00u32, scale, 0x7e00u32)
}

/// The code of a value by the bits of its group's scale.
#[cube]
fn code(value: f32, bits: u32) -> u32 {
    let scale = widen(bits, FloatType::F16);
    let inverse = select(bits == 0u32, 0.0f32, 128.0f32 / scale);
    let bounded = max(min(value * inverse, 127.0f32), -127.0f32);
    // The sum's last place is 1: it rounds to nearest, ties to even.
    let code = u32::reinterpret(bounded + 12_582_912.0f32) & 0xffu32;
    select(bits == 0x7e00u32, 0u32, code)
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
    with_storage!(config.x, X => CacheRowsEncode::kernel::<X>(target, UNITS, config))
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
        let of = IntegerRow { width };
        for paged in [false, true] {
            let config = EncodeConfig { x, first: of, second: of, paged };
            kernels.push(compiled_encode(target, config).code());
        }
        kernels.push(compiled_expand(target, x, of).code());
    }
    kernels
}

/// Encodes `x`, one or two tensors `[T, heads, D]` of one type, into their caches; everything was
/// checked.
pub(in crate::ops) fn append(
    check: Check,
    gpu: &Gpu,
    caches: &mut [&mut Tensor],
    x: &[&Tensor],
    positions: &Tensor,
    table: Option<Table<'_>>,
) -> Result<(), KernelError> {
    let [first, second] = [x[0], x[x.len() - 1]];
    if first.is_empty() || caches[0].is_empty() {
        return Ok(());
    }
    for cache in caches.iter_mut() {
        cache.unshare()?;
        check.index(cache.len())?;
    }
    let of = [first, second].map(|x| IntegerRow { width: x.dim(-1) });
    let rows = first.dim(0) * first.dim(1);
    let words = rows * of[0].written();
    let all = if x.len() == 2 { words + rows * of[1].written() } else { words };
    let config =
        EncodeConfig { x: check.float("x", first)?, first: of[0], second: of[1], paged: table.is_some() };
    let [stored, stored_second] = [&*caches[0], &*caches[caches.len() - 1]];
    let arguments = CacheRowsEncode {
        new: NewRowsArgs { first: first.buffer()?, second: second.buffer()? },
        positions: positions.buffer()?,
        // An unused operand gets a placeholder buffer.
        table: table.map_or(positions, |(table, _)| table).buffer()?,
        caches: WordCachesArgs { first: stored.buffer()?, second: stored_second.buffer()? },
        counts: RowCounts {
            first: check.index(words)?,
            all: check.index(all)?,
            heads: check.index(first.dim(1))?,
            capacity: if table.is_some() { 0 } else { check.index(stored.dim(1))? },
        },
        pool: table.map_or_else(PoolSizes::none, |(_, pool)| pool),
    };
    let kernel = compiled_encode(gpu.target(), config);
    // SAFETY: the op checked that rows of x are the caches' and that each token has a position; the
    // kernel leaves out positions beyond the capacity or the table, and pages beyond the pool.
    unsafe { gpu.launch(kernel, cubes(all), arguments) }
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
