//! The convolution that makes q, k and v, where the launch does that, too.
//!
//! A unit convolves the channels that it loads of a token. Those of values are its plane's own, but those of q and k are
//! read by all planes of the key head's value heads, and only one may write their new inputs over the old ones, once all
//! others have read these. So each plane counts itself once it has: the last one writes.

use super::memory::{load, store};
use super::token::{Place, rows};
use super::{FOUR, Shape, UNITS};
use crate::gpu::float::{narrow, widen};
use crate::ops::causal_conv1d::Activation;
use crate::ops::causal_conv1d::gpu::activate;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// How q, k and v are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Convolution {
    pub width: usize,
    pub activation: Option<Activation>,
}

/// What a unit has of its channels.
#[derive(CubeType)]
pub(super) struct Channels {
    /// The last `W - 1` inputs of each, oldest first.
    past: Array<f32>,
    /// What they add to the next result.
    sums: Array<f32>,
    /// What the next input is multiplied by.
    taps: Array<f32>,
}

/// All channels.
#[cube]
pub(super) fn channels(at: &Place, #[comptime] shape: Shape) -> usize {
    2usize * at.key_heads * comptime!(shape.key_dim) + at.value_heads * comptime!(shape.value_dim)
}

/// The first of the four channels that the unit has in its place `i`, and how many there are from there on: keys, then
/// queries, then values.
#[cube]
pub(super) fn block(#[comptime] i: usize, at: &Place, #[comptime] shape: Shape) -> (usize, usize) {
    let (fours, key_dim) = comptime!((shape.fours(), shape.key_dim));
    if comptime!(i < 2 * fours) {
        let (row, count) = rows(comptime!(i % fours), at, shape);
        // Queries come before keys.
        let before = if comptime!(i < fours) { at.key_heads } else { 0usize.runtime() };
        ((before + at.key_head) * key_dim + row, count)
    } else {
        let values = 2usize * at.key_heads * key_dim;
        (values + at.head * comptime!(shape.value_dim) + at.column, at.columns)
    }
}

/// Channels without inputs.
#[cube]
pub(super) fn none(#[comptime] shape: Shape) -> Channels {
    let (channels, past) = comptime!(match shape.convolution {
        Some(convolution) => (FOUR * shape.blocks(), convolution.width - 1),
        // Nothing uses them.
        None => (1, 1),
    });
    Channels {
        past: Array::new(comptime!(channels * past)),
        sums: Array::new(channels),
        taps: Array::new(channels),
    }
}

/// Loads the inputs before the first token of `sequence`.
#[cube]
pub(super) fn load_past<N: Size>(
    state: &[Vector<u32, N>],
    sequence: usize,
    own: &mut Channels,
    at: &Place,
    #[comptime] shape: Shape,
) {
    let past = comptime!(shape.past());
    let first = sequence * channels(at, shape);
    #[unroll]
    for i in 0..comptime!(shape.blocks()) {
        let (channel, count) = block(i, at, shape);
        let words = count * past;
        #[unroll]
        for j in 0..past {
            let to = comptime!((i * past + j) * FOUR);
            let (from, rest) = (first + channel, words - min(words, comptime!(j * FOUR)));
            load::<u32, N>(
                state,
                from * past + comptime!(j * FOUR),
                rest,
                &mut own.past,
                to,
                1usize,
                FloatType::F32,
            );
        }
    }
}

/// Prepares the first token's convolution from past inputs, which are loaded, and counts the plane among those that have
/// those of the key head; says whether it is the last.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube]
pub(super) fn begin<N: Size>(
    weight: &[Vector<u32, N>],
    counters: &mut [Atomic<u32>],
    counter: usize,
    own: &mut Channels,
    at: &Place,
    #[comptime] shape: Shape,
) -> bool {
    let planes = (comptime!(UNITS - 1).runtime() + PLANE_DIM) / PLANE_DIM;
    let readers = (at.value_heads / at.key_heads * comptime!(shape.cubes())) as u32 * planes;
    let first = UNIT_POS_X % PLANE_DIM == 0;
    let mut before = 0u32;
    sync_storage();
    if first {
        before = counters[counter].fetch_add(1u32);
    }
    add_past::<N>(weight, own, at, shape);
    sync_storage();
    let last = plane_sum(before) == readers - 1u32;
    if last && first {
        counters[counter].store(0u32);
    }
    last
}

/// The inverse of [`load_past`], for the channels that are this unit's to write; `all` says whether it has those of q and k.
#[cube]
pub(super) fn store_past<N: Size>(
    state: &mut [Vector<u32, N>],
    sequence: usize,
    own: &Channels,
    at: &Place,
    all: bool,
    #[comptime] shape: Shape,
) {
    let past = comptime!(shape.past());
    let first = sequence * channels(at, shape);
    // A plane's first lanes have all rows.
    let keys = all && UNIT_POS_X % PLANE_DIM < comptime!(shape.lanes as u32);
    #[unroll]
    for i in 0..comptime!(shape.blocks()) {
        let (channel, count) = block(i, at, shape);
        let mine = if comptime!(i < 2 * shape.fours()) { keys } else { at.lane == 0 };
        if mine {
            let words = count * past;
            #[unroll]
            for j in 0..past {
                let from = comptime!((i * past + j) * FOUR);
                let (to, rest) = (first + channel, words - min(words, comptime!(j * FOUR)));
                store::<u32, N>(
                    state,
                    to * past + comptime!(j * FOUR),
                    rest,
                    &own.past,
                    from,
                    1usize,
                    FloatType::F32,
                );
            }
        }
    }
}

/// Adds up what past inputs give of the next result, so that its own input has one tap left to wait for.
#[cube]
pub(super) fn add_past<N: Size>(
    weight: &[Vector<u32, N>],
    own: &mut Channels,
    at: &Place,
    #[comptime] shape: Shape,
) {
    let (past, width) = comptime!((shape.past(), shape.past() + 1));
    #[unroll]
    for i in 0..comptime!(shape.blocks()) {
        let (channel, count) = block(i, at, shape);
        let words = count * width;
        let mut taps = Array::<f32>::new(comptime!(FOUR * width));
        #[unroll]
        for j in 0..width {
            let rest = words - min(words, comptime!(j * FOUR));
            let from = channel * width + comptime!(j * FOUR);
            load::<u32, N>(weight, from, rest, &mut taps, comptime!(j * FOUR), 1usize, FloatType::F32);
        }
        #[unroll]
        for c in 0..FOUR {
            let mut sum = 0.0f32;
            #[unroll]
            for w in 0..past {
                sum = fma(taps[c * width + w], own.past[(i * FOUR + c) * past + w], sum);
            }
            own.sums[i * FOUR + c] = sum;
            own.taps[i * FOUR + c] = taps[comptime!(c * width + past)];
        }
    }
}

/// Makes a token's keys, queries and values of its inputs, rounded to their type, and its inputs past ones.
#[cube]
pub(super) fn convolve(token: &mut Array<f32>, own: &mut Channels, #[comptime] shape: Shape) {
    let past = comptime!(shape.past());
    let activation = comptime!(shape.convolution.and_then(|convolution| convolution.activation));
    #[unroll]
    for c in 0..comptime!(FOUR * shape.blocks()) {
        let x = token[c];
        let y = activate(fma(own.taps[c], x, own.sums[c]), activation);
        token[c] = widen(narrow(y, shape.dtype), shape.dtype);
        #[unroll]
        for w in 1..past {
            own.past[comptime!(c * past + w - 1)] = own.past[c * past + w];
        }
        own.past[comptime!(c * past + past - 1)] = x;
    }
}
