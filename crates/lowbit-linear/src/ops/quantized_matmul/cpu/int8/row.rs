//! The product of panels and one row of x, or a few. It is bound by memory: what is read is
//! multiplied at once, half a span after half a span, so that memory never waits for a chunk to be
//! multiplied. All that a format decides is decided outside of the loop over spans.
//!
//! Floor of 4 bits in groups of 32: a span of 512 codes is read as 4 vectors and takes 8 masks, 4
//! shifts, 8 dot products and 2 fused operations, 2 codes per byte and some 20 codes per vector
//! operation.

use super::super::panels::{Epilogue, Piece, STRIPS, Strips, TALLEST, by_strips};
use super::activations::{Activations, Tile};
use super::tile;
use crate::panels::{CHUNK, PanelScales, ROWS, SPAN, Unpack, ask_ahead, half_span};
use crate::simd::{Kernel, Simd};
use std::hint::black_box;

/// Quads of half a span.
const HALF: usize = SPAN / 8;

/// A few rows of x, and the panels that they multiply, from `panel` on.
struct Rows<'a, 'y> {
    weight: Unpack<'a>,
    epilogue: Epilogue,
    panel: usize,
    x: Tile<'a>,
    y: &'a mut [&'y mut [f32]],
}

/// Codes are numbers.
const NO_TABLE: u8 = 0;
/// They are looked up, and what is found is below 128.
const NARROW_TABLE: u8 = 1;
/// Looked-up numbers may be any byte.
const WIDE_TABLE: u8 = 2;

/// Rows of x that are multiplied at once as the weight is read, at most: with a few vectors of
/// codes, two panels' sums of them and a group's products fit the registers.
pub(super) const fn most_rows(registers: usize, lanes: usize) -> usize {
    registers * lanes / ROWS / 4
}

/// The number of rows, with padding, of an x of `m` rows that is multiplied as the weight is read,
/// at most `most` at once; `None` where there are too many. Eight rows, and then up to eight more
/// while two panels are in the second-level cache, take up to an eighth less than chunks that all
/// rows share; two rows and one more a tenth less, but two and two a tenth more.
pub(super) fn padded(m: usize, most: usize) -> Option<usize> {
    let limit = if most < TALLEST { most + 1 } else { 2 * most };
    let left = m % most;
    let last = if left == 0 { 0 } else { left.next_power_of_two() };
    (m <= limit).then_some(m - left + last)
}

/// `y[m, n] = sum over k of x[m, k] * weight[n, k]` for the few rows of `piece`, which are all rows
/// of x, in these tiles.
#[inline(always)]
pub(super) fn multiply<S: Simd>(
    simd: S,
    piece: Piece<'_, '_, Activations>,
    tiles: impl Iterator<Item = (usize, usize)> + Clone,
) {
    let Piece { weight, epilogue, x, panel, y, .. } = piece;
    let n = y[0].len();
    let width = if tiles.clone().count() == 1 { n } else { epilogue.columns() };
    for first in (0..n).step_by(width) {
        let columns = first..n.min(first + width);
        let panel = panel + epilogue.panels(first, columns.len()).start;
        for (row, height) in tiles.clone() {
            let x = x.tile((row, height));
            let rows = row..y.len().min(row + height);
            let mut y: Vec<_> = y[rows].iter_mut().map(|y| &mut y[columns.clone()]).collect();
            Rows { weight, epilogue, panel, x, y: &mut y }.multiply(simd);
        }
    }
}

/// Calls the [`Product`] of `$rows`, `$M` of them, for the kind of format that they have, one of
/// these: bits per code, table, groups per span, and whether groups have biases.
macro_rules! call_product {
    ($simd:expr, $rows:expr, $M:expr; $(($bits:literal, $table:ident, $groups:literal, $biased:literal))*) => {{
        let layout = $rows.weight.layout;
        let table = match (layout.table(), layout.narrow()) {
            (None, _) => NO_TABLE,
            (Some(_), true) => NARROW_TABLE,
            (Some(_), false) => WIDE_TABLE,
        };
        match (layout.bits(), table, SPAN / layout.group(), layout.biased()) {
            $(($bits, $table, $groups, $biased) => {
                $simd.call(Product::<$bits, $table, $groups, $biased, { $M }>($rows))
            })*
            kind => unreachable!("no format is of the kind {kind:?}"),
        }
    }};
}

impl Rows<'_, '_> {
    #[inline(always)]
    fn multiply<S: Simd>(self, simd: S) {
        match self.x.height {
            1 => self.of::<S, 1>(simd),
            2 => self.of::<S, 2>(simd),
            4 => self.of::<S, 4>(simd),
            _ => self.of::<S, 8>(simd),
        }
    }

    #[inline(always)]
    fn of<S: Simd, const M: usize>(self, simd: S) {
        // A constant, so that kernels that would not fit are not compiled.
        if const { M <= most_rows(S::REGISTERS, S::LANES) } {
            call_product!(simd, self, M;
                (2, NO_TABLE, 1, false) (2, NO_TABLE, 1, true) (2, NO_TABLE, 2, true) (3, NO_TABLE, 1, true) (3, NO_TABLE, 2, false)
                (4, NO_TABLE, 1, false) (4, NO_TABLE, 1, true) (5, NO_TABLE, 1, false) (5, NO_TABLE, 1, true)
                (6, NO_TABLE, 1, true) (6, NO_TABLE, 2, false) (8, NO_TABLE, 1, false) (8, NO_TABLE, 1, true)
                (4, NARROW_TABLE, 1, false) (4, NARROW_TABLE, 2, false)
                (4, WIDE_TABLE, 1, false) (4, WIDE_TABLE, 2, false));
        } else {
            unreachable!("{M} rows of {}", most_rows(S::REGISTERS, S::LANES));
        }
    }
}

/// The product for one kind of format and `M` rows: bits per code, what codes are looked up in,
/// groups per span, and whether groups have biases.
struct Product<
    'a,
    'y,
    const BITS: usize,
    const TABLE: u8,
    const GROUPS: usize,
    const BIASED: bool,
    const M: usize,
>(Rows<'a, 'y>);

impl<const BITS: usize, const TABLE: u8, const GROUPS: usize, const BIASED: bool, const M: usize> Kernel
    for Product<'_, '_, BITS, TABLE, GROUPS, BIASED, M>
{
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Rows { weight, epilogue, panel, x, y } = self.0;
        debug_assert_eq!(Panels::<BITS, TABLE, GROUPS, BIASED, M>::SHORT > 0, weight.layout.narrow());
        let scales = Box::new([const { PanelScales::new() }; STRIPS]);
        let panels = Panels::<BITS, TABLE, GROUPS, BIASED, M> { weight, panel, x, scales };
        by_strips(simd, panels, epilogue, y);
    }
}

/// [`Rows`] without the results, and where scales are unpacked.
struct Panels<'a, const BITS: usize, const TABLE: u8, const GROUPS: usize, const BIASED: bool, const M: usize>
{
    weight: Unpack<'a>,
    panel: usize,
    x: Tile<'a>,
    scales: Box<[PanelScales; STRIPS]>,
}

impl<const BITS: usize, const TABLE: u8, const GROUPS: usize, const BIASED: bool, const M: usize> Strips<M>
    for Panels<'_, BITS, TABLE, GROUPS, BIASED, M>
{
    #[inline(always)]
    fn sums<S: Simd, const PARTS: usize>(
        &mut self,
        simd: S,
        panels: [usize; STRIPS],
    ) -> [[[S::V; M]; PARTS]; STRIPS] {
        let Self { weight, panel, x, scales } = self;
        let table = weight.layout.table().unwrap_or(&[0; 16]);
        let mut totals = [[[simd.splat(0.0); M]; PARTS]; STRIPS];
        for k in (0..weight.layout.k()).step_by(CHUNK) {
            let spans = weight.spans(k);
            let count = spans.len();
            for (scales, first) in scales.iter_mut().zip(panels) {
                weight.unpack_scales(simd, *panel + first, k, scales);
                if weight.layout.long_scales() {
                    scales.cut();
                }
            }
            // Written out: `map` of an array is not inlined, and costs as much as a span.
            let chunks: [Chunk<'_, BITS, GROUPS>; STRIPS] = [
                Chunk::new(weight.packed(*panel + panels[0], spans.clone()), &scales[0], table),
                Chunk::new(weight.packed(*panel + panels[1], spans), &scales[1], table),
            ];
            let x = x.chunk(k, weight.layout.group());
            let quads = &x.codes.as_chunks::<M>().0.as_chunks::<HALF>().0.as_chunks::<2>().0[..count];
            let groups = Groups {
                starts: &x.starts.as_chunks::<M>().0.as_chunks().0[..count],
                scales: &x.scales.as_chunks::<M>().0.as_chunks().0[..count],
                sums: &x.sums.as_chunks::<M>().0.as_chunks().0[..count],
            };
            for (span, quads) in quads.iter().enumerate() {
                // Written out: in a loop the sums would live in memory.
                let [first, second] = &mut totals;
                Self::span(simd, span, &chunks[0], (quads, &groups), first);
                Self::span(simd, span, &chunks[1], (quads, &groups), second);
            }
        }
        totals
    }
}

impl<const BITS: usize, const TABLE: u8, const GROUPS: usize, const BIASED: bool, const M: usize>
    Panels<'_, BITS, TABLE, GROUPS, BIASED, M>
{
    /// Dot products whose sum can be a short one, as [`Simd::begin_short_sum`] says.
    const SHORT: usize = match (TABLE, BITS) {
        (NO_TABLE, ..=4) => 8,
        (NO_TABLE, 5) | (NARROW_TABLE, _) => HALF,
        (NO_TABLE, 6) => 2,
        _ => 0,
    };
    /// True if that is all of a group.
    const WHOLE: bool = Self::SHORT >= 2 * HALF / GROUPS;

    /// Adds to `totals` the products of one panel's span.
    #[inline(always)]
    fn span<S: Simd, const PARTS: usize>(
        simd: S,
        span: usize,
        weight: &Chunk<'_, BITS, GROUPS>,
        x: (&[[[u32; M]; HALF]; 2], &Groups<'_, GROUPS, M>),
        totals: &mut [[S::V; M]; PARTS],
    ) {
        if M == 1 {
            return Self::parts(simd, (span, 0), weight, x, totals);
        }
        // More rows' sums of one vector of weight rows at a time fit the registers.
        for (part, totals) in totals.iter_mut().enumerate() {
            Self::parts(simd, (span, part * S::LANES), weight, x, std::array::from_mut(totals));
        }
    }

    /// As [`Self::span`], of the weight rows from `row` on.
    #[inline(always)]
    fn parts<S: Simd, const PARTS: usize>(
        simd: S,
        (span, row): (usize, usize),
        weight: &Chunk<'_, BITS, GROUPS>,
        (x, groups): (&[[[u32; M]; HALF]; 2], &Groups<'_, GROUPS, M>),
        totals: &mut [[S::V; M]; PARTS],
    ) {
        let mut products = [Self::begin(simd, &groups.starts[span][0]); PARTS];
        Self::half::<S, PARTS, 0>(simd, (span, row), weight, &x[0], &mut products);
        if GROUPS == 2 {
            Self::add(simd, (span, row), weight, (0, groups), products, totals);
            products = [Self::begin(simd, &groups.starts[span][1]); PARTS];
        }
        Self::half::<S, PARTS, HALF>(simd, (span, row), weight, &x[1], &mut products);
        Self::add(simd, (span, row), weight, (GROUPS - 1, groups), products, totals);
    }

    /// The initial values of a group's integer sums.
    #[inline(always)]
    fn begin<S: Simd>(simd: S, starts: &[i32; M]) -> [S::I; M] {
        let mut products = [simd.splat_i32(0); M];
        for (product, &start) in products.iter_mut().zip(starts) {
            let start = simd.splat_i32(start);
            *product = if Self::WHOLE { simd.begin_short_sum(start) } else { start };
        }
        products
    }

    /// Adds to `products` those of half a span, its quads from `FIRST` on, and of the weight rows
    /// from `row` on.
    #[inline(always)]
    fn half<S: Simd, const PARTS: usize, const FIRST: usize>(
        simd: S,
        (span, row): (usize, usize),
        weight: &Chunk<'_, BITS, GROUPS>,
        x: &[[u32; M]; HALF],
        products: &mut [[S::I; M]; PARTS],
    ) {
        if row == 0 {
            ask_ahead::<S, BITS>(simd, &weight.packed[span], FIRST..FIRST + HALF);
        }
        let table = (TABLE != NO_TABLE).then_some(weight.table);
        for (part, products) in products.iter_mut().enumerate() {
            let row = row + part * S::LANES;
            let codes = half_span::<S, BITS, FIRST>(simd, table, &weight.packed[span], row);
            for (m, product) in products.iter_mut().enumerate() {
                if Self::WHOLE {
                    for (&codes, x) in codes.iter().zip(x) {
                        *product = simd.short_dot4(*product, codes, simd.splat_i32(x[m] as i32));
                    }
                } else if Self::SHORT > 0 {
                    for first in (0..HALF).step_by(Self::SHORT.max(1)) {
                        let mut sum = simd.begin_short_sum(*product);
                        for (&codes, x) in codes[first..].iter().zip(&x[first..]).take(Self::SHORT) {
                            sum = simd.short_dot4(sum, codes, simd.splat_i32(x[m] as i32));
                        }
                        *product = simd.end_short_sum(*product, sum);
                    }
                } else {
                    for (&codes, x) in codes.iter().zip(x) {
                        *product = simd.dot4::<false>(*product, codes, simd.splat_i32(x[m] as i32));
                    }
                }
            }
        }
    }

    /// Adds the products of a span's group, scaled.
    #[inline(always)]
    fn add<S: Simd, const PARTS: usize>(
        simd: S,
        (span, row): (usize, usize),
        weight: &Chunk<'_, BITS, GROUPS>,
        (group, x): (usize, &Groups<'_, GROUPS, M>),
        products: [[S::I; M]; PARTS],
        totals: &mut [[S::V; M]; PARTS],
    ) {
        for (part, totals) in totals.iter_mut().enumerate() {
            let row = row + part * S::LANES;
            let scale = tile::Scale::new(simd, &weight.scales[span][group][row..]);
            for (m, total) in totals.iter_mut().enumerate() {
                let (start, product) = (simd.splat_i32(x.starts[span][group][m]), products[part][m]);
                let product = if Self::WHOLE { simd.end_short_sum(start, product) } else { product };
                *total = scale.add(simd, product, x.scales[span][group][m], *total);
                if BIASED {
                    let bias = simd.load(&weight.biases[span][group][row..]);
                    *total = simd.mul_add(bias, simd.splat(x.sums[span][group][m]), *total);
                }
            }
        }
    }
}

/// The values of a panel that are multiplied while their scales are at hand, `[span]`.
struct Chunk<'a, const BITS: usize, const GROUPS: usize> {
    packed: &'a [[[u8; 64]; BITS]],
    scales: &'a [[[f32; ROWS]; GROUPS]],
    biases: &'a [[[f32; ROWS]; GROUPS]],
    table: &'a [u8; 16],
}

impl<'a, const BITS: usize, const GROUPS: usize> Chunk<'a, BITS, GROUPS> {
    #[inline(always)]
    fn new(packed: &'a [[[u8; 64]; BITS]], scales: &'a PanelScales, table: &'a [u8; 16]) -> Self {
        // Their number is kept from the compiler: a loop of eight turns at most it writes out, and
        // then has no registers.
        let (scales, biases) = (black_box(&scales.scales[..]), black_box(&scales.biases[..]));
        Self {
            packed,
            scales: &scales.as_chunks().0[..packed.len()],
            biases: &biases.as_chunks().0[..packed.len()],
            table,
        }
    }
}

/// The fields of [`Tile`] of a chunk of rows, `[span][group][row]`.
struct Groups<'a, const GROUPS: usize, const M: usize> {
    starts: &'a [[[i32; M]; GROUPS]],
    scales: &'a [[[f32; M]; GROUPS]],
    sums: &'a [[[f32; M]; GROUPS]],
}
