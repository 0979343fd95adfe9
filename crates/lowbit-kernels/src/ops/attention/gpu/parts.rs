//! The parts that a row's keys are summed in where these are in pages.
//!
//! They follow from the row's position and the window alone, so that a row's bits do not depend on
//! the other rows of a launch: a captured launch has cubes for [`PARTS`] of them, whatever the
//! positions are by then. Parts begin and end with pages: no tile of keys lies in two of these.

use super::operands::{SeenKeys, SeenKeysExpand, VisibleKeys};
use crate::ops::pages::gpu::PAGE;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The most parts of a row: as many are combined.
pub(in crate::ops::attention) const PARTS: usize = 32;
/// The fewest keys of a part, unless a row sees fewer: each part leaves sums that are written, read
/// again and combined. Whole pages.
const PART_KEYS: u32 = 128;

#[cube]
impl SeenKeys {
    /// The first key of the first part.
    fn first(&self) -> u32 {
        self.low / PAGE * PAGE
    }

    /// The keys of each part, but for the last.
    fn part_keys(&self) -> u32 {
        let keys = self.high - self.first();
        max(keys.div_ceil(comptime!(PARTS as u32)).div_ceil(PAGE) * PAGE, PART_KEYS)
    }

    /// The number of parts: none for a row that sees no keys.
    pub fn parts(&self) -> u32 {
        (self.high - self.first()).div_ceil(self.part_keys())
    }

    /// The keys of part `index`, as a cube goes through them; none past the last part.
    pub fn part(&self, index: u32) -> VisibleKeys {
        let keys = self.part_keys();
        let begin = min(self.first() + index * keys, self.high);
        VisibleKeys { begin, end: min(begin + keys, self.high), all_begin: self.low, all_end: self.high }
    }
}
