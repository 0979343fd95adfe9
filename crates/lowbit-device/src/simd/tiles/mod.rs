//! Units that multiply tiles of bf16: Intel's AMX, and a model of it in plain Rust for tests.
//!
//! A tile is 16 rows of 64 bytes. A product is that of AMX's TDPBF16PS:
//!
//! ```text
//! c [16][16]     f32              c[m][n] += sum over pairs p of a[m][p][0] * b[p][n][0] + a[m][p][1] * b[p][n][1]
//! a [16][16][2]  bf16, row m of x, pair p of its values
//! b [16][16][2]  bf16, pair p of the values of row n of the weight
//! ```
//!
//! Relied on, from TDPBF16PS's description in Intel's manual: the first elements of the pairs are
//! summed apart from the second ones, in the order of p, each from zero and each product added with
//! one rounding; the two sums are added, and that is added to c. Everything rounds to nearest even,
//! takes subnormal operands for zero and gives zero for a subnormal result.

#[cfg(target_arch = "x86_64")]
mod amx;
mod model;
#[cfg(test)]
mod tests;

#[cfg(target_arch = "x86_64")]
pub use amx::Amx;
#[cfg(target_arch = "x86_64")]
pub(in crate::simd) use amx::operations_per_second;
pub use model::Model;

use super::{Isa, Simd};
use half::bf16;

/// Rows of a tile, and 32-bit elements of each.
pub const TILE: usize = 16;
/// Values that a product of two tiles sums up.
pub const STEP: usize = 2 * TILE;

/// A tile of pairs, `a` or `b` above.
#[derive(Clone, Copy, Debug, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
pub struct Pairs(pub [[[bf16; 2]; TILE]; TILE]);

/// A tile of sums, `c` above.
#[derive(Clone, Copy, Debug, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
pub struct Sums(pub [[f32; TILE]; TILE]);

/// The sums of two tiles by two.
pub type Block = [[Sums; 2]; 2];

/// The start of a product's sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// None.
    Zero,
    /// The sums so far.
    Sums,
}

/// The operands of a later product, to be asked for during this one: in each step [`Ahead::SUMS`]
/// bytes of sums, for the nearest cache, and [`Ahead::OPERAND`] bytes of an operand, for the
/// second-level one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ahead<'a> {
    /// They are written and read again.
    pub sums: Option<&'a Block>,
    /// May end before all steps have asked.
    pub operand: Option<&'a Pairs>,
}

impl Ahead<'_> {
    /// Bytes of sums in a step.
    pub const SUMS: usize = 256;
    /// Bytes of an operand in a step.
    pub const OPERAND: usize = 128;
}

/// A unit's tiles, ready on this thread.
pub trait Tiles {
    /// `c[i][j] += sum over steps s of a[i][s] * b[j][s]` for `i` below `M` and `j` below `N`, both
    /// 1 or 2.
    ///
    /// One call has loads, products and stores, because between two `asm!` blocks no register may
    /// hold anything.
    ///
    /// # Panics
    /// When the operands have not all the same number of steps.
    fn multiply<const M: usize, const N: usize>(
        &mut self,
        a: [&[Pairs]; M],
        b: [&[Pairs]; N],
        c: &mut Block,
        start: Start,
        ahead: Ahead<'_>,
    );
}

/// A computation on tiles.
pub trait TileKernel {
    /// The type of its result.
    type Output;
    /// Mark implementations `#[inline(always)]`.
    fn run<S: Simd, T: Tiles>(self, simd: S, tiles: &mut T) -> Self::Output;
}

/// A unit that multiplies tiles. A value proves that the processor has it.
pub trait TileUnit: Copy + Send + Sync {
    /// Runs `kernel` with this unit's tiles, compiled for the instruction set that comes with the
    /// unit, or else for `isa`.
    fn dispatch<K: TileKernel>(self, isa: Isa, kernel: K) -> K::Output;
}

/// The operands' number of steps.
fn steps<const M: usize, const N: usize>(a: &[&[Pairs]; M], b: &[&[Pairs]; N]) -> usize {
    let steps = a[0].len();
    assert!(a.iter().chain(b).all(|operand| operand.len() == steps), "operands of {steps} steps");
    steps
}
