//! Parts of a result's columns, each a matrix of its own, one after the other: as readers of
//! several products take them that were one.

use super::super::input::CHECK;
use crate::KernelError;
use crate::gpu::launch::LaunchArgs;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The most parts.
pub(in super::super) const PARTS: usize = 4;

/// The ends of all parts but the last; `n` where there are fewer.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
pub(super) struct Ends {
    first: u32,
    second: u32,
    third: u32,
}

impl Ends {
    /// Of parts of these widths among `n` columns; of none, all columns are one.
    pub fn new(widths: &[usize], n: usize) -> Result<Self, KernelError> {
        let (mut end, mut ends) = (0, [n; PARTS - 1]);
        for (to, width) in ends.iter_mut().zip(widths) {
            end += width;
            *to = end;
        }
        let [first, second, third] = ends;
        Ok(Self { first: CHECK.index(first)?, second: CHECK.index(second)?, third: CHECK.index(third)? })
    }
}

/// The place of row `row` and column `column` of a result of `m` rows and `n` columns.
#[cube]
pub(super) fn place(ends: &Ends, m: u32, n: u32, row: u32, column: u32) -> u32 {
    let mut start = 0u32;
    let mut end = ends.first;
    if column >= ends.first {
        start = ends.first;
        end = ends.second;
    }
    if column >= ends.second {
        start = ends.second;
        end = ends.third;
    }
    if column >= ends.third {
        start = ends.third;
        end = n;
    }
    m * start + row * (end - start) + column - start
}
