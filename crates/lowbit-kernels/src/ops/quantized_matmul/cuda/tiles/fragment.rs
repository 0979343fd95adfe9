//! What a unit has of the weight, and its values as the tensor cores take them: in pairs, each
//! rounded to x's type.

use crate::gpu::components::Components;
use crate::gpu::cuda::ptx::{pack, register, scaled};
use crate::gpu::decode::{bias_of, code, factor, load, scale_of, unshift};
use crate::gpu::layout::{Codes, Layout, RUN, Scales};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// How a weight lies, and the type that its values are rounded to: that of x and y.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Decoding {
    pub layout: Layout,
    pub dtype: FloatType,
}

/// Whether pairs are decoded in x's type: integers of few bits, whose scales are of that type, so that one rounding
/// remains.
fn in_pairs(layout: Layout, dtype: FloatType) -> bool {
    let most = if dtype == FloatType::F16 { 8 } else { 4 };
    matches!(layout.codes, Codes::Integer { .. })
        && matches!(layout.scales, Scales::Group { float, .. } if float == dtype)
        && layout.bits.is_power_of_two()
        && layout.bits <= most
}

/// How many values lie from one of a pair to the other: decoded together, both are in the same places of the halves of
/// a word.
pub(super) fn apart(layout: Layout, dtype: FloatType) -> usize {
    if in_pairs(layout, dtype) { 16 / layout.bits } else { 1 }
}

/// What is loaded of a run beside its codes: elements of the planes of scales and biases.
fn extras(layout: Layout) -> (usize, usize) {
    match layout.scales {
        Scales::One => (0, 0),
        Scales::Group { biased, .. } => (1, biased.into()),
        Scales::E8M0 { .. } => (1, 0),
        Scales::E4M3 => (2, 0),
        Scales::Super { .. } | Scales::SuperWithMinima { .. } => (1, 1),
    }
}

/// What a unit has loaded and not yet decoded: runs of two rows of the weight in each slot.
#[derive(CubeType)]
pub(in super::super) struct Loaded<S: Int, B: Int> {
    words: Array<u32>,
    scales: Array<S>,
    biases: Array<B>,
}

/// The scales of the two runs that are decoded: as floats, or as pairs of bits.
#[derive(CubeType)]
pub(in super::super) struct Scaling {
    factors: Array<f32>,
    offsets: Array<f32>,
    pairs: Array<u32>,
}

/// Room for `slots` slots.
#[cube]
pub(in super::super) fn none<S: Int, B: Int>(
    #[comptime] slots: usize,
    #[comptime] layout: Layout,
) -> Loaded<S, B> {
    Loaded::<S, B> {
        words: Array::new(comptime!(slots * 2 * layout.bits)),
        scales: Array::new(comptime!(slots * 4)),
        biases: Array::new(comptime!(slots * 2)),
    }
}

/// Copies what is in the first `slots` slots.
#[cube]
pub(in super::super) fn copy<S: Int, B: Int>(
    from: &Loaded<S, B>,
    to: &mut Loaded<S, B>,
    #[comptime] slots: usize,
    #[comptime] layout: Layout,
) {
    #[unroll]
    for i in 0..comptime!(slots * 2 * layout.bits) {
        to.words[i] = from.words[i];
    }
    let (of_scales, of_biases) = comptime!(extras(layout));
    #[unroll]
    for place in 0..comptime!(slots * 2) {
        #[unroll]
        for i in 0..of_scales {
            to.scales[place * 2 + i] = from.scales[place * 2 + i];
        }
        #[unroll]
        for i in 0..of_biases {
            to.biases[place + i] = from.biases[place + i];
        }
    }
}

/// Loads a run of each of two rows into slot `slot`.
#[cube]
pub(in super::super) fn fetch<S: Int, B: Int, V: Size>(
    weight: &Components<S, B, V>,
    loaded: &mut Loaded<S, B>,
    runs: (u32, u32),
    #[comptime] slot: usize,
    #[comptime] layout: Layout,
) {
    fetch_run::<S, B, V>(weight, loaded, runs.0, comptime!(2 * slot), layout);
    fetch_run::<S, B, V>(weight, loaded, runs.1, comptime!(2 * slot + 1), layout);
}

/// Loads run `run` into place `place`.
#[cube]
fn fetch_run<S: Int, B: Int, V: Size>(
    weight: &Components<S, B, V>,
    loaded: &mut Loaded<S, B>,
    run: u32,
    #[comptime] place: usize,
    #[comptime] layout: Layout,
) {
    let run = run as usize;
    load::<V>(&weight.codes, run, &mut loaded.words, comptime!(place * layout.bits), layout);
    let (of_scales, of_biases) = comptime!(extras(layout));
    let (a_scale, a_bias) = comptime!(match layout.scales {
        Scales::Group { size, .. } => (size / RUN, size / RUN),
        _ => (1, 8),
    });
    #[unroll]
    for i in 0..of_scales {
        loaded.scales[place * 2 + i] = weight.scales[run / a_scale * of_scales + i];
    }
    #[unroll]
    for i in 0..of_biases {
        loaded.biases[place + i] = weight.biases[run / a_bias];
    }
}

/// The scales of slot `slot`.
#[cube]
pub(in super::super) fn scaling<S: Int, B: Int>(
    loaded: &Loaded<S, B>,
    #[comptime] slot: usize,
    #[comptime] decoding: Decoding,
) -> Scaling {
    let (layout, dtype) = comptime!((decoding.layout, decoding.dtype));
    let groups = comptime!(RUN / layout.group());
    let mut scaling = Scaling {
        factors: Array::new(comptime!(2 * groups)),
        offsets: Array::new(comptime!(2 * groups)),
        pairs: Array::new(4usize),
    };
    #[unroll]
    for row in 0..2usize {
        let place = comptime!(slot * 2 + row);
        let of_bias = u32::cast_from(loaded.biases[place]);
        if comptime!(in_pairs(layout, dtype)) {
            scaling.pairs[row * 2] = u32::cast_from(loaded.scales[place * 2]) * 0x1_0001u32;
            scaling.pairs[row * 2 + 1] = of_bias * 0x1_0001u32;
        } else {
            #[unroll]
            for group in 0..groups {
                let two = comptime!(matches!(layout.scales, Scales::E4M3));
                let at = comptime!(place * 2 + if two { group } else { 0 });
                let of_scale = u32::cast_from(loaded.scales[at]);
                scaling.factors[row * groups + group] = scale_of(of_scale, of_bias, group, layout);
                if comptime!(layout.biased()) {
                    scaling.offsets[row * groups + group] = bias_of(of_scale, of_bias, group, layout);
                }
            }
        }
    }
    scaling
}

/// Pair `q` of the run in place `row` of slot `slot`.
#[cube]
pub(in super::super) fn pair<S: Int, B: Int>(
    loaded: &Loaded<S, B>,
    scaling: &Scaling,
    integers: u32,
    #[comptime] q: usize,
    #[comptime] slot: usize,
    #[comptime] row: usize,
    #[comptime] decoding: Decoding,
) -> u32 {
    let (layout, dtype) = comptime!((decoding.layout, decoding.dtype));
    let first = comptime!((slot * 2 + row) * layout.bits);
    if comptime!(matches!(layout.codes, Codes::Float(_))) {
        // Of the type already.
        register(loaded.words[comptime!(first + q)])
    } else if comptime!(in_pairs(layout, dtype)) {
        let apart = comptime!(apart(layout, dtype));
        let word = loaded.words[comptime!(first + q / apart)] >> comptime!((q % apart * layout.bits) as u32);
        let (scale, bias) = (scaling.pairs[row * 2], scaling.pairs[row * 2 + 1]);
        register(scaled(word, register(scale), register(bias), layout, dtype))
    } else {
        let low = value(loaded, scaling, integers, comptime!(2 * q), first, row, layout);
        let high = value(loaded, scaling, integers, comptime!(2 * q + 1), first, row, layout);
        register(pack(low, high, dtype))
    }
}

/// Value `i` of the run whose words begin at `first`.
#[cube]
fn value<S: Int, B: Int>(
    loaded: &Loaded<S, B>,
    scaling: &Scaling,
    integers: u32,
    #[comptime] i: usize,
    #[comptime] first: usize,
    #[comptime] row: usize,
    #[comptime] layout: Layout,
) -> f32 {
    let group = comptime!(row * (RUN / layout.group()) + i / layout.group());
    let mut value = code(&loaded.words, first, integers, i, layout);
    if comptime!(factor(layout) != 1.0) {
        value *= comptime!(factor(layout));
    }
    // The same product for all values whose shift is the same.
    let factor = scaling.factors[group] * comptime!(unshift(layout, i));
    if comptime!(layout.biased()) { fma(value, factor, scaling.offsets[group]) } else { value * factor }
}
