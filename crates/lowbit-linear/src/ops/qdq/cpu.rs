//! Each thread takes some consecutive groups, one after the other. Loops go over arrays of lanes,
//! which the compiler turns into vectors of the instruction set that it compiles for.

use super::Qdq;
use crate::simd::{Kernel, Simd};
use crate::{Cpu, KernelError, Tensor};

/// Accumulators: enough for the widest vectors.
const LANES: usize = 16;
/// Simple operations per value.
const COST: usize = 4;

/// Chooses scales, biases and codes.
pub(super) fn init(
    cpu: &Cpu,
    w: &Tensor,
    qdq: &mut Qdq,
    group_size: usize,
    levels: usize,
) -> Result<(), KernelError> {
    let w = w.as_slice::<f32>()?;
    let cost = COST * group_size;
    let biases = qdq.biases.as_mut_slice::<f32>()?;
    cpu.for_each_rows(biases, 1, cost, |first, biases| {
        cpu.isa().dispatch(Minima { w: &w[first * group_size..], group_size, biases });
    });
    let (biases, scales) = (qdq.biases.as_slice::<f32>()?, qdq.scales.as_mut_slice::<f32>()?);
    cpu.for_each_rows(scales, 1, cost, |first, scales| {
        let (w, biases) = (&w[first * group_size..], &biases[first..]);
        cpu.isa().dispatch(Scales { w, biases, group_size, levels, scales });
    });
    let (scales, codes) = (qdq.scales.as_slice::<f32>()?, qdq.codes.as_mut_slice::<u8>()?);
    cpu.for_each_rows(codes, group_size, cost, |first, codes| {
        let (w, scales, biases) = (&w[first * group_size..], &scales[first..], &biases[first..]);
        cpu.isa().dispatch(Codes { w, scales, biases, group_size, levels, codes });
    });
    Ok(())
}

/// Codes back to values.
pub(super) fn forward(cpu: &Cpu, qdq: &Qdq, y: &mut Tensor, group_size: usize) -> Result<(), KernelError> {
    let (codes, scales, biases) =
        (qdq.codes.as_slice::<u8>()?, qdq.scales.as_slice::<f32>()?, qdq.biases.as_slice::<f32>()?);
    cpu.for_each_rows(y.as_mut_slice::<f32>()?, group_size, COST * group_size, |first, y| {
        let (codes, scales, biases) = (&codes[first * group_size..], &scales[first..], &biases[first..]);
        cpu.isa().dispatch(Forward { codes, scales, biases, group_size, y });
    });
    Ok(())
}

/// The sum of each group's `dy`, weighted by its codes if given.
pub(super) fn backward(
    cpu: &Cpu,
    codes: Option<&Tensor>,
    dy: &Tensor,
    sums: &mut Tensor,
    group_size: usize,
) -> Result<(), KernelError> {
    let (codes, dy) = (codes.map(Tensor::as_slice::<u8>).transpose()?, dy.as_slice::<f32>()?);
    cpu.for_each_rows(sums.as_mut_slice::<f32>()?, 1, COST * group_size, |first, sums| {
        let codes = codes.map(|codes| &codes[first * group_size..]);
        cpu.isa().dispatch(Sums { codes, dy: &dy[first * group_size..], group_size, sums });
    });
    Ok(())
}

/// `lanes[i % LANES] = f(lanes[i % LANES], i)` for `i` below `len`, the lanes folded at the end.
#[inline(always)]
fn fold(len: usize, start: f32, f: impl Fn(f32, usize) -> f32, join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [start; LANES];
    let whole = len / LANES * LANES;
    for block in (0..whole).step_by(LANES) {
        for (lane, value) in lanes.iter_mut().enumerate() {
            *value = f(*value, block + lane);
        }
    }
    for (lane, i) in (whole..len).enumerate() {
        lanes[lane] = f(lanes[lane], i);
    }
    lanes.into_iter().fold(start, join)
}

struct Minima<'a> {
    w: &'a [f32],
    group_size: usize,
    biases: &'a mut [f32],
}

impl Kernel for Minima<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (bias, w) in self.biases.iter_mut().zip(self.w.chunks_exact(self.group_size)) {
            let min = |a: f32, b: f32| if b < a { b } else { a };
            let least = fold(w.len(), f32::INFINITY, |least, i| min(least, w[i]), min);
            // A NaN compares less than nothing.
            let spoiled = fold(w.len(), 0.0, |count, i| count + f32::from(w[i].is_nan()), |a, b| a + b);
            *bias = if spoiled > 0.0 { f32::NAN } else { least };
        }
    }
}

struct Scales<'a> {
    w: &'a [f32],
    biases: &'a [f32],
    group_size: usize,
    levels: usize,
    scales: &'a mut [f32],
}

impl Kernel for Scales<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let groups = self.w.chunks_exact(self.group_size).zip(self.biases);
        for (scale, (w, &bias)) in self.scales.iter_mut().zip(groups) {
            let max = |a: f32, b: f32| if b > a { b } else { a };
            let most = fold(w.len(), f32::NEG_INFINITY, |most, i| max(most, w[i]), max);
            let step = (most - bias) / (self.levels - 1) as f32;
            *scale = if step > 0.0 { step } else { 1.0 };
        }
    }
}

struct Codes<'a> {
    w: &'a [f32],
    scales: &'a [f32],
    biases: &'a [f32],
    group_size: usize,
    levels: usize,
    codes: &'a mut [u8],
}

impl Kernel for Codes<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let most = (self.levels - 1) as f32;
        let grids = self.scales.iter().zip(self.biases);
        let groups = self.codes.chunks_exact_mut(self.group_size).zip(self.w.chunks_exact(self.group_size));
        for ((codes, w), (&scale, &bias)) in groups.zip(grids) {
            for (code, &w) in codes.iter_mut().zip(w) {
                let steps = (w - bias) / scale;
                let whole = steps.trunc();
                // Adding a half first would round 0.49999997 up.
                let rounded = if steps - whole >= 0.5 { whole + 1.0 } else { whole };
                // A NaN becomes 0.
                *code = rounded.clamp(0.0, most) as u8;
            }
        }
    }
}

struct Forward<'a> {
    codes: &'a [u8],
    scales: &'a [f32],
    biases: &'a [f32],
    group_size: usize,
    y: &'a mut [f32],
}

impl Kernel for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let grids = self.scales.iter().zip(self.biases);
        let groups = self.y.chunks_exact_mut(self.group_size).zip(self.codes.chunks_exact(self.group_size));
        for ((y, codes), (&scale, &bias)) in groups.zip(grids) {
            for (y, &code) in y.iter_mut().zip(codes) {
                *y = f32::from(code) * scale + bias;
            }
        }
    }
}

struct Sums<'a> {
    codes: Option<&'a [u8]>,
    dy: &'a [f32],
    group_size: usize,
    sums: &'a mut [f32],
}

impl Kernel for Sums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let add = |a: f32, b: f32| a + b;
        for (group, (sum, dy)) in self.sums.iter_mut().zip(self.dy.chunks_exact(self.group_size)).enumerate()
        {
            *sum = match self.codes {
                None => fold(dy.len(), 0.0, |sum, i| sum + dy[i], add),
                Some(codes) => {
                    let codes = &codes[group * self.group_size..][..self.group_size];
                    fold(dy.len(), 0.0, |sum, i| sum + f32::from(codes[i]) * dy[i], add)
                }
            };
        }
    }
}
