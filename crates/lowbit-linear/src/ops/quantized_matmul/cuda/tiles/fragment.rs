//! A unit's part of the weight, and its values as the tensor cores take them: in pairs, each
//! rounded to x's type.

use crate::gpu::components::Components;
use crate::gpu::cuda::ptx::{pack, register, scaled};
use crate::gpu::layout::{Codes, Layout, RUN, Scales};
use crate::gpu::loaded;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// The layout of a weight, and the type that its values are rounded to: that of x and y.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Decoding {
    pub layout: Layout,
    pub dtype: FloatType,
}

/// True if pairs are decoded in x's type: integers of few bits, whose scales are of that type, so
/// that one rounding remains.
fn in_pairs(layout: Layout, dtype: FloatType) -> bool {
    let most = if dtype == FloatType::F16 { 8 } else { 4 };
    matches!(layout.codes, Codes::Integer { .. })
        && matches!(layout.scales, Scales::Group { float, .. } if float == dtype)
        && layout.bits.is_power_of_two()
        && layout.bits <= most
}

/// The number of values from one of a pair to the other: decoded together, both are in the same
/// places of the halves of a word.
pub(super) fn apart(layout: Layout, dtype: FloatType) -> usize {
    if in_pairs(layout, dtype) { 16 / layout.bits } else { 1 }
}

/// A unit's loads that are not yet decoded: runs of two rows of the weight in each slot.
pub(in super::super) type Loaded<S, B> = loaded::Loaded<S, B>;

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
    loaded::none::<S, B>(comptime!(slots * 2), layout)
}

/// Copies what is in the first `slots` slots.
#[cube]
pub(in super::super) fn copy<S: Int, B: Int>(
    from: &Loaded<S, B>,
    to: &mut Loaded<S, B>,
    #[comptime] slots: usize,
    #[comptime] layout: Layout,
) {
    loaded::copy::<S, B>(from, to, comptime!(slots * 2), layout);
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
    loaded::fetch::<S, B, V>(weight, loaded, runs.0, comptime!(2 * slot), layout);
    loaded::fetch::<S, B, V>(weight, loaded, runs.1, comptime!(2 * slot + 1), layout);
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
        if comptime!(in_pairs(layout, dtype)) {
            scaling.pairs[row * 2] = u32::cast_from(loaded.scales[place * 2]) * 0x1_0001u32;
            scaling.pairs[row * 2 + 1] = u32::cast_from(loaded.biases[place]) * 0x1_0001u32;
        } else {
            #[unroll]
            for group in 0..groups {
                let (factor, offset) = loaded::scaling::<S, B>(loaded, place, group, layout);
                scaling.factors[row * groups + group] = factor;
                if comptime!(layout.biased()) {
                    scaling.offsets[row * groups + group] = offset;
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
        let groups = comptime!(row * (RUN / layout.group()));
        let place = comptime!(slot * 2 + row);
        let low = comptime!(groups + 2 * q / layout.group());
        let low = (scaling.factors[low], scaling.offsets[low]);
        let high = comptime!(groups + (2 * q + 1) / layout.group());
        let high = (scaling.factors[high], scaling.offsets[high]);
        let low = loaded::value::<S, B>(loaded, low, integers, comptime!(2 * q), place, layout);
        let high = loaded::value::<S, B>(loaded, high, integers, comptime!(2 * q + 1), place, layout);
        register(pack(low, high, dtype))
    }
}
