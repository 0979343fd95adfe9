//! Floats of each type in vectors, and casts of tensors.

use crate::{
    Element, KernelError, Tensor,
    simd::{Kernel, Simd},
};
use half::{bf16, f16};
use lowbit_formats::{DType, FloatType};

/// The element types of activations. Neither direction branches, so loops over them vectorise.
pub trait Float: Element {
    /// The same value.
    fn widen(self) -> f32;
    /// Rounded to nearest, ties to even.
    fn narrow(x: f32) -> Self;
    /// The first `S::LANES` elements, widened in registers.
    ///
    /// # Panics
    /// When there are fewer.
    fn load<S: Simd>(simd: S, x: &[Self]) -> S::V;
}

impl Float for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self {
        x
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, x: &[Self]) -> S::V {
        simd.load(x)
    }
}

impl Float for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        FloatType::F16.get(&self.to_le_bytes(), 0)
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self {
        let bits = x.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        // Normal results: move the exponent's bias from 127 to 15 and round the 13 bits that go.
        // Smaller ones wrap around.
        let round = 0x0fff + (magnitude >> 13 & 1);
        let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(round) >> 13;
        // Subnormal results: beside 0.5, the last place is 2^-24, and the addition rounds.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let finite = if magnitude < 113 << 23 { subnormal } else { normal.min(0x7c00) };
        let narrow = if magnitude > 0x7f80_0000 { 0x7e00 } else { finite };
        Self::from_bits((narrow | bits >> 16 & 0x8000) as u16)
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, x: &[Self]) -> S::V {
        simd.load_f16(x)
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        // Rounding could carry a NaN into infinity.
        let quiet = bits >> 16 | 0x40;
        Self::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { quiet } else { rounded } as u16)
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, x: &[Self]) -> S::V {
        simd.load_bf16(x)
    }
}

/// Evaluates `$body` with the type `$float` standing for what the [`FloatType`] names.
#[macro_export]
macro_rules! with_float {
    ($dtype:expr, $float:ident => $body:expr) => {
        match $dtype {
            lowbit_formats::FloatType::F32 => {
                type $float = f32;
                $body
            }
            lowbit_formats::FloatType::F16 => {
                type $float = half::f16;
                $body
            }
            lowbit_formats::FloatType::BF16 => {
                type $float = half::bf16;
                $body
            }
        }
    };
}
pub use with_float;

/// `y[i] = x[i]` in another type.
pub struct Cast<'a, X, Y>(pub &'a [X], pub &'a mut [Y]);

impl<X: Float, Y: Float> Kernel for Cast<'_, X, Y> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (x, y) in self.0.iter().zip(self.1) {
            *y = Y::narrow(x.widen());
        }
    }
}

impl Tensor {
    /// The same values as `dtype`, rounded to nearest, ties to even. A tensor that has that type
    /// already shares its storage: no copy.
    ///
    /// # Errors
    /// [`KernelError::Value`] when either type is not f32, f16 or bf16.
    pub fn cast(&self, dtype: DType) -> Result<Self, KernelError> {
        if self.dtype() == dtype {
            return Ok(self.clone());
        }
        let (Some(from), Some(to)) = (FloatType::from_dtype(self.dtype()), FloatType::from_dtype(dtype))
        else {
            let want = format!("only f32, f16 and bf16 are cast to one another, not to {dtype}");
            return Err(KernelError::Value { op: "cast", operand: "x", got: self.dtype().to_string(), want });
        };
        #[cfg(feature = "gpu")]
        if let crate::Device::Gpu(gpu) = self.device() {
            return Ok(self.over(gpu.convert(self.buffer()?, self.len(), (from, to))?, dtype));
        }
        let cpu = self.device().as_cpu("cast")?;
        let mut y = Self::empty(self.shape(), dtype, self.device());
        with_float!(from, X => with_float!(to, Y => {
            let x = self.as_slice::<X>()?;
            cpu.for_each_rows(y.as_mut_slice::<Y>()?, 1, 1, |first, y| {
                cpu.isa().dispatch(Cast(&x[first..first + y.len()], y));
            });
        }));
        Ok(y)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, simd::Isa};

    /// Every f16 and bf16 with its neighbours half a step away, and one f32 to each side of both:
    /// all the places where rounding turns.
    fn turning_points() -> Vec<f32> {
        let mut points = vec![];
        for bits in 0..=u16::MAX {
            for (x, next) in [
                (f16::from_bits(bits).to_f32(), f16::from_bits(bits.wrapping_add(1)).to_f32()),
                (bf16::from_bits(bits).to_f32(), bf16::from_bits(bits.wrapping_add(1)).to_f32()),
            ] {
                let middle = ((f64::from(x) + f64::from(next)) / 2.0) as f32;
                points.extend([x, x.next_up(), x.next_down(), middle, middle.next_up(), middle.next_down()]);
            }
        }
        points
    }

    #[test]
    fn narrowing_is_as_halfs_and_widening_exact() {
        for x in turning_points() {
            let (got, want) = (<f16 as Float>::narrow(x), f16::from_f32(x));
            assert!(got.to_bits() == want.to_bits() || x.is_nan() && got.is_nan(), "{x:e}: {got:?} {want:?}");
            let (got, want) = (<bf16 as Float>::narrow(x), bf16::from_f32(x));
            assert!(got.to_bits() == want.to_bits() || x.is_nan() && got.is_nan(), "{x:e}: {got:?} {want:?}");
            assert_eq!(bf16::from_f32(x).widen().to_bits(), bf16::from_f32(x).to_f32().to_bits());
        }
    }

    #[test]
    fn tensors_convert_on_every_instruction_set() {
        let points: Vec<f32> = turning_points().into_iter().filter(|x| !x.is_nan()).collect();
        for isa in Isa::all() {
            let device = Device::cpu_with(Some(2), isa).unwrap();
            let x = Tensor::new(&points, &[points.len()], &device).unwrap();
            for dtype in [FloatType::F16, FloatType::BF16] {
                let back = x.cast(dtype.dtype()).unwrap().cast(DType::F32).unwrap();
                let want: Vec<f32> = points.iter().map(|&x| dtype.round(x)).collect();
                numcheck::assert_bits(dtype.dtype().name(), back.as_slice().unwrap(), &want);
            }
            let narrow = x.cast(DType::F16).unwrap();
            let wide: Vec<f32> =
                points.iter().map(|&x| bf16::from_f32(f16::from_f32(x).to_f32()).to_f32()).collect();
            let between = narrow.cast(DType::BF16).unwrap().cast(DType::F32).unwrap();
            numcheck::assert_bits("f16 to bf16", between.as_slice().unwrap(), &wide);
            assert_eq!(x.cast(DType::F32).unwrap().bytes().as_ptr(), x.bytes().as_ptr(), "a copy");
        }
    }

    #[test]
    fn integers_are_refused() {
        let device = Device::cpu(Some(1)).unwrap();
        let (ids, x) = (Tensor::new(&[1u32], &[1], &device), Tensor::new(&[1f32], &[1], &device));
        assert_eq!(
            ids.unwrap().cast(DType::F32).unwrap_err().to_string(),
            "cast: x is u32, but only f32, f16 and bf16 are cast to one another, not to f32"
        );
        assert_eq!(
            x.unwrap().cast(DType::U32).unwrap_err().to_string(),
            "cast: x is f32, but only f32, f16 and bf16 are cast to one another, not to u32"
        );
    }
}
