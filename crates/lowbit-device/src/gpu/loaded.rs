//! Runs of a weight that a unit has loaded and not yet decoded, so that loads are under way while
//! it multiplies others.

use super::components::Components;
use super::decode::{bias_of, code, factor, load, scale_of, unshift};
use super::layout::{Layout, RUN, Scales};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// Runs in places 0, 1, ..: their codes, and the elements of the scales and biases that they need.
#[derive(CubeType)]
pub struct Loaded<S: Int, B: Int> {
    pub words: Array<u32>,
    /// Two per place.
    pub scales: Array<S>,
    pub biases: Array<B>,
}

/// The loaded parts of a run beside its codes: elements of the scales and of the biases.
fn extras(layout: Layout) -> (usize, usize) {
    match layout.scales {
        Scales::One => (0, 0),
        Scales::Group { biased, .. } => (layout.groups(), biased.into()),
        Scales::E8M0 { .. } => (1, 0),
        Scales::E4M3 => (2, 0),
        Scales::Super { .. } | Scales::SuperWithMinima { .. } => (1, 1),
    }
}

/// Room for `places` runs.
#[cube]
pub fn none<S: Int, B: Int>(#[comptime] places: usize, #[comptime] layout: Layout) -> Loaded<S, B> {
    Loaded::<S, B> {
        words: Array::new(comptime!(places * layout.bits)),
        scales: Array::new(comptime!(places * 2)),
        biases: Array::new(places),
    }
}

/// Copies what is in the first `places` places.
#[cube]
pub fn copy<S: Int, B: Int>(
    from: &Loaded<S, B>,
    to: &mut Loaded<S, B>,
    #[comptime] places: usize,
    #[comptime] layout: Layout,
) {
    #[unroll]
    for i in 0..comptime!(places * layout.bits) {
        to.words[i] = from.words[i];
    }
    let (of_scales, of_biases) = comptime!(extras(layout));
    #[unroll]
    for place in 0..places {
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

/// Loads run `run`, counted over all rows, into place `place`.
#[cube]
pub fn fetch<S: Int, B: Int, V: Size>(
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
        Scales::Group { size, .. } => (size.div_ceil(RUN), size.div_ceil(RUN)),
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

/// The scale of group `group` of the run in place `place`, and its bias: 0 in a layout without
/// biases.
#[cube]
pub fn scaling<S: Int, B: Int>(
    loaded: &Loaded<S, B>,
    #[comptime] place: usize,
    #[comptime] group: usize,
    #[comptime] layout: Layout,
) -> (f32, f32) {
    let of_bias = u32::cast_from(loaded.biases[place]);
    let each = comptime!(matches!(layout.scales, Scales::E4M3 | Scales::Group { .. }));
    let of_scale = u32::cast_from(loaded.scales[comptime!(place * 2 + if each { group } else { 0 })]);
    let scale = scale_of(of_scale, of_bias, group, layout);
    let offset =
        if comptime!(layout.biased()) { bias_of(of_scale, of_bias, group, layout) } else { 0.0f32.runtime() };
    (scale, offset)
}

/// Value `i` of the run in place `place`, whose group has this scaling.
#[cube]
pub fn value<S: Int, B: Int>(
    loaded: &Loaded<S, B>,
    scaling: (f32, f32),
    integers: u32,
    #[comptime] i: usize,
    #[comptime] place: usize,
    #[comptime] layout: Layout,
) -> f32 {
    let (scale, offset) = scaling;
    let mut value = code(&loaded.words, comptime!(place * layout.bits), integers, i, layout);
    if comptime!(factor(layout) != 1.0) {
        value *= comptime!(factor(layout));
    }
    // The same product for all values whose shift is the same.
    let scale = scale * comptime!(unshift(layout, i));
    if comptime!(layout.biased()) { fma(value, scale, offset) } else { value * scale }
}
