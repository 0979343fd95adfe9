//! Floats in kernels. Buffers hold them as unsigned integers of their size, because not every
//! device stores f16 and bf16; registers hold f32.

use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use half::f16;
use lowbit_formats::FloatType;

/// A 16-bit float, or one of 32 bits, as f32.
#[cube]
pub fn widen(bits: u32, #[comptime] float: FloatType) -> f32 {
    match comptime!(float) {
        FloatType::F32 => f32::reinterpret(bits),
        FloatType::F16 => f32::cast_from(f16::reinterpret(u16::cast_from(bits))),
        FloatType::BF16 => f32::reinterpret(bits << 16u32),
    }
}

/// f32 to the bits of `float`, rounded to nearest, ties to even.
#[cube]
pub fn narrow(x: f32, #[comptime] float: FloatType) -> u32 {
    match comptime!(float) {
        FloatType::F32 => u32::reinterpret(x),
        FloatType::F16 => u32::cast_from(u16::reinterpret(f16::cast_from(x))),
        FloatType::BF16 => {
            let bits = u32::reinterpret(x);
            let rounded = (bits + 0x7fffu32 + ((bits >> 16u32) & 1u32)) >> 16u32;
            // Rounding could carry a NaN into infinity.
            let quiet = (bits >> 16u32) | 0x40u32;
            select((bits & 0x7fff_ffffu32) > 0x7f80_0000u32, quiet, rounded)
        }
    }
}

/// f32 rounded to nearest, ties to even, as an `E` of 16 bits, which is `float`. (The rounding of
/// Vulkan's conversion to bf16 is the driver's choice.)
#[cube]
pub fn rounded<E: Float>(x: f32, #[comptime] float: FloatType) -> E {
    if comptime!(float == FloatType::BF16) {
        E::reinterpret(u16::cast_from(narrow(x, float)))
    } else {
        E::cast_from(x)
    }
}

/// Element `i` of a buffer of `float`s.
#[cube]
pub fn read<S: Int>(x: &[S], i: usize, #[comptime] float: FloatType) -> f32 {
    widen(u32::cast_from(x[i]), float)
}

/// Rounds to element `i` of a buffer of `float`s.
#[cube]
pub fn write<S: Int>(y: &mut [S], i: usize, value: f32, #[comptime] float: FloatType) {
    y[i] = S::cast_from(narrow(value, float));
}

/// The `size` elements of a vector of `float`s, into `values` from `first` on.
#[cube]
pub fn unpack<S: Int, V: Size>(
    vector: Vector<S, V>,
    values: &mut Array<f32>,
    #[comptime] first: usize,
    #[comptime] size: usize,
    #[comptime] float: FloatType,
) {
    #[unroll]
    for j in 0..size {
        values[first + j] = widen(u32::cast_from(vector.extract(j)), float);
    }
}

/// A vector of `float`s, rounded from the `size` values from `first` on.
#[cube]
pub fn pack<S: Int, V: Size>(
    values: &Array<f32>,
    #[comptime] first: usize,
    #[comptime] size: usize,
    #[comptime] float: FloatType,
) -> Vector<S, V> {
    let mut vector = Vector::<S, V>::new(S::from_int(0));
    #[unroll]
    for j in 0..size {
        vector.insert(j, S::cast_from(narrow(values[first + j], float)));
    }
    vector
}

/// The bits of a NaN.
pub fn nan(float: FloatType) -> u32 {
    match float {
        FloatType::F32 => 0x7fc0_0000,
        FloatType::F16 => 0x7e00,
        FloatType::BF16 => 0x7fc0,
    }
}

/// Evaluates `$body` with the type `$storage` standing for the unsigned integer that a buffer holds
/// a [`FloatType`] in.
#[macro_export]
macro_rules! with_storage {
    ($float:expr, $storage:ident => $body:expr) => {
        match $float {
            lowbit_formats::FloatType::F32 => {
                type $storage = u32;
                $body
            }
            lowbit_formats::FloatType::F16 | lowbit_formats::FloatType::BF16 => {
                type $storage = u16;
                $body
            }
        }
    };
}
pub use with_storage;
