//! Decodes a run of [`RUN`] values, laid out as [`super::layout`] says, in registers.

use super::components::Components;
use super::float::widen;
use super::layout::{Codes, Layout, RUN, Scales};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use half::f16;
use lowbit_formats::{Codebook, FloatType};

/// `2^23` as f32: from there on, the last place of the mantissa is 1, so that an integer of 23 bits
/// can be put there. Kernels take it as an argument: CUDA's compiler folds a literal into its
/// three-way logic, and then loads the code's mask again for every value (a tenth of a mat-vec's
/// time on an H200).
pub const INTEGERS: u32 = 0x4B00_0000;

/// The bits that code `i` is shifted by when [`code`] gives it: it gives `2^shift` times the value.
pub fn shift(layout: Layout, i: usize) -> usize {
    let Codes::Integer { .. } = layout.codes else { return 0 };
    let bit = i * layout.bits % 32;
    match layout.bits {
        bits if bit + bits > 32 => 0,
        bits if bit + bits <= 23 => bit,
        _ => bit % 16,
    }
}

/// The factor of `x` that makes up for [`shift`].
pub fn unshift(layout: Layout, i: usize) -> f32 {
    1.0 / (1u32 << shift(layout, i)) as f32
}

/// The factor that makes [`code`]'s values the format's, beside [`unshift`]: as f16, e2m1's
/// exponent of 2 bits lies 14 lower, and a codebook's entries have a unit.
pub fn code_factor(layout: Layout) -> f32 {
    match layout.codes {
        Codes::E2M1 => 16384.0,
        Codes::Codebook(codebook) => codebook.unit(),
        Codes::Integer { .. } | Codes::E4M3 | Codes::Float(_) => 1.0,
    }
}

/// The factor of a group's products that makes up for the smaller numbers of [`code`] and
/// [`scale_of`].
pub fn factor(layout: Layout) -> f32 {
    let halved = matches!(layout.scales, Scales::E8M0 { infinite: false });
    code_factor(layout) * if halved { 2.0 } else { 1.0 }
}

/// A codebook's entries, 128 added: byte j of word i is entry 4 i + j.
fn words_of(codebook: Codebook) -> [u32; 4] {
    let mut words = [0; 4];
    for (code, entry) in codebook.entries().into_iter().enumerate() {
        words[code / 4] |= ((i32::from(entry) + 128) as u32) << (8 * (code % 4));
    }
    words
}

/// The words of run `run`, counted over all rows.
#[cube]
pub fn load<V: Size>(
    codes: &[Vector<u32, V>],
    run: usize,
    words: &mut Array<u32>,
    #[comptime] first: usize,
    #[comptime] layout: Layout,
) {
    let loads = comptime!(layout.bits / layout.vector());
    #[unroll]
    for load in 0..loads {
        let vector = codes[run * loads + load];
        #[unroll]
        for j in 0..comptime!(layout.vector()) {
            words[first + load * comptime!(layout.vector()) + j] = vector.extract(j);
        }
    }
}

/// e4m3 as f32: f16 has one exponent bit more, and keeps the subnormals.
#[cube]
fn e4m3(code: u32) -> f32 {
    let bits = ((code & 0x7fu32) << 7u32) | ((code & 0x80u32) << 8u32);
    let value = f32::cast_from(f16::reinterpret(u16::cast_from(bits))) * 256.0f32;
    select((code & 0x7fu32) == 0x7fu32, f32::reinterpret(0x7fc0_0000u32), value)
}

/// `2^(code - 127)`, infinite for 255; where that is finite, half of it.
#[cube]
fn e8m0(code: u32, #[comptime] infinite: bool) -> f32 {
    // The least of them, 2^-127 and 2^-128, are subnormal.
    if comptime!(infinite) {
        f32::reinterpret(max(code << 23u32, 0x40_0000u32))
    } else {
        let code = i32::cast_from(code);
        f32::reinterpret(max(code * 0x80_0000i32 - 0x80_0000i32, code * 0x20_0000i32 + 0x20_0000i32))
    }
}

/// The bits of code `i` among `words` from `first` on, at the lowest place, with others above.
#[cube]
pub fn field(
    words: &Array<u32>,
    #[comptime] first: usize,
    #[comptime] bit: usize,
    #[comptime] bits: usize,
) -> u32 {
    let word = comptime!(first + bit / 32);
    let low = comptime!((bit % 32) as u32);
    if comptime!(low == 0) {
        words[word]
    } else if comptime!(low as usize + bits > 32) {
        (words[word] >> low) | (words[comptime!(word + 1)] << comptime!(32 - low))
    } else {
        words[word] >> low
    }
}

/// The value of code `i` of the run whose words start at `first`, times `2^shift / factor`, without
/// its scale. `integers` is [`INTEGERS`].
#[cube]
pub fn code(
    words: &Array<u32>,
    #[comptime] first: usize,
    integers: u32,
    #[comptime] i: usize,
    #[comptime] layout: Layout,
) -> f32 {
    let bits = comptime!(layout.bits);
    let mask = comptime!(((1u64 << layout.bits) - 1) as u32);
    match comptime!(layout.codes) {
        Codes::Integer { zero } => {
            // Into the mantissa, where no conversion is needed; neighbours share the word's shift.
            let shift = comptime!(shift(layout, i));
            let word = field(words, first, comptime!(i * bits - shift), comptime!(bits + shift));
            let integer = (word & comptime!(mask << shift)) | integers;
            f32::reinterpret(integer) - comptime!((8_388_608 + (zero << shift)) as f32)
        }
        Codes::E2M1 => {
            let code = field(words, first, comptime!(i * bits), bits);
            let half = ((code & 7u32) << 9u32) | ((code & 8u32) << 12u32);
            f32::cast_from(f16::reinterpret(u16::cast_from(half)))
        }
        Codes::Codebook(codebook) => {
            let code = field(words, first, comptime!(i * bits), bits);
            let low = select(
                (code & 4u32) == 0u32,
                comptime!(words_of(codebook)[0]).runtime(),
                comptime!(words_of(codebook)[1]).runtime(),
            );
            let high = select(
                (code & 4u32) == 0u32,
                comptime!(words_of(codebook)[2]).runtime(),
                comptime!(words_of(codebook)[3]).runtime(),
            );
            let word = select((code & 8u32) == 0u32, low, high);
            let integer = ((word >> ((code & 3u32) << 3u32)) & 255u32) | integers;
            f32::reinterpret(integer) - comptime!((8_388_608 + 128) as f32)
        }
        Codes::E4M3 => e4m3(field(words, first, comptime!(i * bits), bits) & mask),
        Codes::Float(float) => widen(field(words, first, comptime!(i * bits), bits) & mask, float),
    }
}

/// The values of run `run` of a weight, counted over all rows. `integers` is [`INTEGERS`].
#[cube]
pub fn decode_run<S: Int, B: Int, V: Size>(
    weight: &Components<S, B, V>,
    run: usize,
    integers: u32,
    values: &mut Array<f32>,
    #[comptime] layout: Layout,
) {
    let mut words = Array::<u32>::new(comptime!(layout.bits));
    load::<V>(&weight.codes, run, &mut words, 0usize, layout);
    #[unroll]
    for group in 0..comptime!(RUN / layout.group()) {
        let scale = scale::<S, B>(&weight.scales, &weight.biases, run, group, layout);
        #[unroll]
        for i in 0..comptime!(layout.group()) {
            let i = comptime!(group * layout.group() + i);
            // Powers of two: exact.
            let value =
                code(&words, 0usize, integers, i, layout) * comptime!(unshift(layout, i) * factor(layout));
            values[i] = value * scale;
            if comptime!(layout.biased()) {
                values[i] += bias::<S, B>(&weight.scales, &weight.biases, run, group, layout);
            }
        }
    }
}

/// The scale of group `group` of run `run`, counted over all rows.
#[cube]
pub fn scale<S: Int, B: Int>(
    scales: &[S],
    biases: &[B],
    run: usize,
    #[comptime] group: usize,
    #[comptime] layout: Layout,
) -> f32 {
    match comptime!(layout.scales) {
        Scales::One => 1.0f32.runtime(),
        Scales::Group { size, .. } => {
            let at = if comptime!(size < RUN) {
                run * comptime!(layout.groups()) + group
            } else {
                run / comptime!(size / RUN)
            };
            scale_of(u32::cast_from(scales[at]), 0u32, group, layout)
        }
        Scales::E8M0 { .. } => scale_of(u32::cast_from(scales[run]), 0u32, group, layout),
        Scales::E4M3 => scale_of(u32::cast_from(scales[run * 2 + group]), 0u32, group, layout),
        Scales::Super { .. } | Scales::SuperWithMinima { .. } => {
            scale_of(u32::cast_from(scales[run]), u32::cast_from(biases[run / 8]), group, layout)
        }
    }
}

/// The scale of group `group` of a run whose elements of the scales and the biases are these: half
/// of one of e8m0 that is never infinite, for which [`factor`] makes up.
#[cube]
pub fn scale_of(scale: u32, bias: u32, #[comptime] group: usize, #[comptime] layout: Layout) -> f32 {
    match comptime!(layout.scales) {
        Scales::One => 1.0f32.runtime(),
        Scales::Group { float, .. } => widen(scale, float),
        Scales::E8M0 { infinite } => e8m0(scale, infinite),
        Scales::E4M3 => e4m3(scale),
        Scales::Super { .. } => {
            let packed = scale << comptime!(24 - 8 * group as u32);
            let signed = i32::cast_from(packed) >> 24;
            widen(bias, FloatType::F16) * f32::cast_from(signed)
        }
        Scales::SuperWithMinima { size } => {
            let code = if comptime!(size == 16) {
                (scale >> comptime!(8 * group as u32)) & 15u32
            } else {
                scale & 255u32
            };
            widen(bias & 0xffffu32, FloatType::F16) * f32::cast_from(code)
        }
    }
}

/// The bias of group `group` of run `run`, in a layout that is [biased](Layout::biased).
#[cube]
pub fn bias<S: Int, B: Int>(
    scales: &[S],
    biases: &[B],
    run: usize,
    #[comptime] group: usize,
    #[comptime] layout: Layout,
) -> f32 {
    match comptime!(layout.scales) {
        Scales::Group { size, .. } => {
            bias_of(0u32, u32::cast_from(biases[run / comptime!(size / RUN)]), group, layout)
        }
        Scales::SuperWithMinima { .. } => {
            bias_of(u32::cast_from(scales[run]), u32::cast_from(biases[run / 8]), group, layout)
        }
        _ => 0.0f32.runtime(),
    }
}

/// The bias of group `group` of a run with these elements of the scales and the biases.
#[cube]
pub fn bias_of(scale: u32, bias: u32, #[comptime] group: usize, #[comptime] layout: Layout) -> f32 {
    match comptime!(layout.scales) {
        Scales::Group { float, .. } => widen(bias, float),
        Scales::SuperWithMinima { size } => {
            let code = if comptime!(size == 16) {
                (scale >> comptime!(8 * group as u32 + 4)) & 15u32
            } else {
                scale >> 8u32
            };
            -widen(bias >> 16u32, FloatType::F16) * f32::cast_from(code)
        }
        _ => 0.0f32.runtime(),
    }
}
