//! Rows of caches on the CPU: how kernels load them, and how integers are made.

use super::{BLOCK, CacheType, LEAST_CODE};
use crate::cast::Float;
use crate::ops::Check;
use crate::simd::{Kernel, Simd};
use crate::{Cpu, KernelError, Tensor};
use bytemuck::{Pod, Zeroable};
use half::f16;
use lowbit_formats::{DType, FloatType};

/// An element of a cache's rows.
pub(crate) trait Stored: Pod + Send + Sync {
    /// True if rows are f32 as they are.
    const F32: bool;

    /// A row's scales, as [`Self::load`] takes them.
    type Scales: Copy;

    /// The rows of a cache of this type, which is on the CPU.
    fn rows(cache: &Tensor) -> Result<&[Self], KernelError>;

    /// Elements of a row of `width` values.
    fn row(width: usize) -> usize;

    /// The scales of a row of `width` values.
    fn scales(row: &[Self], width: usize) -> Self::Scales;

    /// The values from `at`, a multiple of the lanes, on.
    ///
    /// # Panics
    /// When there are fewer than lanes.
    fn load<S: Simd>(simd: S, row: &[Self], at: usize, scales: &Self::Scales) -> S::V;

    /// Value `at`.
    fn widen(row: &[Self], at: usize, scales: &Self::Scales) -> f32;
}

impl<T: Float> Stored for T {
    const F32: bool = matches!(T::DTYPE, DType::F32);

    type Scales = ();

    fn rows(cache: &Tensor) -> Result<&[Self], KernelError> {
        cache.as_slice()
    }

    #[inline(always)]
    fn row(width: usize) -> usize {
        width
    }

    #[inline(always)]
    fn scales(_: &[Self], _: usize) {}

    #[inline(always)]
    fn load<S: Simd>(simd: S, row: &[Self], at: usize, (): &()) -> S::V {
        <T as Float>::load(simd, &row[at..])
    }

    #[inline(always)]
    fn widen(row: &[Self], at: usize, (): &()) -> f32 {
        Float::widen(row[at])
    }
}

/// A byte of a row of [`CacheType::Int8`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(transparent)]
pub(crate) struct Int8(i8);

/// The most scales of a row: those of 512 values.
const MOST_SCALES: usize = 16;

/// The values of 1/128 of each scale of a row, and the logarithm of a group's size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Int8Scales {
    values: [f32; MOST_SCALES],
    shift: u32,
}

impl Stored for Int8 {
    const F32: bool = false;

    type Scales = Int8Scales;

    fn rows(cache: &Tensor) -> Result<&[Self], KernelError> {
        Ok(bytemuck::cast_slice(cache.as_slice::<i8>()?))
    }

    #[inline(always)]
    fn row(width: usize) -> usize {
        CacheType::Int8.row(width)
    }

    #[inline(always)]
    fn scales(row: &[Self], width: usize) -> Int8Scales {
        let mut values = [0.0; MOST_SCALES];
        let stored: &[[u8; 2]] = bytemuck::cast_slice(&row[width..]);
        // All of 16 bytes at a time, so that the loop is vectorised.
        let wide = values.chunks_exact_mut(BLOCK / 2).zip(stored.chunks_exact(BLOCK / 2));
        for (values, stored) in wide {
            for (value, &bits) in values.iter_mut().zip(stored) {
                *value = unit(u16::from_le_bytes(bits));
            }
        }
        Int8Scales { values, shift: CacheType::group(width).trailing_zeros() }
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, row: &[Self], at: usize, scales: &Int8Scales) -> S::V {
        let codes = simd.load_i8(bytemuck::cast_slice(&row[at..]));
        let scale = |at: usize| scales.values[at >> scales.shift];
        if S::LANES <= 1 << scales.shift {
            return simd.mul(codes, simd.splat(scale(at)));
        }
        // 16 lanes have two groups of 8.
        let mut both = [scale(at); crate::simd::MAX_LANES];
        both[8..].fill(scale(at + 8));
        simd.mul(codes, simd.load(&both))
    }

    #[inline(always)]
    fn widen(row: &[Self], at: usize, scales: &Int8Scales) -> f32 {
        f32::from(row[at].0) * scales.values[at >> scales.shift]
    }
}

/// 1/128 of a scale: of infinity, too, NaN.
#[inline(always)]
fn unit(bits: u16) -> f32 {
    // The exponent's bias goes from 15 to 127, and 7 lower.
    let finite = f32::from_bits(u32::from(bits) << 13) * f32::from_bits((127 + 112 - 7) << 23);
    if bits & 0x7c00 == 0x7c00 { f32::NAN } else { finite }
}

/// `x`, on the CPU, as `float`.
///
/// # Errors
/// [`KernelError::Value`] for a finite number that is infinite in `float`.
pub(super) fn round(
    check: Check,
    (name, x): (&'static str, &Tensor),
    float: FloatType,
) -> Result<Tensor, KernelError> {
    let y = x.cast(float.dtype())?;
    // Infinity, and the least magnitude that rounds to it: half a unit in the last place above the
    // greatest finite number.
    let (infinity, limit) = match float {
        FloatType::F16 => (0x7c00, INFINITE),
        FloatType::BF16 => (0x7f80, f32::from_bits(0x7f7f_8000)),
        FloatType::F32 => return Ok(y),
    };
    if x.dtype() == float.dtype() {
        return Ok(y);
    }
    // All numbers are compared, so that the loop has no branch and is vectorised.
    let bits: &[u16] = bytemuck::cast_slice(y.bytes());
    if bits.iter().fold(false, |any, bits| any | (bits & 0x7fff == infinity)) {
        let wide = check.widened(name, x)?;
        let is_beyond = |x: &&f32| (limit..f32::INFINITY).contains(&x.abs());
        if let Some(beyond) = wide.as_slice::<f32>()?.iter().find(is_beyond) {
            let want = format!("{}, the cache's type, ends at {limit}", float.dtype());
            return Err(check.value(name, beyond, want));
        }
    }
    Ok(y)
}

/// See [`super::encoded`], to integers.
pub(super) fn encode(check: Check, (name, x): (&'static str, &Tensor)) -> Result<Tensor, KernelError> {
    let wide = check.widened(name, x)?;
    let values = wide.as_slice::<f32>()?;
    let (rows, width) = (&x.shape()[..x.shape().len() - 1], x.dim(-1));
    let row = CacheType::Int8.row(width);
    let mut y = Tensor::allocate_zeros(&[rows, &[row]].concat(), DType::I8, x.device())?;
    let cpu = x.device().as_cpu(check.0)?.clone();
    if !y.is_empty() {
        cpu.for_each_rows(y.bytes_mut(), row, row, |first, y| {
            let x = &values[first * width..][..y.len() / row * width];
            cpu.isa().dispatch(Encode { x, y, width });
        });
    }
    // Scales are compared, of which there are few.
    let beyond = |row: &[u8]| {
        row[width..].chunks_exact(2).any(|bits| u16::from_le_bytes([bits[0], bits[1]]) & 0x7c00 == 0x7c00)
    };
    for (y, x) in y.bytes().chunks_exact(row.max(1)).zip(values.chunks_exact(width.max(1))) {
        if beyond(y)
            && let Some(beyond) = x.iter().find(|x| x.is_finite() && x.abs() * RANGE >= INFINITE)
        {
            let want = format!("q8_0, the cache's type, ends at {}", INFINITE / RANGE);
            return Err(check.value(name, beyond, want));
        }
    }
    Ok(y)
}

/// A group's least scale over its greatest magnitude, whose code is 127.
const RANGE: f32 = 128.0 / 127.0;
/// The least magnitude that rounds to infinity in f16.
const INFINITE: f32 = 65520.0;

/// Rows of `width` values to rows of integers.
struct Encode<'a> {
    x: &'a [f32],
    y: &'a mut [u8],
    width: usize,
}

impl Kernel for Encode<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self { x, y, width } = self;
        match CacheType::group(width) {
            8 => rows::<8>(x, y, width),
            16 => rows::<16>(x, y, width),
            _ => rows::<32>(x, y, width),
        }
    }
}

/// Encodes rows with groups of `G` values.
#[inline(always)]
fn rows<const G: usize>(x: &[f32], y: &mut [u8], width: usize) {
    for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(CacheType::Int8.row(width))) {
        let (codes, scales) = y.split_at_mut(width);
        let groups = x.chunks(G).zip(codes.chunks_mut(G));
        for ((x, codes), scale) in groups.zip(scales.chunks_exact_mut(2)) {
            // The last group may be half a group.
            let mut values = [0.0; G];
            values[..x.len()].copy_from_slice(x);
            let (all, bits) = encode_group(&values);
            codes.copy_from_slice(&all[..codes.len()]);
            scale.copy_from_slice(&bits.to_le_bytes());
        }
    }
}

/// The codes of a group, and its scale.
#[inline(always)]
fn encode_group<const G: usize>(x: &[f32; G]) -> ([u8; G], u16) {
    // Infinity and NaN times 0 are NaN.
    let finite = x.iter().fold(0.0, |sum, x| sum + x * 0.0) == 0.0;
    let greatest = x.iter().fold(0f32, |greatest, x| greatest.max(x.abs()));
    let mut best = <f16 as Float>::narrow(greatest * RANGE);
    if !finite || !best.is_finite() {
        return ([0; G], f16::NAN.to_bits());
    }
    let mut least = squared_error(x, best);
    for of_greatest in (LEAST_CODE..127).rev() {
        let scale = <f16 as Float>::narrow(greatest * (128.0 / of_greatest as f32));
        let error = squared_error(x, scale);
        // That of an infinite scale is NaN.
        if error < least {
            (best, least) = (scale, error);
        }
    }
    (x.map(|x| rounded(x, inverse(best)).to_bits() as u8), best.to_bits())
}

/// The sum of the squared errors of a group with this scale.
#[inline(always)]
fn squared_error<const G: usize>(x: &[f32; G], scale: f16) -> f32 {
    let (unit, inverse) = (Float::widen(scale) * (1.0 / 128.0), inverse(scale));
    let error = |x: f32| x - (rounded(x, inverse) - SHIFT) * unit;
    // Eight sums, so that they are one vector's.
    let mut sums = [0.0; 8];
    for x in x.chunks_exact(8) {
        sums.iter_mut().zip(x).for_each(|(sum, &x)| *sum += error(x) * error(x));
    }
    sums.iter().sum()
}

#[inline(always)]
fn inverse(scale: f16) -> f32 {
    if scale.to_bits() == 0 { 0.0 } else { 128.0 / Float::widen(scale) }
}

/// A sum with it has 1 as its last place: it rounds to nearest, ties to even.
const SHIFT: f32 = 12_582_912.0;

/// The code of a value, and [`SHIFT`].
#[inline(always)]
fn rounded(x: f32, inverse: f32) -> f32 {
    (x * inverse).clamp(-127.0, 127.0) + SHIFT
}

/// See [`super::expand_cache`]; in f32.
pub(super) fn expand(cpu: &Cpu, cache: &Tensor, shape: &[usize]) -> Result<Tensor, KernelError> {
    let mut y = Tensor::allocate(shape, DType::F32, cache.device())?;
    let (width, row) = (y.dim(-1), cache.dim(-1));
    if y.is_empty() {
        return Ok(y);
    }
    let rows = Int8::rows(cache)?;
    cpu.for_each_rows(y.as_mut_slice::<f32>()?, width, width, |first, y| {
        for (i, y) in (first..).zip(y.chunks_exact_mut(width)) {
            let row = &rows[i * row..][..row];
            let scales = Int8::scales(row, width);
            for (at, y) in y.iter_mut().enumerate() {
                *y = Int8::widen(row, at, &scales);
            }
        }
    });
    Ok(y)
}
