//! The compile-time configuration of the kernel, and what follows from it.

use super::super::super::problem::Problem;
use super::super::numbers::Numbers;
use crate::gpu::caps::Caps;
use crate::gpu::layout::{Codes, Layout, RUN, Scales};
use crate::ops::glu::Gate;
use lowbit_formats::FloatType;

/// Values of a row that a plane multiplies at a time, of one group or two.
pub const BLOCK: usize = 64;
/// Slices of K: each takes the blocks strided by `SLICES`, one after the other. Their sums are
/// added up in order, so that the order of all sums is the same for every number of rows of x, and
/// for every cut.
pub const SLICES: usize = 8;
/// Planes that copy the weight, and as many that copy x.
pub const COPIERS: usize = 2;
/// The most rows of x that a cube takes at a time.
pub const FEW_ROWS: usize = 32;
/// The most rows of x that the kernel takes.
pub const MOST_ROWS: usize = 256;

/// The compile-time configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StreamRows {
    pub layout: Layout,
    /// Of 16 bits.
    pub x_type: FloatType,
    pub y_type: FloatType,
    /// Rows of x per cube, in groups of 8.
    pub octets: usize,
    /// Tiles of 16 rows of the weight per cube at a time.
    pub tiles: usize,
    /// Planes per slice, which take different tiles.
    pub strips: usize,
    /// Values of a row per stage.
    pub stage: usize,
    /// Stages that shared memory holds.
    pub stages: usize,
    /// The gate by which the first half of the result's columns makes one matrix of both.
    pub glu: Option<Gate>,
}

/// True if a device has this kernel for a layout and a type of x: codes that the type has as
/// integers, in groups of which each of four units has whole words and whole pairs.
pub(super) fn supports(caps: &Caps, layout: Layout, x_type: FloatType) -> bool {
    let bits = match x_type {
        FloatType::F32 => 0,
        FloatType::F16 => 8,
        FloatType::BF16 => 6,
    };
    let scaled = matches!(layout.scales, Scales::Group { .. } | Scales::SuperWithMinima { size: 32 });
    let (part, pairs) = (part(layout), Numbers::new(layout, x_type).distance() * 2);
    caps.overlaps
        && caps.tensor_cores
        && scaled
        && matches!(layout.codes, Codes::Integer { .. })
        && layout.bits <= bits
        && (part * layout.bits).is_multiple_of(32)
        && (part * layout.bits / 32).is_power_of_two()
        && part.is_multiple_of(pairs.max(8))
}

/// Values of a group that a unit has of each of its rows.
fn part(layout: Layout) -> usize {
    layout.group_within(BLOCK) / 4
}

impl StreamRows {
    /// The cut for the product that has the least to read for the busiest multiprocessor; `None`
    /// where rows are no whole stages of 16 bytes, or shared memory has no room for two stages.
    pub fn new(caps: &Caps, problem: &Problem) -> Option<Self> {
        /// More stages only make x wait behind the weight.
        const STAGES: usize = 4;
        let Problem { m, n, layout, .. } = *problem;
        let octets = m.div_ceil(8).clamp(1, 4);
        let cost = |cut: &Self| {
            let passes = m.div_ceil(cut.m_tile());
            let rounds = (cut.groups(n) * passes).div_ceil(caps.multiprocessors);
            // Bits of the weight, and of x, which the cache has.
            rounds * (cut.rows() * (layout.bits + 1) + cut.octets * 8 * 8)
        };
        let cut = |tiles| Self::cut(caps, problem, [octets, tiles], [STAGES, 0]);
        (1..=Self::most_tiles(octets)).rev().filter_map(cut).min_by_key(cost)
    }

    /// Planes per slice, and the most tiles of each cube: registers hold the sums of so many.
    fn planes_and_tiles(octets: usize) -> (usize, usize) {
        match octets {
            1 => (2, 8),
            2 => (2, 6),
            _ => (1, 4),
        }
    }

    /// The most tiles of a cube that takes so many groups of 8 rows of x.
    pub fn most_tiles(octets: usize) -> usize {
        Self::planes_and_tiles(octets).1
    }

    /// The cut for so many groups of 8 rows of x and tiles, with as many stages up to `most` as
    /// shared memory has room for when `reserved` bytes are taken by others.
    pub fn cut(
        caps: &Caps,
        problem: &Problem,
        [octets, tiles]: [usize; 2],
        [most, reserved]: [usize; 2],
    ) -> Option<Self> {
        let Problem { k, layout, x_type, y_type, .. } = *problem;
        let strips = Self::planes_and_tiles(octets).0;
        let whole = |bytes: usize| bytes > 0 && bytes.is_multiple_of(16);
        let of_row = |values: usize| {
            let (scales, biases) = layout.elements(values / RUN);
            let (scale, bias) = layout.scale_sizes();
            [values * layout.bits / 8, scales * scale, biases * bias]
        };
        let fits = supports(caps, layout, x_type)
            && k > 0
            && k.is_multiple_of(BLOCK)
            && of_row(k).into_iter().all(|bytes| bytes.is_multiple_of(16));
        if !fits {
            return None;
        }
        let tall = tiles.div_ceil(strips) > 1;
        let stage = [512, 1024, 2048].into_iter().find(|&stage| {
            let [_, scales, biases] = of_row(stage);
            (stage > 512 || tall) && whole(scales) && biases.is_multiple_of(16)
        })?;
        let one = Self { layout, x_type, y_type, octets, tiles, strips, stage, stages: 1, glu: None };
        let room = caps.shared_memory.checked_sub(one.partial() * 4 + 256 + reserved)?;
        let stages = room / one.stage_bytes();
        (stages >= 2).then_some(Self { stages: stages.min(most), ..one })
    }

    /// The codes as tensor cores take them.
    pub fn numbers(self) -> Numbers {
        // Neighbours that need no shift are in two words.
        match self.part() {
            16.. => Numbers::unshifted(self.layout, self.x_type),
            _ => Numbers::new(self.layout, self.x_type),
        }
    }

    /// True if the sums of x are needed.
    pub fn sums(self) -> bool {
        self.numbers().zero() != 0.0 || self.layout.biased()
    }

    /// Rows of x per cube.
    pub fn m_tile(self) -> usize {
        8 * self.octets
    }

    /// Rows of the weight per cube at a time.
    pub fn rows(self) -> usize {
        16 * self.tiles
    }

    /// Columns of the result per cube at a time.
    pub fn columns(self) -> usize {
        if self.glu.is_some() { self.rows() / 2 } else { self.rows() }
    }

    /// Groups of tiles of a weight of `n` rows.
    pub fn groups(self, n: usize) -> usize {
        n.div_ceil(self.rows())
    }

    /// Tiles that a plane has at the most.
    pub fn n_tiles(self) -> usize {
        self.tiles.div_ceil(self.strips)
    }

    /// Planes that multiply.
    pub fn planes(self) -> usize {
        SLICES * self.strips
    }

    /// Units that multiply.
    pub fn multiplying(self) -> usize {
        32 * self.planes()
    }

    /// Units of a cube.
    pub fn units(self) -> usize {
        self.multiplying() + 2 * 32 * COPIERS
    }

    /// Groups of a block that have scales of their own.
    pub fn groups_of_block(self) -> usize {
        BLOCK / self.layout.group_within(BLOCK)
    }

    /// Values of such a group that a unit has of each of its rows.
    pub fn part(self) -> usize {
        part(self.layout)
    }

    /// Blocks of a stage.
    pub fn blocks(self) -> usize {
        self.stage / BLOCK
    }

    /// Bytes of the codes of a block.
    pub fn block_bytes(self) -> usize {
        BLOCK * self.layout.bits / 8
    }

    /// Bytes of a unit's part of a group.
    pub fn part_bytes(self) -> usize {
        self.part() * self.layout.bits / 8
    }

    /// Bytes from one row's codes to the next: the parts of 8 rows' units lie in different banks.
    pub fn code_pitch(self) -> usize {
        self.stage * self.layout.bits / 8 + 4 * self.part_bytes()
    }

    /// Bytes from one row of x to the next, likewise.
    pub fn x_pitch(self) -> usize {
        2 * self.stage + if self.part() == 8 { 64 } else { 16 }
    }

    /// Bytes of the scales and of the biases of a stage's row.
    pub fn scale_bytes(self) -> (usize, usize) {
        let (scales, biases) = self.layout.elements(self.stage / RUN);
        let (scale, bias) = self.layout.scale_sizes();
        (scales * scale, biases * bias)
    }

    /// Bytes of the scales and of the biases from one row to the next.
    pub fn scale_pitches(self) -> (usize, usize) {
        let pitch = |bytes: usize| if bytes.is_multiple_of(32) { bytes + 16 } else { bytes };
        let (scales, biases) = self.scale_bytes();
        (pitch(scales), pitch(biases))
    }

    /// Bytes from one block's scales to the next that are others, and after how many blocks those
    /// come: a group of 128 values or more has several blocks.
    pub fn scale_step(self) -> (usize, usize) {
        step(self.layout.elements(8).0, self.layout.scale_sizes().0)
    }

    /// The same of the biases.
    pub fn bias_step(self) -> (usize, usize) {
        step(self.layout.elements(8).1, self.layout.scale_sizes().1)
    }

    /// Floats of the sums that wait to be added up: of 8 rows of x, and of all slices.
    pub fn partial(self) -> usize {
        SLICES * 8 * self.partial_row()
    }

    /// Floats from one row of x to the next: pairs of rows lie in different banks.
    pub fn partial_row(self) -> usize {
        self.rows() + 4
    }

    fn stage_bytes(self) -> usize {
        let (scales, biases) = self.scale_pitches();
        self.rows() * (self.code_pitch() + scales + biases) + self.m_tile() * self.x_pitch() + 16
    }
}

/// [`StreamRows::scale_step`] where 4 blocks have `count` elements of `size` bytes.
fn step(count: usize, size: usize) -> (usize, usize) {
    match count {
        0 => (0, 1),
        1..4 => (size, 4 / count),
        _ => (count / 4 * size, 1),
    }
}
